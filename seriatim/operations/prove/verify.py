"""Verify: the output of a stream is looked at anew, independent of what any run remembered. It
changes nothing but its sign-off.

1. The Delta log: every commit, the chain of entries, the witness, and what was signed off before.
2. The table: its files are those that entries added and did not remove, and readers see the same.
3. The entries since the sign-off: each manifest by its hash, the ledger that it makes, and
   certificates that join.
4. Their files, and the present state files: size, digest, page checksums, rows, order, counts.
5. Each partition by itself: its records are counted, and folded to state if the machine says how.
6. Files that nothing names: they are reported, and are never damage.
7. Kafka, if asked: the ranges that it still has, by their digests.
8. The sign-off, only after a pass without a difference.

Next: operations/prove/stream_rules.py and operations/prove/partition_rules.py have the rules;
cli/verify.py shows the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import Certificate, Digests, partition_name_of_path
from seriatim.engine.offsets import Bounds, BoundsByPartition, OffsetRange, Partition, Ranges
from seriatim.engine.records import table_of_path
from seriatim.ledger.commit import never_run_error
from seriatim.ledger.manifests import Manifest, ManifestReference, UnreadableManifestError
from seriatim.ledger.model import Account, Change, Ledger
from seriatim.operations.prove.partition_rules import (
    REPAIR_ADVICE,
    RESTORE_ADVICE,
    CommittedFile,
    Difference,
    DifferenceError,
    FoldBase,
    PartitionClaims,
    PartitionProver,
    StateFileContents,
    StateRowReader,
    check_content,
    check_file,
    check_overlaps,
    check_state_file,
)
from seriatim.operations.prove.stream_rules import (
    SignOff,
    check_base,
    check_chain,
    check_ledger_step,
    check_manifest,
    check_other_tables,
    check_rewrites,
    check_sign_off,
    check_table_files,
    check_witness,
    find_orphans,
    other_table_paths,
    replay_active_files,
    replay_expected_files,
)
from seriatim.ports import (
    AddedFile,
    Audit,
    Commit,
    CommitSignature,
    FileOutline,
    FileReading,
    PastMessageReader,
    ProgressCallback,
    UnreadableFileError,
)
from seriatim.workers import map_or_raise

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
        self.table_files: dict[str, AddedFile] = {}
        """The files of the table by the entries of the ledger, and by rewrites of other programs."""

    def run(self, before_sign_off: Callable[[Verification], None] | None = None) -> VerifyResult:
        """All steps, up to the first difference.

        `before_sign_off` is step 7. It may raise `DifferenceError`.
        """
        try:
            self.open_log()
            self._check_table()
            self._check_entries()
            self._check_files()
            self._prove_partitions()
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
            raise never_run_error(self.stream)
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
        self.table_files = replay_expected_files(self.commits)
        self.active_paths = set(replay_active_files(self.commits))
        try:
            reader_paths = self.audit.paths_readers_see(self.commits[-1].version)
        except UnreadableFileError as error:
            raise DifferenceError(
                Difference(
                    description="readers cannot open the table",
                    file="records/_delta_log",
                    found=error.reason,
                    next=RESTORE_ADVICE,
                )
            ) from None
        self.take_differences(check_table_files(self.table_files, self.active_paths, reader_paths))
        self.take_differences(check_rewrites(self.commits))
        for path, added in self.table_files.items():
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
                    committed_file = CommittedFile(file, sequence, change, type(manifest.entry))
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
        committed = list(files_to_check.values())
        # What came before this, such as imports and the ledger, says nothing about the rate.
        self.progress(0, bytes_total)
        readings = self.audit.read_files([committed_file.file for committed_file in committed])
        for committed_file, reading in zip(committed, readings, strict=True):
            path = committed_file.file.path
            # Quarantined messages are never swept, so their files must always be there.
            is_needed = path in needed_paths or committed_file.is_quarantine_file
            self._check_file(committed_file, reading, paths_by_digest, is_needed=is_needed)
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
                files[file.path] = CommittedFile.of_unread_entry(
                    file, self.last_ledger.sequence, Partition.parse(partition_name)
                )
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
        if path.startswith("state/"):
            try:
                contents = StateFileContents()
                for _, session in self.audit.sessions(path):
                    contents.add(session)
            except UnreadableFileError as error:
                raise _unreadable_file_error(committed_file, error.reason) from None
            self.take_differences(check_state_file(committed_file, contents))
            return
        outline = reading.outline
        if outline is None:
            raise _unreadable_file_error(committed_file, reading.read_error)
        self.take_differences(check_content(committed_file, outline))
        if path.startswith("records"):
            self.outlines[path] = outline
            if path in self.active_paths:
                self.result.records += outline.rows

    def _prove_partitions(self) -> None:
        """Step 5: compare each partition with its state: fold the records since the sign-off over
        the state of that time, or over nothing.
        """
        rewritten = self._rewritten_files()
        self.result.has_folded_records = self.row_reader is not None and not rewritten
        claims = self._all_claims(is_table_own=not rewritten)
        prover = PartitionProver(
            self.audit.record_scanner(), self.audit.state(self.stream), self.row_reader
        )
        for proof in map_or_raise(self.audit.workers, prover, claims):
            if proof.unreadable_path:
                committed_file = self.committed_files[proof.unreadable_path]
                raise _unreadable_file_error(committed_file, proof.read_error)
            self.result.sessions += proof.sessions
            for evidence in proof.evidence:
                if evidence.difference is not None:
                    raise DifferenceError(evidence.difference)
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

    def _all_claims(self, *, is_table_own: bool) -> list[PartitionClaims]:
        """What the ledger says of each partition. `is_table_own`: no other program rewrote the table."""
        paths_by_partition: dict[str, list[str]] = {}
        for path in sorted(self.outlines, key=lambda path: self.outlines[path].first_offset):
            if path in self.active_paths:
                name = str(self.committed_files[path].change.partition)
                paths_by_partition.setdefault(name, []).append(path)
        rows_by_partition: dict[str, int] = {}
        for path, added in self.table_files.items():
            name = partition_name_of_path(path)
            rows_by_partition[name] = rows_by_partition.get(name, 0) + added.rows
        claims: list[PartitionClaims] = []
        for name, account in self.last_ledger.partitions.items():
            rows_in_table = rows_by_partition.get(name, 0) if is_table_own else None
            paths = paths_by_partition.get(name, [])
            claims.append(self._claims(name, account, paths, rows_in_table))
        return claims

    def _claims(
        self,
        partition_name: str,
        account: Account,
        paths: Iterable[str],
        rows_in_table: int | None,
    ) -> PartitionClaims:
        """What the ledger says of a partition. Its files were compared with their entries in step 4."""
        base = FoldBase()
        signed_account = self.signed_ledger.partitions.get(partition_name)
        # The rows that a user's `end` takes back may be more than there are, so they are no base
        # to fold over.
        is_exact = self.row_reader is not None and self.row_reader.is_exact
        if is_exact and signed_account is not None:
            base = FoldBase(signed_account.topic_id, signed_account.frontier, signed_account.state)
        partition = Partition.parse(partition_name)
        state_files = [
            CommittedFile.of_unread_entry(file, self.last_ledger.sequence, partition)
            for file in base.newer_files(account)
        ]
        return PartitionClaims(
            partition=partition,
            account=account,
            record_files=tuple(self.committed_files[path] for path in paths),
            state_files=tuple(state_files),
            base=base,
            rows_in_table=rows_in_table,
            checks_files=False,
            folds_rows=self.result.has_folded_records,
            counts_sessions=True,
        )

    def _rewritten_files(self) -> list[str]:
        """Active files that another program's rewriting of the table added, and no entry."""
        own_paths: set[str] = set()
        for commit in self.commits:
            if commit.signature is not None:
                own_paths.update(added.path for added in commit.adds)
        return sorted(self.table_files.keys() - own_paths)

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


