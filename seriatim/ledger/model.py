"""The ledger as values: the only truth about what was done. Pure.

The ledger value is the whole account of a stream: what is known about each partition, how far it
was judged, and what failed. Entries change it (entries.py). Each manifest carries the value after
its entry, so the last one is all that a run needs (manifests.py).

The circuit is open while a check has failed and nobody repaired or accepted what is bad. A failed
range is named by its files. It is over when a person accepts it, or when repairs removed all its
files from the table and a later check found what replaced them good. A compaction only gives it
other files.

Next: ledger/entries.py has the entries; ledger/commit.py commits them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import Certificate, File, Files, FilesByTable, file_paths
from seriatim.engine.findings import FindingsError, GapMark
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, ensure


class Pace(Struct, frozen=True, kw_only=True):
    """How fast a stream was folded lately. Each entry counts twice as much as the entry before."""

    at_seconds: float = 0.0
    """The time of the last entry."""
    messages: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Messages folded per second of work; None: nothing was timed yet."""
        if self.seconds <= 0:
            return None
        return self.messages / self.seconds

    def after_entry(self, at_seconds: float, messages: int, took_seconds: float) -> Pace:
        """The pace after one more entry. Only entries that folded something are timed."""
        if not messages or took_seconds <= 0:
            return replace(self, at_seconds=at_seconds)
        return Pace(
            at_seconds=at_seconds,
            messages=self.messages / 2 + messages,
            seconds=self.seconds / 2 + took_seconds,
        )


HOLE_PREFIX = "hole: "
"""Begins the names of holes in `Account.counts`, which has findings as well."""


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
    state: Files = ()
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
    archived_until: int = -1
    """For what comes: the messages before this offset are in the archive. Always -1 in this version:
    nothing is archived.
    """
    life: int = 0
    """For what comes: how often Kafka gave offsets of this topic id to other messages. The archive
    has a folder for each life. Always 0 in this version.
    """

    def has_oldest_state(self, paths: Sequence[str]) -> bool:
        """Whether these are its oldest state files. Files are merged from the oldest on, while
        slices may add others at the end.
        """
        return file_paths(self.state[: len(paths)]) == tuple(paths)


class FailedRange(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"judged_until": "judged", "replaced_by_sequence": "replaced"},
):
    """A range of one partition's output that a check found bad."""

    partition: str
    epoch: int
    """The epoch that was judged. A repair or an accept meanwhile raises it, and the verdict is
    void.
    """
    start: int
    until: int
    files: tuple[str, ...] = ()
    """The record files that are bad, as far as that is known. None if a promise is broken for which
    no single file is to blame.
    """
    judged_until: int
    """The entry up to which it was judged. `accept --sequence` names it."""
    replaced_by_sequence: int = -1
    """The repair that removed the last of its files. The next good check ends the range."""


class Totals(Struct, frozen=True, kw_only=True):
    """What was done to a stream since it began. No total ever falls, whatever a repair takes back."""

    messages: int = 0
    """Messages that were folded for the first time."""
    records: int = 0
    """Records by which the table `records` grew. One that a repair writes again counts once."""
    bytes_written: int = 0
    """The size of all files that entries added: records, state and quarantined messages."""
    findings: dict[str, int] = field(default_factory=dict)
    """Findings by kind, sorted."""
    refolded_messages: int = 0
    """Messages that repairs folded again."""
    fold_seconds: float = 0.0
    """How long reading and folding of slices took."""


class EntryMark(Struct, frozen=True):
    """A ledger entry by number and hash, as witnesses, notes and the commits of tables name it."""

    sequence: int = -1
    """-1: none, or none that can be trusted."""
    sha256: str = ""


class Ledger(
    Struct,
    frozen=True,
    kw_only=True,
    rename={
        "judged_until": "judged",
        "failed_ranges": "failed",
        "foreign_sequence": "foreign",
        "stored_totals": "totals",
    },
):
    """The whole account of a stream as of one entry."""

    stream: str
    machine: str = ""
    """The name of the machine that wrote the state; another one is refused."""
    shape: str = ""
    """The shape of that machine; another one would misread the state."""
    state_version: int = 0
    """The highest state version that was ever written; older code is refused."""
    cluster_id: str = ""
    """The id of the Kafka cluster whose offsets these are; another one is refused. Empty in outputs
    of before, which take it over with their next slice.
    """
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
    stored_totals: Totals | None = None
    """The totals since the stream began; None before the first entry of format 4."""
    columns: dict[str, str] = field(default_factory=dict)
    """For what comes: the types of the columns that were added to the table `records` since it was
    created, by name. Always empty in this version.
    """
    promoted_from: str = ""
    """For what comes: the branch whose output last replaced that of the stream. Always empty in this
    version.
    """

    @property
    def mark(self) -> EntryMark:
        """The entry after which this is the ledger."""
        return EntryMark(self.sequence, self.sha256)

    @property
    def totals(self) -> Totals:
        """What was done since the stream began. If earlier versions wrote the ledger, the totals
        begin with what its accounts know.
        """
        if self.stored_totals is not None:
            return self.stored_totals
        return _totals_of_accounts(self.partitions.values())

    def account(self, partition: Partition) -> Account | None:
        """What is known about a partition; None if it is not known."""
        return self.partitions.get(str(partition))

    def known_partitions(self) -> list[Partition]:
        """The partitions that have an account."""
        return [Partition.parse(name) for name in self.partitions]


