"""Pages: what a person sees of streams, made of the ledger's manifests and the status file alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from seriatim.engine.findings import Concern, Finding
from seriatim.engine.offsets import Partition
from seriatim.ledger.commit import commit
from seriatim.ledger.entries import VerdictEntry
from seriatim.ledger.model import FailedRange
from seriatim.operations.repair.refold import RepairRun
from seriatim.operations.status import (
    HaltStatus,
    PartitionStatus,
    repair_values_of_concern,
)
from seriatim.web import read
from seriatim.web.app import RunSpan
from seriatim.web.render import is_in_future, render_age
from tests.web.streams_on_disk import HOUR, NOW, Lake, create_troubled_stream


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A folder of streams."""
    return Lake(tmp_path)


def test_a_halted_partition_is_red_with_its_offset_and_command(lake: Lake) -> None:
    """On the list and on the stream's page; what is well beside it is not."""
    made = create_troubled_stream(lake)
    offset = made.reader.lost_offsets.copy().pop()[1]
    lake.write_run_status(made)
    lake.stream("quotes")
    for page in (lake.get("/").text, lake.get("/stream/orders").text):
        assert f"halted in-a/2</b>at offset {offset}: gap" in page
        assert "seriatim repair orders --partition in-a/2" in page
    page = lake.get("/stream/orders").text
    assert '<span class="bad">in-a/2</span>' in page
    assert f'<span class="bad">gap at {offset}</span>' in page
    assert '<span class="bad">in-a/3</span>' not in page
    assert page.count('<rect class="halt"') == 1
    rows = re.findall(r'href="/seriatim/stream/(\w+)"', lake.get("/").text)
    assert rows == ["orders", "quotes"], "what needs a person comes first"


def test_a_figure_and_its_noun_agree(lake: Lake) -> None:
    """One stream, then two: nobody reads of 1 streams."""
    lake.stream("quotes", partitions=1)
    figures = re.findall(r"<b[^>]*>([0-9,]+)</b><span>([^<]+)</span>", lake.get("/").text)
    assert ("1", "stream") in figures
    assert ("1", "partition") in figures
    assert ("0", "need a person") in figures
    lake.stream("orders", partitions=1)
    figures = re.findall(r"<b[^>]*>([0-9,]+)</b><span>([^<]+)</span>", lake.get("/").text)
    assert ("2", "streams") in figures
    assert ("2", "partitions") in figures


def test_a_stream_page_has_it_all(lake: Lake) -> None:
    """Numbers, partitions as bars, slices with certificates, a chart, findings with commands, who
    is in quarantine.
    """
    lake.write_run_status(create_troubled_stream(lake))
    page = lake.get("/stream/orders").text
    for word in (
        "verdict",
        "circuit",
        "time left",
        "messages a second",
        "last run",
        "in quarantine",
        "open gaps",
    ):
        assert word in page
    assert page.count('<svg class="bar"') == 4
    assert page.count('class="chart"') == 1
    assert 'class="rate"' in page
    assert 'href="/seriatim/stream/orders/entry/3"' in page
    assert "PoisonError: orders in-a/1: poison at offset" in page
    assert "<code>y</code>" in page


def test_one_entry_shows_manifest_certificate_and_verdict(lake: Lake) -> None:
    """And the way to its report, to the entry before and the one after."""
    lake.stream("orders")
    page = lake.get("/stream/orders/entry/2").text
    for word in (
        "Certificates",
        "digest of values",
        "Manifest",
        "SHA-256",
        "Files (",
        "records/",
        "Verdicts",
    ):
        assert word in page
    for path in ("entry/1", "entry/3", "reports/2"):
        assert f'href="/seriatim/stream/orders/{path}"' in page
    report = lake.get("/stream/orders/reports/2")
    assert "orders: entry 2" in report.text
    assert report.headers["content-security-policy"].startswith(
        "default-src 'none'; style-src 'unsafe-inline'"
    )


def test_a_report_that_a_run_wrote_is_served_as_it_is(lake: Lake) -> None:
    """By the number of its entry; the file is read, not made anew."""
    made = lake.stream("orders")
    (made.root / "reports").mkdir()
    (made.root / "reports" / "0000000003.html").write_text("as it was")
    assert lake.get("/stream/orders/reports/3").text == "as it was"
    assert lake.get("/stream/orders/reports/99").status_code == 404


