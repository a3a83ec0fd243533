"""Slices: what the next unit of work is, cut out of the ledger's frontier and Kafka's bounds.

Discovery meets the ledger here: which partitions are new, which may be read from where, and which
are hurt (re-created, truncated, expired) and must wait. Pure: everything comes in as values.

Next room: operations/plan.py asks Kafka and calls this; ledger.py remembers the outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct, field

from seriatim.engine.findings import Finding, Tier, tier_action
from seriatim.engine.judge import OnPoison
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError, ensure
from seriatim.ledger.model import Account, Ledger

Ranges = dict[Partition, OffsetRange]
PARTITIONS_LISTED_MAX = 20


class Bounds(Struct, frozen=True):
    """Kafka's view of one partition: the topic's id, the oldest offset it has, the next it will
    write.
    """

    topic_id: str
    log_start: int
    log_end: int


class SlicePlan(Struct, kw_only=True):
    """What a run may do now."""

    new_accounts: dict[Partition, Account] = field(default_factory=dict)
    """Partitions never seen before."""
    ranges: Ranges = field(default_factory=dict)
    """From the frontier to the log end, where that may be read; empty ranges included."""
    findings: list[Finding] = field(default_factory=list)
    """What discovery found wrong: new halts."""
    skipped_ranges: Ranges = field(default_factory=dict)
    """Offsets gone before they were read, which the tier only counts."""
    waiting_partitions: list[Partition] = field(default_factory=list)
    """Halted or held since earlier."""
    missing_partitions: list[Partition] = field(default_factory=list)
    """Known partitions that no longer match or exist."""
    retired_partitions: list[Partition] = field(default_factory=list)
    """Partitions that a person retired: neither read nor judged, whatever Kafka has."""

    @property
    def backlog(self) -> int:
        """Messages, at most, that wait to be folded."""
        return sum(map(len, self.ranges.values()))


def plan_slices(
    ledger: Ledger,
    bounds: Mapping[Partition, Bounds],
    tier: Tier,
    on_poison: OnPoison = "quarantine",
) -> SlicePlan:
    """Compare what Kafka has with what the ledger knows."""
    known = {
        partition: ledger.partitions[str(partition)] for partition in ledger.known_partitions()
    }
    made = SlicePlan(
        missing_partitions=sorted(p for p in known if p not in bounds and not known[p].retired)
    )
    over = retired_topics(ledger)
    if tier_action("expired", tier) == "halt":
        made.findings += [
            lost
            for p in made.missing_partitions
            if (lost := deleted_topic_finding(p, known[p])) is not None
        ]
    ids = {partition.topic: account.topic_id for partition, account in known.items()}
    for partition in sorted(bounds):
        seen = bounds[partition]
        account = known.get(partition)
        if partition.topic in over or (account is not None and account.retired):
            made.retired_partitions.append(partition)
            continue
        if account is None:
            account = made.new_accounts[partition] = new_account(seen, ids.get(partition.topic))
        finding = bounds_finding(partition, account, seen)
        if is_waiting(account, on_poison) and not _is_recreated(account, finding):
            made.waiting_partitions.append(partition)
        elif finding is not None and tier_action(finding.finding, tier) == "halt":
            made.findings.append(finding)
        elif finding is not None:
            made.skipped_ranges[partition] = OffsetRange(account.frontier, seen.log_start)
            made.ranges[partition] = OffsetRange(seen.log_start, seen.log_end)
        else:
            made.ranges[partition] = OffsetRange(account.frontier, seen.log_end)
    return made


def new_account(bounds: Bounds, known_topic_id: str | None) -> Account:
    """A new partition's account. A new topic begins at its first offset; partitions added to a
    known one at 0.

    A partition of a topic that is known under another id has the old id: the topic was made again,
    and waits.
    """
    start = bounds.log_start if known_topic_id is None else 0
    return Account(
        topic_id=known_topic_id or bounds.topic_id, frontier=start, initial_frontier=start
    )


def retired_topics(ledger: Ledger) -> set[str]:
    """Topics that are over as a whole: partitions added to them are not read either."""
    accounts = [
        (partition.topic, ledger.partitions[str(partition)])
        for partition in ledger.known_partitions()
    ]
    return {topic for topic, _ in accounts} - {
        topic for topic, account in accounts if not account.retired
    }


def _is_recreated(account: Account, finding: Finding | None) -> bool:
    """Whether the topic of a halted partition was made again meanwhile: another matter than what it
    waits for.
    """
    if finding is None or finding.finding != "re-created" or account.hold is not None:
        return False
    return account.halt is None or account.halt.finding != "re-created"


def is_waiting(account: Account, on_poison: OnPoison) -> bool:
    """Whether a partition is left alone. One halted by poison goes on once the stream says to skip
    it.
    """
    passed_over = (
        account.halt is not None and account.halt.finding == "poison" and on_poison == "skip"
    )
    return account.hold is not None or (account.halt is not None and not passed_over)


def deleted_topic_finding(partition: Partition, account: Account) -> Finding | None:
    """A topic that is gone with messages that were never read; None if nothing was lost, or it is
    known.
    """
    lost = account.log_end - account.frontier
    if lost <= 0 or account.halt is not None or account.retired:
        return None
    return Finding(
        finding="expired",
        topic=partition.topic,
        partition=partition.number,
        offset=account.frontier,
        expected=f"topic id {account.topic_id}",
        found="no such topic, or matched no more",
        cause=f"{lost} messages [{account.frontier}, {account.log_end}) were never read",
    )


def bounds_finding(partition: Partition, account: Account, bounds: Bounds) -> Finding | None:
    """What is wrong with a partition before any message is read."""

    def finding(kind: str, expected: str, found: str, cause: str, log_end: int = -1) -> Finding:
        return Finding(
            finding=kind,
            topic=partition.topic,
            partition=partition.number,
            offset=account.frontier,
            expected=expected,
            found=found,
            cause=cause,
            log_end=log_end,
        )

    if bounds.topic_id != account.topic_id:
        cause = "the topic was deleted and made again; what it held before may not have been read"
        return finding(
            "re-created", f"topic id {account.topic_id}", f"topic id {bounds.topic_id}", cause
        )
    if bounds.log_end < account.frontier:
        cause = "Kafka has lost messages that were already folded"
        expected, found = f"log end at or after {account.frontier}", f"log end {bounds.log_end}"
        return finding("truncated", expected, found, cause, log_end=bounds.log_end)
    if bounds.log_start > account.frontier:
        lost = OffsetRange(account.frontier, bounds.log_start)
        cause = f"{len(lost)} messages {lost} were deleted before they were read"
        return finding(
            "expired", f"offset {account.frontier}", f"log start {bounds.log_start}", cause
        )
    return None


def cut_into_slices(ranges: Ranges, messages_max: int) -> list[Ranges]:
    """Ranges as slices of at most `messages_max` offsets, shared fairly between partitions."""
    ensure(messages_max > 0, "a slice holds at least one message", messages_max=messages_max)
    slices: list[Ranges] = []
    left = {p: r for p, r in ranges.items() if len(r)}
    while left:
        share = max(1, messages_max // len(left))
        piece: Ranges = {}
        for partition, whole in list(left.items())[:messages_max]:
            piece[partition] = whole.until(min(whole.end, whole.start + share))
            rest = OffsetRange(piece[partition].end, whole.end)
            if len(rest):
                left[partition] = rest
            else:
                del left[partition]
        slices.append(piece)
    return slices


def ranges_to_read(plan: SlicePlan, until: Mapping[Partition, int] | None, stream: str) -> Ranges:
    """The ranges with something to read, cut to `until` where it is given."""
    if until is None:
        return {partition: whole for partition, whole in plan.ranges.items() if len(whole)}
    ranges: Ranges = {}
    for partition, end in until.items():
        whole = plan.ranges.get(partition)
        if partition in plan.waiting_partitions or any(
            f.partition_name == str(partition) for f in plan.findings
        ):
            continue
        if whole is None or end > whole.end:
            unread = "it is retired" if partition in plan.retired_partitions else "it is not known"
            known = unread if whole is None else f"its log ends at {whole.end}"
            way = f"name one of those, and an offset up to its log end: `seriatim plan {stream}` shows both"
            what = f"{stream}: cannot read {partition} up to {end}: {known}"
            raise ConfigError(what, readable=describe_partitions(plan.ranges), next=way)
        if end > whole.start:
            ranges[partition] = whole.until(end)
    return ranges


def select_ranges(
    plan: SlicePlan, topics: Collection[str], partitions: Collection[Partition], stream: str
) -> Ranges:
    """The ranges of the places named, of all if none is; one that the stream does not have is
    refused.
    """
    there = {
        *plan.ranges,
        *plan.waiting_partitions,
        *plan.missing_partitions,
        *plan.retired_partitions,
        *(Partition(f.topic, f.partition) for f in plan.findings if f.partition >= 0),
    }
    names = {partition.topic for partition in there}
    unknown = [f"topic {name}" for name in sorted(set(topics) - names)]
    unknown += [f"partition {place}" for place in sorted(set(partitions) - there)]
    if unknown:
        way = "name what is there, spelled as it is there; or name nothing, which means all of the stream"
        raise ConfigError(
            f"{stream}: it has no {unknown[0]}", there=describe_partitions(there), next=way
        )
    every = not topics and not partitions
    return {
        p: whole
        for p, whole in plan.ranges.items()
        if every or p.topic in topics or p in partitions
    }


def describe_partitions(partitions: Collection[Partition]) -> str:
    """Some of them, for a person."""
    shown = ", ".join(map(str, sorted(partitions)[:PARTITIONS_LISTED_MAX])) or "nothing"
    return (
        shown
        if len(partitions) <= PARTITIONS_LISTED_MAX
        else f"{shown} and {len(partitions) - PARTITIONS_LISTED_MAX} more"
    )


def next_slice_ranges(ranges: Ranges, messages_max: int) -> Ranges:
    """What the next slice may take of each range, at most."""
    return {
        p: whole.until(min(whole.end, whole.start + messages_max))
        for p, whole in ranges.items()
        if len(whole)
    }
