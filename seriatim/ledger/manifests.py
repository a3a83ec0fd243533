"""The stored ledger: manifests, the witness and notes, and how they follow from the commits of a table.

A manifest is the file of an entry: the entry, and the ledger after it. The ledger has an account of
every partition, but most entries change only a few. So a manifest is whole or partial. A partial one
names a whole one before it, its base, and carries only the accounts that differ from those of the
base. Whoever reads it gets the whole ledger: base and partial manifest are two reads.

The witness (head.json) names the last entry. Each entry names the one before it by its hash, and
thereby everything can be proved that is read here. A note names an entry, too; if it is lost, some
work is done again.

Which manifests were committed is known by the commits of a table. `StoredLedger` has all that follows
from them. `DeltaLedger` knows the Delta table of records, `MemoryLedger` a list.

Next: ledger/delta_store.py commits entries, storage/status_file.py reads manifests for web pages,
operations/prove/verify.py checks them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.findings import Finding
from seriatim.errors import BrokenPromiseError, ConfigError, IntegrityError, PlatformError
from seriatim.ledger.entries import ENTRY_TYPES, Entry
from seriatim.ledger.model import Account, EntryMark, Ledger
from seriatim.storage.store import Store

MANIFEST_FORMAT = 4
"""The format of manifests that is written. A newer one is refused, not guessed at."""
READABLE_FORMATS = (2, 3, 4)
"""Formats that can be read: they mean to this version what they meant to their writer."""
WHOLE_AFTER_ENTRIES = 50
"""An entry so far after the last whole manifest gets a whole one again."""
MANIFEST_FOLDER = "manifests/"
MANIFEST_KEY = re.compile(r"manifests/(\d{10,})-([0-9a-f]{64})\.json\.zst")
WITNESS_KEY = "head.json"
REPORTED_NOTE = "told.json"
"""Names the last entry whose findings were reported to a person."""
REQUESTED_NOTE = "asked.json"
"""Names the last entry up to which producers were asked for snapshots."""
SWEPT_NOTE = "swept.json"
"""Names the oldest entry of which no file was swept."""
DIFFERENCE_FILE = "differs.json"
"""Names the file that differed in the last verify."""
RESTORE_LOG_ADVICE = (
    "restore records/_delta_log and manifests/ from a backup; nothing starts again from 0 by itself"
)
SEQUENCE_MAX = 10**12
"""A higher sequence is not that of a ledger: the witness is damaged."""


class ManifestReference(Struct, frozen=True):
    """Which manifest: that of an entry, where it is, and its hash."""

    sequence: int
    path: str
    """Below the stream's output path."""
    sha256: str


def manifest_reference(sequence: int, sha256: str) -> ManifestReference:
    """The reference to the manifest of an entry, whose path has the sequence and the hash."""
    return ManifestReference(
        sequence, f"{MANIFEST_FOLDER}{sequence:010d}-{sha256}.json.zst", sha256
    )


class EntryHeader(Struct, frozen=True, rename={"product_version": "product"}):
    """What every version can read of an entry."""

    sequence: int = -1
    kind: str = ""
    product_version: str = ""


class ManifestHeader(Struct, frozen=True):
    """What every version can read of a manifest: whether this one understands the rest."""

    format: Any = None
    entry: EntryHeader = EntryHeader()


class Manifest(Struct, frozen=True, kw_only=True):
    """An entry, and the whole ledger after it. In the file of a partial manifest the ledger has only
    the accounts that differ from those of the base.
    """

    format: int = MANIFEST_FORMAT
    base: ManifestReference | None = None
    """The whole manifest that this one is based on; None: it is whole itself."""
    entry: Entry
    ledger: Ledger


class LedgerManifest(Struct, frozen=True, kw_only=True):
    """A manifest read for its ledger alone. With many partitions the entry is the larger part."""

    format: int
    base: ManifestReference | None = None
    entry: EntryHeader
    ledger: Ledger


AnyManifest = TypeVar("AnyManifest", Manifest, LedgerManifest)


