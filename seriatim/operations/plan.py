"""Plan: what the next run may do, from one look at Kafka and the ledger.

Discovery is compared with the ledger: which partitions are new, which may be read and from where,
and which are damaged (re-created, truncated, expired) and must wait. `plan_run` is the preview for
people; a run does not depend on it and looks at everything again. Everything but `plan_run` and
`discover_topics` is pure.

Next: operations/run.py reads and folds what is planned; ledger/model.py remembers the outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

from msgspec import Struct, field

from seriatim.engine.findings import Finding, OnPoison, Tier, list_some, tier_action
from seriatim.engine.holes import describe_expired
from seriatim.engine.offsets import (
    Bounds,
    BoundsByPartition,
    OffsetByPartition,
    OffsetRange,
    Partition,
    Ranges,
    drop_empty_ranges,
)
from seriatim.errors import ConfigError, MissingTopicsError
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import Account, Ledger
from seriatim.ports import LedgerStore, Log
from seriatim.stream import Stream

PARTITIONS_LISTED_MAX = 20
"""So many partitions are named in an error text."""


def plan_run(stream: Stream, log: Log, store: LedgerStore) -> tuple[Ledger, SlicePlan]:
    """The ledger as it is, and what a run would do next."""
    head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    return ledger, discover_topics(stream, log, ledger)


def discover_topics(stream: Stream, log: Log, ledger: Ledger) -> SlicePlan:
    """Ask Kafka for the topics of the stream, and compare them with the ledger.

    Refused: another cluster than the one that was folded so far, `topics` that never matched
    anything, and a stream that reads the topic to which it sends its own snapshot requests.
    """
    bounds = log.bounds(stream.topics)
    _refuse_other_cluster(stream, log, ledger)
    if not bounds and not ledger.partitions:
        raise MissingTopicsError(
            f"{stream.name}: waiting for topics: no topic matches {stream.topics!r} yet",
            next=f"make them; or, if they are there, check `topics` in {stream.name}.toml"
            " (it must match whole names) and the broker's address",
        )
    if any(partition.topic == stream.snapshot_requests for partition in bounds):
        raise ConfigError(
            f"{stream.name}: snapshot_requests: {stream.snapshot_requests!r} is a topic that the stream reads itself",
            next=f"name another topic in {stream.name}.toml, or change `topics` so that it does not match this one",
        )
    return plan_slices(ledger, bounds, stream.tier, stream.on_poison)


def _refuse_other_cluster(stream: Stream, log: Log, ledger: Ledger) -> None:
    """Refuse a cluster whose offsets say nothing about what is committed."""
    if ledger.cluster_id and log.cluster_id and ledger.cluster_id != log.cluster_id:
        raise ConfigError(
            f"{stream.name}: this Kafka is cluster {log.cluster_id}, but what is committed was read"
            f" from cluster {ledger.cluster_id}",
            next="set the broker's address back, or `kafka` in the stream file; to begin with the"
            " other cluster,\ngive the stream a new output path",
        )


class SlicePlan(Struct, kw_only=True):
    """What a run may do, as of one look at Kafka."""

    new_accounts: dict[Partition, Account] = field(default_factory=dict)
    """Partitions that the ledger does not know yet."""
    ranges: Ranges = field(default_factory=dict)
    """From the frontier to the log end, for partitions that may be read; empty ranges included."""
    findings: list[Finding] = field(default_factory=list)
    """Findings of discovery. Each of them halts its partition."""
    skipped_ranges: Ranges = field(default_factory=dict)
    """Offsets that Kafka deleted before they were read, where the tier counts them and goes on."""
    waiting_partitions: list[Partition] = field(default_factory=list)
    """Partitions that were halted or held before this look."""
    missing_partitions: list[Partition] = field(default_factory=list)
    """Partitions of the ledger that Kafka no longer has, or that `topics` no longer matches."""
    retired_partitions: list[Partition] = field(default_factory=list)
    """Partitions that a person retired. They are neither read nor judged, whatever Kafka has."""

    @property
    def backlog(self) -> int:
        """How many messages wait to be folded, at most."""
        return sum(len(offset_range) for offset_range in self.ranges.values())


def plan_slices(
    ledger: Ledger,
    bounds_by_partition: BoundsByPartition,
    tier: Tier,
    on_poison: OnPoison = "quarantine",
) -> SlicePlan:
    """Compare what Kafka has with what the ledger knows, and say what a run may do."""
    accounts = {}
    for partition in ledger.known_partitions():
        accounts[partition] = ledger.partitions[str(partition)]
    plan = SlicePlan()
    _plan_missing_partitions(plan, accounts, bounds_by_partition, tier)
    ended_topics = retired_topics(ledger)
    topic_ids = {partition.topic: account.topic_id for partition, account in accounts.items()}
    for partition, bounds in sorted(bounds_by_partition.items()):
        account = accounts.get(partition)
        is_retired = account is not None and account.retired
        if is_retired or partition.topic in ended_topics:
            plan.retired_partitions.append(partition)
            continue
        if account is None:
            account = new_account(bounds, topic_ids.get(partition.topic))
            plan.new_accounts[partition] = account
        _plan_partition(plan, partition, account, bounds, tier, on_poison)
    return plan


def _plan_missing_partitions(
    plan: SlicePlan,
    accounts: Mapping[Partition, Account],
    bounds_by_partition: BoundsByPartition,
    tier: Tier,
) -> None:
    """Note the partitions that Kafka no longer has, and what was lost with them."""
    for partition, account in sorted(accounts.items()):
        if partition in bounds_by_partition or account.retired:
            continue
        plan.missing_partitions.append(partition)
        if tier_action("expired", tier) != "halt":
            continue
        finding = deleted_topic_finding(partition, account)
        if finding is not None:
            plan.findings.append(finding)


def _plan_partition(
    plan: SlicePlan,
    partition: Partition,
    account: Account,
    bounds: Bounds,
    tier: Tier,
    on_poison: OnPoison,
) -> None:
    """Decide about one partition that Kafka has: wait, halt, skip what expired, or read."""
    finding = bounds_finding(partition, account, bounds)
    if is_waiting(account, on_poison) and not _is_recreated(account, finding):
        plan.waiting_partitions.append(partition)
    elif finding is None:
        plan.ranges[partition] = OffsetRange(account.frontier, bounds.log_end)
    elif tier_action(finding.finding, tier) == "halt":
        plan.findings.append(finding)
    else:
        plan.skipped_ranges[partition] = OffsetRange(account.frontier, bounds.log_start)
        plan.ranges[partition] = OffsetRange(bounds.log_start, bounds.log_end)


def new_account(bounds: Bounds, known_topic_id: str | None) -> Account:
    """The account of a new partition. A new topic begins at its first offset; a partition that was
    added to a known topic begins at 0.

    A known topic may have another id in Kafka now, because it was created again. Its new partitions
    get the old id, so that they wait like the others until a person accepts the new topic.
    """
    start = bounds.log_start if known_topic_id is None else 0
    return Account(
        topic_id=known_topic_id or bounds.topic_id, frontier=start, initial_frontier=start
    )


def retired_topics(ledger: Ledger) -> set[str]:
    """Topics of which every known partition is retired. Partitions added to them are not read."""
    known_topics = set()
    live_topics = set()
    for partition in ledger.known_partitions():
        known_topics.add(partition.topic)
        if not ledger.partitions[str(partition)].retired:
            live_topics.add(partition.topic)
    return known_topics - live_topics


def _is_recreated(account: Account, finding: Finding | None) -> bool:
    """Whether the topic of a waiting partition was created again meanwhile. That is a new finding,
    whatever the partition waits for; but a repair that holds the partition is not disturbed.
    """
    if finding is None or finding.finding != "re-created" or account.hold is not None:
        return False
    return account.halt is None or account.halt.finding != "re-created"


def is_waiting(account: Account, on_poison: OnPoison) -> bool:
    """Whether a partition must not be read: it is held or halted. A partition that poison halted
    goes on as soon as the stream says to skip poison.
    """
    if account.hold is not None:
        return True
    if account.halt is None:
        return False
    return account.halt.finding != "poison" or on_poison != "skip"


def deleted_topic_finding(partition: Partition, account: Account) -> Finding | None:
    """The finding about a topic that is gone together with messages that were never read. None if
    nothing was lost, or if the loss is already known.
    """
    lost_messages = account.log_end - account.frontier
    if lost_messages <= 0 or account.halt is not None or account.retired:
        return None
    return Finding.at(
        partition,
        "expired",
        account.frontier,
        expected=f"topic id {account.topic_id}",
        found="no such topic, or matched no more",
        cause=f"{lost_messages} messages [{account.frontier}, {account.log_end}) were never read",
    )


def bounds_finding(partition: Partition, account: Account, bounds: Bounds) -> Finding | None:
    """What is wrong with a partition before any of its messages is read; None if nothing is."""
    frontier = account.frontier
    if bounds.topic_id != account.topic_id:
        return Finding.at(
            partition,
            "re-created",
            frontier,
            expected=f"topic id {account.topic_id}",
            found=f"topic id {bounds.topic_id}",
            cause="the topic was deleted and made again; what it held before may not have been read",
        )
    if bounds.log_end < frontier:
        return Finding.at(
            partition,
            "truncated",
            frontier,
            expected=f"log end at or after {frontier}",
            found=f"log end {bounds.log_end}",
            cause="Kafka has lost messages that were already folded",
            log_end=bounds.log_end,
        )
    if bounds.log_start > frontier:
        expired = OffsetRange(frontier, bounds.log_start)
        return Finding.at(
            partition,
            "expired",
            frontier,
            expected=f"offset {frontier}",
            found=f"log start {bounds.log_start}",
            cause=describe_expired(expired),
        )
    return None


def ranges_to_read(plan: SlicePlan, until: OffsetByPartition | None, stream: str) -> Ranges:
    """The ranges with something to read, up to `until` where it is given.

    Partitions that wait or halt are left out. A partition that cannot be read, and an offset beyond
    the log end, are refused.
    """
    if until is None:
        return drop_empty_ranges(plan.ranges)
    halting_partitions = {finding.partition_name for finding in plan.findings}
    ranges: Ranges = {}
    for partition, stop_offset in until.items():
        if partition in plan.waiting_partitions or str(partition) in halting_partitions:
            continue
        offset_range = plan.ranges.get(partition)
        if offset_range is None or stop_offset > offset_range.end:
            _refuse_stop_offset(plan, partition, stop_offset, stream)
        elif stop_offset > offset_range.start:
            ranges[partition] = offset_range.until(stop_offset)
    return ranges


def _refuse_stop_offset(
    plan: SlicePlan, partition: Partition, stop_offset: int, stream: str
) -> NoReturn:
    if partition in plan.ranges:
        reason = f"its log ends at {plan.ranges[partition].end}"
    elif partition in plan.retired_partitions:
        reason = "it is retired"
    else:
        reason = "it is not known"
    raise ConfigError(
        f"{stream}: cannot read {partition} up to {stop_offset}: {reason}",
        readable=describe_partitions(plan.ranges),
        next=f"name one of those, and an offset up to its log end: `seriatim plan {stream}` shows both",
    )


def select_ranges(
    plan: SlicePlan, topics: Collection[str], partitions: Collection[Partition], stream: str
) -> Ranges:
    """The ranges of the topics and partitions named; all ranges if none is named. A name that the
    stream does not have is refused.
    """
    existing = _planned_partitions(plan)
    existing_topics = {partition.topic for partition in existing}
    unknown = [f"topic {topic}" for topic in sorted(set(topics) - existing_topics)]
    unknown += [f"partition {partition}" for partition in sorted(set(partitions) - existing)]
    if unknown:
        raise ConfigError(
            f"{stream}: it has no {unknown[0]}",
            there=describe_partitions(existing),
            next="name what is there, spelled as it is there; or name nothing, which means all of the stream",
        )
    if not topics and not partitions:
        return dict(plan.ranges)
    selected: Ranges = {}
    for partition, offset_range in plan.ranges.items():
        if partition.topic in topics or partition in partitions:
            selected[partition] = offset_range
    return selected


def _planned_partitions(plan: SlicePlan) -> set[Partition]:
    """All partitions that the plan knows, whatever becomes of them."""
    partitions = {
        *plan.ranges,
        *plan.waiting_partitions,
        *plan.missing_partitions,
        *plan.retired_partitions,
    }
    for finding in plan.findings:
        if finding.partition >= 0:
            partitions.add(Partition(finding.topic, finding.partition))
    return partitions


def describe_partitions(partitions: Collection[Partition]) -> str:
    """The names of the partitions, as a text for people; only the first ones of a long list."""
    names = [str(partition) for partition in sorted(partitions)]
    return list_some(names, PARTITIONS_LISTED_MAX) or "nothing"


def next_slice_ranges(ranges: Ranges, messages_max: int) -> Ranges:
    """What the next slice takes of each range, at most."""
    next_ranges: Ranges = {}
    for partition, offset_range in drop_empty_ranges(ranges).items():
        cut = min(offset_range.end, offset_range.start + messages_max)
        next_ranges[partition] = offset_range.until(cut)
    return next_ranges
