"""No false alarm: whatever was lawfully done to a stream, a check calls it good, and then all of it
is checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seriatim.engine.crash_points import arm
from seriatim.storage.store import LocalStore
from seriatim.testing import MemoryStream
from tests.contracts.disk_streams import DiskStream
from tests.operations.check_helper import run_check
from tests.operations.memory_streams import create_stream
from tests.sim.chaos import Chaos
from tests.sim.mixes import Mix

MIXES = 60


def must_be_good(made: MemoryStream, **real: Any) -> None:
    """Check, and expect nothing bad; nothing is left to judge then."""
    done = run_check(made, **real)
    assert [finding for finding in done.findings if finding.finding == "check"] == []
    assert set(done.verdict.values()) <= {"good"}
    assert (done.ledger.circuit, done.ledger.checked) == ("closed", done.ledger.judged_until)
    if done.sequence >= 0:
        assert done.ledger.checked == done.ledger.sequence


class Lawful(Mix):
    """Slices, repairs and compactions by the steps themselves, new lives, and checks in between."""

    def __init__(self, seed: int, made: MemoryStream, **real: Any) -> None:
        super().__init__(seed, made, lambda: None, lambda: None)
        self.real = real

    def live(self, deeds: int) -> None:
        """So many deeds, then a last check."""
        self.slice()
        kinds = (
            [self.slice] * 4
            + [self.new_life]
            + [self.really_repair] * 3
            + [self.really_compact] * 2
        )
        for _ in range(deeds):
            deed = self.random.choice([*kinds, self.judged, self.judged])
            self.deed_names.append(deed.__name__)
            deed()
        self.judged()

    def judged(self) -> None:
        """Check what is new."""
        must_be_good(self.memory_stream, **self.real)


@pytest.mark.long
def test_any_lawful_mix_is_good(full: bool) -> None:
    """Slices, repairs, compactions and new lives in any order."""
    done: set[str] = set()
    for seed in range(MIXES * (5 if full else 1)):
        mix = Lawful(seed, create_stream(tier="none"))
        try:
            mix.live(12)
        except Exception as error:
            raise AssertionError(f"seed={seed}: {mix.deed_names}") from error
        done |= set(mix.deed_names)
    assert done >= {"slice", "new_life", "really_repair", "really_compact", "judged"}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_any_lawful_mix_on_disk_is_good(tmp_path: Path, seed: int) -> None:
    """The same with real files, and before-images."""
    from seriatim.storage.record_scan import RecordScan

    parts = ((), ("topic",), ("topic", "partition"))[seed % 3]
    made = DiskStream(tmp_path, tier="none", sequence=None, output_partitions=parts)
    record_scanner = RecordScan(LocalStore(tmp_path))
    Lawful(seed, made, record_scanner=record_scanner, checker=Silent()).live(12)


class Silent:
    """Judges nothing but promises: what suites say of records is tested elsewhere."""

    def check_records(self, *_: Any) -> list[Any]:
        """Nothing."""
        return []

    def check_evidence(self, suite: Any, rows: Any) -> list[Any]:
        """Every promise holds."""
        assert [row for row in rows if not row.holds] == [], suite.name
        return []


def test_any_world_of_the_simulator_is_good(seeds: range) -> None:
    """Runs that crash and overlap, quarantine, halts, windows, expiry: a check after each round is
    good.
    """
    for seed in range(len(seeds) // 2):
        chaos = Chaos(seed)
        run = chaos._try

        def tried(run: Any = run, chaos: Chaos = chaos) -> None:
            run()
            chaos.world.ledger.refusals = (
                0  # what was left of a storm would refuse the check itself
            )
            if chaos.world.ledger.commits:
                must_be_good(chaos.world)

        chaos._try = tried  # type: ignore[method-assign]
        try:
            chaos.live()
        except Exception as error:
            raise AssertionError(f"seed={seed}") from error
        finally:
            arm(None)
