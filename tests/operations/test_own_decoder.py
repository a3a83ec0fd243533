"""A stream whose messages are in the user's own format: the example of docs/STREAMS.md, folded,
repaired, traced and explained like any other.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from seriatim import Machine, PlainDecoder, Poison
from seriatim.cli.lookback import step_values
from seriatim.engine.decoding import Decoder, JsonDecoder
from seriatim.engine.machine import UserMachine
from seriatim.errors import PlatformError
from seriatim.fast.column_kinds import can_use_compiled_fold
from seriatim.operations.inspect.condition import parse_condition
from seriatim.operations.inspect.tracing import condition_names_after
from seriatim.stream import parse_stream
from seriatim.testing import MemoryStream, fold, fold_table
from tests.contracts.decoder_cases import import_example, write_example_files
from tests.operations.lookback_helper import explain_row, trace_steps
from tests.operations.memory_streams import A0

COLUMNS = {"id": "string", "price": "float64", "size": "int64"}
SNAPSHOT = b"snapshot,1\na,1.5,10\nb,2.0,5"


@pytest.fixture
def comma(tmp_path: Path) -> Iterator[Any]:
    """The decoder of the example, as a module."""
    write_example_files(tmp_path)
    yield import_example(tmp_path, "comma")
    del sys.modules["comma"]


def new_stream(decoder: type[Decoder], **fields: Any) -> MemoryStream:
    """A stream of the table machine with one partition of the topic in-a."""
    toml_values = {
        "topics": "in-a",
        "machine": "table",
        "decoder": "comma:CommaSeparated",
        "sequence": "seq",
        "table": {"key": ["id"], "columns": COLUMNS},
        "output": {"path": "memory"},
        **fields,
    }
    stream = parse_stream("quotes", toml_values, "quotes.toml")
    world = MemoryStream(stream, lambda: stream.table_machine(decoder=decoder()))
    world.kafka.create("in-a", 1)
    return world


def produce(world: MemoryStream, *values: bytes | None) -> None:
    """Send values in one session."""
    for value in values:
        world.kafka.produce("in-a", "s", value)


def rows_of(world: MemoryStream) -> Any:
    """The rows of the session as they are committed."""
    session = world.sessions(A0)["s"]
    runner = world.machine()
    state = runner.load(session.state_bytes or b"", session.state_version)
    return runner.to_plain(state)["rows"]


def test_the_example_of_the_page_passes_its_own_test(tmp_path: Path, comma: Any) -> None:
    """A reader who copies the three files has a stream that works."""
    assert comma.CommaSeparated
    test_module: Any = import_example(tmp_path, "test_comma")
    test_module.test_a_price_changes_and_a_cut_message_is_poison()
    stream = parse_stream(
        "quotes",
        tomllib.loads((tmp_path / "quotes.toml").read_text()),
        "quotes.toml",
    )
    assert stream.decoder == "comma:CommaSeparated"


def test_poison_is_named_by_its_offset_and_the_rest_is_folded(comma: Any) -> None:
    """A value that the decoder cannot read sends its session into quarantine, until its snapshot."""
    world = new_stream(comma.CommaSeparated)
    produce(world, SNAPSHOT, b"update,2\na,1.6,10", b"update,3", None)
    outcome = world.run()
    (finding,) = outcome.findings
    assert (finding.finding, finding.offset) == ("poison", 2)
    assert finding.cause == "ValueError: not enough values to unpack (expected 1, got 0)"
    produce(world, b"snapshot,4\na,1.7,10", b"delete,5\na")
    assert world.run().findings == []
    assert rows_of(world) == []
    assert [row["op"] for row in world.rows()] == [
        "snapshot",
        "snapshot",
        "update",
        "snapshot",
        "delete",
        "delete",
    ]


def test_trace_and_explain_show_messages_as_the_decoder_gives_them(comma: Any) -> None:
    """The table machine's messages are shown as they were sent, and conditions see their fields."""
    world = new_stream(comma.CommaSeparated)
    produce(world, SNAPSHOT, b"update,2\na,1.6,10", b"update,3\n\xff\xfe,1.0,1")
    world.run()
    runner = world.machine()
    _, update, poison = trace_steps(world)
    sent = {"type": "update", "seq": 2, "id": "a", "price": 1.6, "size": 10}
    assert step_values(runner, update, 3)["message"] == sent
    condition = parse_condition(
        "message.price > 1.55", tuple(condition_names_after(runner, update))
    )
    assert condition.is_true(condition_names_after(runner, update))
    shown = step_values(runner, poison, 3)["message"]
    assert "UnicodeDecodeError" in shown["poison"]
    assert shown["raw"] == "update,3\n\\xff\\xfe,1.0,1"
    (explanation,) = explain_row(world, "a")
    assert [touch.message for touch in explanation.touches][-1] == sent


