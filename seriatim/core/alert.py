"""Alerts: who is told what, once. Pure: what was known, what is seen now, and what of it is news.

An incident is something that needs a person, by a key: `halted prefix-a/3`, `late`, `run` (runs fail). It is
mailed when it begins, again after `remind_hours` while it lasts, and once more when it is over. Findings are told by
the entry that has them, whichever way the run ended. All the news of one look at one stream is one alert.

Next room: core/mail.py makes a mail of an alert; steps/alert.py keeps and sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.errors import BrokenPromiseError, ConfigError, IntegrityError, PlatformError
from seriatim.core.integrity import Finding, FindingsError

RUN, TROUBLE, BUG = "run", "trouble", "bug"
PATIENCE_SECONDS = {TROUBLE: 600.0, "held": 3600.0}
"""What may pass by itself is mailed only when it lasts: a broker that restarts, a repair at work."""
HURT = (RUN, "halted", "quarantine", "circuit")
"""What explains that a run failed by findings, once it was told."""
MOST_URGENT_FIRST = ("time left", "halted", "circuit", RUN, TROUBLE, "quarantine", "late")
URGENCY = {concern: number for number, concern in enumerate(MOST_URGENT_FIRST)}
FAILURES_KEPT = 50
HOUR_SECONDS = 3600.0
NOTE_KEPT_SECONDS = 48 * HOUR_SECONDS
"""A run that is over leaves a note; after so long nobody waits for it any more."""
REFUSED_KEPT_SECONDS = 48 * HOUR_SECONDS
"""A mail that its server refuses is tried for so long: somebody may put `alerts.to` right."""


class Concern(Struct, frozen=True, kw_only=True):
    """One thing that needs a person."""

    concern: str
    """time left, halted, held, quarantine, buffer, late, circuit, blind (the clock cannot see), run, trouble."""
    place: str = ""
    text: str
    next: str

    @property
    def key(self) -> str:
        """By which it is known again."""
        return f"{self.concern} {self.place}".strip()


class Note(Struct, frozen=True, kw_only=True):
    """What a scheduler left for watch to tell."""

    kind: Literal["task", "failed", "good"]
    """A task failed (what it said); a run failed; a run went well after one that failed."""
    at_seconds: float
    run: str = ""
    task: str = ""
    exit_code: int | None = None
    error: str = ""
    """Of a task: the class of its error, as core/failure.py names it."""
    text: str = ""
    """The one screen that a task ended with; of a run, why the scheduler says it failed."""
    next: str = ""
    """What `text` says to do; empty: it has no advice."""
    asked: bool = False
    """Of a task: a person's form asked for what may not be. That is told, and nothing stays open."""
    links: dict[str, str] = {}


class Incident(Struct, frozen=True, kw_only=True):
    """A concern that is open."""

    concern: Concern
    since_seconds: float
    mailed_seconds: float | None = None
    """None: nobody was told yet."""
    failures: tuple[str, ...] = ()
    """Of runs that fail: the failures that were told."""


class Mail(Struct, frozen=True, kw_only=True):
    """A mail, ready to be sent; `id` is the same however often it is tried."""

    id: str
    to: tuple[str, ...]
    subject: str
    text: str
    html: str
    at_seconds: float
    refused_seconds: float | None = None
    """Since when the server does not take it."""


class MailRefusedError(PlatformError):
    """The mail server is there, and does not take this mail: others may go."""

    title = "MailRefusedError"


class Desk(Struct, frozen=True, kw_only=True):
    """What is known of a stream's incidents, and the mails that wait to be sent: one file, written as a whole."""

    told: int | None = None
    """The last entry whose findings were told; None: nobody looked before."""
    open: dict[str, Incident] = field(default_factory=dict)
    mails: tuple[Mail, ...] = ()
    to: tuple[str, ...] = ()
    """Who was to be told when the stream file was last read: it may be broken now."""


