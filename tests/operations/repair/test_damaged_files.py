"""Damage that a repair meets: it widens what is folded again, and what is gone hides nothing that
can be mended.
"""

from __future__ import annotations

import json

import pytest

from seriatim.errors import IntegrityError, PlatformError
from seriatim.ledger.entries import Entry
from seriatim.ledger.manifests import DIFFERENCE_FILE, LedgerHead, ManifestReference
from seriatim.operations.repair.damage import RefoldAction, RepairRequest, plan_repair
from seriatim.testing import MemoryStream
from tests.operations.compact_helper import run_compaction
from tests.operations.decision_helper import accept
from tests.operations.market_machine import create_market_stream, send_busy_market
from tests.operations.memory_streams import A0, B0, create_stream, kinds, send
from tests.operations.repair_helper import (
    assert_equals_clean_fold,
    create_sliced_stream,
    remove_file,
    repair,
)
from tests.operations.test_further_tables import straight, tables

POISON = b"{"


def flip(made: MemoryStream, path: str) -> None:
    """A bit changes; the size does not."""
    content = made.files.files[path].content
    made.files.files[path].content = bytes([content[0] ^ 1]) + content[1:]


def records(made: MemoryStream) -> list[str]:
    """The record files of the table, by offset."""
    return [
        file.path for file in sorted(made.ledger.files_now(), key=lambda file: file.first_offset)
    ]


def set_aside() -> MemoryStream:
    """Session s1 was poisoned once the machine had folded a while; three more slices came."""
    made = create_sliced_stream(40, 10)
    send(made, A0, POISON, session="s1")
    for number in range(29):
        send(made, A0, number, session=f"s{number % 3}")
    made.run(10)
    return made


@pytest.mark.parametrize("hurt", [[-1], [-2, -3], [-1, -2, -3]])
def test_a_flipped_bit_where_a_repair_reads_is_mended_with_it(hurt: list[int]) -> None:
    """Nobody knew of it: what the files were made of is folded again, by the same command and the
    same commit.
    """
    made = set_aside()
    for number in hurt:
        flip(made, records(made)[number])
    done = repair(made)
    assert made.accounts()[A0].hold is None
    assert kinds(made)[-1] == "repair"
    assert done.ranges[A0].start <= 40
    assert not made.files.find_damaged_files(made.ledger.files_now())
    assert_equals_clean_fold(made)


def test_a_second_hold_that_fails_leaves_none() -> None:
    """Platform trouble is told as such, and the partition does not wait for a hold that nobody has
    any more.
    """
    made = set_aside()
    flip(made, records(made)[-1])
    commit, tried = made.ledger.compare_and_set, list[str]()

    def broken(head: LedgerHead | None, entry: Entry, manifest: ManifestReference) -> None:
        tried.append(entry.kind)
        if entry.kind == "hold" and tried.count("hold") == 2:
            raise PlatformError("the disk is away")
        commit(head, entry, manifest)

    made.ledger.compare_and_set = broken  # type: ignore[method-assign]  # trouble at one commit
    with pytest.raises(PlatformError, match="the disk is away"):
        repair(made)
    assert tried.count("hold") >= 2
    assert made.accounts()[A0].hold is None


@pytest.mark.parametrize(
    "request_", [{"session": "s1", "start": 40}, {"ranges": {"in-a/0": (41, 43)}}]
)
def test_so_it_is_with_what_a_person_names(request_: dict[str, object]) -> None:
    """A session, or a range within a file that compaction made: the damaged file is made again as a
    whole.
    """
    made = set_aside()
    run_compaction(made)
    (path,) = records(made)
    flip(made, path)
    repair(made, **request_)
    assert path not in records(made)
    assert_equals_clean_fold(made)


def test_what_cannot_be_made_again_is_named_and_nothing_is_changed() -> None:
    """A file that holds what is to stay is damaged, and Kafka has not what it was made of."""
    made = set_aside()
    run_compaction(made)
    flip(made, *records(made))
    made.kafka.delete_records(A0, 20)
    with pytest.raises(IntegrityError) as refused:
        repair(made)
    assert records(made)[0] in refused.value.render()
    assert made.accounts()[A0].hold is None
    assert kinds(made)[-1] == "release"


