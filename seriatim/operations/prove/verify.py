"""Verify: a stream's output looked at anew, independent of what any run remembered. Changes nothing
but its sign-off.

1. the Delta log: every commit, the chain of entries, the witness, what was signed off before
2. the table: its files are those that entries added and did not remove, and readers see the same
3. the entries since the sign-off: each manifest by its hash, the ledger it makes, certificates that join
4. their files, and the state files of now: size, digest, page checksums, rows, order, counts
5. records folded to state, where the machine says how
6. files that nobody names: told, never damage
7. Kafka, if asked: the ranges it still has, by their digests
8. the sign-off, after a clean pass alone

Next room: operations/prove/chain.py and operations/prove/rules.py have the rules;
operations/prove/compare_kafka.py is step 7; cli/verify.py shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.machine import Runner, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import MAIN_TABLE, table_of_path, table_of_record
from seriatim.engine.table import TableMachine
from seriatim.errors import ConfigError, SeriatimError
from seriatim.ledger.model import Change, File, Ledger, Manifest, decode_manifest
from seriatim.operations.prove.chain import (
    Commit,
    CommitSignature,
    check_chain,
    check_ledger_step,
    check_manifest,
    check_rewrites,
    check_table_files,
    check_witness,
    replay_active_files,
    replay_expected_files,
)
from seriatim.operations.prove.difference import (
    REPAIR_ADVICE,
    RESTORE_ADVICE,
    RESTORE_LOG_ADVICE,
    Difference,
    DifferenceError,
)
from seriatim.operations.prove.rules import (
    CommittedFile,
    FileOutline,
    RowsOfRecords,
    SignOff,
    check_content,
    check_counts,
    check_file,
    check_other_tables,
    check_overlaps,
    check_sign_off,
    check_state,
    find_orphans,
    normalize_row,
    other_table_paths,
)
from seriatim.ports import Audit, UnreadableFileError

ProgressCallback = Callable[[int, int], None]
ORPHANS_REPORTED_MAX = 20


class VerifyTableSpec(Struct, frozen=True):
    """A machine, as far as folding its records needs it."""

    key_columns: tuple[str, ...]
    columns: tuple[str, ...]
    load: Callable[[bytes, int], Mapping[Any, tuple[Any, ...]]]
    """The rows of a saved state, by key."""
    gone: Mapping[str, Any] = field(default_factory=lambda: {"op": "delete"})
    """A record with these values takes its row away."""
    is_own: bool = False
    """A machine of the user's: `load` gives what its `end` would take back, which may be more rows
    than there are.
    """


def foldable(runner: Runner) -> VerifyTableSpec | None:
    """How a machine's records fold to its state; None: it does not say.

    Of the stock machine's state all rows are known. What a user's state holds is known only by
    `end`, which takes every row back: so its record must have a `row_key` and a `row_gone`.
    """
    keyed = runner.row_key_spec
    if keyed is None:
        return None
    if isinstance(runner, TableMachine):
        return VerifyTableSpec(keyed.key, keyed.columns, runner.load)
    if not isinstance(runner, UserMachine) or not runner.has_end or not keyed.deleted_when:
        return None
    positions = [list(runner.columns).index(column) for column in keyed.key]

    def rows_to_take_back(saved: bytes, version: int) -> dict[Any, tuple[Any, ...]]:
        records = runner.end(runner.load(saved, version))
        rows = [
            normalize_row(record) for record in records if table_of_record(record) == MAIN_TABLE
        ]
        if len(positions) == 1:
            return {row[positions[0]]: row for row in rows}
        return {tuple(row[position] for position in positions): row for row in rows}

    return VerifyTableSpec(
        keyed.key, keyed.columns, rows_to_take_back, gone=keyed.deleted_when, is_own=True
    )


class VerifyResult(Struct, kw_only=True):
    """What was looked at, and what was found."""

    sequence: int = -1
    since: int = -1
    """Up to which entry an earlier pass had signed off."""
    entries: int = 0
    files: int = 0
    bytes: int = 0
    records: int = 0
    """Of the files that are in the table `records` now; those of files that were replaced are none
    of it.
    """
    sessions: int = 0
    deleted_files: int = 0
    """Files that left the table, or state that was replaced, and that are deleted since: no damage."""
    orphans: int = 0
    compared_messages: int = 0
    """Messages that were read again from Kafka."""
    has_folded_records: bool = False
    notes: list[str] = field(default_factory=list)
    warnings: list[Difference] = field(default_factory=list)
    difference: Difference | None = None


class Verification:
    """One pass over one stream."""

    def __init__(
        self,
        stream: str,
        audit: Audit,
        *,
        table_spec: VerifyTableSpec | None = None,
        from_first_entry: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.stream, self.audit, self.table_spec, self.from_first_entry = (
            stream,
            audit,
            table_spec,
            from_first_entry,
        )
        self.progress = progress or (lambda _done, _total: None)
        self.result = VerifyResult()
        self.commits: list[Commit] = []
        self.signatures: dict[int, CommitSignature] = {}
        self.sign_off, self.kafka_signed_sequence = SignOff(), -1
        self.last_ledger = self.signed_ledger = Ledger(stream=stream)
        self.entries: list[Manifest] = []
        """Those since the sign-off."""
        self.committed_files: dict[str, CommittedFile] = {}
        """Files that they name, in order."""
        self.outlines: dict[str, FileOutline] = {}
        self.active_paths: set[str] = set()

    def run(self, before_sign_off: Callable[[Verification], None] | None = None) -> VerifyResult:
        """All of it, up to the first difference. `after` is asked before the sign-off: it may raise
        `DifferenceError`.
        """
        try:
            self.open_log()
            self._check_table()
            self._check_entries()
            self._check_files()
            self._check_records_fold_to_state()
            self._report_orphans()
            if before_sign_off is not None:
                before_sign_off(self)
        except DifferenceError as differs:
            self.result.difference = differs.difference
            self.audit.put_differing_file(differs.difference.file)
            return self.result
        self.audit.put_differing_file("")
        self._write_sign_off()
        return self.result

    def take_differences(self, differences: Iterable[Difference]) -> None:
        """Warnings are kept, the first error ends it."""
        for difference in differences:
            if difference.level == "error":
                raise DifferenceError(difference)
            self.result.warnings.append(difference)

    def open_log(self) -> None:
        """Step 1. The log comes last: a run that commits meanwhile only moves it ahead, which is
        fine.
        """
        witness, content, self.other_tables = (
            self.audit.witness(),
            self.audit.sign_off(),
            self.audit.other_tables(),
        )
        self.commits = self.audit.commits()
        self.signatures = {
            commit.signature.sequence: commit.signature
            for commit in self.commits
            if commit.signature
        }
        if not self.commits and witness is None:
            raise ConfigError(
                f"{self.stream}: it was never run", next=f"seriatim run {self.stream}"
            )
        self.take_differences(check_chain(self.commits))
        self.take_differences(check_witness(witness, self.signatures))
        if content is None:
            return
        kept = SignOff.from_bytes(content)
        if kept is None:
            told = "everything is looked at again; a clean pass writes it anew"
            self.take_differences(
                [
                    Difference(
                        description="the sign-off was changed",
                        file="verified.json",
                        level="warning",
                        next=told,
                    )
                ]
            )
            return
        changed = list(
            check_sign_off(
                kept, {commit.version: commit for commit in self.commits}, self.signatures
            )
        )
        self.take_differences(
            replace(one, level="warning") if self.from_first_entry else one for one in changed
        )
        self.kafka_signed_sequence = -1 if changed else kept.kafka_sequence
        if not self.from_first_entry:
            self.sign_off = kept

    def _check_table(self) -> None:
        """Step 2."""
        expected, self.active_paths = (
            replay_expected_files(self.commits),
            replay_active_files(self.commits),
        )
        try:
            readers = self.audit.paths_readers_see(self.commits[-1].version)
        except UnreadableFileError as trouble:
            where = "records/_delta_log"
            self.take_differences(
                [
                    Difference(
                        description="readers cannot open the table",
                        file=where,
                        found=str(trouble),
                        next=RESTORE_ADVICE,
                    )
                ]
            )
        self.take_differences(check_table_files(expected, self.active_paths, readers))
        self.take_differences(check_rewrites(self.commits))
        for path, added in expected.items():
            size = self.audit.size(path)
            if size != added.size:
                what = "a file is missing" if size is None else "a file has another size"
                found = "" if size is None else f"{size} bytes"
                self.take_differences(
                    [
                        Difference(
                            description=what,
                            file=path,
                            expected=f"{added.size} bytes",
                            found=found,
                            next=REPAIR_ADVICE,
                        )
                    ]
                )

    def _check_entries(self) -> None:
        """Step 3. Where files were replaced since the sign-off, or its state is gone, everything is
        looked at.
        """
        last = max(self.signatures, default=-1)
        self._read_entries_since(self.sign_off.sequence)
        if self.sign_off.sequence >= 0 and (
            any(m.entry.removed_paths for m in self.entries)
            or not self._has_state(self.signed_ledger)
        ):
            self.result.notes.append(
                "files were replaced since the sign-off, so everything is looked at again"
            )
            self.sign_off = replace(self.sign_off, sequence=-1)
            self._read_entries_since(-1)
        self.last_ledger = self.entries[-1].ledger if self.entries else self.signed_ledger
        self.result.sequence, self.result.since, self.result.entries = (
            last,
            self.sign_off.sequence,
            len(self.entries),
        )

    def _read_entries_since(self, signed_sequence: int) -> None:
        self.entries, self.committed_files = [], {}
        self.signed_ledger = before = (
            self.manifest(signed_sequence).ledger
            if signed_sequence >= 0
            else Ledger(stream=self.stream)
        )
        by_sequence = {
            commit.signature.sequence: commit for commit in self.commits if commit.signature
        }
        for sequence in range(signed_sequence + 1, max(self.signatures, default=-1) + 1):
            manifest, commit = self.manifest(sequence), by_sequence[sequence]
            self.take_differences(
                check_manifest(self.signatures[sequence], commit, manifest, self.stream)
            )
            self.take_differences(check_ledger_step(manifest, before))
            self.entries.append(manifest)
            before = manifest.ledger
            for change in manifest.entry.changes:
                for file in change.files():
                    self.committed_files.setdefault(
                        file.path, CommittedFile(file, sequence, change)
                    )

    def manifest(self, sequence: int) -> Manifest:
        """An entry's manifest, proved by the hash that the chain has."""
        sign = self.signatures[sequence]

        def damaged(what: str, expected: str, found: str) -> DifferenceError:
            return DifferenceError(
                Difference(
                    description=what,
                    file=sign.manifest,
                    sequence=sequence,
                    expected=expected,
                    found=found,
                    next=RESTORE_ADVICE,
                )
            )

        try:
            sha256, content = self.audit.manifest(sign.manifest)
        except UnreadableFileError as trouble:
            raise damaged("a manifest cannot be read", "", str(trouble)) from None
        if sha256 != sign.sha256:
            raise damaged("a manifest is damaged", sign.sha256, sha256)
        try:
            return decode_manifest(content)
        except ConfigError:
            raise
        except (msgspec.MsgspecError, SeriatimError) as error:
            raise damaged("a manifest cannot be read", "", str(error)) from None

    def _has_state(self, ledger: Ledger) -> bool:
        files = [file for account in ledger.partitions.values() for file in account.state]
        return all(self.audit.size(file.path) == file.size_bytes for file in files)

    def _check_files(self) -> None:
        """Step 4."""
        wanted, current = dict(self.committed_files), set()
        for place, account in self.last_ledger.partitions.items():
            for file in account.state:
                current.add(file.path)
                wanted.setdefault(
                    file.path,
                    CommittedFile(
                        file, self.last_ledger.sequence, _placeholder_change(place, file)
                    ),
                )
        twins = {known.file.digest: path for path, known in wanted.items()}
        total, kinds = sum(known.file.size_bytes for known in wanted.values()), self._entry_kinds()
        current |= other_table_paths(self.entries, self.last_ledger.sequence)
        for path, known in wanted.items():
            needed = path in self.active_paths or path in current or path.startswith("kept/")
            self._check_file(known, twins, kinds.get(known.sequence, ""), is_needed=needed)
            self.progress(self.result.bytes, total)
        current |= self.active_paths
        active = [
            (self.committed_files[path], one)
            for path, one in self.outlines.items()
            if path in current
        ]
        for table in {table_of_path(known.file.path) for known, _ in active}:
            self.take_differences(
                check_overlaps(
                    (known, one) for known, one in active if table_of_path(known.file.path) == table
                )
            )
        if self.sign_off.sequence < 0:
            self.take_differences(check_other_tables(self.other_tables, self.entries))

    def _entry_kinds(self) -> dict[int, str]:
        return {manifest.entry.sequence: manifest.entry.kind for manifest in self.entries}

    def _check_file(
        self,
        committed_file: CommittedFile,
        paths_by_digest: Mapping[str, str],
        kind: str,
        *,
        is_needed: bool,
    ) -> None:
        path, size = committed_file.file.path, self.audit.size(committed_file.file.path)
        self.result.bytes += committed_file.file.size_bytes
        if size is None and not is_needed:
            self.result.deleted_files += 1
            return
        self.take_differences(
            check_file(
                committed_file,
                size,
                "" if size is None else self.audit.digest(path),
                paths_by_digest,
            )
        )
        self.result.files += 1
        in_slice = kind in ("start", "slice")
        try:
            if path.startswith("state/"):
                self._check_state_file(committed_file, in_slice=in_slice)
                return
            outline = self.audit.outline(path)
        except UnreadableFileError as trouble:
            where: dict[str, Any] = {
                "file": path,
                "sequence": committed_file.sequence,
                "next": RESTORE_ADVICE,
            }
            raise DifferenceError(
                Difference(description="a file cannot be read", found=str(trouble), **where)
            ) from None
        self.take_differences(
            check_content(committed_file, outline, in_slice=in_slice, compacted=kind == "compact")
        )
        if path.startswith("records"):
            if in_slice:
                self.take_differences(check_counts(committed_file, outline))
            self.outlines[path] = outline
            if path in self.active_paths:
                self.result.records += outline.rows

    def _check_state_file(self, committed_file: CommittedFile, *, in_slice: bool) -> None:
        change = committed_file.change
        offsets = [
            row["last_offset"]
            for row in self.audit.rows(committed_file.file.path, ["session", "last_offset"])
        ]
        last = (
            change.state is not None
            and bool(change.state)
            and change.state[-1].path == committed_file.file.path
        )
        touched = sum(change.frontier <= offset < change.until for offset in offsets)
        if not (in_slice and last):
            committed_file = replace(committed_file, change=replace(change, certificate=None))
        self.take_differences(check_state(committed_file, len(offsets), touched))

    def _check_records_fold_to_state(self) -> None:
        """Step 5: from the state that was signed off, or from nothing, through the records since."""
        lives = self._record_files_in_order()
        for place, account in self.last_ledger.partitions.items():
            sessions = self._session_rows(account.state)
            self.result.sessions += len(sessions)
            waiting = sum(row["status"] == "quarantined" for row in sessions.values())
            if waiting != account.quarantined:
                self.take_differences(
                    [_quarantine_count_difference(place, account.quarantined, waiting)]
                )
            if self.table_spec is None or rewritten_files(self.commits):
                continue
            before = self.signed_ledger.partitions.get(place)
            rows = RowsOfRecords(place, self.table_spec.columns)
            if not self.table_spec.is_own:
                for name, table in self._session_tables(
                    place, self._session_rows(before.state if before else ())
                ):
                    for key, row in table.items():
                        rows.set_row(name, key, row, -1)
            for path in lives.get(place, ()):
                last_rows = self.audit.last_rows(
                    path, self.table_spec.key_columns, self.table_spec.columns, self.table_spec.gone
                )
                for session, key, new, offset in last_rows:
                    rows.set_row(session, key, new, offset)
            states = dict(self._session_tables(place, sessions))
            self.take_differences(
                rows.lacking(states) if self.table_spec.is_own else rows.find_differences(states)
            )
        self._note_if_not_folded()

    def _note_if_not_folded(self) -> None:
        others = rewritten_files(self.commits)
        self.result.has_folded_records = self.table_spec is not None and not others
        if self.table_spec is None:
            self.result.notes.append(
                "records were not folded to state: the machine does not say how, by row_key, row_gone and an `end`"
            )
        elif others:
            self.result.notes.append(
                f"records were not folded to state: {len(others)} files were rewritten by somebody else (OPTIMIZE)"
            )

    def _record_files_in_order(self) -> dict[str, list[str]]:
        """Active record files that were looked at, by partition: life after life of the topic, by
        offset.
        """
        ids = [
            (place, account.topic_id) for place, account in self.signed_ledger.partitions.items()
        ]
        ids += [
            (str(change.partition), change.topic_id)
            for one in self.entries
            for change in one.entry.changes
        ]
        lives = {life: number for number, life in enumerate(dict.fromkeys(ids))}
        ordered: dict[str, list[tuple[int, int, str]]] = {}
        for path, outline in self.outlines.items():
            place = str(self.committed_files[path].change.partition)
            life = [lives.get((place, topic_id), len(lives)) for topic_id in outline.topic_ids]
            if path in self.active_paths:
                ordered.setdefault(place, []).append((max(life), outline.first_offset, path))
        return {place: [path for _, _, path in sorted(files)] for place, files in ordered.items()}

    def _session_rows(self, files: Iterable[File]) -> dict[str, dict[str, Any]]:
        """Sessions of state files, each from the newest that has it."""
        wanted = ["session", "state", "state_version", "status"]
        return {row["session"]: row for file in files for row in self.audit.rows(file.path, wanted)}

    def _session_tables(
        self, partition_name: str, sessions: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, Mapping[Any, tuple[Any, ...]]]]:
        for name, row in sessions.items():
            try:
                if self.table_spec is not None and row["state"] is not None:
                    yield name, self.table_spec.load(row["state"], row["state_version"])
            except Exception as error:
                # A user's `upgrade` or `end` may raise anything. Of our own code only what msgspec says is expected.
                if not (
                    isinstance(error, msgspec.MsgspecError)
                    or (self.table_spec is not None and self.table_spec.is_own)
                ):
                    raise
                where: dict[str, Any] = {
                    "partition": partition_name,
                    "session": name,
                    "found": str(error),
                }
                told = (
                    "check that the stream file has the columns and the key it had when it was run"
                )
                raise DifferenceError(
                    Difference(description="a session's state cannot be read", next=told, **where)
                ) from None

    def _report_orphans(self) -> None:
        """Step 6."""
        signed = self.signed_ledger if self.sign_off.sequence >= 0 else None
        named = (
            {sign.manifest for sign in self.signatures.values()}
            | set(self.committed_files)
            | self.active_paths
        )
        named |= {added.path for commit in self.commits for added in commit.adds}
        named |= {
            file.path for account in self.last_ledger.partitions.values() for file in account.state
        }
        found = list(find_orphans(self.audit.paths(), named, self.last_ledger, signed))
        self.result.orphans = len(found)
        what = "a file that nobody names"
        self.take_differences(
            Difference(description=what, file=path, next=why, level="warning")
            for path, why in found[:ORPHANS_REPORTED_MAX]
        )
        if len(found) > ORPHANS_REPORTED_MAX:
            self.result.notes.append(
                f"{len(found) - ORPHANS_REPORTED_MAX} more files that nobody names"
            )

    def _write_sign_off(self) -> None:
        """Step 8."""
        last = next(commit for commit in reversed(self.commits) if commit.signature)
        sign = last.signature
        if sign is None:
            return
        signed = SignOff(
            sequence=sign.sequence,
            sha256=sign.sha256,
            version=last.version,
            log_sha256=last.log_sha256,
            kafka_sequence=self.kafka_signed_sequence,
        )
        self.audit.put_sign_off(signed.to_bytes())


def rewritten_files(commits: Iterable[Commit]) -> list[str]:
    """Active files that no entry added, but somebody's rewriting of the table."""
    commits = list(commits)
    ours = {added.path for commit in commits if commit.signature for added in commit.adds}
    return sorted(set(replay_expected_files(commits)) - ours)


def _placeholder_change(partition_name: str, file: File) -> Change:
    """Stands in for the change that named a file before the sign-off."""
    return Change(
        partition=Partition.parse(partition_name),
        epoch=0,
        frontier=0,
        until=0,
        topic_id="",
        initial_frontier=0,
        state=(file,),
    )


def _quarantine_count_difference(partition_name: str, expected: int, counted: int) -> Difference:
    return Difference(
        description="the ledger counts other sessions in quarantine than the state has",
        partition=partition_name,
        expected=str(expected),
        found=str(counted),
        next=RESTORE_LOG_ADVICE,
    )
