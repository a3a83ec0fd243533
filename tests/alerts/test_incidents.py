"""Alerts: each thing is told once when it begins, again while it lasts, and once when it is over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from seriatim.alerts.incidents import (
    REPAIR_DAG,
    Alert,
    AlertState,
    Note,
    Observation,
    runs_without_an_end,
    update_incidents,
)
from seriatim.engine.failure import Failure
from seriatim.engine.findings import Concern, Finding, FindingsError, new_findings_error
from seriatim.ledger.model import FailedRange, Ledger, refuse_open_circuit

HOUR = 3600.0
HALTED = Concern(kind="halted", location="a/0", text="halted at offset 3", next="look")
LATE = Concern(kind="late", text="5 messages wait", next="run")
HELD = Concern(kind="held", location="a/1", text="held by r", next="look")
BLIND = Concern(kind="blind", location="a", text="its retention cannot be read", next="ask")
TROUBLE = Concern(kind="trouble", text="PlatformError: no broker", next="retry")
GAP = Finding(finding="gap", topic="a", partition=0, offset=3)
BY_FINDINGS: dict[str, Any] = {
    "exit_code": 3,
    "error": "FindingsError",
    "text": "IntegrityError: s: 1 new finding in a/0",
}
"""Of the note of a task that failed by findings."""


class Post:
    """Looks at one stream, one after the other, and what each said."""

    def __init__(self) -> None:
        self.desk, self.now = AlertState(), 0.0

    def look(self, *concerns: Concern, after: float = 0.0, **fields: Any) -> Alert:
        """A look that sees these concerns, so many seconds after the last."""
        self.now += after
        self.desk, alert = update_incidents(
            self.desk, Observation(at_seconds=self.now, concerns=list(concerns), **fields), 12
        )
        return alert

    def fail(self, after: float = 0.0, **fields: Any) -> Alert:
        """A look that could not be done."""
        self.now += after
        self.desk, alert = update_incidents(
            self.desk,
            Observation(at_seconds=self.now, concerns=None, trouble=TROUBLE, **fields),
            12,
        )
        return alert

    def note(self, kind: Any = "failed", **fields: Any) -> list[Note]:
        """A note that was left just now."""
        return [Note(kind=kind, at_seconds=self.now, run="r1", **fields)]


def test_a_thing_is_told_once_reminded_of_and_told_when_it_is_over() -> None:
    """New, silence, a reminder after remind_hours, silence, the end, silence."""
    post = Post()
    assert post.look(HALTED).new_concerns == [HALTED]
    assert not post.look(HALTED, after=HOUR)
    assert [one.concern for one in post.look(HALTED, after=11 * HOUR).reminded_incidents] == [
        HALTED
    ]
    assert not post.look(HALTED, after=HOUR)
    assert [one.concern for one in post.look(after=HOUR).closed_incidents] == [HALTED]
    assert not post.look(after=100 * HOUR)


def test_the_latest_words_are_kept() -> None:
    """A reminder says how it is now, not how it was."""
    post = Post()
    post.look(LATE)
    later = Concern(kind="late", text="9 messages wait", next="run")
    assert post.look(later, after=12 * HOUR).reminded_incidents[0].concern.text == "9 messages wait"


def test_what_may_pass_by_itself_is_told_when_it_lasts() -> None:
    """A broker that restarts and a repair at work are no mail; an hour's hold is."""
    post = Post()
    assert not post.look(HELD)
    assert not post.look(after=60)
    assert not post.look(HELD, after=60)
    assert post.look(HELD, after=HOUR).new_concerns == [HELD]
    assert not post.fail(after=60)
    assert post.fail(after=600).new_concerns == [TROUBLE]
    assert [one.concern for one in post.look(HELD, after=60).closed_incidents] == [TROUBLE]


def test_what_cannot_be_looked_at_is_not_over() -> None:
    """The broker's silence says nothing of a halted partition."""
    post = Post()
    post.look(HALTED)
    assert not post.fail(after=60).closed_incidents
    assert not post.look(HALTED, after=60)