def test_a_partition_that_is_named_is_looked_at_thoroughly() -> None:
    """What compact says to do about a damaged file mends it, and every other in the partition by
    the same command.
    """
    made = create_sliced_stream()
    hurt = records(made)[1:7:2]
    for path in hurt:
        flip(made, path)
    assert set(run_compaction(made).pieces[0].damaged_inputs) <= set(hurt)
    assert plan_repair(made.open(), RepairRequest()).actions == ()
    repair(made, partition=str(A0))
    assert not set(hurt) & set(records(made))
    assert not made.files.find_damaged_files(made.ledger.files_now())
    assert_equals_clean_fold(made)


def test_so_are_the_machines_other_tables() -> None:
    """A flipped bit in one of them is found where the partition is named."""
    made = create_market_stream()
    for _ in range(4):
        send_busy_market(made, A0)
        made.run(5)
    before = tables(made)
    flip(made, next(path for path in made.files.files if path.startswith("records-trade/")))
    repair(made, partition=str(A0))
    assert tables(made) == before == straight(made)


def test_a_topic_that_was_made_again_stops_no_other() -> None:
    """What is hurt elsewhere is planned; of that one it is said, once, what a person decides."""
    made = create_stream()
    made.kafka.create("in-a")
    made.kafka.create("in-b")
    send(made, A0, ["a"], 1, POISON, 3, session="q")
    send(made, B0, ["a"], 1, 2, session="t")
    made.run()
    made.kafka.delete("in-a")
    made.kafka.create("in-a")
    remove_file(made, made.accounts()[B0].state[-1].path)
    for halted in (False, True):
        made.run() if halted else None
        planned = plan_repair(made.open(), RepairRequest())
        assert [part.partition for part in planned.actions] == [B0]
        assert len(planned.notes) == 1
        assert "seriatim accept s in-a" in planned.notes[0]
    repair(made)
    accept(made)
    assert plan_repair(made.open(), RepairRequest()).notes == ()


def test_what_is_gone_hides_nothing_that_can_be_mended() -> None:
    """A record file whose messages Kafka has no more is noted; the session in quarantine is mended
    all the same.
    """
    made = create_sliced_stream(60, 7)
    send(made, A0, POISON, 5, session="s1")
    made.run()
    made.kafka.delete_records(A0, 20)
    lost = records(made)[0]
    remove_file(made, lost)
    planned = plan_repair(made.open(), RepairRequest())
    (part,) = planned.actions
    assert isinstance(part, RefoldAction)
    assert part.rewind.request.sessions == ("s1",)
    (note,) = planned.notes
    assert lost in note
    assert "[0, 20) is gone" in note


def test_a_damaged_file_that_nothing_needs_is_planned_to_be_deleted_until_it_is_gone() -> None:
    """Compaction replaced it, verify found it damaged: deleted or lost, there is nothing more to do
    about it.
    """
    made = create_sliced_stream(40, 10)
    replaced = records(made)[0]
    run_compaction(made)
    assert replaced not in records(made)
    flip(made, replaced)
    made.ledger.store.replace(DIFFERENCE_FILE, json.dumps({"file": replaced}).encode())
    planned = plan_repair(made.open(), RepairRequest())
    assert (planned.actions, planned.notes, planned.deleted_files) == ((), (), (replaced,))
    repair(made)
    assert replaced not in made.files.files
    assert plan_repair(made.open(), RepairRequest()).deleted_files == ()


def test_so_it_is_where_its_partition_is_named_and_nothing_of_others_is_deleted() -> None:
    """A repair of one partition that was killed right after its commit left the damaged file behind,
    and the same command deletes it.
    """
    made = create_sliced_stream(40, 10)
    replaced = records(made)[0]
    partition = str(A0)
    run_compaction(made)
    flip(made, replaced)
    made.ledger.store.replace(DIFFERENCE_FILE, json.dumps({"file": replaced}).encode())
    assert plan_repair(made.open(), RepairRequest(partition=partition)).deleted_files == (replaced,)
    request = RepairRequest(partition=partition, start=0)
    assert plan_repair(made.open(), request).deleted_files == ()
    repair(made, partition=partition)
    assert replaced not in made.files.files


def test_a_reason_names_only_some_of_very_many_damaged_files() -> None:
    """It goes into the ledger with the entry, and onto a screen."""
    made = create_sliced_stream(200, 2)
    for path in records(made):
        remove_file(made, path)
    (action,) = plan_repair(made.open(), RepairRequest()).actions
    assert isinstance(action, RefoldAction)
    assert action.rewind.request.reason.endswith(" and 95 more")
    assert len(action.rewind.request.reason) < 500
