"""Compaction beside folds, repairs, other compactions and crashes: no record is lost, doubled or
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.crash_points import COMPACT_POINTS, arm
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, FencedError, IntegrityError
from seriatim.ledger.commit import commit
from seriatim.ledger.entries import (
    CompactEntry,
    Entry,
    HoldEntry,
    ReleaseEntry,
    RepairEntry,
    RetireEntry,
)
from seriatim.ledger.manifests import SWEPT_NOTE, LedgerHead
from seriatim.ledger.model import Account, Change, EntryMark
from seriatim.operations.sweep import refuse_swept, sweep_dead, sweep_replaced
from seriatim.testing import MemoryStream
from tests.operations.compact_helper import DAY, run_compaction
from tests.operations.memory_streams import A0, A1, create_filled_stream, send
from tests.operations.test_crash_points import Killed
from tests.operations.test_sweep import named, there

Deed = Callable[[MemoryStream], object]


def sliced(*, more: bool = True) -> MemoryStream:
    """Two partitions of many small files, a session in quarantine; `more`: and messages that wait
    to be folded.
    """
    made = create_filled_stream(2)
    for number in range(6):
        send(made, A0, [f"a{number}", "a"], number, session=f"s{number}")
        send(made, A1, number, number + 1)
    send(made, A0, b"?", 7, session="s1")
    made.run(messages_max=2)
    if more:
        send(made, A0, 8, 9, session="s2")
        send(made, A0, ["a", "new"], 3, session="s1")
        send(made, A1, 10, 11)
    return made


def truth(made: MemoryStream) -> object:
    """Records by place, sessions, and what is counted: not which files they are in."""
    rows = {
        p: sorted(made.rows(p), key=lambda row: (row["offset"], row["index"])) for p in (A0, A1)
    }
    accounts = {
        p: (a.frontier, a.messages, a.records, a.quarantined, a.counts)
        for p, a in made.accounts().items()
    }
    return rows, {p: made.sessions(p) for p in (A0, A1)}, accounts


def straight() -> object:
    """All messages, and nothing but folding."""
    made = sliced()
    made.run()
    return truth(made)


def active(made: MemoryStream, partition: Partition = A0) -> list[str]:
    """A partition's record files."""
    return [
        file.path
        for file in made.ledger.files_now()
        if file.path.startswith(f"records/{partition}/")
    ]


def head_of(made: MemoryStream) -> LedgerHead:
    """The ledger as it is."""
    return made.ledger.head("s") or pytest.fail("there is no ledger")


def at_point(made: MemoryStream, number: int, deed: Deed, work: Callable[[], object]) -> bool:
    """Do the work; when it passes its n-th point (a call of the ledger, a crash point), do the
    deed. Whether it did.
    """
    passed, busy = [0], [False]

    def point(_: str) -> None:
        passed[0] += not busy[0]
        if passed[0] == number and not busy[0]:
            busy[0] = True
            deed(made)
            busy[0] = False
            passed[0] += 1

    arm(point)
    made.ledger.on_call = point
    try:
        work()
    finally:
        arm(None)
        made.ledger.on_call = lambda _: None
    return passed[0] > number


def interleaved(
    deed: Deed, work: Callable[[MemoryStream], object], settle: Deed, step: int = 1
) -> int:
    """Each n-th interleaving of a deed into a work ends as if only messages had been folded. How
    many there are.
    """
    wanted, number = straight(), 0
    while True:
        made = sliced()
        if not at_point(made, number + 1, deed, lambda made=made: work(made)):  # type: ignore[misc]
            return number
        settle(made)
        assert truth(made) == wanted, number
        sweep_dead(made.ledger, made.files, head_of(made))
        assert there(made) - named(made) == set(), number
        assert set(active(made)) <= there(made)
        number += step


def fold(made: MemoryStream) -> None:
    """A whole run in small slices. Fenced is fine: another one was there."""
    try:
        made.run(messages_max=2)
    except FencedError:
        made.run(messages_max=2)


