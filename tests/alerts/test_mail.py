"""Mails: stream, place, time left, next command and links are in both the text and the HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from seriatim.alerts.incidents import Alert, Incident, Note
from seriatim.alerts.mail import GROUPS_LISTED_MAX, MailContext, compose_mail
from seriatim.engine.findings import FINDING_TITLES, Concern, Finding
from seriatim.operations.missing_messages import MissingMessage
from seriatim.operations.status import (
    HaltStatus,
    PartitionStatus,
    QuarantinedSession,
    StreamStatus,
)

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
    assert '"partition":"prefix-a/3","forward":true}\n' in mail.text
    # A message that could not be decoded may be readable by now: forward would lose it.
    poison = compose_mail(Alert(findings=[replace(GAP, finding="poison")]), PLACE, 0.0)
    assert '"partition":"prefix-a/3"}\n' in poison.text
    assert 'To go on without the message, add "forward":true inside the braces above' in poison.text
    without = compose_mail(Alert(findings=[GAP]), PLACE, 0.0)
    assert "forward" not in without.text


def test_messages_that_are_gone_have_no_time_left() -> None:
    """Of an expired range nobody says how long Kafka still has it."""
    mail = compose_mail(Alert(findings=[replace(GAP, finding="expired")]), PLACE, 0.0)
    assert "Kafka deletes messages" not in mail.text


def test_a_failed_run_says_what_its_task_said() -> None:
    """Headline in the subject, the rest below it."""
    mail = compose_mail(Alert(failed_runs=[FAILED]), PLACE, 0.0)
    assert mail.subject == "[seriatim] orders: run failed: PlatformError: reading from Kafka broke"
    assert "check the broker" in mail.text


def test_a_run_that_failed_for_another_reason_keeps_its_error_beside_a_finding() -> None:
    """A finding has a section of its own, which says nothing about a broker that does not answer."""
    for error, is_shown in (("PlatformError", True), ("FindingsError", False), ("", False)):
        failed_run = replace(FAILED, error=error)
        text = compose_mail(Alert(findings=[GAP], failed_runs=[failed_run]), PLACE, 0.0).text
        assert ("check the broker" in text) == is_shown, error


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


def test_what_is_over_does_not_make_light_of_what_is_new() -> None:
    """The words "nothing to do" stand in the first sentence only if there is no other news."""
    concern = Concern(kind="quarantine", text="1 session in quarantine", next="x")
    over = Incident(concern=concern, since_seconds=0.0)
    alone = compose_mail(Alert(closed_incidents=[over]), PLACE, 60.0).text
    assert alone.startswith("Stream orders: 1 thing is over, nothing to do about it.\n")
    two = compose_mail(Alert(closed_incidents=[over, over]), PLACE, 60.0).text
    assert two.startswith("Stream orders: 2 things are over, nothing to do about them.\n")
    both = compose_mail(Alert(failed_runs=[FAILED], closed_incidents=[over]), PLACE, 60.0).text
    assert both.startswith("Stream orders: a run failed, 1 thing is over.\n")


def test_an_end_asks_for_nothing() -> None:
    """What it was, since when, how long."""
    concern = Concern(kind="halted", location="a/0", text="halted at 3", next="repair it")
    mail = compose_mail(
        Alert(closed_incidents=[Incident(concern=concern, since_seconds=0.0)]), PLACE, 3600.0
    )
    assert mail.subject == "[seriatim] orders: over: halted a/0"
    assert "1970-01-01 00:00 UTC, 1 h 0 min" in mail.text
    assert "repair it" not in mail.text


@pytest.mark.parametrize(
    ("timezone", "since", "until"),
    [
        ("UTC", "2026-03-29 00:59 UTC", "2026-03-29 01:01 UTC"),
        ("Europe/Berlin", "2026-03-29 01:59+01:00", "2026-03-29 03:01+02:00"),
        ("Asia/Kathmandu", "2026-03-29 06:44+05:45", "2026-03-29 06:46+05:45"),
    ],
)
def test_times_are_in_the_zone_of_the_recipients(timezone: str, since: str, until: str) -> None:
    """With their offset from UTC, so that nobody guesses; also over the change of clocks."""
    at_seconds = datetime(2026, 3, 29, 0, 59, tzinfo=UTC).timestamp()
    context = replace(PLACE, timezone=timezone)
    concern = Concern(kind="late", text="x", next="y")
    incident = Incident(concern=concern, since_seconds=at_seconds)
    finding = replace(GAP, time_left_seconds=120)
    alert = Alert(findings=[finding], reminded_incidents=[incident])
    mail = compose_mail(alert, context, at_seconds)
    assert f"from {until} on, Kafka deletes" in mail.text
    assert f"since      {since}, " in mail.text


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


def test_ninety_findings_are_put_into_groups() -> None:
    """Each kind and cause has one section, with the first of its findings and how many there are."""
    gaps = [replace(GAP, offset=offset) for offset in range(60)]
    poison = replace(GAP, finding="poison", session="s", cause="no JSON")
    mail = compose_mail(Alert(findings=[*gaps, *[poison] * 30]), PLACE, 0.0)
    assert "and 89 more" in mail.subject
    assert "60 findings of the same kind, first GapError: orders prefix-a/3: gap" in mail.text
    assert "30 findings of the same kind, first PoisonError: orders prefix-a/3: poison" in mail.text
    assert "prefix-a/3 at offset 4 and 55 more" in mail.text
    assert len(mail.text.splitlines()) < 60


def test_many_causes_are_cut() -> None:
    """No mail has more groups than a person can read."""
    kinds = ["cause " + "x" * number for number in range(GROUPS_LISTED_MAX + 5)]
    findings = [replace(GAP, cause=cause) for cause in kinds]
    mail = compose_mail(Alert(findings=findings), PLACE, 0.0)
    assert "5 more kinds and causes" in mail.text


def test_where_to_paste_is_said() -> None:
    """Airflow has no address that fills in the form, so the mail says how to get there."""
    mail = compose_mail(Alert(findings=[GAP]), PLACE, 0.0)
    for said in (
        "open http://localhost:8080/dags/seriatim_repair, press Trigger, open Advanced Options",
        "replace all that Configuration JSON contains by:\n",
        "Required Actions:\n",
        "there you read the plan and approve it",
        "docker compose exec scheduler bash",
    ):
        assert said in mail.text


@pytest.mark.parametrize(
    ("airflow_url", "expected"),
    [
        ("http://localhost:8080/", "http://localhost:8080/seriatim/runbook#sequence-gap"),
        ("", "docs/RUNBOOK.md, the row of `sequence gap`"),
    ],
)
def test_each_finding_links_to_its_row_in_the_runbook(airflow_url: str, expected: str) -> None:
    """In Airflow as a link, else by its name."""
    finding = replace(GAP, finding="sequence gap", session="s")
    runbook_url = f"{airflow_url}seriatim/runbook" if airflow_url else ""
    place = replace(PLACE, airflow_url=airflow_url, runbook_url=runbook_url)
    mail = compose_mail(Alert(findings=[finding]), place, 0.0)
    assert expected in mail.text


LOST = MissingMessage(sequence=7, searched_until=99, is_end_reached=True)
SWAP = MissingMessage(sequence=7, searched_until=41340, is_end_reached=False, arrived_offset=41339)


def status_with(missing: MissingMessage | None = None, **fields: Any) -> StreamStatus:
    """A stream with one session in quarantine, in one of two partitions."""
    session = QuarantinedSession(
        session="s",
        topic="prefix-a",
        partition=3,
        offset=41337,
        finding="sequence gap",
        missing=missing,
    )
    partitions = [PartitionStatus(topic="prefix-a", partition=number) for number in (3, 4)]
    status = StreamStatus(
        stream="orders",
        sequence=12,
        checked=11,
        published=10,
        partitions=partitions,
        quarantined=[session],
        quarantined_count=1,
        sessions_max=240,
    )
    return replace(status, **fields)


def mail_about(finding: Finding, status: StreamStatus) -> str:
    """The text of the mail about a finding."""
    return compose_mail(Alert(findings=[finding]), replace(PLACE, status=status), 0.0).text


def test_every_mail_says_how_bad_it_is() -> None:
    """How many sessions of how many, that the rest went on and was published, whether the producer
    was asked, how urgent it is, and what happens if nobody acts.
    """
    finding = replace(GAP, finding="sequence gap", session="s", time_left_seconds=None)
    text = mail_about(finding, status_with(LOST))
    for said in (
        "1 of at most 240 sessions in quarantine",
        "went on: folded up to entry 12, checked up to entry 11, published up to entry 10",
        "not asked for snapshots: `snapshot_requests` is not set in the stream file",
        "no: Kafka deletes nothing that is needed",
        "keep their last good rows until a snapshot of theirs, or a person, makes them right",
    ):
        assert said in text
    asked = status_with(LOST, snapshot_requests="requests")
    assert "runs ask it for snapshots, on topic requests" in mail_about(finding, asked)


def test_a_mail_about_a_stream_that_cannot_be_read_says_how_bad_it_is() -> None:
    """Nothing is known about it then, and that is said."""
    trouble = Concern(kind="trouble", text="the broker does not answer", next="check the broker")
    text = compose_mail(Alert(new_concerns=[trouble]), PLACE, 0.0).text
    for said in (
        "damaged    not known, because the stream could not be read",
        "the rest   what was committed before stays as it is",
        "urgent     soon: ",
        "if ignored if runs cannot read it either, nothing new is folded",
    ):
        assert said in text


def test_a_partition_that_waits_is_urgent() -> None:
    """Kafka deletes what it has not folded, and the mail says when."""
    halted = PartitionStatus(
        topic="prefix-a",
        partition=3,
        halt=HaltStatus("gap", 41333),
        time_left_seconds=7200,
    )
    status = status_with(quarantined=[], quarantined_count=0, partitions=[halted], circuit="open")
    text = mail_about(GAP, status)
    assert "1 of 1 partition waits for a person, output that failed its check" in text
    assert "act before 1970-01-01 02:00 UTC, in 2 h 0 min" in text
    assert "what Kafka deletes meanwhile is lost" in text
    assert "nothing newer is published until the check is settled" in text


def test_what_the_next_run_folds_by_itself_is_not_urgent() -> None:
    """A time left of days stands beside every partition that lives. It is urgent only where nobody
    folds the messages: the partition waits, the runs fail, or they do not catch up.
    """
    live = PartitionStatus(
        topic="prefix-a", partition=3, time_left_seconds=7200, limit_seconds=3600, catches_up=True
    )
    finding = replace(GAP, finding="sequence gap", session="s")
    text = mail_about(finding, status_with(LOST, partitions=[live]))
    assert "urgent     no: Kafka deletes nothing that is needed" in text
    assert "act before" not in text
    for partition in (
        replace(live, catches_up=False),
        replace(live, limit_seconds=9000),
        replace(live, hold="23b8"),
    ):
        assert "act before" in mail_about(finding, status_with(LOST, partitions=[partition]))
    place = replace(PLACE, status=status_with(partitions=[live]))
    found_only = replace(FAILED, error="FindingsError")
    assert "act before" not in compose_mail(Alert(failed_runs=[found_only]), place, 0.0).text
    failing = Alert(failed_runs=[found_only], is_nothing_folded=True)
    assert "act before" in compose_mail(failing, place, 0.0).text


def test_the_rest_goes_on_only_while_runs_do() -> None:
    """Where runs fail, nobody may read that everything else went on."""
    place = replace(PLACE, status=status_with(quarantined=[], quarantined_count=0))
    text = compose_mail(Alert(failed_runs=[FAILED], is_nothing_folded=True), place, 0.0).text
    assert "the rest   waits, because no run folds it by now: folded up to entry 12" in text
    assert "went on" not in text
    assert "the rest   went on" in compose_mail(Alert(findings=[GAP]), place, 0.0).text


def test_a_run_that_met_damaged_output_says_so() -> None:
    """A lost file stands in no finding and in no quarantine, and is damage all the same."""
    place = replace(PLACE, status=status_with(quarantined=[], quarantined_count=0))
    lost = replace(FAILED, exit_code=3, error="IntegrityError", task="check")
    text = compose_mail(Alert(failed_runs=[lost]), place, 0.0).text
    assert "damaged    committed output: the failed run below says which" in text
    assert "the rest   went on" in text
    later = Alert(findings=[GAP], is_output_damaged=True)
    text = compose_mail(later, place, 0.0).text
    assert "damaged    committed output: the mail about the failed run says which" in text
    findings = replace(FAILED, exit_code=3, error="FindingsError")
    assert "damaged    no output" in compose_mail(Alert(failed_runs=[findings]), place, 0.0).text


def test_an_open_circuit_that_stops_runs_is_urgent() -> None:
    """With `on_check_failure = "stop"` nobody folds until a person decides; else only `current` waits."""
    live = PartitionStatus(topic="prefix-a", partition=3, time_left_seconds=7200, catches_up=True)
    check = replace(FAILED, error="FindingsError")
    alert = Alert(failed_runs=[check], new_concerns=[Concern(kind="circuit", text="open", next="")])
    status = status_with(circuit="open", partitions=[live])
    place = replace(PLACE, status=status, stops_at_open_circuit=True)
    assert "urgent     act before" in compose_mail(alert, place, 0.0).text
    going_on = replace(place, stops_at_open_circuit=False)
    assert "urgent     soon: readers of `current`" in compose_mail(alert, going_on, 0.0).text


def test_an_end_is_not_bad() -> None:
    """What is over needs no judgement."""
    concern = Concern(kind="halted", location="a/0", text="halted at 3", next="repair it")
    alert = Alert(closed_incidents=[Incident(concern=concern, since_seconds=0.0)])
    mail = compose_mail(alert, replace(PLACE, status=status_with(LOST)), 0.0)
    assert "How bad it is" not in mail.text
    assert "Where to type" not in mail.text


def test_a_message_that_never_came_offers_no_refold() -> None:
    """Neither as a command nor in Airflow's form: a snapshot or a release helps."""
    finding = replace(GAP, finding="sequence gap", session="s")
    text = mail_about(finding, status_with(LOST))
    assert "sequence 7 is not in Kafka, up to the end of the log at offset 99" in text
    assert 'seriatim quarantine release orders s --topic prefix-a/3 --because "…"' in text
    assert "ask its producer for a snapshot" in text
    assert "seriatim repair" not in text
    assert "seriatim_repair" not in text


