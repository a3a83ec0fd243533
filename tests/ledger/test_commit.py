"""The commit rule: compare-and-set, or nothing; and a ledger that never begins again by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.errors import FencedError, IntegrityError, PlatformError
from seriatim.ledger.commit import TRIES_MAX, commit, read_head, start_ledger
from seriatim.ledger.entries import Entry, HoldEntry, SliceEntry
from seriatim.ledger.manifests import LedgerHead, ManifestReference
from seriatim.ledger.model import Change, EntryMark, Ledger
from seriatim.ports import CommitConflictError
from seriatim.testing import MemoryClock, MemoryLedger

P, Q = Partition("in-a", 0), Partition("in-a", 1)


def change(partition: Partition = P, frontier: int = 0, until: int = 0) -> Change:
    """A change that moves a frontier without a certificate: enough for the rule."""
    return Change(
        partition=partition,
        epoch=0,
        frontier=frontier,
        until=until,
        topic_id="id",
        initial_frontier=0,
    )


def begun() -> tuple[MemoryLedger, LedgerHead]:
    """A ledger that knows two partitions at offset 0."""
    store = MemoryLedger()
    return store, start_ledger(store, MemoryClock(), "s", "a0", (change(), change(Q)))


def slice_of(partition: Partition = P, frontier: int = 0, until: int = 5) -> Entry:
    """An entry that moves a frontier."""
    return SliceEntry(attempt="a1", changes=(change(partition, frontier, until),))


def others(store: MemoryLedger, *entries: Entry) -> Callable[[str], None]:
    """Lets another run commit just before our compare-and-set, once each."""
    waiting = list(entries)

    def before(call: str) -> None:
        if call == "compare_and_set" and waiting:
            entry = replace(waiting.pop(0), attempt="another")
            head = store.head("s")
            assert head is not None
            commit(store, MemoryClock(), head, entry)

    return before


def test_an_entry_lands_with_sequence_previous_and_witness() -> None:
    """The chain goes on and head.json has seen it."""
    store, head = begun()
    after, done = commit(store, MemoryClock(), head, slice_of())
    assert (after.ledger.sequence, done.sequence, done.previous) == (1, 1, head.ledger.sha256)
    assert store.stored_witness == after.ledger.mark
    assert after.ledger.partitions["in-a/0"].frontier == 5


def test_a_lost_answer_is_recognised_as_our_own() -> None:
    """The commit is there under our manifest's hash: success, and no second one."""
    store, head = begun()
    store.lost_answers = 1
    after, _ = commit(store, MemoryClock(), head, slice_of())
    assert after.ledger.sequence == 1
    assert len(store.commits) == 2
    assert store.stored_witness == after.ledger.mark


def test_a_lost_answer_with_others_on_top_is_still_our_own() -> None:
    """Somebody may have gone on from our entry before we looked."""
    store, head = begun()
    store.lost_answers = 1

    def after_ours(call: str) -> None:
        if call == "head" and len(store.commits) == 2:
            store.on_call = lambda _: None
            found = store.head("s")
            assert found is not None
            commit(store, MemoryClock(), found, slice_of(P, 5, 9))

    store.on_call = after_ours
    after, done = commit(store, MemoryClock(), head, slice_of())
    assert done.sequence == 1
    assert after.ledger.partitions["in-a/0"].frontier == 9
    assert len(store.commits) == 3


def test_an_entry_is_built_again_on_top_of_others() -> None:
    """Another partition's slice came first: ours gets the next sequence and its hash."""
    store, head = begun()
    store.on_call = others(store, slice_of(Q))
    after, done = commit(store, MemoryClock(), head, slice_of())
    assert done.sequence == 2
    assert done.previous == store.commits[1].manifest.sha256
    assert {place: account.frontier for place, account in after.ledger.partitions.items()} == {
        "in-a/0": 5,
        "in-a/1": 5,
    }


def test_who_comes_second_is_fenced() -> None:
    """The same range by another run: ours is void, and says so."""
    store, head = begun()
    store.on_call = others(store, slice_of())
    with pytest.raises(FencedError, match="moved the frontier") as fenced:
        commit(store, MemoryClock(), head, slice_of())
    assert "at offset 5, not 0" in fenced.value.fields["found"]
    assert len(store.commits) == 2


def test_a_partition_newly_held_is_dropped_and_the_rest_commits() -> None:
    """A repair may begin while a slice is being folded."""
    store, head = begun()
    both = SliceEntry(attempt="a1", changes=(change(P, 0, 5), change(Q, 0, 5)))
    store.on_call = others(store, HoldEntry(attempt="h", hold="h1", changes=(change(),)))
    after, done = commit(store, MemoryClock(), head, both)
    assert [str(made.partition) for made in done.changes] == ["in-a/1"]
    assert after.ledger.partitions["in-a/0"].frontier == 0


def test_a_slice_all_of_whose_partitions_are_held_is_fenced() -> None:
    """Nothing is left to commit."""
    store, head = begun()
    store.on_call = others(store, HoldEntry(attempt="h", hold="h1", changes=(change(),)))
    with pytest.raises(FencedError) as fenced:
        commit(store, MemoryClock(), head, slice_of())
    assert "held" in fenced.value.fields["found"]


def test_refusals_without_anybody_there_end_as_platform_trouble() -> None:
    """Tried a bounded number of times, waiting longer each time, then exit 4."""
    store, head = begun()
    store.refusals = 100
    clock = MemoryClock()
    with pytest.raises(PlatformError, match="refused 5 times") as trouble:
        commit(store, clock, head, slice_of())
    assert trouble.value.exit_code == 4
    assert store.refusals == 100 - TRIES_MAX
    assert clock.now > 1
    assert len(store.commits) == 1


