"""`seriatim check`: judge committed entries that were not judged yet, by suites of expectations.

Next: operations/prove/check.py does it; operations/prove/suite.py finds the suites.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from seriatim import config, context, stream_files
from seriatim.cli import CommandResult, JsonObject, print_notice, report
from seriatim.cli.options import AllFindings, Json, StreamName, load_stream
from seriatim.cli.output import (
    RunProgress,
    errors_among,
    print_findings,
    sequence_or_none,
)
from seriatim.context import ConnectedStream
from seriatim.engine.findings import (
    Finding,
    FindingsError,
    count_of,
    list_some,
    new_findings_error,
)
from seriatim.errors import SeriatimError
from seriatim.ledger.model import Ledger, circuit_advice, describe_failed_range
from seriatim.operations.prove.check import CheckResult, check_stream
from seriatim.operations.prove.great_expectations_suites import GreatExpectations
from seriatim.operations.prove.suite import load_suites
from seriatim.operations.report_findings import mark_reported, unreported_findings
from seriatim.ports import ProgressCallback
from seriatim.storage.record_files import record_schema
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import open_store
from seriatim.stream_files import StreamFile

BAD_PARTITIONS_NAMED_MAX = 10


def check(stream: StreamName, _all: AllFindings = False, _json: Json = False) -> CheckedEntries:
    """Judge the ledger entries that no check has judged yet.

    They are judged by the suites in expectations/. The verdict is a ledger entry of its own: good
    or bad for each partition. A bad verdict (exit code 3) opens the circuit: nothing newer is
    published until the partition is repaired and checked again, or until a person accepts it. A
    check that is itself broken (exit code 2) gives no verdict at all.

    Example: seriatim check demo --json
    """
    return check_and_report(load_stream(stream))


def check_and_report(file: StreamFile) -> CheckedEntries:
    """Check a stream, write the report, and print new findings and notices."""
    stream_files.refuse_unwritable_output(file)
    name = file.stream.name
    open_stream = context.ConnectedStream(file, config.load_settings(), writes_records=True)
    with RunProgress(name, "records") as progress:
        result = check_with_suites(open_stream, progress)
    findings = unreported_findings(open_stream.ledger, name)
    report.write_run_report(file, result.judged_after, result.sequence)
    print_findings(name, findings)
    # Only after they were printed: a process killed in between prints them again next time.
    mark_reported(open_stream.ledger, result.ledger.sequence)
    for note in result.notes:
        print_notice(f"{name}: {note}", note=note)
    checked = CheckedEntries(name, result, findings)
    if not checked.bad_partitions():
        print_open_circuit(result.ledger)
    return checked


def check_with_suites(open_stream: ConnectedStream, progress: ProgressCallback) -> CheckResult:
    """Check a stream by its suites, with great-expectations."""
    store = open_store(open_stream.stream.output.path)
    suites = load_suites(open_stream.stream, Path(open_stream.file.folder))
    runner = open_stream.runner
    addable_fields = []
    if runner.row_key_spec is not None:
        schema = record_schema(runner.columns)
        names = runner.row_key_spec.addable_record_columns
        addable_fields = [schema.field(name) for name in names]
    checker = GreatExpectations(store, addable_fields=addable_fields)
    file = open_stream.file
    with context.choose_workers(file, open_stream.settings, print_notice) as choose:
        return check_stream(
            open_stream,
            suites,
            checker,
            RecordScan(store),
            progress,
            choose_workers=choose,
            load_runner=partial(stream_files.load_runner, file),
        )


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


class CheckedEntries(CommandResult):
    """The verdict on entries that were not judged before."""

    stream: str
    result: CheckResult
    findings: list[Finding]

    def bad_partitions(self) -> list[str]:
        """The partitions whose verdict is not good."""
        verdict = self.result.verdict
        return sorted(name for name, outcome in verdict.items() if outcome != "good")

    def to_json(self) -> JsonObject:
        """The verdict, and what it is based on."""
        result = self.result
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
            "stream": self.stream,
            "from": result.judged_after,
            "to": result.judged_until,
            "verdict": result.verdict,
            "records": result.records,
            "promises": promises,
            "expectations": result.expectations,
            "findings": len(self.findings),
            "sequence": sequence_or_none(result.sequence),
            "checked": result.ledger.checked,
            "circuit": result.ledger.circuit,
            "notes": result.notes,
        }

    def render(self) -> str:
        """One line if all is good. What is bad is said by the error."""
        result = self.result
        if self.error() is not None:
            return ""
        checked = result.ledger.checked
        if result.sequence < 0:
            return f"{self.stream}: nothing new to judge, checked up to entry {checked}"
        records = count_of(result.records, "record")
        partitions = count_of(len(result.verdict), "partition")
        promises = count_of(len(result.evidence), "promise")
        expectations = count_of(result.expectations, "expectation")
        are = "is" if self._is_one_entry() else "are"
        text = (
            f"{self.stream}: {self._judged_entries()} {are} good: {records} in {partitions},"
            f" {promises}, {expectations}; the verdict is entry {result.sequence}"
        )
        if checked < result.sequence:
            # An earlier verdict is not settled yet, or entries were made meanwhile.
            text += f", checked up to entry {checked}"
        return text

    def _is_one_entry(self) -> bool:
        return self.result.judged_after + 1 == self.result.judged_until

    def _judged_entries(self) -> str:
        if self._is_one_entry():
            return f"entry {self.result.judged_until}"
        return f"entries {self.result.judged_after + 1} to {self.result.judged_until}"

    def error(self) -> SeriatimError | None:
        """Bad partitions, or findings that are errors."""
        result = self.result
        errors = errors_among(self.findings)
        bad_partitions = self.bad_partitions()
        if bad_partitions:
            bad_count = len(bad_partitions)
            partitions = count_of(len(result.verdict), "partition")
            named = list_some(bad_partitions, BAD_PARTITIONS_NAMED_MAX)
            return FindingsError(
                f"{self.stream}: {bad_count} of {partitions} bad: {named}",
                judged=self._judged_entries(),
                checked=f"up to entry {result.ledger.checked}; nothing newer is published",
                findings=errors,
                next=circuit_advice(result.ledger),
            )
        if errors:
            return new_findings_error(self.stream, errors)
        return None
