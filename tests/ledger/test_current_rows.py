"""What is read to bring `current` up, and the parts of a partition."""

from __future__ import annotations

from random import Random

import pytest

from seriatim.engine.files import File
from seriatim.ledger.current_rows import PartitionCatchUp, must_read_entries, plan_catch_ups
from seriatim.ledger.model import Account, Ledger
from seriatim.storage.current_table import HashBucket, covering_buckets


def ledger(**frontiers: int) -> Ledger:
    """A ledger at these frontiers of in/N."""
    accounts = {
        f"in/{name[1:]}": Account(topic_id="id", frontier=at, initial_frontier=0)
        for name, at in frontiers.items()
    }
    return Ledger(stream="s", sequence=1, partitions=accounts)


def file(name: str, first: int, last: int) -> File:
    """A record file."""
    return File(
        path=f"records/{name}",
        size_bytes=1,
        rows=1,
        digest="",
        first_offset=first,
        last_offset=last,
    )


FILES = [file("in/0/b", 5, 9), file("in/0/a", 0, 4), file("in/1/a", 0, 3), file("in/10/a", 0, 3)]


def read(found: list[PartitionCatchUp]) -> dict[str, tuple[int, list[str]]]:
    """From where, and which files, by partition."""
    return {
        str(one.partition): (one.first_new_offset, [file.path for file in one.files])
        for one in found
    }


def test_from_nothing_all_is_read() -> None:
    """By partition, in order of offsets."""
    assert read(plan_catch_ups(None, ledger(p0=10, p1=4), (), {}, FILES[:3])) == {
        "in/0": (-1, ["records/in/0/a", "records/in/0/b"]),
        "in/1": (-1, ["records/in/1/a"]),
    }


def test_only_what_is_past_the_frontier_is_read() -> None:
    """Of a partition that did not move, nothing; of one that is new, all; 1 is not 10."""
    found = plan_catch_ups(ledger(p0=5, p1=4), ledger(p0=10, p1=4, p10=4), (), {}, FILES)
    assert read(found) == {"in/0": (5, ["records/in/0/b"]), "in/10": (-1, ["records/in/10/a"])}


def test_a_partition_whose_records_were_made_again_is_read_whole() -> None:
    """Even if none are left."""
    found = plan_catch_ups(
        ledger(p0=10, p1=4), ledger(p0=10, p1=4), {"in/0", "in/1"}, {}, FILES[:2]
    )
    assert read(found) == {"in/0": (-1, ["records/in/0/a", "records/in/0/b"]), "in/1": (-1, [])}


def test_files_of_others_are_read_by_everybody_who_moved() -> None:
    """Whoever rewrote them did not keep to partitions."""
    found = plan_catch_ups(
        ledger(p0=5, p1=4), ledger(p0=10, p1=4), (), {}, [file("part-0001.parquet", 0, 9)]
    )
    assert read(found) == {"in/0": (5, ["records/part-0001.parquet"])}


def test_entries_are_walked_only_where_an_epoch_was_raised() -> None:
    """A slice raises none, so that following slices costs two manifests."""
    assert not must_read_entries(ledger(p0=5), ledger(p0=10, p1=4))
    assert not must_read_entries(None, ledger(p0=5))
    raised = Ledger(
        stream="s",
        partitions={"in/0": Account(topic_id="id", frontier=5, initial_frontier=0, epoch=1)},
    )
    assert must_read_entries(ledger(p0=5), raised)
    assert must_read_entries(None, raised)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_hold_every_session_once(seed: int) -> None:
    """Whatever parts are there: they stay, and what is between them is filled."""
    random = Random(seed)
    parts = {HashBucket()}
    for _ in range(random.randrange(8)):
        fallen = random.choice(sorted(parts))
        parts = parts - {fallen} | set(fallen.split())
    there = set(random.sample(sorted(parts), random.randint(0, len(parts))))
    found = covering_buckets(there)
    assert there <= set(found) or not there
    for number in range(512):
        assert sum(number % (1 << part.depth) == part.value for part in found) == 1
