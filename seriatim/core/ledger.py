"""The ledger: the only truth about what was done. Pure: `apply(entry, ledger) -> ledger`.

An entry is one commit. It says what it did, and what it requires of a ledger that may have moved meanwhile
(requirements.py). Each entry carries the hash of the one before, and its
manifest carries the whole ledger value, so the last one is all a run needs. The adapter only reads
and compares-and-sets.

Next room: adapters/delta.py commits entries; steps/fold.py makes them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.errors import ConfigError, ensure
from seriatim.core.integrity import Finding, Mark
from seriatim.core.offsets import Partition
from seriatim.core.requirements import unmet
from seriatim.core.retention import Pace
from seriatim.core.session import Counts
from seriatim.core.verdict import Failed, judged

Kind = Literal["start", "slice", "hold", "release", "repair", "compact", "verdict", "accept", "retire"]
FORMAT = 3
"""Of manifests. A newer one is refused, not guessed at."""
READABLE = (2, 3)
"""Formats that mean to this version what they meant to the one that wrote them."""


class File(Struct, frozen=True):
    """A file named by an entry."""

    path: str
    """Below the stream's output path."""
    bytes: int
    rows: int
    digest: str
    """XXH3-128 of the whole file."""
    first: int = -1
    """Record files: the lowest offset of its rows."""
    last: int = -1
    """Record files: the highest offset of its rows."""


class Halt(Struct, frozen=True):
    """Why a partition waits, and since which entry."""

    finding: str
    offset: int
    cause: str
    sequence: int = -1
    log_end: int = -1
    """Truncated: where the log ended."""


class Account(Struct, frozen=True, kw_only=True):
    """All that is known of one partition."""

    topic_id: str
    frontier: int
    born: int
    """Where the frontier began: sessions are headless from here to their first snapshot."""
    epoch: int = 0
    state: tuple[File, ...] = ()
    """Oldest first; a session is in the newest file that has it."""
    halt: Halt | None = None
    hold: str | None = None
    retired: bool = False
    headless_since: int = -1
    """Messages before this offset were lost and passed over: a session last met before it goes on by a snapshot, or
    by a sequence that proves that it lost none."""
    log_end: int = 0
    """As last seen: what is between the frontier and it was never read."""
    messages: int = 0
    bytes: int = 0
    records: int = 0
    headless: int = 0
    quarantined: int = 0
    """Sessions in quarantine now."""
    distance_messages: int = 0
    """The most messages between two snapshots of one session."""
    distance_ms: int = 0
    """The longest time between them."""
    time: int = -1
    """Message time: the largest timestamp so far, where sessions expire by it."""
    counts: dict[str, int] = field(default_factory=dict)
    """Findings and holes by name, since birth."""


class Ledger(Struct, frozen=True, kw_only=True):
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
    judged: int = 0
    """The highest entry up to which all was judged, good or bad."""
    failed: tuple[Failed, ...] = ()
    """Stretches whose check failed and that were neither accepted nor replaced by something good."""
    foreign: int = -1
    """The entry that told of data others wrote to the table; a person's word that all is well takes it back."""
    partitions: dict[str, Account] = field(default_factory=dict)
    """By `topic/number`, sorted."""
    pace: Pace = Pace()
    """How fast it was folded lately: for people, it decides nothing."""

    def account(self, partition: Partition) -> Account | None:
        """What is known of a partition, if anything."""
        return self.partitions.get(str(partition))

    def known(self) -> list[Partition]:
        """The partitions that have an account."""
        return [Partition.parse(place) for place in self.partitions]


class Certificate(Struct, frozen=True, kw_only=True):
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
    time: int = -1
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


