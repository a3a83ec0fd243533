"""Incidents: which problems of a stream are open, and which of them have to be mailed. Pure.

An incident is a problem that needs a person. Its key names it: `halted prefix-a/3`, `late`, `run`
(runs fail). It is mailed when it begins, again after `remind_hours` while it lasts, and once more
when it is over. Findings are mailed with the ledger entry that has them, however the run ended.
All the news of one observation of a stream become one alert. The incident `run` ends with the next
good run. The incident `repair` (a repair failed) ends when the damage is gone, when a later repair
succeeded, or when a person abandoned it.

Next: alerts/mail.py writes the mail of an alert; alerts/alert.py stores and sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import Concern, Finding, FindingsError
from seriatim.errors import BrokenPromiseError, ConfigError, IntegrityError, PlatformError

NO_CALLBACK = "Airflow called no callback: it was probably marked failed by hand"
RUN = "run"
REPAIR = "repair"
TROUBLE = "trouble"
BUG = "bug"
REPAIR_DAG = "seriatim_repair"
"""Runs of this DAG are not runs of the stream: a good fold says nothing about a failed repair."""
MAIL_DELAY_SECONDS = {TROUBLE: 600.0, "held": 3600.0}
"""Concerns that may pass by themselves (a broker restarts, a repair is running) are mailed only
after this time.
"""
CONCERNS_EXPLAINING_FINDINGS = (RUN, "halted", "quarantine", "swapped", "circuit")
"""Kinds of concerns that explain why a run failed with findings, once they were mailed."""
REPAIRABLE = ("halted", "held", "quarantine", "swapped", "circuit")
"""Kinds of concerns that a repair can end."""
TASKS_AFTER_FOLD = ("check", "publish")
"""Tasks of a stream's DAG. A run that fails in one of them has folded what waited."""
REPAIR_AGAIN = (
    "seriatim status shows what is still damaged; repair again, or decide otherwise.\n"
    f"If nothing is damaged any more, trigger {REPAIR_DAG} with the stream alone: it says so, and this is over"
)
MOST_URGENT_FIRST = (
    "time left",
    "halted",
    "circuit",
    RUN,
    REPAIR,
    TROUBLE,
    "quarantine",
    "swapped",
    "late",
)
URGENCY = {concern: number for number, concern in enumerate(MOST_URGENT_FIRST)}
FAILURES_REMEMBERED_MAX = 50
HOUR_SECONDS = 3600.0
NOTE_RETENTION_SECONDS = 48 * HOUR_SECONDS
"""Notes of tasks whose run never ended are dropped after this time."""
CALLBACK_LATE_SECONDS = HOUR_SECONDS
"""After watch has found a failed run by itself, Airflow may still call the run's callback. Within
this time the callback is not news.
"""
REFUSED_MAIL_RETENTION_SECONDS = 48 * HOUR_SECONDS
"""A refused mail is tried again for this time, since somebody may correct `alerts.to`."""


class Note(Struct, frozen=True, kw_only=True, rename={"is_form_error": "asked"}):
    """A message that a scheduler leaves for the next watch."""

    kind: Literal["task", "failed", "good"]
    """A task failed; a run failed; a run succeeded after one that failed."""
    at_seconds: float
    dag: str = ""
    """The DAG of the run; empty in notes of older versions."""
    run: str = ""
    task: str = ""
    exit_code: int | None = None
    error: str = ""
    """Of a task: the class name of its error, as in engine/failure.py."""
    text: str = ""
    """Of a task: the error screen it ended with. Of a run: the scheduler's reason."""
    headline: str = ""
    """Of a task: what its error says, without the facts; empty in notes of older versions."""
    next: str = ""
    """The advice in `text`; empty if it has none."""
    is_form_error: bool = False
    """Of a task: a person filled in a form with values that are not allowed. That person sees it, and
    nobody is mailed.
    """
    inferred: bool = False
    """Of a run: watch learned from Airflow that it failed; no callback was called."""
    links: dict[str, str] = {}


