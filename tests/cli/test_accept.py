"""`seriatim accept` and `retire` as a user types them: what is missing is said on one screen, exit
2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim import cli
from seriatim.cli.accept import AcceptedLedger, AcceptedTopic, RetiredTopic
from seriatim.engine.offsets import Partition
from seriatim.operations.accept import (
    PartitionDecision,
    RestoreDecision,
    RetireDecision,
    RetiredPartition,
    TopicDecision,
)
from tests.cli.test_run import STREAM

A0 = Partition("a", 0)


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A stream file that was never run."""
    (tmp_path / "t.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    return "t"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("accept", "t", "--because", "x"), "accept what?"),
        (("accept", "t", "a", "--restored", "--because", "x"), "accept what?"),
        (("accept", "t", "a"), "--because is missing"),
        (("accept", "t", "--restored", "--because", " "), "--because is missing"),
        (("retire", "t", "a"), "--because is missing"),
        (("accept", "t", "a", "--because", "x"), "never run"),
        (("accept", "t", "--restored", "--because", "x"), "nothing to accept"),
        (("retire", "t", "a", "--dry-run"), "never run"),
    ],
)
def test_what_is_missing_is_said(
    stream: str, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what to do next."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert "next" in error
    assert stream in error


def test_a_decision_is_told_with_all_its_numbers() -> None:
    """As a table and a sentence for people, as JSON for scripts."""
    one = PartitionDecision(
        partition=A0,
        old_topic_id="old",
        new_topic_id="new",
        frontier=7,
        resumes_at=0,
        ended_sessions=2,
        end_records=3,
        unread_messages=4,
    )
    decision = TopicDecision(
        topic="a", is_new_life=True, reason="why", partitions=[one], sequence=5
    )
    told = AcceptedTopic("t", decision).render()
    assert (
        "entry 5: a new life of a: 2 sessions ended by 3 records; 4 messages of the old life never read"
        in told
    )
    assert "next: seriatim run t" in told
    assert AcceptedTopic("t", decision).to_json() == {
        "stream": "t",
        "topic": "a",
        "new_life": True,
        "because": "why",
        "sequence": 5,
        "partitions": [
            {
                "partition": "a/0",
                "old_id": "old",
                "new_id": "new",
                "frontier": 7,
                "starts": 0,
                "sessions": 2,
                "records": 3,
                "unread": 4,
            }
        ],
    }
    decision.sequence = -1
    looked = AcceptedTopic("t", decision).render()
    assert "nothing changed, this would be" in looked
    assert 'next: seriatim accept t a --because "…"' in looked


def test_retired_and_restored_are_told() -> None:
    """What stays unread, what is given up, where the witness went."""
    over = RetireDecision(
        topic="a",
        reason="why",
        partitions=[RetiredPartition(partition=A0, topic_id="i", frontier=7, unread_messages=2)],
        sequence=3,
    )
    assert "2 messages left unread" in RetiredTopic("t", over).render()
    behind = RestoreDecision(
        witness_sequence=9, ledger_sequence=7, contradiction="behind", reason="why", sequence=8
    )
    assert "from entry 9 to 7; 2 entries given up" in AcceptedLedger("t", behind).render()
    without_ledger = RestoreDecision(
        witness_sequence=9,
        ledger_sequence=-1,
        contradiction="none",
        reason="why",
        archived_witness_path="head-9.json",
    )
    gone = AcceptedLedger("t", without_ledger).render()
    assert "moved to head-9.json" in gone
    assert "next: seriatim run t" in gone
