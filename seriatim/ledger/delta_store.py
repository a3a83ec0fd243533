"""Delta: the ledger as commits on the records table, by compare-and-set; manifests and the witness.

A commit is made on the same loaded table object that was checked, never reloaded in between; it
carries the stream's app id and no retries: delta-rs would otherwise rebase a zombie's append and
accept it.

Next room: ledger/commit.py decides what a refused commit means.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction
from msgspec import MsgspecError, Struct
from msgspec.structs import replace

from seriatim.engine.findings import Finding
from seriatim.engine.record_kinds import MAIN_TABLE, table_of_path
from seriatim.errors import ConfigError, IntegrityError, ensure
from seriatim.ledger.model import Change, Entry, File, Ledger, Manifest, decode_manifest
from seriatim.ports import CommitConflictError, LedgerHead
from seriatim.storage.files import file_names, sweep_drafts, sync, sync_log, write_file

COMMIT_METADATA_KEY = "seriatim"
MANIFEST_NAME = re.compile(r"\d{10,}-[0-9a-f]{64}\.json\.zst")
TABLE_SETTINGS = {
    "delta.logRetentionDuration": "interval 3650 days",
    "delta.enableExpiredLogCleanup": "false",
    "delta.dataSkippingStatsColumns": "offset",
}
"""The log outlives any audit. delta-rs drops rows under a filter where statistics lack a column
that it expects.
"""


class CommitMark(Struct, frozen=True, kw_only=True):
    """What a Delta commit says of the entry that it is."""

    sequence: int
    manifest: str
    sha256: str
    version: int = -1
    """Of the Delta table."""


class DeltaLedger:
    """The ledger of one stream, below its output path. Without a schema it can only be read."""

    def __init__(
        self, root: Path, schema: pa.Schema | None = None, partition_by: tuple[str, ...] = ()
    ) -> None:
        self.root, self.schema, self.partition_by = root, schema, partition_by
        self.table_path = root / "records"
        self._synced_sequence = -1
        """The last entry of this process whose commit is on the disk for certain."""

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry, and what others committed after it."""
        table = self._load_table(stream)
        if table is None:
            return None
        mark, foreign = self._last_entry(stream, table)
        ledger = self._read_manifest(stream, mark).ledger
        self._refuse_other_schema(stream, table)
        return LedgerHead(ledger, table, foreign)

    def ledger_at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""
        return self.manifest_at(stream, sequence).ledger

    def manifest_at(self, stream: str, sequence: int) -> Manifest:
        """An entry and the whole ledger after it."""
        return self._read_manifest(stream, self._find_mark(stream, sequence))

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than `after`, oldest first."""
        table = self._load_table(stream)
        marks = (
            []
            if table is None
            else list(takewhile(lambda mark: mark.sequence > after, _entry_marks(stream, table)))
        )
        return (self._read_manifest(stream, mark) for mark in reversed(marks))

    def delta_version(self, stream: str, sequence: int) -> int:
        """The Delta version that entry `sequence` made."""
        return self._find_mark(stream, sequence).version

    def put_manifest(self, sequence: int, content: bytes) -> tuple[str, str]:
        """Store a manifest under its own hash."""
        packed = pa.compress(content, codec="zstd", asbytes=True)
        sha256 = hashlib.sha256(packed).hexdigest()
        path = f"manifests/{sequence:010d}-{sha256}.json.zst"
        write_file(self.root / path, packed)
        return path, sha256

    def compare_and_set(
        self, head: LedgerHead | None, entry: Entry, manifest: str, sha256: str
    ) -> None:
        """One Delta commit on exactly `head`'s table object, or `CommitConflictError`; then it is
        seen onto the disk.
        """
        mark = {
            "sequence": entry.sequence,
            "previous": entry.previous,
            "manifest": manifest,
            "sha256": sha256,
        }
        properties = CommitProperties(
            custom_metadata={COMMIT_METADATA_KEY: mark},
            max_commit_retries=0,
            app_transactions=[Transaction("seriatim", entry.sequence)],
        )
        # Nothing is retried inside delta-rs, so the commit becomes the version after the one that was loaded.
        version = 0 if head is None else head.token.version() + 1
        try:
            if head is None:
                self._create_table(properties)
            else:
                self._commit_entry(head.token, entry, properties)
            sync_log(self.table_path, version)
            self._synced_sequence = entry.sequence
        except (DeltaError, OSError) as error:
            raise CommitConflictError(str(error)) from error

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than sequence `after` names this manifest."""
        table = self._load_table(self.root.name)
        for mark in [] if table is None else _entry_marks(self.root.name, table):
            if mark.sequence <= after:
                return False
            if mark.sha256 == sha256:
                return True
        return False

    def differing_files(self) -> list[str]:
        """The file that verify last found to differ, if any."""
        try:
            return [str(json.loads((self.root / "differs.json").read_bytes())["file"])]
        except (OSError, ValueError, KeyError, TypeError):  # verify finds it again
            return []

    def reported_sequence(self) -> int:
        """The last entry whose findings a person was told. Losing the file means telling again,
        never silence.
        """
        try:
            return int(json.loads((self.root / "told.json").read_bytes())["sequence"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return -1

    def put_reported_sequence(self, sequence: int) -> None:
        """Note that everything up to this entry was told."""
        write_file(self.root / "told.json", json.dumps({"sequence": sequence}).encode())

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The record files of the table as of `head`."""
        adds = pa.table(head.token.get_add_actions())
        return {f"records/{path}" for path in adds.column("path").to_pylist()}

    def active_files(self, head: LedgerHead) -> list[File]:
        """The same, with what the log says of each."""
        return _files_of_table(head.token)

    def files_at(self, stream: str, sequence: int) -> list[File]:
        """Those of the table as an earlier entry left it."""
        try:
            return _files_of_table(
                DeltaTable(self.table_path, version=self.delta_version(stream, sequence))
            )
        except DeltaError as error:
            raise _unreadable_error(stream, _first_line(error)) from error

    def sweep(self, head: LedgerHead) -> list[str]:
        """Delete manifests of entries up to `head` that never came to be (an entry has one), and
        drafts.
        """
        swept = [
            *sweep_drafts(self.root),
            *(f"manifests/{name}" for name in sweep_drafts(self.root / "manifests")),
        ]
        by_entry: dict[int, list[str]] = {}
        for name in filter(MANIFEST_NAME.fullmatch, file_names(self.root / "manifests")):
            by_entry.setdefault(int(name.partition("-")[0]), []).append(f"manifests/{name}")
        several = [
            paths
            for number, paths in by_entry.items()
            if number <= head.ledger.sequence and len(paths) > 1
        ]
        named = (
            {mark.manifest for mark in _entry_marks(head.ledger.stream, head.token)}
            if several
            else set()
        )
        dead = {path for paths in several for path in paths} - named
        for path in dead:
            (self.root / path).unlink(missing_ok=True)
        return swept + sorted(dead)

    def witness(self) -> tuple[int, str] | None:
        """The last entry that head.json has seen."""
        try:
            seen = json.loads((self.root / "head.json").read_bytes())
            return int(seen["sequence"]), str(seen["sha256"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OverflowError):
            raise IntegrityError(
                f"{self.root.name}: head.json cannot be read",
                cause="it was changed by somebody else: it is always replaced as a whole",
                next=f"restore {self.root / 'head.json'} from a backup,\nor move it away after looking at the ledger",
            ) from None

    def put_witness(self, sequence: int, sha256: str) -> None:
        """Note the last entry beside the table, once its commit is on the disk: a witness is never
        ahead of its log.
        """
        if (
            sequence != self._synced_sequence
        ):  # another process made that commit, or ours was not confirmed
            sync_log(self.table_path)
        write_file(
            self.root / "head.json", json.dumps({"sequence": sequence, "sha256": sha256}).encode()
        )

    def archive_witness(self, reason: str) -> str:
        """Move head.json away, with the reason in it. Killed in between, the witness is still
        there.
        """
        seen = json.loads((self.root / "head.json").read_bytes())
        path = f"head-{seen['sequence']}-{seen['sha256'][:12]}.json"
        write_file(self.root / path, json.dumps({**seen, "accepted because": reason}).encode())
        (self.root / "head.json").unlink()
        sync(self.root)
        return path

    def _create_table(self, properties: CommitProperties) -> None:
        ensure(self.schema is not None, "a ledger is made with a schema")
        assert self.schema is not None
        DeltaTable.create(
            self.table_path,
            schema=self.schema,
            mode="error",
            partition_by=list(self.partition_by) or None,
            configuration=TABLE_SETTINGS,
            commit_properties=properties,
        )

    def _commit_entry(self, table: DeltaTable, entry: Entry, properties: CommitProperties) -> None:
        data_change = entry.kind != "compact"
        adds = [
            self._add_action(change, file, data_change)
            for change in entry.changes
            for file in change.records
        ]
        table.create_write_transaction(
            [*adds, *self._remove_actions(table, entry.removed_paths, data_change)],
            "append",
            table.schema(),
            partition_by=list(self.partition_by) or None,
            commit_properties=properties,
        )

    def _remove_actions(
        self, table: DeltaTable, paths: Iterable[str], data_change: bool
    ) -> list[RemoveAction]:
        """Removals, each of a file that is in the table: delta-rs itself takes any path."""
        wanted = {
            path.removeprefix("records/") for path in paths if table_of_path(path) == MAIN_TABLE
        }
        if not wanted:
            return []
        active = {row["path"]: row for row in pa.table(table.get_add_actions()).to_pylist()}
        if gone := sorted(wanted - set(active)):
            raise CommitConflictError(f"{gone[0]} is not in the table: another run has replaced it")
        now = int(time.time() * 1000)
        values = {
            path: {name: str(active[path]["partition"][name]) for name in self.partition_by}
            for path in wanted
        }
        return [
            RemoveAction(path, data_change, now, active[path]["size_bytes"], values[path])
            for path in wanted
        ]

    def _add_action(self, change: Change, file: File, data_change: bool) -> AddAction:
        full = self.root / file.path
        if not full.is_file() or full.stat().st_size != file.size_bytes:
            raise CommitConflictError(
                f"{file.path} is not there: another run has swept it, or the disk lost it"
            )
        partition = {"topic": change.partition.topic, "partition": str(change.partition.number)}
        stats = {
            "numRecords": file.rows,
            "minValues": {"offset": file.first_offset},
            "maxValues": {"offset": file.last_offset},
        }
        return AddAction(
            path=file.path.removeprefix("records/"),
            size=file.size_bytes,
            partition_values={name: partition[name] for name in self.partition_by},
            modification_time=int(time.time() * 1000),
            data_change=data_change,
            stats=json.dumps(stats),
        )

    def _load_table(self, stream: str) -> DeltaTable | None:
        if not DeltaTable.is_deltatable(str(self.table_path)):
            return None
        try:
            return DeltaTable(self.table_path)
        except DeltaError as error:
            raise _unreadable_error(stream, _first_line(error)) from error

    def _last_entry(self, stream: str, table: DeltaTable) -> tuple[CommitMark, list[Finding]]:
        """The newest commit of ours, and findings for data changed by commits of others after it."""
        foreign: list[Finding] = []
        for commit in _commit_history(stream, table):
            if COMMIT_METADATA_KEY in commit:
                return _parse_mark(stream, commit), foreign
            if self._has_data_change(commit["version"]):
                foreign.append(_foreign_finding(commit))
        raise ConfigError(
            f"{stream}: {self.table_path} is a Delta table that Seriatim did not make",
            next="give the stream an output path of its own",
        )

    def _has_data_change(self, version: int) -> bool:
        """Whether a commit added or removed rows; rewriting files alone (OPTIMIZE) does not count."""
        log = self.table_path / "_delta_log" / f"{version:020d}.json"
        actions = [json.loads(line) for line in log.read_text().splitlines() if line.strip()]
        files = [action.get("add") or action.get("remove") for action in actions]
        return any(file.get("dataChange") for file in files if file)

    def _find_mark(self, stream: str, sequence: int) -> CommitMark:
        table = self._load_table(stream)
        if table is not None and sequence >= 0:
            for mark in _entry_marks(stream, table):
                if mark.sequence == sequence:
                    return mark
                if mark.sequence < sequence:
                    break
        raise ConfigError(
            f"{stream}: there is no ledger entry {sequence}",
            next=f"`seriatim status {stream}` shows the last",
        )

    def _read_manifest(self, stream: str, mark: CommitMark) -> Manifest:
        """A manifest, proved by its hash, which its ledger then knows."""
        path, sha256 = mark.manifest, mark.sha256
        try:
            packed = (self.root / path).read_bytes()
        except OSError as error:
            raise _unreadable_error(stream, f"manifest {path}: {error.strerror}") from None
        if hashlib.sha256(packed).hexdigest() != sha256:
            raise _unreadable_error(
                stream, f"manifest {path} is not what entry {mark.sequence} names: its hash differs"
            )
        try:
            manifest = decode_manifest(
                pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
            )
        except MsgspecError as error:
            raise _unreadable_error(stream, f"manifest {path}: {error}") from error
        if manifest.entry.sequence != mark.sequence:
            raise _unreadable_error(
                stream,
                f"manifest {path} is of entry {manifest.entry.sequence}, not {mark.sequence}",
            )
        if manifest.ledger.stream != stream:
            other = manifest.ledger.stream
            raise ConfigError(
                f"{stream}: its output path holds stream {other!r}",
                next="give each stream its own path",
            )
        return replace(manifest, ledger=replace(manifest.ledger, sha256=sha256))

    def _refuse_other_schema(self, stream: str, table: DeltaTable) -> None:
        if self.schema is None:
            return
        found = {column.name: str(column.type) for column in pa.schema(table.schema().to_arrow())}
        wanted = {column.name: str(column.type) for column in self.schema}
        if table.metadata().partition_columns != list(self.partition_by):
            raise ConfigError(
                f"{stream}: the records are partitioned by {table.metadata().partition_columns}, "
                f"the stream file says {list(self.partition_by)}",
                next="set output.partition_by back, or give the stream a new output path",
            )
        for name in dict.fromkeys([*wanted, *found]):
            if _normalized_type(found.get(name)) != _normalized_type(wanted.get(name)):
                raise ConfigError(
                    f"{stream}: column {name!r} is {found.get(name, 'not there')} in the records table, "
                    f"{wanted.get(name, 'not there')} by the stream file and its machine",
                    next="set the columns back, or give the stream a new output path",
                )


def _files_of_table(table: DeltaTable) -> list[File]:
    """A table's files, with what the log says of each."""
    return [
        File(
            path=f"records/{add['path']}",
            size_bytes=add["size_bytes"],
            rows=add["num_records"],
            digest="",
            first_offset=add["min"]["offset"],
            last_offset=add["max"]["offset"],
        )
        for add in pa.table(table.get_add_actions()).to_pylist()
    ]


def _normalized_type(kind: str | None) -> str | None:
    """Arrow types as Delta tells them: sizes of offsets and units of time aside."""
    return (
        None
        if kind is None
        else kind.replace("large_", "").replace("_view", "").replace("element", "item")
    )


def _commit_history(stream: str, table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Commits, newest first: a few, then all."""
    try:
        first = table.history(16)
        yield from first
        if len(first) == 16:
            yield from table.history()[16:]
    except (DeltaError, ValueError) as error:
        raise _unreadable_error(stream, _first_line(error)) from error


def _entry_marks(stream: str, table: DeltaTable) -> Iterator[CommitMark]:
    """Entries, newest first."""
    return (
        _parse_mark(stream, commit)
        for commit in _commit_history(stream, table)
        if COMMIT_METADATA_KEY in commit
    )


def _parse_mark(stream: str, commit: dict[str, Any]) -> CommitMark:
    try:
        return replace(
            msgspec.convert(commit[COMMIT_METADATA_KEY], CommitMark), version=commit["version"]
        )
    except MsgspecError as error:
        raise _unreadable_error(
            stream, f"the mark of Delta version {commit['version']}: {error}"
        ) from error


def _first_line(error: Exception) -> str:
    """Without the frames of delta-rs below it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _foreign_finding(commit: dict[str, Any]) -> Finding:
    return Finding(
        finding="foreign",
        found=f"Delta version {commit['version']}, {commit.get('operation', 'an operation')}",
        expected="no commits but Seriatim's on the records table",
        cause=f"made by {commit.get('engineInfo') or commit.get('clientVersion') or 'somebody else'}",
    )


def _unreadable_error(stream: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{stream}: the ledger cannot be read",
        cause=reason[:400],
        next="restore records/_delta_log and manifests/ from a backup; nothing starts again from 0 by itself",
    )
