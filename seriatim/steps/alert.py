"""Alert: what a look at a stream means for people, kept on disk first, and then sent. Nothing is lost on the way.

What is known (the desk) and the mails that wait are one file, written as a whole: a crash before it leaves the news to
the next look, a crash after it leaves the mail to the next sending. A mail whose sending was not confirmed is sent
again under the same id.

Next room: core/alert.py decides what is news; core/mail.py words it; cli/watch.py does it again and again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.alert import (
    REFUSED_KEPT_SECONDS,
    Concern,
    Desk,
    Mail,
    MailRefusedError,
    Note,
    Seen,
    judge,
    settled,
)
from seriatim.core.crash import crash_point
from seriatim.core.errors import PlatformError, SeriatimError
from seriatim.core.integrity import Finding
from seriatim.core.ledger import Ledger
from seriatim.core.mail import Place, compose
from seriatim.core.repair import Request
from seriatim.core.stream import Stream
from seriatim.ports import LedgerStore
from seriatim.steps.commit import read_head
from seriatim.steps.watch import Look


class Outbox(Protocol):
    """A stream's desk, and the notes that a scheduler left on it. The real one: adapters/outbox.py."""

    def alone(self) -> AbstractContextManager[None]:
        """One at a time: nobody else looks at this desk meanwhile."""
        ...

    def desk(self) -> Desk: ...
    def put_desk(self, desk: Desk) -> None:
        """Raises `PlatformError`: nothing was kept."""
        ...

    def notes(self) -> dict[str, Note]:
        """By name, oldest first."""
        ...

    def leave(self, note: Note) -> None:
        """Leave a note for the next look."""
        ...

    def drop(self, names: list[str]) -> None:
        """Notes that are on the desk now."""
        ...

    def put_aside(self, mail: Mail) -> str:
        """A mail that nobody takes; where it is from now on."""
        ...


class Notifier(Protocol):
    """Whoever carries mails. Real: adapters/mail.py."""

    def send(self, mail: Mail) -> str:
        """Hand a mail over; who of several did not get it. Raises `PlatformError`: then it is tried again later."""
        ...


class Sent(Struct, kw_only=True):
    """What became of the mails of one look."""

    sent: list[Mail]
    waiting: list[Mail]
    aside: list[str] = field(default_factory=list)
    """Where those are now that were refused for too long."""
    trouble: str = ""
    """Why they wait, or who did not get them."""


def alert(
    place: Place,
    remind_hours: float,
    seen: Seen,
    outbox: Outbox,
    notifier: Notifier | None,
) -> Sent:
    """Decide what is news, keep it, send all that waits. Call it holding `outbox.alone()`."""
    notes, desk = outbox.notes(), outbox.desk()
    to = desk.to if place.to is None else place.to
    seen = replace(seen, notes=list(notes.values()))
    after, news = judge(desk, seen, remind_hours)
    mails = (compose(news, replace(place, to=to), seen.at_seconds),) if news and to else ()
    if (after := replace(after, to=to, mails=(*after.mails, *mails))) != desk:
        _keep(after, mails, outbox, notifier)
    crash_point("alert-kept")
    outbox.drop(settled(notes, seen.at_seconds))
    return send_waiting(place.to, seen.at_seconds, outbox, notifier)


def _keep(desk: Desk, mails: tuple[Mail, ...], outbox: Outbox, notifier: Notifier | None) -> None:
    """Onto the disk; what cannot be kept is sent at once, and again at every look until it can."""
    try:
        outbox.put_desk(desk)
    except PlatformError:
        if notifier is not None:
            with suppress(PlatformError):
                for mail in mails:
                    notifier.send(mail)
        raise


def send_waiting(to: tuple[str, ...] | None, now_seconds: float, outbox: Outbox, notifier: Notifier | None) -> Sent:
    """Send what waits, oldest first, until one cannot be sent, to whom the stream names now (None: as they are).

    One that is refused is in nobody's way; refused for too long, it is put aside. Call it holding `outbox.alone()`.
    """
    desk = outbox.desk()
    mails = desk.mails if to is None else tuple(replace(one, to=to) for one in desk.mails if to)
    done = Sent(sent=[], waiting=list(mails))
    if notifier is None:
        done.trouble = "no mail server is set" if done.waiting else ""
    else:
        _send(mails, now_seconds, done, outbox, notifier)
    _put_waiting(done, outbox)
    return done


