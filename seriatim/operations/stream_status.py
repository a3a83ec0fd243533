"""Status: what the last look at Kafka said of a stream, as it is kept in a file, and how that
stands now. Pure.

Whoever runs or watches a stream leaves the file (`status.json` below the output path); pages read
it and ask nobody. The ledger may have moved since: what it knows (frontier, halts, circuit) is
taken from it; what only Kafka knows (log start and end, time left) is as of the look, and time left
counts down from its figure.

Next room: operations/status_file.py makes it; page/ and cli/top.py show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.alerts.incidents import Concern
from seriatim.engine.findings import Finding
from seriatim.ledger.model import Account, Ledger
from seriatim.ledger.verdicts import circuit_advice, describe_failed_range

Tone = Literal["", "good", "warn", "bad"]
QUARANTINED_LISTED_MAX = 200
"""Sessions in quarantine that the file lists; beyond it they are counted."""
KAFKA_CONCERNS = ("time left", "late", "buffer", "blind")
"""Concerns that a ledger alone cannot tell: as of the look."""
TONE_ORDER = {"bad": 0, "warn": 1, "": 2, "good": 3}


class HaltStatus(Struct, frozen=True):
    """Why a partition waits."""

    finding: str
    offset: int
    cause: str = ""


class PartitionStatus(Struct, frozen=True, kw_only=True, rename={"hold": "held", "halt": "halted"}):
    """One partition."""

    topic: str
    partition: int
    frontier: int | None = None
    log_start: int | None = None
    log_end: int | None = None
    lag: int | None = None
    time_left_seconds: int | None = None
    limit_seconds: float | None = None
    """Below this time left a person is told."""
    catches_up: bool | None = None
    topic_state: str = "live"
    epoch: int = 0
    hold: str | None = None
    halt: HaltStatus | None = None

    @property
    def partition_name(self) -> str:
        """As people write it."""
        return f"{self.topic}/{self.partition}"

    @property
    def tone(self) -> Tone:
        """How it is, as a colour."""
        if self.topic_state == "retired":
            return ""
        if self.halt or self.hold or self.topic_state in ("absent", "re-created"):
            return "bad"
        return time_tone(self) or "good"


class QuarantinedSession(Struct, frozen=True, kw_only=True):
    """A session set aside."""

    session: str
    topic: str
    partition: int
    offset: int | None = None
    finding: str | None = None


class SavedStatus(Struct, frozen=True, kw_only=True, rename={"last_run_seconds": "ran_seconds"}):
    """What the file holds."""

    stream: str
    at_seconds: float
    """When Kafka was asked."""
    sequence: int = -1
    """The ledger entry of then."""
    last_run_seconds: float | None = None
    """When a run last came to its end."""
    tier: str = ""
    verdict: str = "new"
    circuit: str = "closed"
    checked: int = 0
    rate: float | None = None
    """Messages a second, by recent entries."""
    partitions: list[PartitionStatus] = field(default_factory=list)
    quarantined: list[QuarantinedSession] = field(default_factory=list)
    quarantined_count: int = 0
    gaps_open: int | None = None
    concerns: list[Concern] = field(default_factory=list)


class StreamStatus(Struct, frozen=True, kw_only=True, rename={"last_run_seconds": "ran_seconds"}):
    """A stream as of now, as far as that is known without asking Kafka."""

    stream: str
    tier: str = ""
    verdict: str = "new"
    circuit: str = "closed"
    sequence: int = -1
    checked: int = 0
    partitions: list[PartitionStatus] = field(default_factory=list)
    lag: int | None = None
    as_of_seconds: float | None = None
    last_run_seconds: float | None = None
    rate: float | None = None
    quarantined: int = 0
    gaps_open: int | None = None
    concerns: list[Concern] = field(default_factory=list)
    sessions: list[QuarantinedSession] = field(default_factory=list)
    trouble: str = ""
    """Why nothing can be said of it."""

    @property
    def nearest(self) -> PartitionStatus | None:
        """The partition with the least time left."""
        clocked = [one for one in self.partitions if one.time_left_seconds is not None]
        return min(
            clocked, key=lambda one: (one.time_left_seconds or 0, one.partition_name), default=None
        )

    @property
    def tone(self) -> Tone:
        """How the stream is, as a colour."""
        if self.trouble or self.verdict == "hurt" or self.circuit == "open":
            return "bad"
        tones = {one.tone for one in self.partitions}
        if "bad" in tones:
            return "bad"
        return "warn" if self.concerns or self.verdict in ("new", "unknown") else "good"


def stream_status_now(
    stream: str, tier: str, status: SavedStatus | None, ledger: Ledger | None, now_seconds: float
) -> StreamStatus:
    """A stream as of now. `ledger` is given where it is newer than the status file, or where there
    is none.
    """
    if status is None and ledger is None:
        return StreamStatus(stream=stream, tier=tier)
    seen = {one.partition_name: one for one in status.partitions} if status else {}
    passed = max(0.0, now_seconds - status.at_seconds) if status else 0.0
    places = [*_with_ledger(seen, ledger)] if ledger else [*seen.values()]
    places = [_with_time_elapsed(one, passed) for one in places]
    status = status or SavedStatus(stream=stream, at_seconds=0.0, quarantined_count=-1)
    return StreamStatus(
        stream=stream,
        tier=tier,
        verdict=stream_verdict(ledger) if ledger else status.verdict,
        circuit=ledger.circuit if ledger else status.circuit,
        sequence=ledger.sequence if ledger else status.sequence,
        checked=ledger.checked if ledger else status.checked,
        partitions=places,
        lag=sum(one.lag or 0 for one in places) if places else None,
        as_of_seconds=status.at_seconds or None,
        last_run_seconds=max(
            status.last_run_seconds or 0.0, ledger.pace.at_seconds if ledger else 0.0
        )
        or None,
        rate=ledger.pace.rate if ledger else status.rate,
        quarantined=_quarantined_count(ledger) if ledger else status.quarantined_count,
        gaps_open=status.gaps_open,
        concerns=[*_concerns(stream, status, places, ledger)],
        sessions=status.quarantined,
    )


def stream_verdict(ledger: Ledger) -> str:
    """One word for the whole stream: good, hurt (something waits), or new (never run)."""
    if ledger.sequence < 0:
        return "new"
    live = [account for account in ledger.partitions.values() if not account.retired]
    hurt = (
        ledger.foreign_sequence >= 0
        or bool(ledger.failed_ranges)
        or any(account.halt or account.quarantined for account in live)
    )
    return "hurt" if hurt else "good"


def time_tone(partition: PartitionStatus) -> Tone:
    """The colour of time left: red below the stream's limit, yellow below twice as much."""
    if partition.time_left_seconds is None or partition.limit_seconds is None:
        return ""
    if partition.time_left_seconds <= partition.limit_seconds:
        return "bad"
    return "warn" if partition.time_left_seconds <= 2 * partition.limit_seconds else ""


