"""After a deliberate restore: the witness follows the ledger by a recorded decision, and never by
itself.
"""

from __future__ import annotations

import json

import pytest

from seriatim.engine.crash_points import arm
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.model import EntryMark
from seriatim.operations.accept import RestoreDecision, accept_restored_ledger
from seriatim.operations.report_findings import mark_reported, unreported_findings
from seriatim.testing import MemoryStream
from tests.operations.decision_helper import assert_records_match_state
from tests.operations.memory_streams import A0, create_filled_stream, frontiers, kinds, send
from tests.operations.test_crash_points import Killed, killer


def decide(made: MemoryStream, *, dry_run: bool = False) -> RestoreDecision:
    """Accept the ledger that is there."""
    return accept_restored_ledger(
        made.ledger, made.clock, "s", "a-restore", "from the backup of Monday", dry_run=dry_run
    )


def put_back(entries: int = 1) -> MemoryStream:
    """A stream of which the newest entries were lost by a restore."""
    made = create_filled_stream()
    made.run(messages_max=1)
    del made.ledger.commits[-entries:]
    return made


@pytest.mark.parametrize("entries", [1, 2])
def test_an_older_ledger_is_refused_until_it_is_accepted(entries: int) -> None:
    """Then the same messages are folded again, once, and the ledger says why."""
    made = put_back(entries)
    with pytest.raises(IntegrityError, match=r"head\.json has seen entry 3") as refused:
        made.run()
    assert "seriatim accept s --restored --because" in refused.value.next
    done = decide(made)
    assert (done.witness_sequence, done.ledger_sequence, done.sequence) == (
        3,
        3 - entries,
        4 - entries,
    )
    assert made.ledger.manifest_at("s", done.sequence).entry.reason == "from the backup of Monday"
    made.run()
    assert frontiers(made) == {"in-a/0": 3}
    assert_records_match_state(made)


def test_another_ledger_of_the_same_length_is_accepted_too() -> None:
    """The witness has seen another entry under that number."""
    made = put_back()
    assert made.ledger.stored_witness is not None
    made.ledger.stored_witness = EntryMark(2, "another")
    with pytest.raises(IntegrityError, match="another one"):
        made.run()
    decide(made)
    made.run()
    assert_records_match_state(made)


def test_a_witness_without_a_ledger_is_moved_aside_with_the_reason() -> None:
    """The next run begins at the first offsets that Kafka has."""
    made = create_filled_stream()
    made.run()
    made.ledger.commits.clear()
    with pytest.raises(IntegrityError, match="there is no ledger"):
        made.run()
    done = decide(made)
    assert (done.ledger_sequence, done.sequence) == (-1, -1)
    archived = json.loads(made.ledger.store.read(done.archived_witness_path))
    assert archived["accepted because"] == "from the backup of Monday"
    made.run()
    assert (kinds(made), frontiers(made)) == (["start", "slice"], {"in-a/0": 3})


def test_findings_after_a_restore_are_told() -> None:
    """Entry numbers come again: what was told of the lost ones says nothing about the new."""
    made = create_filled_stream()
    send(made, A0, b"?", 8, 9)
    made.run(messages_max=1)
    mark_reported(made.ledger, 6)
    del made.ledger.commits[-5:]
    decide(made)
    made.run(messages_max=1)
    assert [finding.finding for finding in unreported_findings(made.ledger, "s")] == ["poison"]


def test_a_dry_run_changes_nothing_and_a_good_ledger_is_refused() -> None:
    """There is nothing to accept where nothing is wrong."""
    made = put_back()
    before = len(made.ledger.commits), made.ledger.stored_witness
    assert decide(made, dry_run=True).witness_sequence == 3
    assert (len(made.ledger.commits), made.ledger.stored_witness) == before
    decide(made)
    with pytest.raises(ConfigError, match="nothing to accept"):
        decide(made)


@pytest.mark.parametrize("point", ["manifest-written", "committed", "witness-written"])
@pytest.mark.parametrize("entries", [1, 3])
def test_killed_anywhere_and_done_again_is_right(point: str, entries: int) -> None:
    """The decision may be recorded twice; the witness follows in the end."""
    made = put_back(entries)
    arm(killer(point, 1))
    try:
        with pytest.raises(Killed):
            decide(made)
    finally:
        arm(None)
    try:
        decide(made)
    except ConfigError as nothing:
        assert "nothing to accept" in nothing.message  # noqa: PT017  # it was done already
    made.run()
    assert frontiers(made) == {"in-a/0": 3}
    assert_records_match_state(made)