class UnreadableManifestError(Exception):  # not a SeriatimError: `verify` reports it as a finding
    """A manifest is missing, or its content is not the one that was committed."""

    def __init__(self, reference: ManifestReference, reason: str, actual_sha256: str = "") -> None:
        super().__init__(reference, reason, actual_sha256)
        self.reference = reference
        self.reason = reason
        self.actual_sha256 = actual_sha256
        """If the content is another one: its hash."""


class OtherStreamError(ConfigError):
    """The output path of a stream holds the ledger of another one."""


class UnreadableWitnessError(Exception):  # not a SeriatimError: `verify` reports it as a finding
    """The content of head.json is no witness."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of a manifest's file before compression, always the same for the same value."""
    return msgspec.json.encode(manifest, order="deterministic")


def decode_manifest(content: bytes, manifest_type: type[AnyManifest]) -> AnyManifest:
    """A manifest as its file has it. A format or a kind of entry that this version does not know is
    refused.
    """
    try:
        manifest = msgspec.json.decode(content, type=manifest_type)
    except msgspec.ValidationError:
        _refuse_newer(content)
        raise
    if manifest.format not in READABLE_FORMATS or manifest.entry.kind not in ENTRY_TYPES:
        _refuse_newer(content)
    return manifest


def _refuse_newer(content: bytes) -> None:
    """Raise `ConfigError` if a manifest has a format or a kind of entry that this version does not
    know.
    """
    header = msgspec.json.decode(content, type=ManifestHeader)
    if header.format == 1:
        raise ConfigError(
            f"the ledger was written by an older Seriatim: format 1, this one knows {MANIFEST_FORMAT}",
            next="give the stream a new output path",
        )
    if header.format not in READABLE_FORMATS:
        unknown = f"format {header.format}, this one knows {MANIFEST_FORMAT}"
    elif header.entry.kind not in ENTRY_TYPES:
        unknown = f"this one knows no entry of kind {header.entry.kind!r}"
    else:
        return
    writer = "a newer Seriatim"
    advice = "deploy it"
    if header.entry.product_version:
        writer += f" ({header.entry.product_version})"
        advice = f"install Seriatim {header.entry.product_version} or newer"
    raise ConfigError(f"the ledger was written by {writer}: {unknown}", next=advice)


class _NotedVersion(Struct, frozen=True):
    """What head.json may say beside the entry."""

    version: int = -1


def decode_witness(content: bytes) -> EntryMark:
    """A witness from the content of head.json."""
    try:
        witness = msgspec.json.decode(content, type=EntryMark)
    except (ValueError, RecursionError) as error:
        # Errors of msgspec and text that is no UTF-8 are ValueErrors.
        raise UnreadableWitnessError(str(error)) from None
    if not 0 <= witness.sequence < SEQUENCE_MAX:
        raise UnreadableWitnessError(f"its sequence is {witness.sequence}")
    if not witness.sha256:
        raise UnreadableWitnessError("it names no hash")
    return witness


