"""Endings: what ended an incident, by the ledger entry that did. A mail that says "over" also says why.

Next: alerts/incidents.py closes incidents; alerts/mail.py shows what ended them.
"""

from __future__ import annotations

from collections.abc import Iterable

from seriatim.alerts.incidents import REPAIR, Incident
from seriatim.engine.findings import Concern, count_of, printable_session
from seriatim.errors import SeriatimError
from seriatim.ledger.commit import read_head
from seriatim.ledger.entries import (
    AcceptEntry,
    Entry,
    ReleaseEntry,
    RepairEntry,
    RetireEntry,
    SliceEntry,
    VerdictEntry,
)
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Ledger
from seriatim.ports import LedgerStore
from seriatim.stream import Stream

ENTRIES_SEARCHED_MAX = 200
SESSIONS_NAMED_MAX = 3
DEEDS: dict[type[Entry], str] = {
    SliceEntry: "a run folded what waited",
    RepairEntry: "a repair",
    ReleaseEntry: "a repair ended without a change",
    AcceptEntry: "a person accepted it",
    RetireEntry: "a person retired the topic",
    VerdictEntry: "a check found nothing wrong any more",
}
"""What the entries of a type did, in the words of a mail."""
SESSION_DEEDS = {
    "snapshot": "a snapshot from the producer made it right",
    "end": "the session has ended",
    "repair": "a repair made it right",
    "forward": "a repair went on without what is gone",
    "hand": "a person released it",
}
"""By what closed a gap: what happened to its session."""
LEDGER_KINDS = ("halted", "held", "circuit", "quarantine")
"""Kinds of incidents that every ledger shows, so that the entry that ended one is known for certain."""
NEWEST_ENDS: dict[str, tuple[type[Entry], ...]] = {
    REPAIR: (RepairEntry, ReleaseEntry),
    "late": (SliceEntry,),
    "time left": (SliceEntry, RepairEntry, RetireEntry),
    "buffer": (SliceEntry,),
    "swapped": (RepairEntry, SliceEntry, AcceptEntry, RetireEntry),
}
"""Other kinds of incidents, and the entries that can end them. The newest one is named."""


def find_endings(
    stream: Stream, store: LedgerStore, closed_incidents: Iterable[Incident]
) -> dict[str, str]:
    """What ended each of these incidents, by its key. An incident of which no entry since its begin
    says so is left out.
    """
    ended: dict[str, Incident] = {}
    for incident in closed_incidents:
        if incident.concern.kind in LEDGER_KINDS or incident.concern.kind in NEWEST_ENDS:
            ended[incident.concern.key] = incident
    head = read_head(store, stream.name) if ended else None
    endings: dict[str, str] = {}
    if head is None:
        return endings
    begin_seconds = min(incident.since_seconds for incident in ended.values())
    newest = head.ledger.sequence
    later_entry: Entry | None = None
    for sequence in range(newest, max(-1, newest - ENTRIES_SEARCHED_MAX), -1):
        try:
            manifest = store.manifest_at(stream.name, sequence)
        except SeriatimError:
            # An old entry that cannot be read is a matter of `verify`. The news of this look, which
            # may be findings, are mailed without what ended the incident.
            break
        for key, incident in ended.items():
            ending = _ending(manifest, later_entry, incident)
            if ending:
                endings.setdefault(key, ending)
        # An incident begins with the look that sees it. The entry that opened it is older than that.
        if len(endings) == len(ended) or manifest.entry.at_seconds < begin_seconds:
            break
        later_entry = manifest.entry
    return endings


def _ending(manifest: Manifest, later_entry: Entry | None, incident: Incident) -> str:
    """What ended an incident: the entry after this manifest, if the incident is still open in the
    manifest's ledger, or the manifest's own entry. Empty if neither did.
    """
    concern = incident.concern
    if concern.kind in LEDGER_KINDS:
        if later_entry is None or not _is_open(manifest.ledger, concern):
            return ""
        entry = later_entry
    else:
        entry = manifest.entry
        if concern.kind == REPAIR and entry.at_seconds < incident.since_seconds:
            # A repair may commit and fail afterwards. Its own entry did not end its failure.
            return ""
        partition_names = {str(change.partition) for change in entry.changes}
        is_possible = isinstance(entry, NEWEST_ENDS.get(concern.kind, ()))
        if not is_possible or (concern.location and concern.location not in partition_names):
            return ""
    deed = DEEDS.get(type(entry), "")
    if concern.kind in ("quarantine", "swapped"):
        session_deeds = _session_deeds(entry, concern.location)
        if concern.kind == "swapped" and not session_deeds and isinstance(entry, SliceEntry):
            # A slice that only folded other sessions of the partition. An older entry did it.
            return ""
        deed = session_deeds or deed
    if isinstance(entry, AcceptEntry | RetireEntry | ReleaseEntry) and entry.reason:
        deed += f": {entry.reason}"
    return f"{deed} (entry {entry.sequence})" if deed else ""


def _is_open(ledger: Ledger, concern: Concern) -> bool:
    """Whether an incident with this concern is open, as far as this ledger knows."""
    if concern.kind == "circuit":
        return ledger.circuit == "open"
    accounts = [account for account in ledger.partitions.values() if not account.retired]
    if concern.kind == "quarantine":
        return any(account.quarantined for account in accounts)
    account = ledger.partitions.get(concern.location)
    if account is None or account.retired:
        return False
    return account.hold is not None if concern.kind == "held" else account.halt is not None


def _session_deeds(entry: Entry, location: str) -> str:
    """What an entry did to the sessions of a partition, or of all partitions; empty if it closed no
    gap of a session.
    """
    deeds = []
    for change in entry.changes:
        if location not in ("", str(change.partition)):
            continue
        for mark in change.marks:
            if mark.session is not None and mark.closed_by in SESSION_DEEDS:
                name = printable_session(mark.session)
                place = f"session {name} in {change.partition} from offset {mark.offset} on"
                deeds.append(f"{place}: {SESSION_DEEDS[mark.closed_by]}")
    text = "; ".join(deeds[:SESSIONS_NAMED_MAX])
    hidden = len(deeds) - SESSIONS_NAMED_MAX
    return f"{text}; and {count_of(hidden, 'more session')}" if hidden > 0 else text
