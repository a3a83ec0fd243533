"""Alerts: who is told what, once. Pure: what was known, what is seen now, and what of it is news.

An incident is something that needs a person, by a key: `halted prefix-a/3`, `late`, `run` (runs
fail). It is mailed when it begins, again after `remind_hours` while it lasts, and once more when it
is over. Findings are told by the entry that has them, whichever way the run ended. All the news of
one look at one stream is one alert. Runs that fail are over with the next good run. A repair that
failed (`repair`) is over when what was hurt is well, when a later repair succeeded, or when a
person gave it up.

Next room: alerts/mail.py makes a mail of an alert; alerts/alert.py keeps and sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import Finding, FindingsError
from seriatim.errors import BrokenPromiseError, ConfigError, IntegrityError, PlatformError

RUN, REPAIR, TROUBLE, BUG = "run", "repair", "trouble", "bug"
REPAIR_DAG = "seriatim_repair"
"""Its runs are no runs of the stream: a good fold says nothing of a repair that failed."""
MAIL_DELAY_SECONDS = {TROUBLE: 600.0, "held": 3600.0}
"""What may pass by itself is mailed only when it lasts: a broker that restarts, a repair at work."""
CONCERNS_EXPLAINING_FINDINGS = (RUN, "halted", "quarantine", "circuit")
"""What explains that a run failed by findings, once it was told."""
REPAIRABLE = ("halted", "held", "quarantine", "circuit")
"""What a repair is for, as far as a look at a stream shows it."""
REPAIR_AGAIN = (
    "seriatim status shows what is still hurt; repair again, or decide otherwise.\n"
    f"If nothing is hurt any more, trigger {REPAIR_DAG} with the stream alone: it says so, and this is over"
)
MOST_URGENT_FIRST = ("time left", "halted", "circuit", RUN, REPAIR, TROUBLE, "quarantine", "late")
URGENCY = {concern: number for number, concern in enumerate(MOST_URGENT_FIRST)}
FAILURES_REMEMBERED_MAX = 50
HOUR_SECONDS = 3600.0
NOTE_RETENTION_SECONDS = 48 * HOUR_SECONDS
"""A run that is over leaves a note; after so long nobody waits for it any more."""
CALLBACK_LATE_SECONDS = HOUR_SECONDS
"""A run that watch found failed may still have its callback called: within this time that tells
nothing new.
"""
REFUSED_MAIL_RETENTION_SECONDS = 48 * HOUR_SECONDS
"""A mail that its server refuses is tried for so long: somebody may put `alerts.to` right."""


class Concern(Struct, frozen=True, kw_only=True, rename={"kind": "concern", "location": "place"}):
    """One thing that needs a person."""

    kind: str
    """time left, halted, held, quarantine, buffer, late, circuit, blind (the clock cannot see),
    run, trouble.
    """
    location: str = ""
    text: str
    next: str

    @property
    def key(self) -> str:
        """By which it is known again."""
        return f"{self.kind} {self.location}".strip()


class Note(Struct, frozen=True, kw_only=True, rename={"is_form_error": "asked"}):
    """What a scheduler left for watch to tell."""

    kind: Literal["task", "failed", "good"]
    """A task failed (what it said); a run failed; a run went well after one that failed."""
    at_seconds: float
    dag: str = ""
    """The DAG of the run; empty in notes of versions that did not write it."""
    run: str = ""
    task: str = ""
    exit_code: int | None = None
    error: str = ""
    """Of a task: the class of its error, as failure.py names it."""
    text: str = ""
    """The one screen that a task ended with; of a run, why the scheduler says it failed."""
    next: str = ""
    """What `text` says to do; empty: it has no advice."""
    is_form_error: bool = False
    """Of a task: a person's form asked for what may not be. That is told, and nothing stays open."""
    inferred: bool = False
    """Of a run: watch asked Airflow and learned that it failed; no callback had said so."""
    links: dict[str, str] = {}


class Incident(Struct, frozen=True, kw_only=True):
    """A concern that is open."""

    concern: Concern
    since_seconds: float
    mailed_seconds: float | None = None
    """None: nobody was told yet."""
    failures: tuple[str, ...] = ()
    """Of runs that fail: the failures that were told."""
    hurt: tuple[str, ...] = ()
    """Of a repair that failed: the keys of what was hurt then. Once none of it is, the repair is
    not needed.
    """


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