class ManifestFiles:
    """The manifests and the witness of one stream, in its store.

    It remembers the last ledger that it read or wrote and the last base. So a history is read with
    one read for each manifest, and whoever has opened the ledger writes its next entry without a
    read.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._recent: dict[str, LedgerManifest] = {}
        """By hash: the last base and the last ledger, which may be the same."""
        self._last_whole: tuple[str, Manifest] | None = None
        """The last manifest that was read or written with its entry, and its hash. It is kept only
        where reading it again is a request.
        """
        self.noted_version = -1
        """The version of the table that the witness named when it was last read; -1: none."""

    def write(self, manifest: Manifest) -> ManifestReference:
        """Store the manifest of an entry, as a partial one where that is enough."""
        # Imported here, because pages must start without pyarrow.
        import pyarrow as pa

        stored = self._as_stored(manifest)
        packed = pa.compress(encode_manifest(stored), codec="zstd", asbytes=True)
        reference = manifest_reference(manifest.entry.sequence, hashlib.sha256(packed).hexdigest())
        # The name has the hash, so that `create` can only meet the same bytes: our own, written by a
        # try whose answer got lost.
        self.store.create(reference.path, packed)
        self._remember(reference, replace(manifest, base=stored.base))
        self._keep_whole(reference, replace(manifest, base=stored.base))
        return reference

    def read(self, reference: ManifestReference) -> Manifest:
        """An entry, and the whole ledger after it."""
        if self._last_whole is not None and self._last_whole[0] == reference.sha256:
            return self._last_whole[1]
        stored = self._read_file(reference, Manifest)
        manifest = replace(stored, ledger=self._whole_ledger(reference, stored))
        self._remember(reference, manifest)
        self._keep_whole(reference, manifest)
        return manifest

    def _keep_whole(self, reference: ManifestReference, manifest: Manifest) -> None:
        if self.store.is_remote:
            ledger = replace(manifest.ledger, sha256=reference.sha256)
            self._last_whole = (reference.sha256, replace(manifest, ledger=ledger))

    def read_ledger(self, reference: ManifestReference) -> LedgerManifest:
        """The whole ledger after an entry. What this object has read or written just before is not
        read again.
        """
        recent = self._recent.get(reference.sha256)
        if recent is not None:
            return recent
        stored = self._read_file(reference, LedgerManifest)
        manifest = replace(stored, ledger=self._whole_ledger(reference, stored))
        self._remember(reference, manifest)
        return manifest

    def references_by_sequence(self) -> dict[int, list[ManifestReference]]:
        """All manifests in the store. If commits failed, an entry has several, of which one was
        committed.
        """
        references: dict[int, list[ManifestReference]] = {}
        for key, _ in self.store.keys(MANIFEST_FOLDER):
            name = MANIFEST_KEY.fullmatch(key)
            if name:
                sequence = int(name[1])
                references.setdefault(sequence, []).append(
                    ManifestReference(sequence, key, name[2])
                )
        return references

    def witness(self) -> EntryMark | None:
        """What head.json says; None if there is no such file.

        A disk that cannot be read is an `OSError`, which says nothing about the file.
        """
        try:
            content = self.store.read(WITNESS_KEY)
        except FileNotFoundError:
            return None
        witness = decode_witness(content)
        self.noted_version = msgspec.json.decode(content, type=_NotedVersion).version
        return witness

    def put_witness(self, witness: EntryMark, version: int = -1) -> None:
        """Write head.json. `version` is that of the table; it only saves a reader a search."""
        content: dict[str, Any] = msgspec.structs.asdict(witness)
        if version >= 0:
            content["version"] = version
        self.store.replace(WITNESS_KEY, msgspec.json.encode(content))

    def archive_witness(self, reason: str) -> str:
        """Move head.json to a file that also has the reason, and return that file's path."""
        witness = decode_witness(self.store.read(WITNESS_KEY))
        path = f"head-{witness.sequence}-{witness.sha256[:12]}.json"
        noted = {**msgspec.structs.asdict(witness), "accepted because": reason}
        # The copy is written before the original goes: a process killed in between still has its
        # witness.
        self.store.replace(path, msgspec.json.encode(noted))
        self.store.delete([WITNESS_KEY])
        return path

    def _as_stored(self, manifest: Manifest) -> Manifest:
        """A manifest as it is written: partial, unless there is a reason to write it whole."""
        entry = manifest.entry
        base = self._last_base(entry)
        if base is None or entry.sequence - base.entry.sequence >= WHOLE_AFTER_ENTRIES:
            return manifest
        changed_accounts = _changed_accounts(manifest.ledger, base)
        if 2 * len(changed_accounts) > len(manifest.ledger.partitions):
            # Nearly as large as a whole one, which needs only one read.
            return manifest
        return replace(
            manifest,
            base=manifest_reference(base.entry.sequence, base.ledger.sha256),
            ledger=replace(manifest.ledger, partitions=changed_accounts),
        )

    def _last_base(self, entry: Entry) -> LedgerManifest | None:
        """The last whole manifest before an entry; None if there is none that can be read."""
        if not entry.previous:
            return None
        previous_reference = manifest_reference(entry.sequence - 1, entry.previous)
        try:
            previous = self.read_ledger(previous_reference)
            return self.read_ledger(previous.base or previous_reference)
        except (UnreadableManifestError, PlatformError):
            return None  # A whole manifest needs nothing but itself.

    def _whole_ledger(
        self, reference: ManifestReference, stored: Manifest | LedgerManifest
    ) -> Ledger:
        """The ledger of a manifest with the accounts of all partitions."""
        # A manifest cannot contain its own hash, so the ledger gets it here.
        ledger = replace(stored.ledger, sha256=reference.sha256)
        if stored.base is None:
            return ledger
        base = self.read_ledger(stored.base)
        if base.base is not None or base.entry.sequence != stored.base.sequence:
            raise UnreadableManifestError(
                stored.base, f"it is not the whole ledger that entry {reference.sequence} needs"
            )
        # The accounts of the base are shared, not copied: comparing them with the next entry's is
        # then mostly a comparison of object identities.
        partitions = {**base.ledger.partitions, **ledger.partitions}
        if len(partitions) > len(base.ledger.partitions):
            partitions = dict(sorted(partitions.items()))
        return replace(ledger, partitions=partitions)

    def _read_file(
        self, reference: ManifestReference, manifest_type: type[AnyManifest]
    ) -> AnyManifest:
        """The content of a manifest's file, proved by its hash."""
        # Imported here, because pages must start without pyarrow.
        import pyarrow as pa

        try:
            packed = self.store.read(reference.path)
        except FileNotFoundError:
            raise UnreadableManifestError(reference, "it is missing") from None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise UnreadableManifestError(reference, str(error)) from None
        except OSError as error:
            # The disk or the network is in trouble, which says nothing about the manifest.
            raise PlatformError(
                f"manifest {reference.path} cannot be read: {error.strerror or error}",
                next="look at the disk (permissions, errors) and the network, then run again",
            ) from error
        sha256 = hashlib.sha256(packed).hexdigest()
        if sha256 != reference.sha256:
            raise UnreadableManifestError(reference, "its hash differs", sha256)
        try:
            content = pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
            return decode_manifest(content, manifest_type)
        except (OSError, ValueError, RecursionError, BrokenPromiseError) as error:
            # The errors of msgspec and Arrow are of these kinds. A certificate that does not add up
            # breaks a promise.
            raise UnreadableManifestError(reference, str(error)) from None

    def _remember(self, reference: ManifestReference, manifest: Manifest | LedgerManifest) -> None:
        """Keep a ledger, and of those before only its base."""
        base_sha256 = reference.sha256 if manifest.base is None else manifest.base.sha256
        kept = {}
        if base_sha256 in self._recent:
            kept[base_sha256] = self._recent[base_sha256]
        kept[reference.sha256] = LedgerManifest(
            format=manifest.format,
            base=manifest.base,
            entry=EntryHeader(manifest.entry.sequence, manifest.entry.kind),
            ledger=replace(manifest.ledger, sha256=reference.sha256),
        )
        self._recent = kept