# Step 7: Kafka.


class ComparedRange(Struct, frozen=True):
    """What one entry says it read of one partition."""

    sequence: int
    change: Change
    certificate: Certificate

    @property
    def partition(self) -> Partition:
        """The partition that was read."""
        return self.change.partition

    @property
    def offset_range(self) -> OffsetRange:
        """The range of the certificate."""
        return OffsetRange(self.change.frontier, self.change.until)


class KafkaComparison:
    """Step 7: the ranges that Kafka still has are read again and compared with their certificates.

    What Kafka no longer has is noted, and is no difference: retention dropped it, or compaction, or
    the topic was created again.
    """

    def __init__(
        self,
        past_reader: PastMessageReader,
        bounds: BoundsByPartition,
        digests: Callable[[], Digests],
        progress: ProgressCallback | None = None,
    ) -> None:
        self.past_reader = past_reader
        self.bounds = bounds
        self.digests = digests
        self.progress = progress or (lambda _messages, _total: None)

    def __call__(self, verification: Verification) -> None:
        """Compare all ranges of entries that were not compared before.

        Raises `DifferenceError` for the first range that is not as its certificate says.
        """
        compared_sequence = verification.kafka_signed_sequence
        if verification.from_first_entry:
            compared_sequence = -1
        ranges = self._uncompared_ranges(verification, compared_sequence)
        ranges.sort(key=lambda compared_range: (compared_range.partition, compared_range.sequence))
        messages_total = sum(len(compared_range.offset_range) for compared_range in ranges)
        missing_ranges: Ranges = {}
        self.progress(0, messages_total)
        for compared_range in ranges:
            partition = compared_range.partition
            is_there = _is_in_kafka(compared_range, self.bounds.get(partition))
            if is_there and self._matches_certificate(compared_range, verification):
                self.progress(verification.result.compared_messages, messages_total)
                continue
            start = compared_range.offset_range.start
            if partition in missing_ranges:
                start = missing_ranges[partition].start
            missing_ranges[partition] = OffsetRange(start, compared_range.offset_range.end)
        for partition, missing in missing_ranges.items():
            verification.result.notes.append(
                f"{partition}: Kafka no longer has all of {missing}: not compared"
            )
        verification.kafka_signed_sequence = verification.result.sequence

    def _uncompared_ranges(
        self, verification: Verification, compared_sequence: int
    ) -> list[ComparedRange]:
        """The ranges of all entries after `compared_sequence` that have digests."""
        ranges: list[ComparedRange] = []
        for sequence in range(compared_sequence + 1, verification.result.sequence + 1):
            for change in verification.manifest(sequence).entry.changes:
                certificate = change.certificate
                if certificate is not None and certificate.digests:
                    ranges.append(ComparedRange(sequence, change, certificate))
        return ranges

    def _matches_certificate(
        self, compared_range: ComparedRange, verification: Verification
    ) -> bool:
        """Whether a range is as its certificate says; False if compaction removed messages of it.

        Raises `DifferenceError` if it is otherwise.
        """
        partition = compared_range.partition
        certificate = compared_range.certificate
        digests = self.digests()
        message_count = 0
        for batch in self.past_reader.read(partition, compared_range.offset_range):
            digests.update(batch)
            message_count += len(batch)
        kafka_digests = digests.finish()
        if kafka_digests == certificate.digests:
            verification.result.compared_messages += message_count
            return True
        # Compaction can only remove messages. If there are as many as before, they were changed.
        has_fewer = message_count < certificate.counts.messages
        if has_fewer and self.past_reader.is_compacted(partition.topic):
            return False
        raise DifferenceError(_digest_difference(compared_range, message_count, kafka_digests))


