"""`seriatim check`: gate 2. What was committed and not judged yet is judged by suites of
expectations.

Next room: operations/prove/check.py does it; seriatim/operations/prove/suite_files.py finds the
suites.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.run import Json, StreamName

if TYPE_CHECKING:
    from seriatim.engine.findings import Finding
    from seriatim.ledger.model import Ledger
    from seriatim.operations.prove.check import CheckContext, CheckResult
    from seriatim.operations.prove.gather_evidence import CheckTableSpec
    from seriatim.stream import Stream
    from seriatim.stream_files import StreamFile


@app.command()
def check(stream: StreamName, json: Json = False) -> None:
    """Judge every ledger entry that was not judged yet, by the suites in expectations/.

    The verdict is an entry of its own: good or bad per partition. A bad one (exit code 3) opens the
    circuit: nothing newer is published until the partition is repaired and checked again, or a
    person accepts it. A check that is itself broken (exit code 2) is no verdict at all.

    Example: seriatim check demo --json
    """
    from seriatim import stream_files

    Options.json = json
    settings = config.load_settings()
    config.arm_crash_point(settings.crash_point)
    check_and_report(stream_files.load_stream(stream, settings.streams), json=json)


def check_and_report(file: StreamFile, *, json: bool) -> CheckResult:
    """Check a stream and tell what came of it; what is bad raises, after it was told."""
    from seriatim import stream_files
    from seriatim.cli import output, report
    from seriatim.operations.prove.check import check_stream as run
    from seriatim.operations.report_findings import mark_reported, unreported_findings

    stream_files.refuse_unwritable_output(file)
    name, progress = file.stream.name, output.RunProgress(file.stream.name, "records")
    made = check_context(file, progress)
    try:
        done = run(made)
    finally:
        progress.close()
    found = unreported_findings(made.ledger, name)
    report.write_run_report(file, done.judged_after, done.sequence)
    output.print_findings(name, found, json=json)
    mark_reported(made.ledger, done.ledger.sequence)
    _print_result(name, done, found, json=json)
    return done


def check_context(file: StreamFile, progress: Any = None) -> CheckContext:
    """What a check is made with, for real."""
    from seriatim import context, stream_files
    from seriatim.clock import WallClock
    from seriatim.operations.prove import suite_files
    from seriatim.operations.prove.check import CheckContext
    from seriatim.operations.prove.great_expectations_suites import GreatExpectations
    from seriatim.storage.record_files import ParquetRecords
    from seriatim.storage.record_scan import RecordScan

    stream, root = file.stream, Path(file.stream.output.path)
    columns = stream_files.load_runner(file).columns
    return CheckContext(
        stream=stream.name,
        suites=suite_files.load_suites(stream, Path(file.folder)),
        ledger=context.ledger(file, with_schema=True),
        open_state=lambda: context.state(file),
        records=ParquetRecords(
            root, columns, stream.output.compression, stream.output.partition_by
        ),
        record_scanner=RecordScan(root),
        checker=GreatExpectations(root),
        table_spec=check_table_spec(stream),
        clock=WallClock(),
        new_attempt=context.new_attempt,
        peak_memory_bytes=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        progress=progress or (lambda _done, _total: None),
    )


def check_table_spec(stream: Stream) -> CheckTableSpec | None:
    """The stock machine, whose records say how they fold; None for any other."""
    from seriatim.operations.prove.gather_evidence import CheckTableSpec

    if stream.machine != "table":
        return None
    given = stream.table
    return CheckTableSpec(
        given.key, tuple(given.columns), given.before, stream.table_machine().load
    )


def print_open_circuit(ledger: Ledger) -> None:
    """A banner while the circuit is open."""
    from seriatim.ledger.verdicts import circuit_advice, describe_failed_range

    if ledger.circuit == "open":
        failed = "; ".join(describe_failed_range(one) for one in ledger.failed_ranges[:5])
        text = f"{ledger.stream}: the circuit is open, current stays at entry {ledger.checked} or before: {failed}"
        print_notice(
            f"{text}\n  next: {circuit_advice(ledger)}",
            circuit="open",
            checked=ledger.checked,
            next=circuit_advice(ledger),
        )


def _print_result(
    stream: str, check_result: CheckResult, findings: list[Finding], *, json: bool
) -> None:
    from seriatim.engine.findings import FindingsError, new_findings_error
    from seriatim.ledger.verdicts import circuit_advice

    for note in check_result.notes:
        print_notice(f"{stream}: {note}", note=note)
    if json:
        typer.echo(msgspec.json.encode(_result_values(stream, check_result, findings)).decode())
    bad = sorted(place for place, result in check_result.verdict.items() if result != "good")
    if bad:
        raise FindingsError(
            f"{stream}: {len(bad)} of {len(check_result.verdict)} partitions are bad: {', '.join(bad[:10])}",
            judged=f"entries {check_result.judged_after + 1} to {check_result.judged_until}",
            checked=f"up to entry {check_result.ledger.checked}; nothing newer is published",
            findings=[finding for finding in findings if finding.level == "error"],
            next=circuit_advice(check_result.ledger),
        )
    print_open_circuit(check_result.ledger)
    if errors := [finding for finding in findings if finding.level == "error"]:
        raise new_findings_error(stream, errors)
    if not json:
        typer.echo(_describe_result(stream, check_result))


def _describe_result(stream: str, result: CheckResult) -> str:
    checked = f"checked up to entry {result.ledger.checked}"
    if result.sequence < 0:
        return f"{stream}: nothing new to judge, {checked}"
    parts = f"{result.records} records in {len(result.verdict)} partition{'s' * (len(result.verdict) != 1)}"
    rules = f"{len(result.evidence)} promises, {result.expectations} expectations"
    return f"{stream}: good: entries {result.judged_after + 1} to {result.judged_until}: {parts}, {rules}; {checked}"


def _result_values(stream: str, result: CheckResult, findings: list[Finding]) -> dict[str, Any]:
    return {
        "stream": stream,
        "from": result.judged_after,
        "to": result.judged_until,
        "verdict": result.verdict,
        "records": result.records,
        "promises": [
            {
                "partition": str(one.partition),
                "promise": one.promise,
                "holds": one.holds,
                "broken": one.broken_count,
            }
            for one in result.evidence
        ],
        "expectations": result.expectations,
        "findings": len(findings),
        "sequence": result.sequence if result.sequence >= 0 else None,
        "checked": result.ledger.checked,
        "circuit": result.ledger.circuit,
        "notes": result.notes,
    }