def test_a_partition_that_waits_comes_with_the_form_of_its_repair() -> None:
    """Also where its finding was mailed before, in a reminder, but not where a person decides."""
    for finding, is_offered in (("gap", True), ("re-created", False)):
        halted = PartitionStatus(topic="prefix-a", partition=3, halt=HaltStatus(finding, 41333))
        place = replace(PLACE, status=status_with(partitions=[halted]))
        concern = Concern(kind="halted", location="prefix-a/3", text="at offset 41333", next="look")
        incident = Incident(concern=concern, since_seconds=0.0)
        for alert in (Alert(new_concerns=[concern]), Alert(reminded_incidents=[incident])):
            text = compose_mail(alert, place, 0.0).text
            form = '{"stream":"orders","partition":"prefix-a/3"}'
            assert (form in text) == is_offered


@pytest.mark.parametrize("level", ["error", "warning"])
@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("kind", FINDING_TITLES)
def test_the_form_of_a_repair_is_offered_only_where_a_repair_helps(
    kind: str, session: str | None, level: Literal["error", "warning"]
) -> None:
    """Not for a warning, nor for what a person has to accept, nor for what the same messages give again.
    Poison of a session is such a message unless something else was changed.
    """
    finding = replace(GAP, finding=kind, session=session, level=level)
    advice = finding.advice("orders")
    is_offered = "seriatim_repair" in mail_about(finding, status_with())
    is_the_same_again = "Folding again finds" in advice or "Folding again helps only" in advice
    assert is_offered == ("seriatim repair " in advice and not is_the_same_again)


