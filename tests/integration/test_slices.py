"""The engine on a real broker: slices, restarts, topics that come and go. One process, one Spark."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from seriatim.demo.generator import CollectionPoints
from tests.integration.lab import Lab, fold_messages, fold_records


def tables(
    topics: dict[str, int], sessions: int, count: int, seed: int = 1
) -> list[tuple[str, int, str, bytes]]:
    """Demo messages, each session in a partition of its own choosing."""
    points = CollectionPoints(list(topics), sessions, seed)
    return [
        (sent.topic, int(sent.key[-5:]) // len(topics) % topics[sent.topic], sent.key, sent.value)
        for sent in islice(points.messages(), count)
    ]


def snapshot(seq: int, *rows: tuple[str, float, int]) -> dict[str, Any]:
    """A snapshot message."""
    return {
        "type": "snapshot",
        "seq": seq,
        "rows": [{"id": i, "price": p, "size": s} for i, p, s in rows],
    }


def update(seq: int, row: str, price: float) -> dict[str, Any]:
    """An update message."""
    return {"type": "update", "seq": seq, "id": row, "price": price}


def test_slices_equal_one_go_and_the_straight_fold(lab: Lab, topic: Callable[..., str]) -> None:
    """However it is sliced, records and state are those of a straight fold."""
    names = {topic(3): 3, topic(2): 2}
    lab.send(tables(names, 40, 6000))
    pattern = "|".join(names)
    one, many = lab.stream("one", pattern), lab.stream("many", pattern)

    whole = lab.fold(one)
    first = lab.fold(many, messages_max=2000, until={f"{name}/0": 100 for name in names})
    rest = lab.fold(many, messages_max=1700)

    assert whole.slices == 1
    assert first.messages == 200
    assert rest.slices >= 3
    assert lab.digest(one) == lab.digest(many)
    expected = {
        (t, s): rows
        for t, p in names.items()
        for s, rows in fold_messages(lab.read_topic(t, p)).items()
    }
    assert fold_records(lab.records(one)) == expected
    state = {
        key: {row["id"]: row for row in one["state"]["rows"]}
        for key, one in lab.sessions("one").items()
    }
    assert state == expected


def test_nothing_new_commits_nothing(lab: Lab, topic: Callable[..., str]) -> None:
    """A run that finds nothing leaves the ledger as it is; no checkpoint is left anywhere."""
    name = topic(2)
    lab.send(tables({name: 2}, 5, 100))
    stream = lab.stream("idle", name)
    lab.fold(stream)
    before = lab.ledger(stream)

    outcome = lab.fold(stream)

    assert outcome.slices == 0
    assert lab.ledger(stream) == before
    found = {path.name for path in lab.root(stream).iterdir()}
    assert found == {
        "derived.json",
        "gaps",
        "head.json",
        "manifests",
        "quarantine",
        "records",
        "state",
    }


def test_new_topics_and_partitions_are_picked_up(
    lab: Lab, topic: Callable[..., str], topic_name: Any
) -> None:
    """A new topic is folded from its first offset, a new partition from 0, whole names only."""
    base = topic_name()
    first = topic(1, name=f"{base}-a")
    stream = lab.stream("grows", f"{base}-[a-z]")
    lab.send(tables({first: 1}, 3, 50))
    lab.fold(stream)
    second, other = topic(1, name=f"{base}-b"), topic(1, name=f"{base}-b2")
    lab.add_partitions(first, 2)
    lab.send(
        [(second, 0, "s", snapshot(1, ("x", 1.0, 1))), (other, 0, "s", snapshot(1, ("x", 1.0, 1)))]
    )
    lab.send([(first, 1, "new", snapshot(1, ("y", 2.0, 2)))])

    outcome = lab.fold(stream)

    assert outcome.messages == 2
    assert set(lab.ledger(stream).partitions) == {f"{first}/0", f"{first}/1", f"{second}/0"}


def test_first_run_on_an_old_topic_is_headless_until_each_snapshot(
    lab: Lab, topic: Callable[..., str]
) -> None:
    """Where the first messages are gone, updates before a session's snapshot are counted and the
    run is good.
    """
    name = topic(1)
    lab.send(tables({name: 1}, 20, 3000))
    lab.delete_records(name, {0: 1000})
    stream = lab.stream("old", name)

    outcome = lab.fold(stream)

    expected = fold_messages(lab.read_topic(name, 1))
    assert outcome.findings == []
    assert outcome.headless > 0
    assert lab.ledger(stream).partitions[f"{name}/0"].headless == outcome.headless
    assert {
        session: rows for (_, session), rows in fold_records(lab.records(stream)).items()
    } == expected


def test_expired_offsets_halt_their_partition_alone(lab: Lab, topic: Callable[..., str]) -> None:
    """Messages deleted before they were read halt that partition, by name and range; the other goes
    on.
    """
    name = topic(2)
    stream = lab.stream("expired", name)
    lab.send(tables({name: 2}, 10, 1000))
    lab.fold(stream)
    frontier = {place: account.frontier for place, account in lab.ledger(stream).partitions.items()}
    lab.send(tables({name: 2}, 10, 1000, seed=2))
    lost = frontier[f"{name}/0"] + 7
    lab.delete_records(name, {0: lost})

    outcome = lab.fold(stream)

    (finding,) = outcome.findings
    assert (finding.finding, finding.partition_name, finding.offset) == (
        "expired",
        f"{name}/0",
        lost - 7,
    )
    assert f"[{lost - 7}, {lost})" in finding.cause
    after = lab.ledger(stream).partitions
    assert after[f"{name}/0"].frontier == frontier[f"{name}/0"]
    assert after[f"{name}/1"].frontier > frontier[f"{name}/1"]
    again = lab.fold(stream)
    assert again.findings == []
    assert [str(place) for place, _ in again.earlier_halts] == [f"{name}/0"]


def test_expired_offsets_are_only_counted_under_none(lab: Lab, topic: Callable[..., str]) -> None:
    """Under tier none the run goes on behind what is lost, and counts it."""
    name = topic(1)
    stream = lab.stream("loose", name, tier="none")
    lab.send(tables({name: 1}, 5, 500))
    lab.fold(stream)
    lab.send(tables({name: 1}, 5, 500, seed=2))
    lab.delete_records(name, {0: 600})

    outcome = lab.fold(stream)

    assert outcome.findings == []
    account = lab.ledger(stream).partitions[f"{name}/0"]
    assert account.frontier == 1000
    assert account.counts["hole: expired"] == 100


def test_a_topic_made_again_is_found_by_its_id(lab: Lab, topic: Callable[..., str]) -> None:
    """A topic deleted and made again, grown past the old frontier, is a finding and not read."""
    name = topic(1)
    stream = lab.stream("again", name)
    lab.send(tables({name: 1}, 5, 200))
    lab.fold(stream)
    old = lab.ledger(stream).partitions[f"{name}/0"].topic_id
    lab.admin.delete_topics([name])[name].result(120)
    for _ in range(1200):
        if name not in lab.admin.list_topics(timeout=120).topics:
            break
        time.sleep(0.1)
    topic(1, name=name)
    lab.send(tables({name: 1}, 5, 900))

    outcome = lab.fold(stream)

    (finding,) = outcome.findings
    assert (finding.finding, finding.partition_name) == ("re-created", f"{name}/0")
    assert old in finding.expected
    assert finding.found.removeprefix("topic id ") != old
    assert lab.ledger(stream).partitions[f"{name}/0"].frontier == 200


def test_a_ledger_that_went_back_is_refused(lab: Lab, topic: Callable[..., str]) -> None:
    """A ledger rolled back, or gone while its witness stays, never starts again by itself."""
    from seriatim.errors import IntegrityError

    name = topic(1)
    stream = lab.stream("back", name)
    lab.send(tables({name: 1}, 5, 100))
    lab.fold(stream)
    log = lab.root(stream) / "records" / "_delta_log"
    last = max(log.glob("*.json"))
    kept = last.read_bytes()

    last.unlink()
    with pytest.raises(IntegrityError, match="ends at entry 0"):
        lab.fold(stream)
    shutil.move(lab.root(stream) / "records", lab.folder / "aside")
    with pytest.raises(IntegrityError, match="there is no ledger"):
        lab.fold(stream)

    shutil.move(lab.folder / "aside", lab.root(stream) / "records")
    last.write_bytes(kept)
    assert lab.fold(stream).slices == 0


def test_a_damaged_state_file_is_refused_by_name(lab: Lab, topic: Callable[..., str]) -> None:
    """One flipped bit in a state file is seen before it is used, and nothing is folded on top."""
    from seriatim.errors import IntegrityError

    name = topic(1)
    stream = lab.stream("rot", name)
    lab.send(tables({name: 1}, 5, 100))
    lab.fold(stream)
    (file,) = lab.ledger(stream).partitions[f"{name}/0"].state
    lab.flip_bit(stream, file.path)
    lab.send([(name, 0, "session-00001", update(10_000, "x", 1.0))])

    with pytest.raises(IntegrityError, match=file.path):
        lab.fold(stream)
    assert lab.ledger(stream).sequence == 1


def test_state_written_is_proportional_to_what_was_touched(
    lab: Lab, topic: Callable[..., str]
) -> None:
    """With many sessions at rest, a slice that touches few writes few."""
    name = topic(1)
    stream = lab.stream("many", name)
    lab.send((name, 0, f"s{i}", snapshot(1, ("a", 1.0, 1), ("b", 2.0, 2))) for i in range(20_000))
    lab.fold(stream)
    (base,) = lab.ledger(stream).partitions[f"{name}/0"].state
    lab.send((name, 0, f"s{i}", update(2, "a", 3.0)) for i in range(0, 20_000, 1000))

    lab.fold(stream)

    files = lab.ledger(stream).partitions[f"{name}/0"].state
    assert files[0] == base
    assert files[1].rows == 20
    assert files[1].size_bytes < base.size_bytes / 20
    assert lab.sessions(stream)[name, "s1000"]["state"]["rows"][0] == {
        "id": "a",
        "price": 3.0,
        "size": 1,
    }
