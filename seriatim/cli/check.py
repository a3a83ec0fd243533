"""`seriatim check`: judge committed entries that were not judged yet, by suites of expectations.

Next: operations/prove/check.py does it; operations/prove/suite_files.py finds the suites.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from seriatim import config, context, stream_files
from seriatim.cli import output, print_json, print_notice, report
from seriatim.cli.options import Json, StreamName
from seriatim.context import ConnectedStream
from seriatim.engine.findings import Finding, FindingsError, new_findings_error
from seriatim.ledger.model import Ledger, circuit_advice, describe_failed_range
from seriatim.operations.prove import suite_files
from seriatim.operations.prove.check import CheckResult, check_stream
from seriatim.operations.prove.great_expectations_suites import GreatExpectations
from seriatim.operations.report_findings import mark_reported, unreported_findings
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import open_store
from seriatim.stream_files import StreamFile


def check(stream: StreamName, json: Json = False) -> None:
    """Judge the ledger entries that no check has judged yet.

    They are judged by the suites in expectations/. The verdict is a ledger entry of its own: good
    or bad for each partition. A bad verdict (exit code 3) opens the circuit: nothing newer is
    published until the partition is repaired and checked again, or until a person accepts it. A
    check that is itself broken (exit code 2) gives no verdict at all.

    Example: seriatim check demo --json
    """
    settings = config.load_settings()
    config.arm_crash_point(settings.crash_point)
    check_and_report(stream_files.load_stream(stream, settings.streams), json=json)


def check_and_report(file: StreamFile, *, json: bool) -> CheckResult:
    """Check a stream and print the result. A bad verdict is printed, and then raised."""
    stream_files.refuse_unwritable_output(file)
    name = file.stream.name
    progress = output.RunProgress(name, "records")
    open_stream = context.ConnectedStream(file, config.load_settings(), writes_records=True)
    try:
        result = check_with_suites(open_stream, progress)
    finally:
        progress.close()
    findings = unreported_findings(open_stream.ledger, name)
    report.write_run_report(file, result.judged_after, result.sequence)
    output.print_findings(name, findings, json=json)
    # Only after they were printed: a process killed in between prints them again next time.
    mark_reported(open_stream.ledger, result.ledger.sequence)
    _print_result(name, result, findings, json=json)
    return result


def check_with_suites(
    open_stream: ConnectedStream, progress: Callable[[int, int], None]
) -> CheckResult:
    """Check a stream by its suites, with great-expectations."""
    store = open_store(open_stream.stream.output.path)
    suites = suite_files.load_suites(open_stream.stream, Path(open_stream.file.folder))
    checker = GreatExpectations(store)
    return check_stream(open_stream, suites, checker, RecordScan(store), progress)


def print_open_circuit(ledger: Ledger) -> None:
    """Print a notice if the circuit is open: what failed, and what closes it."""
    if ledger.circuit != "open":
        return
    failed_ranges = "; ".join(describe_failed_range(failed) for failed in ledger.failed_ranges[:5])
    advice = circuit_advice(ledger)
    print_notice(
        f"{ledger.stream}: the circuit is open, current stays at entry {ledger.checked} or before:"
        f" {failed_ranges}\n  next: {advice}",
        circuit="open",
        checked=ledger.checked,
        next=advice,
    )


def _print_result(
    stream: str, check_result: CheckResult, findings: list[Finding], *, json: bool
) -> None:
    """Print the result, and raise if a partition is bad or a finding is an error."""
    for note in check_result.notes:
        print_notice(f"{stream}: {note}", note=note)
    if json:
        print_json(_result_values(stream, check_result, findings))
    errors = [finding for finding in findings if finding.level == "error"]
    _raise_for_bad_partitions(stream, check_result, errors)
    print_open_circuit(check_result.ledger)
    if errors:
        raise new_findings_error(stream, errors)
    if not json:
        typer.echo(_describe_result(stream, check_result))


def _raise_for_bad_partitions(
    stream: str, check_result: CheckResult, errors: list[Finding]
) -> None:

    verdict = check_result.verdict
    bad_partitions = sorted(name for name, outcome in verdict.items() if outcome != "good")
    if not bad_partitions:
        return
    raise FindingsError(
        f"{stream}: {len(bad_partitions)} of {len(verdict)} partitions are bad:"
        f" {', '.join(bad_partitions[:10])}",
        judged=f"entries {check_result.judged_after + 1} to {check_result.judged_until}",
        checked=f"up to entry {check_result.ledger.checked}; nothing newer is published",
        findings=errors,
        next=circuit_advice(check_result.ledger),
    )


def _describe_result(stream: str, result: CheckResult) -> str:
    checked = f"checked up to entry {result.ledger.checked}"
    if result.sequence < 0:
        return f"{stream}: nothing new to judge, {checked}"
    partition_count = len(result.verdict)
    plural = "" if partition_count == 1 else "s"
    return (
        f"{stream}: good: entries {result.judged_after + 1} to {result.judged_until}:"
        f" {result.records} records in {partition_count} partition{plural},"
        f" {len(result.evidence)} promises, {result.expectations} expectations; {checked}"
    )


def _result_values(stream: str, result: CheckResult, findings: list[Finding]) -> dict[str, Any]:
    promises = [
        {
            "partition": str(evidence.partition),
            "promise": evidence.promise,
            "holds": evidence.holds,
            "broken": evidence.broken_count,
        }
        for evidence in result.evidence
    ]
    return {
        "stream": stream,
        "from": result.judged_after,
        "to": result.judged_until,
        "verdict": result.verdict,
        "records": result.records,
        "promises": promises,
        "expectations": result.expectations,
        "findings": len(findings),
        "sequence": result.sequence if result.sequence >= 0 else None,
        "checked": result.ledger.checked,
        "circuit": result.ledger.circuit,
        "notes": result.notes,
    }
