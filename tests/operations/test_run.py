"""A run over memory ports: what each finding does to its partition, and that nothing else stops."""

from __future__ import annotations

import pytest

from seriatim.engine.failure import Failure
from seriatim.engine.findings import Finding
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from seriatim.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    MissingTopicsError,
    PlatformError,
)
from seriatim.ledger.model import Halt
from seriatim.operations.plan import plan_run
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import (
    A0,
    A1,
    B0,
    create_filled_stream,
    create_stream,
    frontiers,
    kinds,
    offsets,
    send,
)


def short(findings: list[Finding]) -> list[tuple[str, str, int]]:
    """Findings as kind, place, offset."""
    return [(finding.finding, finding.partition_name, finding.offset) for finding in findings]


def halt(made: MemoryStream, partition: Partition) -> Halt | None:
    """Why a partition waits."""
    return made.accounts()[partition].halt


def test_a_run_folds_until_caught_up() -> None:
    """Records, state, frontier and outcome, in as few entries as slices."""
    made = create_filled_stream(2)
    outcome = made.run()
    assert (outcome.messages, outcome.records, outcome.slices, outcome.findings) == (6, 8, 1, [])
    assert offsets(made, A0) == [0, 0, 1, 2]
    assert frontiers(made) == {"in-a/0": 3, "in-a/1": 3}
    assert kinds(made) == ["start", "slice"]
    assert outcome.sequence == 1


def test_nothing_new_commits_nothing() -> None:
    """An empty run leaves the ledger as it was."""
    made = create_filled_stream()
    made.run()
    before = len(made.ledger.commits)
    outcome = made.run()
    assert len(made.ledger.commits) == before
    assert (outcome.messages, outcome.slices) == (0, 0)


def test_slices_are_bounded() -> None:
    """Each is an entry of its own, and the state goes on from one to the next."""
    made = create_filled_stream(2)
    outcome = made.run(messages_max=2)
    assert outcome.slices == 3
    assert frontiers(made) == {"in-a/0": 3, "in-a/1": 3}
    assert offsets(made, A0) == [0, 0, 1, 2]


def test_progress_counts_up_to_the_total() -> None:
    """Messages done and total, when folding begins and after each slice."""
    made, told = create_filled_stream(2), []
    folding = made.folding()
    folding.progress = lambda done, total: told.append((done, total))
    folding.run(2)
    assert told == [(0, 6), (2, 6), (4, 6), (6, 6)]


def test_without_any_topic_a_stream_waits_for_them() -> None:
    """That has an error class of its own, so that a scheduler can wait as well. A person gets exit
    code 2, since the name may be wrong; no ledger is made for it.
    """
    made = create_stream()
    with pytest.raises(MissingTopicsError, match="waiting for topics: no topic matches") as waiting:
        made.run()
    assert waiting.value.exit_code == ConfigError.exit_code
    assert isinstance(Failure.of(waiting.value).to_error(), MissingTopicsError)
    assert not made.ledger.commits


def test_topics_are_matched_by_their_whole_name() -> None:
    """`in-.*` does not take `not-in-a`."""
    made = create_filled_stream()
    made.kafka.create("not-in-a")
    made.run()
    assert list(frontiers(made)) == ["in-a/0"]


def test_a_new_topic_and_new_partitions_are_picked_up() -> None:
    """The topic from its first offset, the partitions from 0; each is told by an entry."""
    made = create_filled_stream()
    made.run()
    made.kafka.create("in-b")
    send(made, B0, ["a"], 1)
    made.kafka.delete_records(B0, 1)
    made.kafka.add_partitions("in-a", 1)
    send(made, A1, ["a"])
    outcome = made.run()
    assert frontiers(made) == {"in-a/0": 3, "in-a/1": 1, "in-b/0": 2}
    assert made.accounts()[B0].initial_frontier == 1
    assert (outcome.headless, outcome.findings) == (1, [])


def test_a_hole_halts_its_partition_and_no_other() -> None:
    """The good prefix is committed, the finding names the offsets, the next run is green and waits."""
    made = create_filled_stream(2)
    made.reader.lost_offsets = {(A0, 1)}
    outcome = made.run()
    assert short(outcome.findings) == [("gap", "in-a/0", 1)]
    assert "[1, 2)" in outcome.findings[0].cause
    assert frontiers(made) == {"in-a/0": 1, "in-a/1": 3}
    assert offsets(made, A0) == [0, 0]
    again = made.run()
    assert again.findings == []
    assert [(partition, waits.finding) for partition, waits in again.earlier_halts] == [(A0, "gap")]


