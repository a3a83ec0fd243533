"""Verdicts: how far the ledger is judged, what of it failed, and whether the circuit is open. Pure.

A failed stretch is named by its files. It is over when a person accepts it, or when repairs took all its files out
of the table and a later check found what came instead good. A compaction only gives it other files.

Next room: ledger.py applies entries and asks this one; steps/check.py judges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core.errors import ensure
from seriatim.core.integrity import FindingsError

if TYPE_CHECKING:  # ledger.py asks this room after it applied
    from seriatim.core.ledger import Change, Entry, Ledger


class Failed(Struct, frozen=True, kw_only=True):
    """A stretch of one partition's output that a check found bad."""

    partition: str
    epoch: int
    """As judged: whoever repairs or accepts meanwhile raises it, and the verdict is void."""
    start: int
    until: int
    files: tuple[str, ...] = ()
    """Record files with what is bad, as far as that is known. None: a promise that no file is to blame for."""
    judged: int
    """The entry up to which it was judged: what `accept --sequence` names."""
    replaced: int = -1
    """The repair that took the last of its files away; it is over with the next good check."""


def judged(entry: Entry, ledger: Ledger) -> Ledger:
    """The ledger, its circuit and how far it is checked, after an entry that is otherwise applied."""
    failed = tuple(sorted(_failed(entry, ledger), key=lambda one: (one.partition, one.start, one.judged)))
    up_to = _judged_up_to(entry, ledger)
    told = any(finding.finding == "foreign" for finding in entry.findings)
    taken_back = entry.kind == "accept" and not entry.changes and entry.judged < 0
    return replace(
        ledger,
        failed=failed,
        judged=up_to,
        circuit="open" if failed else "closed",
        checked=ledger.checked if failed else max(ledger.checked, up_to),
        foreign=ledger.sequence if told else -1 if taken_back else ledger.foreign,
    )


def is_silent(entry: Entry) -> bool:
    """Whether an entry leaves nothing to judge: no record, state or offset came or went."""
    moved = any(change.certificate or change.records or change.state is not None for change in entry.changes)
    return not moved and not entry.removed


def refuse_open(ledger: Ledger, on_check_failure: str) -> None:
    """Refuse to fold on while the circuit is open, where the stream says so."""
    if ledger.circuit == "closed" or on_check_failure != "stop":
        return
    raise FindingsError(
        f'{ledger.stream}: a check failed, and the stream says on_check_failure = "stop"',
        failed="\n".join(shown(one) for one in ledger.failed[:10]),
        next=way_out(ledger),
    )


def shown(failed: Failed) -> str:
    """A failed stretch in a line, for a person."""
    replaced = "; repaired, not checked since" if failed.replaced >= 0 else ""
    return f"{failed.partition} [{failed.start}, {failed.until}), judged up to entry {failed.judged}{replaced}"


def way_out(ledger: Ledger) -> str:
    """What closes the circuit."""
    ensure(bool(ledger.failed), "an open circuit has its reason", circuit=ledger.circuit)
    if all(one.replaced >= 0 for one in ledger.failed):
        return f"seriatim check {ledger.stream}"
    worst = max(one.judged for one in ledger.failed)
    place = next(one.partition for one in ledger.failed if one.replaced < 0)
    return (
        f"seriatim repair {ledger.stream} --partition {place}, then `seriatim check {ledger.stream}`;\n"
        f'or, if the output is right as it is: seriatim accept {ledger.stream} --sequence {worst} --because "…"'
    )


def _failed(entry: Entry, ledger: Ledger) -> list[Failed]:
    if entry.kind == "verdict":
        bad = {place for place, result in entry.verdict.items() if result != "good"}
        ensure(bad == {one.partition for one in entry.failed}, "a bad verdict says what is bad")
        again_good = [
            one for one in ledger.failed if 0 <= one.replaced <= entry.judged and one.partition in entry.verdict
        ]
        kept = [one for one in ledger.failed if one not in again_good]
        again = {(one.partition, one.files) for one in entry.failed}
        return [*(one for one in kept if (one.partition, one.files) not in again), *entry.failed]
    if entry.kind == "accept" and entry.judged >= 0:
        return [one for one in ledger.failed if one.judged > entry.judged]
    if entry.kind in ("repair", "compact"):
        changes = {str(change.partition): change for change in entry.changes}
        return [_replaced(one, entry, changes.get(one.partition), ledger.sequence) for one in ledger.failed]
    return list(ledger.failed)


def _replaced(failed: Failed, entry: Entry, change: Change | None, sequence: int) -> Failed:
    """A failed stretch after files left the table."""
    left = tuple(path for path in failed.files if path not in entry.removed)
    if entry.kind == "compact":
        if change is None or left == failed.files:
            return failed
        within = [one.path for one in change.records if one.first < failed.until and one.last >= failed.start]
        return replace(failed, files=(*left, *within))
    again = not failed.files and change is not None and 0 <= change.rewound <= failed.start
    gone = bool(failed.files) and not left
    return replace(failed, files=left, replaced=sequence if gone or again else failed.replaced)


def _judged_up_to(entry: Entry, ledger: Ledger) -> int:
    """An entry that leaves nothing to judge counts as judged with what was before it."""
    before = max(ledger.judged, entry.judged if entry.kind == "verdict" else -1)
    return ledger.sequence if before == ledger.sequence - 1 and is_silent(entry) else before