def finish(made: MemoryStream) -> None:
    """What a scheduler would do: run, compact, run."""
    made.run()
    run_compaction(made)
    made.run()


def test_small_files_become_one() -> None:
    """Records and state of each partition, by one entry each; the records are the same ones."""
    made = sliced()
    before = truth(made)
    assert len(active(made)) > 5
    assert len(made.accounts()[A0].state) > 1
    done = run_compaction(made)
    assert truth(made) == before
    assert [len(active(made, partition)) for partition in (A0, A1)] == [1, 1]
    assert [len(account.state) for account in made.accounts().values()] == [1, 1]
    entries = [
        commit.entry
        for commit in made.ledger.commits
        if commit.entry and commit.entry.kind == "compact"
    ]
    assert [piece.sequence for piece in done.pieces] == [entry.sequence for entry in entries]
    assert (done.sequence, done.derived_error) == (entries[-1].sequence, "")
    assert [
        (piece.files_after, piece.drop_reason, piece.damaged_inputs) for piece in done.pieces
    ] == [(1, "", {})] * len(entries)
    assert run_compaction(made).pieces == []


def test_a_dry_run_changes_nothing() -> None:
    """It says what would be done, and for one partition alone if asked."""
    made = sliced()
    before, commits = there(made), len(made.ledger.commits)
    done = run_compaction(made, A0, dry_run=True)
    assert {piece.partition for piece in done.pieces} == {A0}
    assert sum(len(piece.inputs) for piece in done.pieces if piece.groups) == len(active(made))
    assert (there(made), len(made.ledger.commits), made.files.stored_intents) == (
        before,
        commits,
        {},
    )
    assert {piece.partition for piece in run_compaction(made, A0).pieces} == {A0}
    assert len(active(made, A1)) > 1


def test_a_partition_that_is_not_known_is_refused() -> None:
    """And so is a stream that was never run."""
    made = sliced()
    with pytest.raises(ConfigError, match="in-z/0 was never read"):
        run_compaction(made, Partition("in-z", 0))
    with pytest.raises(ConfigError, match="never run"):
        run_compaction(create_filled_stream())


@pytest.mark.long
def test_a_fold_in_between_is_neither_lost_nor_stopped() -> None:
    """A whole run at every point of a compaction."""
    assert interleaved(fold, run_compaction, finish) >= 50


@pytest.mark.long
def test_a_compaction_in_between_does_not_stop_a_fold() -> None:
    """A whole compaction at every point of a run: the run itself goes through, never fenced."""
    assert interleaved(run_compaction, lambda made: made.run(messages_max=2), finish) >= 50


@pytest.mark.long
def test_two_compactions_are_one(full: bool) -> None:
    """A whole one at every point of another: what both wanted is done once, and the loser says so."""
    assert interleaved(run_compaction, run_compaction, finish, 1 if full else 5) >= 50


@pytest.mark.long
def test_a_sweep_by_an_old_ledger_harms_nothing(full: bool) -> None:
    """Whoever read the ledger, and was slow to sweep, meets a compaction of files that it has never
    heard of.
    """
    wanted, number, done = straight(), 0, True
    while done:
        made = sliced()
        old = head_of(made)
        made.run(messages_max=2)
        swept: list[str] = []
        sweep = lambda made, old=old, swept=swept: swept.extend(  # noqa: E731
            sweep_dead(made.ledger, made.files, old)
        )
        done = at_point(made, number + 1, sweep, lambda made=made: run_compaction(made))  # type: ignore[misc]
        assert (swept, truth(made)) == ([], wanted), number
        assert len(active(made)) < 3
        number += 1 if full else 3
    assert number >= 30


def by_hand(made: MemoryStream, entry: Entry) -> LedgerHead:
    """Commit an entry."""
    return commit(made.ledger, made.clock, head_of(made), entry)[0]


