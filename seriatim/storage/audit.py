"""The audit: the output of a stream read again, byte by byte, for `verify`. Nothing here comes from a
run.

The Delta log is read from its JSON files. A Delta library would start from a checkpoint and believe
it. What readers see is asked of the library in addition.

Next: operations/prove/verify.py compares what was read; storage/record_scan.py reads record files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from msgspec import Struct

from seriatim.engine.files import File
from seriatim.engine.records import OTHER_TABLE_PREFIX, Record
from seriatim.engine.session import Session
from seriatim.ledger.manifests import (
    DIFFERENCE_FILE,
    WITNESS_KEY,
    Manifest,
    ManifestFiles,
    ManifestReference,
)
from seriatim.ports import (
    AddedFile,
    Commit,
    CommitSignature,
    FileOutline,
    FileReading,
    UnreadableFileError,
)
from seriatim.storage.delta_table import COMMIT_METADATA_KEY
from seriatim.storage.parquet import first_line
from seriatim.storage.record_rows import read_row_groups
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.state_files import StateFiles, sessions_of_content
from seriatim.storage.store import Store, digest_object, open_store, xxh3_and_sha256
from seriatim.workers import LocalWorkers, Workers, map_or_raise

DATA_FOLDERS = ("records", "state", "kept", "manifests")
DELTA_LOG = "records/_delta_log/"
SIGN_OFF_FILE = "verified.json"
READ_ERRORS = (OSError, pa.ArrowException, ValueError)
"""What reading a damaged file raises."""


class FileToRead(Struct, frozen=True):
    """A piece of work: a file that is read and compared with its entry."""

    store_url: str
    file: File

    def __str__(self) -> str:
        return self.file.path


def read_committed_file(work: FileToRead) -> FileReading:
    """The file as it is now. What is in it is read only if it is the file that was committed, and
    not of state, which `verify` reads by sessions.
    """
    audit = FileAudit(open_store(work.store_url))
    file = work.file
    size_bytes = audit.size(file.path)
    if size_bytes is None:
        return FileReading()
    # Files of formats before 4 have no SHA-256 in their entry.
    digests = audit.digests(file.path, with_sha256=bool(file.sha256))
    reading = FileReading(size_bytes=size_bytes, digests=digests)
    is_as_committed = (size_bytes, *digests) == (file.size_bytes, file.digest, file.sha256)
    if is_as_committed and not file.path.startswith("state/"):
        try:
            reading.outline = audit.outline(file.path)
        except UnreadableFileError as error:
            reading.read_error = error.reason
    return reading


class FileAudit:
    """The output of one stream. `workers` read its files."""

    def __init__(self, store: Store, workers: Workers | None = None) -> None:
        self.store = store
        self._manifests = ManifestFiles(store)
        self.workers = LocalWorkers() if workers is None else workers

    def read_files(self, files: Iterable[File]) -> Iterator[FileReading]:
        """Each file as it is now, in the order of the files."""
        works = (FileToRead(self.store.address, file) for file in files)
        return map_or_raise(self.workers, read_committed_file, works)

    def commits(self) -> list[Commit]:
        """The commits of the Delta log, oldest first."""
        log_digest = hashlib.sha256()
        commits = []
        for key, _ in self.store.keys(DELTA_LOG):
            version, _, ending = key.removeprefix(DELTA_LOG).partition(".")
            if version.isdecimal() and ending == "json":
                content = self.store.read(key)
                log_digest.update(content)
                commits.append(_parse_commit(int(version), content, log_digest.hexdigest()))
        return commits

    def paths_readers_see(self, version: int) -> set[str]:
        """The paths of the table's files at a version, as a Delta library gives them."""
        try:
            table = self._open_table("records", version)
            adds = pa.table(table.get_add_actions())
        except (DeltaError, *READ_ERRORS) as error:
            self._raise_if_store_failed(error)
            raise UnreadableFileError("records/_delta_log", _first_line(error)) from None
        return {f"records/{unquote(path)}" for path in adds.column("path").to_pylist()}

    def other_tables(self) -> dict[str, tuple[int, set[str]]]:
        """The tables of further kinds of records by name: the entry that each has reached (-1 if it
        cannot be read), and its files.
        """
        tables = {}
        for folder in self._other_table_folders():
            try:
                table = self._open_table(folder)
                paths = pa.table(table.get_add_actions()).column("path").to_pylist()
                sequence = _reached_sequence(table)
            except TableNotFoundError:
                continue
            except (DeltaError, *READ_ERRORS, KeyError, TypeError) as error:
                self._raise_if_store_failed(error)
                paths = []
                sequence = -1
            name = folder.removeprefix(OTHER_TABLE_PREFIX)
            # The log has paths below the table's folder, written as addresses are.
            keys = {f"{folder}/{unquote(path)}" for path in paths}
            tables[name] = (sequence, keys)
        return tables

    def _raise_if_store_failed(self, error: Exception) -> None:
        """A network that is down is no damage of a table."""
        explained = self.store.explain_error(error)
        if explained is not None:
            raise explained from error

    def _other_table_folders(self) -> list[str]:
        return [name for name in self.store.folders("") if name.startswith(OTHER_TABLE_PREFIX)]

    def _open_table(self, folder: str, version: int | None = None) -> DeltaTable:
        options = self.store.delta_options()
        return DeltaTable(f"{self.store.url}/{folder}", version=version, storage_options=options)

    def witness(self) -> bytes | None:
        """The content of head.json; None if there is no such file."""
        return self._read_bytes_or_none(WITNESS_KEY)

    def sign_off(self) -> bytes | None:
        """The content of verified.json; None if there is no such file."""
        return self._read_bytes_or_none(SIGN_OFF_FILE)

    def put_sign_off(self, content: bytes) -> None:
        """Write verified.json."""
        self.store.replace(SIGN_OFF_FILE, content)

    def put_differing_file(self, path: str) -> None:
        """Note the path in differs.json. An empty path deletes the note."""
        if path:
            self.store.replace(DIFFERENCE_FILE, json.dumps({"file": path}).encode())
        else:
            self.store.delete([DIFFERENCE_FILE])

    def manifest(self, reference: ManifestReference) -> Manifest:
        """The manifest of an entry. The bases of manifests are read once."""
        return self._manifests.read(reference)

    def paths(self) -> list[str]:
        """The paths of all files in the data folders, finished or not, without those of Delta logs."""
        paths: set[str] = set()
        for folder in (*DATA_FOLDERS, *self._other_table_folders()):
            paths.update(path for path, _ in self.store.keys(f"{folder}/"))
            paths.update(self.store.unfinished_keys(f"{folder}/"))
        return sorted(path for path in paths if "_delta_log" not in path.split("/"))

    def size(self, path: str) -> int | None:
        """The size of a file in bytes; None if there is no such file."""
        return self.store.size(path)

    def digests(self, path: str, *, with_sha256: bool) -> tuple[str, str]:
        """XXH3-128 and SHA-256 of the whole file, in one reading. The second is empty if it is not
        asked for.
        """
        if with_sha256:
            return xxh3_and_sha256(self.store, path)
        return digest_object(self.store, path), ""

    def outline(self, path: str) -> FileOutline:
        """What a record or quarantine file holds. Every page is read and proved by its checksum."""
        return self.record_scanner().outline(path)

    def record_scanner(self) -> RecordScan:
        """Reads record files."""
        return RecordScan(self.store)

    def state(self, stream: str) -> StateFiles:
        """The state files, each proved by its digest. `stream` is for errors."""
        return StateFiles(self.store, stream)

    def rows(self, path: str, columns: Sequence[str] | None = None) -> Iterator[Record]:
        """The rows of a file. Columns that it does not have are left out."""
        try:
            for row_group in read_row_groups(self.store, path, columns):
                yield from row_group.to_pylist()
        except READ_ERRORS as error:
            raise UnreadableFileError(path, _first_line(error)) from None

    def sessions(self, path: str) -> Iterator[tuple[str, Session]]:
        """The sessions of a state file."""
        try:
            yield from sessions_of_content(self.store.open(path))
        except READ_ERRORS as error:
            raise UnreadableFileError(path, _first_line(error)) from None

    def _read_bytes_or_none(self, path: str) -> bytes | None:
        try:
            return self.store.read(path)
        except FileNotFoundError:
            return None


