"""Manifests and the witness: the one place that writes and reads them.

A manifest is the file of an entry: the entry, and the ledger after it. The ledger has an account of
every partition, but most entries change only a few. So a manifest is whole or partial. A partial one
names a whole one before it, its base, and carries only the accounts that differ from those of the
base. Whoever reads it gets the whole ledger: base and partial manifest are two reads.

The witness (head.json) names the last entry. Each entry names the one before it by its hash, and
thereby everything can be proved that is read here.

Next: ledger/delta_store.py commits entries, storage/status_file.py reads manifests for web pages,
operations/prove/verify.py checks them.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from seriatim.errors import BrokenPromiseError, ConfigError
from seriatim.ledger.entries import ENTRY_TYPES, Entry
from seriatim.ledger.model import Account, Ledger
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


class Witness(Struct, frozen=True):
    """The last entry that head.json knows."""

    sequence: int
    sha256: str


class UnreadableManifestError(Exception):  # not a SeriatimError: each reader has its own advice
    """A manifest is missing, or its content is not the one that was committed."""

    def __init__(self, reference: ManifestReference, reason: str, actual_sha256: str = "") -> None:
        super().__init__(reference, reason, actual_sha256)
        self.reference = reference
        self.reason = reason
        self.actual_sha256 = actual_sha256
        """If the content is another one: its hash."""


class UnreadableWitnessError(Exception):  # not a SeriatimError: each reader has its own advice
    """The content of head.json is no witness."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of a manifest's file before compression, always the same for the same value."""
    return msgspec.json.encode(manifest, order="deterministic")


def decode_manifest(content: bytes) -> Manifest:
    """A manifest as its file has it. A format or a kind of entry that this version does not know is
    refused.
    """
    return _decode(content, msgspec.json.Decoder(Manifest))


def _decode(content: bytes, decoder: msgspec.json.Decoder[AnyManifest]) -> AnyManifest:
    try:
        manifest = decoder.decode(content)
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


def decode_witness(content: bytes) -> Witness:
    """A witness from the content of head.json."""
    try:
        witness = msgspec.json.decode(content, type=Witness)
    except (ValueError, RecursionError) as error:
        # Errors of msgspec and text that is no UTF-8 are ValueErrors.
        raise UnreadableWitnessError(str(error)) from None
    if not 0 <= witness.sequence < SEQUENCE_MAX:
        raise UnreadableWitnessError(f"its sequence is {witness.sequence}")
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

    def write(self, manifest: Manifest) -> ManifestReference:
        """Store the manifest of an entry, as a partial one where that is enough."""
        # Imported here, because pages must start without pyarrow.
        import pyarrow as pa

        stored = self._as_stored(manifest)
        packed = pa.compress(encode_manifest(stored), codec="zstd", asbytes=True)
        reference = manifest_reference(manifest.entry.sequence, hashlib.sha256(packed).hexdigest())
        self.store.create(reference.path, packed)
        self._remember(reference, replace(manifest, base=stored.base))
        return reference

    def read(self, reference: ManifestReference) -> Manifest:
        """An entry, and the whole ledger after it."""
        stored = self._read_file(reference, msgspec.json.Decoder(Manifest))
        manifest = replace(stored, ledger=self._whole_ledger(reference, stored))
        self._remember(reference, manifest)
        return manifest

    def read_ledger(self, reference: ManifestReference) -> LedgerManifest:
        """The whole ledger after an entry. What this object has read or written just before is not
        read again.
        """
        recent = self._recent.get(reference.sha256)
        if recent is not None:
            return recent
        stored = self._read_file(reference, msgspec.json.Decoder(LedgerManifest))
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

    def witness(self) -> Witness | None:
        """What head.json says; None if there is no such file.

        A disk that cannot be read is an `OSError`, which says nothing about the file.
        """
        try:
            return decode_witness(self.store.read(WITNESS_KEY))
        except FileNotFoundError:
            return None

    def put_witness(self, witness: Witness) -> None:
        """Write head.json."""
        self.store.replace(WITNESS_KEY, msgspec.json.encode(witness))

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
        except UnreadableManifestError:
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
        partitions = {**base.ledger.partitions, **ledger.partitions}
        if len(partitions) > len(base.ledger.partitions):
            partitions = dict(sorted(partitions.items()))
        return replace(ledger, partitions=partitions)

    def _read_file(
        self, reference: ManifestReference, decoder: msgspec.json.Decoder[AnyManifest]
    ) -> AnyManifest:
        """The content of a manifest's file, proved by its hash."""
        # Imported here, because pages must start without pyarrow.
        import pyarrow as pa

        try:
            packed = self.store.read(reference.path)
        except FileNotFoundError:
            raise UnreadableManifestError(reference, "it is missing") from None
        except OSError as error:
            raise UnreadableManifestError(reference, error.strerror or str(error)) from None
        sha256 = hashlib.sha256(packed).hexdigest()
        if sha256 != reference.sha256:
            raise UnreadableManifestError(reference, "its hash differs", sha256)
        try:
            content = pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
            return _decode(content, decoder)
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