def test_a_few_refusals_are_outlasted() -> None:
    """One answer is enough."""
    store, head = begun()
    store.refusals = TRIES_MAX - 1
    after, _ = commit(store, MemoryClock(), head, slice_of())
    assert after.ledger.sequence == 1


def test_foreign_commits_are_told_by_the_entry_that_meets_them() -> None:
    """Once, also when they come while we commit; an OPTIMIZE changes no data and is no finding."""
    store, head = begun()

    def foreign(call: str) -> None:
        if call == "compare_and_set":
            store.on_call = lambda _: None
            store.foreign_commit("a row was added")
            store.foreign_commit("")

    store.on_call = foreign
    after, done = commit(store, MemoryClock(), head, slice_of())
    assert [(finding.finding, finding.cause) for finding in done.findings] == [
        ("foreign", "a row was added")
    ]
    assert after.foreign_findings == []
    _, later = commit(store, MemoryClock(), after, slice_of(Q))
    assert later.findings == ()


def test_of_two_starts_the_second_takes_the_firsts() -> None:
    """Two first runs at once make one ledger."""
    store = MemoryLedger()

    def first(call: str) -> None:
        if call == "compare_and_set":
            store.on_call = lambda _: None
            start_ledger(store, MemoryClock(), "s", "other", (change(),))

    store.on_call = first
    head = start_ledger(store, MemoryClock(), "s", "mine", (change(Q),))
    assert len(store.commits) == 1
    assert list(head.ledger.partitions) == ["in-a/0"]


def test_a_start_whose_answer_is_lost_is_a_start() -> None:
    """Our manifest is there."""
    store = MemoryLedger()
    store.lost_answers = 1
    assert start_ledger(store, MemoryClock(), "s", "a", (change(),)).ledger.sequence == 0
    assert len(store.commits) == 1


def test_a_ledger_rolled_back_is_refused() -> None:
    """head.json has seen more than there is."""
    store, head = begun()
    commit(store, MemoryClock(), head, slice_of())
    store.commits.pop()
    with pytest.raises(IntegrityError, match="ends at entry 0, but head"):
        read_head(store, "s")


def test_a_vanished_ledger_is_refused() -> None:
    """Nothing ever begins again from 0 by itself."""
    store, _ = begun()
    store.commits.clear()
    with pytest.raises(IntegrityError, match="no ledger") as refused:
        read_head(store, "s")
    assert "head.json" in refused.value.next


def test_another_entry_under_the_same_number_is_refused() -> None:
    """A ledger restored and gone on elsewhere is another one."""
    store, head = begun()
    commit(store, MemoryClock(), head, slice_of())
    store.commits.pop()
    commit(store, MemoryClock(), head, slice_of(P, 0, 4))
    store.stored_witness = EntryMark(1, "another")
    with pytest.raises(IntegrityError, match="entry 1 is another one"):
        read_head(store, "s")


def test_a_ledger_ahead_of_its_witness_is_fine() -> None:
    """A crash between the two steps leaves it so."""
    store, head = begun()
    before = store.stored_witness
    commit(store, MemoryClock(), head, slice_of())
    store.stored_witness = before
    found = read_head(store, "s")
    assert found is not None
    assert found.ledger.sequence == 1


def test_a_ledger_that_went_on_from_another_entry_is_refused() -> None:
    """It is ahead of head.json, but what head.json has seen is not in it: it was rolled back and
    written to.
    """
    store, head = begun()
    commit(store, MemoryClock(), head, slice_of())
    seen = store.stored_witness
    store.commits.pop()
    other, _ = commit(store, MemoryClock(), head, slice_of(P, 0, 4))
    commit(store, MemoryClock(), other, slice_of(P, 4, 9))
    store.stored_witness = seen
    with pytest.raises(IntegrityError, match="entry 1 is another one"):
        read_head(store, "s")


def test_a_commit_between_reading_witness_and_ledger_is_no_alarm() -> None:
    """The witness is read first, so that whoever comes in between can only be ahead of it."""
    store, head = begun()

    def between(call: str) -> None:
        if call in ("head", "witness"):
            calls.append(call)
            if len(calls) == 2:
                store.on_call = lambda _: None
                commit(store, MemoryClock(), head, slice_of())

    calls: list[str] = []
    store.on_call = between
    found = read_head(store, "s")
    assert found is not None
    assert found.ledger.sequence == 1


def test_a_corrupt_manifest_is_refused() -> None:
    """Its hash is in the commit."""
    store, _ = begun()
    path = store.commits[0].manifest.path
    store.store.objects[path] += b" "
    with pytest.raises(IntegrityError, match="entry 0 cannot be read: its hash differs"):
        read_head(store, "s")


def test_a_zombie_cannot_set_on_an_old_head() -> None:
    """The store itself compares, whatever the caller believes."""
    store, head = begun()
    commit(store, MemoryClock(), head, slice_of(Q))
    with pytest.raises(CommitConflictError):
        store.compare_and_set(head, slice_of(), ManifestReference(1, "manifests/x", "x"))
    with pytest.raises(CommitConflictError):
        store.compare_and_set(None, slice_of(), ManifestReference(1, "manifests/x", "x"))
    assert read_head(store, "s") is not None
    assert isinstance(head.ledger, Ledger)