def test_a_session_that_is_well_by_now_asks_for_nothing() -> None:
    """Its snapshot came before the mail was written. Only a status that has seen the finding's entry
    may say so.
    """
    healed = replace(GAP, finding="sequence gap", session="healed", offset=41400)
    waiting = replace(GAP, finding="sequence gap", session="s")
    place = replace(PLACE, status=status_with(LOST))
    mail = compose_mail(Alert(findings=[healed, waiting], sequence=12), place, 0.0)
    assert mail.subject == "[seriatim] orders: GapError in prefix-a/3 at offset 41337, and 1 more"
    _, _, last = mail.text.partition("\n\nWell again by now: 1 finding, nothing to do\n")
    assert last.startswith("  sessions   healed: sequence gap in prefix-a/3 at offset 41400\n")
    assert mail.text.count("(session ") == 1
    older = compose_mail(Alert(findings=[healed, waiting], sequence=13), place, 0.0)
    assert "Well again" not in older.text
    assert older.text.count("(session ") == 2
    only = compose_mail(Alert(findings=[healed], sequence=12), place, 0.0)
    assert only.subject.endswith("at offset 41400, well again by now")


def test_a_mail_about_many_findings_looks_through_the_quarantine_a_few_times() -> None:
    """Not once for each finding: with thousands of both a mail would take hours."""

    class CountedList(list[QuarantinedSession]):
        """Counts how often somebody goes through it."""

        passes = 0

        def __iter__(self) -> Iterator[QuarantinedSession]:
            self.passes += 1
            return super().__iter__()

    status = status_with(LOST)
    quarantined = CountedList(
        [replace(status.quarantined[0], session=f"s{number}") for number in range(100)]
    )
    sessions = [f"s{number}" for number in range(0, 200, 2)]
    findings = [replace(GAP, finding="sequence gap", session=session) for session in sessions]
    place = replace(PLACE, status=status_with(quarantined=quarantined, quarantined_count=100))
    mail = compose_mail(Alert(findings=findings, sequence=12), place, 0.0)
    assert "Well again by now: 50 findings" in mail.text
    assert 0 < quarantined.passes < 20


