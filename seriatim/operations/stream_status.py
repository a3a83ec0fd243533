"""Stream status: what the newest look at Kafka said about a stream, and how that stands now. All
functions are pure.

Every process that runs or watches a stream writes the file `status.json` below the output path.
Pages read it and do not ask Kafka. The ledger may have moved since: what it knows (frontier, halts,
circuit) is taken from it. What only Kafka knows (log start and end, time left) is as of the look,
and time left counts down from there.

Next: operations/status_file.py makes the content of the file; web/ and cli/top.py show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import Concern, Finding
from seriatim.ledger.model import Account, Ledger, circuit_advice, describe_failed_range

Tone = Literal["", "good", "warn", "bad"]
QUARANTINED_LISTED_MAX = 200
"""So many sessions in quarantine are listed in the file; the others are only counted."""
KAFKA_CONCERNS = ("time left", "late", "buffer", "blind")
"""Kinds of concerns that need Kafka. They are shown as of the look."""
TONE_ORDER = {"bad": 0, "warn": 1, "": 2, "good": 3}
"""The most urgent first."""


class HaltStatus(Struct, frozen=True):
    """Why a partition is halted."""

    finding: str
    offset: int
    cause: str = ""


class PartitionStatus(Struct, frozen=True, kw_only=True, rename={"hold": "held", "halt": "halted"}):
    """The status of one partition."""

    topic: str
    partition: int
    frontier: int | None = None
    log_start: int | None = None
    log_end: int | None = None
    lag: int | None = None
    time_left_seconds: int | None = None
    limit_seconds: float | None = None
    """A person is warned if less time than this is left."""
    catches_up: bool | None = None
    topic_state: str = "live"
    epoch: int = 0
    hold: str | None = None
    halt: HaltStatus | None = None

    @property
    def partition_name(self) -> str:
        """The partition as people write it, like `orders/3`."""
        return f"{self.topic}/{self.partition}"

    @property
    def tone(self) -> Tone:
        """How the partition is, as a colour."""
        if self.topic_state == "retired":
            return ""
        if self.halt or self.hold or self.topic_state in ("absent", "re-created"):
            return "bad"
        return time_tone(self) or "good"


class QuarantinedSession(Struct, frozen=True, kw_only=True):
    """A session in quarantine."""

    session: str
    topic: str
    partition: int
    offset: int | None = None
    finding: str | None = None


class SavedStatus(Struct, frozen=True, kw_only=True, rename={"last_run_seconds": "ran_seconds"}):
    """The content of the status file."""

    stream: str
    at_seconds: float
    """When Kafka was asked."""
    sequence: int = -1
    """The newest ledger entry at that time."""
    last_run_seconds: float | None = None
    """When the newest run ended."""
    tier: str = ""
    verdict: str = "new"
    circuit: str = "closed"
    checked: int = 0
    rate: float | None = None
    """Messages that a run folds in a second, by recent entries."""
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
    """Why nothing can be said about the stream; empty if something can."""

    @property
    def nearest(self) -> PartitionStatus | None:
        """The partition with the least time left."""
        limited = [
            (partition.time_left_seconds, partition.partition_name, partition)
            for partition in self.partitions
            if partition.time_left_seconds is not None
        ]
        if not limited:
            return None
        return min(limited, key=lambda item: item[:2])[2]

    @property
    def tone(self) -> Tone:
        """How the stream is, as a colour."""
        if self.trouble or self.verdict == "hurt" or self.circuit == "open":
            return "bad"
        if any(partition.tone == "bad" for partition in self.partitions):
            return "bad"
        if self.concerns or self.verdict in ("new", "unknown"):
            return "warn"
        return "good"


def stream_status_now(
    stream: str, tier: str, status: SavedStatus | None, ledger: Ledger | None, now_seconds: float
) -> StreamStatus:
    """A stream as of now. `ledger` is given where it is newer than the status file, or where there
    is no status file.
    """
    if status is None and ledger is None:
        return StreamStatus(stream=stream, tier=tier)
    if status is None:
        status = SavedStatus(stream=stream, at_seconds=0.0, quarantined_count=-1)
    partitions = _partitions_now(status, ledger, now_seconds)
    lag = None
    if partitions:
        lag = sum(partition.lag or 0 for partition in partitions)
    current = StreamStatus(
        stream=stream,
        tier=tier,
        verdict=status.verdict,
        circuit=status.circuit,
        sequence=status.sequence,
        checked=status.checked,
        partitions=partitions,
        lag=lag,
        as_of_seconds=status.at_seconds or None,
        last_run_seconds=status.last_run_seconds or None,
        rate=status.rate,
        quarantined=status.quarantined_count,
        gaps_open=status.gaps_open,
        concerns=list(_concerns(stream, status, partitions, ledger)),
        sessions=status.quarantined,
    )
    if ledger is None:
        return current
    last_run_seconds = max(status.last_run_seconds or 0.0, ledger.pace.at_seconds)
    return replace(
        current,
        verdict=stream_verdict(ledger),
        circuit=ledger.circuit,
        sequence=ledger.sequence,
        checked=ledger.checked,
        last_run_seconds=last_run_seconds or None,
        rate=ledger.pace.rate,
        quarantined=_quarantined_count(ledger),
    )


def _partitions_now(
    status: SavedStatus, ledger: Ledger | None, now_seconds: float
) -> list[PartitionStatus]:
    """The partitions of the status file, with the ledger's newer facts and the time left of now."""
    elapsed_seconds = max(0.0, now_seconds - status.at_seconds)
    partitions = status.partitions
    if ledger is not None:
        partitions = _with_ledger(partitions, ledger)
    return [_with_time_elapsed(partition, elapsed_seconds) for partition in partitions]