class Incident(Struct, frozen=True, kw_only=True, rename={"damaged_keys": "hurt"}):
    """A concern that is open."""

    concern: Concern
    since_seconds: float
    mailed_seconds: float | None = None
    """None: it was not mailed yet."""
    failures: tuple[str, ...] = ()
    """Of failed runs: the keys of the failures that were mailed."""
    damaged_keys: tuple[str, ...] = ()
    """Of a failed repair: the keys of the incidents that were open then. When none of them is open
    any more, the repair is not needed.
    """
    has_folded: bool = False
    """Of failed runs: whether the newest of them failed after it had folded."""
    is_about_output: bool = False
    """Of failed runs: whether one of them failed because of what was committed before."""


class Mail(Struct, frozen=True, kw_only=True):
    """A mail, ready to be sent. `id` stays the same over all attempts."""

    id: str
    to: tuple[str, ...]
    subject: str
    text: str
    html: str
    at_seconds: float
    refused_seconds: float | None = None
    """When the server refused it for the first time; None: it never did."""
    follows: str = ""
    """The id of the mail that it follows; empty if it stands alone."""


class MailReference(Struct, frozen=True, kw_only=True):
    """A mail about findings that was written before the run that met them had ended."""

    id: str
    subject: str
    at_seconds: float


class MailRefusedError(PlatformError):
    """The mail server answers, but refuses this mail. It may accept others."""

    title = "MailRefusedError"


class AlertState(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"reported_sequence": "told", "open_incidents": "open"},
):
    """A stream's open incidents and the mails that wait to be sent. It is stored as one object; each
    change is a new version of the whole.
    """

    reported_sequence: int | None = None
    """The last ledger entry whose findings were mailed; None: there was no observation yet."""
    open_incidents: dict[str, Incident] = field(default_factory=dict)
    mails: tuple[Mail, ...] = ()
    to: tuple[str, ...] = ()
    """The recipients when the stream file was last readable. It may be broken now."""
    inferred_runs: dict[str, float] = field(default_factory=dict)
    """Failed runs that watch found by itself, and when. A later callback of such a run is not
    news.
    """
    unlinked_mail: MailReference | None = None
    """The last mail about findings that has no links to their run, because that had not ended."""
    consumed_notes: tuple[str, ...] = ()
    """The names of notes that this state contains and that may not be deleted yet."""


class StoredState(Struct, frozen=True, kw_only=True):
    """The newest alert state of an outbox, and its version. A new state names the version it follows."""

    version: int
    """0: nothing was stored yet."""
    alert_state: AlertState
    damage: Note | None = None
    """If the newest version cannot be decoded: what a person has to know. The state is empty then."""


class OutboxChangedError(PlatformError):
    """Another process has stored an alert state since this one has read it: decide again."""

    title = "OutboxChangedError"


class Observation(Struct, frozen=True, kw_only=True):
    """What one watch saw of a stream."""

    at_seconds: float
    concerns: list[Concern] | None
    """None: the stream could not be read; `trouble` says why."""
    trouble: Concern | None = None
    findings: list[Finding] = []
    """Findings of level error in ledger entries that were not reported yet."""
    sequence: int | None = None
    """The ledger entry up to which findings were read; None: the ledger could not be read."""
    notes: list[Note] = []
    endings: dict[str, str] = {}
    """What ended incidents, according to the ledger, by their keys."""
    repaired_seconds: float | None = None
    """When a repair last succeeded, or was abandoned by a person, according to the ledger; None:
    not since the previous observation.
    """


