"""The ledger: the only truth about what was done. Pure: `apply(entry, ledger) -> ledger`.

An entry is one commit. It says what it did, and what it requires of a ledger that may have moved
meanwhile (requirements.py). Each entry carries the hash of the one before, and its manifest carries
the whole ledger value, so the last one is all a run needs. The adapter only reads and
compares-and-sets.

Next room: ledger/delta_store.py commits entries; operations/run.py makes them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import Finding, GapMark
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Counts
from seriatim.errors import ConfigError, ensure
from seriatim.kafka.retention import Pace
from seriatim.ledger.requirements import unmet_requirements
from seriatim.ledger.verdicts import FailedRange, update_verdict

EntryKind = Literal[
    "start", "slice", "hold", "release", "repair", "compact", "verdict", "accept", "retire"
]
MANIFEST_FORMAT = 3
"""Of manifests. A newer one is refused, not guessed at."""
READABLE_FORMATS = (2, 3)
"""Formats that mean to this version what they meant to the one that wrote them."""


class File(
    Struct,
    frozen=True,
    rename={"size_bytes": "bytes", "first_offset": "first", "last_offset": "last"},
):
    """A file named by an entry."""

    path: str
    """Below the stream's output path."""
    size_bytes: int
    rows: int
    digest: str
    """XXH3-128 of the whole file."""
    first_offset: int = -1
    """Record files: the lowest offset of its rows."""
    last_offset: int = -1
    """Record files: the highest offset of its rows."""


class Halt(Struct, frozen=True):
    """Why a partition waits, and since which entry."""

    finding: str
    offset: int
    cause: str
    sequence: int = -1
    log_end: int = -1
    """Truncated: where the log ended."""


class Account(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"initial_frontier": "born", "message_bytes": "bytes", "message_time_ms": "time"},
):
    """All that is known of one partition."""

    topic_id: str
    frontier: int
    initial_frontier: int
    """Where the frontier began: sessions are headless from here to their first snapshot."""
    epoch: int = 0
    state: tuple[File, ...] = ()
    """Oldest first; a session is in the newest file that has it."""
    halt: Halt | None = None
    hold: str | None = None
    retired: bool = False
    headless_since: int = -1
    """Messages before this offset were lost and passed over: a session last met before it goes on
    by a snapshot, or by a sequence that proves that it lost none.
    """
    log_end: int = 0
    """As last seen: what is between the frontier and it was never read."""
    messages: int = 0
    message_bytes: int = 0
    records: int = 0
    headless: int = 0
    quarantined: int = 0
    """Sessions in quarantine now."""
    distance_messages: int = 0
    """The most messages between two snapshots of one session."""
    distance_ms: int = 0
    """The longest time between them."""
    message_time_ms: int = -1
    """Message time: the largest timestamp so far, where sessions expire by it."""
    counts: dict[str, int] = field(default_factory=dict)
    """Findings and holes by name, since birth."""


class Ledger(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"judged_until": "judged", "failed_ranges": "failed", "foreign_sequence": "foreign"},
):
    """The whole account of a stream as of one entry."""

    stream: str
    machine: str = ""
    """The machine's name ever written; another one is refused."""
    shape: str = ""
    """The machine's shape ever written; another one would misread the state."""
    state_version: int = 0
    """The highest ever written; older code is refused."""
    sequence: int = -1
    sha256: str = ""
    """Of the last entry's manifest: what the next one calls `previous`."""
    circuit: Literal["closed", "open"] = "closed"
    checked: int = 0
    """The highest entry up to which all is good, accepted, or replaced and good."""
    judged_until: int = 0
    """The highest entry up to which all was judged, good or bad."""
    failed_ranges: tuple[FailedRange, ...] = ()
    """Stretches whose check failed and that were neither accepted nor replaced by something good."""
    foreign_sequence: int = -1
    """The entry that told of data others wrote to the table; a person's word that all is well takes
    it back.
    """
    partitions: dict[str, Account] = field(default_factory=dict)
    """By `topic/number`, sorted."""
    pace: Pace = Pace()
    """How fast it was folded lately: for people, it decides nothing."""

    def account(self, partition: Partition) -> Account | None:
        """What is known of a partition, if anything."""
        return self.partitions.get(str(partition))

    def known_partitions(self) -> list[Partition]:
        """The partitions that have an account."""
        return [Partition.parse(place) for place in self.partitions]