def test_a_failed_run_and_its_findings_are_one_alert() -> None:
    """With what the task said; the partition that halts by it is no second one."""
    post = Post()
    notes = [*post.note(), *post.note("task", task="fold", **BY_FINDINGS)]
    alert = post.look(HALTED, findings=[GAP], sequence=4, notes=notes)
    assert (alert.findings, alert.new_concerns) == ([GAP], [HALTED])
    (failed,) = alert.failed_runs
    assert (failed.task, failed.text) == ("fold", "IntegrityError: s: 1 new finding in a/0")
    assert post.desk.reported_sequence == 4
    assert list(post.desk.open_incidents) == ["halted a/0"]
    assert not post.look(HALTED, after=60, sequence=4)


def test_the_first_task_that_failed_speaks_for_its_run() -> None:
    """In the words of its last attempt; what came after it failed because of it."""
    post = Post()
    notes = [*post.note("task", task="plan", exit_code=4, text="first attempt")]
    post.now += 60
    notes += post.note("task", task="plan", exit_code=4, text="second attempt")
    post.now += 60
    notes += [*post.note("task", task="check", exit_code=2, text="never run"), *post.note()]
    alert = post.look(notes=notes)
    assert [(failed.task, failed.text) for failed in alert.failed_runs] == [
        ("plan", "second attempt")
    ]


def test_findings_that_an_earlier_look_told_are_not_told_by_their_run_again() -> None:
    """Watch saw the entry before the run had ended; exit 3 says that the run has nothing else to
    tell.
    """
    post = Post()
    assert post.look(HALTED, findings=[GAP], sequence=4)
    notes = [*post.note(), *post.note("task", **BY_FINDINGS)]
    assert not post.look(HALTED, after=60, sequence=4, notes=notes)


def test_a_new_finding_beside_an_old_one_comes_with_its_run() -> None:
    """The run, its links and its task are in the mail that tells the finding."""
    post = Post()
    post.look(HALTED, findings=[GAP], sequence=4)
    notes = [*post.note(), *post.note("task", task="fold", exit_code=3)]
    alert = post.look(HALTED, findings=[GAP], sequence=5, notes=notes)
    assert alert.findings
    assert alert.failed_runs


def test_a_failure_of_another_kind_is_told_all_the_same() -> None:
    """A halted partition explains no run that was killed; neither does exit 3 where nothing is
    open.
    """
    post = Post()
    post.look(HALTED)
    assert post.look(HALTED, notes=post.note(text="killed")).failed_runs
    fresh = Post()
    assert fresh.look(notes=[*fresh.note(), *fresh.note("task", exit_code=3)]).failed_runs


def test_runs_that_keep_failing_are_one_incident() -> None:
    """Told at the first failure, reminded of, and over when a run goes well. Late is no news
    meanwhile.
    """
    post = Post()
    assert post.look(notes=post.note(text="PlatformError: no broker")).failed_runs
    assert not post.look(after=HOUR, notes=post.note(text="PlatformError: no broker"))
    assert not post.look(LATE, after=HOUR)
    reminded = post.look(LATE, after=10 * HOUR).reminded_incidents
    assert [one.concern.key for one in reminded] == ["run"]
    post.now += 60
    over = post.look(notes=post.note("good")).closed_incidents
    assert [one.concern.key for one in over] == ["run"]


def test_every_alert_knows_whether_runs_fold() -> None:
    """Also one about something else, hours after that was mailed: nobody folds what waits."""
    post = Post()
    assert not post.look(HALTED).is_nothing_folded
    assert post.look(HALTED, notes=post.note(text="PlatformError: no broker")).is_nothing_folded
    later = post.look(HALTED, BLIND, after=HOUR)
    assert later.new_concerns == [BLIND]
    assert later.is_nothing_folded
    post.now += 60
    assert not post.look(HALTED, notes=post.note("good")).is_nothing_folded
    assert post.look(LATE, after=60).is_nothing_folded


def test_a_run_that_fails_after_its_fold_has_folded() -> None:
    """A check that cannot read a file stops no fold. If a later run fails before it folds, all waits,
    also if its failure is no news.
    """
    post = Post()
    lost = "IntegrityError: a record file cannot be read"
    assert not post.look(notes=post.note(text=lost, exit_code=3, task="check")).is_nothing_folded
    assert not post.look(HALTED, after=60).is_nothing_folded
    assert not post.look(HALTED, after=60, notes=post.note(text=lost, exit_code=3, task="fold"))
    assert post.look(HALTED, BLIND, after=60).is_nothing_folded


