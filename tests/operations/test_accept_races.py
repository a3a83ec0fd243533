"""Accepts beside runs and other accepts, killed anywhere: one wins, nothing is lost or doubled."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.crash_points import arm
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, FencedError
from tests.operations.decision_helper import (
    accept,
    assert_records_match_state,
    recreate_topic,
    retire,
    run_before_ledger_call,
    tables_from_state,
)
from tests.operations.memory_streams import A0, B0, create_filled_stream, frontiers, kinds, send
from tests.operations.test_crash_points import Killed, killer
from tests.operations.test_sweep import named, swept, there


@pytest.mark.parametrize(
    "point", ["record-file-open", "record-file-written", "manifest-written", "committed", "swept"]
)
@pytest.mark.parametrize("times", [1, 2])
def test_killed_anywhere_and_done_again_is_right(point: str, times: int) -> None:
    """The second try accepts, or finds it done; nothing is left that no entry named."""
    made = create_filled_stream(2)
    made.run()
    recreate_topic(made, 2)
    made.run()
    arm(killer(point, times))
    try:
        accept(made)
    except Killed:
        pass
    finally:
        arm(None)
    done = kinds(made).count("accept")
    assert done == (
        point in ("committed", "swept") or (times == 2 and not point.startswith("record"))
    )
    if not done:
        accept(made)
        assert there(made) == named(made)
    made.run()
    assert frontiers(made) == {"in-a/0": 2, "in-a/1": 2}
    assert kinds(made).count("accept") == 1
    assert_records_match_state(made)
    swept(made)
    assert there(made) == named(made)


@pytest.mark.parametrize("call", ["put_manifest", "compare_and_set"])
def test_of_two_accepts_one_wins(call: str) -> None:
    """The other is told that it is done; deletes are there once."""
    made = create_filled_stream(2)
    made.run()
    recreate_topic(made, 2)
    run_before_ledger_call(made, call, lambda: accept(made))
    with pytest.raises(ConfigError, match="nothing to accept"):
        accept(made)
    made.run()
    assert kinds(made).count("accept") == 1
    assert_records_match_state(made)
    swept(made)
    assert there(made) == named(made)


def test_a_run_that_folds_the_old_life_is_overtaken_by_an_accept_and_goes_on() -> None:
    """It read the old topic before it was deleted: that slice is refused, and the new life is
    folded.
    """
    made = create_filled_stream()
    made.run()
    send(made, A0, 3)

    def others() -> None:
        recreate_topic(made)
        accept(made)

    run_before_ledger_call(made, "put_manifest", others)
    made.run()
    assert kinds(made)[-2:] == ["accept", "slice"]
    assert tables_from_state(made, A0) == {"s": {"x": 7, "y": 0}}
    assert_records_match_state(made)


def test_a_run_whose_topic_is_made_again_and_accepted_goes_on_with_the_new_life() -> None:
    """Reading the old one breaks; what discovery then finds is good."""
    made = create_filled_stream()
    made.run()
    send(made, A0, 3)
    bounds, asked = made.kafka.bounds, [0]

    def stale(pattern: str) -> Any:
        """The look at the topics is from before it was made again."""
        seen = bounds(pattern)
        asked[0] += 1
        if asked[0] == 1:
            recreate_topic(made)
            accept(made)
        return seen

    made.kafka.bounds = stale  # type: ignore[method-assign]
    outcome = made.run()
    assert (outcome.messages, outcome.findings) == (2, [])
    assert kinds(made)[-2:] == ["accept", "slice"]
    assert_records_match_state(made)


def test_an_accept_overtaken_by_a_slice_ends_what_is_there_then() -> None:
    """A slice of the old life came first: the deletes are those of the newer state."""
    made = create_filled_stream()
    made.run()
    send(made, A0, ["a", "b", "c"])
    late = made.folding()
    again = [True]

    def first() -> None:
        late.run(100)
        recreate_topic(made)

    real = made.kafka.bounds

    def bounds(pattern: str) -> Any:
        seen = real(pattern)
        if again:
            again.clear()
            new = {p: replace(one, topic_id="id-9") for p, one in seen.items()}
            run_before_ledger_call(made, "put_manifest", first)
            return new
        return seen

    made.kafka.bounds = bounds  # type: ignore[method-assign]
    done = accept(made)
    assert done.partitions[0].end_records == 3
    made.run()
    assert_records_match_state(made)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_many_lives_of_many_topics(seed: int) -> None:
    """Runs, accepts, retirements and kills in any order: records give the state, places are unique,
    nothing is left.
    """
    chance = random.Random(seed)
    made = create_filled_stream(2)
    made.kafka.create("in-b")
    send(made, B0, ["a"])
    points = [
        "record-file-open",
        "record-file-written",
        "manifest-written",
        "committed",
        "witness-written",
        "swept",
    ]

    def live(topic: str) -> None:
        for _ in range(chance.randrange(4)):
            partition = Partition(topic, chance.randrange(len(made.kafka.topics[topic].messages)))
            session = chance.choice("stu")
            value = chance.choice([["a"], ["a", "b"], b"?"]) if chance.random() < 0.7 else 5
            send(made, partition, value, session=session)

    def again(topic: str) -> None:
        recreate_topic(made, chance.choice([1, 2, 3]), topic)

    deeds: list[Callable[[str], object]] = [
        live,
        live,
        again,
        lambda _: made.run(messages_max=chance.choice([1, 2, 100])),
        lambda _: made.run(),
        lambda topic: accept(made, topic),
        lambda topic: accept(made, topic),
        lambda topic: retire(made, topic),
    ]
    for _ in range(25):
        if chance.random() < 0.3:
            arm(killer(chance.choice(points), chance.choice([1, 2])))
        try:
            chance.choice(deeds)(chance.choice(["in-a", "in-b"]))
        except (Killed, ConfigError, FencedError):
            pass
        finally:
            arm(None)
    for topic in ("in-a", "in-b"):
        try:
            accept(made, topic)
        except ConfigError as nothing:
            assert "nothing to accept" in nothing.message  # noqa: PT017  # either is fine
    made.run()
    assert all(
        account.frontier == len(made.kafka.topics[p.topic].messages[p.number])
        for p, account in made.accounts().items()
        if p in made.kafka.bounds(".*")
    )
    assert_records_match_state(made)
    send(made, A0, ["end"])
    made.run()
    swept(made)
    assert there(made) >= named(made)