class Change(Struct, frozen=True, kw_only=True):
    """What an entry does to one partition."""

    partition: Partition
    epoch: int
    """Required: the partition's epoch."""
    frontier: int
    """Required: the partition's frontier before (entries that move it)."""
    until: int
    """The frontier after."""
    topic_id: str
    born: int
    certificate: Certificate | None = None
    state: tuple[File, ...] | None = None
    """The state files after; None: unchanged."""
    records: tuple[File, ...] = ()
    others: dict[str, tuple[File, ...]] = field(default_factory=dict)
    """Record files of the machine's other tables, by table."""
    kept: tuple[File, ...] = ()
    """Quarantined messages."""
    halt: Halt | None = None
    marks: tuple[Mark, ...] = ()
    """Gaps opened and closed, in order."""
    log_end: int = 0
    """As seen when it was made."""
    rewound: int = -1
    """Repair: the offset from which on output was made again."""
    remade: int = 1 << 62
    """Repair: saved states of before between `rewound` and here are not as committed any more."""
    time: int = -1
    """Repair that follows a log back: message time as of there."""
    removed_rows: int = 0
    """Repair: rows of the record files that leave the table."""
    quarantined: int = 0
    """Repair: sessions in quarantine after it."""
    headless_since: int = -1
    """Repair: where the frontier went on after lost messages, as the account has it; -1: none were lost."""
    merged: tuple[str, ...] = ()
    """Compact: the oldest state files, which `state` replaces."""

    def files(self) -> list[File]:
        """All that it names."""
        beside = [file for files in self.others.values() for file in files]
        return [*self.records, *beside, *self.kept, *(self.state or ())]


class Entry(Struct, frozen=True, kw_only=True):
    """One commit: what it did, and on what it insists."""

    kind: Kind
    attempt: str
    run: str = ""
    product: str = ""
    machine: str = ""
    shape: str = ""
    state_version: int = 0
    sequence: int = -1
    previous: str = ""
    changes: tuple[Change, ...] = ()
    removed: tuple[str, ...] = ()
    """Record files that leave their table (repair, compact)."""
    findings: tuple[Finding, ...] = ()
    held: str | None = None
    """The hold this entry makes, gives back or works under."""
    resumes: str | None = None
    """Hold: the hold that it takes over, from a repair that is over."""
    request: str = ""
    """Hold: what the repair was asked to do, so that it can be resumed by its id alone."""
    verdict: dict[str, str] = field(default_factory=dict)
    """Verdict: partition to good or bad, for the entries after `since` up to `judged`."""
    since: int = -1
    judged: int = -1
    """Accept: failed stretches that were judged up to this entry are right as they are."""
    failed: tuple[Failed, ...] = ()
    """Verdict: what is bad."""
    reason: str = ""
    peak_memory_bytes: int = 0
    at_seconds: float = 0.0
    """The clock when it was made. It informs, and decides nothing but how long replaced files are kept."""
    took_seconds: float = 0.0
    """Slice: how long reading and folding took."""


class Manifest(Struct, frozen=True, kw_only=True):
    """What an entry's file holds: the entry, and the whole ledger after it."""

    format: int = FORMAT
    entry: Entry
    ledger: Ledger


def apply(entry: Entry, ledger: Ledger) -> Ledger:
    """The ledger after an entry. Its requirements must hold."""
    broken = unmet(entry, ledger)
    ensure(not broken, "an entry is applied only where its requirements hold", unmet="; ".join(broken))
    partitions = dict(ledger.partitions)
    for change in entry.changes:
        account, place = ledger.account(change.partition), str(change.partition)
        partitions[place] = (_accepted if entry.kind == "accept" else _changed)(entry, change, account)
    after = replace(
        ledger,
        sequence=ledger.sequence + 1,
        partitions=dict(sorted(partitions.items())),
        machine=ledger.machine or entry.machine,
        shape=ledger.shape or entry.shape,
        state_version=max(ledger.state_version, entry.state_version),
        pace=_pace(entry, ledger.pace),
    )
    return judged(entry, after)


def _changed(entry: Entry, change: Change, account: Account | None) -> Account:
    if account is None:
        account = Account(topic_id=change.topic_id, frontier=change.born, born=change.born)
    if entry.kind == "hold":
        return replace(account, hold=entry.held)
    if entry.kind == "release":
        return replace(account, hold=None)
    if entry.kind == "retire":
        return replace(account, retired=True)
    if entry.kind == "compact":
        return _compacted(change, account)
    if entry.kind == "repair":
        return _repaired(change, account)
    return _folded(entry, change, account)


