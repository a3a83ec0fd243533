"""Verdicts: how far the ledger was judged, which ranges failed, and whether the circuit is open.
Pure.

A failed range is named by its files. It is over when a person accepts it, or when repairs removed
all its files from the table and a later check found what replaced them good. A compaction only
gives it other files.

Next: ledger/model.py applies entries and calls this module; operations/prove/check.py judges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.findings import FindingsError
from seriatim.errors import ensure

# model.py imports this module at run time, so this one may import model.py for its types only.
if TYPE_CHECKING:
    from seriatim.ledger.model import Change, Entry, Ledger


class FailedRange(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"judged_until": "judged", "replaced_by_sequence": "replaced"},
):
    """A range of one partition's output that a check found bad."""

    partition: str
    epoch: int
    """The epoch that was judged. A repair or an accept meanwhile raises it, and the verdict is
    void.
    """
    start: int
    until: int
    files: tuple[str, ...] = ()
    """The record files that are bad, as far as that is known. None if a promise is broken for which
    no single file is to blame.
    """
    judged_until: int
    """The entry up to which it was judged. `accept --sequence` names it."""
    replaced_by_sequence: int = -1
    """The repair that removed the last of its files. The next good check ends the range."""


def update_verdict(entry: Entry, ledger: Ledger) -> Ledger:
    """The ledger with its circuit and how far it is checked, after an entry that is applied
    otherwise.
    """
    failed_ranges = _failed_ranges_after(entry, ledger)
    failed_ranges.sort(key=lambda failed: (failed.partition, failed.start, failed.judged_until))
    judged_until = _judged_until(entry, ledger)
    checked = ledger.checked
    if not failed_ranges:
        checked = max(checked, judged_until)
    return replace(
        ledger,
        failed_ranges=tuple(failed_ranges),
        judged_until=judged_until,
        circuit="open" if failed_ranges else "closed",
        checked=checked,
        foreign_sequence=_foreign_sequence(entry, ledger),
    )


def _foreign_sequence(entry: Entry, ledger: Ledger) -> int:
    """The entry that reported data of others in the table; -1 if a person accepted it since."""
    if any(finding.finding == "foreign" for finding in entry.findings):
        return ledger.sequence
    if entry.kind == "accept" and not entry.changes and entry.judged_until < 0:
        return -1
    return ledger.foreign_sequence


def has_nothing_to_judge(entry: Entry) -> bool:
    """Whether an entry leaves nothing to judge: it added and removed no record, state or offset."""
    if entry.removed_paths:
        return False
    return not any(
        change.certificate or change.records or change.state is not None for change in entry.changes
    )


def refuse_open_circuit(ledger: Ledger, on_check_failure: str) -> None:
    """Refuse to fold on while the circuit is open, if the stream file says so."""
    if ledger.circuit == "closed" or on_check_failure != "stop":
        return
    descriptions = [describe_failed_range(failed) for failed in ledger.failed_ranges[:10]]
    raise FindingsError(
        f'{ledger.stream}: a check failed, and the stream says on_check_failure = "stop"',
        failed="\n".join(descriptions),
        next=circuit_advice(ledger),
    )


def describe_failed_range(failed_range: FailedRange) -> str:
    """A failed range in one line, for a person."""
    replaced = "; repaired, not checked since" if failed_range.replaced_by_sequence >= 0 else ""
    return (
        f"{failed_range.partition} [{failed_range.start}, {failed_range.until}), "
        f"judged up to entry {failed_range.judged_until}{replaced}"
    )


def circuit_advice(ledger: Ledger) -> str:
    """The commands that close an open circuit."""
    ensure(bool(ledger.failed_ranges), "an open circuit has its reason", circuit=ledger.circuit)
    unrepaired = [failed for failed in ledger.failed_ranges if failed.replaced_by_sequence < 0]
    if not unrepaired:
        return f"seriatim check {ledger.stream}"
    partition_name = unrepaired[0].partition
    judged_until = max(failed.judged_until for failed in ledger.failed_ranges)
    return (
        f"seriatim repair {ledger.stream} --partition {partition_name},"
        f" then `seriatim check {ledger.stream}`;\n"
        f"or, if the output is right as it is:"
        f' seriatim accept {ledger.stream} --sequence {judged_until} --because "…"'
    )


def _failed_ranges_after(entry: Entry, ledger: Ledger) -> list[FailedRange]:
    if entry.kind == "verdict":
        return _failed_ranges_after_verdict(entry, ledger)
    if entry.kind == "accept" and entry.judged_until >= 0:
        accepted_until = entry.judged_until
        return [failed for failed in ledger.failed_ranges if failed.judged_until > accepted_until]
    if entry.kind in ("repair", "compact"):
        changes = {str(change.partition): change for change in entry.changes}
        failed_ranges = []
        for failed in ledger.failed_ranges:
            change = changes.get(failed.partition)
            failed_ranges.append(_after_replacement(failed, entry, change, ledger.sequence))
        return failed_ranges
    return list(ledger.failed_ranges)


def _failed_ranges_after_verdict(entry: Entry, ledger: Ledger) -> list[FailedRange]:
    """The failed ranges after a check: those that it did not find good again, and its own."""
    bad_partitions = {name for name, result in entry.verdict.items() if result != "good"}
    failed_partitions = {failed.partition for failed in entry.failed_ranges}
    ensure(bad_partitions == failed_partitions, "a bad verdict says what is bad")
    failed_again = {(failed.partition, failed.files) for failed in entry.failed_ranges}
    failed_ranges = []
    for failed in ledger.failed_ranges:
        was_judged_again = failed.partition in entry.verdict
        was_replaced = 0 <= failed.replaced_by_sequence <= entry.judged_until
        if was_judged_again and was_replaced:
            # What came in place of its files was judged now. If it is bad, the entry says so.
            continue
        if (failed.partition, failed.files) not in failed_again:
            failed_ranges.append(failed)
    failed_ranges.extend(entry.failed_ranges)
    return failed_ranges


def _after_replacement(
    failed_range: FailedRange,
    entry: Entry,
    change: Change | None,
    sequence: int,
) -> FailedRange:
    """A failed range after a repair or a compaction removed files from the table."""
    remaining = tuple(path for path in failed_range.files if path not in entry.removed_paths)
    if entry.kind == "compact":
        if change is None or remaining == failed_range.files:
            return failed_range
        merged_into = _paths_within(failed_range, change)
        return replace(failed_range, files=(*remaining, *merged_into))
    if failed_range.files:
        is_replaced = not remaining
    else:
        # Without files to go by: the repair wrote everything from before the range again.
        is_replaced = change is not None and 0 <= change.replaced_from <= failed_range.start
    if is_replaced:
        return replace(failed_range, files=remaining, replaced_by_sequence=sequence)
    return replace(failed_range, files=remaining)


def _paths_within(failed_range: FailedRange, change: Change) -> list[str]:
    """The new record files of a change that overlap with a failed range."""
    return [
        file.path
        for file in change.records
        if file.first_offset < failed_range.until and file.last_offset >= failed_range.start
    ]


def _judged_until(entry: Entry, ledger: Ledger) -> int:
    """The entry up to which all was judged. An entry that leaves nothing to judge counts as judged
    if everything before it was.
    """
    judged_until = ledger.judged_until
    if entry.kind == "verdict":
        judged_until = max(judged_until, entry.judged_until)
    if judged_until == ledger.sequence - 1 and has_nothing_to_judge(entry):
        return ledger.sequence
    return judged_until