def change_of(account: Account, **fields: Any) -> Change:
    """A change of the first partition that moves nothing by itself."""
    return Change(
        partition=A0,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
        quarantined=account.quarantined,
        **fields,
    )


def hold(made: MemoryStream) -> None:
    """A repair reserves the first partition."""
    account = made.accounts()[A0]
    if account.hold is None:
        by_hand(made, HoldEntry(attempt="h", hold="h", changes=(change_of(account),)))


def repair(made: MemoryStream) -> None:
    """A repair that makes all records and all state of the first partition again, as they were."""
    hold(made)
    account, olds = (
        made.accounts()[A0],
        [file for file in made.ledger.files_now() if file.path in active(made)],
    )
    olds.sort(key=lambda file: file.first_offset)
    stem = f"{account.epoch}-{account.frontier}-h{len(made.ledger.commits)}"
    new = made.files.concatenate(A0, account.topic_id, stem, olds)
    (state,) = made.files.save(A0, stem, {}, account.state)
    change = change_of(account, records=(new,), state=(state,), removed_rows=new.rows)
    removed = tuple(sorted(file.path for file in olds))
    by_hand(made, RepairEntry(attempt="h", hold="h", changes=(change,), removed_paths=removed))


def release(made: MemoryStream) -> None:
    """Give back what a repair held, then go on."""
    account = made.accounts()[A0]
    if account.hold is not None:
        by_hand(
            made,
            ReleaseEntry(attempt="r", hold=account.hold, changes=(change_of(account),)),
        )
    finish(made)


@pytest.mark.long
def test_a_repair_in_between_wins() -> None:
    """A whole repair of one partition at every point of a compaction; the other partition is
    compacted all the same.
    """
    assert interleaved(repair, run_compaction, release) >= 50


@pytest.mark.long
def test_a_hold_in_between_keeps_its_partition(full: bool) -> None:
    """From the hold on nothing of it is compacted, until it is given back."""

    def held_then(made: MemoryStream) -> None:
        hold(made)
        before = active(made), made.accounts()[A0].state
        run_compaction(made)
        assert (active(made), made.accounts()[A0].state) == before

    assert interleaved(held_then, run_compaction, release, 1 if full else 5) >= 50


def test_held_partitions_are_left_out_and_told() -> None:
    """The others are compacted."""
    made = sliced()
    hold(made)
    done = run_compaction(made)
    assert done.held_partitions == [A0]
    assert {piece.partition for piece in done.pieces} == {A1}


def test_what_is_fenced_is_dropped_and_told() -> None:
    """It is no error, and leaves nothing behind."""
    made = sliced()
    dropped: list[str] = []
    at_point(
        made,
        4,
        hold,
        lambda: dropped.extend(piece.drop_reason for piece in run_compaction(made).pieces),
    )
    assert any("in-a/0 is held by h" in why for why in dropped)
    assert not all(dropped)
    assert there(made) == named(made)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "point", [*COMPACT_POINTS, "record-file-half", "manifest-written", "committed"]
)
def test_a_crash_leaves_nothing_that_matters(point: str, times: int) -> None:
    """Killed at any point, then run again: the same records, few files, nothing that nobody named."""
    made, passed = sliced(more=False), [0]
    made.clock.sleep(100 * DAY)
    run_compaction(made, A1)
    made.clock.sleep(100 * DAY)
    before = truth(made)

    def kill(name: str) -> None:
        passed[0] += name == point
        if name == point and passed[0] == times:
            raise Killed(point)

    def again_and_again() -> None:
        for _ in range(times):  # a second one has less to do, but sweeps again
            run_compaction(made)

    arm(kill)
    try:
        with pytest.raises(Killed):
            again_and_again()
    finally:
        arm(None)
    assert truth(made) == before
    run_compaction(made)
    assert truth(made) == before
    assert len(active(made)) == 1
    assert there(made) - named(made) == set()
    made.clock.sleep(100 * DAY)
    run_compaction(made)
    assert made.files.stored_intents == {}


