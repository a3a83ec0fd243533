"""Requirements: what an entry requires of the ledger at its commit, because the ledger may have
moved since the entry was made. Pure.

Next: ledger/model.py has the values, and applies entries whose requirements hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from seriatim.errors import ensure

# model.py imports this module at run time, so this one may import model.py for its types only.
if TYPE_CHECKING:
    from seriatim.ledger.model import Account, Change, Entry, Halt, Ledger


KINDS_REFUSED_WHEN_HELD = ("slice", "accept", "retire", "compact", "hold")
"""Kinds of entries that require that no repair holds their partitions."""
KINDS_BOUND_TO_FRONTIER = ("slice", "repair", "accept", "retire")
"""Kinds of entries that require that the frontier has not moved since they were made."""


def unmet_requirements(entry: Entry, ledger: Ledger) -> list[str]:
    """The requirements of an entry that do not hold. If there are none, it may be committed."""
    if entry.kind == "start":
        if ledger.sequence >= 0:
            return ["there is a ledger already"]
        return []
    ensure(ledger.sequence >= 0, "a ledger begins with its start entry", kind=entry.kind)
    unmet: list[str] = []
    for change in entry.changes:
        account = ledger.account(change.partition)
        unmet += _unmet_for_change(entry, change, account)
    if entry.kind == "accept":
        unmet += _partitions_not_mentioned(entry, ledger)
    if entry.kind == "verdict":
        unmet += _unmet_for_verdict(entry, ledger)
    return unmet


def _unmet_for_verdict(entry: Entry, ledger: Ledger) -> list[str]:
    """A verdict is void if another one judged as far, or if a repair or an accept replaced what it
    calls bad.
    """
    unmet = []
    if ledger.judged_until >= entry.judged_until:
        unmet.append(f"it was judged up to entry {ledger.judged_until} meanwhile")
    for failed_range in entry.failed_ranges:
        account = ledger.partitions.get(failed_range.partition)
        epoch = -1 if account is None else account.epoch
        if epoch != failed_range.epoch:
            unmet.append(f"{failed_range.partition} was repaired or accepted meanwhile")
    return unmet


def _partitions_not_mentioned(entry: Entry, ledger: Ledger) -> list[str]:
    """Known partitions of a topic that was created again, if the accept leaves them out.

    The new topic id concerns all partitions of the topic, so one accept must take them all.
    """
    topic_ids = {change.partition.topic: change.topic_id for change in entry.changes}
    changed = {change.partition for change in entry.changes}
    unmet = []
    for partition in ledger.known_partitions():
        if partition.topic not in topic_ids or partition in changed:
            continue
        account = ledger.partitions[str(partition)]
        if account.topic_id != topic_ids[partition.topic]:
            unmet.append(f"{partition} belongs to it too")
    return unmet


def _unmet_for_change(entry: Entry, change: Change, account: Account | None) -> list[str]:
    partition_name = str(change.partition)
    if account is None:
        if entry.kind in ("slice", "accept"):
            return []
        return [f"{partition_name} is not known"]
    unmet = []
    if account.epoch != change.epoch and entry.kind != "release":
        unmet.append(f"{partition_name} is at epoch {account.epoch}, not {change.epoch}")
    if entry.kind in KINDS_BOUND_TO_FRONTIER and account.frontier != change.frontier:
        unmet.append(f"{partition_name} is at offset {account.frontier}, not {change.frontier}")
    unmet += _unmet_for_hold(entry, partition_name, account)
    if entry.kind == "slice":
        if account.halt is not None and not _skips_halt(change, account.halt):
            unmet.append(f"{partition_name} is halted at {account.halt.offset}")
        if account.retired:
            unmet.append(f"{partition_name} is retired")
    if entry.kind == "compact" and not _has_merged_state_files(change, account):
        unmet.append(f"{partition_name} has other state files than were merged")
    if entry.kind == "accept" and account.halt != change.halt:
        unmet.append(f"{partition_name} has another finding than the one shown")
    return unmet


def _unmet_for_hold(entry: Entry, partition_name: str, account: Account) -> list[str]:
    """The requirement about the hold of a partition.

    An entry that works under a hold, gives it back or takes it over requires exactly that hold.
    The others require that there is none.
    """
    takes_over = entry.kind == "hold" and entry.resumed_hold is not None
    if takes_over and account.hold == entry.resumed_hold:
        return []
    if entry.kind in ("repair", "release"):
        if account.hold == entry.hold:
            return []
        return [f"{partition_name} is held by {account.hold}, not by {entry.hold}"]
    if entry.kind in KINDS_REFUSED_WHEN_HELD and account.hold is not None:
        return [f"{partition_name} is held by {account.hold}"]
    return []


def _has_merged_state_files(change: Change, account: Account) -> bool:
    """Whether the oldest state files of the partition are those that the compaction merged."""
    oldest_files = account.state[: len(change.merged_state_paths)]
    oldest_paths = tuple(file.path for file in oldest_files)
    return oldest_paths == change.merged_state_paths


def _skips_halt(change: Change, halt: Halt) -> bool:
    """Whether a slice may be committed on a halted partition.

    It may if it goes past the poison message at which the partition halted, because the stream file
    now says to skip it. It also may if it only reports that the topic was created again: that is
    another finding for a person, and it must not get lost.
    """
    if change.halt is not None and change.halt.finding == "re-created":
        return halt.finding != "re-created" and change.until == change.frontier
    return halt.finding == "poison" and change.until > halt.offset


def without_held(entry: Entry, ledger: Ledger) -> Entry:
    """A slice without the partitions that were held or retired since it began, so that the rest can
    be committed. Other entries come back unchanged.
    """
    if entry.kind != "slice":
        return entry
    changes = []
    dropped_partitions = set()
    for change in entry.changes:
        account = ledger.account(change.partition)
        if account is not None and (account.hold is not None or account.retired):
            dropped_partitions.add(str(change.partition))
        else:
            changes.append(change)
    findings = tuple(
        finding for finding in entry.findings if finding.partition_name not in dropped_partitions
    )
    return replace(entry, changes=tuple(changes), findings=findings)
