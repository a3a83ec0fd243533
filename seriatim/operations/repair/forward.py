"""Forward: a halted partition goes on behind messages that are lost for good.

What is passed over is published as a gap of all sessions. Each session goes on by its own next
snapshot or proof (engine/rules.py). Records and state stay as they are, because nothing is
known of what was lost. This module is pure: everything comes in as values.

Next: ledger/model.py applies the change, like that of a repair; operations/repair/damage.py looks
at Kafka, and operations/repair/refold.py commits.
"""

from __future__ import annotations

from msgspec.structs import replace

from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.errors import ConfigError, raise_broken_promise
from seriatim.ledger.model import Account, Change, Halt, unmoved_change

CLOSED_BY_FORWARD = "forward"
"""How the gaps table says that a loss was passed over."""


def plan_forward(
    stream: str,
    partition: Partition,
    account: Account,
    bounds: Bounds | None,
    first_readable_offset: int | None,
) -> Change:
    """The change that moves the frontier over a loss.

    `first_readable_offset` is the first offset from the frontier on that can be read, None if there
    is none. What `lost_range` refuses is refused.
    """
    lost = lost_range(stream, partition, account, bounds, first_readable_offset)
    halt = account.halt or raise_broken_promise("only a halted partition is moved on")
    passed = f"{len(lost)} offsets {lost}" if len(lost) else "nothing"
    mark = GapMark(
        finding=halt.finding,
        offset=lost.start,
        until=lost.end,
        cause=f"passed over: {passed}. Halted by {halt.finding}: {halt.cause}",
        closed_by=CLOSED_BY_FORWARD,
    )
    log_end = account.log_end
    if bounds is not None:
        log_end = max(log_end, bounds.log_end)
    return replace(
        unmoved_change(partition, account),
        until=lost.end,
        marks=(mark,),
        log_end=log_end,
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
    """The offsets that a forward passes over.

    A forward is refused where it would lose messages that can still be read, and where it would not
    help: the partition is not halted, or its topic is gone, was created again, or has a log that
    ends before the frontier.
    """
    halt = account.halt
    if account.retired:
        advice = f"`seriatim status {stream}` shows what waits"
        raise _refusal_error(stream, partition, "it is retired", advice)
    if halt is None:
        advice = f"`seriatim status {stream}` shows what waits"
        raise _refusal_error(stream, partition, "it does not wait for anything", advice)
    if bounds is None:
        reason = "Kafka has no such topic, or it matches no more"
        advice = f'if it is over for good: seriatim retire {stream} {partition.topic} --because "…"'
        raise _refusal_error(stream, partition, reason, advice)
    if bounds.topic_id != account.topic_id:
        reason = "the topic was made again"
        advice = (
            f'if its new life is meant: seriatim accept {stream} {partition.topic} --because "…"'
        )
        raise _refusal_error(stream, partition, reason, advice)
    until = _resume_offset(halt, account, bounds, first_readable_offset)
    if until > bounds.log_end:
        reason = f"its log ends at offset {bounds.log_end}, before its frontier"
        advice = (
            f"go on when producers have written past offset {account.frontier}: until then they"
            " use offsets again\n"
            "that were folded once, which are not read. Or have the topic made again, then:\n"
            f'seriatim accept {stream} {partition.topic} --because "…"'
        )
        raise _refusal_error(stream, partition, reason, advice)
    if until == account.frontier and halt.finding != "truncated":
        reason = f"offset {until} can be read, so nothing is lost"
        advice = f"seriatim repair {stream} --partition {partition} --apply"
        raise _refusal_error(stream, partition, reason, advice)
    return OffsetRange(account.frontier, until)


def _resume_offset(
    halt: Halt, account: Account, bounds: Bounds, first_readable_offset: int | None
) -> int:
    """Where the partition goes on: after the message that cannot be folded, or at the first one
    that can be read.
    """
    offset = max(account.frontier, bounds.log_start)
    if halt.finding == "poison" and offset == account.frontier:
        return offset + 1
    if halt.finding == "gap":
        if first_readable_offset is None:
            return max(offset, bounds.log_end)
        return max(offset, first_readable_offset)
    return offset


def _refusal_error(stream: str, partition: Partition, reason: str, advice: str) -> ConfigError:
    return ConfigError(f"{stream}: {partition} cannot be moved forward: {reason}", next=advice)
