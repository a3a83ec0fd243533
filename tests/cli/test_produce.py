"""`seriatim produce FILE` as a user types it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim.testing import MemoryKafka
from tests.golden.product import FakeCluster, command


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    """A Kafka in memory with a topic `t`, and a file of two lines."""
    cluster = FakeCluster()
    cluster.kafka.create("t")
    (tmp_path / "lines").write_text('{"id": "a", "n": 1}\n\n  {"id": "b", "n": 2.5}\n')
    with cluster.installed(tmp_path):
        yield cluster


def keys_and_values(kafka: MemoryKafka, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """The messages of a topic with one partition."""
    return [(message.key, message.value) for message in kafka.topics[topic].messages[0]]


def test_each_line_is_a_message(cluster: FakeCluster) -> None:
    """Sent as it is written; empty lines are passed over."""
    answer = command("produce", "lines", "--topic", "t")
    assert (answer.code, answer.out) == (0, "2 messages acknowledged by topic t\n")
    assert keys_and_values(cluster.kafka, "t") == [
        (None, b'{"id": "a", "n": 1}'),
        (None, b'{"id": "b", "n": 2.5}'),
    ]


def test_fields_become_the_key(cluster: FakeCluster) -> None:
    """One, or several with a slash between them. Options may come before the file."""
    assert command("produce", "--topic", "t", "--key", "id", "lines").code == 0
    assert command("produce", "lines", "--topic", "t", "--key", "id", "--key", "n").code == 0
    keys = [key for key, _ in keys_and_values(cluster.kafka, "t")]
    assert keys == [b"a", b"b", b"a/1", b"b/2.5"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: not an object"),
        ('{"n": 1}', "line 3: there is no field 'id' for the key"),
        ('{"id": null}', "line 3: 'id' is None, which cannot be a key"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_sent(
    cluster: FakeCluster, tmp_path: Path, line: str, problem: str
) -> None:
    """All lines of a file are checked first."""
    (tmp_path / "lines").write_text(f'{{"id": "a"}}\n\n{line}\n')
    answer = command("produce", "lines", "--topic", "t", "--key", "id")
    assert answer.code == 2
    assert f"ConfigError: lines: {problem}" in answer.err
    assert keys_and_values(cluster.kafka, "t") == []


def test_a_wrong_line_of_standard_input_says_how_many_were_sent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be read twice, so the lines before it are sent."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"id": 1}\n{\n')))
    answer = command("produce", "-", "--topic", "t", "--key", "id", "--json")
    assert answer.code == 2
    error = answer.told()[-1]
    assert "standard input: line 2: not JSON" in error["message"]
    assert error["acknowledged"] == 1
    assert len(keys_and_values(cluster.kafka, "t")) == 1


def test_a_topic_is_created_only_if_asked(cluster: FakeCluster) -> None:
    """A name with a slip in it must not become a topic."""
    answer = command("produce", "lines", "--topic", "tt")
    assert answer.code == 2
    assert "there is no topic tt" in answer.err
    assert set(cluster.kafka.topics) == {"t"}
    assert command("produce", "lines", "--topic", "tt", "--create", "--partitions", "3").code == 0
    assert len(cluster.kafka.topics["tt"].messages) == 3


@pytest.mark.usefixtures("cluster")
def test_a_file_that_is_not_there_is_refused() -> None:
    """With the code for wrong arguments."""
    answer = command("produce", "nowhere", "--topic", "t")
    assert answer.code == 2
    assert "nowhere: No such file" in answer.err


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("topic", ["", "a/b", "ä"])
def test_a_topic_that_cannot_be_is_refused(topic: str) -> None:
    """Before anything is read."""
    answer = command("produce", "lines", "--topic", topic)
    assert answer.code == 2
    assert "cannot name a topic" in answer.err


def test_demo_is_still_a_command_of_its_own() -> None:
    """A file of that name is ./demo."""
    assert command("produce", "demo", "--fault", "nonsense").code == 2
