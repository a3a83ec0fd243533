"""Forward: a halted partition goes on behind messages that are gone for good. Pure: everything
comes in as values.

What is passed over is published as a gap of all sessions, and each of them goes on by its own
snapshot or proof (doubt.py). Records and state stay as they are: nothing is known of what was lost.

Next room: ledger.py applies the change, as that of a repair; operations/repair/repair.py looks at
Kafka and commits it.
"""

from __future__ import annotations

from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError, raise_broken_promise
from seriatim.ledger.model import Account, Change, Halt
from seriatim.operations.slicing import Bounds

CLOSED_BY_FORWARD = "forward"
"""How the gaps table says that a loss was passed over."""


def plan_forward(
    stream: str,
    partition: Partition,
    account: Account,
    bounds: Bounds | None,
    first_readable_offset: int | None,
) -> Change:
    """What moving the frontier over a loss does. `there`: the first offset from the frontier on
    that can be read.
    """
    lost = lost_range(stream, partition, account, bounds, first_readable_offset)
    halt = account.halt or raise_broken_promise("only a halted partition is moved on")
    whole = "nothing" if not len(lost) else f"{len(lost)} offsets {lost}"
    cause = f"passed over: {whole}. Halted by {halt.finding}: {halt.cause}"
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=lost.end,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
        marks=(
            GapMark(
                finding=halt.finding,
                offset=lost.start,
                until=lost.end,
                cause=cause,
                closed_by=CLOSED_BY_FORWARD,
            ),
        ),
        log_end=max(account.log_end, bounds.log_end if bounds else 0),
        quarantined=account.quarantined,
        headless_since=lost.end,
    )


def lost_range(
    stream: str,
    partition: Partition,
    account: Account,
    bounds: Bounds | None,
    first_readable_offset: int | None,
) -> OffsetRange:
    """The offsets that a forward passes over; refused where that would lose what can still be had,
    or helps nobody.
    """
    halt = account.halt
    if halt is None or account.retired:
        why = "it is retired" if account.retired else "it does not wait for anything"
        raise _refusal_error(stream, partition, why, f"`seriatim status {stream}` shows what waits")
    if bounds is None:
        told = f'if it is over for good: seriatim retire {stream} {partition.topic} --because "…"'
        raise _refusal_error(
            stream, partition, "Kafka has no such topic, or it matches no more", told
        )
    if bounds.topic_id != account.topic_id:
        told = f'if its new life is meant: seriatim accept {stream} {partition.topic} --because "…"'
        raise _refusal_error(stream, partition, "the topic was made again", told)
    until = _resume_offset(halt, account, bounds, first_readable_offset)
    if until > bounds.log_end:
        told = (
            f"go on when producers have written past offset {account.frontier}: until then they use offsets again\n"
            f"that were folded once, which are not read. Or have the topic made again, then:\n"
            f'seriatim accept {stream} {partition.topic} --because "…"'
        )
        raise _refusal_error(
            stream, partition, f"its log ends at offset {bounds.log_end}, before its frontier", told
        )
    if until == account.frontier and halt.finding != "truncated":
        told = f"seriatim repair {stream} --partition {partition} --apply"
        raise _refusal_error(
            stream, partition, f"offset {until} can be read, so nothing is lost", told
        )
    return OffsetRange(account.frontier, until)


def _resume_offset(
    halt: Halt, account: Account, bounds: Bounds, first_readable_offset: int | None
) -> int:
    """Where the partition goes on: behind the message that nobody can take, or at the first one
    that is there.
    """
    at = max(account.frontier, bounds.log_start)
    if halt.finding == "poison" and at == account.frontier:
        return at + 1
    if halt.finding == "gap":
        return max(at, bounds.log_end if first_readable_offset is None else first_readable_offset)
    return at


def _refusal_error(stream: str, partition: Partition, reason: str, advice: str) -> ConfigError:
    return ConfigError(f"{stream}: {partition} cannot be moved forward: {reason}", next=advice)
