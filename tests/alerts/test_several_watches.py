"""Several watches of one stream without a lock: interleaved at every step, and killed at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Semaphore, Thread

import pytest

from seriatim.alerts.alert import send_alerts
from seriatim.alerts.incidents import Mail, Note, Observation, OutboxChangedError
from seriatim.alerts.mail import MailContext
from seriatim.alerts.outbox import CLAIM_SECONDS, StoreOutbox
from seriatim.engine.findings import Concern
from seriatim.memory.ledger import MemoryClock
from seriatim.memory.outgoing import MemoryNotifier
from seriatim.memory.store import MemoryStore
from seriatim.storage.store import Buffer

PLACE = MailContext(stream="s", to=("ops@example.org",))
HALTED = Concern(kind="halted", location="in-a/0", text="a gap", next="repair it")
# A run that failed, and a good one after it before anybody looked. Both are mailed together, once, and
# open no incident: nothing but the notes themselves tells whether they were mailed.
FAILED_RUN = Note(kind="failed", at_seconds=0.0, run="r1", text="the run failed")
GOOD_RUN = Note(kind="good", at_seconds=1.0, run="r2")
STEPS_MAX = 40

Hook = Callable[[], None]


class SteppedStore(MemoryStore):
    """A store over the objects of another, with something done around each call."""

    def __init__(self, whole: MemoryStore, before: Hook, after: Hook) -> None:
        super().__init__()
        self.objects = whole.objects
        self.before, self.after = before, after

    def create(self, key: str, content: Buffer) -> None:
        self.before()
        super().create(key, content)
        self.after()

    def read(self, key: str) -> bytes:
        self.before()
        content = super().read(key)
        self.after()
        return content

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        self.before()
        return super().keys(prefix)

    def delete(self, keys: object) -> list[str]:
        self.before()
        deleted = super().delete(keys)  # type: ignore[arg-type]  # as the port has it
        self.after()
        return deleted


class SteppedNotifier(MemoryNotifier):
    """A mail server with something done around each mail."""

    before: Hook = lambda: None
    after: Hook = lambda: None

    def send(self, mail: Mail) -> str:
        self.before()
        said = super().send(mail)
        self.after()
        return said


class World:
    """The outbox of a stream that halted, with the notes of a run that failed."""

    def __init__(self) -> None:
        self.store, self.clock, self.mails = MemoryStore(), MemoryClock(), list[Mail]()
        for note in (FAILED_RUN, GOOD_RUN):
            self.outbox().add_note(note)

    def outbox(self, store: MemoryStore | None = None) -> StoreOutbox:
        return StoreOutbox(store or self.store, self.clock, "s", "/streams")

    def look(self, before: Hook = lambda: None, after: Hook = lambda: None) -> None:
        """One watch, as the command does it: again while others are faster."""
        outbox = self.outbox(SteppedStore(self.store, before, after))
        post = SteppedNotifier(mails=self.mails, before=before, after=after)
        while True:
            seen = outbox.stored_state()
            saw = Observation(at_seconds=self.clock.now_seconds(), concerns=[HALTED], sequence=1)
            try:
                send_alerts(PLACE, 12, saw, seen, outbox, post)
            except OutboxChangedError:
                continue
            return

    def left(self) -> list[str]:
        """The folders of all objects but alert states."""
        folders = {key.split("/")[1] for key in self.store.objects}
        return sorted(folders - {"state"})


class Walker:
    """A watch in a thread of its own that does one step whenever it is told."""

    def __init__(self, world: World) -> None:
        self.may_go, self.has_stopped, self.is_over = Semaphore(0), Semaphore(0), False
        self.thread = Thread(target=self._walk, args=(world,), daemon=True)
        self.thread.start()
        self.has_stopped.acquire()

    def _walk(self, world: World) -> None:
        try:
            world.look(before=self._stop)
        finally:
            self.is_over = True
            self.has_stopped.release()

    def _stop(self) -> None:
        self.has_stopped.release()
        self.may_go.acquire()

    def step(self, count: int) -> None:
        while count and not self.is_over:
            self.may_go.release()
            self.has_stopped.acquire()
            count -= 1


def steps_of_one_watch() -> int:
    """How many steps a watch has that is alone."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    World().look(before=count)
    return steps


@pytest.mark.parametrize("first_steps", range(STEPS_MAX))
def test_two_watches_at_once_mail_once(first_steps: int) -> None:
    """The first is overtaken after some steps, by a second that is overtaken in turn."""
    for second_steps in range(steps_of_one_watch() + 1):
        world = World()
        first, second = Walker(world), Walker(world)
        first.step(first_steps)
        second.step(second_steps)
        first.step(-1)
        second.step(-1)
        world.look()
        assert len(world.mails) == 1, (first_steps, second_steps)
        assert world.left() == [], (first_steps, second_steps)


def test_the_steps_cover_a_whole_watch() -> None:
    """Else the tests here would overlook its end."""
    assert 10 < steps_of_one_watch() < STEPS_MAX


@pytest.mark.parametrize("is_done", [False, True], ids=["before the step", "behind it"])
@pytest.mark.parametrize("step", range(STEPS_MAX))
def test_a_watch_that_is_killed_loses_nothing(step: int, is_done: bool) -> None:
    """Mailed at least once; a second time only if it was sent and that was not stored."""
    steps_left = step

    class Died(BaseException):
        """As good as a kill."""

    def die() -> None:
        nonlocal steps_left
        steps_left -= 1
        if steps_left < 0:
            raise Died

    world = World()
    has_died = False
    try:
        world.look(after=die) if is_done else world.look(before=die)
    except Died:
        has_died = True
    is_sent_unnoted = bool(world.mails and world.outbox().alert_state().mails)
    for _ in range(3):
        world.look()
        world.clock.sleep(CLAIM_SECONDS)
    assert len(world.mails) == 1 + is_sent_unnoted
    assert len({mail.id for mail in world.mails}) == 1
    assert world.left() == []
    assert has_died == (step < steps_of_one_watch()) or is_done


def test_a_watch_that_slept_over_many_others_stores_nothing() -> None:
    """The version after the one that it read was there, and is deleted by now."""
    world = World()
    outbox = world.outbox()
    seen = outbox.stored_state()
    for version in range(4):
        state = outbox.stored_state().alert_state
        outbox.put_alert_state(state, version)
    with pytest.raises(OutboxChangedError):
        outbox.put_alert_state(seen.alert_state, seen.version)
    assert outbox.stored_state().version == 4