def stream_verdict(ledger: Ledger) -> str:
    """One word for the whole stream: good, hurt (something waits for a person), or new (it was
    never run).
    """
    if ledger.sequence < 0:
        return "new"
    if ledger.foreign_sequence >= 0 or ledger.failed_ranges:
        return "hurt"
    for account in ledger.partitions.values():
        if not account.retired and (account.halt or account.quarantined):
            return "hurt"
    return "good"


def time_tone(partition: PartitionStatus) -> Tone:
    """The colour of time left: red up to the stream's limit, yellow up to twice as much."""
    if partition.time_left_seconds is None or partition.limit_seconds is None:
        return ""
    if partition.time_left_seconds <= partition.limit_seconds:
        return "bad"
    return "warn" if partition.time_left_seconds <= 2 * partition.limit_seconds else ""


def urgent_first(statuses: Iterable[StreamStatus]) -> list[StreamStatus]:
    """The statuses in order: what needs a person first, then the least time left, then the name."""
    return sorted(statuses, key=_urgency)


def _urgency(status: StreamStatus) -> tuple[int, float, str]:
    time_left_seconds = float("inf")
    nearest = status.nearest
    if nearest is not None and nearest.time_left_seconds is not None:
        time_left_seconds = nearest.time_left_seconds
    return TONE_ORDER[status.tone], time_left_seconds, status.stream


def _with_ledger(saved: list[PartitionStatus], ledger: Ledger) -> list[PartitionStatus]:
    """The partitions of the file and of the ledger, with what the ledger knows by now."""
    partition_by_name = {partition.partition_name: partition for partition in saved}
    partitions = []
    for name in sorted({*partition_by_name, *ledger.partitions}, key=_partition_sort_key):
        partition = partition_by_name.get(name)
        if partition is None:
            topic, number = _partition_sort_key(name)
            partition = PartitionStatus(topic=topic, partition=number)
        account = ledger.partitions.get(name)
        if account is not None:
            partition = _with_account(partition, account)
        partitions.append(partition)
    return partitions


def _with_account(partition: PartitionStatus, account: Account) -> PartitionStatus:
    log_end = max(partition.log_end or 0, account.log_end, account.frontier)
    lag = log_end - account.frontier
    halt = None
    if account.halt is not None:
        halt = HaltStatus(account.halt.finding, account.halt.offset, account.halt.cause)
    return replace(
        partition,
        frontier=account.frontier,
        log_end=log_end,
        lag=lag,
        time_left_seconds=partition.time_left_seconds if lag else None,
        topic_state="retired" if account.retired else partition.topic_state,
        epoch=account.epoch,
        hold=account.hold,
        halt=halt,
    )


def _partition_sort_key(partition_name: str) -> tuple[str, int]:
    topic, _, number = partition_name.rpartition("/")
    return topic, int(number)


def _with_time_elapsed(partition: PartitionStatus, elapsed_seconds: float) -> PartitionStatus:
    if partition.time_left_seconds is None:
        return partition
    time_left_seconds = round(partition.time_left_seconds - elapsed_seconds)
    return replace(partition, time_left_seconds=max(0, time_left_seconds))


def _quarantined_count(ledger: Ledger) -> int:
    return sum(account.quarantined for account in ledger.partitions.values() if not account.retired)


def _concerns(
    stream: str, status: SavedStatus, partitions: list[PartitionStatus], ledger: Ledger | None
) -> Iterable[Concern]:
    """What needs a person. A halt comes with the command that its finding advises."""
    for partition in partitions:
        if partition.halt and partition.topic_state != "retired":
            yield _halt_concern(stream, partition, partition.halt)
    if ledger is None:
        for concern in status.concerns:
            if concern.kind != "halted":
                yield concern
        return
    for concern in status.concerns:
        if concern.kind in KAFKA_CONCERNS:
            yield concern
    yield from _ledger_concerns(stream, partitions, ledger)


def _ledger_concerns(
    stream: str, partitions: list[PartitionStatus], ledger: Ledger
) -> Iterable[Concern]:
    """Holds, an open circuit and quarantine, as the ledger has them."""
    show_status = f"seriatim status {stream}"
    for partition in partitions:
        if partition.hold:
            yield Concern(
                kind="held",
                location=partition.partition_name,
                text=f"held by {partition.hold}",
                next=show_status,
            )
    if ledger.circuit == "open":
        failures = "; ".join(describe_failed_range(failed) for failed in ledger.failed_ranges[:3])
        text = f"the circuit is open, publishing waits: a check failed: {failures}"
        yield Concern(kind="circuit", text=text, next=circuit_advice(ledger))
    count = _quarantined_count(ledger)
    if count:
        sessions = "1 session" if count == 1 else f"{count} sessions"
        text = f"{sessions} in quarantine until the next snapshot"
        yield Concern(kind="quarantine", text=text, next=f"{show_status} lists them")


def _halt_concern(stream: str, partition: PartitionStatus, halt: HaltStatus) -> Concern:
    finding = Finding(
        finding=halt.finding,
        topic=partition.topic,
        partition=partition.partition,
        offset=halt.offset,
    )
    text = f"at offset {halt.offset}: {halt.finding}"
    if halt.cause:
        text += f", {halt.cause}"
    return Concern(
        kind="halted", location=partition.partition_name, text=text, next=finding.advice(stream)
    )