def test_what_is_no_column_is_shown_too(comma: Any) -> None:
    """A message is shown as the decoder gives it, not as the machine takes it."""

    class Noting(comma.CommaSeparated):  # type: ignore[name-defined,misc]
        def to_plain(self, value: bytes) -> Any:
            return {**super().to_plain(value), "bytes": value[:3], "length": len(value)}

    world = new_stream(Noting)
    produce(world, SNAPSHOT, b"update,2\na,1.6,10")
    world.run()
    shown = step_values(world.machine(), trace_steps(world)[1], 2)["message"]
    assert (shown["price"], shown["bytes"], shown["length"]) == (1.6, "dXBk", 17)


def test_another_decoder_goes_on_with_the_state(comma: Any) -> None:
    """State does not depend on the format: a producer that changes to JSON continues its session."""

    class CommaOrJson(PlainDecoder):
        def to_plain(self, value: bytes) -> Any:
            if value.startswith(b"{"):
                return JsonDecoder().to_plain(value)
            return comma.CommaSeparated().to_plain(value)

    world = new_stream(comma.CommaSeparated)
    produce(world, SNAPSHOT)
    world.run()
    world.machine = lambda: world.stream.table_machine(decoder=CommaOrJson())
    produce(world, b'{"type":"update","seq":2,"id":"a","price":1.6}', b"delete,3\nb")
    assert world.run().findings == []
    assert rows_of(world) == [{"id": "a", "price": 1.6, "size": 10}]


def test_a_decoder_that_cannot_read_what_waits_says_so(comma: Any) -> None:
    """A message that waits in a window is kept as it was sent. A new decoder that cannot read it
    makes it poison; it is never taken for something else.
    """
    world = new_stream(comma.CommaSeparated, tier="window")
    produce(world, SNAPSHOT, b"update,3\nb,3.0,5")
    assert world.run().findings == []
    world.machine = lambda: world.stream.table_machine(decoder=JsonDecoder())
    produce(world, b'{"type":"update","seq":2,"id":"a","price":1.6}')
    (finding,) = world.run().findings
    assert (finding.finding, finding.session) == ("poison", "s")
    assert rows_of(world)[0] == {"id": "a", "price": 1.6, "size": 10}


def test_the_compiled_fold_is_for_json_only() -> None:
    """It parses the bytes itself."""
    toml_values = {
        "topics": "in-a",
        "machine": "table",
        "table": {"key": ["id"], "columns": COLUMNS},
        "output": {"path": "memory"},
    }
    assert can_use_compiled_fold(parse_stream("q", toml_values, "q.toml"))
    toml_values["decoder"] = "comma:CommaSeparated"
    assert not can_use_compiled_fold(parse_stream("q", toml_values, "q.toml"))


class Reading(Struct):
    """A message of a machine of its own."""

    who: str
    count: int
    degrees: float


class Sum(Struct):
    """State and record."""

    total: float = 0.0


class Adding(Machine[Sum, Reading, Sum]):
    """Adds up the readings."""

    def start(self, session: str) -> Sum:  # noqa: ARG002  # every session begins with nothing
        return Sum()

    def apply(self, state: Sum, message: Reading) -> list[Sum]:
        state.total += message.degrees
        return [Sum(state.total)]