class Certificate(Struct, frozen=True, kw_only=True, rename={"message_time_ms": "time"}):
    """Proof for one partition and slice: every offset from `start` to `until` is accounted for."""

    partition: Partition
    epoch: int
    start: int
    until: int
    counts: Counts
    holes: dict[str, int] = field(default_factory=dict)
    """Missing offsets by cause."""
    digests: dict[str, str] = field(default_factory=dict)
    first_timestamp: int | None = None
    last_timestamp: int | None = None
    sessions: int = 0
    message_time_ms: int = -1
    """The partition's message time, where sessions expire by it."""

    def __post_init__(self) -> None:
        found = self.counts.messages + sum(self.holes.values())
        ensure(
            found == self.until - self.start,
            "a certificate accounts for every offset",
            partition=str(self.partition),
            start=self.start,
            until=self.until,
            found=found,
        )


class Change(
    Struct,
    frozen=True,
    kw_only=True,
    rename={
        "initial_frontier": "born",
        "other_records": "others",
        "quarantine_files": "kept",
        "replaced_from": "rewound",
        "replaced_until": "remade",
        "message_time_ms": "time",
        "merged_state_paths": "merged",
    },
):
    """What an entry does to one partition."""

    partition: Partition
    epoch: int
    """Required: the partition's epoch."""
    frontier: int
    """Required: the partition's frontier before (entries that move it)."""
    until: int
    """The frontier after."""
    topic_id: str
    initial_frontier: int
    certificate: Certificate | None = None
    state: tuple[File, ...] | None = None
    """The state files after; None: unchanged."""
    records: tuple[File, ...] = ()
    other_records: dict[str, tuple[File, ...]] = field(default_factory=dict)
    """Record files of the machine's other tables, by table."""
    quarantine_files: tuple[File, ...] = ()
    """Quarantined messages."""
    halt: Halt | None = None
    marks: tuple[GapMark, ...] = ()
    """Gaps opened and closed, in order."""
    log_end: int = 0
    """As seen when it was made."""
    replaced_from: int = -1
    """Repair: the offset from which on output was made again."""
    replaced_until: int = 1 << 62
    """Repair: saved states of before between `rewound` and here are not as committed any more."""
    message_time_ms: int = -1
    """Repair that follows a log back: message time as of there."""
    removed_rows: int = 0
    """Repair: rows of the record files that leave the table."""
    quarantined: int = 0
    """Repair: sessions in quarantine after it."""
    headless_since: int = -1
    """Repair: where the frontier went on after lost messages, as the account has it; -1: none were
    lost.
    """
    merged_state_paths: tuple[str, ...] = ()
    """Compact: the oldest state files, which `state` replaces."""

    def files(self) -> list[File]:
        """All that it names."""
        beside = [file for files in self.other_records.values() for file in files]
        return [*self.records, *beside, *self.quarantine_files, *(self.state or ())]


