"""A message format of the user's own, for real: the example of docs/STREAMS.md on a broker, folded by
Spark through both readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.contracts.decoder_cases import write_example_files
from tests.integration.lab import TABLE, Lab


def told(lab: Lab, *arguments: str) -> list[Any]:
    """What a command prints as lines of JSON."""
    done = lab.command(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("read", ["spark", "task"])
def test_a_stream_with_its_own_format(lab: Lab, topic: Callable[..., str], read: str) -> None:
    """Records are right, poison is named by its offset, and trace, state and verify read the format."""
    name = topic(2)
    write_example_files(lab.folder / "streams")
    stream = lab.stream(
        f"comma-{read}", name, TABLE, decoder="comma:CommaSeparated", slice={"read": read}
    )
    messages: list[Any] = [(name, 0, "s", b"snapshot,1\na,1.5,10\nb,2.0,5")]
    messages += [(name, 0, "s", f"update,{i}\na,{i}.5,{i}".encode()) for i in range(2, 500)]
    messages += [
        (name, 1, "t", b"snapshot,1\nc,1.0,1"),
        (name, 1, "t", b"update,2\n\xff\xfe,1.0,1"),
        (name, 1, "t", b"update,3\nc,2.0,1"),
        (name, 1, "u", b"snapshot,1\nd,1.0,1"),
    ]
    lab.send(messages)

    outcome = lab.fold(stream)
    (finding,) = outcome.findings
    assert (finding.finding, finding.partition, finding.offset) == ("poison", 1, 1)
    assert finding.session == "t"
    assert finding.cause.startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")

    records = lab.records(stream)
    updates = [record for record in records if record["op"] == "update"]
    assert [(record["offset"], record["price"]) for record in updates] == [
        (i - 1, i + 0.5) for i in range(2, 500)
    ]
    assert lab.sessions(stream)[name, "u"]["sequence"] == 1

    (state,) = told(lab, "state", stream, "s")
    assert state["state"]["rows"] == [
        {"id": "a", "price": 499.5, "size": 499},
        {"id": "b", "price": 2.0, "size": 5},
    ]
    steps = told(lab, "trace", stream, "t")
    assert [step["outcome"] for step in steps] == ["applied", "set aside", "set aside"]
    assert steps[0]["message"]["rows"] == [{"id": "c", "price": 1.0, "size": 1}]
    assert steps[1]["message"]["raw"] == "update,2\n\\xff\\xfe,1.0,1"
    assert lab.command("verify", stream, "--kafka").returncode == 0


def test_a_decoder_that_is_not_there_is_refused_before_anything_is_read(
    lab: Lab, topic: Callable[..., str]
) -> None:
    """Exit code 2, with the file, the class and what to write."""
    stream = lab.stream("nobody", topic(1), TABLE, decoder="nowhere:Nobody")
    done = lab.command("run", stream)
    assert done.returncode == 2
    assert "decoder 'nowhere:Nobody' cannot be imported" in done.stderr
    assert "put nowhere.py beside the stream file" in done.stderr
