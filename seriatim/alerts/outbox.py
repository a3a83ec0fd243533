"""The outbox on a store: the versions of each stream's alert state, claims of mails, and notes.

No object is ever changed. A new alert state is created under the number after the one that was read,
and `create` decides who was first, as in the log of a Delta table. Whoever sends a mail creates a
claim before. All objects are small JSON. Nothing here needs Arrow, Kafka or Spark, because Airflow's
own processes leave notes.

Next: alerts/alert.py says what is done with the outbox.
"""

from __future__ import annotations

import errno
import hashlib
import re
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from seriatim.alerts.incidents import AlertState, Mail, Note, OutboxChangedError, StoredState
from seriatim.errors import ConfigError, PlatformError, render_screen
from seriatim.storage.store import AlreadyThereError

if TYPE_CHECKING:
    from seriatim.ports import Clock
    from seriatim.storage.store import Store

STATE_FOLDER = "state/"
OLD_STATE_FILE = "desk.json"
"""The alert state as versions before 0.2 wrote it. It counts as version 0."""
NOTES_FOLDER = "notes/"
REFUSED_FOLDER = "refused/"
CLAIMS_FOLDER = "claims/"
CLAIM_SECONDS = 600.0
"""A claim that is older than this was left by a process that was killed: all attempts to send one
mail take less time.
"""
READ_TRIES_MAX = 20
VERSION_NAME = re.compile(r"(\d{10})\.json")
NOTE_NAME = re.compile(r"(\d+).*\.json")
CLAIM_NAME = re.compile(r"(.+)-(\d+)\.json")
NOT_WRITABLE_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""EEXIST: a file is where a folder should be."""


class Claim(Struct, frozen=True, kw_only=True):
    """Says who sends a mail. No two are equal, so that `create` has one winner."""

    holder: str
    at_seconds: float


class StoreOutbox:
    """The outbox of one stream, below a folder of its own in the store of all outboxes."""

    def __init__(self, store: Store, clock: Clock, stream: str, streams_folder: str) -> None:
        self.store = store
        self.clock = clock
        # Two projects may have streams of the same name, so the folder name says which project.
        project_digest = hashlib.sha256(streams_folder.encode()).hexdigest()[:8]
        self.prefix = f"{stream}-{project_digest}/"

    def alert_state(self) -> AlertState:
        """The newest alert state, or an empty one."""
        return self.stored_state().alert_state

    def stored_state(self) -> StoredState:
        """The newest alert state with its version. A damaged one is copied and counts as empty, so that
        it does not stop later alerts.
        """
        for _ in range(READ_TRIES_MAX):
            version = max(self._versions(), default=0)
            try:
                return self._decode_state(version, self._read(self._state_key(version)))
            except (FileNotFoundError, NotADirectoryError):
                if not version:
                    return StoredState(version=0, alert_state=AlertState())
                # Others have written two newer versions meanwhile, and deleted this one.
        raise OutboxChangedError(f"{self._path('')} is changed by others all the time")

    def _versions(self) -> list[int]:
        versions = []
        for name in self._names(STATE_FOLDER):
            if match := VERSION_NAME.fullmatch(name):
                versions.append(int(match[1]))
        return versions

    def _state_key(self, version: int) -> str:
        return f"{STATE_FOLDER}{version:010d}.json" if version else OLD_STATE_FILE

    def _decode_state(self, version: int, content: bytes) -> StoredState:
        try:
            alert_state = msgspec.json.decode(content, type=AlertState)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            damage = self._copy_damaged_state(version, content, str(error))
            return StoredState(version=version, alert_state=AlertState(), damage=damage)
        return StoredState(version=version, alert_state=alert_state)

    def _copy_damaged_state(self, version: int, content: bytes, reason: str) -> Note:
        key = f"damaged-{version:010d}.json"
        with suppress(AlreadyThereError):
            self._create(key, content)
        advice = (
            f"look at {self._path(key)}: mails that waited are in it, and may not have been sent"
        )
        headline = f"the outbox was damaged ({reason}): open incidents are mailed again"
        text = render_screen(headline, {"next": advice})
        return Note(kind="failed", at_seconds=self.clock.now_seconds(), text=text, next=advice)

    def put_alert_state(self, alert_state: AlertState, version_before: int) -> int:
        """Store the state that follows a version; the new version. `OutboxChangedError` if others have
        stored one since.

        1. Create the next version.
        2. Look whether there is a later one. Old versions are deleted, so one that could be created may
           still be the number of a version long ago.
        3. Delete old versions. The one before stays, for whoever is reading it now.
        """
        version = version_before + 1
        reason = f"{self._path('')} was changed by another watch"
        content = msgspec.json.format(msgspec.json.encode(alert_state))
        try:
            self._create(self._state_key(version), content)
        except AlreadyThereError:
            raise OutboxChangedError(reason) from None
        versions = self._versions()
        if max(versions, default=version) > version:
            raise OutboxChangedError(reason)
        old_versions = [old for old in versions if old < version_before]
        if version_before > 0:
            old_versions.append(0)
        self._delete([self._state_key(old) for old in old_versions])
        return version

    def claim_mail(self, mail_id: str) -> str | None:
        """Claim the sending of a mail; the claim's name, or None if another process has it.

        A claim that is too old is not deleted: its holder may only be slow. The claim with the next
        number takes the mail over.
        """
        numbers = [number for name, number in self._claims() if name == mail_id]
        number = max(numbers, default=-1)
        if number >= 0 and self._is_held(f"{CLAIMS_FOLDER}{mail_id}-{number}.json"):
            return None
        key = f"{CLAIMS_FOLDER}{mail_id}-{number + 1}.json"
        claim = Claim(holder=uuid.uuid4().hex, at_seconds=self.clock.now_seconds())
        try:
            self._create(key, msgspec.json.encode(claim))
        except AlreadyThereError:
            return None
        return key

    def _claims(self) -> list[tuple[str, int]]:
        claims = []
        for name in self._names(CLAIMS_FOLDER):
            if match := CLAIM_NAME.fullmatch(name):
                claims.append((match[1], int(match[2])))
        return claims

    def _is_held(self, key: str) -> bool:
        try:
            claim = msgspec.json.decode(self._read(key), type=Claim)
        except (FileNotFoundError, msgspec.MsgspecError):
            return False
        # A claim from the future is of a host whose clock is wrong. It must not hold a mail back.
        return abs(self.clock.now_seconds() - claim.at_seconds) < CLAIM_SECONDS

    def release_claim(self, claim: str) -> None:
        """Give up a claim: the mail was not sent, and may be tried by anybody."""
        self._delete([claim])

    def delete_done_claims(self) -> None:
        """Delete the claims of mails that wait no more."""
        # The claims are listed before the state is read: a mail that was queued and claimed between the
        # two is not in the list.
        claims = self._claims()
        if not claims:
            return
        waiting_ids = {mail.id for mail in self.alert_state().mails}
        self._delete(
            [
                f"{CLAIMS_FOLDER}{mail_id}-{number}.json"
                for mail_id, number in claims
                if mail_id not in waiting_ids
            ]
        )

    def notes(self) -> dict[str, Note]:
        """All notes by name, oldest first. An unreadable one becomes the note of a failed run."""
        notes = {}
        for name in self._names(NOTES_FOLDER):
            if match := NOTE_NAME.fullmatch(name):
                with suppress(
                    FileNotFoundError
                ):  # another watch has mailed and deleted it meanwhile
                    content = self._read(f"{NOTES_FOLDER}{name}")
                    notes[name] = _decode_note(name, content, int(match[1]) / 1000)
        return notes

    def add_note(self, note: Note) -> None:
        # The time comes first and has a fixed width: names sort by age.
        time_ms = round(note.at_seconds * 1000)
        name = f"{time_ms:015d}-{note.kind}-{uuid.uuid4().hex[:8]}.json"
        self._create(f"{NOTES_FOLDER}{name}", msgspec.json.encode(note))

    def delete_notes(self, names: list[str]) -> None:
        self._delete([f"{NOTES_FOLDER}{name}" for name in names])

    def put_refused_mail(self, mail: Mail) -> str:
        key = f"{REFUSED_FOLDER}{mail.id}.json"
        with suppress(AlreadyThereError):  # a process that was killed has put it here
            self._create(key, msgspec.json.format(msgspec.json.encode(mail)))
        return self._path(key)

    def _path(self, key: str) -> str:
        return f"{self.store.url}/{self.prefix}{key}".rstrip("/")

    def _names(self, folder: str) -> list[str]:
        """The names in a folder of this outbox, sorted."""
        prefix = self.prefix + folder
        try:
            return [key.removeprefix(prefix) for key, _ in self.store.keys(prefix)]
        except OSError as error:
            raise self._platform_error("read", folder, error) from None

    def _read(self, key: str) -> bytes:
        try:
            return self.store.read(self.prefix + key)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise self._platform_error("read", key, error) from None

    def _delete(self, keys: list[str]) -> None:
        try:
            self.store.delete([self.prefix + key for key in keys])
        except OSError as error:
            raise self._platform_error("deleted", keys[0], error) from None

    def _create(self, key: str, content: bytes) -> None:
        try:
            self.store.create(self.prefix + key, content)
        except AlreadyThereError:
            raise
        except OSError as error:
            if error.errno not in NOT_WRITABLE_ERRNOS:
                raise self._platform_error("written", key, error) from None
            raise ConfigError(
                f"{self._path('')} is not writable: {error.strerror}",
                next="set SERIATIM_OUTBOX to a folder you may write to",
            ) from None

    def _platform_error(self, done: str, key: str, error: OSError) -> PlatformError:
        return PlatformError(
            f"{self._path(key)} cannot be {done}: {error.strerror}",
            next="make room and give the right to write there, or set SERIATIM_OUTBOX to another folder",
        )


def _decode_note(name: str, content: bytes, name_seconds: float) -> Note:
    """A stored note; one that cannot be decoded becomes the note of a failed run."""
    try:
        return msgspec.json.decode(content, type=Note)
    except msgspec.MsgspecError:
        return Note(
            kind="failed", at_seconds=name_seconds, text=f"a note that cannot be read: {name}"
        )
