"""What is compacted, by sizes and places alone; and what was replaced long enough ago."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.ledger.entries import CompactEntry
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Change, Ledger
from seriatim.ledger.replaced_files import (
    COMPACTED_NAME,
    Intent,
    OutdatedFiles,
    compacted_file_stem,
)
from seriatim.operations.compact import (
    RECORD_FILES_MERGE_MIN,
    TopicRecordFile,
    group_small_files,
    is_small,
    is_worth_merging_state,
)

P = Partition("in-a", 0)
TARGET = 1_000


def file(number: int, size: int = 10, *, first: int = -1, rows: int = 1) -> File:
    """A record file of ten offsets, the n-th."""
    start = number * 10 if first < 0 else first
    return File(f"records/in-a/0/0-{number}-a", size, rows, "", start, start + 9)


def chosen(sizes: list[int]) -> list[tuple[File, ...]]:
    """The groups of files that follow each other."""
    files = [file(number, size) for number, size in enumerate(sizes)]
    small = [TopicRecordFile(one, "id") for one in files if is_small(one, TARGET)]
    return group_small_files(
        small, [one for one in files if not is_small(one, TARGET)], TARGET
    ).get("id", [])


@given(st.lists(st.integers(1, 1_500), max_size=60))
def test_groups_are_small_neighbours_that_fit_one_file(sizes: list[int]) -> None:
    """Each of at least two, none larger than wanted, no file twice, and nothing between two of them
    is left out.
    """
    found, taken = chosen(sizes), list[str]()
    for group in found:
        assert len(group) > 1
        assert sum(one.size_bytes for one in group) <= TARGET
        numbers = [one.first_offset // 10 for one in group]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert all(2 * sizes[number] <= TARGET for number in numbers)
        taken += [one.path for one in group]
    assert len(set(taken)) == len(taken)


@given(st.lists(st.integers(1, 1_500), max_size=60))
def test_compacting_again_and_again_ends_with_few(sizes: list[int]) -> None:
    """It comes to rest, and then no two neighbours fit one file, unless one of them dwarfs the
    others.
    """
    for _ in range(60):
        found = chosen(sizes)
        if not found:
            break
        for group in reversed(found):
            begin = group[0].first_offset // 10
            sizes[begin : begin + len(group)] = [sum(one.size_bytes for one in group)]
    else:
        raise AssertionError("it never rests")
    assert len(sizes) <= 1 + RECORD_FILES_MERGE_MIN * (1 + 2 * sum(sizes) // TARGET)


def test_many_small_files_become_few() -> None:
    """A thousand of ten bytes are ten of a thousand."""
    assert [len(group) for group in chosen([10] * 1_000)] == [100] * 10


def test_a_file_is_not_copied_for_a_little_more() -> None:
    """One that is larger than twice the rest waits until the rest has grown, or they are many."""
    assert chosen([400, 10, 10]) == []
    assert [len(group) for group in chosen([400] + [10] * (RECORD_FILES_MERGE_MIN - 1))] == [
        RECORD_FILES_MERGE_MIN
    ]
    assert [len(group) for group in chosen([40, 30, 20])] == [3]
    assert [len(group) for group in chosen([500, 300])] == [2]


def test_lives_of_a_topic_are_not_mixed() -> None:
    """Offsets begin again in a new life: its files are neighbours of their own."""
    old = [TopicRecordFile(file(number), "old") for number in range(3)]
    new = [TopicRecordFile(replace(file(number), path=f"n{number}"), "new") for number in range(3)]
    found = group_small_files([*old, *new], [], TARGET)
    assert {life: [one.path for one in group] for life, (group,) in found.items()} == {
        "old": [one.file.path for one in old],
        "new": [one.file.path for one in new],
    }


def test_state_is_merged_when_it_is_worth_it() -> None:
    """Many files, or deltas that are not small beside their base."""

    def files(*rows: int) -> list[File]:
        return [file(number, rows=one) for number, one in enumerate(rows)]

    assert not is_worth_merging_state(files(), TARGET)
    assert not is_worth_merging_state(files(5), TARGET)
    assert not is_worth_merging_state(files(100, 10), TARGET)
    assert is_worth_merging_state(files(100, 40, 10), TARGET)
    assert is_worth_merging_state(files(1_000, *[1] * 7), TARGET)


def test_state_that_was_cut_by_size_is_not_merged_again_and_again() -> None:
    """Files that are as few as their sizes allow stay; one more is worth a merge."""
    full_files = [file(number, TARGET + 1, rows=100) for number in range(9)]
    last_file = file(9, 10, rows=1)
    assert not is_worth_merging_state([*full_files, last_file], TARGET)
    assert is_worth_merging_state([*full_files, last_file, file(10, rows=1)], TARGET)


def test_a_compaction_s_names_are_no_slice_s() -> None:
    """They say whose they are, with and without the ending that files on disk have."""
    from seriatim.operations.sweep import SLICE_FILE_NAME as SLICE_NAME

    for ending in ("", ".parquet", ".1.parquet"):
        name = compacted_file_stem("a-1", 12) + ending
        match = COMPACTED_NAME.fullmatch(name)
        assert match is not None
        assert match[1] == "a-1"
        assert SLICE_NAME.fullmatch(name) is None
    assert COMPACTED_NAME.fullmatch("0-5-a1.parquet") is None


def test_an_intent_is_open_until_something_of_it_is_replaced() -> None:
    """A record file that left the table, state that was merged otherwise, a new epoch; one that
    cannot be read is.
    """
    state = (file(0), file(1))
    account = Account(
        topic_id="id", frontier=9, initial_frontier=0, epoch=2, state=(*state, file(2))
    )
    merged = tuple(one.path for one in state)
    intent = Intent(
        partition=P, attempt="a", epoch=2, sequence=7, records=("r1", "r2"), state=merged
    )
    assert intent.is_open(account, {"r1", "r2", "r3"}, 7)
    assert not intent.is_open(account, {"r1", "r3"}, 7)
    assert intent.is_open(account, {"r1", "r3"}, 6)
    assert not intent.is_open(replace(account, epoch=3), {"r1", "r2"}, 7)
    assert not intent.is_open(replace(account, state=state[1:]), {"r1", "r2"}, 7)
    assert not Intent(partition=P, attempt="found-3", records=("r1",)).is_open(account, {"r1"}, 7)
    assert Intent(partition=P, attempt="a").is_open(account, set(), 7)


def walked(*entries: tuple[float, tuple[str, ...], tuple[str, ...]], until: float) -> OutdatedFiles:
    """Entries of one partition: when, which record files they removed, which state they left."""
    ledger = Ledger(stream="s")
    walk = OutdatedFiles(ledger, until)
    for number, (at, removed, state) in enumerate(entries):
        account = Account(
            topic_id="id",
            frontier=0,
            initial_frontier=0,
            state=tuple(File(path, 1, 1, "") for path in state),
        )
        change = Change(
            partition=P, epoch=0, frontier=0, until=0, topic_id="id", initial_frontier=0
        )
        entry = CompactEntry(
            attempt="a",
            sequence=number,
            removed_paths=removed,
            changes=(change,),
            at_seconds=at,
        )
        walk.add_entry(
            Manifest(
                entry=entry, ledger=replace(ledger, sequence=number, partitions={str(P): account})
            )
        )
    return walk


def test_what_was_replaced_long_ago_is_outdated() -> None:
    """By entries up to the moment; what later entries replaced was named until then."""
    walk = walked(
        (1, (), ("s1",)),
        (2, ("r1",), ("s1", "s2")),
        (3, ("r2",), ("s3",)),
        (9, ("r3",), ("s4",)),
        until=5,
    )
    assert (walk.paths, walk.sequence) == ({"r1", "r2", "s1", "s2"}, 2)


def test_what_is_named_again_is_not_outdated() -> None:
    """However it came back, an entry that is kept names it."""
    walk = walked((1, (), ("s1",)), (2, (), ("s2",)), (9, (), ("s1",)), (10, (), ("s3",)), until=5)
    assert walk.paths == set()


def test_a_clock_that_went_back_keeps_more() -> None:
    """After the first entry that is recent all are, whatever they say."""
    walk = walked((1, (), ("s1",)), (9, ("r1",), ("s2",)), (3, ("r2",), ("s3",)), until=5)
    assert (walk.paths, walk.sequence) == (set(), 0)
