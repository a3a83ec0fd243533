"""Ledger entries: one type for each kind of commit. Pure.

Each type has its own fields, knows what it requires of a ledger that may have moved since the entry
was made (`unmet_requirements`), and what the ledger is after it (`apply`). `apply_entry` is the one
function that joins the two. Each entry carries the hash of the one before.

Next: ledger/model.py has the values that entries change; ledger/commit.py commits entries;
operations/run.py makes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Self, TypeVar, cast, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import Certificate, file_paths
from seriatim.engine.findings import Finding
from seriatim.engine.session import Counts
from seriatim.errors import ensure
from seriatim.ledger.model import (
    HOLE_PREFIX,
    Account,
    Change,
    FailedRange,
    Halt,
    Ledger,
    Totals,
    state_files_after,
)

EntryKind = Literal[
    "start",
    "slice",
    "columns",
    "hold",
    "release",
    "repair",
    "compact",
    "verdict",
    "accept",
    "retire",
]
AccountStep = tuple[Change, Account, Account]
"""A change, and the account of its partition before and after it."""
FINDINGS_ENDED_BY_ACCEPT = ("re-created", "expired")
"""Findings about a topic that end when it is accepted as it is. The next run judges it anew."""


class EntryBase(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
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
    """What all entries have: who made them and when, what they change, and what they report."""

    adds_partitions: ClassVar[bool] = False
    """Whether it may change partitions that have no account yet."""
    counts_for_pace: ClassVar[bool] = True
    """Whether the stream counts as folded when it is made. A stream is late if only checks and
    compactions are made of it.
    """

    attempt: str
    run: str = ""
    product_version: str = ""
    sequence: int = -1
    previous: str = ""
    """The hash of the manifest of the entry before."""
    changes: tuple[Change, ...] = ()
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    """Why it was made, by the words of a person or of the command that made it."""
    at_seconds: float = 0.0
    """The time at which it was made. It decides nothing except how long replaced files stay on
    disk.
    """
    took_seconds: float = 0.0
    """How long the work took that it commits: reading and folding, or checking."""
    peak_memory_bytes: int = 0
    """The most memory that one task of this work used."""

    @property
    def kind(self) -> EntryKind:
        """The name of the type, as manifests and people write it."""
        return cast("EntryKind", self.__struct_config__.tag)

    @property
    def removed_paths(self) -> tuple[str, ...]:
        """Record files that leave their table. Only a repair and a compaction remove any."""
        return ()

    @property
    def has_nothing_to_judge(self) -> bool:
        """Whether it leaves nothing to judge: it added and removed no record, state or offset."""
        if self.removed_paths:
            return False
        for change in self.changes:
            if change.certificate or change.records or change.state is not None:
                return False
        return True

    def replaces_records(self, change: Change) -> bool:
        """Whether it wrote records of the partition of this change again."""
        return False

    def without_held_partitions(self, ledger: Ledger) -> Self:
        """The entry as it can be committed while repairs hold partitions. Only a slice can leave
        partitions out.
        """
        return self

    def unmet_requirements(self, ledger: Ledger) -> list[str]:
        """The requirements that do not hold. If there are none, the entry may be committed."""
        ensure(ledger.sequence >= 0, "a ledger begins with its start entry", kind=self.kind)
        unmet: list[str] = []
        for change in self.changes:
            account = ledger.account(change.partition)
            if account is not None:
                unmet += self._unmet_for_account(change, account)
            elif not self.adds_partitions:
                unmet.append(f"{change.partition} is not known")
        return unmet

    def _unmet_for_account(self, change: Change, account: Account) -> list[str]:
        """What one change requires of the account of its partition and does not find."""
        raise NotImplementedError

    def apply(self, ledger: Ledger) -> Ledger:
        """The ledger after this entry, whose requirements must hold.

        1. The accounts of the partitions that it changes.
        2. The totals, and how fast the stream is folded.
        3. How far it was judged, and what failed.
        """
        sequence = ledger.sequence + 1
        # 1. The accounts.
        partitions = dict(ledger.partitions)
        steps: list[AccountStep] = []
        for change in self.changes:
            name = str(change.partition)
            account = partitions.get(name)
            if account is None:
                account = _new_account(change)
                account_after = self._new_account_after(change)
            else:
                account_after = self._account_after(change, account)
            partitions[name] = account_after
            steps.append((change, account, account_after))
        if len(partitions) > len(ledger.partitions):
            # A new partition is at the end. Values of known ones changed in place.
            partitions = dict(sorted(partitions.items()))
        # 2. Totals and pace.
        totals = self._totals_after(ledger.totals, steps)
        pace = ledger.pace
        if self.counts_for_pace:
            pace = pace.after_entry(self.at_seconds, self._folded_messages(), self.took_seconds)
        # 3. What was judged. Without failed ranges everything that was judged is good. An entry that
        # leaves nothing to judge moves the mark along: otherwise each verdict would itself wait for
        # a check.
        failed_ranges = self._failed_ranges_after(ledger)
        failed_ranges.sort(key=lambda failed: (failed.partition, failed.start, failed.judged_until))
        judged_until = self._judged_until_after(ledger)
        if judged_until == sequence - 1 and self.has_nothing_to_judge:
            judged_until = sequence
        checked = ledger.checked
        if not failed_ranges:
            checked = max(checked, judged_until)
        return replace(
            ledger,
            sequence=sequence,
            partitions=partitions,
            pace=pace,
            stored_totals=totals,
            failed_ranges=tuple(failed_ranges),
            judged_until=judged_until,
            circuit="open" if failed_ranges else "closed",
            checked=checked,
            foreign_sequence=self._foreign_sequence_after(ledger),
        )

    def _account_after(self, change: Change, account: Account) -> Account:
        """The account of a partition after one change."""
        raise NotImplementedError

    def _new_account_after(self, change: Change) -> Account:
        """The account of a partition that had none, after its first change."""
        return self._account_after(change, _new_account(change))

    def _totals_after(self, totals: Totals, steps: Sequence[AccountStep]) -> Totals:
        """The totals after this entry. None of them falls."""
        messages = totals.messages
        records = totals.records
        bytes_written = totals.bytes_written
        for change, account_before, account_after in steps:
            messages += account_after.messages - account_before.messages
            # A repair may leave fewer records than there were, but no total falls.
            records += max(0, account_after.records - account_before.records)
            bytes_written += _bytes_written(change, account_before, account_after)
        return replace(
            totals,
            messages=messages,
            records=records,
            bytes_written=bytes_written,
            findings=_add_findings(totals.findings, self._findings_by_kind()),
        )

    def _findings_by_kind(self) -> Counter[str]:
        """How many findings it made. An entry lists only some findings of a kind of which there are
        many, and certificates count none that concern a whole partition or the stream.
        """
        listed = Counter(finding.finding for finding in self.findings)
        counted = Counter[str]()
        for change in self.changes:
            if change.certificate is not None and change.certificate.counts.findings:
                counted.update(change.certificate.counts.findings)
        # The union of two counters has the larger count of each kind.
        return listed | counted

    def _folded_messages(self) -> int:
        """How many messages it folded."""
        folded = 0
        for change in self.changes:
            if change.certificate is not None:
                folded += change.certificate.counts.messages
        return folded

    def _failed_ranges_after(self, ledger: Ledger) -> list[FailedRange]:
        return list(ledger.failed_ranges)

    def _judged_until_after(self, ledger: Ledger) -> int:
        return ledger.judged_until

    def _foreign_sequence_after(self, ledger: Ledger) -> int:
        """The entry that reported data of others in the table; -1 if a person accepted it since."""
        if any(finding.finding == "foreign" for finding in self.findings):
            return ledger.sequence + 1
        return ledger.foreign_sequence


class MachineEntry(EntryBase, frozen=True, kw_only=True):
    """An entry of which the machine made records or state."""

    machine: str = ""
    shape: str = ""
    state_version: int = 0
    cluster_id: str = ""
    """The id of the Kafka cluster whose messages were folded; empty: not known."""

    def unmet_requirements(self, ledger: Ledger) -> list[str]:
        """What it made has the columns that the table has: nobody has added any meanwhile."""
        unmet = super().unmet_requirements(ledger)
        if self.shape and ledger.shape and self.shape != ledger.shape:
            unmet.append("the table has other columns by now")
        return unmet

    def apply(self, ledger: Ledger) -> Ledger:
        """The ledger after this entry. It knows which machine can read its state, and which cluster
        its offsets are of.
        """
        return replace(
            super().apply(ledger),
            machine=ledger.machine or self.machine,
            shape=ledger.shape or self.shape,
            state_version=max(ledger.state_version, self.state_version),
            cluster_id=ledger.cluster_id or self.cluster_id,
        )


class StartEntry(EntryBase, frozen=True, kw_only=True, tag="start"):
    """Entry 0: the ledger begins, with the partitions that there are."""

    adds_partitions: ClassVar[bool] = True

    def unmet_requirements(self, ledger: Ledger) -> list[str]:
        """A ledger begins only once."""
        if ledger.sequence >= 0:
            return ["there is a ledger already"]
        return []

    def _account_after(self, change: Change, account: Account) -> Account:
        return _account_after_messages(change, account, halt=None)


class SliceEntry(MachineEntry, frozen=True, kw_only=True, tag="slice"):
    """Messages were folded, or were found to be missing."""

    adds_partitions: ClassVar[bool] = True

    def without_held_partitions(self, ledger: Ledger) -> Self:
        """The slice without the partitions that were held or retired since it began, so that the
        rest can be committed.
        """
        changes = []
        left_out = set()
        for change in self.changes:
            account = ledger.account(change.partition)
            if account is not None and (account.hold is not None or account.retired):
                left_out.add(str(change.partition))
            else:
                changes.append(change)
        if not left_out:
            return self
        findings = [finding for finding in self.findings if finding.partition_name not in left_out]
        return replace(self, changes=tuple(changes), findings=tuple(findings))

    def _unmet_for_account(self, change: Change, account: Account) -> list[str]:
        unmet = _unmet_untouched(change, account)
        if account.halt is not None and not _skips_halt(change, account.halt):
            unmet.append(f"{change.partition} is halted at {account.halt.offset}")
        if account.retired:
            unmet.append(f"{change.partition} is retired")
        return unmet

    def _totals_after(self, totals: Totals, steps: Sequence[AccountStep]) -> Totals:
        totals = super()._totals_after(totals, steps)
        return replace(totals, fold_seconds=totals.fold_seconds + self.took_seconds)

    def _account_after(self, change: Change, account: Account) -> Account:
        ensure(change.until >= account.frontier, "a slice never goes back", until=change.until)
        halt = change.halt
        if halt is not None:
            # The entry that halts a partition names itself: people and mails refer to it.
            halt = replace(halt, sequence=self.sequence)
        return _account_after_messages(change, account, halt)


class ColumnsEntry(EntryBase, frozen=True, kw_only=True, tag="columns"):
    """Columns were added behind the others, before any file has them. The commit of this entry is the
    one that adds them to the table.
    """

    counts_for_pace: ClassVar[bool] = False

    added: dict[str, str]
    """The new columns of records, and the names of their types."""
    shape: str
    """The shape of the machine that has them."""
    older_shape: str
    """The shape of the ledger before."""

    def unmet_requirements(self, ledger: Ledger) -> list[str]:
        """Nobody has added columns meanwhile."""
        unmet = super().unmet_requirements(ledger)
        if ledger.shape != self.older_shape:
            unmet.append("the table has other columns by now")
        return unmet

    def apply(self, ledger: Ledger) -> Ledger:
        """The ledger after this entry: only a machine of the new shape goes on with its state."""
        return replace(super().apply(ledger), shape=self.shape)


class HoldEntry(EntryBase, frozen=True, kw_only=True, tag="hold"):
    """A repair reserves partitions, so that no run moves them meanwhile."""

    hold: str
    """The hold that it takes."""
    resumed_hold: str | None = None
    """The hold that it takes over from a repair that has ended."""
    request: str = ""
    """What the repair was asked to do, so that it can be resumed by its id alone."""

    def _unmet_for_account(self, change: Change, account: Account) -> list[str]:
        unmet = _unmet_epoch(change, account)
        takes_over = self.resumed_hold is not None and account.hold == self.resumed_hold
        if not takes_over:
            unmet += _unmet_without_hold(change, account)
        return unmet

    def _account_after(self, change: Change, account: Account) -> Account:
        return replace(account, hold=self.hold)


class ReleaseEntry(EntryBase, frozen=True, kw_only=True, tag="release"):
    """A repair gives partitions back and changes nothing else."""

    hold: str
    """The hold that it gives back."""

    def _unmet_for_account(self, change: Change, account: Account) -> list[str]:
        return _unmet_hold(change, account, self.hold)

    def _account_after(self, change: Change, account: Account) -> Account:
        return replace(account, hold=None)


class RepairEntry(MachineEntry, frozen=True, kw_only=True, tag="repair"):
    """Output was written again, or the frontier was moved over a loss."""

    hold: str | None = None
    """The hold under which it works, and which it gives back."""
    removed_paths: tuple[str, ...] = ()
    """Record files that leave their table."""
    refolded_messages: int = 0
    """Messages that were read and folded again; 0 in entries of formats before 4."""

    def replaces_records(self, change: Change) -> bool:
        """Whether it wrote records again. A repair that only moves the frontier forward does not."""
        return bool(change.records or change.removed_rows or change.replaced_from >= 0)

    def _unmet_for_account(self, change: Change, account: Account) -> list[str]:
        unmet = _unmet_epoch(change, account)
        unmet += _unmet_frontier(change, account)
        unmet += _unmet_hold(change, account, self.hold)
        return unmet

    def _account_after(self, change: Change, account: Account) -> Account:
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

    def _totals_after(self, totals: Totals, steps: Sequence[AccountStep]) -> Totals:
        totals = super()._totals_after(totals, steps)
        refolded_messages = totals.refolded_messages + self.refolded_messages
        return replace(totals, refolded_messages=refolded_messages)

    def _failed_ranges_after(self, ledger: Ledger) -> list[FailedRange]:
        """A failed range whose last file left the table is replaced by this repair. The next good
        check ends it.
        """
        changes = {str(change.partition): change for change in self.changes}
        failed_ranges = []
        for failed in ledger.failed_ranges:
            remaining = _remaining_paths(failed, self.removed_paths)
            if failed.files:
                is_replaced = not remaining
            else:
                # Without files to go by: the repair wrote everything from before the range again.
                change = changes.get(failed.partition)
                is_replaced = change is not None and 0 <= change.replaced_from <= failed.start
            replaced_by = ledger.sequence + 1 if is_replaced else failed.replaced_by_sequence
            failed_after = replace(failed, files=remaining, replaced_by_sequence=replaced_by)
            failed_ranges.append(failed_after)
        return failed_ranges


class CompactEntry(EntryBase, frozen=True, kw_only=True, tag="compact"):
    """Files were merged into larger ones. Nobody sees a difference in what they hold."""

    counts_for_pace: ClassVar[bool] = False

    removed_paths: tuple[str, ...] = ()
    """Record files that leave their table."""

    def _unmet_for_account(self, change: Change, account: Account) -> list[str]:
        unmet = _unmet_epoch(change, account)
        unmet += _unmet_without_hold(change, account)
        if not account.has_oldest_state(change.merged_state_paths):
            unmet.append(f"{change.partition} has other state files than were merged")
        return unmet

    def _account_after(self, change: Change, account: Account) -> Account:
        """The oldest state files become fewer; files that slices added meanwhile stay on top of
        them.
        """
        if change.state is None:
            return account
        # Slices went on while the files were merged, and put theirs on top.
        newer_files = account.state[len(change.merged_state_paths) :]
        return replace(account, state=(*change.state, *newer_files))

    def _failed_ranges_after(self, ledger: Ledger) -> list[FailedRange]:
        """A failed range only gets other files: those into which its own were merged."""
        changes = {str(change.partition): change for change in self.changes}
        failed_ranges = []
        for failed in ledger.failed_ranges:
            remaining = _remaining_paths(failed, self.removed_paths)
            change = changes.get(failed.partition)
            if change is None or remaining == failed.files:
                failed_ranges.append(failed)
                continue
            merged_into = _paths_within(failed, change)
            failed_ranges.append(replace(failed, files=(*remaining, *merged_into)))
        return failed_ranges


class VerdictEntry(EntryBase, frozen=True, kw_only=True, tag="verdict"):
    """A check judged the entries after `judged_after` up to `judged_until`."""

    counts_for_pace: ClassVar[bool] = False

    verdict: dict[str, str] = field(default_factory=dict)
    """Good or bad, by partition."""
    judged_after: int = -1
    judged_until: int = -1
    failed_ranges: tuple[FailedRange, ...] = ()
    """What is bad."""

    def unmet_requirements(self, ledger: Ledger) -> list[str]:
        """A verdict is void if another one judged as far, or if a repair or an accept replaced what
        it calls bad.
        """
        unmet = super().unmet_requirements(ledger)
        if ledger.judged_until >= self.judged_until:
            unmet.append(f"it was judged up to entry {ledger.judged_until} meanwhile")
        for failed_range in self.failed_ranges:
            account = ledger.partitions.get(failed_range.partition)
            # A repair and an accept raise the epoch, so that equal epochs prove that what was judged
            # is still there.
            epoch = -1 if account is None else account.epoch
            if epoch != failed_range.epoch:
                unmet.append(f"{failed_range.partition} was repaired or accepted meanwhile")
        return unmet

    def _failed_ranges_after(self, ledger: Ledger) -> list[FailedRange]:
        """The failed ranges that this check did not find good again, and its own."""
        bad_partitions = {name for name, result in self.verdict.items() if result != "good"}
        failed_partitions = {failed.partition for failed in self.failed_ranges}
        ensure(bad_partitions == failed_partitions, "a bad verdict says what is bad")
        failed_again = {(failed.partition, failed.files) for failed in self.failed_ranges}
        failed_ranges = []
        for failed in ledger.failed_ranges:
            was_judged_again = failed.partition in self.verdict
            was_replaced = 0 <= failed.replaced_by_sequence <= self.judged_until
            if was_judged_again and was_replaced:
                # What came in place of its files was judged now. If it is bad, the entry says so.
                continue
            if (failed.partition, failed.files) not in failed_again:
                failed_ranges.append(failed)
        failed_ranges.extend(self.failed_ranges)
        return failed_ranges

    def _judged_until_after(self, ledger: Ledger) -> int:
        return max(ledger.judged_until, self.judged_until)


class AcceptEntry(EntryBase, frozen=True, kw_only=True, tag="accept"):
    """A person decided: partitions are read again or begin with a new topic id, what failed is
    right as it is, or data of others in the table is.
    """

    adds_partitions: ClassVar[bool] = True

    judged_until: int = -1
    """Failed ranges that were judged up to this entry are right as they are."""

    def unmet_requirements(self, ledger: Ledger) -> list[str]:
        """An accept takes all partitions of a topic, and each as the person saw it."""
        return [*super().unmet_requirements(ledger), *self._partitions_not_mentioned(ledger)]

    def _partitions_not_mentioned(self, ledger: Ledger) -> list[str]:
        """Known partitions of a topic that was created again, if the accept leaves them out.

        The new topic id concerns all partitions of the topic, so one accept must take them all.
        """
        topic_ids = {change.partition.topic: change.topic_id for change in self.changes}
        if not topic_ids:
            return []
        changed = {change.partition for change in self.changes}
        unmet = []
        for partition in ledger.known_partitions():
            if partition.topic not in topic_ids or partition in changed:
                continue
            account = ledger.partitions[str(partition)]
            if account.topic_id != topic_ids[partition.topic]:
                unmet.append(f"{partition} belongs to it too")
        return unmet

    def _unmet_for_account(self, change: Change, account: Account) -> list[str]:
        unmet = _unmet_untouched(change, account)
        if account.halt != change.halt:
            unmet.append(f"{change.partition} has another finding than the one shown")
        return unmet

    def _new_account_after(self, change: Change) -> Account:
        return _new_account(change)

    def _account_after(self, change: Change, account: Account) -> Account:
        if change.topic_id == account.topic_id:
            return _account_of_same_topic(change, account)
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

    def _failed_ranges_after(self, ledger: Ledger) -> list[FailedRange]:
        if self.judged_until < 0:
            return list(ledger.failed_ranges)
        accepted_until = self.judged_until
        return [failed for failed in ledger.failed_ranges if failed.judged_until > accepted_until]

    def _foreign_sequence_after(self, ledger: Ledger) -> int:
        """An accept of neither a topic nor a failed check accepts the data of others."""
        foreign_sequence = super()._foreign_sequence_after(ledger)
        was_reported_now = foreign_sequence > ledger.sequence
        if self.changes or self.judged_until >= 0 or was_reported_now:
            return foreign_sequence
        return -1


class RetireEntry(EntryBase, frozen=True, kw_only=True, tag="retire"):
    """A person decided that partitions are not read any more."""

    def _unmet_for_account(self, change: Change, account: Account) -> list[str]:
        return _unmet_untouched(change, account)

    def _account_after(self, change: Change, account: Account) -> Account:
        return replace(account, retired=True)


Entry = (
    StartEntry
    | SliceEntry
    | ColumnsEntry
    | HoldEntry
    | ReleaseEntry
    | RepairEntry
    | CompactEntry
    | VerdictEntry
    | AcceptEntry
    | RetireEntry
)
"""One commit: what it did, and what it requires. In manifests its `kind` says of which type it is."""
AnyEntry = TypeVar("AnyEntry", bound=Entry)
"""For functions that return an entry of the same type as they were given."""
ENTRY_TYPES: dict[str, type[Entry]] = {}
"""The types by the kind that manifests name. An entry of another kind is of a newer version."""
for _entry_type in get_args(Entry):
    ENTRY_TYPES[_entry_type.__struct_config__.tag] = _entry_type


def apply_entry(entry: Entry, ledger: Ledger) -> Ledger:
    """The ledger after an entry, whose requirements must hold."""
    unmet = entry.unmet_requirements(ledger)
    ensure(
        not unmet,
        "an entry is applied only where its requirements hold",
        unmet="; ".join(unmet),
    )
    return entry.apply(ledger)


def _unmet_epoch(change: Change, account: Account) -> list[str]:
    """No repair and no accept happened to the partition since the change was made."""
    if account.epoch == change.epoch:
        return []
    return [f"{change.partition} is at epoch {account.epoch}, not {change.epoch}"]


def _unmet_frontier(change: Change, account: Account) -> list[str]:
    """The frontier has not moved since the change was made."""
    if account.frontier == change.frontier:
        return []
    return [f"{change.partition} is at offset {account.frontier}, not {change.frontier}"]


def _unmet_without_hold(change: Change, account: Account) -> list[str]:
    """No repair holds the partition."""
    if account.hold is None:
        return []
    return [f"{change.partition} is held by {account.hold}"]


def _unmet_hold(change: Change, account: Account, hold: str | None) -> list[str]:
    """The partition is held by exactly this hold."""
    if account.hold == hold:
        return []
    return [f"{change.partition} is held by {account.hold}, not by {hold}"]


def _unmet_untouched(change: Change, account: Account) -> list[str]:
    """Nobody has moved or held the partition since the change was made."""
    is_same_place = account.epoch == change.epoch and account.frontier == change.frontier
    if is_same_place and account.hold is None:
        # The usual case, decided quickly: an entry may change thousands of partitions.
        return []
    unmet = _unmet_epoch(change, account)
    unmet += _unmet_frontier(change, account)
    unmet += _unmet_without_hold(change, account)
    return unmet


def _skips_halt(change: Change, halt: Halt) -> bool:
    """Whether a slice may be committed on a halted partition.

    It may if it goes past the poison message at which the partition halted, because the stream file
    now says to skip it. It also may if it only reports that the topic was created again: that is
    another finding for a person, and it must not get lost.
    """
    if change.halt is not None and change.halt.finding == "re-created":
        return halt.finding != "re-created" and change.until == change.frontier
    return halt.finding == "poison" and change.until > halt.offset


def _new_account(change: Change) -> Account:
    return Account(
        topic_id=change.topic_id,
        frontier=change.initial_frontier,
        initial_frontier=change.initial_frontier,
    )


def _account_after_messages(change: Change, account: Account, halt: Halt | None) -> Account:
    """A partition after messages were folded, or were found to be missing."""
    counts = Counts()
    message_time_ms = -1
    if change.certificate is not None:
        counts = change.certificate.counts
        message_time_ms = change.certificate.message_time_ms
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


def _bytes_written(change: Change, account_before: Account, account_after: Account) -> int:
    """The size of the files that a change adds.

    Its state files may be those of before in part, or files that a compaction has merged meanwhile.
    So the state files are taken from the accounts.
    """
    size_bytes = 0
    for file in change.files_without_state():
        size_bytes += file.size_bytes
    if account_after.state is not account_before.state:
        paths_before = file_paths(account_before.state)
        for file in account_after.state:
            if file.path not in paths_before:
                size_bytes += file.size_bytes
    return size_bytes


def _add_findings(findings: Mapping[str, int], added: Mapping[str, int]) -> dict[str, int]:
    """Findings by kind, with more of them. Sorted by kind."""
    total = Counter(findings)
    total.update(added)
    return dict(sorted(total.items()))


def _add_counts(counts: dict[str, int], certificate: Certificate | None) -> dict[str, int]:
    """Findings and holes by name, with those of one more certificate. Sorted by name."""
    if certificate is None:
        return counts
    findings = certificate.counts.findings
    if not findings and not certificate.holes:
        # Most slices find nothing, and there may be thousands of partitions.
        return counts
    total = Counter(counts)
    total.update(findings)
    for cause, count in certificate.holes.items():
        total[f"{HOLE_PREFIX}{cause}"] += count
    return dict(sorted(total.items()))


def _account_of_same_topic(change: Change, account: Account) -> Account:
    """A partition that a person lets go on with the topic that it has."""
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


def _remaining_paths(failed_range: FailedRange, removed_paths: Iterable[str]) -> tuple[str, ...]:
    """The files of a failed range that do not leave the table."""
    removed = set(removed_paths)
    return tuple(path for path in failed_range.files if path not in removed)


def _paths_within(failed_range: FailedRange, change: Change) -> list[str]:
    """The new record files of a change that overlap with a failed range."""
    return [
        file.path
        for file in change.records
        if file.first_offset < failed_range.until and file.last_offset >= failed_range.start
    ]