@pytest.mark.parametrize("lost", [(0,), (2,), (1, 2), (0, 1, 2)])
def test_holes_anywhere_in_the_range(lost: tuple[int, ...]) -> None:
    """At the beginning, at the end, or all of it: a range that yields nothing is one whole hole."""
    made = create_filled_stream()
    made.reader.lost_offsets = {(A0, offset) for offset in lost}
    outcome = made.run()
    assert short(outcome.findings) == [("gap", "in-a/0", lost[0])]
    assert frontiers(made) == {"in-a/0": lost[0]}


def test_holes_are_counted_without_a_tier() -> None:
    """They are passed over, by name, in the certificate and the account."""
    made = create_filled_stream(2, tier="none")
    made.reader.lost_offsets = {(A0, 1), (A1, 0), (A1, 1), (A1, 2)}
    outcome = made.run()
    assert not outcome.findings
    assert frontiers(made) == {"in-a/0": 3, "in-a/1": 3}
    assert made.accounts()[A0].counts == {"hole: unexplained": 1}
    assert made.accounts()[A1].counts == {"hole: unexplained": 3}
    assert offsets(made, A0) == [0, 0, 2]


def test_expired_messages_halt_and_are_told_once() -> None:
    """The lost range by name; the others advance; the entry carries the finding."""
    made = create_filled_stream(2)
    made.run()
    for partition in (A0, A1):
        send(made, partition, 3, 4)
    made.kafka.delete_records(A0, 4)
    outcome = made.run()
    assert short(outcome.findings) == [("expired", "in-a/0", 3)]
    assert "1 message [3, 4)" in outcome.findings[0].cause
    assert frontiers(made) == {"in-a/0": 3, "in-a/1": 5}
    assert made.run().findings == []


def test_expired_messages_are_counted_without_a_tier() -> None:
    """Reading goes on at the log start."""
    made = create_filled_stream(tier="none")
    made.run()
    send(made, A0, 3, 4)
    made.kafka.delete_records(A0, 4)
    assert made.run().findings == []
    assert frontiers(made) == {"in-a/0": 5}
    assert made.accounts()[A0].counts == {"hole: expired": 1}


def test_a_topic_made_again_halts_with_both_ids() -> None:
    """Also when it has grown past the frontier."""
    made = create_filled_stream()
    made.run()
    old = made.kafka.topics["in-a"].id
    made.kafka.delete("in-a")
    new = made.kafka.create("in-a")
    send(made, A0, ["x"], 1, 2, 3, 4)
    outcome = made.run()
    assert short(outcome.findings) == [("re-created", "in-a/0", 3)]
    assert (outcome.findings[0].expected, outcome.findings[0].found) == (
        f"topic id {old}",
        f"topic id {new}",
    )
    assert offsets(made, A0) == [0, 0, 1, 2]


def test_a_topic_made_again_under_the_reader_is_not_committed() -> None:
    """What was read may be of the new life: the slice is thrown away and discovery says why."""
    made = create_filled_stream()

    def again(ranges: Ranges) -> list[Partition]:
        if made.kafka.topics["in-a"].id == "id-1":
            made.kafka.delete("in-a")
            made.kafka.create("in-a")
            send(made, A0, ["x"], ["y"], ["z"], ["w"])
        return sorted(ranges)

    made.reader.tasks = again
    outcome = made.run()
    assert short(outcome.findings) == [("re-created", "in-a/0", 0)]
    assert made.rows() == []


def test_a_truncated_log_halts() -> None:
    """Kafka has lost what was folded already."""
    made = create_filled_stream()
    made.run()
    made.kafka.truncate(A0, 1)
    (finding,) = made.run().findings
    assert short([finding]) == [("truncated", "in-a/0", 3)]
    assert (finding.log_end, finding.found) == (1, "log end 1")
    halt = made.accounts()[A0].halt
    assert halt is not None
    assert halt.log_end == 1
    assert frontiers(made) == {"in-a/0": 3}