class Alert(Struct, kw_only=True):
    """Everything that is news in one observation. It is false if there is none."""

    failed_runs: list[Note] = field(default_factory=list)
    """Failed runs, oldest first, with the error of the task that failed."""
    recovered_runs: list[Note] = field(default_factory=list)
    """Runs that failed and were followed by a good run before a mail was written."""
    followed_runs: list[Note] = field(default_factory=list)
    """Runs that have ended, and whose findings were mailed before that without links."""
    followed_mail: MailReference | None = None
    """The mail that this one follows, if it has nothing but the links of a run."""
    findings: list[Finding] = field(default_factory=list)
    sequence: int | None = None
    """The ledger entry up to which findings were read; None: the ledger could not be read."""
    new_concerns: list[Concern] = field(default_factory=list)
    reminded_incidents: list[Incident] = field(default_factory=list)
    closed_incidents: list[Incident] = field(default_factory=list)
    endings: dict[str, str] = field(default_factory=dict)
    """What ended the closed incidents, by their keys, as far as it is known."""
    is_nothing_folded: bool = False
    """Whether runs fail before they have folded, or do not come, also if that was mailed before."""
    is_output_damaged: bool = False
    """Whether runs fail because of what was committed before, also if that was mailed before."""

    @property
    def has_other_news(self) -> bool:
        """Whether there is more than the links of a run."""
        return bool(
            self.failed_runs
            or self.recovered_runs
            or self.findings
            or self.new_concerns
            or self.reminded_incidents
            or self.closed_incidents
        )

    def __bool__(self) -> bool:
        return bool(self.followed_runs) or self.has_other_news


def update_incidents(
    alert_state: AlertState, observation: Observation, remind_hours: float
) -> tuple[AlertState, Alert]:
    """The alert state after an observation, and the alert with everything that is news.

    1. Drop late callbacks of runs whose failure was mailed before.
    2. Close the incidents that are over, and open those of newly observed concerns.
    3. Decide which failed runs are news, and open their incidents. A run whose findings were mailed
       before it had ended is followed by its links.
    4. Choose the new concerns to mail.
    5. Choose the incidents to remind of.
    6. Mark everything chosen as mailed.
    """
    now_seconds = observation.at_seconds
    alert = Alert(findings=list(observation.findings), sequence=observation.sequence)

    # 1. Drop late callbacks.
    inferred_runs = _inferred_runs(alert_state, observation)
    notes = [
        note for note in observation.notes if not _is_late_callback(note, alert_state, observation)
    ]
    observation = replace(observation, notes=notes)

    # 2. Close and open incidents.
    open_incidents, alert.closed_incidents = close_incidents(
        alert_state.open_incidents, observation
    )
    alert.endings = {**_run_endings(observation.notes), **observation.endings}
    _open_observed_concerns(open_incidents, observation)
    due_keys = _due_keys(open_incidents, now_seconds)

    # 3. Failed runs.
    _choose_failed_runs(alert, alert_state, open_incidents, observation, has_due=bool(due_keys))
    run_keys = _open_run_incidents(alert.failed_runs, open_incidents, observation)
    _judge_failed_runs(alert, open_incidents, observation)
    unlinked_mail = _follow_unlinked_mail(alert, alert_state.unlinked_mail, observation)

    # 4. New concerns. A failed run is mailed at once, so trouble that may explain it does not wait.
    trouble = open_incidents.get(TROUBLE)
    if run_keys and trouble is not None and trouble.mailed_seconds is None:
        due_keys.add(TROUBLE)
    due_keys -= _suppressed_keys(open_incidents)
    due_concerns = [open_incidents[key].concern for key in due_keys]
    alert.new_concerns = sorted(due_concerns, key=_urgency)

    # 5. Reminders.
    reminder_candidates = {
        key: incident
        for key, incident in open_incidents.items()
        if key not in due_keys and key not in run_keys
    }
    alert.reminded_incidents = _due_reminders(reminder_candidates, now_seconds, remind_hours)

    # 6. Mark as mailed.
    reminded_keys = {incident.concern.key for incident in alert.reminded_incidents}
    for key in due_keys | reminded_keys:
        open_incidents[key] = replace(open_incidents[key], mailed_seconds=now_seconds)
    reported_sequence = observation.sequence
    if reported_sequence is None:
        reported_sequence = alert_state.reported_sequence
    # The sequence may be lower than before: the stream was begun anew, or restored.
    updated_state = replace(
        alert_state,
        reported_sequence=reported_sequence,
        open_incidents=open_incidents,
        inferred_runs=inferred_runs,
        unlinked_mail=unlinked_mail,
    )
    if alert.followed_runs and alert.has_other_news:
        # The links come with the other news, which is a mail of its own.
        alert.followed_mail = None
    return updated_state, alert


