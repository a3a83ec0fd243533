"""Alerts: what an observation of a stream means for people, stored first and then sent.

Several processes may watch a stream at once, and none holds a lock.

- Deciding: the open incidents and the waiting mails are one alert state. A new one is stored only if
  no other was stored since it was read (`OutboxChangedError`: observe and decide again). So each news
  is queued in one mail.
- Sending: a process claims a waiting mail, sends it, stores a state without it, and deletes the claim.

After a crash before a state is stored, the next observation finds the same news again. After a crash
behind it, the mail is sent later: when it was claimed, as soon as the claim is too old. A mail whose
sending was not confirmed is sent again under the same id, so no mail is lost.

Next: alerts/incidents.py decides what is news; alerts/mail.py writes the mail; cli/watch.py repeats
all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.alerts.endings import find_endings
from seriatim.alerts.incidents import (
    REFUSED_MAIL_RETENTION_SECONDS,
    Alert,
    AlertState,
    Mail,
    MailReference,
    MailRefusedError,
    Note,
    Observation,
    OutboxChangedError,
    StoredState,
    close_incidents,
    consumed_note_names,
    update_incidents,
)
from seriatim.alerts.mail import MailContext, compose_mail
from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import Concern, Finding
from seriatim.errors import PlatformError, SeriatimError
from seriatim.ledger.commit import read_head
from seriatim.ledger.entries import HoldEntry, ReleaseEntry, RepairEntry
from seriatim.ledger.model import Ledger
from seriatim.operations.repair.damage import RepairRequest
from seriatim.operations.status import StreamStatus
from seriatim.ports import LedgerStore
from seriatim.stream import Stream

STATE_TRIES_MAX = 20
"""How often other processes may be faster at noting what became of their mails."""
NO_CHANNEL = "no way to send alerts is set"


class Outbox(Protocol):
    """A stream's alert state, and the notes that a scheduler left. On a store: alerts/outbox.py."""

    def alert_state(self) -> AlertState: ...
    def stored_state(self) -> StoredState:
        """The newest alert state, with its version."""
        ...

    def put_alert_state(self, alert_state: AlertState, version_before: int) -> int:
        """Store the state that follows a version; the new version. `OutboxChangedError` if there is
        another one already. Any other `PlatformError` means that nothing was stored.
        """
        ...

    def claim_mail(self, mail_id: str) -> str | None:
        """Claim the sending of a mail; the claim, or None if another process sends it."""
        ...

    def release_claim(self, claim: str) -> None:
        """Give up a claim: the mail was not sent."""
        ...

    def delete_done_claims(self) -> None:
        """Delete the claims of mails that wait no more."""
        ...

    def notes(self) -> dict[str, Note]:
        """All notes by name, oldest first."""
        ...

    def add_note(self, note: Note) -> None:
        """Leave a note for the next watch."""
        ...

    def delete_notes(self, names: list[str]) -> None:
        """Delete notes that the stored alert state already contains."""
        ...

    def put_refused_mail(self, mail: Mail) -> str:
        """Store a mail that the server refuses; where it is stored."""
        ...


class Notifier(Protocol):
    """Sends mails through one channel. alerts/channels.py lists the channels. Nothing is sent for a
    stream whose `alerts.to` is empty, so a channel without mail addresses needs one there, too.
    """

    def send(self, mail: Mail) -> str:
        """Send a mail; which of several recipients were refused, as a sentence; empty: none.

        Raises `MailRefusedError` if the receiver answered and does not want this mail. The next
        mail is tried at once, and this one at the next watch, for `REFUSED_MAIL_RETENTION_SECONDS`.
        Raises `PlatformError` if the receiver could not be reached, let nobody in, or is too busy.
        Then all mails wait, without a limit. No other error may leave it.
        """
        ...

    def check(self) -> str:
        """Do what comes before a mail, such as connecting and logging in, and send none; returns the
        receiver's address without secrets. Raises `PlatformError`, whose `next` names the settings
        to correct.
        """
        ...


