"""Alert over a stream in memory: what is found is kept before it is sent, and sent once whatever
happens between.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.alerts.alert import SendResult, observe_failure, observe_stream, send_alerts
from seriatim.alerts.incidents import REPAIR, REPAIR_DAG, AlertState, Note
from seriatim.alerts.mail import MailContext
from seriatim.alerts.outbox import CLAIM_SECONDS, StoreOutbox
from seriatim.engine import crash_points
from seriatim.engine.retention import RetentionRules
from seriatim.errors import PlatformError
from seriatim.ledger.commit import commit
from seriatim.ledger.entries import ENTRY_TYPES
from seriatim.ledger.model import Change
from seriatim.memory.outgoing import MemoryNotifier
from seriatim.memory.store import MemoryStore
from seriatim.operations.repair.damage import RepairRequest
from seriatim.operations.watch import watch_stream
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, create_filled_stream, send

HOUR = 3600.0
WHY, KIND = "IntegrityError: s: 1 new finding in in-a/0", "FindingsError"
PLACE = MailContext(stream="s", to=("ops@example.org",))


class Watcher:
    """A stream in memory, an outbox and a mail server."""

    def __init__(self, made: MemoryStream) -> None:
        self.made, self.post = made, MemoryNotifier()
        self.store = MemoryStore()
        self.outbox = StoreOutbox(self.store, made.clock, "s", "/streams")
        self.place = PLACE

    def look(self, notifier: MemoryNotifier | None = None) -> SendResult:
        """Look once and tell."""
        made = self.made
        found = watch_stream(made.stream, made.kafka, made.ledger, made.files, made.clock)
        seen = self.outbox.stored_state()
        told = observe_stream(made.stream, found, made.ledger, seen.alert_state)
        return send_alerts(self.place, 12, told, seen, self.outbox, notifier or self.post)

    def put(self, alert_state: AlertState) -> None:
        """Store another alert state."""
        self.outbox.put_alert_state(alert_state, self.outbox.stored_state().version)

    def fail(self, run: str = "r1", code: int = 3) -> None:
        """What Airflow leaves when a run failed."""
        now = self.made.clock.now_seconds()
        self.outbox.add_note(
            Note(
                kind="task",
                at_seconds=now,
                run=run,
                task="fold",
                exit_code=code,
                text=WHY,
                error=KIND,
            )
        )
        self.outbox.add_note(Note(kind="failed", at_seconds=now, run=run))


def repaired(
    made: MemoryStream, kinds: tuple[str, ...] = ("hold", "repair"), **fields: str
) -> None:
    """Somebody repaired the partition."""
    account = made.accounts()[A0]
    change = Change(
        partition=A0,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
    )
    for kind in kinds:
        head = made.ledger.head("s")
        assert head is not None
        entry_type: Any = ENTRY_TYPES[kind]
        own_fields = {
            name: value for name, value in fields.items() if name in entry_type.__struct_fields__
        }
        entry = entry_type(attempt="h", hold="h", changes=(change,), **own_fields)
        commit(made.ledger, made.clock, head, entry)


@pytest.fixture
def hurt() -> Watcher:
    """A stream whose one partition halted at offset 3."""
    made = create_filled_stream(sequence=None)
    made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=100 * 3_600_000)
    made.run()
    watcher = Watcher(made)
    watcher.look()
    made.reader.lost_offsets.add((A0, 3))
    send(made, A0, 5, 6)
    made.run()
    return watcher


def test_a_finding_is_mailed_once_with_the_time_left(hurt: Watcher) -> None:
    """By the entry that has it, together with the run that failed; the next looks are silent."""
    hurt.fail()
    hurt.look()
    (mail,) = hurt.post.mails
    assert mail.subject == "[seriatim] s: GapError in in-a/0 at offset 3"
    assert "100 h 0 min: from 1970-01-05 04:00 UTC on, Kafka deletes messages" in mail.text
    assert f"Run failed: {WHY}" in mail.text
    for _ in range(3):
        hurt.made.clock.sleep(HOUR)
        hurt.look()
    assert len(hurt.post.mails) == 1
    assert hurt.outbox.notes() == {}


def test_a_finding_seen_before_its_run_ended_is_not_mailed_again(hurt: Watcher) -> None:
    """Watch came between the commit and the end of the run."""
    hurt.look()
    hurt.fail()
    hurt.look()
    assert len(hurt.post.mails) == 1


def test_a_look_between_a_task_and_the_end_of_its_run_spoils_nothing(hurt: Watcher) -> None:
    """The finding is told by that look; the run's end, later, knows by its task's note that it adds
    nothing.
    """
    now = hurt.made.clock.now_seconds()
    hurt.outbox.add_note(
        Note(kind="task", at_seconds=now, run="r1", task="fold", exit_code=3, text=WHY, error=KIND)
    )
    hurt.look()
    hurt.outbox.add_note(Note(kind="failed", at_seconds=now, run="r1"))
    hurt.look()
    assert len(hurt.post.mails) == 1
    assert hurt.outbox.notes() == {}


def test_what_a_task_said_is_dropped_when_its_run_never_ends(hurt: Watcher) -> None:
    """After two days."""
    hurt.outbox.add_note(
        Note(kind="task", at_seconds=hurt.made.clock.now_seconds(), run="r1", task="fold")
    )
    hurt.made.clock.sleep(47 * HOUR)
    hurt.look()
    assert len(hurt.outbox.notes()) == 1
    hurt.made.clock.sleep(2 * HOUR)
    hurt.look()
    assert hurt.outbox.notes() == {}


def test_a_stream_begun_anew_tells_its_own_findings(hurt: Watcher) -> None:
    """Its output was deleted: the desk knows of more entries than the new ledger has."""
    hurt.put(AlertState(reported_sequence=100))
    hurt.look()
    (mail,) = hurt.post.mails
    assert mail.subject == "[seriatim] s: GapError in in-a/0 at offset 3"
    head = hurt.made.ledger.head("s")
    assert head is not None
    assert hurt.outbox.alert_state().reported_sequence == head.ledger.sequence


def test_a_reminder_and_an_end(hurt: Watcher) -> None:
    """After twelve hours, and when a person has decided."""
    hurt.look()
    hurt.made.clock.sleep(12 * HOUR)
    hurt.look()
    repaired(hurt.made)
    hurt.look()
    assert [mail.subject.split(": ", 1)[1] for mail in hurt.post.mails[1:]] == [
        "still open: halted in-a/0",
        "over: halted in-a/0",
    ]


def test_a_mail_server_that_is_down_loses_nothing(hurt: Watcher) -> None:
    """The mail waits on the desk, and goes out when the server is back, once."""
    hurt.post.is_down = True
    told = hurt.look()
    assert (len(told.waiting_mails), told.trouble) == (1, "the mail server is down")
    hurt.look()
    assert len(hurt.outbox.alert_state().mails) == 1
    hurt.post.is_down = False
    assert [mail.subject for mail in hurt.look().sent_mails] == [
        "[seriatim] s: GapError in in-a/0 at offset 3"
    ]
    assert hurt.outbox.alert_state().mails == ()


@pytest.mark.parametrize("point", ["alert-kept", "alert-sent"])
def test_a_crash_on_the_way_loses_nothing(hurt: Watcher, point: str) -> None:
    """Kept and not sent: sent next time. Sent and not noted: sent again under the same id."""

    class Died(BaseException):
        """As good as a kill."""

    def die(passed: str) -> None:
        if passed == point:
            raise Died

    crash_points.arm(die)
    try:
        with pytest.raises(Died):
            hurt.look()
    finally:
        crash_points.arm(None)
    hurt.look()
    hurt.made.clock.sleep(CLAIM_SECONDS)
    hurt.look()
    hurt.look()
    assert len({mail.id for mail in hurt.post.mails}) == 1
    assert len(hurt.post.mails) == (2 if point == "alert-sent" else 1)


def test_without_a_mail_server_mails_wait(hurt: Watcher) -> None:
    """And it is said; with nobody to tell there is no mail at all."""
    made = hurt.made
    found = watch_stream(made.stream, made.kafka, made.ledger, made.files, made.clock)
    told = send_alerts(
        PLACE,
        12,
        observe_stream(made.stream, found, made.ledger, hurt.outbox.alert_state()),
        hurt.outbox.stored_state(),
        hurt.outbox,
        None,
    )
    assert (len(told.waiting_mails), told.trouble) == (1, "no way to send alerts is set")
    nobody = StoreOutbox(MemoryStore(), made.clock, "s", "/streams")
    told = send_alerts(
        replace(PLACE, to=()),
        12,
        observe_stream(made.stream, found, made.ledger, AlertState()),
        nobody.stored_state(),
        nobody,
        hurt.post,
    )
    assert (told.waiting_mails, told.trouble, hurt.post.mails) == ([], "", [])


def test_a_first_look_tells_what_still_waits_and_no_history() -> None:
    """Whoever begins to watch an old stream is not told what was settled long ago."""
    made = create_filled_stream(sequence=None)
    send(made, A0, b"no JSON", ["a"])
    made.run()
    fresh = Watcher(made)
    fresh.look()
    assert fresh.post.mails == []
    send(made, A0, b"no JSON")
    made.run()
    late = Watcher(made)
    late.look()
    (mail,) = late.post.mails
    assert mail.subject.startswith("[seriatim] s: PoisonError in in-a/0")


def test_a_stream_whose_file_broke_is_told_to_whom_it_named_before() -> None:
    """And only when it lasts."""
    made = create_filled_stream()
    made.run()
    watcher = Watcher(made)
    watcher.look()
    error = PlatformError("no broker", next="retry")
    for after in (0.0, 700.0):
        send_alerts(
            replace(PLACE, to=None),
            12,
            observe_failure(error, after),
            watcher.outbox.stored_state(),
            watcher.outbox,
            watcher.post,
        )
    (mail,) = watcher.post.mails
    assert mail.to == ("ops@example.org",)
    assert "PlatformError: no broker" in mail.text


def test_a_mail_that_is_refused_is_not_in_the_way_of_others(hurt: Watcher) -> None:
    """Nobody of that name any more: it waits by itself, and what comes after it is sent."""
    hurt.post.refused_words = {"GapError"}
    told = hurt.look()
    assert (len(told.sent_mails), len(told.waiting_mails)) == (0, 1)
    waiting = told.waiting_mails[0]
    hurt.put(
        replace(
            hurt.outbox.alert_state(), mails=(waiting, replace(waiting, id="2", subject="another"))
        )
    )
    told = hurt.look()
    assert ([mail.subject for mail in told.sent_mails], told.waiting_mails) == (
        ["another"],
        [waiting],
    )
    assert told.waiting_mails[0].refused_seconds == hurt.made.clock.now_seconds()
    assert hurt.outbox.alert_state().mails == (waiting,)
    assert "refused" in told.trouble


def test_a_mail_that_cannot_be_kept_is_sent_all_the_same(hurt: Watcher) -> None:
    """A full disk hurts more than the outbox, so a person hears of it, if at every look."""

    class Full(StoreOutbox):
        def put_alert_state(self, alert_state: AlertState, version_before: int) -> int:  # noqa: ARG002  # as the port has it
            raise PlatformError("no room")

    hurt.outbox = Full(hurt.store, hurt.made.clock, "s", "/streams")
    for count in (1, 2):
        with pytest.raises(PlatformError, match="no room"):
            hurt.look()
        assert [mail.subject for mail in hurt.post.mails] == [
            "[seriatim] s: GapError in in-a/0 at offset 3"
        ] * count


def test_whoever_is_named_no_more_is_told_no_more(hurt: Watcher) -> None:
    """`alerts.to = []` is a word: nothing is mailed, and what waited is not sent either."""
    hurt.post.is_down = True
    hurt.look()
    hurt.post.is_down = False
    hurt.place = replace(PLACE, to=())
    told = hurt.look()
    assert (
        told.sent_mails,
        told.waiting_mails,
        hurt.outbox.alert_state().mails,
        hurt.outbox.alert_state().to,
    ) == ([], [], (), ())
    hurt.place = PLACE
    hurt.made.clock.sleep(12 * HOUR)
    assert [mail.subject for mail in hurt.look().sent_mails] == [
        "[seriatim] s: still open: halted in-a/0"
    ]


def test_what_waits_goes_to_whom_the_stream_names_now(hurt: Watcher) -> None:
    """An address was wrong: put right, it is where the mail goes. A file that cannot be read
    changes no address.
    """
    hurt.post.refused_words = {"GapError"}
    hurt.look()
    hurt.place = replace(PLACE, to=None)
    (waiting,) = hurt.look().waiting_mails
    assert waiting.to == ("ops@example.org",)
    hurt.post.refused_words = set()
    hurt.place = replace(PLACE, to=("right@example.org",))
    assert [mail.to for mail in hurt.look().sent_mails] == [("right@example.org",)]


def test_a_mail_that_is_refused_for_two_days_is_put_aside(hurt: Watcher) -> None:
    """It is kept and said, once; until then it waits. A server that is down puts nothing aside,
    however long.
    """
    hurt.post.is_down = True
    hurt.look()
    hurt.made.clock.sleep(100 * HOUR)
    assert len(hurt.look().waiting_mails) == 2  # the reminder, too
    hurt.post.is_down, hurt.post.refused_words = False, {"GapError"}
    assert len(hurt.look().waiting_mails) == 1
    hurt.made.clock.sleep(11 * HOUR)
    hurt.look()
    hurt.made.clock.sleep(36 * HOUR)
    assert len(hurt.look().waiting_mails) == 1
    hurt.made.clock.sleep(HOUR)
    told = hurt.look()
    assert (told.waiting_mails, hurt.outbox.alert_state().mails) == ([], ())
    (aside,) = [key for key in hurt.store.objects if "/refused/" in key]
    assert told.refused_mail_paths == [f"{hurt.store.url}/{aside}"]
    assert not hurt.look().refused_mail_paths


@pytest.mark.parametrize(
    ("kinds", "fields", "is_over"),
    [
        (("hold", "repair"), {}, True),
        (
            ("hold", "repair"),
            {"request": RepairRequest(ranges={"in-a/0": (0, 2)}).to_json()},
            False,
        ),
        (("hold", "release"), {"reason": "given up"}, True),
        (("hold", "release"), {}, False),
    ],
    ids=["a repair", "a backfill", "given up", "a second try that failed"],
)
def test_only_the_ledger_ends_a_repair_of_what_no_look_shows(
    kinds: tuple[str, ...], fields: dict[str, str], is_over: bool
) -> None:
    """A damaged file, say: the next good run of the stream does not end it."""
    watcher = Watcher(create_filled_stream(sequence=None))
    watcher.made.run()
    watcher.look()
    now = watcher.made.clock.now_seconds()
    watcher.outbox.add_note(
        Note(kind="failed", at_seconds=now, dag=REPAIR_DAG, run="r1", text="the run failed")
    )
    watcher.look()
    watcher.made.clock.sleep(HOUR)
    watcher.outbox.add_note(Note(kind="good", at_seconds=now + HOUR, dag="s", run="r2"))
    watcher.look()
    assert REPAIR in watcher.outbox.alert_state().open_incidents
    repaired(watcher.made, kinds, **fields)
    watcher.look()
    assert (REPAIR not in watcher.outbox.alert_state().open_incidents) is is_over
    assert len(watcher.post.mails) == 1 + is_over


def test_a_mail_before_the_end_of_its_run_is_followed_by_the_links(hurt: Watcher) -> None:
    """Once, as an answer to the first mail; runs without links have nothing to add."""
    hurt.look()
    (first,) = hurt.post.mails
    now = hurt.made.clock.now_seconds()
    task = Note(kind="task", at_seconds=now, run="r1", exit_code=3, text=WHY, error=KIND)
    hurt.outbox.add_note(task)
    links = {"run": "http://localhost:8080/dags/s/runs/r1"}
    hurt.outbox.add_note(Note(kind="failed", at_seconds=now, run="r1", links=links))
    for _ in range(3):
        hurt.look()
    first_again, followed = hurt.post.mails
    assert first_again == first
    assert (followed.subject, followed.follows) == (f"Re: {first.subject}", first.id)
    assert "http://localhost:8080/dags/s/runs/r1" in followed.text


def test_a_mail_that_could_not_be_stored_keeps_its_id(hurt: Watcher) -> None:
    """Until the outbox has space it is sent with every look. Whoever counts ids counts one."""

    def refuse(_state: AlertState, _version: int) -> int:
        raise PlatformError("no space")

    store_state = hurt.outbox.put_alert_state
    hurt.outbox.put_alert_state = refuse  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(PlatformError, match="no space"):
            hurt.look()
        hurt.made.clock.sleep(HOUR)
    hurt.outbox.put_alert_state = store_state  # type: ignore[method-assign]
    hurt.look()
    assert len(hurt.post.mails) == 4
    assert len({mail.id for mail in hurt.post.mails}) == 1


def test_the_same_trouble_at_another_time_is_another_mail(hurt: Watcher) -> None:
    """A partition that halts again at the same offset is told again, under another id."""
    hurt.look()
    repaired(hurt.made)
    hurt.look()
    assert len({mail.id for mail in hurt.post.mails}) == len(hurt.post.mails)