def urgent_first(statuses: Iterable[StreamStatus]) -> list[StreamStatus]:
    """What needs a person first, then what has least time left, then by name."""

    def weight(one: StreamStatus) -> tuple[int, float, str]:
        left = one.nearest.time_left_seconds if one.nearest else None
        return TONE_ORDER[one.tone], float("inf") if left is None else left, one.stream

    return sorted(statuses, key=weight)


def _with_ledger(
    saved_partitions: dict[str, PartitionStatus], ledger: Ledger
) -> Iterable[PartitionStatus]:
    """Partitions with what the ledger knows by now."""
    for place in sorted({*saved_partitions, *ledger.partitions}, key=_partition_sort_key):
        topic, _, number = place.rpartition("/")
        one = saved_partitions.get(place) or PartitionStatus(topic=topic, partition=int(number))
        account = ledger.partitions.get(place)
        yield _with_account(one, account) if account else one


def _with_account(partition: PartitionStatus, account: Account) -> PartitionStatus:
    end = max(partition.log_end or 0, account.log_end, account.frontier)
    halt = account.halt
    return replace(
        partition,
        frontier=account.frontier,
        log_end=end,
        lag=end - account.frontier,
        time_left_seconds=partition.time_left_seconds if end > account.frontier else None,
        topic_state="retired" if account.retired else partition.topic_state,
        epoch=account.epoch,
        hold=account.hold,
        halt=HaltStatus(halt.finding, halt.offset, halt.cause) if halt else None,
    )


def _partition_sort_key(partition_name: str) -> tuple[str, int]:
    topic, _, number = partition_name.rpartition("/")
    return topic, int(number)


def _with_time_elapsed(partition: PartitionStatus, elapsed_seconds: float) -> PartitionStatus:
    left = partition.time_left_seconds
    return (
        partition
        if left is None
        else replace(partition, time_left_seconds=max(0, round(left - elapsed_seconds)))
    )


def _quarantined_count(ledger: Ledger) -> int:
    return sum(account.quarantined for account in ledger.partitions.values() if not account.retired)


def _concerns(
    stream: str, status: SavedStatus, partitions: list[PartitionStatus], ledger: Ledger | None
) -> Iterable[Concern]:
    """What needs a person; a halt with the very command that its finding names."""
    for one in partitions:
        if one.halt and one.topic_state != "retired":
            yield _halt_concern(stream, one, one.halt)
    if ledger is None:
        yield from (one for one in status.concerns if one.kind != "halted")
        return
    yield from (one for one in status.concerns if one.kind in KAFKA_CONCERNS)
    for one in partitions:
        if one.hold:
            yield Concern(
                kind="held",
                location=one.partition_name,
                text=f"held by {one.hold}",
                next=f"seriatim status {stream}",
            )
    if ledger.circuit == "open":
        said = "; ".join(describe_failed_range(one) for one in ledger.failed_ranges[:3])
        text = f"the circuit is open, publishing waits: a check failed: {said}"
        yield Concern(kind="circuit", text=text, next=circuit_advice(ledger))
    if count := _quarantined_count(ledger):
        text = f"{count} session{'s' * (count > 1)} in quarantine until the next snapshot"
        yield Concern(kind="quarantine", text=text, next=f"seriatim status {stream} lists them")


def _halt_concern(stream: str, partition: PartitionStatus, halt: HaltStatus) -> Concern:
    finding = Finding(
        finding=halt.finding,
        topic=partition.topic,
        partition=partition.partition,
        offset=halt.offset,
    )
    text = f"at offset {halt.offset}: {halt.finding}" + (f", {halt.cause}" if halt.cause else "")
    return Concern(
        kind="halted", location=partition.partition_name, text=text, next=finding.advice(stream)
    )
