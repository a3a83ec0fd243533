"""The ledger as values: the only truth about what was done. Pure: `apply_entry(entry, ledger)` is
the ledger after the entry.

An entry is one commit. It says what it did, and what it requires of a ledger that may have moved
meanwhile (requirements.py). Each entry carries the hash of the one before. Its manifest carries the
whole ledger value, so the last manifest is all that a run needs. The store only reads, compares and
sets.

Next: ledger/commit.py commits entries; operations/run.py makes them.
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
"""The format of manifests that is written. A newer one is refused, not guessed at."""
READABLE_FORMATS = (2, 3)
"""Formats that can be read: they mean to this version what they meant to their writer."""


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
    """If the finding is "truncated": where the log ended."""


class Account(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"initial_frontier": "born", "message_bytes": "bytes", "message_time_ms": "time"},
):
    """All that is known about one partition."""

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
    """Messages before this offset were lost and passed over. A session whose last message is before
    it goes on with a snapshot, or with a sequence that proves that it lost none.
    """
    log_end: int = 0
    """The log end at the last look. Messages between the frontier and it were never read."""
    messages: int = 0
    message_bytes: int = 0
    records: int = 0
    headless: int = 0
    quarantined: int = 0
    """Sessions in quarantine now."""
    distance_messages: int = 0
    """The most messages between two snapshots of one session."""
    distance_ms: int = 0
    """The longest time between two snapshots of one session."""
    message_time_ms: int = -1
    """Message time: the largest timestamp so far, where sessions expire by it."""
    counts: dict[str, int] = field(default_factory=dict)
    """Findings and holes by name, since the initial frontier."""


class Ledger(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"judged_until": "judged", "failed_ranges": "failed", "foreign_sequence": "foreign"},
):
    """The whole account of a stream as of one entry."""

    stream: str
    machine: str = ""
    """The name of the machine that wrote the state; another one is refused."""
    shape: str = ""
    """The shape of that machine; another one would misread the state."""
    state_version: int = 0
    """The highest state version that was ever written; older code is refused."""
    sequence: int = -1
    sha256: str = ""
    """The hash of the last entry's manifest, which the next entry calls `previous`."""
    circuit: Literal["closed", "open"] = "closed"
    checked: int = 0
    """The highest entry up to which all is good, accepted, or replaced and good."""
    judged_until: int = 0
    """The highest entry up to which all was judged, good or bad."""
    failed_ranges: tuple[FailedRange, ...] = ()
    """Ranges whose check failed, and that were neither accepted nor replaced by something good."""
    foreign_sequence: int = -1
    """The entry that reported data which others wrote to the table; -1 again once a person accepts
    it.
    """
    partitions: dict[str, Account] = field(default_factory=dict)
    """By `topic/number`, sorted."""
    pace: Pace = Pace()
    """How fast the stream was folded recently. It is shown to people and decides nothing."""

    def account(self, partition: Partition) -> Account | None:
        """What is known about a partition; None if it is not known."""
        return self.partitions.get(str(partition))

    def known_partitions(self) -> list[Partition]:
        """The partitions that have an account."""
        return [Partition.parse(name) for name in self.partitions]


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
        accounted = self.counts.messages + sum(self.holes.values())
        ensure(
            accounted == self.until - self.start,
            "a certificate accounts for every offset",
            partition=str(self.partition),
            start=self.start,
            until=self.until,
            found=accounted,
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
    """Files of quarantined messages."""
    halt: Halt | None = None
    marks: tuple[GapMark, ...] = ()
    """Gaps opened and closed, in order."""
    log_end: int = 0
    """The log end when the entry was made."""
    replaced_from: int = -1
    """Repair: the offset from which on output was written again."""
    replaced_until: int = 1 << 62
    """Repair: states saved before it, between `replaced_from` and this offset, are void."""
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
        """All files that the change names."""
        files = list(self.records)
        for other_files in self.other_records.values():
            files.extend(other_files)
        files.extend(self.quarantine_files)
        files.extend(self.state or ())
        return files


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
    """One commit: what it did, and what it requires."""

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
    """The hold that this entry takes, gives back or works under."""
    resumed_hold: str | None = None
    """Hold: the hold that it takes over from a repair that has ended."""
    request: str = ""
    """Hold: what the repair was asked to do, so that it can be resumed by its id alone."""
    verdict: dict[str, str] = field(default_factory=dict)
    """Verdict: good or bad by partition, for the entries after `judged_after` up to
    `judged_until`.
    """
    judged_after: int = -1
    judged_until: int = -1
    """Accept: failed ranges that were judged up to this entry are right as they are."""
    failed_ranges: tuple[FailedRange, ...] = ()
    """Verdict: what is bad."""
    reason: str = ""
    peak_memory_bytes: int = 0
    at_seconds: float = 0.0
    """The time at which it was made. It decides nothing except how long replaced files stay on
    disk.
    """
    took_seconds: float = 0.0
    """Slice: how long reading and folding took."""


class Manifest(Struct, frozen=True, kw_only=True):
    """What an entry's file holds: the entry, and the whole ledger after it."""

    format: int = MANIFEST_FORMAT
    entry: Entry
    ledger: Ledger


def apply_entry(entry: Entry, ledger: Ledger) -> Ledger:
    """The ledger after an entry, whose requirements must hold."""
    unmet = unmet_requirements(entry, ledger)
    ensure(
        not unmet,
        "an entry is applied only where its requirements hold",
        unmet="; ".join(unmet),
    )
    partitions = dict(ledger.partitions)
    for change in entry.changes:
        account = ledger.account(change.partition)
        if entry.kind == "accept":
            account_after = _apply_accept(change, account)
        else:
            account_after = _apply_change(entry, change, account)
        partitions[str(change.partition)] = account_after
    ledger_after = replace(
        ledger,
        sequence=ledger.sequence + 1,
        partitions=dict(sorted(partitions.items())),
        machine=ledger.machine or entry.machine,
        shape=ledger.shape or entry.shape,
        state_version=max(ledger.state_version, entry.state_version),
        pace=_next_pace(entry, ledger.pace),
    )
    return update_verdict(entry, ledger_after)


def _new_account(change: Change) -> Account:
    return Account(
        topic_id=change.topic_id,
        frontier=change.initial_frontier,
        initial_frontier=change.initial_frontier,
    )


def _apply_change(entry: Entry, change: Change, account: Account | None) -> Account:
    if account is None:
        account = _new_account(change)
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
    """The state files after a change.

    If older files were compacted while the change was made, the compacted files stay, below the
    file that the change adds.
    """
    if change.state is None:
        return account.state
    if not change.state:
        return ()
    *older_files, new_file = change.state
    older_paths = [file.path for file in older_files]
    current_paths = [file.path for file in account.state[: len(older_files)]]
    if older_paths == current_paths:
        return change.state
    return (*account.state, new_file)


def _apply_compaction(change: Change, account: Account) -> Account:
    """The oldest state files become fewer; files that slices added meanwhile stay on top of them."""
    if change.state is None:
        return account
    newer_files = account.state[len(change.merged_state_paths) :]
    return replace(account, state=(*change.state, *newer_files))


def _apply_repair(change: Change, account: Account) -> Account:
    """Records, state and frontier as the repair wrote them, in a new epoch."""
    added_rows = sum(file.rows for file in change.records)
    log_end = change.log_end or account.log_end
    message_time_ms = account.message_time_ms
    if change.until < account.frontier:
        # The repair followed a truncated log back.
        log_end = change.until
        message_time_ms = change.message_time_ms
    return replace(
        account,
        epoch=account.epoch + 1,
        frontier=change.until,
        state=account.state if change.state is None else change.state,
        halt=change.halt,
        hold=None,
        headless_since=min(change.until, max(account.headless_since, change.headless_since)),
        log_end=log_end,
        message_time_ms=message_time_ms,
        records=account.records + added_rows - change.removed_rows,
        quarantined=change.quarantined,
    )


FINDINGS_ENDED_BY_ACCEPT = ("re-created", "expired")
"""Findings about a topic that end when it is accepted as it is. The next run judges it anew."""


def _apply_accept(change: Change, account: Account | None) -> Account:
    """A partition after a person's decision: it is read again, or begins with a new topic id."""
    if account is None:
        return _new_account(change)
    if change.topic_id == account.topic_id:
        return _apply_accept_of_same_topic(change, account)
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


def _apply_accept_of_same_topic(change: Change, account: Account) -> Account:
    halt = account.halt
    if halt is not None and halt.finding in FINDINGS_ENDED_BY_ACCEPT:
        halt = None
    released = change.certificate.counts.released if change.certificate else 0
    return replace(
        account,
        epoch=account.epoch + 1,
        retired=False,
        halt=halt,
        quarantined=account.quarantined - released,
        state=state_files_after(change, account),
    )


def _apply_slice(entry: Entry, change: Change, account: Account) -> Account:
    """A partition after messages were folded, or were found to be missing."""
    if entry.kind == "slice":
        ensure(change.until >= account.frontier, "a slice never goes back", until=change.until)
    counts = Counts()
    message_time_ms = -1
    if change.certificate is not None:
        counts = change.certificate.counts
        message_time_ms = change.certificate.message_time_ms
    halt = None
    if change.halt and entry.kind == "slice":
        halt = replace(change.halt, sequence=entry.sequence)
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
        message_time_ms=max(account.message_time_ms, message_time_ms),
        counts=_add_counts(account.counts, change.certificate),
    )