def _digest_difference(
    compared_range: ComparedRange, message_count: int, kafka_digests: dict[str, str]
) -> Difference:
    """What Kafka has is not what the certificate of a range says."""
    certificate = compared_range.certificate
    differing_names: list[str] = []
    for name, digest in kafka_digests.items():
        if digest != certificate.digests.get(name):
            differing_names.append(name)
    expected_count = f"{certificate.counts.messages} messages in {compared_range.offset_range}"
    return Difference(
        description=f"Kafka has other {', '.join(differing_names)} than were folded",
        partition=str(compared_range.partition),
        offset=compared_range.offset_range.start,
        sequence=compared_range.sequence,
        expected=f"{expected_count}, {_describe_digests(certificate.digests)}",
        found=f"{message_count} messages, {_describe_digests(kafka_digests)}",
        cause="Kafka's log was changed, or something else was folded than what it has",
        next="look at this range with `seriatim verify {stream} --at kafka --at output`",
    )


def _is_in_kafka(compared_range: ComparedRange, bounds: Bounds | None) -> bool:
    """Whether Kafka's log still reaches over all of a range."""
    if bounds is None or bounds.topic_id != compared_range.change.topic_id:
        return False
    offset_range = compared_range.offset_range
    return bounds.log_start <= offset_range.start and offset_range.end <= bounds.log_end


def _describe_digests(digests: dict[str, str]) -> str:
    texts: list[str] = []
    for name, digest in digests.items():
        # The first characters tell two digests apart, and fit on a line.
        texts.append(f"{name} {digest[:12]}")
    return ", ".join(texts)