def test_a_deleted_topic_does_not_stop_the_others() -> None:
    """It is simply not there to be read."""
    made = create_filled_stream()
    made.kafka.create("in-b")
    made.run()
    made.kafka.delete("in-a")
    send(made, B0, ["a"])
    outcome = made.run()
    assert outcome.findings == []
    assert frontiers(made)["in-b/0"] == 1


def test_poison_of_nobody_halts_and_the_rest_goes_on() -> None:
    """The reading begins again without the partition, in the same run."""
    made = create_filled_stream(2)
    made.kafka.produce("in-a", None, b"?", partition=0)
    send(made, A0, 3)
    outcome = made.run(messages_max=4)
    assert short(outcome.findings) == [("poison", "in-a/0", 3)]
    assert frontiers(made) == {"in-a/0": 3, "in-a/1": 3}
    assert halt(made, A0) is not None


def test_messages_of_a_quarantined_session_are_kept_whole() -> None:
    """Key, value, headers, offset and cause, so that they outlive Kafka's retention."""
    made = create_filled_stream()
    made.kafka.produce("in-a", "s", b"?", headers=(("h", b"x"),))
    send(made, A0, 9)
    made.run()
    (change,) = [
        change
        for commit in made.ledger.commits
        if commit.entry
        for change in commit.entry.changes
        if change.quarantine_files
    ]
    rows = [row for file in change.quarantine_files for row in made.files.read(file).rows]
    assert [(row["offset"], row["key"], row["finding"]) for row in rows] == [
        (3, b"s", "poison"),
        (4, b"s", "poison"),
    ]
    assert (rows[0]["value"], rows[0]["headers"]) == (b"?", (("h", b"x"),))
    assert list(made.files.quarantined_sessions(made.accounts()[A0].state)) == ["s"]
    assert made.accounts()[A0].quarantined == 1
    send(made, A0, ["a"])
    made.run()
    assert made.accounts()[A0].quarantined == 0
    assert not made.files.quarantined_sessions(made.accounts()[A0].state)


def test_until_offsets_are_reached_exactly() -> None:
    """The batch reader's way: these partitions up to there, in slices cut by us."""
    made = create_filled_stream(2)
    outcome = made.run(messages_max=1, until={A0: 2})
    assert frontiers(made) == {"in-a/0": 2, "in-a/1": 0}
    assert outcome.slices == 2
    made.run(until={A0: 2})
    assert frontiers(made) == {"in-a/0": 2, "in-a/1": 0}


@pytest.mark.parametrize(
    ("partition", "end", "said"), [(A0, 9, "log ends at 3"), (B0, 1, "not known")]
)
def test_until_offsets_that_cannot_be_reached(partition: Partition, end: int, said: str) -> None:
    """Said before anything is read."""
    made = create_filled_stream()
    with pytest.raises(ConfigError, match=said):
        made.run(until={partition: end})
    assert kinds(made) == ["start"]


def test_until_offsets_of_a_halted_partition_wait() -> None:
    """The others are read."""
    made = create_filled_stream(2)
    made.reader.lost_offsets = {(A0, 1)}
    made.run(until={A0: 3, A1: 2})
    assert frontiers(made) == {"in-a/0": 1, "in-a/1": 2}


def test_broken_reading_that_discovery_cannot_explain_is_platform_trouble() -> None:
    """Exit 4; the next run goes on from the last commit."""
    made = create_filled_stream()
    made.reader.failures = ["connection lost"]
    with pytest.raises(PlatformError, match="reading from Kafka broke") as trouble:
        made.run()
    assert trouble.value.fields["cause"] == "connection lost"
    assert made.run().messages == 3


def test_broken_reading_that_discovery_confirms_halts_that_partition() -> None:
    """Messages expired between discovery and reading: found, and the others go on in the same run."""
    made = create_filled_stream(2)
    made.reader.tasks = lambda ranges: (made.kafka.delete_records(A0, 2), sorted(ranges))[1]
    outcome = made.run()
    assert short(outcome.findings) == [("expired", "in-a/0", 0)]
    assert frontiers(made) == {"in-a/0": 0, "in-a/1": 3}