class SendResult(Struct, kw_only=True):
    """What became of the waiting mails."""

    sent_mails: list[Mail]
    waiting_mails: list[Mail]
    refused_mail_paths: list[str] = field(default_factory=list)
    """Where mails are stored that were refused for too long."""
    trouble: str = ""
    """Why mails wait, or who did not get them; empty if all is well."""


def send_alerts(
    mail_context: MailContext,
    remind_hours: float,
    observation: Observation,
    seen: StoredState,
    outbox: Outbox,
    notifier: Notifier | None,
) -> SendResult:
    """Decide what is news, store it, and send all mails that wait.

    `seen` is the alert state that was read before the observation. If others have stored another one
    since, `OutboxChangedError` is raised and nothing has happened: read it and observe again.

    1. Read the notes, and decide what is news.
    2. Store the new state together with the mail.
    3. Delete the notes that the stored state contains.
    4. Send the waiting mails.
    """
    # 1. Decide what is news.
    alert_state = seen.alert_state
    notes = outbox.notes()
    # Another process may have stored what these say, and not have deleted them yet.
    done_notes = [name for name in alert_state.consumed_notes if notes.pop(name, None)]
    recipients = alert_state.to if mail_context.to is None else mail_context.to
    damage = [seen.damage] if seen.damage else []
    observation = replace(observation, notes=[*notes.values(), *damage])
    updated_state, alert = update_incidents(alert_state, observation, remind_hours)
    new_mails: tuple[Mail, ...] = ()
    if alert and recipients:
        context = replace(mail_context, to=recipients)
        mail = compose_mail(alert, context, observation.at_seconds)
        mail = replace(mail, id=_mail_id(context.stream, seen.version, alert))
        new_mails = (mail,)
        if alert.findings and not alert.failed_runs:
            reference = MailReference(
                id=mail.id, subject=mail.subject, at_seconds=observation.at_seconds
            )
            updated_state = replace(updated_state, unlinked_mail=reference)
    # 2. Store state and mail.
    done_notes += consumed_note_names(notes, observation.at_seconds)
    updated_state = replace(
        updated_state,
        to=recipients,
        mails=(*updated_state.mails, *new_mails),
        consumed_notes=tuple(done_notes),
    )
    if updated_state != alert_state or seen.damage:
        _save_or_send(updated_state, seen.version, new_mails, outbox, notifier)
    crash_point("alert-kept")
    # 3. Delete notes. Before step 2 a crash would lose what they say.
    outbox.delete_notes(done_notes)
    # 4. Send.
    return send_waiting_mails(mail_context.to, observation.at_seconds, outbox, notifier)


def _mail_id(stream: str, version_before: int, alert: Alert) -> str:
    """The id of the mail about an alert.

    It does not depend on when it was written: while the alert state cannot be stored, each
    observation finds the same news again, and mails it under the same id. The version of the state
    that is stored with a mail distinguishes it from later mails about the same.
    """
    notes = (*alert.failed_runs, *alert.recovered_runs, *alert.followed_runs)
    incidents = (*alert.reminded_incidents, *alert.closed_incidents)
    news = [
        *(f"run {note.run} {note.text}" for note in notes),
        *(f"{finding}" for finding in map(_finding_key, alert.findings)),
        *(f"concern {concern.key}" for concern in alert.new_concerns),
        *(f"incident {incident.concern.key}" for incident in incidents),
    ]
    identity = "\n".join([stream, str(version_before), *news])
    return hashlib.sha256(identity.encode(errors="backslashreplace")).hexdigest()[:24]


def _finding_key(finding: Finding) -> str:
    return f"{finding.finding} {finding.partition_name} {finding.offset} {finding.session!r}"


def _save_or_send(
    alert_state: AlertState,
    version_before: int,
    mails: tuple[Mail, ...],
    outbox: Outbox,
    notifier: Notifier | None,
) -> None:
    """Store the state. If that fails, send the mails at once; they are sent again after every
    observation until the state can be stored.
    """
    try:
        outbox.put_alert_state(alert_state, version_before)
    except OutboxChangedError:
        raise
    except PlatformError:
        if notifier is not None:
            with suppress(PlatformError):
                for mail in mails:
                    notifier.send(mail)
        raise


