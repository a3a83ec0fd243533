"""The outcome of every combination of tier and machine is the one of the golden file.

Made anew, for a deliberate change only, by `python -m tests.golden.make digests`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.combinations import COMBINATIONS, folded_in_memory, pinned


@pytest.mark.parametrize(("tier", "machine"), COMBINATIONS)
def test_the_outcome_is_the_golden_one(tier: str, machine: str, tmp_path: Path) -> None:
    """Records, state, gaps, quarantine and findings are as pinned, over a Kafka in memory and
    without Spark.
    """
    assert folded_in_memory(tmp_path, tier, machine) == pinned()[f"{tier}-{machine}"]
