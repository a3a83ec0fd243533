"""Verify: the output of a stream is looked at anew, independent of what any run remembered. It
changes nothing but its sign-off.

1. The Delta log: every commit, the chain of entries, the witness, and what was signed off before.
2. The table: its files are those that entries added and did not remove, and readers see the same.
3. The entries since the sign-off: each manifest by its hash, the ledger that it makes, and
   certificates that join.
4. Their files, and the present state files: size, digest, page checksums, rows, order, counts.
5. The records are folded to state, if the machine says how.
6. Files that nothing names: they are reported, and are never damage.
7. Kafka, if asked: the ranges that it still has, by their digests.
8. The sign-off, only after a pass without a difference.

Next: operations/prove/chain.py and operations/prove/rules.py have the rules;
operations/prove/compare_kafka.py is step 7; cli/verify.py shows the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import table_of_path
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.ledger.entries import CompactEntry, Entry, SliceEntry, StartEntry
from seriatim.ledger.manifests import Manifest, ManifestReference, UnreadableManifestError
from seriatim.ledger.model import Change, Ledger
from seriatim.operations.prove.chain import (
    Commit,
    CommitSignature,
    check_base,
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
from seriatim.operations.prove.folded_rows import StateRowReader
from seriatim.operations.prove.rules import (
    CommittedFile,
    FileOutline,
    FileReading,
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
    other_table_paths,
)
from seriatim.ports import Audit, UnreadableFileError

ProgressCallback = Callable[[int, int], None]
ORPHANS_REPORTED_MAX = 20


class VerifyResult(Struct, kw_only=True):
    """What was looked at, and what differs."""

    sequence: int = -1
    since: int = -1
    """Up to which entry an earlier pass had signed off."""
    entries: int = 0
    files: int = 0
    bytes: int = 0
    records: int = 0
    """Records in files that are in the table `records` now, without those of replaced files."""
    sessions: int = 0
    deleted_files: int = 0
    """Record files and state files that were replaced, and are deleted since: this is no damage."""
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
        row_reader: StateRowReader | None = None,
        from_first_entry: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.stream = stream
        self.audit = audit
        self.row_reader = row_reader
        self.from_first_entry = from_first_entry
        self.progress = progress or (lambda _bytes, _total: None)
        self.result = VerifyResult()
        self.commits: list[Commit] = []
        self.signatures: dict[int, CommitSignature] = {}
        """By sequence: what the commits say of their entries."""
        self.other_tables: dict[str, tuple[int, set[str]]] = {}
        self.sign_off = SignOff()
        self.kafka_signed_sequence = -1
        self.signed_ledger = Ledger(stream=stream)
        """The ledger as of the sign-off."""
        self.last_ledger = Ledger(stream=stream)
        self.entries: list[Manifest] = []
        """The manifests since the sign-off."""
        self.committed_files: dict[str, CommittedFile] = {}
        """The files that they name, in order."""
        self.outlines: dict[str, FileOutline] = {}
        """The record files that were read."""
        self.active_paths: set[str] = set()

    def run(self, before_sign_off: Callable[[Verification], None] | None = None) -> VerifyResult:
        """All steps, up to the first difference.

        `before_sign_off` is step 7. It may raise `DifferenceError`.
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
        except DifferenceError as error:
            self.result.difference = error.difference
            # `seriatim repair` checks the digest of the file that is stored here.
            self.audit.put_differing_file(error.difference.file)
            return self.result
        # Nothing differs any more, so repair has no file to look at.
        self.audit.put_differing_file("")
        self._write_sign_off()
        return self.result

    def take_differences(self, differences: Iterable[Difference]) -> None:
        """Collect warnings. The first error ends the pass with a `DifferenceError`."""
        for difference in differences:
            if difference.level == "error":
                raise DifferenceError(difference)
            self.result.warnings.append(difference)

    def open_log(self) -> None:
        """Step 1: read and check the Delta log, the witness and the sign-off."""
        # The log is read last: a run that commits meanwhile only moves it ahead of the others,
        # and that is no difference.
        witness = self.audit.witness()
        sign_off_content = self.audit.sign_off()
        self.other_tables = self.audit.other_tables()
        self.commits = self.audit.commits()
        self.signatures = {}
        for commit in self.commits:
            if commit.signature is not None:
                self.signatures[commit.signature.sequence] = commit.signature
        if not self.commits and witness is None:
            raise ConfigError(
                f"{self.stream}: it was never run", next=f"seriatim run {self.stream}"
            )
        self.take_differences(check_chain(self.commits))
        self.take_differences(check_witness(witness, self.signatures))
        if sign_off_content is not None:
            self._check_stored_sign_off(sign_off_content)

    def _check_stored_sign_off(self, content: bytes) -> None:
        """Check the sign-off of an earlier pass, and go on from there."""
        sign_off = SignOff.from_bytes(content)
        if sign_off is None:
            self.result.warnings.append(
                Difference(
                    description="the sign-off was changed",
                    file="verified.json",
                    level="warning",
                    next="everything is looked at again; a clean pass writes it anew",
                )
            )
            return
        commits_by_version = {commit.version: commit for commit in self.commits}
        differences = list(check_sign_off(sign_off, commits_by_version, self.signatures))
        if self.from_first_entry:
            # Everything is looked at in any case, so an old sign-off cannot hide anything.
            differences = [replace(difference, level="warning") for difference in differences]
        self.take_differences(differences)
        self.kafka_signed_sequence = -1 if differences else sign_off.kafka_sequence
        if not self.from_first_entry:
            self.sign_off = sign_off

    def _check_table(self) -> None:
        """Step 2: check the files of the table."""
        expected_files = replay_expected_files(self.commits)
        self.active_paths = replay_active_files(self.commits)
        try:
            reader_paths = self.audit.paths_readers_see(self.commits[-1].version)
        except UnreadableFileError as error:
            raise DifferenceError(
                Difference(
                    description="readers cannot open the table",
                    file="records/_delta_log",
                    found=str(error),
                    next=RESTORE_ADVICE,
                )
            ) from None
        self.take_differences(check_table_files(expected_files, self.active_paths, reader_paths))
        self.take_differences(check_rewrites(self.commits))
        for path, added in expected_files.items():
            self._check_size(path, added.size)

    def _check_size(self, path: str, expected_size: int) -> None:
        size = self.audit.size(path)
        if size == expected_size:
            return
        description = "a file is missing"
        actual = ""
        if size is not None:
            description = "a file has another size"
            actual = f"{size} bytes"
        raise DifferenceError(
            Difference(
                description=description,
                file=path,
                expected=f"{expected_size} bytes",
                found=actual,
                next=REPAIR_ADVICE,
            )
        )

    def _check_entries(self) -> None:
        """Step 3: check the entries since the sign-off.

        If files were replaced since the sign-off, or if state of that time is gone, everything is
        looked at again.
        """
        self._read_entries_since(self.sign_off.sequence)
        if self.sign_off.sequence >= 0:
            has_replaced = any(manifest.entry.removed_paths for manifest in self.entries)
            if has_replaced or not self._has_state(self.signed_ledger):
                self.result.notes.append(
                    "files were replaced since the sign-off, so everything is looked at again"
                )
                self.sign_off = replace(self.sign_off, sequence=-1)
                self._read_entries_since(-1)
        self.last_ledger = self.signed_ledger
        if self.entries:
            self.last_ledger = self.entries[-1].ledger
        self.result.sequence = max(self.signatures, default=-1)
        self.result.since = self.sign_off.sequence
        self.result.entries = len(self.entries)

    def _read_entries_since(self, signed_sequence: int) -> None:
        """Read and check the manifests after an entry, and collect the files that they name."""
        self.entries = []
        self.committed_files = {}
        self.signed_ledger = Ledger(stream=self.stream)
        if signed_sequence >= 0:
            self.signed_ledger = self.manifest(signed_sequence).ledger
        commits_by_sequence: dict[int, Commit] = {}
        for commit in self.commits:
            if commit.signature is not None:
                commits_by_sequence[commit.signature.sequence] = commit
        previous_ledger = self.signed_ledger
        for sequence in range(signed_sequence + 1, max(self.signatures, default=-1) + 1):
            manifest = self.manifest(sequence)
            signature = self.signatures[sequence]
            commit = commits_by_sequence[sequence]
            self.take_differences(check_manifest(signature, commit, manifest, self.stream))
            self.take_differences(check_base(signature, manifest, self.signatures))
            self.take_differences(check_ledger_step(manifest, previous_ledger))
            self.entries.append(manifest)
            previous_ledger = manifest.ledger
            for change in manifest.entry.changes:
                for file in change.files():
                    committed_file = CommittedFile(file, sequence, change)
                    self.committed_files.setdefault(file.path, committed_file)

    def manifest(self, sequence: int) -> Manifest:
        """The manifest of an entry, proved by the hash in the chain."""
        signature = self.signatures[sequence]
        reference = ManifestReference(sequence, signature.manifest, signature.sha256)
        try:
            return self.audit.manifest(reference)
        except UnreadableManifestError as error:
            raise DifferenceError(_manifest_difference(error)) from None

    def _has_state(self, ledger: Ledger) -> bool:
        """Whether all state files of a ledger still exist, with their size."""
        for account in ledger.partitions.values():
            for file in account.state:
                if self.audit.size(file.path) != file.size_bytes:
                    return False
        return True

    def _check_files(self) -> None:
        """Step 4: check the files of the entries since the sign-off, and the present state files."""
        state_files = self._present_state_files()
        files_to_check = dict(self.committed_files)
        for path, state_file in state_files.items():
            # What the entry says of a file is better than a change that says nothing.
            files_to_check.setdefault(path, state_file)
        active_paths = set(self.active_paths)
        active_paths |= other_table_paths(self.entries, self.last_ledger.sequence)
        needed_paths = active_paths.union(state_files)
        paths_by_digest: dict[str, str] = {}
        bytes_total = 0
        for path, committed_file in files_to_check.items():
            paths_by_digest[committed_file.file.digest] = path
            bytes_total += committed_file.file.size_bytes
        entry_types: dict[int, type[Entry]] = {}
        for manifest in self.entries:
            entry_types[manifest.entry.sequence] = type(manifest.entry)
        committed = list(files_to_check.values())
        readings = self.audit.read_files([committed_file.file for committed_file in committed])
        for committed_file, reading in zip(committed, readings, strict=True):
            path = committed_file.file.path
            # Quarantined messages are never swept, so their files must always be there.
            is_needed = path in needed_paths or path.startswith("kept/")
            entry_type = entry_types.get(committed_file.sequence)
            self._check_file(
                committed_file, reading, paths_by_digest, entry_type, is_needed=is_needed
            )
            self.progress(self.result.bytes, bytes_total)
        self._check_overlaps(active_paths)
        if self.sign_off.sequence < 0:
            self.take_differences(check_other_tables(self.other_tables, self.entries))

    def _present_state_files(self) -> dict[str, CommittedFile]:
        """The present state files, with changes that say nothing.

        Entries from before the sign-off may have made them, and those were not read again.
        """
        files: dict[str, CommittedFile] = {}
        for partition_name, account in self.last_ledger.partitions.items():
            for file in account.state:
                change = _placeholder_change(partition_name, file)
                files[file.path] = CommittedFile(file, self.last_ledger.sequence, change)
        return files

    def _check_overlaps(self, active_paths: set[str]) -> None:
        """No two active files of one table have the same offsets."""
        outlines_by_table: dict[str, list[tuple[CommittedFile, FileOutline]]] = {}
        for path, outline in self.outlines.items():
            if path in active_paths:
                table_outlines = outlines_by_table.setdefault(table_of_path(path), [])
                table_outlines.append((self.committed_files[path], outline))
        for table_outlines in outlines_by_table.values():
            self.take_differences(check_overlaps(table_outlines))

    def _check_file(
        self,
        committed_file: CommittedFile,
        reading: FileReading,
        paths_by_digest: Mapping[str, str],
        entry_type: type[Entry] | None,
        *,
        is_needed: bool,
    ) -> None:
        """Check one file, and what is in it. A file that is not needed may be deleted."""
        path = committed_file.file.path
        size = reading.size_bytes
        self.result.bytes += committed_file.file.size_bytes
        if size is None and not is_needed:
            self.result.deleted_files += 1
            return
        self.take_differences(check_file(committed_file, size, reading.digests, paths_by_digest))
        self.result.files += 1
        in_slice = entry_type in (StartEntry, SliceEntry)
        if path.startswith("state/"):
            try:
                self._check_state_file(committed_file, in_slice=in_slice)
            except UnreadableFileError as error:
                raise _unreadable_file_error(committed_file, str(error)) from None
            return
        outline = reading.outline
        if outline is None:
            raise _unreadable_file_error(committed_file, reading.read_error)
        is_compacted = entry_type is CompactEntry
        self.take_differences(
            check_content(committed_file, outline, in_slice=in_slice, compacted=is_compacted)
        )
        if not path.startswith("records"):
            return
        if in_slice:
            self.take_differences(check_counts(committed_file, outline))
        self.outlines[path] = outline
        if path in self.active_paths:
            self.result.records += outline.rows

    def _check_state_file(self, committed_file: CommittedFile, *, in_slice: bool) -> None:
        change = committed_file.change
        path = committed_file.file.path
        last_offsets = [session.last_offset for _, session in self.audit.sessions(path)]
        touched = sum(change.frontier <= offset < change.until for offset in last_offsets)
        # A certificate counts the sessions of its slice: those are in the last file of its change.
        change_files = change.state or ()
        is_newest_file = len(change_files) > 0 and change_files[-1].path == path
        if not (in_slice and is_newest_file):
            committed_file = replace(committed_file, change=replace(change, certificate=None))
        self.take_differences(check_state(committed_file, len(last_offsets), touched))

    def _check_records_fold_to_state(self) -> None:
        """Step 5: fold the records since the sign-off over the state of that time, or over nothing,
        and compare with the present state.
        """
        can_fold = self.row_reader is not None and not rewritten_files(self.commits)
        paths_by_partition = self._record_files_in_order()
        for partition_name, account in self.last_ledger.partitions.items():
            sessions = self._sessions(account.state)
            self.result.sessions += len(sessions)
            quarantined = sum(session.finding is not None for session in sessions.values())
            if quarantined != account.quarantined:
                raise DifferenceError(
                    _quarantine_count_difference(partition_name, account.quarantined, quarantined)
                )
            if can_fold and self.row_reader is not None:
                paths = paths_by_partition.get(partition_name, [])
                self._check_rows(partition_name, self.row_reader, paths, sessions)
        self._note_if_not_folded()

    def _check_rows(
        self,
        partition_name: str,
        row_reader: StateRowReader,
        paths: Iterable[str],
        sessions: Mapping[str, Session],
    ) -> None:
        """Fold the records of one partition, and compare the rows with the sessions' state."""
        rows = RowsOfRecords(partition_name, row_reader.row_key_spec)
        signed_account = self.signed_ledger.partitions.get(partition_name)
        # The rows that a user's `end` takes back may be more than there are, so they are no base
        # to fold over.
        if row_reader.is_exact and signed_account is not None:
            signed_sessions = self._sessions(signed_account.state)
            for name, table in self._session_tables(partition_name, signed_sessions):
                rows.put_session(("", name), table)
        rows.fold_images(self.audit.last_rows(paths, row_reader.row_key_spec))
        states = dict(self._session_tables(partition_name, sessions))
        # For the same reason only missing rows are a difference then.
        if row_reader.is_exact:
            self.take_differences(rows.find_differences(states))
        else:
            self.take_differences(rows.lacking(states))

    def _note_if_not_folded(self) -> None:
        rewritten = rewritten_files(self.commits)
        self.result.has_folded_records = self.row_reader is not None and not rewritten
        if self.row_reader is None:
            self.result.notes.append(
                "records were not folded to state: the machine does not say how, by row_key,"
                " row_gone and an `end`"
            )
        elif rewritten:
            self.result.notes.append(
                f"records were not folded to state: {len(rewritten)} files were rewritten by"
                " somebody else (OPTIMIZE)"
            )

    def _record_files_in_order(self) -> dict[str, list[str]]:
        """The active record files that were checked, by partition: by the age of the topic id, then
        by offset.
        """
        ages = self._ages_of_topic_ids()
        positions: dict[str, list[tuple[int, int, str]]] = {}
        for path, outline in self.outlines.items():
            if path not in self.active_paths:
                continue
            partition_name = str(self.committed_files[path].change.partition)
            age = max(
                ages.get((partition_name, topic_id), len(ages)) for topic_id in outline.topic_ids
            )
            position = (age, outline.first_offset, path)
            positions.setdefault(partition_name, []).append(position)
        return {name: [path for _, _, path in sorted(files)] for name, files in positions.items()}

    def _ages_of_topic_ids(self) -> dict[tuple[str, str], int]:
        """By partition and topic id: in which order they came. The oldest is 0."""
        topic_ids: list[tuple[str, str]] = []
        for partition_name, account in self.signed_ledger.partitions.items():
            topic_ids.append((partition_name, account.topic_id))
        for manifest in self.entries:
            changes = manifest.entry.changes
            topic_ids += [(str(change.partition), change.topic_id) for change in changes]
        distinct_topic_ids = dict.fromkeys(topic_ids)
        return {key: age for age, key in enumerate(distinct_topic_ids)}

    def _sessions(self, files: Iterable[File]) -> dict[str, Session]:
        """The sessions of state files, each from the newest file that has it."""
        sessions: dict[str, Session] = {}
        for file in files:
            sessions.update(self.audit.sessions(file.path))
        return sessions

    def _session_tables(
        self, partition_name: str, sessions: Mapping[str, Session]
    ) -> Iterator[tuple[str, Mapping[Any, tuple[Any, ...]]]]:
        """The rows in the state of each session that has state."""
        if self.row_reader is None:
            return
        for name, session in sessions.items():
            if session.state_bytes is None:
                continue
            try:
                table = self.row_reader.load(session.state_bytes, session.state_version)
            except Exception as error:
                # A user's `upgrade` or `end` may raise anything. Of our own code only what
                # msgspec raises is expected.
                if self.row_reader.is_exact and not isinstance(error, msgspec.MsgspecError):
                    raise
                raise DifferenceError(
                    Difference(
                        description="a session's state cannot be read",
                        partition=partition_name,
                        session=name,
                        found=str(error),
                        next="check that the stream file has the columns and the key it had when"
                        " it was run",
                    )
                ) from None
            yield name, table

    def _report_orphans(self) -> None:
        """Step 6: report files that nothing names, as warnings."""
        named_paths = self.active_paths.union(self.committed_files)
        for signature in self.signatures.values():
            named_paths.add(signature.manifest)
        for commit in self.commits:
            named_paths.update(added.path for added in commit.adds)
        for account in self.last_ledger.partitions.values():
            named_paths.update(file.path for file in account.state)
        signed_ledger = self.signed_ledger if self.sign_off.sequence >= 0 else None
        orphans = list(
            find_orphans(self.audit.paths(), named_paths, self.last_ledger, signed_ledger)
        )
        self.result.orphans = len(orphans)
        for path, reason in orphans[:ORPHANS_REPORTED_MAX]:
            self.result.warnings.append(
                Difference(
                    description="a file that nobody names", file=path, next=reason, level="warning"
                )
            )
        more_orphans = len(orphans) - ORPHANS_REPORTED_MAX
        if more_orphans > 0:
            self.result.notes.append(f"{more_orphans} more files that nobody names")

    def _write_sign_off(self) -> None:
        """Step 8: sign off up to the last entry."""
        for commit in reversed(self.commits):
            signature = commit.signature
            if signature is None:
                continue
            sign_off = SignOff(
                sequence=signature.sequence,
                sha256=signature.sha256,
                version=commit.version,
                log_sha256=commit.log_sha256,
                kafka_sequence=self.kafka_signed_sequence,
            )
            self.audit.put_sign_off(sign_off.to_bytes())
            return


def rewritten_files(commits: Iterable[Commit]) -> list[str]:
    """Active files that another program's rewriting of the table added, and no entry."""
    commits = list(commits)
    own_paths: set[str] = set()
    for commit in commits:
        if commit.signature is not None:
            own_paths.update(added.path for added in commit.adds)
    return sorted(set(replay_expected_files(commits)) - own_paths)


def _manifest_difference(error: UnreadableManifestError) -> Difference:
    """What is wrong with a manifest: that of an entry, or one that later entries are based on."""
    difference = Difference(
        description="a manifest cannot be read",
        file=error.reference.path,
        sequence=error.reference.sequence,
        found=error.reason,
        next=RESTORE_ADVICE,
    )
    if error.actual_sha256:
        return replace(
            difference,
            description="a manifest is damaged",
            expected=error.reference.sha256,
            found=error.actual_sha256,
        )
    return difference


def _unreadable_file_error(committed_file: CommittedFile, error_text: str) -> DifferenceError:
    return DifferenceError(
        Difference(
            description="a file cannot be read",
            file=committed_file.file.path,
            sequence=committed_file.sequence,
            found=error_text,
            next=RESTORE_ADVICE,
        )
    )


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