class AlertState(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"reported_sequence": "told", "open_incidents": "open"},
):
    """What is known of a stream's incidents, and the mails that wait to be sent: one file, written
    as a whole.
    """

    reported_sequence: int | None = None
    """The last entry whose findings were told; None: nobody looked before."""
    open_incidents: dict[str, Incident] = field(default_factory=dict)
    mails: tuple[Mail, ...] = ()
    to: tuple[str, ...] = ()
    """Who was to be told when the stream file was last read: it may be broken now."""
    inferred_runs: dict[str, float] = field(default_factory=dict)
    """Runs that watch found failed, and when. Their callback, should it come after all, tells
    nothing new.
    """


class Observation(Struct, frozen=True, kw_only=True):
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
    repaired_seconds: float | None = None
    """When the ledger last shows a repair that succeeded, or that a person gave up; None: none
    since the last look.
    """


class Alert(Struct, kw_only=True):
    """All the news of one look."""

    failed_runs: list[Note] = field(default_factory=list)
    """Runs that failed, oldest first, with what their tasks said."""
    recovered_runs: list[Note] = field(default_factory=list)
    """Runs that failed and were followed by a good one before anybody was told."""
    findings: list[Finding] = field(default_factory=list)
    new_concerns: list[Concern] = field(default_factory=list)
    reminded_incidents: list[Incident] = field(default_factory=list)
    closed_incidents: list[Incident] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.failed_runs
            or self.recovered_runs
            or self.findings
            or self.new_concerns
            or self.reminded_incidents
            or self.closed_incidents
        )


def update_incidents(
    alert_state: AlertState, observation: Observation, remind_hours: float
) -> tuple[AlertState, Alert]:
    """What is known after a look, and what of it is news."""
    now, alert = observation.at_seconds, Alert(findings=list(observation.findings))
    inferred_runs = _inferred_runs(alert_state, observation)
    observation = replace(
        observation,
        notes=[
            note
            for note in observation.notes
            if not _is_late_callback(note, alert_state, observation)
        ],
    )
    opened, alert.closed_incidents = _close_incidents(alert_state.open_incidents, observation)
    current = [
        *(observation.concerns or []),
        *([observation.trouble] if observation.trouble else []),
    ]
    for one in current:
        known = opened.get(one.key)
        opened[one.key] = (
            replace(known, concern=one) if known else Incident(concern=one, since_seconds=now)
        )
    due = {
        key
        for key, incident in opened.items()
        if incident.mailed_seconds is None and _is_due(incident, now)
    }
    due -= _suppressed_keys(opened)
    standing, passed = _split_failed_runs(observation)
    alert.recovered_runs = [
        one
        for one in passed
        if not _is_already_reported(one, alert_state.open_incidents, alert_state, observation)
    ]
    alert.failed_runs = [
        one for one in standing if not _is_already_reported(one, opened, alert_state, observation)
    ]
    if standing and not alert.failed_runs and (due or alert.findings):
        alert.failed_runs = standing[-1:]  # what is news is told with the run that met it
    lasting = [one for one in alert.failed_runs if _opens_run_incident(one, observation)]
    hurt = tuple(key for key in opened if key.startswith(REPAIRABLE))
    for failed in lasting:
        key = _incident_key(failed)
        opened[key] = _run_incident(failed, opened.get(key), now, hurt)
    if lasting:
        due |= {key for key, one in opened.items() if key == TROUBLE and one.mailed_seconds is None}
    due -= _suppressed_keys(opened)
    alert.new_concerns = sorted((opened[key].concern for key in due), key=_urgency)
    told_now = due | {_incident_key(failed) for failed in lasting}
    alert.reminded_incidents = _due_reminders(
        {k: one for k, one in opened.items() if k not in told_now}, now, remind_hours
    )
    mailed = due | {one.concern.key for one in alert.reminded_incidents}
    opened |= {key: replace(opened[key], mailed_seconds=now) for key in mailed}
    told = (
        alert_state.reported_sequence if observation.sequence is None else observation.sequence
    )  # lower, where the stream was begun anew
    return replace(
        alert_state, reported_sequence=told, open_incidents=opened, inferred_runs=inferred_runs
    ), alert


