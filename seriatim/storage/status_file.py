"""The status file, and the ledger as its manifests have it: what web pages read, without Delta, Kafka
or Spark.

The witness (head.json) names the manifest of the last entry by its hash, and each manifest names
the one before. So a page reads a few small files, each proved by its hash. What cannot be read is
reported as such. Nothing here is ever written but `status.json`, which is replaced as a whole.

Next: operations/status.py says what it means; ledger/delta_store.py writes manifests and the
witness.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from seriatim.errors import ConfigError
from seriatim.ledger.manifests import (
    Manifest,
    ManifestFiles,
    ManifestReference,
    manifest_reference,
    output_folder_name,
    read_witness,
    reading_manifest,
    refuse_other_stream,
)
from seriatim.ledger.model import EntryMark, Ledger
from seriatim.operations.status import StreamStatus, to_json_values
from seriatim.storage.store import Store

STATUS_FILE = "status.json"
STATUS_KEYS = (
    "stream",
    "at_seconds",
    "sequence",
    "ran_seconds",
    "tier",
    "verdict",
    "circuit",
    "checked",
    "rate",
    "partitions",
    "quarantined",
    "quarantined_count",
    "sessions_max",
    "holds",
    "published",
    "snapshot_requests",
    "gaps_open",
    "concerns",
)
"""What the status file holds."""
HIDDEN_PARTITION_KEYS = ("topic_id", "unread", "headless", "counts")
QUARANTINED_LISTED_MAX = 200
"""So many sessions in quarantine are listed in the file; the others are only counted."""


class StatusFiles:
    """The status file and manifests of one stream, below its output path.

    With `stream`, what another stream left at a shared path is not taken for its own.
    """

    def __init__(self, store: Store, stream: str | None = None) -> None:
        self.store = store
        self.stream = stream
        self._manifests = ManifestFiles(store)
        self._references: dict[int, list[ManifestReference]] | None = None

    def read_status(self) -> StreamStatus | None:
        """The status at the last look; None if there is none or it cannot be read. The next look
        writes it anew.
        """
        try:
            content = self.store.read(STATUS_FILE)
            status = msgspec.json.decode(content, type=StreamStatus)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            # Text that is no UTF-8 is a ValueError, deep nesting a RecursionError.
            return None
        if self.stream is not None and self.stream != status.stream:
            return None
        return status

    def write_status(self, status: StreamStatus) -> None:
        """Store the status of a look, for pages."""
        values = to_json_values(status, STATUS_KEYS, HIDDEN_PARTITION_KEYS)
        values["quarantined"] = values["quarantined"][:QUARANTINED_LISTED_MAX]
        self.store.replace(STATUS_FILE, msgspec.json.encode(values))

    def witness(self) -> EntryMark | None:
        """The last entry and its hash; None if the stream was never run."""
        return read_witness(self._manifests)

    def last_ledger(self) -> Ledger | None:
        """The ledger as of the last entry that the witness knows; None if it was never run."""
        witness = self.witness()
        if witness is None:
            return None
        return self.ledger_at(witness)

    def ledger_at(self, witness: EntryMark) -> Ledger:
        """The ledger as of an entry."""
        reference = manifest_reference(witness.sequence, witness.sha256)
        with reading_manifest(self._name(), reference):
            ledger = self._manifests.read_ledger(reference).ledger
        self._refuse_other_stream(ledger)
        return ledger

    def manifest(self, sequence: int) -> Manifest:
        """An entry, and the ledger after it."""
        witness = self.witness()
        last_sequence = -1 if witness is None else witness.sequence
        if witness is None or not 0 <= sequence <= last_sequence:
            raise ConfigError(f"there is no entry {sequence}", next=f"the last is {last_sequence}")
        return self._read_manifest(self._find_reference(sequence, witness))

    def manifests_backward(self, count: int) -> Iterator[Manifest]:
        """At most `count` entries from the last back, newest first."""
        witness = self.witness()
        if witness is None:
            return
        manifest = self.manifest(witness.sequence)
        yield manifest
        for _ in range(count - 1):
            entry = manifest.entry
            if entry.sequence <= 0:
                return
            reference = manifest_reference(entry.sequence - 1, entry.previous)
            manifest = self._read_manifest(reference)
            yield manifest

    def _find_reference(self, sequence: int, witness: EntryMark) -> ManifestReference:
        """The reference to an entry's manifest.

        If failed commits left several manifests of this entry, the entry after it says which one is
        right. So start at the nearest later entry whose manifest is certain, and walk back from
        there.
        """
        nearest = manifest_reference(witness.sequence, witness.sha256)
        if sequence == witness.sequence:
            return nearest
        if self._references is None:
            # Listed once: a page may need fifty of five thousand entries.
            self._references = self._manifests.references_by_sequence()
        for number, references in self._references.items():
            if sequence <= number < nearest.sequence and len(references) == 1:
                nearest = references[0]
        while nearest.sequence > sequence:
            entry = self._read_manifest(nearest).entry
            nearest = manifest_reference(nearest.sequence - 1, entry.previous)
        return nearest

    def _read_manifest(self, reference: ManifestReference) -> Manifest:
        with reading_manifest(self._name(), reference):
            manifest = self._manifests.read(reference)
        self._refuse_other_stream(manifest.ledger)
        return manifest

    def _refuse_other_stream(self, ledger: Ledger) -> None:
        if self.stream is not None:
            refuse_other_stream(self.stream, ledger)

    def _name(self) -> str:
        """The stream, for messages."""
        return self.stream or output_folder_name(self.store)
