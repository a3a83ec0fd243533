"""The outbox: what is stored is there for whoever comes next, and of two at once one is first. On a
disk, in memory and in a bucket alike.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from seriatim.alerts.incidents import AlertState, Incident, Mail, Note, OutboxChangedError
from seriatim.alerts.outbox import CLAIM_SECONDS, StoreOutbox
from seriatim.engine.findings import Concern
from seriatim.errors import ConfigError, PlatformError
from seriatim.memory.ledger import MemoryClock
from seriatim.memory.store import MemoryStore
from seriatim.storage.store import LocalStore, Store, open_store

Make = Callable[[], StoreOutbox]
CLOCK = MemoryClock()
MAIL = Mail(id="1", to=("a@b.org",), subject="s", text="t", html="h", at_seconds=1.0)
OPEN = Incident(concern=Concern(kind="late", text="x", next="y"), since_seconds=1.0)


@pytest.fixture(params=["disk", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Where the outboxes of all streams are."""
    if request.param == "s3":
        return open_store(request.getfixturevalue("s3_url"))
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "outbox")


@pytest.fixture
def outbox(store: Store) -> Make:
    """Makes the same outbox again, as another process would."""
    return lambda: StoreOutbox(store, CLOCK, "orders", "/streams")


def on_disk(folder: Path, stream: str = "orders", streams_folder: str = "/a") -> StoreOutbox:
    """An outbox in a folder."""
    return StoreOutbox(LocalStore(folder), CLOCK, stream, streams_folder)


def test_a_new_desk_is_empty(outbox: Make) -> None:
    """Nobody looked before."""
    assert outbox().alert_state() == AlertState()
    assert outbox().stored_state().version == 0
    assert outbox().notes() == {}


def test_a_desk_is_kept_as_a_whole(outbox: Make) -> None:
    """Incidents, mails, and how far was told."""
    desk = AlertState(
        reported_sequence=3, open_incidents={"late": OPEN}, mails=(MAIL,), to=("a@b.org",)
    )
    assert outbox().put_alert_state(desk, 0) == 1
    assert outbox().alert_state() == desk
    assert outbox().put_alert_state(AlertState(), 1) == 2
    assert (outbox().stored_state().version, outbox().alert_state()) == (2, AlertState())


def test_of_two_states_after_the_same_one_is_stored(outbox: Make) -> None:
    """The second is refused, also when the version that it would get was deleted long ago."""
    for version in range(5):
        outbox().put_alert_state(AlertState(reported_sequence=version), version)
    for version in range(5):
        with pytest.raises(OutboxChangedError):
            outbox().put_alert_state(AlertState(), version)
    assert outbox().alert_state() == AlertState(reported_sequence=4)


