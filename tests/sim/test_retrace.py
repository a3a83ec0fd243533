"""Looking back in any world: what a trace folds is what was committed, whatever the world went through.

Next room: chaos.py makes the worlds; tests/steps/test_retrace.py has the cases one by one.
"""

from __future__ import annotations

import pytest

from seriatim.core.crash import arm
from seriatim.core.errors import ConfigError
from seriatim.core.refold import same
from seriatim.steps.retrace import Way
from tests.sim.chaos import Chaos
from tests.steps.looking import head_of, looking, rows_of

SAMPLE = 25


def look_back(seed: int) -> int:
    """Live through one seed, then trace every session from where that is possible; how many were."""
    chaos = Chaos(seed)
    try:
        chaos.live()
    finally:
        arm(None)
    made, traced = chaos.world, 0
    if not any(commit.entry is not None for commit in made.ledger.commits):
        return 0
    tools, head, runner = looking(made), head_of(made), made.machine()
    for partition, account in made.accounts().items():
        for name, committed in made.files.everything(account.state).items():
            try:
                way = Way(tools, head, partition, name)
                way.begin_early(0)
                start = way.at
                steps = list(way.steps(way.end))
            except ConfigError:  # Kafka has the messages no longer
                assert chaos.topic_faults or chaos.loses, "nothing was lost"
                continue
            assert same(way.retrace.saved(), committed, runner), f"{partition} {name} differs"
            made_again = [
                {"offset": step.offset, **{k: v for k, v in record.items() if k not in ("source_offset", "table")}}
                for step in steps
                for record in step.records
            ]
            assert made_again == rows_of(made, name, partition, start), f"{partition} {name}: other records"
            quick = Way(tools, head, partition, name)
            quick.begin_early(0)
            quick.to(quick.end)
            assert same(quick.retrace.saved(), committed, runner), f"{partition} {name} differs without looking"
            traced += 1
    return traced


def test_a_trace_tells_what_was_committed(seeds: range) -> None:
    """In worlds of crashes, repairs, compactions and new topics each session's trace ends as its committed state."""
    traced = 0
    for seed in seeds[: max(SAMPLE, len(seeds) // 10)]:
        try:
            traced += look_back(seed)
        except Exception as error:  # noqa: BLE001  # whatever it is, the seed is all one needs
            pytest.fail(f"seed={seed} ({type(error).__name__}: {error})", pytrace=False)
    assert traced > len(seeds[:SAMPLE])
