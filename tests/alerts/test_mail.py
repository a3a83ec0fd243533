"""Mails: stream, place, time left, next command and links are in both the text and the HTML."""

from __future__ import annotations

from msgspec.structs import replace

from seriatim.alerts.incidents import Alert, Incident, Note
from seriatim.alerts.mail import FINDINGS_LISTED_MAX, MailContext, compose_mail
from seriatim.engine.findings import Concern, Finding

PLACE = MailContext(stream="orders", to=("ops@example.org",), airflow_url="http://localhost:8080/")
GAP = Finding(
    finding="gap",
    topic="prefix-a",
    partition=3,
    offset=41337,
    expected="41333",
    found="41337",
    cause="unexplained",
    touched="2 sessions, 0 records",
    time_left_seconds=7200,
)
FAILED = Note(
    kind="failed",
    at_seconds=0,
    run="scheduled__1",
    task="fold",
    exit_code=4,
    text="PlatformError: reading from Kafka broke\n  cause      no broker\n  next       check the broker",
    links={"run": "http://localhost:8080/dags/orders/runs/1", "log": "http://localhost:8080/log"},
)


def test_a_finding_says_all_that_a_person_needs() -> None:
    """Place, offset, expected and found, cause, what is touched, time left and when, the command,
    the form.
    """
    mail = compose_mail(Alert(findings=[GAP], failed_runs=[FAILED]), PLACE, 0.0)
    assert mail.subject == "[seriatim] orders: GapError in prefix-a/3 at offset 41337"
    for said in (
        "GapError: orders prefix-a/3: gap at offset 41337",
        "41333",
        "unexplained",
        "2 sessions, 0 records",
        "2 h 0 min: from 1970-01-01 02:00 UTC on, Kafka deletes messages that are not folded yet",
        "seriatim ",
        "http://localhost:8080/dags/seriatim_repair",
        "http://localhost:8080/dags/orders/runs/1",
        "http://localhost:8080/log",
        "scheduled__1",
    ):
        assert said in mail.text
        assert said in mail.html
    assert '{"stream":"orders","partition":"prefix-a/3"}\n' in mail.text


def test_what_can_be_left_behind_is_said_for_the_form_as_well() -> None:
    """Of an expired range or a poisonous message; no other finding has that way out."""
    mail = compose_mail(Alert(findings=[replace(GAP, finding="expired")]), PLACE, 0.0)
    assert '"partition":"prefix-a/3"}, or with forward checked to go on without it\n' in mail.text


def test_messages_that_are_gone_have_no_time_left() -> None:
    """Of an expired range nobody says how long Kafka still has it."""
    mail = compose_mail(Alert(findings=[replace(GAP, finding="expired")]), PLACE, 0.0)
    assert "Kafka deletes messages" not in mail.text


def test_a_failed_run_says_what_its_task_said() -> None:
    """Headline in the subject, the rest below it."""
    mail = compose_mail(Alert(failed_runs=[FAILED]), PLACE, 0.0)
    assert mail.subject == "[seriatim] orders: run failed: PlatformError: reading from Kafka broke"
    assert "check the broker" in mail.text


def test_two_failed_runs_are_both_there() -> None:
    """The subject has the last one."""
    other = replace(
        FAILED, text="ConfigError: s.toml: topics\n  next       fix s.toml", run="scheduled__0"
    )
    mail = compose_mail(Alert(failed_runs=[other, FAILED]), PLACE, 0.0)
    assert mail.subject == "[seriatim] orders: run failed: PlatformError: reading from Kafka broke"
    for said in (
        "2 runs failed",
        "Run failed: ConfigError: s.toml: topics",
        "scheduled__0",
        "fix s.toml",
    ):
        assert said in mail.text


def test_a_run_that_failed_and_is_over_asks_for_nothing() -> None:
    """A later one went well before anybody was told."""
    mail = compose_mail(Alert(recovered_runs=[FAILED]), PLACE, 0.0)
    assert (
        mail.subject
        == "[seriatim] orders: over: run failed: PlatformError: reading from Kafka broke"
    )
    assert "a run failed, and a later one went well" in mail.text
    assert "http://localhost:8080/dags/orders/runs/1" in mail.text
    assert "next  " not in mail.text


