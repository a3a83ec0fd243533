"""A long history: how soon a ledger of a year of entries opens, and how soon one entry of it is found.

    python -m bench.history --entries 35000

A few entries are committed by the product. The others are written as it writes them, without waiting for
the disk, because making them one by one would take half an hour. No Spark, no broker. Saved in
results/history.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from msgspec.structs import replace

from bench.check import first_change
from bench.growth import commit_slice, create_stream, current_load
from bench.run import RESULTS, print_progress
from seriatim import context
from seriatim.clock import WallClock
from seriatim.engine.offsets import Partition
from seriatim.ledger.commit import read_head, start_ledger
from seriatim.ledger.manifests import ManifestFiles, ManifestReference
from seriatim.ledger.model import EntryMark
from seriatim.storage.store import LocalStore
from seriatim.stream_files import StreamFile

ENTRIES = 35_000
"""One every quarter of an hour for a year."""
COMMITTED_ENTRIES = 3
COMMITS_SINCE_CHECKPOINT = 99
"""The most commits that a reader has to read after the last checkpoint."""
ROUNDS = 3


def make_history(folder: Path, entries: int) -> StreamFile:
    """A stream with so many entries, of one partition."""
    file = create_stream(folder)
    store = context.ledger(file, with_schema=True)
    partition = Partition("bench", 0)
    start_ledger(store, WallClock(), "s", "first", (first_change(partition),))
    for turn in range(COMMITTED_ENTRIES):
        commit_slice(file, store, WallClock(), turn, [partition])
    _write_copies(file, entries)
    return file


def _write_copies(file: StreamFile, entries: int) -> None:
    """Continue the log with copies of its last entry, each with its own number, manifest and place in
    the chain.
    """
    store = context.ledger(file)
    root = Path(file.stream.output.path)
    log = root / "records" / "_delta_log"
    template = store.manifest_at("s", COMMITTED_ENTRIES)
    previous = store.find_mark("s", COMMITTED_ENTRIES).manifest_reference()
    last_commit = (log / f"{COMMITTED_ENTRIES:020d}.json").read_text()
    manifests = ManifestFiles(_QuickStore(root))
    for sequence in range(COMMITTED_ENTRIES + 1, entries):
        entry = replace(template.entry, sequence=sequence, previous=previous.sha256)
        ledger = replace(template.ledger, sequence=sequence, sha256="")
        reference = manifests.write(replace(template, entry=entry, ledger=ledger, base=None))
        text = _renumbered(last_commit, sequence, previous, reference)
        (log / f"{sequence:020d}.json").write_text(text)
        previous = reference
        if sequence == entries - 1 - COMMITS_SINCE_CHECKPOINT:
            DeltaTable(str(root / "records")).create_checkpoint()
    store.put_witness(EntryMark(previous.sequence, previous.sha256))


def _renumbered(
    text: str, sequence: int, previous: ManifestReference, reference: ManifestReference
) -> str:
    """The text of a commit as that of another entry, which adds a file of its own."""
    lines = []
    for line in text.splitlines():
        action = json.loads(line)
        info = action.get("commitInfo")
        if info is not None:
            info["seriatim"] = {
                "sequence": sequence,
                "previous": previous.sha256,
                "manifest": reference.path,
                "sha256": reference.sha256,
            }
        if "txn" in action:
            action["txn"]["version"] = sequence
        if "add" in action:
            action["add"]["path"] = re.sub(
                r"[^/]+$", f"copy-{sequence}.parquet", action["add"]["path"]
            )
        lines.append(json.dumps(action))
    return "\n".join(lines) + "\n"


class _QuickStore(LocalStore):
    """Writes new files without waiting for the disk."""

    def create(self, key: str, content: Any) -> None:
        """Write a file."""
        (self.root / key).write_bytes(content)


def best_seconds(work: Callable[[], object]) -> dict[str, float]:
    """The least time and CPU that the work takes."""
    wall, cpu = [], []
    for _ in range(ROUNDS):
        began = time.monotonic()
        cpu_before = time.process_time()
        work()
        wall.append(time.monotonic() - began)
        cpu.append(time.process_time() - cpu_before)
    return {"wall_seconds": round(min(wall), 4), "cpu_seconds": round(min(cpu), 4)}


def measure(file: StreamFile, entries: int) -> dict[str, Any]:
    """How long opening and finding takes, each time with nothing that was read before."""

    def find(sequence: int) -> Callable[[], object]:
        return lambda: context.ledger(file).manifest_at("s", sequence)

    return {
        "entries": entries,
        "open": best_seconds(lambda: read_head(context.ledger(file, with_schema=True), "s")),
        "find_first": best_seconds(find(1)),
        "find_middle": best_seconds(find(entries // 2)),
        "find_last": best_seconds(find(entries - 1)),
        "load": current_load(),
    }


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[100, ENTRIES])
    options = parser.parse_args()
    results = []
    for entries in options.entries:
        with tempfile.TemporaryDirectory() as folder:
            print_progress(f"making {entries:,} entries")
            results.append(measure(make_history(Path(folder), entries), entries))
    (RESULTS / "history.json").write_text(json.dumps(results, indent=2) + "\n")
    json.dump(results, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