def _follow_unlinked_mail(
    alert: Alert, unlinked_mail: MailReference | None, observation: Observation
) -> MailReference | None:
    """Put the end of a run into the alert, if its findings were mailed before without links. The
    mail that still has to be followed comes back.
    """
    if unlinked_mail is None:
        return None
    if observation.at_seconds - unlinked_mail.at_seconds > NOTE_RETENTION_SECONDS:
        return None
    ended_runs = [note for note in observation.notes if note.kind in ("failed", "good")]
    if not ended_runs:
        return unlinked_mail
    last_run = _with_task_error(max(ended_runs, key=_note_seconds), observation.notes)
    is_mailed_anyway = bool(alert.failed_runs or alert.recovered_runs)
    if last_run.kind == "failed" and last_run.links and not is_mailed_anyway:
        alert.followed_runs = [last_run]
        alert.followed_mail = unlinked_mail
    return None


def runs_without_an_end(notes: Iterable[Note]) -> list[tuple[str, str]]:
    """The DAG and id of each run that has a note of a failed task, but no note of its own end."""
    notes = list(notes)
    ended_runs = {note.run for note in notes if note.kind != "task"}
    unended_runs: dict[tuple[str, str], None] = {}
    for note in notes:
        if note.kind == "task" and note.dag and note.run not in ended_runs:
            unended_runs[note.dag, note.run] = None
    return list(unended_runs)


def consumed_note_names(notes: Mapping[str, Note], now_seconds: float) -> list[str]:
    """The names of the notes that are not needed after an observation.

    The note of a failed task is kept until its run has ended, because the mail about the run
    contains it.
    """
    ended_runs = {note.run for note in notes.values() if note.kind != "task"}
    consumed_names = []
    for name, note in notes.items():
        is_expired = now_seconds - note.at_seconds > NOTE_RETENTION_SECONDS
        if note.kind != "task" or note.run in ended_runs or is_expired:
            consumed_names.append(name)
    return consumed_names


def _inferred_runs(alert_state: AlertState, observation: Observation) -> dict[str, float]:
    """The failed runs that watch found by itself, including this observation; old ones are dropped."""
    oldest_seconds = observation.at_seconds - CALLBACK_LATE_SECONDS
    inferred_runs = {
        run: at_seconds
        for run, at_seconds in alert_state.inferred_runs.items()
        if at_seconds >= oldest_seconds
    }
    for note in observation.notes:
        if note.inferred:
            inferred_runs[note.run] = observation.at_seconds
    return inferred_runs


def _is_late_callback(note: Note, alert_state: AlertState, observation: Observation) -> bool:
    """Whether a note comes from the callback of a run whose failure watch has mailed before.

    A run that was cleared and failed again has a new note of a task, and is mailed again.
    """
    if note.kind != "failed" or note.inferred or note.run not in alert_state.inferred_runs:
        return False
    inferred_seconds = alert_state.inferred_runs[note.run]
    if observation.at_seconds - inferred_seconds > CALLBACK_LATE_SECONDS:
        return False
    return not _task_notes(note.run, observation.notes)


def _task_notes(run: str, notes: Iterable[Note]) -> list[Note]:
    """The notes of the failed tasks of one run."""
    return [note for note in notes if note.kind == "task" and note.run == run]


def close_incidents(
    open_incidents: dict[str, Incident], observation: Observation
) -> tuple[dict[str, Incident], list[Incident]]:
    """The incidents that are still open, and the mailed ones that are over, most urgent first.

    If the stream could not be read, nothing that depends on its concerns is over.
    """
    closed_keys: set[str] = set()
    if observation.concerns is not None:
        observed_keys = {concern.key for concern in observation.concerns}
        closed_keys = set(open_incidents) - observed_keys - {RUN, REPAIR}
    run_incident = open_incidents.get(RUN)
    good_run_seconds = _last_good_run_seconds(observation.notes, RUN)
    if run_incident and good_run_seconds >= run_incident.since_seconds:
        closed_keys.add(RUN)
    repair_incident = open_incidents.get(REPAIR)
    if repair_incident and _is_repaired(repair_incident, observation):
        closed_keys.add(REPAIR)
    still_open = {}
    closed_incidents = []
    for key, incident in open_incidents.items():
        if key not in closed_keys:
            still_open[key] = incident
        elif incident.mailed_seconds is not None:
            closed_incidents.append(incident)
    closed_incidents.sort(key=_incident_urgency)
    return still_open, closed_incidents