def _send(mails: tuple[Mail, ...], now_seconds: float, done: Sent, outbox: Outbox, notifier: Notifier) -> None:
    for mail in mails:
        try:
            done.trouble = notifier.send(mail) or done.trouble
        except MailRefusedError as error:
            done.trouble = error.message
            _refused(mail, now_seconds, done, outbox)
            continue
        except PlatformError as error:
            done.trouble = error.message
            return
        crash_point("alert-sent")
        done.sent.append(mail)
        done.waiting.remove(mail)
        _put_waiting(done, outbox)


def _refused(mail: Mail, now_seconds: float, done: Sent, outbox: Outbox) -> None:
    """It waits on, or has waited long enough: then it is kept where it is in nobody's way."""
    since = now_seconds if mail.refused_seconds is None else mail.refused_seconds
    at = done.waiting.index(mail)
    if now_seconds - since < REFUSED_KEPT_SECONDS:
        done.waiting[at] = replace(mail, refused_seconds=since)
    else:
        done.aside.append(outbox.put_aside(mail))
        del done.waiting[at]


def _put_waiting(done: Sent, outbox: Outbox) -> None:
    desk = outbox.desk()
    if desk.mails != tuple(done.waiting):
        outbox.put_desk(replace(desk, mails=tuple(done.waiting)))


def seen(stream: Stream, look: Look, store: LedgerStore, desk: Desk) -> Seen:
    """A look, as the desk takes it: with the findings that nobody was told, under the clock."""
    findings, sequence = news(stream, store, desk)
    left = look.time_left_by_partition
    timed = [replace(one, time_left_seconds=left.get(one.place)) for one in findings]
    return Seen(
        at_seconds=look.at_seconds,
        concerns=look.concerns,
        findings=timed,
        sequence=sequence,
        repaired_seconds=last_repair(stream, store, desk),
    )


def last_repair(stream: Stream, store: LedgerStore, desk: Desk) -> float | None:
    """When a repair last succeeded, or was given up by a person, in entries that no look has seen. No backfill is one.

    A hold that a repair itself gives back, because it failed, is an entry without a reason.
    """
    if desk.told is None:  # nobody looked before, so nobody was told of a repair that failed
        return None
    entries = [manifest.entry for manifest in store.entries(stream.name, desk.told)]
    ends = [entry for entry in entries if entry.kind == "repair" or (entry.kind == "release" and entry.reason)]
    if not ends:
        return None
    holds = [manifest.entry for manifest in store.entries(stream.name, -1) if manifest.entry.kind == "hold"]
    backfills = {entry.held for entry in holds if Request.decoded(entry.request).ranges}
    return max((entry.at_seconds for entry in ends if entry.held not in backfills), default=None)


def unseen(error: SeriatimError, at_seconds: float) -> Seen:
    """A stream that could not be looked at. Its findings are told when it can."""
    trouble = Concern(concern="trouble", text=f"{error.title}: {error.message}", next=error.next)
    return Seen(at_seconds=at_seconds, concerns=None, trouble=trouble)


def news(stream: Stream, store: LedgerStore, desk: Desk) -> tuple[list[Finding], int | None]:
    """Findings that nobody was mailed, and the entry they were sought up to. A first look tells what still waits."""
    head = read_head(store, stream.name)
    if head is None:
        return [], None
    ledger, told = head.ledger, desk.told
    if told is not None and told > ledger.sequence:  # begun anew, or put back
        told = None
    if told == ledger.sequence:
        return [], told
    after = -1 if told is None else told
    found = [f for entry in store.entries(stream.name, after) for f in entry.entry.findings if f.level == "error"]
    if told is None:
        found = [one for one in found if _still_waits(one, ledger)]
    return found, ledger.sequence


def _still_waits(finding: Finding, ledger: Ledger) -> bool:
    """Whether anything in its place waits for a person."""
    account = ledger.partitions.get(finding.place)
    if account is None:
        return ledger.foreign >= 0 and finding.finding == "foreign"
    return bool(account.quarantined) if finding.session is not None else account.halt is not None