def test_a_run_sweeps_what_a_dead_compaction_left() -> None:
    """Its files live as long as its inputs are in the table: it might go on. Then they are dead."""
    made = sliced()
    arm(lambda name: (_ for _ in ()).throw(Killed(name)) if name == "compact-written" else None)
    try:
        with pytest.raises(Killed):
            run_compaction(made)
    finally:
        arm(None)
    left = {path for path in there(made) if "/compact-" in path}
    assert left
    made.run()
    assert left <= there(made)
    repair(made)
    made.run()
    sweep_dead(made.ledger, made.files, head_of(made))
    assert left & there(made) == set()


def test_a_damaged_file_is_refused_and_never_copied() -> None:
    """By name; its group stays as it is, the other partitions and the state do not."""
    made = sliced()
    hurt = active(made)[2]
    made.files.files[hurt].content += b"!"
    before = active(made)
    done = run_compaction(made)
    refused = {path: why for piece in done.pieces for path, why in piece.damaged_inputs.items()}
    assert list(refused) == [hurt]
    assert "corrupt" in refused[hurt]
    assert (active(made), len(active(made, A1))) == (before, 1)
    assert there(made) == named(made)


def test_a_damaged_state_file_is_refused_too() -> None:
    """Records are compacted all the same."""
    made = sliced()
    hurt = made.accounts()[A0].state[0].path
    made.files.files[hurt].content += b"!"
    refused = {path for piece in run_compaction(made).pieces for path in piece.damaged_inputs}
    assert refused == {hurt}
    assert len(active(made)) == 1
    assert made.accounts()[A0].state[0].path == hurt


def test_looking_back_works_as_long_as_versions_are_kept() -> None:
    """Files that were replaced stay for so many days after their replacement, and go then."""
    made = sliced(more=False)
    made.clock.sleep(50 * DAY)
    then = made.ledger.head("s")
    assert then is not None
    old, files = made.files.load_all(then.ledger.partitions[str(A0)].state), set(active(made))
    run_compaction(made)
    made.clock.sleep(29 * DAY)
    assert run_compaction(made).swept_replaced_files == 0
    assert (
        made.files.load_all(
            made.ledger.ledger_at("s", then.ledger.sequence).partitions[str(A0)].state
        )
        == old
    )
    assert files <= there(made)
    refuse_swept(made.ledger, head_of(made).ledger, then.ledger.sequence, "state")

    made.clock.sleep(2 * DAY)
    before = truth(made)
    assert run_compaction(made).swept_replaced_files > len(files)
    assert files & there(made) == set()
    assert truth(made) == before
    for room in ("state", "records"):
        with pytest.raises(ConfigError, match="cannot be looked at any more") as refused:
            refuse_swept(made.ledger, head_of(made).ledger, then.ledger.sequence, room)
        assert (
            f"the oldest entry that is kept whole is {head_of(made).ledger.sequence}"
            in refused.value.render()
        )
        refuse_swept(made.ledger, head_of(made).ledger, head_of(made).ledger.sequence, room)
    assert (run_compaction(made).swept_replaced_files, made.files.stored_intents) == (0, {})


def test_what_the_last_entry_names_never_goes() -> None:
    """Nor do kept messages and manifests, however old; a retired partition's state included."""
    made = sliced(more=False)
    account = made.accounts()[A1]
    by_hand(
        made,
        RetireEntry(attempt="x", changes=(replace(change_of(account), partition=A1),)),
    )
    made.clock.sleep(1_000 * DAY)
    for _ in range(2):
        run_compaction(made)
        made.clock.sleep(1_000 * DAY)
    assert made.sessions(A1)
    assert len(made.rows(A0)) > 5
    kept = [
        file
        for c in made.ledger.commits
        if c.entry
        for change in c.entry.changes
        for file in change.quarantine_files
    ]
    assert kept
    assert {file.path for file in kept} <= there(made)
    assert {commit.manifest.path for commit in made.ledger.commits} <= there(made)