class Seen(Struct, frozen=True, kw_only=True):
    """One look at a stream."""

    at_seconds: float
    concerns: list[Concern] | None
    """None: it could not be looked at; `trouble` says why."""
    trouble: Concern | None = None
    findings: list[Finding] = []
    """New in the ledger, of level error."""
    sequence: int | None = None
    """The entry up to which findings were looked for; None: the ledger could not be read."""
    notes: list[Note] = []


class Alert(Struct, kw_only=True):
    """All the news of one look."""

    failed: list[Note] = field(default_factory=list)
    """Runs that failed, oldest first, with what their tasks said."""
    passed: list[Note] = field(default_factory=list)
    """Runs that failed and were followed by a good one before anybody was told."""
    findings: list[Finding] = field(default_factory=list)
    new: list[Concern] = field(default_factory=list)
    reminded: list[Incident] = field(default_factory=list)
    over: list[Incident] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.failed or self.passed or self.findings or self.new or self.reminded or self.over)


def judge(desk: Desk, seen: Seen, remind_hours: float) -> tuple[Desk, Alert]:
    """What is known after a look, and what of it is news."""
    now, alert = seen.at_seconds, Alert(findings=list(seen.findings))
    opened, alert.over = _ended(desk.open, seen)
    current = [*(seen.concerns or []), *([seen.trouble] if seen.trouble else [])]
    for one in current:
        known = opened.get(one.key)
        opened[one.key] = replace(known, concern=one) if known else Incident(concern=one, since_seconds=now)
    due = {key for key, incident in opened.items() if incident.mailed_seconds is None and _is_due(incident, now)}
    due -= _silent(opened)
    standing, passed = _failures(seen.notes)
    alert.passed = [one for one in passed if not _is_told(one, desk.open, desk, seen)]
    alert.failed = [one for one in standing if not _is_told(one, opened, desk, seen)]
    if standing and not alert.failed and (due or alert.findings):
        alert.failed = standing[-1:]  # what is news is told with the run that met it
    lasting = [one for one in alert.failed if _lasts(one, seen)]
    for failed in lasting:
        opened[RUN] = _run_incident(failed, opened.get(RUN), now)
    if lasting:
        due |= {key for key, one in opened.items() if key == TROUBLE and one.mailed_seconds is None}
    due -= _silent(opened)
    alert.new = sorted((opened[key].concern for key in due), key=_weight)
    told_now = due | ({RUN} if lasting else set())
    alert.reminded = _reminders({k: one for k, one in opened.items() if k not in told_now}, now, remind_hours)
    mailed = due | {one.concern.key for one in alert.reminded}
    opened |= {key: replace(opened[key], mailed_seconds=now) for key in mailed}
    told = desk.told if seen.sequence is None else seen.sequence  # lower, where the stream was begun anew
    return replace(desk, told=told, open=opened), alert


def _silent(opened: Mapping[str, Incident]) -> set[str]:
    """What is no news: messages wait, of course, while runs fail."""
    return {"late"} if RUN in opened else set()


def settled(notes: Mapping[str, Note], now_seconds: float) -> list[str]:
    """Notes that a look has used up. What a task said waits for the end of its run, which tells it."""
    over = {note.run for note in notes.values() if note.kind != "task"}
    return [
        name
        for name, note in notes.items()
        if note.kind != "task" or note.run in over or now_seconds - note.at_seconds > NOTE_KEPT_SECONDS
    ]


def _ended(known: dict[str, Incident], seen: Seen) -> tuple[dict[str, Incident], list[Incident]]:
    """What is still open, and what is over. What cannot be looked at is not over."""
    good = max((note.at_seconds for note in seen.notes if note.kind == "good"), default=None)
    gone = set()
    if seen.concerns is not None:
        gone = set(known) - {one.key for one in seen.concerns} - {RUN}
    if RUN in known and good is not None and good >= known[RUN].since_seconds:
        gone.add(RUN)
    over = [known[key] for key in gone if known[key].mailed_seconds is not None]
    over.sort(key=lambda one: _weight(one.concern))
    return {key: incident for key, incident in known.items() if key not in gone}, over