def _changed_accounts(ledger: Ledger, base: LedgerManifest) -> dict[str, Account]:
    """The accounts that are not the same as in the base. An account never leaves the ledger."""
    before = base.ledger.partitions
    changed = {}
    for name, account in ledger.partitions.items():
        # Most accounts are the very objects of the base: comparing values is only needed otherwise.
        account_before = before.get(name)
        if account is not account_before and account != account_before:
            changed[name] = account
    return changed


class LedgerHead(Struct):
    """The ledger as it was read, and the token with which the store commits on exactly that version."""

    ledger: Ledger
    token: Any = None
    foreign_findings: list[Finding] = []
    """Commits by other writers since the last entry, if they changed data."""
    format: int = MANIFEST_FORMAT
    """The format of the last entry's manifest."""
    witness: EntryMark | None = None
    """What the witness said when the ledger was compared with it."""


class CommitMark(Struct, frozen=True, kw_only=True):
    """What a commit of the table says about its ledger entry."""

    sequence: int
    manifest: str
    sha256: str
    version: int = -1
    """The version of the table that this commit made."""

    def manifest_reference(self) -> ManifestReference:
        """The manifest of the entry."""
        return ManifestReference(self.sequence, self.manifest, self.sha256)


class StoredLedger:
    """A ledger whose entries are the commits of a table."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._manifest_files = ManifestFiles(store)
        self.known_marks: dict[int, CommitMark] = {}
        """Marks by sequence that were read before, where asking the table again is a request."""

    @property
    def manifests(self) -> ManifestFiles:
        """The manifests and the witness."""
        return self._manifest_files

    def load_table(self, stream: str) -> Any:
        """The table as it is now, as the token on which a commit is made; None if there is none."""
        raise NotImplementedError

    def logged_commits(self, stream: str, table: Any) -> Iterator[CommitMark | Finding]:
        """The commits of the table, newest first: the mark of an entry, or the finding about a commit
        by which somebody else changed data. Other commits are left out.
        """
        raise NotImplementedError

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry, and findings for what others committed after it. None: no ledger yet."""
        table = self.load_table(stream)
        if table is None:
            return None
        foreign_findings: list[Finding] = []
        for commit in self.logged_commits(stream, table):
            if isinstance(commit, Finding):
                foreign_findings.append(commit)
                continue
            reference = commit.manifest_reference()
            with reading_manifest(stream, reference):
                manifest = self.manifests.read_ledger(reference)
            _refuse_other_manifest(stream, commit, manifest.entry.sequence, manifest.ledger)
            return LedgerHead(manifest.ledger, table, foreign_findings, manifest.format)
        raise ConfigError(
            f"{stream}: {self.store.url}/records is a Delta table that Seriatim did not make",
            next="give the stream an output path of its own",
        )

    def ledger_at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""
        return self.manifest_at(stream, sequence).ledger

    def manifest_at(self, stream: str, sequence: int) -> Manifest:
        """An entry and the whole ledger after it."""
        return self._read_manifest(stream, self.find_mark(stream, sequence))

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than `after`, oldest first."""
        later_marks = list(takewhile(lambda mark: mark.sequence > after, self._marks(stream)))
        return (self._read_manifest(stream, mark) for mark in reversed(later_marks))

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than sequence `after` names this manifest."""
        known = self.known_marks.get(after + 1)
        if known is not None and known.sha256 == sha256:
            return True
        marks = takewhile(lambda mark: mark.sequence > after, self._marks(self._folder_name()))
        return any(mark.sha256 == sha256 for mark in marks)

    def find_mark(self, stream: str, sequence: int) -> CommitMark:
        """The commit that made an entry. An entry that does not exist is refused."""
        if sequence >= 0:
            known = self.known_marks.get(sequence)
            if known is not None:
                return known
            for mark in takewhile(lambda mark: mark.sequence >= sequence, self._marks(stream)):
                if mark.sequence == sequence:
                    return mark
        raise ConfigError(
            f"{stream}: there is no ledger entry {sequence}",
            next=f"`seriatim status {stream}` shows the last entry",
        )

    def put_manifest(self, manifest: Manifest) -> ManifestReference:
        """Store a manifest under its own hash."""
        return self.manifests.write(manifest)

    def sweep(self, head: LedgerHead) -> list[str]:
        """Delete unfinished files, and manifests of entries up to `head` that were never committed.
        Returns the deleted paths.
        """
        # Only the notes beside the folders: what is in them may still be written by other runs.
        swept = self.store.delete_unfinished("", nested=False)
        swept += self.store.delete_unfinished(MANIFEST_FOLDER)
        # An entry has exactly one manifest. Only where there are several of one number is it worth
        # reading the whole log to learn which of them was committed.
        candidates: set[str] = set()
        for sequence, references in self.manifests.references_by_sequence().items():
            if sequence <= head.ledger.sequence and len(references) > 1:
                candidates.update(reference.path for reference in references)
        if not candidates:
            return swept
        # The base of a manifest is a committed one, so bases stay with the others.
        committed = {mark.manifest for mark in self._marks(head.ledger.stream, head.token)}
        return swept + self.store.delete(candidates - committed)

    def differing_files(self) -> list[str]:
        """The file that `verify` reported as different from its entry, if any."""
        try:
            report = json.loads(self.store.read(DIFFERENCE_FILE))
            return [str(report["file"])]
        except (OSError, ValueError, KeyError, TypeError):
            # A report that cannot be read is no loss: verify finds the difference again.
            return []

    def note(self, key: str) -> EntryMark:
        """The entry that a note names; sequence -1 if there is no note, or none that can be read.
        A lost note costs work that is done again, nothing else.
        """
        try:
            return msgspec.json.decode(self.store.read(key), type=EntryMark)
        except (OSError, ValueError, RecursionError):
            return EntryMark()

    def put_note(self, key: str, entry: EntryMark) -> None:
        """Write a note."""
        self.store.replace(key, msgspec.json.encode(entry))

    def witness(self) -> EntryMark | None:
        """The last entry that head.json knows. None: no such file."""
        return read_witness(self.manifests)

    def put_witness(self, entry: EntryMark) -> None:
        """Write the last entry to head.json."""
        self.manifests.put_witness(entry)

    def archive_witness(self, reason: str) -> str:
        """Move head.json to a file that also has the reason, and return that file's path."""
        return self.manifests.archive_witness(reason)

    def _marks(self, stream: str, table: Any = None) -> Iterator[CommitMark]:
        """The marks of all entries, newest first; of the table as it is now, if none is given."""
        loaded = self.load_table(stream) if table is None else table
        if loaded is not None:
            for commit in self.logged_commits(stream, loaded):
                if isinstance(commit, CommitMark):
                    yield commit

    def _read_manifest(self, stream: str, mark: CommitMark) -> Manifest:
        """The manifest that a commit names. Its hash, its entry and its stream must be as named."""
        reference = mark.manifest_reference()
        with reading_manifest(stream, reference):
            manifest = self.manifests.read(reference)
        _refuse_other_manifest(stream, mark, manifest.entry.sequence, manifest.ledger)
        return manifest

    def _folder_name(self) -> str:
        return output_folder_name(self.store)


