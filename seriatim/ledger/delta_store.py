"""The ledger in Delta: entries are commits on the records table, made by compare-and-set. The
manifests and the witness are files beside it.

A commit is made on the same loaded table object that was checked, never reloaded in between. It
carries the stream's app id and no retries: delta-rs would otherwise rebase the append of a run that
was thought dead, and accept it.

Next: ledger/commit.py decides what a refused commit means.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction
from msgspec import MsgspecError, Struct
from msgspec.structs import replace

from seriatim.engine.findings import Finding
from seriatim.engine.record_kinds import MAIN_TABLE, table_of_path
from seriatim.errors import ConfigError, IntegrityError, ensure
from seriatim.ledger.model import Change, Entry, File, Ledger, Manifest, decode_manifest
from seriatim.ports import CommitConflictError, LedgerHead
from seriatim.storage.delta import (
    COMMIT_METADATA_KEY,
    add_actions_by_path,
    column_types,
    commit_history,
    commit_properties,
    first_line,
    table_column_types,
)
from seriatim.storage.files import file_names, sweep_drafts, sync, sync_log, write_file

MANIFEST_NAME = re.compile(r"\d{10,}-[0-9a-f]{64}\.json\.zst")
TABLE_SETTINGS = {
    "delta.logRetentionDuration": "interval 3650 days",
    "delta.enableExpiredLogCleanup": "false",
    "delta.dataSkippingStatsColumns": "offset",
}
"""The log is kept longer than any audit looks back. Statistics have `offset` alone: delta-rs drops
rows under a filter where the statistics of a file lack a column that it expects.
"""


class CommitMark(Struct, frozen=True, kw_only=True):
    """What a Delta commit says about its ledger entry, in its metadata."""

    sequence: int
    manifest: str
    sha256: str
    version: int = -1
    """The version of the Delta table that this commit made."""


class DeltaLedger:
    """The ledger of one stream, below the stream's output path. Without a schema it can only be
    read.
    """

    def __init__(
        self,
        root: Path,
        schema: pa.Schema | None = None,
        partition_by: tuple[str, ...] = (),
    ) -> None:
        self.root = root
        self.schema = schema
        self.partition_by = partition_by
        self.table_path = root / "records"
        self._synced_sequence = -1
        """The last entry that this process committed and synced to the disk."""

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry, and findings for what others committed after it. None: no ledger yet."""
        table = self._load_table(stream)
        if table is None:
            return None
        mark, foreign_findings = self._last_entry(stream, table)
        ledger = self._read_manifest(stream, mark).ledger
        self._refuse_other_schema(stream, table)
        return LedgerHead(ledger, table, foreign_findings)

    def ledger_at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""
        return self.manifest_at(stream, sequence).ledger

    def manifest_at(self, stream: str, sequence: int) -> Manifest:
        """An entry and the whole ledger after it."""
        return self._read_manifest(stream, self._find_mark(stream, sequence))

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than `after`, oldest first."""
        table = self._load_table(stream)
        marks: list[CommitMark] = []
        if table is not None:
            for mark in _entry_marks(stream, table):
                if mark.sequence <= after:
                    break
                marks.append(mark)
        return (self._read_manifest(stream, mark) for mark in reversed(marks))

    def delta_version(self, stream: str, sequence: int) -> int:
        """The Delta version that entry `sequence` made."""
        return self._find_mark(stream, sequence).version

    def put_manifest(self, sequence: int, content: bytes) -> tuple[str, str]:
        """Store a manifest under its own hash. Returns its path and the hash."""
        packed = pa.compress(content, codec="zstd", asbytes=True)
        sha256 = hashlib.sha256(packed).hexdigest()
        path = f"manifests/{sequence:010d}-{sha256}.json.zst"
        write_file(self.root / path, packed)
        return path, sha256

    def compare_and_set(
        self,
        head: LedgerHead | None,
        entry: Entry,
        manifest: str,
        sha256: str,
    ) -> None:
        """Make one Delta commit on exactly the table object of `head`, and sync it to the disk.
        Raises `CommitConflictError` if either is not confirmed.
        """
        mark = {
            "sequence": entry.sequence,
            "previous": entry.previous,
            "manifest": manifest,
            "sha256": sha256,
        }
        properties = commit_properties(mark, entry.sequence)
        # Nothing is retried inside delta-rs, so the commit becomes the version after the one that
        # was loaded.
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
        if table is None:
            return False
        for mark in _entry_marks(self.root.name, table):
            if mark.sequence <= after:
                return False
            if mark.sha256 == sha256:
                return True
        return False

    def differing_files(self) -> list[str]:
        """The file that `verify` reported as different from its entry, if any."""
        try:
            report = json.loads((self.root / "differs.json").read_bytes())
            return [str(report["file"])]
        except (OSError, ValueError, KeyError, TypeError):
            # A report that cannot be read is no loss: verify finds the difference again.
            return []

    def reported_sequence(self) -> int:
        """The last entry whose findings were reported to a person; -1 if none.

        If the file is lost, findings are reported again. They are never left out.
        """
        try:
            reported = json.loads((self.root / "told.json").read_bytes())
            return int(reported["sequence"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return -1

    def put_reported_sequence(self, sequence: int) -> None:
        """Note that the findings of every entry up to this one were reported."""
        write_file(self.root / "told.json", json.dumps({"sequence": sequence}).encode())

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The paths of the record files in the table as of `head`."""
        adds = pa.table(head.token.get_add_actions())
        return {f"records/{path}" for path in adds.column("path").to_pylist()}

    def active_files(self, head: LedgerHead) -> list[File]:
        """The record files in the table as of `head`, with what the Delta log says about each."""
        return _files_of_table(head.token)

    def files_at(self, stream: str, sequence: int) -> list[File]:
        """The record files in the table after an earlier entry."""
        version = self.delta_version(stream, sequence)
        try:
            return _files_of_table(DeltaTable(self.table_path, version=version))
        except DeltaError as error:
            raise _unreadable_error(stream, first_line(error)) from error

    def sweep(self, head: LedgerHead) -> list[str]:
        """Delete drafts, and manifests of entries up to `head` that were never committed. Returns
        the deleted paths.
        """
        manifest_folder = self.root / "manifests"
        swept = list(sweep_drafts(self.root))
        swept += [f"manifests/{name}" for name in sweep_drafts(manifest_folder)]
        # An entry has exactly one manifest. Only where there are several of one number is it worth
        # reading the whole log to learn which of them was committed.
        candidates: set[str] = set()
        for sequence, paths in self._manifest_paths_by_sequence().items():
            if sequence <= head.ledger.sequence and len(paths) > 1:
                candidates.update(paths)
        if not candidates:
            return swept
        marks = _entry_marks(head.ledger.stream, head.token)
        committed = {mark.manifest for mark in marks}
        uncommitted = sorted(candidates - committed)
        for path in uncommitted:
            (self.root / path).unlink(missing_ok=True)
        return swept + uncommitted

    def _manifest_paths_by_sequence(self) -> dict[int, list[str]]:
        paths_by_sequence: dict[int, list[str]] = {}
        for name in file_names(self.root / "manifests"):
            if MANIFEST_NAME.fullmatch(name):
                sequence = int(name.partition("-")[0])
                paths_by_sequence.setdefault(sequence, []).append(f"manifests/{name}")
        return paths_by_sequence

    def witness(self) -> tuple[int, str] | None:
        """The last entry that head.json knows, as its sequence and hash. None: no such file."""
        try:
            noted = json.loads((self.root / "head.json").read_bytes())
            return int(noted["sequence"]), str(noted["sha256"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OverflowError):
            raise IntegrityError(
                f"{self.root.name}: head.json cannot be read",
                cause="it was changed by somebody else: it is always replaced as a whole",
                next=f"restore {self.root / 'head.json'} from a backup,\n"
                "or move it away after looking at the ledger",
            ) from None

    def put_witness(self, sequence: int, sha256: str) -> None:
        """Write the last entry to head.json, after its commit is on the disk."""
        if sequence != self._synced_sequence:
            # Another process made that commit, or ours was not confirmed. It may still be in the
            # page cache alone, and a witness must never be ahead of its log after a power cut.
            sync_log(self.table_path)
        content = json.dumps({"sequence": sequence, "sha256": sha256})
        write_file(self.root / "head.json", content.encode())

    def archive_witness(self, reason: str) -> str:
        """Move head.json to a file that also has the reason, and return that file's path."""
        noted = json.loads((self.root / "head.json").read_bytes())
        path = f"head-{noted['sequence']}-{noted['sha256'][:12]}.json"
        noted["accepted because"] = reason
        # The copy is written before the original goes: a process killed in between still has its
        # witness.
        write_file(self.root / path, json.dumps(noted).encode())
        (self.root / "head.json").unlink()
        sync(self.root)
        return path

    def _create_table(self, properties: CommitProperties) -> None:
        ensure(self.schema is not None, "a ledger is created with a schema")
        assert self.schema is not None
        DeltaTable.create(
            self.table_path,
            schema=self.schema,
            mode="error",
            partition_by=list(self.partition_by) or None,
            configuration=TABLE_SETTINGS,
            commit_properties=properties,
        )

    def _commit_entry(
        self,
        table: DeltaTable,
        entry: Entry,
        properties: CommitProperties,
    ) -> None:
        data_change = entry.kind != "compact"
        actions: list[AddAction | RemoveAction] = []
        for change in entry.changes:
            actions += [self._add_action(change, file, data_change) for file in change.records]
        actions.extend(self._remove_actions(table, entry.removed_paths, data_change))
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            partition_by=list(self.partition_by) or None,
            commit_properties=properties,
        )

    def _remove_actions(
        self,
        table: DeltaTable,
        paths: Iterable[str],
        data_change: bool,
    ) -> list[RemoveAction]:
        """The actions that remove these files. A file that is not in the table is a conflict:
        delta-rs itself would remove any path without a complaint.
        """
        removed = set()
        for path in paths:
            if table_of_path(path) == MAIN_TABLE:
                removed.add(path.removeprefix("records/"))
        if not removed:
            return []
        active = add_actions_by_path(table)
        not_active = sorted(removed - set(active))
        if not_active:
            raise CommitConflictError(
                f"{not_active[0]} is not in the table: another run has replaced it"
            )
        now_ms = int(time.time() * 1000)
        actions = []
        for path in removed:
            add = active[path]
            values = {name: str(add["partition"][name]) for name in self.partition_by}
            actions.append(RemoveAction(path, data_change, now_ms, add["size_bytes"], values))
        return actions

    def _add_action(
        self,
        change: Change,
        file: File,
        data_change: bool,
    ) -> AddAction:
        full_path = self.root / file.path
        if not full_path.is_file() or full_path.stat().st_size != file.size_bytes:
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
            raise _unreadable_error(stream, first_line(error)) from error

    def _last_entry(self, stream: str, table: DeltaTable) -> tuple[CommitMark, list[Finding]]:
        """The newest commit of Seriatim, and findings for later commits of others that changed
        data.
        """
        foreign_findings: list[Finding] = []
        for commit in _commits(stream, table):
            if COMMIT_METADATA_KEY in commit:
                return _parse_mark(stream, commit), foreign_findings
            if self._has_data_change(commit["version"]):
                foreign_findings.append(_foreign_finding(commit))
        raise ConfigError(
            f"{stream}: {self.table_path} is a Delta table that Seriatim did not make",
            next="give the stream an output path of its own",
        )

    def _has_data_change(self, version: int) -> bool:
        """Whether a commit added or removed rows; rewriting files alone (OPTIMIZE) does not count."""
        commit_file = self.table_path / "_delta_log" / f"{version:020d}.json"
        for line in commit_file.read_text().splitlines():
            if not line.strip():
                continue
            action = json.loads(line)
            file_action = action.get("add") or action.get("remove")
            if file_action and file_action.get("dataChange"):
                return True
        return False

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
        """The manifest that a commit names. Its hash, its entry and its stream must be as named."""
        path = mark.manifest
        try:
            packed = (self.root / path).read_bytes()
        except OSError as error:
            raise _unreadable_error(stream, f"manifest {path}: {error.strerror}") from None
        if hashlib.sha256(packed).hexdigest() != mark.sha256:
            raise _unreadable_error(
                stream, f"manifest {path} is not what entry {mark.sequence} names: its hash differs"
            )
        content = pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
        try:
            manifest = decode_manifest(content)
        except MsgspecError as error:
            raise _unreadable_error(stream, f"manifest {path}: {error}") from error
        if manifest.entry.sequence != mark.sequence:
            raise _unreadable_error(
                stream,
                f"manifest {path} is of entry {manifest.entry.sequence}, not {mark.sequence}",
            )
        if manifest.ledger.stream != stream:
            raise ConfigError(
                f"{stream}: its output path holds stream {manifest.ledger.stream!r}",
                next="give each stream its own path",
            )
        # A manifest cannot contain its own hash, so the ledger gets it here.
        ledger = replace(manifest.ledger, sha256=mark.sha256)
        return replace(manifest, ledger=ledger)

    def _refuse_other_schema(self, stream: str, table: DeltaTable) -> None:
        if self.schema is None:
            return
        partition_columns = table.metadata().partition_columns
        if partition_columns != list(self.partition_by):
            raise ConfigError(
                f"{stream}: the records are partitioned by {partition_columns}, "
                f"the stream file says {list(self.partition_by)}",
                next="set output.partition_by back, or give the stream a new output path",
            )
        types_in_table = table_column_types(table)
        types_by_stream = column_types(self.schema)
        for name in dict.fromkeys([*types_by_stream, *types_in_table]):
            table_type = types_in_table.get(name)
            stream_type = types_by_stream.get(name)
            if table_type != stream_type:
                raise ConfigError(
                    f"{stream}: column {name!r} is {table_type or 'not there'} in the records"
                    f" table, {stream_type or 'not there'} by the stream file and its machine",
                    next="set the columns back, or give the stream a new output path",
                )