class Binary(PlainDecoder):
    """Nine bytes: a letter, four bytes of count, four of degrees in hundredths."""

    def to_plain(self, value: bytes) -> Any:
        if len(value) != 9:
            return Poison(f"{len(value)} bytes instead of 9")
        count = int.from_bytes(value[1:5])
        return {
            "who": value[:1].decode(),
            "count": count,
            "degrees": int.from_bytes(value[5:]) / 100,
        }


def reading(who: str, count: int, hundredths: int) -> bytes:
    """A message in the binary format."""
    return who.encode() + count.to_bytes(4) + hundredths.to_bytes(4)


def test_a_machine_of_ones_own_takes_a_binary_format() -> None:
    """With its sequence from the decoded message; messages in the kit are bytes then."""
    messages = [reading("a", 1, 150), reading("a", 2, 50), b"?", reading("a", 4, 1)]
    folded = fold(Adding, messages, sequence="count", decoder=Binary)
    assert folded.records == [Sum(1.5), Sum(2.0)]
    assert [(found.offset, found.cause) for found in folded.findings] == [
        (2, "1 bytes instead of 9")
    ]
    with pytest.raises(TypeError, match="with a decoder of your own a message is bytes"):
        fold(Adding, [Reading("a", 1, 1.0)], decoder=Binary)


def test_the_session_may_be_a_field_of_the_decoded_message() -> None:
    """Whatever the Kafka key is."""
    toml_values = {
        "topics": "in-a",
        "machine": "m:Adding",
        "session": "field:who",
        "decoder": "m:Binary",
        "output": {"path": "memory"},
    }
    stream = parse_stream("readings", toml_values, "readings.toml")
    world = MemoryStream(
        stream, lambda: UserMachine("m:Adding", Adding, session="who", decoder=Binary())
    )
    world.kafka.create("in-a", 1)
    produce(world, reading("a", 1, 100), reading("b", 1, 200), reading("a", 2, 100))
    world.run()
    assert sorted(world.sessions(A0)) == ["a", "b"]
    assert [row["total"] for row in world.rows()] == [1.0, 2.0, 2.0]


def test_a_registry_that_is_down_ends_the_run_and_not_a_session() -> None:
    """Nothing is committed; the next run reads the same messages."""

    class Waiting(PlainDecoder):
        is_down = True

        def to_plain(self, value: bytes) -> Any:
            if Waiting.is_down:
                raise PlatformError("the registry does not answer")
            return Binary().to_plain(value)

    stream = parse_stream(
        "readings",
        {"topics": "in-a", "machine": "m:Adding", "output": {"path": "memory"}},
        "readings.toml",
    )
    world = MemoryStream(stream, lambda: UserMachine("m:Adding", Adding, decoder=Waiting()))
    world.kafka.create("in-a", 1)
    produce(world, reading("a", 1, 100))
    with pytest.raises(PlatformError, match="the registry does not answer"):
        world.run()
    assert world.accounts().get(A0) is None or world.accounts()[A0].frontier == 0
    Waiting.is_down = False
    assert world.run().findings == []
    assert world.accounts()[A0].frontier == 1


def test_times_of_the_table_machine_are_times_or_texts() -> None:
    """A decoder may give a time, or a text in any form that JSON may have."""

    class Timed(PlainDecoder):
        def to_plain(self, value: bytes) -> Any:
            if value == b"begin":
                return {"type": "snapshot", "rows": []}
            times: dict[bytes, Any] = {
                b"time": datetime(2024, 5, 1, 12, tzinfo=UTC),
                b"text": "2024-05-01T12:00:00Z",
                b"postgres": "2024-05-01 12:00:00+00",
            }
            return {"type": "insert", "id": value.decode(), "at": times[value]}

    folded = fold_table(
        [b"begin", b"time", b"text", b"postgres"],
        key=["id"],
        columns={"id": "string", "at": "timestamp"},
        decoder=Timed,
    )
    assert folded.findings == []
    assert {row["at"] for row in folded.records} == {datetime(2024, 5, 1, 12, tzinfo=UTC)}