def test_a_run_that_fails_by_findings_alone_has_folded() -> None:
    """Also if the runs before it failed for another reason, and their incident is still open."""
    post = Post()
    assert post.look(notes=post.note(text="PlatformError: no broker")).is_nothing_folded
    notes = [*post.note(), *post.note("task", **{**BY_FINDINGS, "task": "fold"})]
    alert = post.look(HALTED, findings=[GAP], sequence=4, after=60, notes=notes)
    assert alert.findings
    assert not alert.is_nothing_folded


def test_every_alert_knows_that_committed_output_is_damaged() -> None:
    """Also a reminder, and a mail about something else: none says that no output is damaged."""
    post = Post()
    lost = {"text": "IntegrityError: a record file cannot be read", "exit_code": 3}
    assert post.look(notes=post.note(**lost)).is_output_damaged
    assert post.look(HALTED, after=60).is_output_damaged
    reminded = post.look(HALTED, after=12 * HOUR)
    assert "run" in [incident.concern.key for incident in reminded.reminded_incidents]
    assert reminded.is_output_damaged
    post.now += 60
    assert not post.look(HALTED, notes=post.note("good")).is_output_damaged
    assert not post.look(HALTED, notes=post.note("failed", exit_code=4)).is_output_damaged


def test_what_was_not_told_while_runs_failed_is_told_when_it_outlives_them() -> None:
    """And what was told before they failed is over like anything else."""
    post = Post()
    post.look(notes=post.note(text="PlatformError: no broker"))
    assert not post.look(LATE, after=HOUR)
    post.now += 60
    alert = post.look(LATE, notes=post.note("good"))
    assert (alert.new_concerns, [one.concern.key for one in alert.closed_incidents]) == (
        [LATE],
        ["run"],
    )
    post.look(LATE, after=60, notes=post.note(text="PlatformError: no broker"))
    assert [one.concern.key for one in post.look(after=60).closed_incidents] == ["late"]


def test_a_run_that_failed_before_a_good_one_is_told_as_over() -> None:
    """Nobody looked in between: a failure is not lost, and nothing stays open. One that was told is
    not told again.
    """
    post = Post()
    failed = [*post.note(), *post.note("task", exit_code=2, text="ConfigError: a")]
    post.now += 60
    alert = post.look(notes=[*failed, *post.note("good")])
    assert (
        [one.text for one in alert.recovered_runs],
        alert.failed_runs,
        alert.closed_incidents,
    ) == (["ConfigError: a"], [], [])
    assert post.desk.open_incidents == {}
    post.look(notes=[*post.note(), *post.note("task", exit_code=2, text="ConfigError: b")])
    again = [*post.note(), *post.note("task", exit_code=2, text="ConfigError: b")]
    post.now += 60
    alert = post.look(notes=[*again, *post.note("good")])
    assert (alert.recovered_runs, [one.concern.key for one in alert.closed_incidents]) == (
        [],
        ["run"],
    )


def test_two_failures_between_two_looks_are_both_told() -> None:
    """Of each kind the last, oldest first; both are known from then on."""
    post = Post()
    said = {"r1": "ConfigError: a", "r2": "ConfigError: b", "r3": "ConfigError: a"}
    notes = [
        Note(kind="task", at_seconds=0.0, run=run, exit_code=2, text=text)
        for run, text in said.items()
    ]
    notes += [Note(kind="failed", at_seconds=at, run=run) for at, run in enumerate(said)]
    assert [(one.run, one.text) for one in post.look(notes=notes).failed_runs] == [
        ("r2", "ConfigError: b"),
        ("r3", "ConfigError: a"),
    ]
    assert not post.look(after=60, notes=notes)


def test_a_failure_is_known_by_what_it_says_and_not_by_its_screen() -> None:
    """The same error is no news, however its screen is laid out, or if the note is of an older version;
    another error is news.
    """
    post = Post()

    def failed(run: str, text: str, headline: str = "") -> list[Note]:
        """The notes of a run whose task failed."""
        return [
            Note(kind="task", at_seconds=0.0, run=run, exit_code=2, text=text, headline=headline),
            Note(kind="failed", at_seconds=post.now, run=run),
        ]

    assert post.look(notes=failed("r1", "ConfigError: a\n  next       b", "ConfigError: a"))
    assert not post.look(after=60, notes=failed("r2", "[a]\nfix it", "ConfigError: a"))
    assert not post.look(after=60, notes=failed("r3", "ConfigError: a"))
    assert post.look(after=60, notes=failed("r4", "ConfigError: a", "ConfigError: b"))