def test_time_left_counts_down_and_old_looks_are_said(lake: Lake) -> None:
    """From the figure of the last look; how old that is stands beside it."""
    made = lake.stream("orders")
    lake.send(made, 0, "x", 99)
    made.clock.sleep(2 * 24 * HOUR + 12 * HOUR)
    lake.now = made.clock.now
    lake.write_run_status(made)
    page = lake.get("/").text
    assert '<span class="bad">12 h 0 min</span>' in page
    assert "Kafka as of just now" in page
    lake.now += 3 * HOUR
    page = lake.get("/stream/orders").text
    assert "9 h 0 min" in page
    assert "Kafka as of 3 h ago" in page
    assert '<small class="warn">Kafka as of 3 h ago</small>' in lake.get("/").text


def test_the_ledger_wins_over_an_older_look(lake: Lake) -> None:
    """A halt, a circuit, a frontier that came after the look are there at once; Kafka's side is as
    of the look.
    """
    made = lake.stream("orders")
    lake.write_run_status(made)
    assert 'class="chip good"' in lake.get("/").text
    made.reader.lost_offsets = {
        next(iter([(p, len(made.kafka.topics["in-a"].messages[p.number]))]))
        for p in made.accounts()
    }
    for place in (0, 1):
        lake.send(made, place, "x", 1, 2)
    lake.run(made)
    page = lake.get("/").text
    assert 'class="chip bad">needs a person' in page
    assert page.count("</b>at offset") == 2


def test_a_stream_nobody_ran_or_watched_is_said_to_be_new(lake: Lake) -> None:
    """With what to type; one that cannot be read does not hide the others."""
    lake.write("orders")
    (lake.streams / "broken.toml").write_text("topics = 7")
    page = lake.get("/").text
    assert 'class="chip warn">new' in page
    assert "waiting for topics, or for its first run" in page
    assert "cannot be shown" in page
    assert "broken.toml: " in page
    assert "Next: " in page
    assert "never run" in lake.get("/stream/orders").text
    assert lake.get("/stream/broken").status_code == 404


def test_of_each_stream_one_ledger_is_remembered(lake: Lake) -> None:
    """The last one: an API server that runs for days holds no more than on its first."""
    made = lake.stream("orders", slices=2)
    reader = lake.reader()
    for number in range(4):
        before = reader.stream_history("orders").ledger
        assert reader.stream_history("orders").ledger is before
        lake.send(made, 0, "x", number)
        lake.run(made)
        assert reader.stream_history("orders").ledger is not before
        path = lake.streams / "orders.toml"
        os.utime(path, ns=(path.stat().st_mtime_ns + 10**9,) * 2)
    assert (len(reader._ledgers), len(reader._files)) == (1, 1)