def runs_without_an_end(notes: Iterable[Note]) -> list[tuple[str, str]]:
    """The DAG and id of each run of which a task left a note, and whose own end nobody noted."""
    notes = list(notes)
    ended_runs = {note.run for note in notes if note.kind != "task"}
    tasks = [
        note for note in notes if note.kind == "task" and note.dag and note.run not in ended_runs
    ]
    return list(dict.fromkeys((note.dag, note.run) for note in tasks))


def _inferred_runs(desk: AlertState, seen: Observation) -> dict[str, float]:
    """The runs that watch found failed, up to this look; old ones are forgotten."""
    oldest = seen.at_seconds - CALLBACK_LATE_SECONDS
    runs = {run: at for run, at in desk.inferred_runs.items() if at >= oldest}
    for note in seen.notes:
        if note.inferred:
            runs[note.run] = seen.at_seconds
    return runs


def _is_late_callback(note: Note, desk: AlertState, seen: Observation) -> bool:
    """Whether a note is of the callback of a run whose failure watch told before.

    A run that was cleared and failed again has a new note of a task, and is told again.
    """
    if note.kind != "failed" or note.inferred or note.run not in desk.inferred_runs:
        return False
    if seen.at_seconds - desk.inferred_runs[note.run] > CALLBACK_LATE_SECONDS:
        return False
    return not any(other.kind == "task" and other.run == note.run for other in seen.notes)


def _suppressed_keys(open_incidents: Mapping[str, Incident]) -> set[str]:
    """What is no news: messages wait, of course, while runs fail."""
    return {"late"} if RUN in open_incidents else set()


def consumed_note_names(notes: Mapping[str, Note], now_seconds: float) -> list[str]:
    """Notes that a look has used up. What a task said waits for the end of its run, which tells it."""
    over = {note.run for note in notes.values() if note.kind != "task"}
    return [
        name
        for name, note in notes.items()
        if note.kind != "task"
        or note.run in over
        or now_seconds - note.at_seconds > NOTE_RETENTION_SECONDS
    ]


def _close_incidents(
    open_incidents: dict[str, Incident], observation: Observation
) -> tuple[dict[str, Incident], list[Incident]]:
    """What is still open, and what is over. What cannot be looked at is not over."""
    good = _last_good(observation.notes, RUN)
    gone = set()
    if observation.concerns is not None:
        gone = set(open_incidents) - {one.key for one in observation.concerns} - {RUN, REPAIR}
    if RUN in open_incidents and good is not None and good >= open_incidents[RUN].since_seconds:
        gone.add(RUN)
    if REPAIR in open_incidents and _is_repaired(open_incidents[REPAIR], observation):
        gone.add(REPAIR)
    over = [open_incidents[key] for key in gone if open_incidents[key].mailed_seconds is not None]
    over.sort(key=lambda one: _urgency(one.concern))
    return {key: incident for key, incident in open_incidents.items() if key not in gone}, over


def _is_repaired(incident: Incident, seen: Observation) -> bool:
    """Whether a repair that failed is not needed any more.

    A later one succeeded or was given up; or what was hurt when it failed is well. A repair of
    damaged files may have had nothing hurt that a look shows: then only the former tells.
    """
    if _last_repaired(seen) >= incident.since_seconds:
        return True
    if seen.concerns is None or not incident.hurt:
        return False
    return not {one.key for one in seen.concerns}.intersection(incident.hurt)


def _last_repaired(seen: Observation) -> float:
    """When a repair last succeeded, was given up, or found nothing hurt; -1: not since the look
    before.
    """
    return max(seen.repaired_seconds or -1.0, _last_good(seen.notes, REPAIR) or -1.0)


def _incident_key(note: Note) -> str:
    """Whose end a note tells: a run of the stream, or a repair."""
    return REPAIR if note.dag == REPAIR_DAG else RUN


def _last_good(notes: Iterable[Note], key: str) -> float | None:
    """When the last run of this kind went well."""
    times = [
        note.at_seconds for note in notes if note.kind == "good" and _incident_key(note) == key
    ]
    return max(times, default=None)


def _split_failed_runs(seen: Observation) -> tuple[list[Note], list[Note]]:
    """Runs that failed, no good one after them, and those with one; of each kind the last, oldest
    first.
    """
    notes = seen.notes
    good = {RUN: _last_good(notes, RUN) or -1.0, REPAIR: _last_repaired(seen)}
    runs = sorted(
        (note for note in notes if note.kind == "failed"), key=lambda note: note.at_seconds
    )
    standing, passed = dict[tuple[str, str], Note](), dict[tuple[str, str], Note]()
    for run in runs:
        failed = _with_task_error(run, notes)
        kind = passed if run.at_seconds < good[_incident_key(failed)] else standing
        name = _incident_key(failed), _failure_key(failed)
        kind.pop(name, None)
        kind[name] = failed
    return list(standing.values()), list(passed.values())


