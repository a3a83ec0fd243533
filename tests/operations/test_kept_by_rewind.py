"""What a way back must keep: losses that were passed, releases by hand, and files that are needed."""

from __future__ import annotations

import json

import pytest

from seriatim.ledger.manifests import DIFFERENCE_FILE
from seriatim.operations.release import release_session
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.rewind import same_session
from seriatim.testing import MemoryStream
from tests.operations.lookback_helper import session_replay
from tests.operations.market_machine import create_market_stream, send_busy_market
from tests.operations.memory_streams import A0, create_filled_stream, create_stream, send
from tests.operations.repair_helper import remove_file, repair


def create_forwarded_stream() -> MemoryStream:
    """A stream that was forwarded over the lost offsets 3 to 6; the messages behind are headless."""
    memory_stream = create_stream()
    memory_stream.kafka.create("in-a", 1)
    send(memory_stream, A0, ["a", "b"], 1, 2)
    memory_stream.run()
    send(memory_stream, A0, 3, 4, 5, 6, 7, 8)
    for offset in range(3, 7):
        memory_stream.reader.lost_offsets.add((A0, offset))
    memory_stream.run()
    repair(memory_stream, forward=True)
    memory_stream.run()
    return memory_stream


@pytest.mark.parametrize("stop", [0, 3, 4, 5, 6, 7, 8])
def test_a_session_replay_that_stops_within_a_loss_remembers_it(stop: int) -> None:
    """Wherever a replay pauses, it ends with the committed session."""
    memory_stream = create_forwarded_stream()
    replay = session_replay(memory_stream, "s")
    replay.begin_at(min(stop, 3))
    replay.fold_to(stop)
    list(replay.steps(replay.committed_end))
    committed = memory_stream.sessions(A0)["s"]
    assert same_session(replay.tracing_fold.session_to_save(), committed, memory_stream.machine())


def test_a_release_by_hand_is_repeated_if_its_own_state_file_is_lost() -> None:
    """The state before the release is at the same frontier, and does not have it."""
    memory_stream = create_filled_stream(1)
    send(memory_stream, A0, b"?")
    memory_stream.run()
    paths_before = {file.path for file in memory_stream.accounts()[A0].state}
    release_session(memory_stream.open(), "s", "the producer sends it again")
    for file in memory_stream.accounts()[A0].state:
        if file.path not in paths_before:
            remove_file(memory_stream, file.path)
    repair(memory_stream)
    assert memory_stream.sessions(A0)["s"].finding is None


def test_a_damaged_file_of_a_further_table_is_not_deleted_while_it_is_needed() -> None:
    """Its messages are gone from Kafka, so nothing could replace it."""
    memory_stream = create_market_stream()
    send_busy_market(memory_stream, A0, 40)
    memory_stream.run(10)
    history = plan_repair(memory_stream.open(), RepairRequest()).history
    path = next(iter(history.partitions[A0].other_record_files))
    stored = memory_stream.files.files[path]
    stored.content = bytes([stored.content[0] ^ 1]) + stored.content[1:]
    note = json.dumps({"file": path}).encode()
    memory_stream.ledger.store.replace(DIFFERENCE_FILE, note)
    memory_stream.kafka.delete_records(A0, memory_stream.accounts()[A0].frontier)
    assert path not in plan_repair(memory_stream.open(), RepairRequest()).deleted_files