def _totals_of_accounts(accounts: Iterable[Account]) -> Totals:
    messages = 0
    records = 0
    findings = Counter[str]()
    for account in accounts:
        messages += account.messages
        records += account.records
        for name, count in account.counts.items():
            if not name.startswith(HOLE_PREFIX):
                findings[name] += count
    return Totals(messages=messages, records=records, findings=dict(sorted(findings.items())))


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
    state: Files | None = None
    """The state files after; None: unchanged."""
    records: Files = ()
    other_records: FilesByTable = field(default_factory=dict)
    """Record files of the machine's other tables, by table."""
    quarantine_files: Files = ()
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
        return [*self.files_without_state(), *(self.state or ())]

    def files_without_state(self) -> list[File]:
        """The record files and the files of quarantined messages that the change names."""
        files = list(self.records)
        for other_files in self.other_records.values():
            files.extend(other_files)
        files.extend(self.quarantine_files)
        return files


def unmoved_change(partition: Partition, account: Account) -> Change:
    """A change that leaves a partition where it is. Callers replace what they do change."""
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
    )


def state_files_after(change: Change, account: Account) -> Files:
    """The state files after a change.

    If older files were compacted while the change was made, the compacted files stay, below the
    file that the change adds.
    """
    if change.state is None:
        return account.state
    if not change.state:
        return ()
    *older_files, new_file = change.state
    if account.has_oldest_state(file_paths(older_files)):
        return change.state
    # A compaction was committed meanwhile. It changes no session, so that the new file is right on
    # top of the merged ones, too.
    return (*account.state, new_file)


def refuse_open_circuit(ledger: Ledger, on_check_failure: str) -> None:
    """Refuse to fold on while the circuit is open, if the stream file says so."""
    if ledger.circuit == "closed" or on_check_failure != "stop":
        return
    descriptions = [describe_failed_range(failed) for failed in ledger.failed_ranges[:10]]
    raise FindingsError(
        f'{ledger.stream}: a check failed, and the stream says on_check_failure = "stop"',
        failed="\n".join(descriptions),
        next=circuit_advice(ledger),
    )


def describe_failed_range(failed_range: FailedRange) -> str:
    """A failed range in one line, for a person."""
    replaced = "; repaired, not checked since" if failed_range.replaced_by_sequence >= 0 else ""
    return (
        f"{failed_range.partition} [{failed_range.start}, {failed_range.until}), "
        f"judged up to entry {failed_range.judged_until}{replaced}"
    )


def circuit_advice(ledger: Ledger) -> str:
    """The commands that close an open circuit."""
    ensure(bool(ledger.failed_ranges), "an open circuit has its reason", circuit=ledger.circuit)
    unrepaired = [failed for failed in ledger.failed_ranges if failed.replaced_by_sequence < 0]
    if not unrepaired:
        return f"seriatim check {ledger.stream}"
    partition_name = unrepaired[0].partition
    judged_until = max(failed.judged_until for failed in ledger.failed_ranges)
    return (
        f"seriatim repair {ledger.stream} --partition {partition_name},"
        f" then `seriatim check {ledger.stream}`;\n"
        f"or, if the output is right as it is:"
        f' seriatim accept {ledger.stream} --sequence {judged_until} --because "…"'
    )


def refuse_incompatible_machine(
    ledger: Ledger, runner: Runner, *, may_be_another: bool = False, may_have_more: bool = False
) -> None:
    """Refuse code that would misread the state: code that is older than the state, another machine
    (unless it may be one), or a newer machine without `upgrade`. A table with more columns behind
    those of the ledger is refused as well, unless it may have more.
    """
    stream = ledger.stream
    machine = runner.name
    state_version = runner.state_version
    if ledger.machine and ledger.machine != machine and not may_be_another:
        raise ConfigError(
            f"{stream}: the state was written by machine {ledger.machine!r}, "
            f"the stream file says {machine!r}",
            next=f"set machine = {ledger.machine!r}, "
            "or give the new machine its own stream file and output path",
        )
    has_other_shape = bool(ledger.shape) and ledger.shape != runner.shape
    has_more_columns = has_other_shape and runner.older_columns(ledger.shape) is not None
    if has_more_columns and not may_have_more:
        raise ConfigError(
            f"{stream}: the stream file has columns that the table does not have yet",
            next=f"seriatim run {stream}: it adds them",
        )
    if has_other_shape and not has_more_columns:
        raise ConfigError(
            f"{stream}: the stream file has changed in a way that would misread the state",
            expected=ledger.shape,
            found=runner.shape,
            next="set it back, or give the stream a new output path. New columns may only be added"
            " behind all others",
        )
    if state_version < ledger.state_version:
        raise ConfigError(
            f"{stream}: the state has version {ledger.state_version}, "
            f"this code knows only {state_version}",
            next=f"deploy the code that wrote version {ledger.state_version}, or newer",
        )
    is_newer = state_version > ledger.state_version > 0
    if is_newer and not runner.can_upgrade:
        raise ConfigError(
            f"{stream}: the state has version {ledger.state_version}, "
            f"this code {state_version} and no `upgrade`",
            next=f"write {machine}'s upgrade(old, version), "
            f"or set state_version back to {ledger.state_version}",
        )


def refuse_changed_machine(ledger: Ledger, state_version: int) -> None:
    """Refuse another version of the machine where the unchanged one is required."""
    if state_version != ledger.state_version:
        raise ConfigError(
            f"{ledger.stream}: the state has version {ledger.state_version}, "
            f"the deployed machine {state_version}",
            next="leave out --machine unchanged: "
            "then history is folded again with what is deployed",
        )