def test_a_state_that_came_first_and_is_deleted_by_now_came_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on while the store compares what is there with what it was given."""
    outbox = on_disk(tmp_path)
    outbox.put_alert_state(AlertState(reported_sequence=1), 0)
    read = LocalStore.read

    def deleting(store: LocalStore, key: str) -> bytes:
        store.delete([key])
        return read(store, key)

    monkeypatch.setattr(LocalStore, "read", deleting)
    with pytest.raises(OutboxChangedError):
        outbox.put_alert_state(AlertState(), 0)


def test_few_states_are_kept(outbox: Make, store: Store) -> None:
    """The newest and the one before, for whoever is reading it."""
    for version in range(5):
        outbox().put_alert_state(AlertState(reported_sequence=version), version)
    names = [key.rpartition("/")[2] for key, _ in store.keys("")]
    assert names == ["0000000004.json", "0000000005.json"]


def test_a_desk_of_before_is_read_and_deleted_later(outbox: Make, store: Store) -> None:
    """Versions before 0.2 replaced one file."""
    desk = AlertState(reported_sequence=3, mails=(MAIL,))
    store.create(f"{outbox().prefix}desk.json", msgspec.json.encode(desk))
    assert (outbox().stored_state().version, outbox().alert_state()) == (0, desk)
    for version in range(2):
        outbox().put_alert_state(AlertState(reported_sequence=version), version)
        assert outbox().alert_state() == AlertState(reported_sequence=version)
    assert store.size(f"{outbox().prefix}desk.json") is None


def test_a_mail_has_one_sender(outbox: Make) -> None:
    """Until the claim is given up."""
    claim = outbox().claim_mail("1")
    assert claim is not None
    assert outbox().claim_mail("1") is None
    assert outbox().claim_mail("2") is not None
    outbox().release_claim(claim)
    assert outbox().claim_mail("1") == claim


def test_a_claim_that_is_too_old_is_taken_over_by_one(outbox: Make) -> None:
    """Its holder was killed. The next one may be killed, too."""
    for _ in range(3):
        assert outbox().claim_mail("1") is not None
        CLOCK.sleep(CLAIM_SECONDS - 1)
        assert outbox().claim_mail("1") is None
        CLOCK.sleep(1)
    assert outbox().claim_mail("1") is not None


def test_claims_of_mails_that_wait_no_more_are_deleted(outbox: Make) -> None:
    """Those of waiting mails stay."""
    outbox().put_alert_state(AlertState(mails=(MAIL,)), 0)
    assert outbox().claim_mail("2") is not None
    assert outbox().claim_mail(MAIL.id) is not None
    outbox().delete_done_claims()
    assert outbox().claim_mail("2") is not None
    assert outbox().claim_mail(MAIL.id) is None


def test_notes_come_oldest_first_and_are_dropped_by_name(outbox: Make) -> None:
    """What was left while a look went on is there for the next one."""
    late, early = (Note(kind="failed", at_seconds=at, run=str(at)) for at in (2.0, 1.0))
    outbox().add_note(late)
    outbox().add_note(early)
    notes = outbox().notes()
    assert list(notes.values()) == [early, late]
    outbox().delete_notes([next(iter(notes)), "none such"])
    assert list(outbox().notes().values()) == [late]


def test_a_mail_put_aside_is_kept(tmp_path: Path) -> None:
    """Beside the desk, as it was, under a name that is told."""
    where = Path(on_disk(tmp_path).put_refused_mail(MAIL))
    assert where.parent.name == "refused"
    assert msgspec.json.decode(where.read_bytes(), type=Mail) == MAIL


def test_two_projects_have_two_desks(tmp_path: Path) -> None:
    """A stream called demo in two folders is two streams."""
    here, there = (on_disk(tmp_path, "demo", folder) for folder in ("/a", "/b"))
    here.put_alert_state(AlertState(reported_sequence=1), 0)
    assert there.alert_state() == AlertState()


@pytest.mark.parametrize("name", ["state/0000000007.json", "desk.json"])
def test_a_desk_that_cannot_be_read_is_put_aside_and_told(
    outbox: Make, store: Store, name: str
) -> None:
    """Refused, it would silence its stream for good. It is kept, and a person hears of it, once."""
    store.create(f"{outbox().prefix}{name}", b"{")
    for _ in range(2):
        seen = outbox().stored_state()
        assert (seen.alert_state, outbox().alert_state()) == (AlertState(), AlertState())
        (aside,) = [key for key, _ in store.keys("") if "/damaged-" in key]
        assert seen.damage is not None
        assert (seen.damage.kind, aside in seen.damage.text) == ("failed", True)
        assert "next       look at " in seen.damage.text
        assert store.read(aside) == b"{"
    outbox().put_alert_state(AlertState(reported_sequence=1), seen.version)
    told = outbox().stored_state()
    assert (told.damage, told.alert_state) == (None, AlertState(reported_sequence=1))


@pytest.mark.parametrize("what", ["desk", "note"])
def test_a_full_disk_is_said_and_leaves_no_draft(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trouble of the platform, with what to do."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outbox = on_disk(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlatformError, match="No space left") as trouble:
        outbox.put_alert_state(AlertState(), 0) if what == "desk" else outbox.add_note(
            Note(kind="good", at_seconds=1.0)
        )
    assert "SERIATIM_OUTBOX" in trouble.value.next
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_note_that_cannot_be_read_is_told_as_a_failure(outbox: Make, store: Store) -> None:
    """Somebody tried to say something, at the time in the name."""
    outbox().add_note(Note(kind="good", at_seconds=1.5))
    ((key, _),) = store.keys("")
    store.replace(key, b"{")
    (note,) = outbox().notes().values()
    assert (note.kind, note.at_seconds, "cannot be read" in note.text) == ("failed", 1.5, True)


def test_drafts_are_not_notes(tmp_path: Path) -> None:
    """They are of somebody who is writing, or was killed."""
    outbox = on_disk(tmp_path)
    outbox.add_note(Note(kind="good", at_seconds=1.0))
    (path,) = tmp_path.glob("*/notes/*")
    path.rename(path.with_name(f".{path.name}.0123abcd"))
    assert outbox.notes() == {}


def test_a_note_that_a_watch_drops_meanwhile_is_none(
    outbox: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow's callback looks at the notes at any time."""
    for second in (1.0, 2.0):
        outbox().add_note(Note(kind="task", at_seconds=second, run="r1"))
    first, last = outbox().notes()
    read = store.read

    def dropping(key: str) -> bytes:
        outbox().delete_notes([first])
        return read(key)

    monkeypatch.setattr(store, "read", dropping)
    assert list(outbox().notes()) == [last]


def test_a_state_that_is_deleted_while_it_is_read_is_read_anew(
    outbox: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others were faster, twice: the newest one counts."""
    outbox().put_alert_state(AlertState(reported_sequence=0), 0)
    read = store.read

    def overtaken(key: str) -> bytes:
        monkeypatch.setattr(store, "read", read)
        for version in (1, 2):
            outbox().put_alert_state(AlertState(reported_sequence=version), version)
        return read(key)

    monkeypatch.setattr(store, "read", overtaken)
    assert outbox().stored_state().version == 3


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """With the setting that changes it; nothing is there to be read."""
    (tmp_path / "file").write_text("")
    outbox = on_disk(tmp_path / "file")
    assert (outbox.alert_state(), outbox.notes()) == (AlertState(), {})
    with pytest.raises(ConfigError, match="is not writable") as refused:
        outbox.put_alert_state(AlertState(), 0)
    assert "SERIATIM_OUTBOX" in refused.value.next
