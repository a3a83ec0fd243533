"""The status file, and the ledger as its manifests have it: what web pages read, without Delta, Kafka
or Spark.

The witness (head.json) names the manifest of the last entry by its hash, and each manifest names
the one before. So a page reads a few small files, each proved by its hash. What cannot be read is
reported as such. Nothing here is ever written but `status.json`, which is replaced as a whole.

Next: operations/stream_status.py says what it means; ledger/delta_store.py writes manifests and the
witness.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.model import Ledger, Manifest, decode_manifest
from seriatim.operations.stream_status import SavedStatus

STATUS_FILE = "status.json"
SEQUENCE_MAX = 10**12
"""A higher sequence is not that of a ledger: the witness is damaged."""


class StatusFiles:
    """The status file and manifests of one stream, below its output path.

    With `stream`, what another stream left at a shared path is not taken for its own.
    """

    def __init__(self, root: Path, stream: str | None = None) -> None:
        self.root = root
        self.stream = stream
        self._hashes_by_entry: dict[int, list[str]] | None = None

    def read_status(self) -> SavedStatus | None:
        """The status at the last look; None if there is none or it cannot be read. The next look
        writes it anew.
        """
        try:
            content = (self.root / STATUS_FILE).read_bytes()
            status = msgspec.json.decode(content, type=SavedStatus)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            # Text that is no UTF-8 is a ValueError, deep nesting a RecursionError.
            return None
        if self.stream is not None and self.stream != status.stream:
            return None
        return status

    def write_status(self, status: SavedStatus) -> None:
        """Store the status of a look, for pages."""
        # Imported here, because pages must start without pyarrow.
        from seriatim.storage.files import write_file

        write_file(self.root / STATUS_FILE, msgspec.json.encode(status))

    def witness(self) -> tuple[int, str] | None:
        """The last entry and its hash; None if the stream was never run."""
        try:
            noted = json.loads((self.root / "head.json").read_bytes())
            sequence = int(noted["sequence"])
            sha256 = str(noted["sha256"])
            if not 0 <= sequence < SEQUENCE_MAX:
                raise ValueError(f"its sequence is {sequence}")
            return sequence, sha256
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError, RecursionError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"{self.root.name}: head.json cannot be read: {error}",
                next=f"restore {self.root / 'head.json'} from a backup",
            ) from None

    def last_ledger(self) -> Ledger | None:
        """The ledger as of the last entry that the witness knows; None if it was never run."""
        witness = self.witness()
        if witness is None:
            return None
        sequence, sha256 = witness
        return self._read_manifest(sequence, sha256).ledger

    def manifest(self, sequence: int) -> Manifest:
        """An entry, and the ledger after it."""
        witness = self.witness()
        last_sequence = -1 if witness is None else witness[0]
        if witness is None or not 0 <= sequence <= last_sequence:
            raise ConfigError(f"there is no entry {sequence}", next=f"the last is {last_sequence}")
        sha256 = self._manifest_hash(sequence, last_sequence, witness[1])
        return self._read_manifest(sequence, sha256)

    def manifests_backward(self, count: int, sequence: int | None = None) -> Iterator[Manifest]:
        """At most `count` entries from `sequence` (default: the last) back, newest first."""
        witness = self.witness()
        if witness is None:
            return
        newest = witness[0] if sequence is None else sequence
        manifest = self.manifest(newest)
        yield manifest
        for _ in range(count - 1):
            entry = manifest.entry
            if entry.sequence <= 0:
                return
            manifest = self._read_manifest(entry.sequence - 1, entry.previous)
            yield manifest

    def _manifest_hash(
        self,
        sequence: int,
        last_sequence: int,
        last_sha256: str,
    ) -> str:
        """The hash of an entry's manifest.

        If failed commits left several manifests of this entry, the entry after it says which one is
        right. So start at the nearest later entry whose hash is certain, and walk back from there.
        """
        if sequence == last_sequence:
            return last_sha256
        if self._hashes_by_entry is None:
            # Listed once: a page may need fifty of five thousand entries.
            self._hashes_by_entry = _list_manifest_hashes(self.root / "manifests")
        certain: dict[int, str] = {last_sequence: last_sha256}
        for number, hashes in self._hashes_by_entry.items():
            if sequence <= number < last_sequence and len(hashes) == 1:
                certain[number] = hashes[0]
        nearest = min(certain)
        sha256 = certain[nearest]
        for number in range(nearest, sequence, -1):
            sha256 = self._read_manifest(number, sha256).entry.previous
        return sha256

    def _read_manifest(self, sequence: int, sha256: str) -> Manifest:
        # Imported here, because pages must start without pyarrow.
        import pyarrow as pa

        path = self.root / "manifests" / f"{sequence:010d}-{sha256}.json.zst"
        try:
            packed = path.read_bytes()
            if hashlib.sha256(packed).hexdigest() != sha256:
                raise ValueError("its hash differs")
            content = pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
            manifest = decode_manifest(content)
        except (OSError, ValueError) as error:
            # The errors of msgspec and Arrow are of these kinds.
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
            raise IntegrityError(
                f"the manifest of entry {sequence} cannot be read: {reason}",
                next="`seriatim verify` says what is wrong",
            ) from None
        if self.stream is not None and self.stream != manifest.ledger.stream:
            raise IntegrityError(
                f"{self.stream}: its output path holds stream {manifest.ledger.stream!r}",
                next="give each stream its own path",
            )
        # A manifest cannot contain its own hash, so the ledger gets it here.
        ledger = replace(manifest.ledger, sha256=sha256)
        return replace(manifest, ledger=ledger)


def _list_manifest_hashes(folder: Path) -> dict[int, list[str]]:
    """The hashes of the manifests in a folder, by entry."""
    hashes_by_entry: dict[int, list[str]] = {}
    for path in folder.glob("*-*.json.zst"):
        number, _, sha256 = path.name.removesuffix(".json.zst").partition("-")
        if number.isdecimal():
            hashes_by_entry.setdefault(int(number), []).append(sha256)
    return hashes_by_entry