def state_after(change: Change, account: Account) -> tuple[File, ...]:
    """The state files after a change. What was compacted while it was made stays so, below the file that it adds."""
    if not change.state:
        return account.state if change.state is None else ()
    *kept, new = change.state
    oldest = account.state[: len(kept)]
    return change.state if [file.path for file in kept] == [file.path for file in oldest] else (*account.state, new)


def _compacted(change: Change, account: Account) -> Account:
    """The oldest state files as fewer ones; what slices added meanwhile stays on top of them."""
    if change.state is None:
        return account
    return replace(account, state=(*change.state, *account.state[len(change.merged) :]))


def _repaired(change: Change, account: Account) -> Account:
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
        time=change.time if back else account.time,
        records=account.records + sum(file.rows for file in change.records) - change.removed_rows,
        quarantined=change.quarantined,
    )


LIFTED = ("re-created", "expired")
"""Findings of discovery that end when a topic is accepted as it is: the next run judges it anew."""


def _accepted(_: Entry, change: Change, account: Account | None) -> Account:
    """A partition after a person's decision: it is read again, or its topic's new life begins."""
    if account is None:
        return Account(topic_id=change.topic_id, frontier=change.born, born=change.born)
    if change.topic_id == account.topic_id:
        other = account.halt if account.halt and account.halt.finding not in LIFTED else None
        left = account.quarantined - (change.certificate.counts.released if change.certificate else 0)
        after = replace(account, epoch=account.epoch + 1, retired=False, halt=other, quarantined=left)
        return replace(after, state=state_after(change, account))
    return replace(
        account,
        topic_id=change.topic_id,
        epoch=account.epoch + 1,
        frontier=change.until,
        born=change.born,
        state=(),
        halt=None,
        retired=False,
        headless_since=-1,
        log_end=change.log_end,
        time=-1,
        records=account.records + sum(file.rows for file in change.records),
        quarantined=0,
    )


def _folded(entry: Entry, change: Change, account: Account) -> Account:
    """A partition after messages were folded, or were found to be missing."""
    if entry.kind == "slice":
        ensure(change.until >= account.frontier, "a slice never goes back", until=change.until)
    certificate = change.certificate
    counts = certificate.counts if certificate else Counts()
    added = {
        **counts.findings,
        **{f"hole: {k}": v for k, v in (certificate.holes if certificate else {}).items()},
    }
    halt = replace(change.halt, sequence=entry.sequence) if change.halt and entry.kind == "slice" else None
    return replace(
        account,
        frontier=change.until,
        state=state_after(change, account),
        halt=halt,
        log_end=max(account.log_end, change.log_end),
        messages=account.messages + counts.messages,
        bytes=account.bytes + counts.bytes,
        records=account.records + counts.records,
        headless=account.headless + counts.headless,
        quarantined=account.quarantined + counts.quarantined - counts.released,
        distance_messages=max(account.distance_messages, counts.distance_messages),
        distance_ms=max(account.distance_ms, counts.distance_ms),
        time=max(account.time, certificate.time if certificate else -1),
        counts={k: account.counts.get(k, 0) + added.get(k, 0) for k in sorted({**account.counts, **added})},
    )


def _pace(entry: Entry, pace: Pace) -> Pace:
    """A check or a compaction folds nothing: with them alone a run is late all the same."""
    folded = sum(change.certificate.counts.messages for change in entry.changes if change.certificate)
    return pace if entry.kind in ("verdict", "compact") else pace.then(entry.at_seconds, folded, entry.took_seconds)


def encode(manifest: Manifest) -> bytes:
    """A manifest as JSON bytes, always the same for the same value."""
    return msgspec.json.encode(manifest, order="deterministic")


def decode(content: bytes) -> Manifest:
    """A manifest from JSON bytes."""
    seen = msgspec.json.decode(content, type=dict[str, Any]).get("format")
    if seen not in READABLE:
        who, way = ("an older", "give the stream a new output path") if seen == 1 else ("a newer", "deploy it")
        raise ConfigError(f"the ledger was written by {who} Seriatim: format {seen}, this one knows {FORMAT}", next=way)
    return msgspec.json.decode(content, type=Manifest)