def send_waiting_mails(
    recipients: tuple[str, ...] | None,
    now_seconds: float,
    outbox: Outbox,
    notifier: Notifier | None,
) -> SendResult:
    """Send the waiting mails, oldest first, until one cannot be sent.

    They go to `recipients`, which the stream file names now; None: to those they were written for.
    A refused mail does not stop the others; after a time it is stored elsewhere. A mail that another
    process is sending is left to it.
    """
    outbox.delete_done_claims()
    if recipients is not None:
        _change_mails(outbox, lambda mails: _readdress(mails, recipients))
    mails = outbox.alert_state().mails
    result = SendResult(sent_mails=[], waiting_mails=list(mails))
    if notifier is None:
        if mails:
            result.trouble = NO_CHANNEL
        return result
    for mail in mails:
        claim = outbox.claim_mail(mail.id)
        if claim is None:
            result.waiting_mails.remove(mail)
            continue
        is_reachable = _send_claimed_mail(mail, claim, now_seconds, result, outbox, notifier)
        if not is_reachable:
            break
    return result


def _readdress(mails: tuple[Mail, ...], recipients: tuple[str, ...]) -> tuple[Mail, ...]:
    """The mails to other recipients. Without recipients nobody waits for them any more."""
    return tuple(replace(mail, to=recipients) for mail in mails if recipients)


def _send_claimed_mail(
    mail: Mail,
    claim: str,
    now_seconds: float,
    result: SendResult,
    outbox: Outbox,
    notifier: Notifier,
) -> bool:
    """Send a mail, and store that it was sent or refused; whether the mail server answers."""
    # Whoever sent it before has first stored that, and then deleted the claim. So a look behind our
    # own claim is certain.
    if all(waiting.id != mail.id for waiting in outbox.alert_state().mails):
        outbox.release_claim(claim)
        result.waiting_mails.remove(mail)
        return True
    try:
        result.trouble = notifier.send(mail) or result.trouble
    except MailRefusedError as error:
        result.trouble = error.message
        _keep_or_archive_refused(mail, now_seconds, result, outbox)
        outbox.release_claim(claim)
        return True
    except PlatformError as error:
        result.trouble = error.message
        outbox.release_claim(claim)
        return False
    # After a crash here the mail is sent a second time, with the same id, when the claim is too old.
    crash_point("alert-sent")
    result.sent_mails.append(mail)
    result.waiting_mails.remove(mail)
    _replace_mail(outbox, mail.id, None)
    outbox.delete_done_claims()
    return True


def _keep_or_archive_refused(
    mail: Mail, now_seconds: float, result: SendResult, outbox: Outbox
) -> None:
    """Let a refused mail wait, or store it elsewhere if it has waited long enough."""
    refused_since = mail.refused_seconds
    if refused_since is None:
        refused_since = now_seconds
    position = result.waiting_mails.index(mail)
    if now_seconds - refused_since < REFUSED_MAIL_RETENTION_SECONDS:
        refused_mail = replace(mail, refused_seconds=refused_since)
        result.waiting_mails[position] = refused_mail
        _replace_mail(outbox, mail.id, refused_mail)
    else:
        result.refused_mail_paths.append(outbox.put_refused_mail(mail))
        del result.waiting_mails[position]
        _replace_mail(outbox, mail.id, None)


def _replace_mail(outbox: Outbox, mail_id: str, mail: Mail | None) -> None:
    """Store another mail in the place of a waiting one, or none."""
    new_mails = () if mail is None else (mail,)

    def change(mails: tuple[Mail, ...]) -> tuple[Mail, ...]:
        changed: tuple[Mail, ...] = ()
        for waiting in mails:
            changed += new_mails if waiting.id == mail_id else (waiting,)
        return changed

    _change_mails(outbox, change)


def _change_mails(outbox: Outbox, change: Callable[[tuple[Mail, ...]], tuple[Mail, ...]]) -> None:
    """Store changed waiting mails, on top of whatever others store meanwhile."""
    for tries_left in reversed(range(STATE_TRIES_MAX)):
        seen = outbox.stored_state()
        mails = change(seen.alert_state.mails)
        if mails == seen.alert_state.mails:
            return
        try:
            outbox.put_alert_state(replace(seen.alert_state, mails=mails), seen.version)
            return
        except OutboxChangedError:
            if not tries_left:
                raise