def _reached_sequence(table: DeltaTable) -> int:
    """The highest entry that a commit of ours on this table names; -1 if there is none."""
    reached = -1
    for commit in table.history():
        mark = commit.get(COMMIT_METADATA_KEY)
        if mark is not None:
            reached = max(reached, int(mark["sequence"]))
    return reached


def _parse_commit(version: int, content: bytes, log_digest: str) -> Commit:
    """One commit from its JSON lines. What cannot be read becomes a `read_error`, not an exception:
    verify goes on with the next commit.
    """
    try:
        lines = content.decode().splitlines()
        actions = [json.loads(line) for line in lines if line.strip()]
        adds = [action["add"] for action in actions if action.get("add")]
        removes = [action["remove"] for action in actions if action.get("remove")]
        files = [*adds, *removes]
        return Commit(
            version=version,
            signature=_parse_signature(actions),
            transaction=_parse_transaction(actions),
            adds=tuple(_parse_add_action(add) for add in adds),
            removes=tuple(f"records/{unquote(remove['path'])}" for remove in removes),
            is_rewrite=bool(files) and not any(file["dataChange"] for file in files),
            log_sha256=log_digest,
        )
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        return Commit(
            version=version,
            read_error=_first_line(error),
            log_sha256=log_digest,
        )


def _parse_signature(actions: Sequence[Mapping[str, Any]]) -> CommitSignature | None:
    for action in actions:
        commit_info = action.get("commitInfo", {})
        if COMMIT_METADATA_KEY in commit_info:
            return msgspec.convert(commit_info[COMMIT_METADATA_KEY], CommitSignature)
    return None


def _parse_transaction(actions: Sequence[Mapping[str, Any]]) -> int | None:
    """The version of our transaction in a commit; None if it has none."""
    for action in actions:
        if "txn" in action and action["txn"]["appId"] == COMMIT_METADATA_KEY:
            version: int | None = action["txn"]["version"]
            return version
    return None


def _parse_add_action(action: Mapping[str, Any]) -> AddedFile:
    stats = json.loads(action.get("stats") or "{}")
    lowest = stats.get("minValues", {})
    highest = stats.get("maxValues", {})
    return AddedFile(
        path=f"records/{unquote(action['path'])}",
        size=action["size"],
        rows=stats.get("numRecords", -1),
        first_offset=lowest.get("offset", -1),
        last_offset=highest.get("offset", -1),
    )


def _first_line(error: BaseException) -> str:
    return first_line(error)[:300]