def _open_observed_concerns(open_incidents: dict[str, Incident], observation: Observation) -> None:
    """Open an incident for each observed concern, or give the open one the newest text."""
    concerns = list(observation.concerns or [])
    if observation.trouble:
        concerns.append(observation.trouble)
    for concern in concerns:
        incident = open_incidents.get(concern.key)
        if incident is None:
            incident = Incident(concern=concern, since_seconds=observation.at_seconds)
        open_incidents[concern.key] = replace(incident, concern=concern)


def _due_keys(open_incidents: Mapping[str, Incident], now_seconds: float) -> set[str]:
    """The keys of the incidents that were never mailed and have lasted long enough."""
    due_keys = set()
    for key, incident in open_incidents.items():
        delay_seconds = MAIL_DELAY_SECONDS.get(incident.concern.kind, 0.0)
        has_lasted = now_seconds - incident.since_seconds >= delay_seconds
        if incident.mailed_seconds is None and has_lasted:
            due_keys.add(key)
    return due_keys - _suppressed_keys(open_incidents)


def _suppressed_keys(open_incidents: Mapping[str, Incident]) -> set[str]:
    """Keys that are not news. While runs fail, it is clear that messages wait."""
    return {"late"} if RUN in open_incidents else set()


def _is_repaired(incident: Incident, observation: Observation) -> bool:
    """Whether a failed repair is not needed any more.

    Either a later repair succeeded or was abandoned, or all incidents that were open when it failed
    are over. A repair of damaged files may have had no such incident; then only the first counts.
    """
    if _last_repair_seconds(observation) >= incident.since_seconds:
        return True
    if observation.concerns is None or not incident.damaged_keys:
        return False
    observed_keys = {concern.key for concern in observation.concerns}
    return observed_keys.isdisjoint(incident.damaged_keys)


def _last_repair_seconds(observation: Observation) -> float:
    """When a repair last succeeded, was abandoned, or found no damage; -1: not since the previous
    observation.
    """
    ledger_seconds = observation.repaired_seconds or -1.0
    return max(ledger_seconds, _last_good_run_seconds(observation.notes, REPAIR))


def _incident_key(note: Note) -> str:
    """The incident that a run's note belongs to: a run of the stream, or a repair."""
    return REPAIR if note.dag == REPAIR_DAG else RUN


def _run_endings(notes: Iterable[Note]) -> dict[str, str]:
    """Which run succeeded after runs or repairs that had failed, by the keys of their incidents."""
    endings = {}
    for note in sorted(notes, key=_note_seconds):
        if note.kind == "good" and note.run:
            endings[_incident_key(note)] = f"the run {note.run} succeeded"
    return endings


def _last_good_run_seconds(notes: Iterable[Note], key: str) -> float:
    """When the last run of this kind succeeded; -1: none did."""
    good_seconds = -1.0
    for note in notes:
        if note.kind == "good" and _incident_key(note) == key:
            good_seconds = max(good_seconds, note.at_seconds)
    return good_seconds


def _split_failed_runs(observation: Observation) -> tuple[list[Note], list[Note]]:
    """Failed runs without a good run after them, and failed runs with one; oldest first.

    Of runs that failed in the same way only the last is returned. A slip in a form concerns the person
    who made it, and no one else: such runs are left out.
    """
    good_seconds = {
        RUN: _last_good_run_seconds(observation.notes, RUN),
        REPAIR: _last_repair_seconds(observation),
    }
    failed_notes = [note for note in observation.notes if note.kind == "failed"]
    failed_notes.sort(key=_note_seconds)
    unrecovered: dict[tuple[str, str], Note] = {}
    recovered: dict[tuple[str, str], Note] = {}
    for note in failed_notes:
        failed_run = _with_task_error(note, observation.notes)
        if failed_run.is_form_error:
            continue
        key = _incident_key(failed_run)
        is_recovered = note.at_seconds < good_seconds[key]
        runs = recovered if is_recovered else unrecovered
        run_key = key, _failure_key(failed_run)
        # Remove the older run first, so that the newer one takes its position at the end.
        runs.pop(run_key, None)
        runs[run_key] = failed_run
    return list(unrecovered.values()), list(recovered.values())


