"""The status file is left where a watch ends, and mails link to the report: behind Airflow's login
if there is one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from seriatim import cli, clock, context
from seriatim.memory.outgoing import MemoryNotifier
from seriatim.operations.status import StreamStatus
from tests.web.streams_on_disk import NOW, Lake, create_troubled_stream


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A stream in trouble, as the command line finds it."""
    made = Lake(tmp_path)
    stream = create_troubled_stream(made)
    with (made.streams / "orders.toml").open("a") as file:
        file.write('alerts = {to = ["ops@example.org"]}\n')
    monkeypatch.setenv("SERIATIM_STREAMS", str(made.streams))
    monkeypatch.setenv("SERIATIM_OUTBOX", str(tmp_path / "outbox"))
    monkeypatch.setattr(context, "log", lambda *_: stream.kafka)
    monkeypatch.setattr(clock, "WallClock", lambda: stream.clock)
    return made


def watched(monkeypatch: pytest.MonkeyPatch) -> str:
    """The mail of one look."""
    post = MemoryNotifier()
    monkeypatch.setattr(context, "notifier", lambda _: post)
    with pytest.raises(SystemExit):
        cli.main(["watch", "--once"])
    return post.mails[0].text


def test_watch_leaves_the_status_file(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what Kafka said, what needs a person, and how many gaps are open; the last run's end is
    kept.
    """
    watched(monkeypatch)
    path = lake.folder / "lake" / "orders" / "status.json"
    first = msgspec.json.decode(path.read_bytes(), type=StreamStatus)
    assert (first.verdict, first.quarantined_count, first.gaps_open, len(first.partitions)) == (
        "hurt",
        1,
        2,
        4,
    )
    assert {one.kind for one in first.concerns} == {"halted", "quarantine"}
    assert first.last_run_seconds == pytest.approx(NOW, abs=1.0), "its last entry"
    for noted, kept in ((NOW + 99, NOW + 99), (7.0, first.last_run_seconds)):
        path.write_bytes(
            msgspec.json.encode(msgspec.structs.replace(first, last_run_seconds=noted))
        )
        with pytest.raises(SystemExit):
            cli.main(["watch", "--once", "--no-mail"])
        assert lake.status("orders").last_run_seconds == kept


def test_a_mail_links_to_the_report_behind_airflows_login(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Airflow's address is known; the newest report of the stream."""
    monkeypatch.setenv("SERIATIM_AIRFLOW_URL", "https://airflow.example/at/")
    reports = lake.folder / "lake" / "orders" / "reports"
    reports.mkdir()
    for number in (3, 9):
        (reports / f"{number:010d}.html").write_text("x")
    assert "https://airflow.example/at/seriatim/stream/orders/reports/9\n" in watched(monkeypatch)


def test_without_airflow_the_report_is_a_file(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine that watches."""
    reports = lake.folder / "lake" / "orders" / "reports"
    reports.mkdir()
    (reports / "0000000009.html").write_text("x")
    assert f"file://{reports}/0000000009.html\n" in watched(monkeypatch)


def test_a_table_of_gaps_that_cannot_be_read_keeps_nobody_from_looking(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many are open is not known then; all the rest is."""
    for path in (lake.folder / "lake" / "orders" / "gaps" / "_delta_log").glob("*.json"):
        path.write_text("garbage")
    assert "in-a/2" in watched(monkeypatch)
    assert lake.status("orders").verdict == "hurt"


def test_a_watch_that_may_not_write_says_so_and_goes_on(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mails come all the same."""
    (lake.folder / "lake" / "orders" / "status.json").mkdir()
    assert "in-a/2" in watched(monkeypatch)
    assert "the status file could not be written" in capsys.readouterr().err
