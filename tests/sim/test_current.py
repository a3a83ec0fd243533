"""`current` equals the fold of `records` after any mix of slices, repairs, compactions, new lives
and crashes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from seriatim.engine.crash_points import arm
from seriatim.storage.current_table import DeltaCurrent
from seriatim.storage.record_files import record_schema
from seriatim.storage.store import LocalStore
from seriatim.testing import MemoryCurrent
from tests.contracts.disk_streams import DiskStream
from tests.operations.memory_streams import create_stream
from tests.operations.publish_helper import (
    by_name,
    check,
    current_of,
    publish_to,
    rows_after_records,
)
from tests.sim.chaos import Chaos
from tests.sim.mixes import Mix

MIXES = 200
MIXES_ON_DISK = 5


def in_memory(seed: int) -> Mix:
    """One seed's mix, with everything in memory."""
    made = create_stream(tier="none")
    current: Any = current_of(made)
    current.lose = current.versions.clear
    return Mix(seed, made, lambda: current, lambda: check(made, current))


def on_disk(seed: int, root: Path) -> Mix:
    """The same with real files."""
    parts = ((), ("topic",), ("topic", "partition"))[seed % 3]
    made = DiskStream(root, tier="none", sequence=None, output_partitions=parts)
    return Mix(seed, made, lambda: SmallParts(made), lambda: check_disk(made))


class SmallParts(DeltaCurrent):
    """The table, as a process of its own opens it, with parts so small that they fall apart."""

    part_rows_max = 3

    def __init__(self, made: DiskStream) -> None:
        keyed = made.runner.row_key_spec
        assert keyed is not None
        self.root = made.root
        super().__init__(LocalStore(made.root), "s", record_schema(made.runner.columns), keyed)

    def lose(self) -> None:
        """Somebody moves it away."""
        table = self.root / "current"
        if table.exists():
            table.rename(self.root / f"lost-{len(list(self.root.iterdir()))}")


def check_disk(made: DiskStream) -> None:
    """What any Delta reader sees is the fold of what it sees in `records` at the version of the
    entry.
    """
    current = SmallParts(made)
    at = current.published_version().sequence
    version = made.ledger.delta_version("s", at)
    lives: list[str] = []
    for manifest in made.ledger.entries("s", -1):
        lives += [
            one.topic_id for one in manifest.ledger.partitions.values() if one.topic_id not in lives
        ]
    table = (
        DeltaTable(made.root / "records", version=version)
        .to_pyarrow_dataset()
        .to_table(use_threads=False)
    )
    order = {life: number for number, life in enumerate(lives)}
    records = sorted(
        table.to_pylist(), key=lambda row: (order[row["topic_id"]], row["offset"], row["index"])
    )
    found = DeltaTable(made.root / "current")
    rows = found.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
    assert by_name(rows, current.row_key_spec) == rows_after_records(records, current.row_key_spec)
    for path in pq_files(found):
        one = (
            pq.ParquetFile(made.root / "current" / path)
            .read(["topic", "partition", "session", "id"])
            .to_pylist()
        )
        assert {f"{row['topic']}/{row['partition']}" for row in one} == {path.rpartition("/")[0]}
        assert one == sorted(one, key=lambda row: (row["session"], row["id"]))


def pq_files(table: DeltaTable) -> list[str]:
    """The paths of a table's files."""
    return [uri.split("/current/")[-1] for uri in table.file_uris()]


@pytest.mark.long
def test_any_mix_in_memory(full: bool) -> None:
    """200 seeds."""
    done: set[str] = set()
    for seed in range(MIXES * (5 if full else 1)):
        mix = in_memory(seed)
        try:
            mix.live(15)
        except Exception as error:  # noqa: BLE001  # whatever it is, the seed is all one needs
            pytest.fail(f"seed={seed} ({type(error).__name__}: {str(error)[:300]})", pytrace=False)
        finally:
            arm(None)
        done |= set(mix.deed_names)
    assert done >= {
        "really_repair",
        "really_compact",
        "slice",
        "repair",
        "compact",
        "new_life",
        "publish",
        "crash",
        "rebuild",
        "overtaken",
    }


@pytest.mark.long
@pytest.mark.parametrize("seed", range(MIXES_ON_DISK))
def test_any_mix_on_disk(tmp_path: Path, seed: int) -> None:
    """A few seeds with real files, real Delta tables, and parts that fall apart."""
    on_disk(seed, tmp_path).live(15)


def test_in_any_world_of_the_simulator(seeds: range) -> None:
    """Runs that crash and overlap, quarantine, halts, windows and expiry: a publish after each
    round is the fold.
    """
    for seed in range(len(seeds) // 2):
        chaos = Chaos(seed)
        if chaos.machine().row_key_spec is None:
            continue
        current: MemoryCurrent = current_of(chaos.world)
        run, rounds = chaos._try, [0]

        def tried(
            run: Any = run,
            chaos: Chaos = chaos,
            current: MemoryCurrent = current,
            rounds: Any = rounds,
        ) -> None:
            run()
            if chaos.world.ledger.commits and rounds[0] % 2 == 0:
                publish_to(chaos.world, current)
                check(chaos.world, current)
            rounds[0] += 1

        chaos._try = tried  # type: ignore[method-assign]
        try:
            chaos.live()
        finally:
            arm(None)
        publish_to(chaos.world, current)
        check(chaos.world, current)