def output_folder_name(store: Store) -> str:
    """The last part of the output path, for messages where the stream's name is not known."""
    return store.url.rpartition("/")[2]


def read_witness(manifests: ManifestFiles) -> EntryMark | None:
    """The last entry that head.json knows; None if there is no such file. A head.json that cannot be
    read is refused.
    """
    try:
        return manifests.witness()
    except UnreadableWitnessError as error:
        store = manifests.store
        raise IntegrityError(
            f"{output_folder_name(store)}: head.json cannot be read: {error}",
            cause="it was changed by somebody else: it is always replaced as a whole",
            next=f"restore {store.url}/head.json from a backup,\n"
            "or move it away. Then, before the next run, see whether the entry that `seriatim status`\n"
            "shows is the last one that a run printed; if it is older, restore the ledger as well",
        ) from None


@contextmanager
def reading_manifest(stream: str, reference: ManifestReference) -> Iterator[None]:
    """Refuse a manifest that cannot be read."""
    try:
        yield
    except UnreadableManifestError as error:
        reason = error.reason
        if error.reference != reference:
            reason = f"it is based on {error.reference.path}: {reason}"
        raise IntegrityError(
            f"{stream}: the manifest of entry {reference.sequence} cannot be read: {reason}"[:400],
            manifest=reference.path,
            next=RESTORE_LOG_ADVICE,
        ) from error


def _refuse_other_manifest(stream: str, mark: CommitMark, sequence: int, ledger: Ledger) -> None:
    if sequence != mark.sequence:
        raise unreadable_ledger_error(
            stream, f"manifest {mark.manifest} is of entry {sequence}, not {mark.sequence}"
        )
    refuse_other_stream(stream, ledger)


def refuse_other_stream(stream: str, ledger: Ledger) -> None:
    """Refuse the ledger of another stream, which has the same output path."""
    if ledger.stream != stream:
        raise OtherStreamError(
            f"{stream}: its output path holds stream {ledger.stream!r}",
            next="give each stream its own path",
        )


def unreadable_ledger_error(stream: str, reason: str) -> IntegrityError:
    """The error about a table, or a commit of it, that cannot be read."""
    return IntegrityError(
        f"{stream}: the ledger cannot be read", cause=reason[:400], next=RESTORE_LOG_ADVICE
    )