def test_a_finding_that_leaves_nothing_open_is_one_mail() -> None:
    """A look between the commit and the end of its run told it: the run adds nothing, and nothing
    is over later.
    """
    post = Post()
    post.look(sequence=3)
    assert post.look(findings=[GAP], sequence=4)
    notes = [*post.note(), *post.note("task", **BY_FINDINGS)]
    assert not post.look(after=60, sequence=4, notes=notes)
    post.now += 60
    assert not post.look(sequence=5, notes=post.note("good"))


def test_a_failure_by_findings_that_nobody_could_read_is_told() -> None:
    """The ledger is out of reach: what the run said is all there is, once; the findings come when
    they can be read.
    """
    post = Post()
    post.look(sequence=3)
    notes = [*post.note(), *post.note("task", **BY_FINDINGS)]
    assert post.fail(notes=notes).failed_runs
    assert not post.fail(after=60, notes=notes)
    assert post.look(after=60, findings=[GAP], sequence=4).findings
    fresh = Post()
    assert fresh.look(sequence=4, notes=notes).failed_runs
    assert fresh.desk.open_incidents == {}


def test_a_slip_in_a_form_is_told_to_nobody_and_opens_nothing() -> None:
    """Whoever triggered it sees it: no mail comes, also not together with other news; nobody is
    reminded, and nothing is over. A bad file is an incident.
    """
    post = Post()
    for number in range(2):
        said = post.note(
            "task",
            task="plan",
            exit_code=2,
            is_form_error=True,
            text="ConfigError: until: 4 is not after from",
        )
        assert not post.look(after=60, notes=[*post.note(), *said]), number
        assert post.desk.open_incidents == {}
    with_news = post.look(HALTED, after=60, notes=[*post.note(), *said])
    assert (with_news.new_concerns, with_news.failed_runs) == ([HALTED], [])
    assert post.look(after=60, notes=[*post.note(), *said]).recovered_runs == []
    assert not post.look(after=13 * HOUR)
    said = post.note("task", task="plan", exit_code=2, text="ConfigError: s.toml: topics")
    assert post.look(notes=[*post.note(), *said]).failed_runs
    assert list(post.desk.open_incidents) == ["run"]


def test_what_is_new_is_not_still_open_in_the_same_mail() -> None:
    """A reminder of what was told long ago says nothing of what is told just now."""
    post = Post()
    post.look(HALTED)
    alert = post.look(HALTED, BLIND, after=13 * HOUR, notes=post.note(text="killed"))
    assert (alert.new_concerns, [one.concern for one in alert.reminded_incidents]) == (
        [BLIND],
        [HALTED],
    )


def test_one_outage_is_one_mail() -> None:
    """The broker is away: the run fails, and watch cannot look either."""
    post = Post()
    alert = post.fail(notes=post.note(text="PlatformError: no broker"))
    assert alert.failed_runs
    assert alert.new_concerns == [TROUBLE]
    assert not post.fail(after=600)


def test_the_most_urgent_comes_first() -> None:
    """Data about to be lost before a late run."""
    left = Concern(kind="time left", location="a/0", text="2 h", next="run")
    assert [one.kind for one in Post().look(LATE, HALTED, left).new_concerns] == [
        "time left",
        "halted",
        "late",
    ]


def test_a_ledger_that_cannot_be_read_moves_nothing() -> None:
    """Findings wait to be told until it can."""
    post = Post()
    post.look(sequence=4)
    post.fail()
    assert post.desk.reported_sequence == 4


def test_what_no_open_incident_explains_is_told() -> None:
    """A check that cannot read a file ends with 3 and has no finding; a topic we may not ask about
    is no excuse.
    """
    post = Post()
    post.look(BLIND)
    said = post.note(
        "task", task="check", exit_code=3, text="IntegrityError: a record file cannot be read"
    )
    assert post.look(BLIND, notes=[*post.note(), *said]).failed_runs
    assert not post.look(BLIND, notes=[*post.note(), *said])