def observe_stream(
    stream: Stream, status: StreamStatus, store: LedgerStore, alert_state: AlertState
) -> Observation:
    """The observation of a stream that could be read, with the findings that were not mailed yet."""
    findings, sequence = unmailed_findings(stream, store, alert_state)
    time_left = status.time_left_by_partition
    findings_with_time = [
        replace(finding, time_left_seconds=time_left.get(finding.partition_name))
        for finding in findings
    ]
    observation = Observation(
        at_seconds=status.at_seconds or 0.0,
        concerns=status.concerns,
        findings=findings_with_time,
        sequence=sequence,
        repaired_seconds=last_repair(stream, store, alert_state),
    )
    # Only for what is over by now: a repair that failed may stay open for weeks, and each entry that
    # is searched is a request.
    _, closed_incidents = close_incidents(alert_state.open_incidents, observation)
    return replace(observation, endings=find_endings(stream, store, closed_incidents))


def last_repair(stream: Stream, store: LedgerStore, alert_state: AlertState) -> float | None:
    """When a repair last succeeded, or was abandoned by a person, in ledger entries that were not
    reported yet; None: in none of them. A backfill is not a repair.
    """
    if alert_state.reported_sequence is None:
        # Without an earlier observation no failed repair was mailed, so there is none to close.
        return None
    end_entries: list[RepairEntry | ReleaseEntry] = []
    for manifest in store.entries(stream.name, alert_state.reported_sequence):
        entry = manifest.entry
        if isinstance(entry, RepairEntry):
            end_entries.append(entry)
        # A failed repair releases its own hold without a reason; a person has to give one.
        if isinstance(entry, ReleaseEntry) and entry.reason:
            end_entries.append(entry)
    if not end_entries:
        return None
    backfill_holds = set()
    for manifest in store.entries(stream.name, -1):
        entry = manifest.entry
        if isinstance(entry, HoldEntry) and RepairRequest.from_json(entry.request).ranges:
            backfill_holds.add(entry.hold)
    end_times = [entry.at_seconds for entry in end_entries if entry.hold not in backfill_holds]
    return max(end_times, default=None)


def observe_failure(error: SeriatimError, at_seconds: float) -> Observation:
    """The observation of a stream that could not be read. Its findings are mailed when it can."""
    trouble = Concern(kind="trouble", text=f"{error.title}: {error.message}", next=error.next)
    return Observation(at_seconds=at_seconds, concerns=None, trouble=trouble)


def unmailed_findings(
    stream: Stream, store: LedgerStore, alert_state: AlertState
) -> tuple[list[Finding], int | None]:
    """Findings that were not mailed yet, and the ledger entry up to which they were read.

    The first observation of a stream returns only the findings that still wait for a person.
    """
    head = read_head(store, stream.name)
    if head is None:
        return [], None
    ledger = head.ledger
    reported_sequence = alert_state.reported_sequence
    if reported_sequence is not None and reported_sequence > ledger.sequence:
        # The ledger is shorter than before: the stream was begun anew, or restored.
        reported_sequence = None
    if reported_sequence == ledger.sequence:
        return [], reported_sequence
    after_sequence = -1 if reported_sequence is None else reported_sequence
    findings = []
    for manifest in store.entries(stream.name, after_sequence):
        for finding in manifest.entry.findings:
            is_news = reported_sequence is not None or _needs_person(finding, ledger)
            if finding.level == "error" and is_news:
                findings.append(finding)
    return findings, ledger.sequence


def _needs_person(finding: Finding, ledger: Ledger) -> bool:
    """Whether the partition or session of a finding still waits for a person."""
    account = ledger.partitions.get(finding.partition_name)
    if account is None:
        return ledger.foreign_sequence >= 0 and finding.finding == "foreign"
    if finding.session is not None:
        return bool(account.quarantined)
    return account.halt is not None
