"""The bulk fold gives what the plain fold gives, on every input: records, state bytes, findings, marks, counts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seriatim.core.judge import OnPoison
from tests.bulk.twins import COLUMNS, Producer, Twin, agree, both

KEYS = [["id"], ["n", "id"], ["id", "ok"]]


def _world(seed: int, oddness: float, *, eager: bool, **choices: Any) -> Twin:
    chance = random.Random(seed)
    sequenced = chance.random() < 0.7
    tier = choices["tier"]
    table = {
        "key": chance.choice(KEYS),
        "columns": COLUMNS,
        "before": chance.random() < 0.7,
        "sequence": "seq" if sequenced else None,
        "lenient": tier in {"none", "order"},
    }
    producer = Producer(chance, oddness, sequenced)
    tasks = [
        [[producer.send() for _ in range(chance.randrange(1, 60))] for _ in range(chance.randrange(1, 4))]
        for _ in range(chance.randrange(1, 4))
    ]
    return agree(both(table, eager=eager, **choices), tasks)


@settings(max_examples=250)
@given(
    seed=st.integers(0, 2**32),
    oddness=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    tier=st.sampled_from(["none", "once", "order", "strict"]),
    on_poison=st.sampled_from(["quarantine", "skip", "halt"]),
)
def test_both_folds_give_the_same(seed: int, oddness: float, tier: str, on_poison: OnPoison) -> None:
    """Whatever producers send, however it is cut into stretches and tasks, nobody can tell which fold it was."""
    _world(seed, oddness, eager=True, tier=tier, on_poison=on_poison)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), oddness=st.sampled_from([0.0, 0.1, 0.9]))
def test_going_back_to_the_plain_way_changes_nothing(seed: int, oddness: float) -> None:
    """Stretches that are too unusual are folded the plain way, and the rows follow."""
    _world(seed, oddness, eager=False, tier="strict", on_poison="quarantine")


def test_usual_messages_are_folded_in_bulk() -> None:
    """The comparison means something: with nothing odd nearly all records are made in bulk."""
    made = _world(7, 0.0, eager=True, tier="none", on_poison="skip")
    records = sum(batch.num_rows for batch in made.sheet.batches)
    assert made.in_bulk > 0.4 * records > 20


@pytest.mark.full
@pytest.mark.parametrize("block", range(30))
def test_both_folds_give_the_same_on_many_seeds(block: int) -> None:
    """The same on many more worlds."""
    for seed in range(100 * block, 100 * block + 100):
        chance = random.Random(seed)
        tier = chance.choice(["none", "once", "order", "strict"])
        on_poison = chance.choice(["quarantine", "skip", "halt"])
        _world(seed, chance.choice([0.0, 0.02, 0.1, 0.5]), eager=chance.random() < 0.7, tier=tier, on_poison=on_poison)
