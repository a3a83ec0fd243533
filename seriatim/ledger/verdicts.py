"""Verdicts: how far the ledger is judged, what of it failed, and whether the circuit is open. Pure.

A failed stretch is named by its files. It is over when a person accepts it, or when repairs took
all its files out of the table and a later check found what came instead good. A compaction only
gives it other files.

Next room: ledger.py applies entries and asks this one; operations/prove/check.py judges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.findings import FindingsError
from seriatim.errors import ensure

if TYPE_CHECKING:  # ledger.py asks this room after it applied
    from seriatim.ledger.model import Change, Entry, Ledger


class FailedRange(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"judged_until": "judged", "replaced_by_sequence": "replaced"},
):
    """A stretch of one partition's output that a check found bad."""

    partition: str
    epoch: int
    """As judged: whoever repairs or accepts meanwhile raises it, and the verdict is void."""
    start: int
    until: int
    files: tuple[str, ...] = ()
    """Record files with what is bad, as far as that is known. None: a promise that no file is to
    blame for.
    """
    judged_until: int
    """The entry up to which it was judged: what `accept --sequence` names."""
    replaced_by_sequence: int = -1
    """The repair that took the last of its files away; it is over with the next good check."""


def update_verdict(entry: Entry, ledger: Ledger) -> Ledger:
    """The ledger, its circuit and how far it is checked, after an entry that is otherwise applied."""
    failed = tuple(
        sorted(
            _failed_ranges_after(entry, ledger),
            key=lambda one: (one.partition, one.start, one.judged_until),
        )
    )
    up_to = _judged_until(entry, ledger)
    told = any(finding.finding == "foreign" for finding in entry.findings)
    taken_back = entry.kind == "accept" and not entry.changes and entry.judged_until < 0
    return replace(
        ledger,
        failed_ranges=failed,
        judged_until=up_to,
        circuit="open" if failed else "closed",
        checked=ledger.checked if failed else max(ledger.checked, up_to),
        foreign_sequence=ledger.sequence if told else -1 if taken_back else ledger.foreign_sequence,
    )


def has_nothing_to_judge(entry: Entry) -> bool:
    """Whether an entry leaves nothing to judge: no record, state or offset came or went."""
    moved = any(
        change.certificate or change.records or change.state is not None for change in entry.changes
    )
    return not moved and not entry.removed_paths


def refuse_open_circuit(ledger: Ledger, on_check_failure: str) -> None:
    """Refuse to fold on while the circuit is open, where the stream says so."""
    if ledger.circuit == "closed" or on_check_failure != "stop":
        return
    raise FindingsError(
        f'{ledger.stream}: a check failed, and the stream says on_check_failure = "stop"',
        failed="\n".join(describe_failed_range(one) for one in ledger.failed_ranges[:10]),
        next=circuit_advice(ledger),
    )


def describe_failed_range(failed_range: FailedRange) -> str:
    """A failed stretch in a line, for a person."""
    replaced = "; repaired, not checked since" if failed_range.replaced_by_sequence >= 0 else ""
    return f"{failed_range.partition} [{failed_range.start}, {failed_range.until}), judged up to entry {failed_range.judged_until}{replaced}"


def circuit_advice(ledger: Ledger) -> str:
    """What closes the circuit."""
    ensure(bool(ledger.failed_ranges), "an open circuit has its reason", circuit=ledger.circuit)
    if all(one.replaced_by_sequence >= 0 for one in ledger.failed_ranges):
        return f"seriatim check {ledger.stream}"
    worst = max(one.judged_until for one in ledger.failed_ranges)
    place = next(one.partition for one in ledger.failed_ranges if one.replaced_by_sequence < 0)
    return (
        f"seriatim repair {ledger.stream} --partition {place}, then `seriatim check {ledger.stream}`;\n"
        f'or, if the output is right as it is: seriatim accept {ledger.stream} --sequence {worst} --because "…"'
    )


def _failed_ranges_after(entry: Entry, ledger: Ledger) -> list[FailedRange]:
    if entry.kind == "verdict":
        bad = {place for place, result in entry.verdict.items() if result != "good"}
        ensure(
            bad == {one.partition for one in entry.failed_ranges}, "a bad verdict says what is bad"
        )
        again_good = [
            one
            for one in ledger.failed_ranges
            if 0 <= one.replaced_by_sequence <= entry.judged_until
            and one.partition in entry.verdict
        ]
        kept = [one for one in ledger.failed_ranges if one not in again_good]
        again = {(one.partition, one.files) for one in entry.failed_ranges}
        return [
            *(one for one in kept if (one.partition, one.files) not in again),
            *entry.failed_ranges,
        ]
    if entry.kind == "accept" and entry.judged_until >= 0:
        return [one for one in ledger.failed_ranges if one.judged_until > entry.judged_until]
    if entry.kind in ("repair", "compact"):
        changes = {str(change.partition): change for change in entry.changes}
        return [
            _after_replacement(one, entry, changes.get(one.partition), ledger.sequence)
            for one in ledger.failed_ranges
        ]
    return list(ledger.failed_ranges)


def _after_replacement(
    failed_range: FailedRange, entry: Entry, change: Change | None, sequence: int
) -> FailedRange:
    """A failed stretch after files left the table."""
    left = tuple(path for path in failed_range.files if path not in entry.removed_paths)
    if entry.kind == "compact":
        if change is None or left == failed_range.files:
            return failed_range
        within = [
            one.path
            for one in change.records
            if one.first_offset < failed_range.until and one.last_offset >= failed_range.start
        ]
        return replace(failed_range, files=(*left, *within))
    again = (
        not failed_range.files
        and change is not None
        and 0 <= change.replaced_from <= failed_range.start
    )
    gone = bool(failed_range.files) and not left
    return replace(
        failed_range,
        files=left,
        replaced_by_sequence=sequence if gone or again else failed_range.replaced_by_sequence,
    )


def _judged_until(entry: Entry, ledger: Ledger) -> int:
    """An entry that leaves nothing to judge counts as judged with what was before it."""
    before = max(ledger.judged_until, entry.judged_until if entry.kind == "verdict" else -1)
    return (
        ledger.sequence if before == ledger.sequence - 1 and has_nothing_to_judge(entry) else before
    )
