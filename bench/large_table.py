"""What a slice of one large table costs: 100,000 updates of one session, in a table of ten thousand rows
and in one of a million.

    python -m bench.large_table                     # into results/large-table.json
    python -m bench.large_table --rows 100000 --rounds 3

The updates name 1,000 rows, then 10,000, spread over the whole table. Tasks of both tables run by turns in
one process, so that a busy machine slows both. CPU of the process. Each slice goes on from the state of
the one before, so that merges of state files are in the figures.

Next: at_rest.py has many sessions instead of one.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.growth import (
    Message,
    create_stream,
    current_load,
    fold_batches,
    snapshot,
    to_batches,
    total_bytes,
    update,
)
from bench.run import RESULTS
from seriatim.engine.files import File
from seriatim.stream_files import StreamFile

SLICE_MESSAGES = 100_000
SMALL_TABLE_ROWS = 10_000
TOUCHED_ROWS = (1_000, 10_000)
DIGITS = 3


class GrowingTable:
    """One session that is one table, slice by slice."""

    def __init__(self, folder: Path, rows: int) -> None:
        folder.mkdir()
        self.rows = rows
        self.file: StreamFile = create_stream(folder)
        self.state: tuple[File, ...] = ()
        self.next_offset = 0
        self.random = random.Random(rows)
        inserts: list[Message] = [("hot", snapshot(1, 0))]
        for number in range(rows):
            row = {"id": f"r{number}", "price": 1.0, "size": number}
            inserts.append(("hot", {"type": "insert", "seq": number + 2, **row}))
        self.fold(inserts)

    def fold(self, messages: Sequence[Message]) -> dict[str, Any]:
        """One slice: what it took, and what it wrote of state."""
        batches = to_batches(self.next_offset, messages)
        began = time.process_time()
        result = fold_batches(self.file, batches, self.state)
        cpu_seconds = time.process_time() - began
        new_files = [file for file in result.state or () if file not in self.state]
        self.state = result.state or ()
        self.next_offset += len(messages)
        return {"cpu_seconds": cpu_seconds, "state_bytes": total_bytes(new_files)}

    def update_rows(self, touched: int) -> dict[str, Any]:
        """A slice of updates that name so many rows, in any order."""
        touched_rows = self.random.sample(range(self.rows), touched)
        first_sequence = self.next_offset + 1
        messages = [
            ("hot", update(first_sequence + i, self.random.choice(touched_rows)))
            for i in range(SLICE_MESSAGES)
        ]
        return self.fold(messages)


def measure(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    """The figures of both tables, and how many times more the large one takes."""
    tables = [GrowingTable(folder / str(size), size) for size in (SMALL_TABLE_ROWS, rows)]
    figures: dict[str, Any] = {"rows": rows, "small_table_rows": SMALL_TABLE_ROWS}
    for touched in TOUCHED_ROWS:
        slices: list[list[dict[str, Any]]] = [[], []]
        # The first round loads what is loaded once, and does not count.
        for turn in range(rounds + 1):
            for table, slices_of_table in zip(tables, slices, strict=True):
                figures_of_slice = table.update_rows(touched)
                if turn:
                    slices_of_table.append(figures_of_slice)
        small, large = ([one["cpu_seconds"] for one in table_slices] for table_slices in slices)
        figures[f"touched_{touched}"] = {
            "cpu_seconds_small": [round(value, DIGITS) for value in small],
            "cpu_seconds_large": [round(value, DIGITS) for value in large],
            "ratio_best": round(min(large) / min(small), 2),
            "ratio_median": round(median(large) / median(small), 2),
            "state_bytes_small": [one["state_bytes"] for one in slices[0]],
            "state_bytes_large": [one["state_bytes"] for one in slices[1]],
        }
    figures["state_bytes_of_large_table"] = total_bytes(tables[1].state)
    figures["load"] = current_load()
    return figures


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.rows, options.rounds)
    text = json.dumps(figures, indent=2) + "\n"
    print(text, end="")
    (RESULTS / "large-table.json").write_text(text)


if __name__ == "__main__":
    main()
