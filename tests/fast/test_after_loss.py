"""In bulk too a session in doubt is not woken by a message that proves nothing."""

from __future__ import annotations

import random

import pytest

from tests.fast.plain_and_compiled import COLUMNS, OddProducer, create_twins, to_record_batch


@pytest.mark.parametrize("seed", range(30))
def test_both_folds_doubt_the_same(seed: int) -> None:
    """Messages are lost between two tasks: some sessions prove that none was theirs, the others
    wait.
    """
    chance = random.Random(seed)
    sequenced = seed % 5 > 0
    table = {
        "key": ["id"],
        "columns": COLUMNS,
        "before": False,
        "sequence": "seq" if sequenced else None,
    }
    twins = create_twins(table, tier="strict", on_poison="quarantine")
    producer = OddProducer(chance, 0.02, sequenced)
    first, lost, *rest = (
        [producer.send() for _ in range(count)] for count in (60, chance.randrange(4), 50, 50)
    )
    since = len(first) + len(lost)
    for twin in twins:
        twin.take(to_record_batch(first, 0))
        twin.end()
        twin.fold_settings["headless_since"] = since
    for number, sent in enumerate(rest):
        for twin in twins:
            twin.begin()
            twin.take(to_record_batch(sent, since + 50 * number))
            twin.end()
    plain, bulk = (twin.outcome() for twin in twins)
    assert repr(bulk) == repr(plain)
