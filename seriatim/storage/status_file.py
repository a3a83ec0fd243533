"""The status file on disk, and the ledger as its manifests tell it: what pages read, without Delta,
Kafka or Spark.

The witness (head.json) names the last entry's manifest by its hash, each manifest names the one
before. So a page reads a few small files, each proved by its hash. What cannot be read is said as
such; nothing here is ever changed but `status.json`, which is put in place as a whole.

Next room: operations/stream_status.py says what it means; ledger/delta_store.py writes manifests
and the witness.
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
"""Beyond it is no ledger, but a witness that is damaged."""


class StatusFiles:
    """One stream's, below its output path; `stream`: what another one of a shared path left is not
    shown as its own.
    """

    def __init__(self, root: Path, stream: str | None = None) -> None:
        self.root, self.stream = root, stream
        self._hashes_by_entry: dict[int, list[str]] | None = None

    def read_status(self) -> SavedStatus | None:
        """What the last look said; none, or one that cannot be read: the next look writes it anew."""
        try:
            found = msgspec.json.decode((self.root / STATUS_FILE).read_bytes(), type=SavedStatus)
        except (
            OSError,
            ValueError,
            RecursionError,
            msgspec.MsgspecError,
        ):  # text that is no UTF-8 is a ValueError
            return None
        return found if self.stream in (None, found.stream) else None

    def write_status(self, status: SavedStatus) -> None:
        """Keep a look, for pages."""
        from seriatim.storage.files import write_file

        write_file(self.root / STATUS_FILE, msgspec.json.encode(status))

    def witness(self) -> tuple[int, str] | None:
        """The last entry and its hash; None: it was never run."""
        try:
            seen = json.loads((self.root / "head.json").read_bytes())
            sequence, sha256 = int(seen["sequence"]), str(seen["sha256"])
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
        """The ledger as the witness has seen it."""
        seen = self.witness()
        return None if seen is None else self._read_manifest(*seen).ledger

    def manifest(self, sequence: int) -> Manifest:
        """An entry, and the ledger after it."""
        seen = self.witness()
        if seen is None or not 0 <= sequence <= seen[0]:
            last = -1 if seen is None else seen[0]
            raise ConfigError(f"there is no entry {sequence}", next=f"the last is {last}")
        return self._read_manifest(sequence, self._manifest_hash(sequence, *seen))

    def manifests_backward(self, count: int, sequence: int | None = None) -> Iterator[Manifest]:
        """Entries from `sequence` (default: the last) back, newest first, at most so many."""
        seen = self.witness()
        if seen is None:
            return
        found = self._read_manifest(*seen) if sequence is None else self.manifest(sequence)
        yield found
        for _ in range(count - 1):
            if found.entry.sequence <= 0:
                return
            found = self._read_manifest(found.entry.sequence - 1, found.entry.previous)
            yield found

    def _manifest_hash(self, sequence: int, last_sequence: int, sha256: str) -> str:
        """The hash of an entry's manifest. Where tries left several, the entry after it says which."""
        if self._hashes_by_entry is None:  # once: a page may need fifty of five thousand
            self._hashes_by_entry = _list_manifest_hashes(self.root / "manifests")
        known = self._hashes_by_entry
        if sequence < last_sequence and len(known.get(sequence, ())) == 1:
            return known[sequence][0]
        at = min(
            (
                number
                for number, found in known.items()
                if sequence < number < last_sequence and len(found) == 1
            ),
            default=last_sequence,
        )
        named = known[at][0] if at < last_sequence else sha256
        for number in range(at, sequence, -1):
            named = self._read_manifest(number, named).entry.previous
        return named

    def _read_manifest(self, sequence: int, sha256: str) -> Manifest:
        import pyarrow as pa

        path = self.root / "manifests" / f"{sequence:010d}-{sha256}.json.zst"
        try:
            packed = path.read_bytes()
            if hashlib.sha256(packed).hexdigest() != sha256:
                raise ValueError("its hash differs")
            found = decode_manifest(
                pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
            )
        except (OSError, ValueError) as error:  # msgspec's and Arrow's own are of these kinds
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise IntegrityError(
                f"the manifest of entry {sequence} cannot be read: {why}",
                next="`seriatim verify` says what is wrong",
            ) from None
        if self.stream not in (None, found.ledger.stream):
            raise IntegrityError(
                f"{self.stream}: its output path holds stream {found.ledger.stream!r}",
                next="give each stream its own path",
            )
        return replace(found, ledger=replace(found.ledger, sha256=sha256))


def _list_manifest_hashes(folder: Path) -> dict[int, list[str]]:
    """Manifests that are there: their hashes, by entry."""
    found: dict[int, list[str]] = {}
    for path in folder.glob("*-*.json.zst"):
        number, _, sha256 = path.name.removesuffix(".json.zst").partition("-")
        if number.isdecimal():
            found.setdefault(int(number), []).append(sha256)
    return found
