"""`seriatim watch`, and what status, plan and doctor say of time left, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seriatim import cli, clock, context
from seriatim.engine.offsets import Partition
from seriatim.engine.retention import RetentionRules
from seriatim.memory.outgoing import MemoryNotifier
from seriatim.operations.status import StreamStatus
from seriatim.stream_files import StreamFile
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import create_filled_stream, send

STREAM = """
topics = "in-[a-z]+"
machine = "table"
table = {key = ["id"], columns = {id = "string", v = "int64"}, before = false}
output = {path = "lake/s"}
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryStream:
    """A stream whose world is in memory, as the command line finds it."""
    world = create_filled_stream()
    (tmp_path / "s.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv("SERIATIM_OUTBOX", str(tmp_path / "outbox"))
    monkeypatch.setattr(context, "log", lambda *_: world.kafka)
    monkeypatch.setattr(context, "ledger", lambda *_: world.ledger)
    monkeypatch.setattr(context, "state", lambda *_: world.files)
    monkeypatch.setattr(clock, "WallClock", lambda: world.clock)
    return world


def code(*arguments: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(str(ended.value.code))


def about_to_expire(made: MemoryStream) -> None:
    """Two of ten hours are left."""
    made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=36_000_000)
    made.run()
    send(made, Partition("in-a", 0), 4)
    made.clock.sleep(8 * 3600)


def test_all_is_well_is_exit_0(made: MemoryStream, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each stream; no colours where no terminal is."""
    made.run()
    assert code("watch", "--once") == 0
    assert (
        capsys.readouterr().out
        == "1970-01-01T00:00:00Z s: good · 1 partition · lag 0 · no message is in danger\n"
    )


def test_something_that_needs_a_person_is_exit_3(
    made: MemoryStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it is, where, and what to type."""
    about_to_expire(made)
    assert code("watch", "s", "--once") == 3
    out = capsys.readouterr().out
    assert "lag 1 · time left 2 h 0 min (in-a/0)" in out
    assert "  time left in-a/0: 2 h 0 min until Kafka drops offset 3." in out
    assert "    → `seriatim run s` folds what waits" in out
    assert "\033" not in out


def test_scripts_get_one_object_per_stream(
    made: MemoryStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """All fields, concerns included."""
    about_to_expire(made)
    assert code("watch", "--once", "--json") == 3
    (seen,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (seen["stream"], seen["lag"], seen["time_left_seconds"], seen["nearest"]) == (
        "s",
        1,
        7200,
        "in-a/0",
    )
    assert {one["concern"] for one in seen["concerns"]} == {"time left", "late"}
    assert set(seen["concerns"][0]) == {"concern", "place", "text", "next"}


def test_a_stream_that_cannot_be_looked_at_does_not_hide_the_others(
    made: MemoryStream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its error is a line of its own; the exit code is its own, also where another stream needs a
    person.
    """
    (tmp_path / "broken.toml").write_text("topics = 5")
    made.run()
    assert code("watch", "--once") == 2
    out = capsys.readouterr().out
    assert "broken: ConfigError: broken.toml: topics" in out
    assert "s: good" in out
    about_to_expire(made)
    assert code("watch", "--once", "--json") == 2
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (first["stream"], first["error"]) == ("broken", "ConfigError")


def test_what_nobody_foresaw_does_not_hide_the_others(
    made: MemoryStream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A bug of ours at one stream, and the next one is looked at."""

    def bug(name: str, *_: object) -> object:
        if name == "first":
            raise ZeroDivisionError("nobody foresaw this")
        return outbox(name, *_)

    outbox = context.outbox
    monkeypatch.setattr(context, "outbox", bug)
    (tmp_path / "first.toml").write_text(STREAM)
    made.run()
    assert code("watch", "--once") == 1
    out = capsys.readouterr().out
    assert "first: BrokenPromiseError: ZeroDivisionError: nobody foresaw this" in out
    assert "s: good" in out


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((3, 0), 3), ((3, 4), 4), ((2, 3), 2), ((1, 3, 4), 1), ((4, 2), 2), ((5, 3), 5)],
)
def test_what_keeps_a_look_from_its_work_outweighs_what_it_saw(
    codes: tuple[int, ...], expected: int
) -> None:
    """3 was mailed, and a scheduler takes it as fine: it must not hide a stream that nobody looks
    at.
    """
    from seriatim.cli.watch import gravest_exit_code

    assert gravest_exit_code(codes) == expected


def test_it_looks_until_ctrl_c(
    made: MemoryStream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Again and again, at the pace asked for; Ctrl-C ends it without a trace."""
    made.run()
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) >= 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("seriatim.cli.watch.sleep", wait)  # time's own is for other threads as well
    assert code("watch", "--every", "7") == 130
    assert waited == [7, 7, 7]
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3
    assert shown.err == ""


def told(tmp_path: Path, made: MemoryStream, monkeypatch: pytest.MonkeyPatch) -> MemoryNotifier:
    """The stream names whom to tell, and a mail server is there."""
    (tmp_path / "s.toml").write_text(f"{STREAM}alerts = {{to = ['ops@example.org']}}\n")
    post = MemoryNotifier()
    monkeypatch.setattr(context, "notifier", lambda *_: post)
    about_to_expire(made)
    return post


def test_what_needs_a_person_is_mailed_once(
    made: MemoryStream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Said on stderr as well; the second look mails nothing; --no-mail leaves everything as it was."""
    post = told(tmp_path, made, monkeypatch)
    assert code("watch", "--once", "--no-mail") == 3
    assert not (tmp_path / "outbox").exists()
    for _ in range(2):
        assert code("watch", "--once") == 3
    (mail,) = post.mails
    assert mail.subject.startswith(
        "[seriatim] s: time left in-a/0: 2 h 0 min until Kafka drops offset 3."
    )
    assert "mailed to ops@example.org: [seriatim] s: time left" in capsys.readouterr().err


def test_a_watch_that_was_overtaken_looks_again_and_mails_nothing_twice(
    made: MemoryStream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another one decided during its look. Its result is printed once, as always."""
    from seriatim.cli.watch import WatchRound

    post = told(tmp_path, made, monkeypatch)
    watch = WatchRound._watch
    looks: list[str] = []

    def overtaken(watch_round: WatchRound, file: StreamFile) -> StreamStatus:
        looks.append(file.stream.name)
        stream_status = watch(watch_round, file)
        if len(looks) == 1:
            WatchRound(watch_round.settings, json=False).watch_stream("s", mail=True)
            capsys.readouterr()
        return stream_status

    monkeypatch.setattr(WatchRound, "_watch", overtaken)
    assert code("watch", "--once") == 3
    assert (len(post.mails), len(looks)) == (1, 3)
    shown = capsys.readouterr()
    assert (shown.out.count("lag 1"), shown.err) == (1, "")


def test_a_stream_that_others_never_leave_alone_is_exit_4(
    made: MemoryStream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is said, and nothing is mailed."""
    from seriatim.alerts.incidents import OutboxChangedError
    from seriatim.alerts.outbox import StoreOutbox

    def overtaken(*_: object) -> int:
        raise OutboxChangedError("the outbox was changed by another watch")

    post = told(tmp_path, made, monkeypatch)
    monkeypatch.setattr(StoreOutbox, "put_alert_state", overtaken)
    assert code("watch", "--once") == 4
    assert post.mails == []
    assert "s: OutboxChangedError: the outbox was changed" in capsys.readouterr().out


def test_mails_that_wait_are_said_and_are_exit_4(
    made: MemoryStream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether something needs a person or all is well again: nobody could be told."""
    post = told(tmp_path, made, monkeypatch)
    post.is_down = True
    assert code("watch", "--once") == 4
    made.run()
    assert code("watch", "--once") == 4
    assert (
        "s: 2 mails wait in the outbox: the mail server is down; the next look tries again"
        in capsys.readouterr().err
    )
    post.is_down = False
    assert code("watch", "--once") == 0
    assert [mail.subject.partition(":")[2].split()[0] for mail in post.mails] == ["time", "over:"]


def test_a_run_that_failed_is_mailed_though_the_broker_is_away(
    made: MemoryStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note that Airflow left is told with what is known; the exit code says that it could not
    be looked at.
    """
    from seriatim import config
    from seriatim.alerts.incidents import Note
    from seriatim.errors import PlatformError

    def away(*_: object) -> None:
        raise PlatformError("no broker answers")

    post = told(tmp_path, made, monkeypatch)
    monkeypatch.setattr(context, "log", away)
    context.outbox("s", config.load_settings()).add_note(
        Note(kind="failed", at_seconds=1.0, run="r1", text="killed")
    )
    assert code("watch", "s", "--once") == 4
    (mail,) = post.mails
    assert mail.subject == "[seriatim] s: run failed: killed"
    assert "no broker answers" in mail.text


def test_whoever_is_named_no_more_is_told_no_more(
    made: MemoryStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty `alerts.to` is not a file that cannot be read: there, whoever was named before is
    told.
    """
    post = told(tmp_path, made, monkeypatch)
    assert code("watch", "--once") == 3
    (tmp_path / "s.toml").write_text(STREAM)
    made.clock.sleep(13 * 3600)
    code("watch", "--once")
    assert len(post.mails) == 1
    (tmp_path / "s.toml").write_text(f"{STREAM}alerts = {{to = ['new@example.org']}}\n")
    made.clock.sleep(13 * 3600)
    code("watch", "--once")
    (tmp_path / "s.toml").write_text("topics = 5")
    for _ in range(2):
        made.clock.sleep(3600)
        assert code("watch", "--once") == 2
    assert [mail.to[0] for mail in post.mails] == [
        "ops@example.org",
        "new@example.org",
        "new@example.org",
    ]


def test_what_waits_is_sent_before_anybody_is_looked_at(
    made: MemoryStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks at streams whose broker is away may take all the time that there is."""
    from seriatim.errors import PlatformError

    post = told(tmp_path, made, monkeypatch)
    post.is_down = True
    assert code("watch", "--once") == 4
    (tmp_path / "a.toml").write_text(STREAM)
    sent: list[int] = []

    def away(*_: object) -> None:
        sent.append(len(post.mails))
        raise PlatformError("no broker answers")

    monkeypatch.setattr(context, "log", away)
    post.is_down = False
    assert code("watch", "--once") == 4
    assert sent == [1, 1]


def test_a_broker_that_is_away_keeps_one_stream_waiting(
    made: MemoryStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All streams have the same: after one look that took long, in vain, the others of the round
    are short.
    """
    from seriatim.errors import PlatformError

    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(STREAM)
    asked: list[tuple[object, ...]] = []

    def away(_file: object, _settings: object, *seconds: object) -> None:
        asked.append(seconds)
        raise PlatformError("no broker answers")

    monkeypatch.setattr(context, "log", away)
    assert code("watch", "--once") == 4
    assert asked == [(), (), ()]
    asked.clear()
    monkeypatch.setattr("seriatim.cli.watch.LONG_SECONDS", 0.0)
    assert code("watch", "--once") == 4
    assert asked == [(), (3.0,), (3.0,)]
    assert made


def test_a_mail_put_aside_is_said_once(
    made: MemoryStream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With where it is, and exit 4; the next look is as any other."""
    post = told(tmp_path, made, monkeypatch)
    post.refused_words = {"until Kafka drops"}
    assert code("watch", "--once") == 4
    made.run()
    made.clock.sleep(49 * 3600)
    assert code("watch", "--once") == 4
    said = capsys.readouterr().err
    assert "s: a mail was refused for two days and is not tried any more; it is " in said
    assert len(list((tmp_path / "outbox").glob("s-*/refused/*.json"))) == 1
    assert code("watch", "--once") == 0


def test_no_streams_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To watch nothing and be green would be worse."""
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path))
    assert code("watch", "--once") == 2


def test_status_shows_time_left(made: MemoryStream, capsys: pytest.CaptureFixture[str]) -> None:
    """As people read it, and in seconds for scripts."""
    about_to_expire(made)
    assert code("status", "s") == 0
    assert "2 h 0 min" in capsys.readouterr().out
    assert code("status", "s", "--json") == 0
    (part,) = json.loads(capsys.readouterr().out)["partitions"]
    assert (part["time_left_seconds"], part["catches_up"]) == (7200, None)


def test_plan_warns_of_a_short_retention(
    made: MemoryStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """The topic, the value, and the command that changes it."""
    about_to_expire(made)
    assert code("plan", "s") == 0
    out = capsys.readouterr().out
    assert "in-a: retention.ms keeps messages for 10 h 0 min" in out
    assert "--entity-name in-a --add-config retention.ms=604800000" in out
    assert code("plan", "s", "--json") == 0
    (short,) = json.loads(capsys.readouterr().out)["short_retention"]
    assert (short["topic"], short["hours"]) == ("in-a", {"retention.ms": 10.0})
    made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=72 * 3_600_000)
    code("plan", "s")
    assert "retention" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said", "next"),
    [
        (["--partition", "in-a/7"], "s: it has no partition in-a/7", "name what is there"),
        (["--topic", "in-z"], "s: it has no topic in-z", "name what is there"),
        (
            ["--until-offsets", '{"in-z": {"0": 1}}'],
            "s: cannot read in-z/0 up to 1: it is not known",
            "readable   in-a/0",
        ),
        (
            ["--until-offsets", '{"in-a": {"0": 99}}'],
            "s: cannot read in-a/0 up to 99: its log ends at 4",
            "offset",
        ),
    ],
)
def test_plan_refuses_what_the_stream_does_not_have(
    made: MemoryStream, capsys: pytest.CaptureFixture[str], words: list[str], said: str, next: str
) -> None:
    """Before anything is folded, in words for whoever filled in a form."""
    about_to_expire(made)
    assert code("plan", "s", *words) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert next in shown


def test_plan_shows_what_is_asked_for(
    made: MemoryStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `run --until-offsets` would read, or the partition named."""
    about_to_expire(made)
    for words, end in (
        (["--until-offsets", '{"in-a": {"0": 3}}'], []),
        (["--partition", "in-a/0"], [4]),
    ):
        assert code("plan", "s", "--json", *words) == 0
        assert [part["until"] for part in json.loads(capsys.readouterr().out)["partitions"]] == end


def test_doctor_warns_of_a_short_retention(made: MemoryStream) -> None:
    """A warning, not a failure: the exit code does not change; long enough is a good line."""
    from seriatim import config
    from seriatim.cli.set_up import check_retention

    made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=36_000_000)
    (check,) = check_retention(config.load_settings())
    assert (check.is_good, check.is_required) == (False, False)
    assert check.description.startswith("s: in-a: retention.ms keeps messages for 10 h 0 min")
    assert "--entity-name in-a" in check.fix
    made.kafka.topics["in-a"].rules = RetentionRules()
    (check,) = check_retention(config.load_settings())
    assert check.is_good


def test_doctor_announces_only_what_it_looks_at(
    made: MemoryStream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No stream of this folder has its output in a bucket, so nothing is said about buckets: each
    thing that is announced has a result.
    """
    from seriatim.embedded import doctor

    made.kafka.topics["in-a"].rules = RetentionRules()
    for name in doctor.CHECKS:
        monkeypatch.setitem(doctor.CHECKS, name, lambda _: "not looked at")
    assert code("doctor") == 0
    shown = capsys.readouterr()
    assert "bucket" not in shown.err + shown.out
    assert "… asking Kafka how long it keeps the messages of s\n" in shown.err
    assert "✓ retention      72 h or more in every topic" in shown.out


def test_doctor_says_what_it_could_not_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broker: one line, however many streams there are."""
    from seriatim import config
    from seriatim.cli.set_up import check_retention

    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path))
    monkeypatch.setenv("SERIATIM_HOME", str(tmp_path / "home"))
    (check,) = check_retention(config.load_settings())
    assert (check.is_good, check.is_required) == (False, False)
    assert "a: not looked at: no Kafka broker is named" in check.description


def test_doctor_goes_on_after_a_broken_stream(made: MemoryStream, tmp_path: Path) -> None:
    """A stream file that cannot be read says nothing of the topics of another."""
    from seriatim import config
    from seriatim.cli.set_up import check_retention

    (tmp_path / "broken.toml").write_text("topics = 5")
    made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=36_000_000)
    broken, short = check_retention(config.load_settings())
    assert broken.description.startswith("broken: not looked at: ")
    assert short.description.startswith("s: in-a: retention.ms keeps messages for 10 h 0 min")