def _note_seconds(note: Note) -> float:
    return note.at_seconds


def _with_task_error(run: Note, notes: Sequence[Note]) -> Note:
    """A failed run, with the error of the task that made it fail."""
    task_notes = _task_notes(run.run, notes)
    if not task_notes:
        return run
    # The task that failed first is the cause of the others. Its last attempt has the final error.
    failed_task = min(task_notes, key=_note_seconds).task
    attempts = [note for note in task_notes if note.task == failed_task]
    task = max(attempts, key=_note_seconds)
    return replace(
        run,
        dag=run.dag or task.dag,
        task=task.task,
        exit_code=task.exit_code,
        error=task.error,
        text=task.text or run.text,
        headline=task.headline,
        next=task.next if task.text else run.next,
        is_form_error=task.is_form_error,
        links={**run.links, **task.links},
    )


def _choose_failed_runs(
    alert: Alert,
    alert_state: AlertState,
    open_incidents: Mapping[str, Incident],
    observation: Observation,
    *,
    has_due: bool,
) -> None:
    """Put the failed runs that are news into the alert."""
    unrecovered, recovered = _split_failed_runs(observation)
    for run in recovered:
        # A run that recovered is compared with the incidents of before, which it may have closed.
        if not _is_already_reported(run, alert_state.open_incidents, alert_state, observation):
            alert.recovered_runs.append(run)
    for run in unrecovered:
        if not _is_already_reported(run, open_incidents, alert_state, observation):
            alert.failed_runs.append(run)
    if unrecovered and not alert.failed_runs and (has_due or alert.findings):
        # Other news is mailed together with the run that met it.
        alert.failed_runs = unrecovered[-1:]


def _is_already_reported(
    failed_run: Note,
    open_incidents: Mapping[str, Incident],
    alert_state: AlertState,
    observation: Observation,
) -> bool:
    """Whether a failure is not news: the same failure was mailed, or its findings are mailed by
    themselves.
    """
    if is_caused_by_findings(failed_run):
        return _are_findings_reported(open_incidents, alert_state, observation)
    incident = open_incidents.get(_incident_key(failed_run))
    return incident is not None and _failure_key(failed_run) in incident.failures


def _are_findings_reported(
    open_incidents: Mapping[str, Incident], alert_state: AlertState, observation: Observation
) -> bool:
    """Whether findings are mailed without the run that met them: from the ledger, or as an
    incident.
    """
    reported_sequence = alert_state.reported_sequence
    if reported_sequence is None or observation.sequence is None:
        is_read_from_ledger = False
    else:
        # A lower sequence than before means that the ledger was begun anew: findings may be missing.
        is_read_from_ledger = reported_sequence <= observation.sequence
    if is_read_from_ledger:
        return True
    for incident in open_incidents.values():
        is_explanation = incident.concern.kind in CONCERNS_EXPLAINING_FINDINGS
        if is_explanation and incident.mailed_seconds is not None:
            return True
    return False


def _open_run_incidents(
    failed_runs: Iterable[Note], open_incidents: dict[str, Incident], observation: Observation
) -> set[str]:
    """Open or extend the incidents of failed runs; their keys."""
    damaged_keys = tuple(key for key in open_incidents if key.startswith(REPAIRABLE))
    run_keys = set()
    for failed_run in failed_runs:
        if _opens_run_incident(failed_run, observation):
            key = _incident_key(failed_run)
            open_incidents[key] = _run_incident(
                failed_run, open_incidents.get(key), observation.at_seconds, damaged_keys
            )
            run_keys.add(key)
    return run_keys


def _judge_failed_runs(
    alert: Alert, open_incidents: dict[str, Incident], observation: Observation
) -> None:
    """Put into the alert what follows from failed runs, also from those that were mailed before."""
    alert.is_nothing_folded = _is_nothing_folded(open_incidents, observation)
    alert.is_output_damaged = any(incident.is_about_output for incident in open_incidents.values())


