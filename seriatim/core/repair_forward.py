"""Forward: a halted partition goes on behind messages that are gone for good. Pure: everything comes in as values.

What is passed over is published as a gap of all sessions, and each of them goes on by its own snapshot or proof
(doubt.py). Records and state stay as they are: nothing is known of what was lost.

Next room: ledger.py applies the change, as that of a repair; steps/repair.py looks at Kafka and commits it.
"""

from __future__ import annotations

from seriatim.core.errors import ConfigError, broken
from seriatim.core.integrity import Mark
from seriatim.core.ledger import Account, Change, Halt
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.slice import Bounds

CLOSED = "forward"
"""How the gaps table says that a loss was passed over."""


def forward(stream: str, partition: Partition, account: Account, seen: Bounds | None, there: int | None) -> Change:
    """What moving the frontier over a loss does. `there`: the first offset from the frontier on that can be read."""
    lost = lost_by(stream, partition, account, seen, there)
    halt = account.halt or broken("only a halted partition is moved on")
    whole = "nothing" if not len(lost) else f"{len(lost)} offsets {lost}"
    cause = f"passed over: {whole}. Halted by {halt.finding}: {halt.cause}"
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=lost.end,
        topic_id=account.topic_id,
        born=account.born,
        marks=(Mark(finding=halt.finding, offset=lost.start, until=lost.end, cause=cause, closed=CLOSED),),
        log_end=max(account.log_end, seen.log_end if seen else 0),
        quarantined=account.quarantined,
        headless_since=lost.end,
    )


def lost_by(stream: str, partition: Partition, account: Account, seen: Bounds | None, there: int | None) -> OffsetRange:
    """The offsets that a forward passes over; refused where that would lose what can still be had, or helps nobody."""
    halt = account.halt
    if halt is None or account.retired:
        why = "it is retired" if account.retired else "it does not wait for anything"
        raise _refused(stream, partition, why, f"`seriatim status {stream}` shows what waits")
    if seen is None:
        told = f'if it is over for good: seriatim retire {stream} {partition.topic} --because "…"'
        raise _refused(stream, partition, "Kafka has no such topic, or it matches no more", told)
    if seen.topic_id != account.topic_id:
        told = f'if its new life is meant: seriatim accept {stream} {partition.topic} --because "…"'
        raise _refused(stream, partition, "the topic was made again", told)
    until = _until(halt, account, seen, there)
    if until > seen.log_end:
        told = (
            f"go on when producers have written past offset {account.frontier}: until then they use offsets again\n"
            f"that were folded once, which are not read. Or have the topic made again, then:\n"
            f'seriatim accept {stream} {partition.topic} --because "…"'
        )
        raise _refused(stream, partition, f"its log ends at offset {seen.log_end}, before its frontier", told)
    if until == account.frontier and halt.finding != "truncated":
        told = f"seriatim repair {stream} --partition {partition} --apply"
        raise _refused(stream, partition, f"offset {until} can be read, so nothing is lost", told)
    return OffsetRange(account.frontier, until)


def _until(halt: Halt, account: Account, seen: Bounds, there: int | None) -> int:
    """Where the partition goes on: behind the message that nobody can take, or at the first one that is there."""
    at = max(account.frontier, seen.log_start)
    if halt.finding == "poison" and at == account.frontier:
        return at + 1
    if halt.finding == "gap":
        return max(at, seen.log_end if there is None else there)
    return at


def _refused(stream: str, partition: Partition, why: str, told: str) -> ConfigError:
    return ConfigError(f"{stream}: {partition} cannot be moved forward: {why}", next=told)