def test_a_report_is_linked_where_something_happened() -> None:
    """Not in reminders: it is of another run."""
    place = replace(PLACE, report_url="file:///lake/orders/reports/0000000004.html")
    assert place.report_url in compose_mail(Alert(findings=[GAP]), place, 0.0).text
    concern = Concern(kind="late", text="x", next="y")
    assert place.report_url not in compose_mail(Alert(new_concerns=[concern]), place, 0.0).text


def test_a_run_that_died_without_a_word_still_has_a_next_command() -> None:
    """Whatever killed it."""
    mail = compose_mail(Alert(failed_runs=[replace(FAILED, text="")]), PLACE, 0.0)
    assert "run failed: the scheduler gave no reason" in mail.subject
    assert "\n  next       read the task's log, then: seriatim status orders" in mail.text


def test_an_end_asks_for_nothing() -> None:
    """What it was, since when, how long."""
    concern = Concern(kind="halted", location="a/0", text="halted at 3", next="repair it")
    mail = compose_mail(
        Alert(closed_incidents=[Incident(concern=concern, since_seconds=0.0)]), PLACE, 3600.0
    )
    assert mail.subject == "[seriatim] orders: over: halted a/0"
    assert "1970-01-01 00:00 UTC, 1 h 0 min" in mail.text
    assert "repair it" not in mail.text


def test_a_reminder_says_what_to_do_again() -> None:
    """Each thing that is open, with its command."""
    concern = Concern(kind="circuit", text="publishing waits", next="seriatim accept")
    mail = compose_mail(
        Alert(reminded_incidents=[Incident(concern=concern, since_seconds=0.0)]), PLACE, 3600.0
    )
    assert mail.subject == "[seriatim] orders: still open: circuit"
    assert "seriatim accept" in mail.text


def test_what_users_wrote_does_not_become_html_or_headers() -> None:
    """A session's name is data."""
    finding = replace(GAP, session="<script>alert(1)</script>\nBcc: x@y.org", cause="<img src=x>")
    mail = compose_mail(Alert(findings=[finding]), PLACE, 0.0)
    assert "<script>" not in mail.html
    assert "<img" not in mail.html
    assert "\n" not in mail.subject


def test_a_flood_is_cut() -> None:
    """Twenty findings are shown, the rest are counted."""
    mail = compose_mail(Alert(findings=[GAP] * (FINDINGS_LISTED_MAX + 5)), PLACE, 0.0)
    assert "and 24 more" in mail.subject
    assert mail.text.count("GapError: orders") == FINDINGS_LISTED_MAX
    assert "5 more findings" in mail.text


def test_without_airflow_there_are_no_links() -> None:
    """From cron the commands stand alone."""
    mail = compose_mail(Alert(findings=[GAP]), replace(PLACE, airflow_url=""), 0.0)
    assert "http" not in mail.text
    assert "http" not in mail.html


def test_the_same_alert_is_the_same_mail() -> None:
    """Tried again it carries the same id; another moment is another mail."""
    alert = Alert(findings=[GAP])
    assert compose_mail(alert, PLACE, 1.0) == compose_mail(alert, PLACE, 1.0)
    assert compose_mail(alert, PLACE, 1.0).id != compose_mail(alert, PLACE, 2.0).id


def test_a_moment_past_all_calendars_is_no_moment() -> None:
    """A topic kept for ever may say so by the largest number there is."""
    mail = compose_mail(Alert(findings=[replace(GAP, time_left_seconds=2**63 // 1000)]), PLACE, 1.0)
    assert "Kafka drops" not in mail.text


def test_many_things_are_cut_too() -> None:
    """No server takes a mail of 15 MB, and one that is refused is in the way of the next."""
    many = [
        Concern(kind="halted", location=f"a/{number}", text="x" * 200, next="look")
        for number in range(10_000)
    ]
    mail = compose_mail(Alert(new_concerns=many), PLACE, 1.0)
    assert "10000 things to look at" in mail.text
    assert len(mail.text) + len(mail.html) < 200_000
