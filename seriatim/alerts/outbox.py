"""The outbox on disk: a folder for each stream, with its desk, the notes left on it, and a lock.

Everything is small JSON, put in place as a whole and seen onto the disk before anybody goes on.
Nothing here needs Arrow, Kafka or Spark: Airflow's own processes leave notes.

Next room: alerts/alert.py says what is done with it.
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

ALERT_STATE_FILE, NOTES_FOLDER, REFUSED_FOLDER, LOCK_FILE = "desk.json", "notes", "refused", "lock"


class DiskOutbox:
    """One stream's, below the common folder."""

    def __init__(self, outbox_folder: Path, stream: str, streams_folder: Path) -> None:
        named = hashlib.sha256(str(streams_folder).encode()).hexdigest()[
            :8
        ]  # two projects may call a stream the same
        self.folder = outbox_folder / f"{stream}-{named}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """A lock that the system itself releases when its holder dies."""
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
        """What is known; a new desk, if there is none. A damaged one silences nobody: it is put
        aside and told.
        """
        try:
            return msgspec.json.decode(
                (self.folder / ALERT_STATE_FILE).read_bytes(), type=AlertState
            )
        except FileNotFoundError:
            return AlertState()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._move_damaged_file_away(str(error))
            return AlertState()

    def _move_damaged_file_away(self, reason: str) -> None:
        aside = self.folder / f"damaged-{uuid.uuid4().hex[:8]}.json"
        advice = f"mails that waited: {aside}"
        text = f"the outbox was damaged ({reason}): open incidents are told again\n  next       {advice}"
        self.add_note(Note(kind="failed", at_seconds=time.time(), text=text, next=advice))
        with suppress(FileNotFoundError):  # somebody else was faster
            (self.folder / ALERT_STATE_FILE).rename(aside)

    def put_alert_state(self, alert_state: AlertState) -> None:
        self._write_durably(
            self.folder / ALERT_STATE_FILE, msgspec.json.format(msgspec.json.encode(alert_state))
        )

    def notes(self) -> dict[str, Note]:
        """Oldest first. One that cannot be read is told as what it is: a run failed, and no more is
        known.
        """
        found = {}
        for path in sorted((self.folder / NOTES_FOLDER).glob("[0-9]*.json")):
            with suppress(FileNotFoundError):  # a watch dropped it meanwhile: it was told
                found[path.name] = _read_note(path)
        return found

    def add_note(self, note: Note) -> None:
        name = f"{round(note.at_seconds * 1000):015d}-{note.kind}-{uuid.uuid4().hex[:8]}.json"
        self._write_durably(self.folder / NOTES_FOLDER / name, msgspec.json.encode(note))

    def delete_notes(self, names: list[str]) -> None:
        for name in names:
            (self.folder / NOTES_FOLDER / name).unlink(missing_ok=True)

    def put_refused_mail(self, mail: Mail) -> str:
        path = self.folder / REFUSED_FOLDER / f"{mail.id}.json"
        self._write_durably(path, msgspec.json.format(msgspec.json.encode(mail)))
        return str(path)

    def _write_durably(self, path: Path, content: bytes) -> None:
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
    try:
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except msgspec.MsgspecError:
        return Note(
            kind="failed",
            at_seconds=path.stat().st_mtime,
            text=f"a note that cannot be read: {path.name}",
        )
