"""Several kinds of records after slices, crashes, repairs, lost files and lost tables: as a
straight fold.
"""

from __future__ import annotations

from random import Random

import pytest

from seriatim.engine.crash_points import arm
from seriatim.testing import MemoryStream
from tests.operations.market_machine import create_market_stream, send_order
from tests.operations.memory_streams import A0, A1
from tests.operations.repair_helper import repair
from tests.operations.test_further_tables import head, straight, tables
from tests.sim.mixes import Crashed

MIXES = 60


class OutputMix:
    """One seed's market."""

    def __init__(self, seed: int) -> None:
        self.random, self.made = Random(seed), create_market_stream(2)

    def live(self, deeds: int) -> None:
        """So many deeds, then a calm run, and all that is lost mended."""
        for _ in range(deeds):
            self.random.choice(
                (self.slice, self.slice, self.crash, self.repair, self.lose_file, self.lose_table)
            )()
        self.made.run()
        repair(self.made)
        self.made.run()

    def slice(self) -> None:
        """Some orders, folded in slices of some size."""
        for _ in range(self.random.randrange(1, 15)):
            kind = self.random.choice(("whole", "quote", "quote", "trade", "trade", "boom"))
            place, session = self.random.choice((A0, A1)), f"s{self.random.randrange(3)}"
            send_order(
                self.made, place, kind, self.random.choice("123"), self.random.randrange(6), session
            )
        self.made.run(self.random.choice((3, 1000)))

    def crash(self) -> None:
        """A run that ends somewhere, at any point it passes."""
        left = self.random.randrange(60)

        def hook(_: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crashed

        arm(hook)
        try:
            self.slice()
        except Crashed:
            pass
        finally:
            arm(None)

    def repair(self) -> None:
        """From some offset on, where there is anything to rewind."""
        for partition, account in self.made.accounts().items():
            if account.frontier:
                start = self.random.randrange(account.frontier)
                repair(
                    self.made, self.random.choice((3, 1000)), partition=str(partition), start=start
                )

    def lose_file(self) -> None:
        """A file of a further table vanishes, and a plain repair finds it."""
        files = [
            file for table in ("trade", "note") for file in self.made.derived.outputs.files(table)
        ]
        if files:
            self.made.files.files.pop(self.random.choice(files).path, None)
            repair(self.made)

    def lose_table(self) -> None:
        """A further table vanishes; the next run makes it again."""
        self.made.derived.outputs.versions.pop(self.random.choice(("trade", "note")), None)


def check(made: MemoryStream) -> None:
    """All tables are those of a straight fold, as of the ledger."""
    assert tables(made) == straight(made, 2)
    assert {
        made.derived.outputs.applied_version(table).sequence for table in ("trade", "note")
    } == {head(made).sequence}


@pytest.mark.long
def test_any_mix(full: bool) -> None:
    """Whatever came, no table lacks a record, and none has one twice."""
    for seed in range(MIXES * (10 if full else 1)):
        mix = OutputMix(seed)
        try:
            mix.live(8)
            check(mix.made)
        except Exception as error:  # noqa: BLE001  # whatever it is, the seed is all one needs
            pytest.fail(f"seed={seed} ({type(error).__name__}: {str(error)[:300]})", pytrace=False)
        finally:
            arm(None)