@pytest.mark.parametrize("concern", ["halted", "quarantine", "circuit"])
def test_a_failure_that_has_no_finding_is_told_beside_what_is_open(concern: str) -> None:
    """Hurt data explains no file that cannot be read: that is told once, another one once more, and
    no finding is.
    """
    post = Post()
    hurt = Concern(kind=concern, location="a/0", text="hurt", next="look")
    post.look(hurt)

    def run(text: str, error: str = "IntegrityError") -> Alert:
        said = post.note(
            "task", task="check", exit_code=3, error=error, text=f"IntegrityError: s: {text}"
        )
        return post.look(hurt, after=60, notes=[*post.note(), *said])

    assert run("a record file cannot be read: x").failed_runs
    assert not run("a record file cannot be read: x")
    assert not run("1 new finding in a/0", error="FindingsError")
    assert run("a record file cannot be read: y").failed_runs
    assert not run("a record file cannot be read: x")
    post.now += 60
    assert [
        one.concern.key for one in post.look(hurt, notes=post.note("good")).closed_incidents
    ] == ["run"]
    assert run("a record file cannot be read: x").failed_runs


def test_a_failure_told_with_a_finding_is_not_told_again() -> None:
    """One mail had both; the next run fails in the same way."""
    post = Post()
    said = post.note(
        "task", task="check", exit_code=3, text="IntegrityError: s: a record file cannot be read: x"
    )
    assert post.look(HALTED, findings=[GAP], sequence=4, notes=[*post.note(), *said]).failed_runs
    assert not post.look(HALTED, after=60, sequence=4, notes=[*post.note(), *said])


def test_hurt_data_is_told_though_runs_were_known_to_fail() -> None:
    """Brokers away since yesterday, and now a file: another failure. The outage itself is one, in
    whatever words.
    """
    post = Post()
    assert post.look(notes=post.note(text="PlatformError: no broker")).failed_runs
    assert not post.look(after=60, notes=post.note(text="the run failed: timed out"))
    texts = {
        3: "IntegrityError: s: entry 4 is damaged",
        2: "ConfigError: s.toml: topics",
        1: "BrokenPromiseError: 5",
    }
    for code, text in texts.items():
        assert post.look(
            after=60, notes=[*post.note(), *post.note("task", exit_code=code, text=text)]
        ).failed_runs
        assert not post.look(
            after=60, notes=[*post.note(), *post.note("task", exit_code=code, text=text)]
        )
    assert not post.look(after=60, notes=post.note(text="PlatformError: no broker"))


def test_a_failure_by_findings_is_known_by_its_class() -> None:
    """Whatever its words are: raised by fold, and by a stream that stops for its circuit."""
    failed = Ledger(
        stream="s",
        failed_ranges=(FailedRange(partition="a/0", epoch=0, start=0, until=5, judged_until=3),),
        circuit="open",
    )
    with pytest.raises(FindingsError) as stopped:
        refuse_open_circuit(failed, "stop")
    for error in (new_findings_error("s", [GAP]), stopped.value):
        post = Post()
        post.look(HALTED, findings=[GAP], sequence=4)
        name = Failure.of(error).error
        said = post.note("task", exit_code=error.exit_code, error=name, text="any words at all")
        assert not post.look(HALTED, after=60, sequence=4, notes=[*post.note(), *said])


def test_a_note_of_an_earlier_version_is_told() -> None:
    """It does not say the class of its error: rather one mail too many than one too few."""
    old = {"kind": "task", "at_seconds": 0.0, "run": "r1", "exit_code": 3}
    note = msgspec.convert({**old, "text": "IntegrityError: s: 1 new finding in a/0"}, Note)
    post = Post()
    post.look(HALTED, findings=[GAP], sequence=4)
    assert post.look(HALTED, after=60, sequence=4, notes=[*post.note(), note]).failed_runs


def test_a_stream_begun_anew_is_looked_at_from_its_beginning() -> None:
    """Its output was deleted: what was told of the old ledger says nothing of the new one."""
    post = Post()
    post.look(sequence=40)
    post.look(sequence=2)
    assert post.desk.reported_sequence == 2


def test_the_runs_whose_end_nobody_told_are_known_by_the_notes_of_their_tasks() -> None:
    """A run is asked about once, whichever tasks left a note, and not once its own end is noted."""
    post = Post()
    notes = [*post.note("task", dag="s", task="plan"), *post.note("task", dag="s", task="fold")]
    assert runs_without_an_end(notes) == [("s", "r1")]
    assert runs_without_an_end([*notes, *post.note()]) == []
    assert runs_without_an_end(post.note("task", task="of a version that noted no DAG")) == []