def test_a_damaged_manifest_is_said_in_words(lake: Lake) -> None:
    """A page does not show what its hash does not prove."""
    made = lake.stream("orders")
    for path in (made.root / "manifests").glob("*3-*.json.zst"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    answer = lake.get("/stream/orders")
    assert answer.status_code == 503
    assert "the manifest of entry 3 cannot be read: its hash differs" in answer.text
    assert "Traceback" not in answer.text


def test_the_tab_on_a_dag_is_the_streams_page(lake: Lake) -> None:
    """A DAG that is no stream is told so, as is one that is not there."""
    lake.stream("orders")
    assert "The last slices" in lake.get("/dag/orders").text
    answer = lake.get("/dag/seriatim_watch")
    assert answer.status_code == 404
    assert "the DAG &#39;seriatim_watch&#39; is no stream" in answer.text


def test_the_tab_on_a_run_has_what_was_committed_meanwhile(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time of the run; one that folded nothing says so, and one that is not there, too."""
    made = lake.stream("orders", slices=4)
    ends = {one.entry.sequence: one.entry.at_seconds for one in made.ledger.entries("orders", -1)}
    lake.runs["orders", "manual__1"] = RunSpan(ends[2] - 1, ends[3] + 1, "success")
    lake.runs["orders", "manual__2"] = RunSpan(NOW + 10, NOW + 20, "success")
    page = lake.get("/dag/orders/run?run_id=manual__1").text
    assert set(re.findall(r"orders/entry/(\d+)", page)) == {"2", "3"}
    assert 'href="/seriatim/stream/orders/reports/3"' in page
    assert "these are the last" not in page
    assert "nothing was folded" in lake.get("/dag/orders/run?run_id=manual__2").text
    monkeypatch.setattr(read, "HISTORY", 1)
    page = lake.get("/dag/orders/run?run_id=manual__1").text
    assert set(re.findall(r"orders/entry/(\d+)", page)) == {"3"}
    assert "It made 2 entries; these are the last 1 of them" in page
    assert lake.get("/dag/orders/run?run_id=other").status_code == 404


def test_a_visitor_sees_the_streams_of_their_dags_alone(lake: Lake) -> None:
    """The others are neither listed nor shown, in whatever way they are asked for."""
    for name in ("orders", "payments"):
        lake.stream(name, slices=1)
    lake.known = {"orders"}
    assert "payments" not in lake.get("/").text
    assert lake.get("/stream/orders").status_code == 200
    for path in (
        "/stream/payments",
        "/stream/payments/entry/1",
        "/stream/payments/reports/1",
        "/dag/payments",
    ):
        answer = lake.get(path)
        assert answer.status_code == 404
        assert "or you may not see it" in answer.text


def test_who_is_not_logged_in_goes_to_the_login_and_comes_back(lake: Lake) -> None:
    """A browser is sent there; a script is refused; nothing of a stream is told."""
    lake.stream("orders", slices=1)
    lake.logged_in = False
    for path in ("/", "/stream/orders", "/stream/orders/reports/1", "/dag/orders", "/nothing"):
        answer = lake.get(path, accept="text/html")
        assert answer.status_code == 307
        assert answer.headers["location"].startswith("/api/v2/auth/login?next=%2Fseriatim%2F")
        refused = lake.get(path)
        assert refused.status_code == 401
        assert "in-a" not in refused.text


def test_a_login_of_another_time_is_asked_for_again(lake: Lake) -> None:
    """Airflow calls a token that it cannot read forbidden; a browser is sent to the login all the
    same.
    """
    lake.logged_in, lake.refusal = False, 403
    assert lake.get("/", accept="text/html").status_code == 307
    assert lake.get("/").status_code == 403


def test_nothing_can_be_changed(lake: Lake) -> None:
    """Pages are read-only: any other method is refused, and reading writes nothing."""
    made = lake.stream("orders")
    before = sorted(path.name for path in made.root.rglob("*"))
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert lake.get("/stream/orders", method).status_code == 405
    for path in ("/", "/stream/orders", "/stream/orders/entry/1", "/stream/orders/reports/1"):
        assert lake.get(path).status_code == 200
    assert sorted(path.name for path in made.root.rglob("*")) == before


def test_a_bad_verdict_is_on_the_entry_that_it_judged(lake: Lake) -> None:
    """And on its own page, with what to do; the circuit is open everywhere."""
    made = lake.stream("orders", slices=2)
    lake.write_run_status(made)
    head = made.ledger.head("orders")
    failed = (FailedRange(partition="in-a/0", epoch=0, start=0, until=9, judged_until=2),)
    told = Finding(finding="check", topic="in-a", partition=0, cause="v is small", sequence=2)
    verdict = {"in-a/0": "bad", "in-a/1": "good"}
    entry = VerdictEntry(
        attempt="v",
        verdict=verdict,
        judged_after=0,
        judged_until=2,
        failed_ranges=failed,
        findings=(told,),
    )
    commit(made.ledger, made.clock, head, entry)
    judged = lake.get("/stream/orders/entry/2").text
    assert "Verdicts of later checks" in judged
    assert '<td class="bad">bad</td>' in judged
    own = lake.get("/stream/orders/entry/3").text
    assert "Verdicts of later checks" not in own
    assert "seriatim accept orders --sequence 2" in own
    for page in (lake.get("/").text, lake.get("/stream/orders").text):
        assert "the circuit is open" in page
        assert "seriatim accept orders --sequence" in page


def test_what_comes_from_the_future_is_shown_as_such() -> None:
    """A clock is wrong, here or there: not "just now". Clocks may differ a little."""
    assert render_age(NOW + 3_600, NOW) == "the future: a clock is wrong"
    assert render_age(NOW + 30, NOW) == "just now"
    assert is_in_future(NOW + 3_600, NOW)
    assert not is_in_future(None, NOW)


def test_sessions_in_quarantine_are_grouped_with_what_to_type(tmp_path: Path) -> None:
    """Ninety of them need one command for each kind, and the form of the repair has its values."""
    lake = Lake(tmp_path)
    made = lake.stream("orders", partitions=1)
    for number in range(90):
        # The row is deleted twice.
        lake.send(made, 0, f"session-{number:05d}", ["a"], None, None)
    lake.run(made)
    lake.write_watch_status(made)
    page = lake.get("/stream/orders").text
    assert "precondition: 90 sessions" in page
    assert "seriatim repair orders --partition in-a/0" in page
    assert "lists them" not in page
    assert 'href="/dags/seriatim_repair"' in page
    assert "{&#34;stream&#34;:&#34;orders&#34;,&#34;partition&#34;:&#34;in-a/0&#34;}" in page
    assert "90 × precondition, 90 sessions" in page
    assert page.count("PreconditionError") == 1


def test_the_form_of_a_repair_is_offered_only_where_a_mail_offers_it(tmp_path: Path) -> None:
    """Not for a session with a message that cannot be decoded, which waits for a snapshot, nor for a
    topic that was made again, about which a person decides. What is expired needs `forward`.
    """
    lake = Lake(tmp_path)
    made = lake.stream("orders", partitions=1)
    lake.send(made, 0, "y", b"poison")
    lake.run(made)
    lake.write_watch_status(made)
    page = lake.get("/stream/orders").text
    assert "poison: 1 session" in page
    assert "seriatim_repair" not in page

    partition = PartitionStatus(topic="in-a", partition=0)
    forms = []
    for finding in ("gap", "re-created", "expired", "of a newer version"):
        halted = replace(partition, halt=HaltStatus(finding, 3))
        concern = Concern(kind="halted", location="in-a/0", text="at offset 3", next="look")
        forms.append(repair_values_of_concern(concern, [halted]))
    assert forms == [{"partition": "in-a/0"}, {}, {"partition": "in-a/0", "forward": True}, {}]


def test_a_repair_that_began_after_the_last_look_is_named_as_well(tmp_path: Path) -> None:
    """Both pages know it from the ledger. A repair that runs is something to look at, and not red."""
    lake = Lake(tmp_path)
    made = lake.stream("orders", partitions=1)
    lake.write_watch_status(made)
    assert ">good</span>" in lake.get("/").text
    repair_run = RepairRun(made.open())
    head = made.ledger.head("orders")
    assert head is not None
    repair_run.place_hold(head, [Partition("in-a", 0)], '{"partition":"in-a/0"}')
    for path in ("/", "/stream/orders"):
        page = lake.get(path).text
        assert f"held by repair {repair_run.result.hold} since 2026-11-16" in page
        assert "to look at" in page
        assert "needs a person<" not in page
    assert '<span class="chip warn">to look at</span>' in lake.get("/").text


def test_a_stream_file_that_cannot_be_read_has_no_facts(tmp_path: Path) -> None:
    """Neither a tier nor topics nor a circuit: only what is wrong with it."""
    lake = Lake(tmp_path)
    (lake.streams / "broken.toml").write_text("topics = 7")
    page = lake.get("/").text
    assert "found a number" in page
    for text in ("tier", "0 topics", "closed"):
        assert text not in page


def test_a_repair_that_holds_is_named(tmp_path: Path) -> None:
    """Which repair, since when, and how to end it."""
    lake = Lake(tmp_path)
    made = lake.stream("orders", partitions=1)
    repair_run = RepairRun(made.open())
    head = made.ledger.head("orders")
    assert head is not None
    repair_run.place_hold(head, [Partition("in-a", 0)], '{"partition":"in-a/0"}')
    lake.write_watch_status(made)
    page = lake.get("/stream/orders").text
    held = f"held by repair {repair_run.result.hold} since 2026-11-16"
    assert held in page
    assert "seriatim repair orders --partition in-a/0" in page
    assert f"seriatim repair orders --resume {repair_run.result.hold}" in page