class Entry(
    Struct,
    frozen=True,
    kw_only=True,
    rename={
        "product_version": "product",
        "removed_paths": "removed",
        "hold": "held",
        "resumed_hold": "resumes",
        "judged_after": "since",
        "judged_until": "judged",
        "failed_ranges": "failed",
    },
):
    """One commit: what it did, and on what it insists."""

    kind: EntryKind
    attempt: str
    run: str = ""
    product_version: str = ""
    machine: str = ""
    shape: str = ""
    state_version: int = 0
    sequence: int = -1
    previous: str = ""
    changes: tuple[Change, ...] = ()
    removed_paths: tuple[str, ...] = ()
    """Record files that leave their table (repair, compact)."""
    findings: tuple[Finding, ...] = ()
    hold: str | None = None
    """The hold this entry makes, gives back or works under."""
    resumed_hold: str | None = None
    """Hold: the hold that it takes over, from a repair that is over."""
    request: str = ""
    """Hold: what the repair was asked to do, so that it can be resumed by its id alone."""
    verdict: dict[str, str] = field(default_factory=dict)
    """Verdict: partition to good or bad, for the entries after `since` up to `judged`."""
    judged_after: int = -1
    judged_until: int = -1
    """Accept: failed stretches that were judged up to this entry are right as they are."""
    failed_ranges: tuple[FailedRange, ...] = ()
    """Verdict: what is bad."""
    reason: str = ""
    peak_memory_bytes: int = 0
    at_seconds: float = 0.0
    """The clock when it was made. It informs, and decides nothing but how long replaced files are
    kept.
    """
    took_seconds: float = 0.0
    """Slice: how long reading and folding took."""


class Manifest(Struct, frozen=True, kw_only=True):
    """What an entry's file holds: the entry, and the whole ledger after it."""

    format: int = MANIFEST_FORMAT
    entry: Entry
    ledger: Ledger


def apply_entry(entry: Entry, ledger: Ledger) -> Ledger:
    """The ledger after an entry. Its requirements must hold."""
    broken = unmet_requirements(entry, ledger)
    ensure(
        not broken, "an entry is applied only where its requirements hold", unmet="; ".join(broken)
    )
    partitions = dict(ledger.partitions)
    for change in entry.changes:
        account, place = ledger.account(change.partition), str(change.partition)
        partitions[place] = (_apply_accept if entry.kind == "accept" else _apply_change)(
            entry, change, account
        )
    after = replace(
        ledger,
        sequence=ledger.sequence + 1,
        partitions=dict(sorted(partitions.items())),
        machine=ledger.machine or entry.machine,
        shape=ledger.shape or entry.shape,
        state_version=max(ledger.state_version, entry.state_version),
        pace=_next_pace(entry, ledger.pace),
    )
    return update_verdict(entry, after)


def _apply_change(entry: Entry, change: Change, account: Account | None) -> Account:
    if account is None:
        account = Account(
            topic_id=change.topic_id,
            frontier=change.initial_frontier,
            initial_frontier=change.initial_frontier,
        )
    if entry.kind == "hold":
        return replace(account, hold=entry.hold)
    if entry.kind == "release":
        return replace(account, hold=None)
    if entry.kind == "retire":
        return replace(account, retired=True)
    if entry.kind == "compact":
        return _apply_compaction(change, account)
    if entry.kind == "repair":
        return _apply_repair(change, account)
    return _apply_slice(entry, change, account)


def state_files_after(change: Change, account: Account) -> tuple[File, ...]:
    """The state files after a change. What was compacted while it was made stays so, below the file
    that it adds.
    """
    if not change.state:
        return account.state if change.state is None else ()
    *kept, new = change.state
    oldest = account.state[: len(kept)]
    return (
        change.state
        if [file.path for file in kept] == [file.path for file in oldest]
        else (*account.state, new)
    )


def _apply_compaction(change: Change, account: Account) -> Account:
    """The oldest state files as fewer ones; what slices added meanwhile stays on top of them."""
    if change.state is None:
        return account
    return replace(account, state=(*change.state, *account.state[len(change.merged_state_paths) :]))


def _apply_repair(change: Change, account: Account) -> Account:
    """Records, state and frontier as the repair made them, in a new epoch."""
    back = change.until < account.frontier
    return replace(
        account,
        epoch=account.epoch + 1,
        frontier=change.until,
        state=account.state if change.state is None else change.state,
        halt=change.halt,
        hold=None,
        headless_since=min(change.until, max(account.headless_since, change.headless_since)),
        log_end=change.until if back else change.log_end or account.log_end,
        message_time_ms=change.message_time_ms if back else account.message_time_ms,
        records=account.records + sum(file.rows for file in change.records) - change.removed_rows,
        quarantined=change.quarantined,
    )