def test_what_the_findings_say_is_not_counted_again() -> None:
    """A quarantine that a finding's section explains is no further thing to look at."""
    alert = Alert(
        findings=[GAP],
        new_concerns=[Concern(kind="quarantine", text="1 session in quarantine", next="")],
    )
    assert compose_mail(alert, PLACE, 0.0).text.startswith("Stream orders: 1 new finding.\n")


def test_a_swap_is_told_as_a_swap() -> None:
    """In the subject too, with the repair that puts the messages into order."""
    finding = replace(GAP, finding="sequence gap", session="s")
    place = replace(PLACE, status=status_with(SWAP))
    mail = compose_mail(Alert(findings=[finding]), place, 0.0)
    assert mail.subject.endswith("at offset 41337 (messages were swapped)")
    assert "sequence 7 came later, at offset 41339: messages were swapped" in mail.text
    assert "seriatim repair orders --partition prefix-a/3 --session s --apply" in mail.text
    assert "seriatim_repair" in mail.text


def test_runs_that_succeed_again_are_called_so() -> None:
    """`over: run` would say nothing."""
    concern = Concern(kind="run", text="PlatformError: no broker", next="")
    mail = compose_mail(
        Alert(closed_incidents=[Incident(concern=concern, since_seconds=0.0)]), PLACE, 3600.0
    )
    assert (
        mail.subject
        == "[seriatim] orders: over: runs succeed again (before: PlatformError: no broker)"
    )