def overtaken(made: MemoryStream, messages_max: int = 1000) -> None:
    """Let another whole run in, while this one reads its first slice."""
    runs = iter([lambda: made.run(messages_max)])

    def tasks(ranges: Ranges) -> list[Partition]:
        for other in runs:
            other()
        return sorted(ranges)

    made.reader.tasks = tasks


def test_a_run_overtaken_with_nothing_left_is_fine() -> None:
    """Exit 0: somebody else has done it all; nothing came twice."""
    made = create_filled_stream(2)
    overtaken(made)
    outcome = made.run()
    assert (outcome.messages, outcome.findings) == (0, [])
    assert offsets(made, A0) == [0, 0, 1, 2]


@pytest.mark.long
def test_a_run_overtaken_with_work_left_is_fenced() -> None:
    """Exit 5: it must not guess where to go on."""
    made = create_filled_stream()

    def tasks(ranges: Ranges) -> list[Partition]:
        made.reader.tasks = sorted
        made.run(until={A0: 2})
        return sorted(ranges)

    made.reader.tasks = tasks
    with pytest.raises(FencedError, match="moved the frontier"):
        made.run()
    assert offsets(made, A0) == [0, 0, 1]
    made.run()
    assert offsets(made, A0) == [0, 0, 1, 2]


def test_a_run_overtaken_between_its_slices_is_fenced() -> None:
    """Not only a commit can find that the frontier moved: the next slice does too."""
    made = create_filled_stream()

    def other(call: str) -> None:
        if call == "committed" and len(made.ledger.commits) == 2:
            made.ledger.on_call = lambda _: None
            made.run(until={A0: 2})

    made.ledger.on_call = other
    with pytest.raises(FencedError):
        made.run(messages_max=1)
    assert offsets(made, A0) == [0, 0, 1]


def test_foreign_commits_alone_are_told_by_an_entry() -> None:
    """Even when there is nothing to fold; an OPTIMIZE is not."""
    made = create_filled_stream()
    made.run()
    made.ledger.foreign_commit("")
    assert made.run().findings == []
    made.ledger.foreign_commit("a row was deleted")
    assert [(f.finding, f.cause) for f in made.run().findings] == [("foreign", "a row was deleted")]
    assert made.run().findings == []


def test_a_rolled_back_ledger_stops_the_run() -> None:
    """Exit 3, before anything is read."""
    made = create_filled_stream()
    made.run()
    made.ledger.commits.pop()
    with pytest.raises(IntegrityError, match=r"head\.json"):
        made.run()


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_damaged_state_file_is_found_before_use(damage: str) -> None:
    """Named, exit 3, and nothing is committed on top of it."""
    made = create_filled_stream()
    made.run()
    (path,) = [file.path for file in made.accounts()[A0].state]
    if damage == "flip":
        content = bytearray(made.files.files[path].content)
        content[7] ^= 1
        made.files.files[path].content = bytes(content)
    else:
        del made.files.files[path]
    send(made, A0, 9)
    with pytest.raises(IntegrityError, match=path):
        made.run()
    assert frontiers(made) == {"in-a/0": 3}


def test_orphans_of_the_same_start_are_swept() -> None:
    """What another attempt left for the slice just committed is dead; everything named stays."""
    made = create_filled_stream()
    made.files.open("records/in-a/0/0-0-dead")
    made.files.open("state/in-a/0/0-0-dead")
    made.files.open("records/in-a/0/0-00-alive")
    made.files.open("records/in-a/1/0-0-alive")
    made.run()
    assert not [path for path in made.files.files if "dead" in path]
    assert len([path for path in made.files.files if "alive" in path]) == 2


def test_state_files_stay_few() -> None:
    """Many small slices merge their state as they go."""
    made = create_filled_stream()
    for v in range(60):
        send(made, A0, v)
        made.run()
    assert len(made.accounts()[A0].state) <= 3


def test_plan_says_what_a_run_would_do_and_commits_nothing() -> None:
    """Before the first run, after it, and with more to do."""
    made = create_filled_stream()
    ledger, first = plan_run(made.stream, made.kafka, made.ledger)
    assert (ledger.sequence, list(first.new_accounts), first.backlog) == (-1, [A0], 3)
    assert not made.ledger.commits
    made.run()
    send(made, A0, 7)
    _, second = plan_run(made.stream, made.kafka, made.ledger)
    assert second.ranges == {A0: OffsetRange(3, 4)}