FINDINGS_ENDED_BY_ACCEPT = ("re-created", "expired")
"""Findings of discovery that end when a topic is accepted as it is: the next run judges it anew."""


def _apply_accept(_: Entry, change: Change, account: Account | None) -> Account:
    """A partition after a person's decision: it is read again, or its topic's new life begins."""
    if account is None:
        return Account(
            topic_id=change.topic_id,
            frontier=change.initial_frontier,
            initial_frontier=change.initial_frontier,
        )
    if change.topic_id == account.topic_id:
        other = (
            account.halt
            if account.halt and account.halt.finding not in FINDINGS_ENDED_BY_ACCEPT
            else None
        )
        left = account.quarantined - (
            change.certificate.counts.released if change.certificate else 0
        )
        after = replace(
            account, epoch=account.epoch + 1, retired=False, halt=other, quarantined=left
        )
        return replace(after, state=state_files_after(change, account))
    return replace(
        account,
        topic_id=change.topic_id,
        epoch=account.epoch + 1,
        frontier=change.until,
        initial_frontier=change.initial_frontier,
        state=(),
        halt=None,
        retired=False,
        headless_since=-1,
        log_end=change.log_end,
        message_time_ms=-1,
        records=account.records + sum(file.rows for file in change.records),
        quarantined=0,
    )


def _apply_slice(entry: Entry, change: Change, account: Account) -> Account:
    """A partition after messages were folded, or were found to be missing."""
    if entry.kind == "slice":
        ensure(change.until >= account.frontier, "a slice never goes back", until=change.until)
    certificate = change.certificate
    counts = certificate.counts if certificate else Counts()
    added = {
        **counts.findings,
        **{f"hole: {k}": v for k, v in (certificate.holes if certificate else {}).items()},
    }
    halt = (
        replace(change.halt, sequence=entry.sequence)
        if change.halt and entry.kind == "slice"
        else None
    )
    return replace(
        account,
        frontier=change.until,
        state=state_files_after(change, account),
        halt=halt,
        log_end=max(account.log_end, change.log_end),
        messages=account.messages + counts.messages,
        message_bytes=account.message_bytes + counts.message_bytes,
        records=account.records + counts.records,
        headless=account.headless + counts.headless,
        quarantined=account.quarantined + counts.quarantined - counts.released,
        distance_messages=max(account.distance_messages, counts.distance_messages),
        distance_ms=max(account.distance_ms, counts.distance_ms),
        message_time_ms=max(
            account.message_time_ms, certificate.message_time_ms if certificate else -1
        ),
        counts={
            k: account.counts.get(k, 0) + added.get(k, 0)
            for k in sorted({**account.counts, **added})
        },
    )


def _next_pace(entry: Entry, pace: Pace) -> Pace:
    """A check or a compaction folds nothing: with them alone a run is late all the same."""
    folded = sum(
        change.certificate.counts.messages for change in entry.changes if change.certificate
    )
    return (
        pace
        if entry.kind in ("verdict", "compact")
        else pace.after_entry(entry.at_seconds, folded, entry.took_seconds)
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as JSON bytes, always the same for the same value."""
    return msgspec.json.encode(manifest, order="deterministic")


def decode_manifest(content: bytes) -> Manifest:
    """A manifest from JSON bytes."""
    seen = msgspec.json.decode(content, type=dict[str, Any]).get("format")
    if seen not in READABLE_FORMATS:
        who, way = (
            ("an older", "give the stream a new output path")
            if seen == 1
            else ("a newer", "deploy it")
        )
        raise ConfigError(
            f"the ledger was written by {who} Seriatim: format {seen}, this one knows {MANIFEST_FORMAT}",
            next=way,
        )
    return msgspec.json.decode(content, type=Manifest)