def _add_counts(counts: dict[str, int], certificate: Certificate | None) -> dict[str, int]:
    """Findings and holes by name, with those of one more certificate. Sorted by name."""
    total = dict(counts)
    if certificate is not None:
        for name, count in certificate.counts.findings.items():
            total[name] = total.get(name, 0) + count
        for cause, count in certificate.holes.items():
            name = f"hole: {cause}"
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def _next_pace(entry: Entry, pace: Pace) -> Pace:
    """The pace after an entry. A check or a compaction folds nothing and leaves it as it is: a run
    that makes only these is late all the same.
    """
    if entry.kind in ("verdict", "compact"):
        return pace
    folded = 0
    for change in entry.changes:
        if change.certificate:
            folded += change.certificate.counts.messages
    return pace.after_entry(entry.at_seconds, folded, entry.took_seconds)


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as JSON bytes, always the same for the same value."""
    return msgspec.json.encode(manifest, order="deterministic")


def decode_manifest(content: bytes) -> Manifest:
    """A manifest from JSON bytes. A format that this version cannot read is refused."""
    manifest_format = msgspec.json.decode(content, type=dict[str, Any]).get("format")
    if manifest_format in READABLE_FORMATS:
        return msgspec.json.decode(content, type=Manifest)
    if manifest_format == 1:
        writer = "an older"
        advice = "give the stream a new output path"
    else:
        writer = "a newer"
        advice = "deploy it"
    raise ConfigError(
        f"the ledger was written by {writer} Seriatim: format {manifest_format}, "
        f"this one knows {MANIFEST_FORMAT}",
        next=advice,
    )