def _files_of_table(table: DeltaTable) -> list[File]:
    """The files of a table, with what the Delta log says about each."""
    files = []
    for add in add_actions_by_path(table).values():
        file = File(
            path=f"records/{add['path']}",
            size_bytes=add["size_bytes"],
            rows=add["num_records"],
            digest="",
            first_offset=add["min"]["offset"],
            last_offset=add["max"]["offset"],
        )
        files.append(file)
    return files


def _commits(stream: str, table: DeltaTable) -> Iterator[dict[str, Any]]:
    """All commits of a table, newest first."""
    try:
        yield from commit_history(table)
    except (DeltaError, ValueError) as error:
        raise _unreadable_error(stream, first_line(error)) from error


def _entry_marks(stream: str, table: DeltaTable) -> Iterator[CommitMark]:
    """The marks of all entries, newest first. Commits of others are left out."""
    for commit in _commits(stream, table):
        if COMMIT_METADATA_KEY in commit:
            yield _parse_mark(stream, commit)


def _parse_mark(stream: str, commit: dict[str, Any]) -> CommitMark:
    try:
        mark = msgspec.convert(commit[COMMIT_METADATA_KEY], CommitMark)
    except MsgspecError as error:
        raise _unreadable_error(
            stream, f"the mark of Delta version {commit['version']}: {error}"
        ) from error
    return replace(mark, version=commit["version"])


def _foreign_finding(commit: dict[str, Any]) -> Finding:
    operation = commit.get("operation", "an operation")
    author = commit.get("engineInfo") or commit.get("clientVersion") or "somebody else"
    return Finding(
        finding="foreign",
        found=f"Delta version {commit['version']}, {operation}",
        expected="no commits but Seriatim's on the records table",
        cause=f"made by {author}",
    )


def _unreadable_error(stream: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{stream}: the ledger cannot be read",
        cause=reason[:400],
        next="restore records/_delta_log and manifests/ from a backup; nothing starts again from 0"
        " by itself",
    )