def _failures(notes: Sequence[Note]) -> tuple[list[Note], list[Note]]:
    """Runs that failed, no good one after them, and those with one; of each kind the last, oldest first."""
    good = max((note.at_seconds for note in notes if note.kind == "good"), default=-1.0)
    runs = sorted((note for note in notes if note.kind == "failed"), key=lambda note: note.at_seconds)
    standing, passed = dict[str, Note](), dict[str, Note]()
    for run in runs:
        failed, kind = _in_words(run, notes), passed if run.at_seconds < good else standing
        kind.pop(_which(failed), None)
        kind[_which(failed)] = failed
    return list(standing.values()), list(passed.values())


def _in_words(run: Note, notes: Sequence[Note]) -> Note:
    """A run that failed, with what its task said."""
    said = [note for note in notes if note.kind == "task" and note.run == run.run]
    if not said:
        return run
    first = min(said, key=lambda note: note.at_seconds)  # what fails later fails because of it
    task = max((note for note in said if note.task == first.task), key=lambda note: note.at_seconds)
    return replace(
        run,
        task=task.task,
        exit_code=task.exit_code,
        error=task.error,
        text=task.text or run.text,
        next=task.next if task.text else run.next,
        asked=task.asked,
        links={**run.links, **task.links},
    )


def _is_told(failed: Note, opened: Mapping[str, Incident], desk: Desk, seen: Seen) -> bool:
    """Whether a failure adds nothing: runs are known to fail so, or its findings are told by themselves."""
    if failed.asked:
        return False
    if _is_of_findings(failed):
        read_before = desk.told is not None and seen.sequence is not None and desk.told <= seen.sequence
        told = (one.concern.concern for one in opened.values() if one.mailed_seconds is not None)
        return read_before or any(concern in HURT for concern in told)
    return RUN in opened and _which(failed) in opened[RUN].failures


def _lasts(failed: Note, seen: Seen) -> bool:
    """Whether runs are known to fail by it. A slip in a form is whose it is; findings have incidents of their own."""
    return not failed.asked and (not _is_of_findings(failed) or seen.sequence is None)


def _is_of_findings(failed: Note) -> bool:
    return failed.error == FindingsError.__name__


def _which(failed: Note) -> str:
    """By which a failure is known again: its headline, or, where words change from run to run, its kind."""
    if failed.exit_code in (ConfigError.exit_code, IntegrityError.exit_code):
        return _headline(failed)
    return BUG if failed.exit_code == BrokenPromiseError.exit_code else TROUBLE


def _headline(failed: Note) -> str:
    return failed.text.partition("\n")[0] or "the scheduler gave no reason"


def _run_incident(failed: Note, known: Incident | None, now_seconds: float) -> Incident:
    """Runs fail, in this way and in those that were told before."""
    before = known.failures if known else ()
    return Incident(
        concern=Concern(concern=RUN, text=_headline(failed), next=""),
        since_seconds=known.since_seconds if known else failed.at_seconds,
        mailed_seconds=now_seconds,
        failures=tuple(dict.fromkeys((*before, _which(failed))))[-FAILURES_KEPT:],
    )


def _is_due(incident: Incident, now_seconds: float) -> bool:
    patience = PATIENCE_SECONDS.get(incident.concern.concern, 0.0)
    return now_seconds - incident.since_seconds >= patience


def _reminders(opened: dict[str, Incident], now_seconds: float, remind_hours: float) -> list[Incident]:
    """All that is open and was told, as soon as one of it was told too long ago."""
    told = [one for one in opened.values() if one.mailed_seconds is not None]
    if not any(now_seconds - (one.mailed_seconds or 0) >= remind_hours * HOUR_SECONDS for one in told):
        return []
    return sorted(told, key=lambda one: _weight(one.concern))


def _weight(concern: Concern) -> tuple[int, str]:
    """The most urgent first."""
    return URGENCY.get(concern.concern, len(URGENCY)), concern.key
