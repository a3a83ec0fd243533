"""The outbox: what is put on the desk is there for whoever comes next, and one at a time. Disk and
memory alike.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Timer

import msgspec
import pytest

from seriatim.alerts.alert import Outbox
from seriatim.alerts.incidents import AlertState, Concern, Incident, Mail, Note
from seriatim.alerts.outbox import ALERT_STATE_FILE, NOTES_FOLDER, DiskOutbox
from seriatim.errors import ConfigError, PlatformError
from seriatim.memory.mail import MemoryOutbox

Make = Callable[[], Outbox]
MAIL = Mail(id="1", to=("a@b.org",), subject="s", text="t", html="h", at_seconds=1.0)
OPEN = Incident(concern=Concern(kind="late", text="x", next="y"), since_seconds=1.0)


@pytest.fixture(params=["disk", "memory"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the same outbox again, as another process would."""
    kept = MemoryOutbox()
    if request.param == "memory":
        return lambda: kept
    return lambda: DiskOutbox(tmp_path / "outbox", "orders", Path("/streams"))


def test_a_new_desk_is_empty(outbox: Make) -> None:
    """Nobody looked before."""
    assert outbox().alert_state() == AlertState()
    assert outbox().notes() == {}


def test_a_desk_is_kept_as_a_whole(outbox: Make) -> None:
    """Incidents, mails, and how far was told."""
    desk = AlertState(
        reported_sequence=3, open_incidents={"late": OPEN}, mails=(MAIL,), to=("a@b.org",)
    )
    outbox().put_alert_state(desk)
    assert outbox().alert_state() == desk
    outbox().put_alert_state(AlertState())
    assert outbox().alert_state() == AlertState()


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
    where = Path(DiskOutbox(tmp_path, "orders", Path("/a")).put_refused_mail(MAIL))
    assert where.parent.name == "refused"
    assert msgspec.json.decode(where.read_bytes(), type=Mail) == MAIL


def test_two_projects_have_two_desks(tmp_path: Path) -> None:
    """A stream called demo in two folders is two streams."""
    here, there = (DiskOutbox(tmp_path, "demo", Path(folder)) for folder in ("/a", "/b"))
    here.put_alert_state(AlertState(reported_sequence=1))
    assert there.alert_state() == AlertState()


def test_a_desk_that_cannot_be_read_is_put_aside_and_told(tmp_path: Path) -> None:
    """Refused, it would silence its stream for good. It is kept, and a person hears of it, once."""
    outbox = DiskOutbox(tmp_path, "orders", Path("/a"))
    outbox.put_alert_state(AlertState())
    (outbox.folder / ALERT_STATE_FILE).write_text("{")
    assert (outbox.alert_state(), outbox.alert_state()) == (AlertState(), AlertState())
    (note,) = outbox.notes().values()
    (aside,) = outbox.folder.glob("damaged-*")
    assert (note.kind, aside.name in note.text, aside.read_text()) == ("failed", True, "{")


@pytest.mark.parametrize("what", ["desk", "note"])
def test_a_full_disk_is_said_and_leaves_no_draft(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trouble of the platform, with what to do."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outbox = DiskOutbox(tmp_path, "orders", Path("/a"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlatformError, match="No space left") as trouble:
        outbox.put_alert_state(AlertState()) if what == "desk" else outbox.add_note(
            Note(kind="good", at_seconds=1.0)
        )
    assert "SERIATIM_OUTBOX" in trouble.value.next
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_note_that_cannot_be_read_is_told_as_a_failure(tmp_path: Path) -> None:
    """Somebody tried to say something; drafts are not notes."""
    outbox = DiskOutbox(tmp_path, "orders", Path("/a"))
    outbox.add_note(Note(kind="good", at_seconds=1.0))
    (path,) = (outbox.folder / NOTES_FOLDER).iterdir()
    path.write_text("{")
    path.with_name(".draft.json.1").write_text("{")
    (note,) = outbox.notes().values()
    assert (note.kind, "cannot be read" in note.text) == ("failed", True)


def test_a_note_that_a_watch_drops_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow's callback looks at the notes without the lock."""
    outbox = DiskOutbox(tmp_path, "orders", Path("/streams"))
    for second in (1.0, 2.0):
        outbox.add_note(Note(kind="task", at_seconds=second, run="r1"))
    first, last = outbox.notes()
    read = Path.read_bytes

    def dropping(path: Path) -> bytes:
        outbox.delete_notes([first])
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", dropping)
    assert list(outbox.notes()) == [last]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """With the setting that changes it."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError) as refused,
        DiskOutbox(tmp_path / "file", "s", Path("/a")).lock(),
    ):
        pass
    assert "SERIATIM_OUTBOX" in refused.value.next


def _hold(folder: Path, held: Path, release: Path, released: Path) -> None:
    """Hold the lock until there is a file `release`; write `released` just before giving it back."""
    with DiskOutbox(folder, "s", Path("/a")).lock():
        held.write_text("")
        while not release.exists():
            time.sleep(0.01)
        released.write_text("")


def _holder(folder: Path) -> tuple[BaseProcess, Path, Path]:
    """A process that holds the lock, the file that makes it let go, and the file that says that it
    is about to.
    """
    held, release, released = folder / "held", folder / "release", folder / "released"
    process = multiprocessing.get_context("spawn").Process(
        target=_hold, args=(folder, held, release, released)
    )
    process.start()
    while not held.exists():
        time.sleep(0.01)
    return process, release, released


def test_one_at_a_time_over_processes(tmp_path: Path) -> None:
    """Whoever comes second gets the lock only after the first has given it back."""
    process, release, released = _holder(tmp_path)
    # The holder lets go only some time after the second one began to wait: a lock that does not hold is seen.
    Timer(0.3, release.touch).start()
    with DiskOutbox(tmp_path, "s", Path("/a")).lock():
        was_released = released.exists()
    process.join()
    assert was_released


def test_a_holder_that_dies_leaves_no_lock(tmp_path: Path) -> None:
    """The system itself gives it back."""
    process, _, _ = _holder(tmp_path)
    process.kill()
    process.join()
    with DiskOutbox(tmp_path, "s", Path("/a")).lock():
        pass