def _with_task_error(run: Note, notes: Sequence[Note]) -> Note:
    """A run that failed, with what its task said."""
    said = [note for note in notes if note.kind == "task" and note.run == run.run]
    if not said:
        return run
    first = min(said, key=lambda note: note.at_seconds)  # what fails later fails because of it
    task = max((note for note in said if note.task == first.task), key=lambda note: note.at_seconds)
    return replace(
        run,
        dag=run.dag or task.dag,
        task=task.task,
        exit_code=task.exit_code,
        error=task.error,
        text=task.text or run.text,
        next=task.next if task.text else run.next,
        is_form_error=task.is_form_error,
        links={**run.links, **task.links},
    )


def _is_already_reported(
    failed_run: Note,
    open_incidents: Mapping[str, Incident],
    alert_state: AlertState,
    observation: Observation,
) -> bool:
    """Whether a failure adds nothing: runs are known to fail so, or its findings are told by
    themselves.
    """
    if failed_run.is_form_error:
        return False
    if _is_caused_by_findings(failed_run):
        read_before = (
            alert_state.reported_sequence is not None
            and observation.sequence is not None
            and alert_state.reported_sequence <= observation.sequence
        )
        told = (
            one.concern.kind for one in open_incidents.values() if one.mailed_seconds is not None
        )
        return read_before or any(concern in CONCERNS_EXPLAINING_FINDINGS for concern in told)
    known = open_incidents.get(_incident_key(failed_run))
    return known is not None and _failure_key(failed_run) in known.failures


def _opens_run_incident(failed_run: Note, observation: Observation) -> bool:
    """Whether runs are known to fail by it. A slip in a form is whose it is; findings have
    incidents of their own.
    """
    return not failed_run.is_form_error and (
        not _is_caused_by_findings(failed_run) or observation.sequence is None
    )


def _is_caused_by_findings(failed_run: Note) -> bool:
    return failed_run.error == FindingsError.__name__


def _failure_key(failed_run: Note) -> str:
    """By which a failure is known again: its headline, or, where words change from run to run, its
    kind.
    """
    if failed_run.exit_code in (ConfigError.exit_code, IntegrityError.exit_code):
        return _headline(failed_run)
    return BUG if failed_run.exit_code == BrokenPromiseError.exit_code else TROUBLE


def _headline(failed_run: Note) -> str:
    return failed_run.text.partition("\n")[0] or "the scheduler gave no reason"


def _run_incident(
    failed_run: Note, open_incident: Incident | None, now_seconds: float, hurt: tuple[str, ...]
) -> Incident:
    """Runs fail, or a repair does, in this way and in those that were told before."""
    before = open_incident.failures if open_incident else ()
    key = _incident_key(failed_run)
    return Incident(
        concern=Concern(
            kind=key, text=_headline(failed_run), next=REPAIR_AGAIN if key == REPAIR else ""
        ),
        hurt=hurt if key == REPAIR else (),
        since_seconds=open_incident.since_seconds if open_incident else failed_run.at_seconds,
        mailed_seconds=now_seconds,
        failures=tuple(dict.fromkeys((*before, _failure_key(failed_run))))[
            -FAILURES_REMEMBERED_MAX:
        ],
    )


def _is_due(incident: Incident, now_seconds: float) -> bool:
    patience = MAIL_DELAY_SECONDS.get(incident.concern.kind, 0.0)
    return now_seconds - incident.since_seconds >= patience


def _due_reminders(
    open_incidents: dict[str, Incident], now_seconds: float, remind_hours: float
) -> list[Incident]:
    """All that is open and was told, as soon as one of it was told too long ago."""
    told = [one for one in open_incidents.values() if one.mailed_seconds is not None]
    if not any(
        now_seconds - (one.mailed_seconds or 0) >= remind_hours * HOUR_SECONDS for one in told
    ):
        return []
    return sorted(told, key=lambda one: _urgency(one.concern))


def _urgency(concern: Concern) -> tuple[int, str]:
    """The most urgent first."""
    return URGENCY.get(concern.kind, len(URGENCY)), concern.key
