"""Requirements: what an entry insists on at its commit, on a ledger that may have moved meanwhile.
Pure.

Next room: ledger.py has the values, and applies entries whose requirements hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from seriatim.errors import ensure

if TYPE_CHECKING:  # ledger.py asks this room before it applies
    from seriatim.ledger.model import Account, Change, Entry, Halt, Ledger


KINDS_REFUSED_WHEN_HELD = ("slice", "accept", "retire", "compact", "hold")
"""Kinds that find nobody's hold on their partitions."""


def unmet_requirements(entry: Entry, ledger: Ledger) -> list[str]:
    """The requirements of an entry that do not hold. None: it may be committed."""
    if entry.kind == "start":
        return [] if ledger.sequence < 0 else ["there is a ledger already"]
    ensure(ledger.sequence >= 0, "a ledger begins with its start entry", kind=entry.kind)
    broken = [
        why
        for one in entry.changes
        for why in _unmet_for_change(entry, one, ledger.account(one.partition))
    ]
    return (
        broken
        + _partitions_not_mentioned(entry, ledger)
        + (_unmet_for_verdict(entry, ledger) if entry.kind == "verdict" else [])
    )


def _unmet_for_verdict(entry: Entry, ledger: Ledger) -> list[str]:
    """A verdict is void where others judged as far, or where a repair or an accept replaced what it
    calls bad.
    """
    accounts = {one.partition: ledger.partitions.get(one.partition) for one in entry.failed_ranges}
    moved = [
        one.partition
        for one in entry.failed_ranges
        if getattr(accounts[one.partition], "epoch", -1) != one.epoch
    ]
    late = (
        [f"it was judged up to entry {ledger.judged_until} meanwhile"]
        if ledger.judged_until >= entry.judged_until
        else []
    )
    return late + [f"{place} was repaired or accepted meanwhile" for place in moved]


def _partitions_not_mentioned(entry: Entry, ledger: Ledger) -> list[str]:
    """A topic's new life is that of all its partitions: known ones that an accept says nothing of."""
    lives = {
        change.partition.topic: change.topic_id
        for change in entry.changes
        if entry.kind == "accept"
    }
    known = [
        place
        for place in ledger.known_partitions()
        if ledger.partitions[str(place)].topic_id != lives.get(place.topic)
    ]
    changed = {change.partition for change in entry.changes}
    return [
        f"{place} belongs to it too"
        for place in known
        if place.topic in lives and place not in changed
    ]


def _unmet_for_change(entry: Entry, change: Change, account: Account | None) -> list[str]:
    place = str(change.partition)
    if account is None:
        return [] if entry.kind in ("slice", "accept") else [f"{place} is not known"]
    broken = []
    if account.epoch != change.epoch and entry.kind != "release":
        broken.append(f"{place} is at epoch {account.epoch}, not {change.epoch}")
    if (
        entry.kind in ("slice", "repair", "accept", "retire")
        and account.frontier != change.frontier
    ):
        broken.append(f"{place} is at offset {account.frontier}, not {change.frontier}")
    broken += _unmet_for_hold(entry, place, account)
    if entry.kind == "slice" and account.halt is not None and not _skips_halt(change, account.halt):
        broken.append(f"{place} is halted at {account.halt.offset}")
    if entry.kind == "slice" and account.retired:
        broken.append(f"{place} is retired")
    if entry.kind == "compact" and change.merged_state_paths != tuple(
        file.path for file in account.state[: len(change.merged_state_paths)]
    ):
        broken.append(f"{place} has other state files than were merged")
    if entry.kind == "accept" and account.halt != change.halt:
        broken.append(f"{place} has another finding than the one shown")
    return broken


def _unmet_for_hold(entry: Entry, partition_name: str, account: Account) -> list[str]:
    """Who works under a hold, gives it back or takes it over finds that very one; the others find
    none.
    """
    if (
        entry.kind == "hold"
        and entry.resumed_hold is not None
        and account.hold == entry.resumed_hold
    ):
        return []
    if entry.kind in ("repair", "release"):
        return (
            []
            if account.hold == entry.hold
            else [f"{partition_name} is held by {account.hold}, not by {entry.hold}"]
        )
    return (
        [f"{partition_name} is held by {account.hold}"]
        if entry.kind in KINDS_REFUSED_WHEN_HELD and account.hold is not None
        else []
    )


def _skips_halt(change: Change, halt: Halt) -> bool:
    """Whether a slice goes past the poison at which its partition halted: the stream now says to
    skip it.

    Or finds the topic of a halted partition made again, which is another matter for a person.
    """
    if change.halt is not None and change.halt.finding == "re-created":
        return halt.finding != "re-created" and change.until == change.frontier
    return halt.finding == "poison" and change.until > halt.offset


def without_held(entry: Entry, ledger: Ledger) -> Entry:
    """A slice without the partitions that are newly held or retired: the rest may still commit."""

    def held(change: Change) -> bool:
        account = ledger.account(change.partition)
        return account is not None and (account.hold is not None or account.retired)

    if entry.kind != "slice":
        return entry
    dropped = {str(change.partition) for change in entry.changes if held(change)}
    kept = tuple(change for change in entry.changes if not held(change))
    told = tuple(finding for finding in entry.findings if finding.partition_name not in dropped)
    return replace(entry, changes=kept, findings=told)
