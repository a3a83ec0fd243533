"""Retention: the clock of each partition, from Kafka and the ledger. It warns, it never decides.

A warning is a fact of the moment, not of the data: it is told by every run and every look while it holds,
and no entry carries it.

Next room: core/retention.py has the arithmetic; status.py and watch.py show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core.integrity import Finding
from seriatim.core.ledger import Account, Ledger
from seriatim.core.offsets import Partition
from seriatim.core.retention import (
    HOUR_SECONDS,
    SHORT_HOURS,
    Limit,
    Retained,
    TimeLeft,
    catch_up_seconds,
    catches_up,
    duration,
    more,
    short_limits,
    times_left,
)
from seriatim.core.slice import Bounds, retired_topics
from seriatim.core.stream import Stream
from seriatim.ports import Log


class Clocked(Struct, frozen=True, kw_only=True):
    """A partition under the clock."""

    held: Retained
    left: list[TimeLeft]
    """The nearest limit first; empty: nothing waits, or nothing is dropped."""
    needed_seconds: float | None
    """What a run of now takes to fold all that waits in the stream; infinite: for ever; None: not known."""
    catches_up: bool | None
    """Whether a run of now would lose nothing of it; None: not known. One that waits for a person does not."""

    @property
    def seconds(self) -> int | None:
        """Time left, if there is a limit to it."""
        return round(self.left[0].seconds) if self.left else None


Clocks = dict[Partition, Clocked]


def clocks(ledger: Ledger, log: Log, bounds: Mapping[Partition, Bounds], now_seconds: float) -> Clocks:
    """The clock of every partition that Kafka has and nobody retired."""
    known, over = {p: ledger.account(p) for p in bounds}, retired_topics(ledger)
    running = {p: seen for p, seen in bounds.items() if not _retired(p, known[p], over)}
    found = log.retained(running, {p: _frontier(known[p], seen) for p, seen in running.items()})
    held = {p: _not_after(one, round(now_seconds * 1000)) for p, one in found.items()}
    needed = catch_up_seconds(ledger.pace.rate, [one for p, one in held.items() if not _waits(known[p])])
    return {p: _clocked(one, known[p], now_seconds, needed) for p, one in sorted(held.items())}


def _not_after(held: Retained, now_ms: int) -> Retained:
    """A producer whose clock is far ahead must not make the rate look low."""
    return held if held.newest_ms is None else replace(held, newest_ms=min(held.newest_ms, now_ms))


def _retired(partition: Partition, account: Account | None, over: set[str]) -> bool:
    return partition.topic in over or (account is not None and account.retired)


def _frontier(account: Account | None, seen: Bounds) -> int:
    """The oldest message that waits and is still there. A topic made again is unread from its first message on."""
    known = account is not None and account.topic_id == seen.topic_id
    return max(account.frontier, seen.log_start) if account and known else seen.log_start


def _waits(account: Account | None) -> bool:
    return account is not None and (account.halt is not None or account.hold is not None)


def _clocked(held: Retained, account: Account | None, now_seconds: float, needed: float | None) -> Clocked:
    left = times_left(held, now_seconds, account.bytes / account.messages if account and account.messages else None)
    in_time = False if _waits(account) and held.lag else catches_up(held, left, needed)
    return Clocked(held=held, left=left, needed_seconds=needed, catches_up=in_time)


def warnings(stream: Stream, ledger: Ledger, clocked: Clocks) -> list[Finding]:
    """Topics that run out of time, by their nearest partition. Of level warning: a run does not fail by it.

    Partitions that wait for a person have a finding of their own: another deed is needed there.
    """
    near: dict[tuple[str, bool], list[tuple[TimeLeft, Partition]]] = {}
    for place, one in clocked.items():
        short = [left for left in one.left if left.warns(stream.alerts.time_left_warning_hours)]
        if short:
            near.setdefault((place.topic, _waits(ledger.account(place))), []).append((short[0], place))
    nearest = [(*min(places), len(places) - 1) for places in near.values()]
    return [_warning(place, ledger.account(place), clocked[place], left, others) for left, place, others in nearest]


def _warning(place: Partition, account: Account | None, one: Clocked, left: TimeLeft, others: int) -> Finding:
    also = f" here, and {others} more of the topic's partitions are near" if others else ""
    kept = f"{left.limit} keeps messages for {duration(left.whole_seconds)}; {one.held.lag} wait{also}"
    return Finding(
        finding="time left",
        topic=place.topic,
        partition=place.number,
        offset=one.held.frontier,
        expected=more(left),
        found=f"{duration(left.seconds)} until Kafka drops offset {one.held.frontier}",
        cause=f"{kept}. {_chance(account, one)}",
        level="warning",
        time_left_seconds=round(left.seconds),
    )


def _chance(account: Account | None, one: Clocked) -> str:
    """Whether a run would help."""
    if account is not None and account.hold is not None:
        return f"Held by {account.hold}: no run reads it"
    if account is not None and account.halt is not None:
        return f"Halted at {account.halt.offset} ({account.halt.finding}): no run reads it until a person decides"
    if one.needed_seconds is None:
        return "How fast a run is was not measured yet"
    if one.needed_seconds == inf:
        return "More comes than a run folds: at its present rate it never catches up"
    when = duration(one.needed_seconds)
    return f"A run of now catches up in {when}" + ("" if one.catches_up else ", which is too late for some of it")


def timed(findings: list[Finding], clocked: Clocks) -> list[Finding]:
    """Findings with the time left of their partition: how long there is to act."""
    left = {str(place): one.seconds for place, one in clocked.items()}
    return [replace(f, time_left_seconds=left.get(f.place)) if f.partition >= 0 else f for f in findings]


class Short(Struct, frozen=True, kw_only=True):
    """A topic that keeps messages for less than 72 hours."""

    topic: str
    hours: dict[Limit, float]
    text: str
    next: str


def short(clocked: Clocks) -> list[Short]:
    """Topics that keep messages for less than 72 hours, and the command that makes it more."""
    topics: dict[str, list[Retained]] = {}
    for place, one in clocked.items():
        topics.setdefault(place.topic, []).append(one.held)
    found = {topic: short_limits(held) for topic, held in topics.items()}
    return [_short(topic, limits) for topic, limits in found.items() if limits]


def _short(topic: str, limits: dict[Limit, float]) -> Short:
    said = " and ".join(
        f"{limit} keeps messages for {duration(hours * HOUR_SECONDS)}" for limit, hours in limits.items()
    )
    wider = ",".join("retention.ms=604800000" if limit == "retention.ms" else f"{limit}=-1" for limit in limits)
    command = "kafka-configs.sh --bootstrap-server SERVER --alter --entity-type topics"
    return Short(
        topic=topic,
        hours=limits,
        text=f"{topic}: {said}; with less than {SHORT_HOURS} h a weekend may lose data",
        next=f"{command} --entity-name {topic} --add-config {wider}",
    )