def test_an_end_says_what_ended_it() -> None:
    """As far as the ledger or a run tells."""
    concern = Concern(kind="halted", location="a/0", text="halted at 3", next="")
    alert = Alert(
        closed_incidents=[Incident(concern=concern, since_seconds=0.0)],
        endings={"halted a/0": "a repair (entry 7)"},
    )
    assert "  ended by   a repair (entry 7)\n" in compose_mail(alert, PLACE, 60.0).text
    alert.endings = {"halted a/1": "a repair (entry 7)"}
    assert "ended by" not in compose_mail(alert, PLACE, 60.0).text


def test_addresses_of_ours_are_links_and_no_others() -> None:
    """In the HTML: the form of a repair and the runbook. What a message brought along leads nowhere."""
    planted = "http://localhost:8080.example.org/x http://evil.example http://localhost:80800/y"
    place = replace(PLACE, runbook_url="http://localhost:8080/seriatim/runbook")
    html = compose_mail(Alert(findings=[replace(GAP, cause=planted)]), place, 0.0).html
    form, row = "dags/seriatim_repair", "seriatim/runbook#gap"
    for path in (form, row):
        url = f"http://localhost:8080/{path}"
        assert f'<a href="{url}">{url}</a>' in html
    assert "http://evil.example" in html
    addresses = re.findall('href="([^"]*)"', html)
    assert [url.removeprefix("http://localhost:8080/") for url in addresses] == [
        form,
        row,
        "dags/orders",
    ]


def test_the_place_to_type_is_that_of_the_host() -> None:
    """As its settings say; without them, how it usually is."""
    assert "in the project's folder" in compose_mail(Alert(findings=[GAP]), PLACE, 0.0).text
    place = replace(PLACE, where_to_type="in any shell, after: source /demo/env.sh")
    text = compose_mail(Alert(findings=[GAP]), place, 0.0).text
    assert "in any shell, after: source /demo/env.sh" in text
    assert "in the project's folder" not in text


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
    assert "Kafka deletes messages" not in mail.text


def test_many_things_are_cut_too() -> None:
    """No server takes a mail of 15 MB, and one that is refused is in the way of the next."""
    many = [
        Concern(kind="halted", location=f"a/{number}", text="x" * 200, next="look")
        for number in range(10_000)
    ]
    mail = compose_mail(Alert(new_concerns=many), PLACE, 1.0)
    assert "10000 things to look at" in mail.text
    assert len(mail.text) + len(mail.html) < 200_000
