"""Alert: what a look at a stream means for people, kept on disk first, and then sent. Nothing is
lost on the way.

What is known (the desk) and the mails that wait are one file, written as a whole: a crash before it
leaves the news to the next look, a crash after it leaves the mail to the next sending. A mail whose
sending was not confirmed is sent again under the same id.

Next room: alerts/incidents.py decides what is news; alerts/mail.py words it; cli/watch.py does it
again and again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.alerts.incidents import (
    REFUSED_MAIL_RETENTION_SECONDS,
    AlertState,
    Concern,
    Mail,
    MailRefusedError,
    Note,
    Observation,
    consumed_note_names,
    update_incidents,
)
from seriatim.alerts.mail import MailContext, compose_mail
from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import Finding
from seriatim.errors import PlatformError, SeriatimError
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import Ledger
from seriatim.operations.repair.plan import RepairRequest
from seriatim.operations.watch import WatchResult
from seriatim.ports import LedgerStore
from seriatim.stream import Stream


class Outbox(Protocol):
    """A stream's desk, and the notes that a scheduler left on it. The real one: alerts/outbox.py."""

    def lock(self) -> AbstractContextManager[None]:
        """One at a time: nobody else looks at this desk meanwhile."""
        ...

    def alert_state(self) -> AlertState: ...
    def put_alert_state(self, alert_state: AlertState) -> None:
        """Raises `PlatformError`: nothing was kept."""
        ...

    def notes(self) -> dict[str, Note]:
        """By name, oldest first."""
        ...

    def add_note(self, note: Note) -> None:
        """Leave a note for the next look."""
        ...

    def delete_notes(self, names: list[str]) -> None:
        """Notes that are on the desk now."""
        ...

    def put_refused_mail(self, mail: Mail) -> str:
        """A mail that nobody takes; where it is from now on."""
        ...


class Notifier(Protocol):
    """Whoever carries mails. Real: alerts/smtp.py."""

    def send(self, mail: Mail) -> str:
        """Hand a mail over; who of several did not get it. Raises `PlatformError`: then it is tried
        again later.
        """
        ...


class SendResult(Struct, kw_only=True):
    """What became of the mails of one look."""

    sent_mails: list[Mail]
    waiting_mails: list[Mail]
    refused_mail_paths: list[str] = field(default_factory=list)
    """Where those are now that were refused for too long."""
    trouble: str = ""
    """Why they wait, or who did not get them."""


def send_alerts(
    mail_context: MailContext,
    remind_hours: float,
    observation: Observation,
    outbox: Outbox,
    notifier: Notifier | None,
) -> SendResult:
    """Decide what is news, keep it, send all that waits. Call it holding `outbox.alone()`."""
    notes, desk = outbox.notes(), outbox.alert_state()
    to = desk.to if mail_context.to is None else mail_context.to
    observation = replace(observation, notes=list(notes.values()))
    after, news = update_incidents(desk, observation, remind_hours)
    mails = (
        (compose_mail(news, replace(mail_context, to=to), observation.at_seconds),)
        if news and to
        else ()
    )
    if (after := replace(after, to=to, mails=(*after.mails, *mails))) != desk:
        _save_or_send(after, mails, outbox, notifier)
    crash_point("alert-kept")
    outbox.delete_notes(consumed_note_names(notes, observation.at_seconds))
    return send_waiting_mails(mail_context.to, observation.at_seconds, outbox, notifier)


def _save_or_send(
    alert_state: AlertState, mails: tuple[Mail, ...], outbox: Outbox, notifier: Notifier | None
) -> None:
    """Onto the disk; what cannot be kept is sent at once, and again at every look until it can."""
    try:
        outbox.put_alert_state(alert_state)
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
    """Send what waits, oldest first, until one cannot be sent, to whom the stream names now (None:
    as they are).

    One that is refused is in nobody's way; refused for too long, it is put aside. Call it holding
    `outbox.alone()`.
    """
    desk = outbox.alert_state()
    mails = (
        desk.mails
        if recipients is None
        else tuple(replace(one, to=recipients) for one in desk.mails if recipients)
    )
    done = SendResult(sent_mails=[], waiting_mails=list(mails))
    if notifier is None:
        done.trouble = "no mail server is set" if done.waiting_mails else ""
    else:
        _send_mails(mails, now_seconds, done, outbox, notifier)
    _save_waiting_mails(done, outbox)
    return done