@pytest.mark.long
def test_a_slice_that_was_folded_on_files_merged_meanwhile_goes_on_top_of_them(full: bool) -> None:
    """It names none of the files that the compaction replaced: those may be swept one day."""
    made, number = sliced(), 0
    visited_points = []
    points_without_merge = []
    while at_point(made, number + 1, run_compaction, lambda made=made: made.run(messages_max=2)):  # type: ignore[misc]
        merged: set[str] = set()
        for manifest in made.ledger.entries("s", -1):
            merged |= {
                path for change in manifest.entry.changes for path in change.merged_state_paths
            }
            state = {
                file.path
                for account in manifest.ledger.partitions.values()
                for file in account.state
            }
            assert not merged & state, number
        visited_points.append(number)
        if not merged:
            points_without_merge.append(number)
        made.clock.sleep(100 * DAY)
        run_compaction(made)
        assert made.sessions(A0)
        made, number = sliced(), number + (1 if full else 4)
    assert number >= 50
    # The compaction merges state at each point of the first part of the run, and at none after it.
    merging_count = len(visited_points) - len(points_without_merge)
    assert merging_count > len(visited_points) / 2
    assert points_without_merge == visited_points[merging_count:]


@pytest.mark.long
def test_a_file_that_came_back_into_the_table_stays() -> None:
    """However long ago an entry had replaced it: what is in the table now is never swept."""
    made = sliced(more=False)
    old = [file for file in made.ledger.files_now() if file.path in active(made)]
    run_compaction(made)
    change = change_of(made.accounts()[A0], records=tuple(old))
    by_hand(
        made,
        CompactEntry(attempt="back", changes=(change,), removed_paths=tuple(active(made))),
    )
    made.clock.sleep(100 * DAY)
    before = truth(made)
    sweep_replaced(made.ledger, made.files, head_of(made), made.clock.now)
    assert truth(made) == before


def test_a_lost_note_of_what_was_swept_costs_time_alone() -> None:
    """All entries are looked at again, and nothing is deleted twice or wrongly."""
    made = sliced(more=False)
    run_compaction(made)
    made.clock.sleep(100 * DAY)
    run_compaction(made)
    before = truth(made)
    made.ledger.put_note(SWEPT_NOTE, EntryMark())
    run_compaction(made)
    assert truth(made) == before
    made.ledger.put_note(SWEPT_NOTE, EntryMark(3, "of another ledger"))
    run_compaction(made)
    assert truth(made) == before


def test_trouble_with_the_ledger_is_not_hidden() -> None:
    """A manifest that is lost is told, after what could be done was done."""
    made = sliced(more=False)
    made.ledger.store.objects.pop(made.ledger.commits[1].manifest.path)
    with pytest.raises(IntegrityError, match="entry 1 cannot be read: it is missing"):
        run_compaction(made)


def test_who_would_remove_a_file_that_is_gone_is_fenced_at_once() -> None:
    """It is not tried again and again: what left the table does not come back."""
    made = sliced(more=False)
    removed = tuple(active(made)[:1])
    run_compaction(made)
    before = made.clock.now
    entry = CompactEntry(
        attempt="late",
        changes=(change_of(made.accounts()[A0]),),
        removed_paths=removed,
    )
    with pytest.raises(FencedError) as fenced:
        by_hand(made, entry)
    assert "was replaced by another run" in fenced.value.render()
    assert made.clock.now == before


def test_a_compaction_is_no_run() -> None:
    """Messages that wait are late all the same, however often files are compacted."""
    made = sliced()
    before = head_of(made).ledger.pace
    made.clock.sleep(DAY)
    run_compaction(made)
    assert head_of(made).ledger.pace == before