def test_a_callback_that_comes_after_all_adds_nothing_to_what_watch_told() -> None:
    """Watch saw that the run had failed before Airflow called the callback: one run is one mail."""
    post = Post()
    said = post.note("task", dag="s", task="fold", exit_code=2, text="ConfigError: no such file")
    (failed,) = post.look(notes=[*said, *post.note(inferred=True)]).failed_runs
    assert (failed.text, failed.inferred) == ("ConfigError: no such file", True)
    assert not post.look(after=60, notes=post.note(text="the run failed: task_failure"))


def test_a_run_that_is_cleared_and_fails_again_is_told_again() -> None:
    """What its task says the second time is news, and so is a death without a word an hour later."""
    post = Post()
    said = post.note("task", dag="s", task="fold", exit_code=2, text="ConfigError: one thing")
    post.look(notes=[*said, *post.note(inferred=True)])
    again = post.note("task", dag="s", task="fold", exit_code=2, text="ConfigError: another")
    assert post.look(after=60, notes=[*again, *post.note()]).failed_runs
    assert post.look(
        after=2 * HOUR, notes=post.note(text="the run failed: task_failure")
    ).failed_runs


QUARANTINE = Concern(kind="quarantine", text="1 in quarantine", next="look")


def failed_repair(post: Post) -> list[Note]:
    """What a run of the repair DAG leaves whose apply failed."""
    said = post.note(
        "task",
        dag=REPAIR_DAG,
        task="apply",
        exit_code=4,
        text="PlatformError: Spark is out of memory",
    )
    return [*said, *post.note(dag=REPAIR_DAG)]


def test_a_good_fold_does_not_end_a_repair_that_failed() -> None:
    """The session is still in quarantine: nothing is over until that is."""
    post = Post()
    post.look(QUARANTINE)
    assert [
        failed.task
        for failed in post.look(QUARANTINE, after=60, notes=failed_repair(post)).failed_runs
    ] == ["apply"]
    assert not post.look(QUARANTINE, after=60, notes=post.note("good", dag="s")).closed_incidents
    over = post.look(after=60, notes=post.note("good", dag="s")).closed_incidents
    assert [incident.concern.key for incident in over] == ["repair", "quarantine"]


def test_a_repair_that_failed_is_not_told_as_passed_by_a_good_fold_of_the_same_look() -> None:
    """Both notes were left between two looks."""
    post = Post()
    post.look(QUARANTINE)
    notes = failed_repair(post)
    post.now += 60
    alert = post.look(QUARANTINE, notes=[*notes, *post.note("good", dag="s")])
    assert (len(alert.failed_runs), alert.recovered_runs) == (1, [])


def test_a_repair_that_failed_is_over_when_a_later_one_succeeded() -> None:
    """Or was given up; of damage that no look at the stream shows, nothing else tells."""
    post = Post()
    post.look(notes=failed_repair(post))
    assert not post.look(after=60, notes=post.note("good", dag="s")).closed_incidents
    assert not post.look(after=60, repaired_seconds=-1.0).closed_incidents
    assert [
        one.concern.key for one in post.look(after=60, repaired_seconds=post.now).closed_incidents
    ] == ["repair"]
    post.look(after=60, notes=failed_repair(post))
    assert [
        one.concern.key
        for one in post.look(after=60, notes=post.note("good", dag=REPAIR_DAG)).closed_incidents
    ] == ["repair"]


def test_a_repair_that_failed_and_was_repeated_before_anybody_looked_leaves_nothing_open() -> None:
    """The failure is told as passed, once."""
    post = Post()
    notes = failed_repair(post)
    post.now += 60
    alert = post.look(notes=notes, repaired_seconds=post.now)
    assert (alert.failed_runs, len(alert.recovered_runs), post.desk.open_incidents) == ([], 1, {})


def test_a_good_repair_does_not_end_runs_that_fail() -> None:
    """Only a run of the stream's own DAG does."""
    post = Post()
    post.look(notes=post.note(text="killed"))
    assert not post.look(after=60, notes=post.note("good", dag=REPAIR_DAG)).closed_incidents
    assert [
        one.concern.key
        for one in post.look(after=60, notes=post.note("good", dag="s")).closed_incidents
    ] == ["run"]