def _is_nothing_folded(open_incidents: dict[str, Incident], observation: Observation) -> bool:
    """Whether runs fail before they have folded, or do not come.

    The incident of failed runs keeps whether the newest one had folded. This also counts runs that
    are not news, because their failure was mailed before.
    """
    unrecovered, _ = _split_failed_runs(observation)
    for failed_run in unrecovered:
        if _incident_key(failed_run) == RUN and RUN in open_incidents:
            is_after_fold = failed_run.task in TASKS_AFTER_FOLD
            has_folded = is_after_fold or is_caused_by_findings(failed_run)
            open_incidents[RUN] = replace(open_incidents[RUN], has_folded=has_folded)
    run_incident = open_incidents.get(RUN)
    is_fold_failing = run_incident is not None and not run_incident.has_folded
    return is_fold_failing or "late" in open_incidents


def _opens_run_incident(failed_run: Note, observation: Observation) -> bool:
    """Whether a failed run opens an incident. Findings have incidents of their own, if the ledger can
    be read.
    """
    return not is_caused_by_findings(failed_run) or observation.sequence is None


def is_about_output(failed_run: Note) -> bool:
    """Whether a run failed because of what was committed before, such as a file that is missing."""
    is_integrity_error = failed_run.exit_code == IntegrityError.exit_code
    return is_integrity_error and failed_run.error != FindingsError.__name__


def is_caused_by_findings(failed_run: Note) -> bool:
    """Whether a run failed because of findings alone: everything else was folded."""
    return failed_run.error == FindingsError.__name__


def _failure_key(failed_run: Note) -> str:
    """Identifies the same failure in a later run: what its error says, or its kind where that changes
    from run to run.
    """
    if failed_run.exit_code in (ConfigError.exit_code, IntegrityError.exit_code):
        return failed_run.headline or _first_line(failed_run)
    return BUG if failed_run.exit_code == BrokenPromiseError.exit_code else TROUBLE


def _first_line(failed_run: Note) -> str:
    """The error in one line. Notes of older versions have it only in their text."""
    return failed_run.text.partition("\n")[0] or "the scheduler gave no reason"


def _run_incident(
    failed_run: Note,
    open_incident: Incident | None,
    now_seconds: float,
    damaged_keys: tuple[str, ...],
) -> Incident:
    """The incident of a failed run or repair, with the failures that were mailed before."""
    key = _incident_key(failed_run)
    is_repair = key == REPAIR
    advice = REPAIR_AGAIN if is_repair else ""
    failure_key = _failure_key(failed_run)
    failures: tuple[str, ...] = ()
    since_seconds = failed_run.at_seconds
    is_output_damaged = is_about_output(failed_run)
    if open_incident:
        is_output_damaged = is_output_damaged or open_incident.is_about_output
        failures = open_incident.failures
        since_seconds = open_incident.since_seconds
    if failure_key not in failures:
        failures = (*failures, failure_key)
    return Incident(
        concern=Concern(kind=key, text=_first_line(failed_run), next=advice),
        damaged_keys=damaged_keys if is_repair else (),
        since_seconds=since_seconds,
        mailed_seconds=now_seconds,
        failures=failures[-FAILURES_REMEMBERED_MAX:],
        is_about_output=is_output_damaged,
    )


def _due_reminders(
    open_incidents: Mapping[str, Incident], now_seconds: float, remind_hours: float
) -> list[Incident]:
    """All mailed incidents, most urgent first, as soon as one of them is due for a reminder."""
    interval_seconds = remind_hours * HOUR_SECONDS
    mailed_incidents = []
    is_due = False
    for incident in open_incidents.values():
        if incident.mailed_seconds is not None:
            mailed_incidents.append(incident)
            is_due = is_due or now_seconds - incident.mailed_seconds >= interval_seconds
    if not is_due:
        return []
    return sorted(mailed_incidents, key=_incident_urgency)


def _incident_urgency(incident: Incident) -> tuple[int, str]:
    return _urgency(incident.concern)


def _urgency(concern: Concern) -> tuple[int, str]:
    """A sort key: the most urgent concern comes first."""
    return URGENCY.get(concern.kind, len(URGENCY)), concern.key