def _send_mails(
    mails: tuple[Mail, ...],
    now_seconds: float,
    result: SendResult,
    outbox: Outbox,
    notifier: Notifier,
) -> None:
    for mail in mails:
        try:
            result.trouble = notifier.send(mail) or result.trouble
        except MailRefusedError as error:
            result.trouble = error.message
            _keep_or_archive_refused(mail, now_seconds, result, outbox)
            continue
        except PlatformError as error:
            result.trouble = error.message
            return
        crash_point("alert-sent")
        result.sent_mails.append(mail)
        result.waiting_mails.remove(mail)
        _save_waiting_mails(result, outbox)


def _keep_or_archive_refused(
    mail: Mail, now_seconds: float, result: SendResult, outbox: Outbox
) -> None:
    """It waits on, or has waited long enough: then it is kept where it is in nobody's way."""
    since = now_seconds if mail.refused_seconds is None else mail.refused_seconds
    at = result.waiting_mails.index(mail)
    if now_seconds - since < REFUSED_MAIL_RETENTION_SECONDS:
        result.waiting_mails[at] = replace(mail, refused_seconds=since)
    else:
        result.refused_mail_paths.append(outbox.put_refused_mail(mail))
        del result.waiting_mails[at]


def _save_waiting_mails(result: SendResult, outbox: Outbox) -> None:
    desk = outbox.alert_state()
    if desk.mails != tuple(result.waiting_mails):
        outbox.put_alert_state(replace(desk, mails=tuple(result.waiting_mails)))


def observe_stream(
    stream: Stream, watch_result: WatchResult, store: LedgerStore, alert_state: AlertState
) -> Observation:
    """A look, as the desk takes it: with the findings that nobody was told, under the clock."""
    findings, sequence = unmailed_findings(stream, store, alert_state)
    left = watch_result.time_left_by_partition
    timed = [replace(one, time_left_seconds=left.get(one.partition_name)) for one in findings]
    return Observation(
        at_seconds=watch_result.at_seconds,
        concerns=watch_result.concerns,
        findings=timed,
        sequence=sequence,
        repaired_seconds=last_repair(stream, store, alert_state),
    )


def last_repair(stream: Stream, store: LedgerStore, desk: AlertState) -> float | None:
    """When a repair last succeeded, or was given up by a person, in entries that no look has seen.
    No backfill is one.

    A hold that a repair itself gives back, because it failed, is an entry without a reason.
    """
    if (
        desk.reported_sequence is None
    ):  # nobody looked before, so nobody was told of a repair that failed
        return None
    entries = [manifest.entry for manifest in store.entries(stream.name, desk.reported_sequence)]
    ends = [
        entry
        for entry in entries
        if entry.kind == "repair" or (entry.kind == "release" and entry.reason)
    ]
    if not ends:
        return None
    holds = [
        manifest.entry
        for manifest in store.entries(stream.name, -1)
        if manifest.entry.kind == "hold"
    ]
    backfills = {entry.hold for entry in holds if RepairRequest.from_json(entry.request).ranges}
    return max((entry.at_seconds for entry in ends if entry.hold not in backfills), default=None)


def observe_failure(error: SeriatimError, at_seconds: float) -> Observation:
    """A stream that could not be looked at. Its findings are told when it can."""
    trouble = Concern(kind="trouble", text=f"{error.title}: {error.message}", next=error.next)
    return Observation(at_seconds=at_seconds, concerns=None, trouble=trouble)


def unmailed_findings(
    stream: Stream, store: LedgerStore, alert_state: AlertState
) -> tuple[list[Finding], int | None]:
    """Findings that nobody was mailed, and the entry they were sought up to. A first look tells
    what still waits.
    """
    head = read_head(store, stream.name)
    if head is None:
        return [], None
    ledger, told = head.ledger, alert_state.reported_sequence
    if told is not None and told > ledger.sequence:  # begun anew, or put back
        told = None
    if told == ledger.sequence:
        return [], told
    after = -1 if told is None else told
    found = [
        f
        for entry in store.entries(stream.name, after)
        for f in entry.entry.findings
        if f.level == "error"
    ]
    if told is None:
        found = [one for one in found if _needs_person(one, ledger)]
    return found, ledger.sequence


def _needs_person(finding: Finding, ledger: Ledger) -> bool:
    """Whether anything in its place waits for a person."""
    account = ledger.partitions.get(finding.partition_name)
    if account is None:
        return ledger.foreign_sequence >= 0 and finding.finding == "foreign"
    return bool(account.quarantined) if finding.session is not None else account.halt is not None
