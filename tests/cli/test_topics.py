"""`seriatim topics` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_run import STREAM
from tests.golden.product import FakeCluster, command

NOON_MS = 1_794_830_400_000
"""12:00 UTC on 16 November 2026."""


def test_topics_with_partitions_messages_times_and_streams(tmp_path: Path) -> None:
    """Messages that have expired are not counted; a topic without messages has no times."""
    cluster = FakeCluster()
    cluster.kafka.create("none-a", 2)
    cluster.kafka.create("empty")
    for minute, partition in ((0, 0), (1, 1), (2, 0), (3, 1)):
        timestamp = NOON_MS + minute * 60_000
        cluster.kafka.produce("none-a", "k", b"1", partition=partition, timestamp=timestamp)
    cluster.expire("none-a", 0, 1)
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams/reads.toml").write_text(STREAM)
    (tmp_path / "streams/broken.toml").write_text("")
    with cluster.installed(tmp_path):
        (found,) = command("topics", "--json").objects()
        table = command("topics").out
        nothing = command("topics", "nobody.*")
    assert found["topics"] == [
        {
            "topic": "empty",
            "partitions": 1,
            "messages": 0,
            "first": None,
            "last": None,
            "streams": [],
        },
        {
            "topic": "none-a",
            "partitions": 2,
            "messages": 3,
            "first": "2026-11-16T12:01:00Z",
            "last": "2026-11-16T12:03:00Z",
            "streams": ["reads"],
        },
    ]
    assert "2026-11-16T12:03:00Z" in table
    assert (nothing.code, nothing.out) == (0, "Kafka has no topic that matches\n")


def test_a_wrong_pattern_is_refused(tmp_path: Path) -> None:
    """With the code for wrong arguments."""
    with FakeCluster().installed(tmp_path):
        answer = command("topics", "(")
    assert answer.code == 2
    assert "not a regular expression" in answer.err


def test_a_broker_that_is_silent_is_trouble_of_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a broker's name the command says how to start one."""
    monkeypatch.setenv("SERIATIM_HOME", str(tmp_path))
    monkeypatch.delenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", raising=False)
    answer = command("topics")
    assert answer.code == 2
    assert "seriatim kafka start" in answer.err
