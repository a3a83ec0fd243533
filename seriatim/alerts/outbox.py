"""The outbox on disk: a folder per stream, with the alert state, the notes left for it, and a lock.

All files are small JSON. A file is written completely and synced to the disk before it gets its
name. Nothing here needs Arrow, Kafka or Spark, because Airflow's own processes leave notes.

Next: alerts/alert.py says what is done with the outbox.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from seriatim.alerts.incidents import AlertState, Mail, Note
from seriatim.errors import ConfigError, PlatformError

ALERT_STATE_FILE = "desk.json"
NOTES_FOLDER = "notes"
REFUSED_FOLDER = "refused"
LOCK_FILE = "lock"


class DiskOutbox:
    """The outbox of one stream, in a folder below the common outbox folder."""

    def __init__(self, outbox_folder: Path, stream: str, streams_folder: Path) -> None:
        # Two projects may have streams of the same name, so the folder name says which project.
        project_digest = hashlib.sha256(str(streams_folder).encode()).hexdigest()[:8]
        self.folder = outbox_folder / f"{stream}-{project_digest}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the outbox alone. The operating system releases the lock when its holder dies."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / LOCK_FILE).open("a")
        except OSError as error:
            raise ConfigError(
                f"{self.folder} is not writable: {error.strerror}",
                next="set SERIATIM_OUTBOX to a folder you may write to",
            ) from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def alert_state(self) -> AlertState:
        """The stored state, or an empty one. A damaged file is moved away and reported by a note,
        so that it does not stop later alerts.
        """
        path = self.folder / ALERT_STATE_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=AlertState)
        except FileNotFoundError:
            return AlertState()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._move_damaged_file_away(str(error))
            return AlertState()

    def _move_damaged_file_away(self, reason: str) -> None:
        new_path = self.folder / f"damaged-{uuid.uuid4().hex[:8]}.json"
        advice = f"mails that waited: {new_path}"
        text = (
            f"the outbox was damaged ({reason}): open incidents are mailed again\n"
            f"  next       {advice}"
        )
        # The note comes first: after a crash between the two steps the damage is still reported.
        self.add_note(Note(kind="failed", at_seconds=time.time(), text=text, next=advice))
        with suppress(FileNotFoundError):  # another process moved it first
            (self.folder / ALERT_STATE_FILE).rename(new_path)

    def put_alert_state(self, alert_state: AlertState) -> None:
        content = msgspec.json.format(msgspec.json.encode(alert_state))
        self._write_durably(self.folder / ALERT_STATE_FILE, content)

    def notes(self) -> dict[str, Note]:
        """All notes by file name, oldest first. An unreadable one becomes the note of a failed run."""
        notes = {}
        for path in sorted((self.folder / NOTES_FOLDER).glob("[0-9]*.json")):
            with suppress(FileNotFoundError):  # another watch has mailed and deleted it meanwhile
                notes[path.name] = _read_note(path)
        return notes

    def add_note(self, note: Note) -> None:
        # The time comes first and has a fixed width: names sort by age.
        time_ms = round(note.at_seconds * 1000)
        name = f"{time_ms:015d}-{note.kind}-{uuid.uuid4().hex[:8]}.json"
        self._write_durably(self.folder / NOTES_FOLDER / name, msgspec.json.encode(note))

    def delete_notes(self, names: list[str]) -> None:
        for name in names:
            (self.folder / NOTES_FOLDER / name).unlink(missing_ok=True)

    def put_refused_mail(self, mail: Mail) -> str:
        path = self.folder / REFUSED_FOLDER / f"{mail.id}.json"
        self._write_durably(path, msgspec.json.format(msgspec.json.encode(mail)))
        return str(path)

    def _write_durably(self, path: Path, content: bytes) -> None:
        """Write a file that is complete and on the disk before it has its name."""
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise PlatformError(
                f"{path} cannot be written: {error.strerror}",
                next="make room and give the right to write there, or set SERIATIM_OUTBOX to another folder",
            ) from None


def _read_note(path: Path) -> Note:
    """A stored note; one that cannot be decoded becomes the note of a failed run."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except msgspec.MsgspecError:
        return Note(
            kind="failed",
            at_seconds=path.stat().st_mtime,
            text=f"a note that cannot be read: {path.name}",
        )
