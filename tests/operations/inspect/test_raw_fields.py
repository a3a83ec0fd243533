"""Looking back at a machine that takes part of its messages as `msgspec.Raw`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec
import pytest
from msgspec import Raw, Struct

from seriatim.cli.lookback import print_step, step_values
from seriatim.engine.decoding import plain_values
from seriatim.engine.machine import Machine, UserMachine
from seriatim.stream import OutputSettings, Stream
from seriatim.testing import MemoryStream
from tests.operations.lookback_helper import explain_row, trace_steps
from tests.operations.memory_streams import A0


class Envelope(Struct):
    """A message whose body is read later."""

    id: str
    body: Raw


class Sizes(Struct):
    """The bodies' sizes, and the last body as the machine keeps it."""

    sizes: dict[str, int] = {}
    newest: Raw = Raw(b"\xc0")


class Size(Struct):
    """A record."""

    id: str
    size: int
    row_key: ClassVar[tuple[str, ...]] = ("id",)


class Measuring(Machine[Sizes, Envelope, Size]):
    """How large bodies are."""

    def start(self, _session: str) -> Sizes:
        """None so far."""
        return Sizes({})

    def apply(self, state: Sizes, message: Envelope) -> Iterable[Size]:
        """The body is never decoded into a type; a state is saved as msgpack, so it is kept as
        that.
        """
        state.sizes[message.id] = len(bytes(message.body))
        state.newest = Raw(msgspec.msgpack.encode(msgspec.json.decode(message.body)))
        return [Size(message.id, state.sizes[message.id])]


@pytest.fixture
def made() -> MemoryStream:
    """A stream of two messages."""
    stream = Stream(
        name="s", topics="in-.*", machine="m:Measuring", output=OutputSettings(path="memory")
    )
    made = MemoryStream(stream, lambda: UserMachine("m:Measuring", Measuring))
    made.kafka.create("in-a", 1)
    for value in (b'{"id": "a", "body": {"price": [1, 2.5]}}', b'{"id": "b", "body": "text"}'):
        made.kafka.produce(A0.topic, "s", value, partition=A0.number)
    made.run()
    return made


def test_a_step_shows_a_raw_value_as_what_it_holds(
    made: MemoryStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trace, replay and bisect show the JSON of a raw field, for scripts and for people."""
    steps = trace_steps(made)
    values = [step_values(made.machine(), step, 2) for step in steps]
    assert [one["message"] for one in values] == [
        {"id": "a", "body": {"price": [1, 2.5]}},
        {"id": "b", "body": "text"},
    ]
    assert {"what": "newest", "before": {"price": [1, 2.5]}, "after": "text"} in values[1][
        "changes"
    ]
    print_step(made.machine(), steps[0], 2)
    assert '"body":{"price":[1,2.5]}' in capsys.readouterr().out


def test_explain_shows_a_raw_value_as_what_it_holds(made: MemoryStream) -> None:
    """The message that made a row is told with the JSON of its raw field."""
    (row,) = explain_row(made, "a")
    (touch,) = row.touches
    assert touch.message == {"id": "a", "body": {"price": [1, 2.5]}}


def test_a_raw_number_that_no_float_holds_is_shown_as_it_was_sent() -> None:
    """What cannot be decoded is shown as text."""
    assert plain_values(Envelope("a", Raw(b"1e999")), msgspec.json.decode) == {
        "id": "a",
        "body": "1e999",
    }
