"""Poison of every format that comes with Seriatim: each kind is found at its offset, its neighbours are
folded, and memory stays in proportion to the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
from google.protobuf import descriptor_pb2
from msgspec import Struct

from seriatim import Machine
from seriatim.engine.decoding import Decoder, JsonDecoder
from seriatim.formats.avro import AvroDecoder, AvroValues
from seriatim.formats.debezium import DebeziumDecoder
from seriatim.formats.json_schema import JsonSchemaDecoder
from seriatim.formats.protobuf import ProtobufDecoder
from seriatim.memory import MemorySchemas
from seriatim.testing import fold
from tests.formats.schema_values import (
    INTEGER,
    PROTO,
    TEXT,
    add_message,
    avro_value,
    descriptors_of,
)
from tests.memory_use import peak_memory

KINDS = ("truncated", "wrong magic", "wrong branch", "10 MB", "10 MB announced", "recursion")
LARGE = 10_000_000
DEPTH = 100_000
MEMORY_FACTOR = 16
"""How many times the bytes of a value its decoding may take. Numbers of one byte in a list of Avro take
the most: 8 bytes for each of them, and what the list has in reserve.
"""


class Message(Struct, tag_field="type", tag="update"):
    """What a good value of every format is."""

    seq: int
    id: str


class Total(Struct):
    """A state and a record."""

    total: int = 0


class Sum(Machine[Total, Message, Total]):
    """Adds the numbers of messages."""

    def start(self, session: str) -> Total:  # noqa: ARG002  # the same for all
        """Nothing yet."""
        return Total()

    def apply(self, state: Total, message: Message) -> list[Total]:
        """Add one."""
        state.total += message.seq
        return [Total(state.total)]


class PoisonCase(Struct, frozen=True):
    """A format: its decoder, a good value with the number 7, and poison of each kind with a pattern
    that its cause has.
    """

    new_decoder: Callable[[], Decoder]
    good: bytes
    poison: dict[str, tuple[bytes, str]]


def json_poison(good: bytes, prefix: bytes = b"") -> dict[str, tuple[bytes, str]]:
    """What can be wrong with JSON behind a prefix."""
    nested = prefix + b'{"type":"update","seq":7,"id":"a","more":'
    return {
        "truncated": (good[:-1], "not JSON|DecodeError"),
        "10 MB": (nested + b"[" + b"{}," * (LARGE // 3) + b"}", "not JSON|DecodeError"),
        "recursion": (nested + b"[" * DEPTH, "nested too deeply"),
    }


def json_case() -> PoisonCase:
    """JSON has no magic byte, no union but that of its tags, and no lengths."""
    good = b'{"type":"update","seq":7,"id":"a"}'
    poison = {
        **json_poison(good),
        "wrong magic": (b"\x00\x00\x00\x00\x01" + good, "not JSON"),
        "wrong branch": (good.replace(b"update", b"upset"), "wrong schema: Invalid value 'upset'"),
    }
    return PoisonCase(JsonDecoder, good, poison)


def json_schema_case() -> PoisonCase:
    """JSON behind the id of a schema."""
    schemas = MemorySchemas()
    header = schemas.register("{}", kind="JSON")
    good = header + b'{"type":"update","seq":7,"id":"a"}'
    poison = {
        **json_poison(good, header),
        "wrong magic": (b"\x01" + good[1:], "begins with 0x01"),
        "wrong branch": (good.replace(b"update", b"upset"), "wrong schema: Invalid value 'upset'"),
    }
    return PoisonCase(lambda: JsonSchemaDecoder(schemas), good, poison)


AVRO_SCHEMA = {
    "type": "record",
    "name": "update",
    "fields": [
        {"name": "seq", "type": "long"},
        {"name": "id", "type": "string"},
        {"name": "next", "type": ["null", "update"], "default": None},
        {"name": "numbers", "type": {"type": "array", "items": "long"}, "default": []},
    ],
}
BEFORE_UNION = b"\x0e\x02a"
"""The number 7 and the text "a" in Avro."""


def avro_poison(good: bytes, start: bytes) -> dict[str, tuple[bytes, str]]:
    """What can be wrong with a record of AVRO_SCHEMA. `start` is what is before its union."""
    return {
        "truncated": (good[:-1], "ends too early"),
        "wrong magic": (b"\x01" + good[1:], "begins with 0x01|DecodeError"),
        "wrong branch": (start + b"\x01" + b"\x00", "branch -1 of a union of 2 types"),
        # As many numbers as it says, and then no end.
        "10 MB": (start + b"\x00\x80\xda\xc4\x09" + b"\x02" * LARGE, "ends too early"),
        "10 MB announced": (start + b"\x00\x80\xda\xc4\x09\x02", "ends too early"),
        "recursion": (start + (b"\x02" + BEFORE_UNION) * DEPTH, "nested too deeply"),
    }


def avro_case() -> PoisonCase:
    """Avro with a record that may contain itself."""
    schemas = MemorySchemas()
    header = schemas.register(AVRO_SCHEMA)
    good = avro_value(header, AVRO_SCHEMA, {"seq": 7, "id": "a", "next": None, "numbers": []})
    return PoisonCase(lambda: AvroDecoder(schemas), good, avro_poison(good, header + BEFORE_UNION))


def protobuf_case() -> PoisonCase:
    """Protobuf with a message that may contain itself."""
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    add_message(file, "other", {"id": TEXT})
    update = add_message(file, "update", {"seq": INTEGER, "id": TEXT})
    optional = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    kind = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    update.field.add(name="next", number=3, type=kind, type_name=".shop.update", label=optional)
    schemas = MemorySchemas()
    header = schemas.register(PROTO, kind="PROTOBUF")
    start = header + b"\x02\x02"
    good = start + b"\x08\x07\x12\x01a"
    nested = b""
    for _ in range(200):
        nested = b"\x1a" + _length(nested) + nested
    poison = {
        "truncated": (good[:-1], "wrong schema"),
        "wrong magic": (b"\x01" + good[1:], "begins with 0x01"),
        "wrong branch": (header + b"\x02\x08" + good[7:], r"it has no message at \[4\]"),
        "10 MB": (start + b"\x12" + _length(b"a" * LARGE) + b"a" * (LARGE - 1), "wrong schema"),
        "10 MB announced": (start + b"\x12" + _length(b"a" * LARGE) + b"a", "wrong schema"),
        "recursion": (start + nested, "wrong schema"),
    }
    return PoisonCase(lambda: ProtobufDecoder(schemas, descriptors_of(file)), good, poison)


def _length(content: bytes) -> bytes:
    """How Protobuf writes the length of a field."""
    left = len(content)
    digits = []
    while left >= 0x80:
        digits.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*digits, left])


def debezium_json_case() -> PoisonCase:
    """A change in JSON."""
    good = b'{"op":"c","after":{"id":1},"type":"update","seq":7,"id":"a"}'
    poison = {
        **json_poison(good),
        "wrong magic": (b"\x00" + good, "unknown schema id|no schema registry"),
        "wrong branch": (good.replace(b'"c"', b'"x"'), "op is 'x'"),
    }
    return PoisonCase(DebeziumDecoder, good, poison)


def debezium_avro_case() -> PoisonCase:
    """A change in Avro."""
    fields = [{"name": "op", "type": "string"}, *AVRO_SCHEMA["fields"]]
    schema = {**AVRO_SCHEMA, "fields": [*fields, {"name": "type", "type": "string"}]}
    schemas = MemorySchemas()
    header = schemas.register(schema)
    record = {"op": "m", "seq": 7, "id": "a", "next": None, "numbers": [], "type": "update"}
    good = avro_value(header, schema, record)
    nested = b"\x02\x02m" + BEFORE_UNION
    poison = avro_poison(good, header + b"\x02m" + BEFORE_UNION)
    poison["recursion"] = (header + nested[1:] + nested * DEPTH, "nested too deeply")
    return PoisonCase(lambda: DebeziumDecoder(open_avro=lambda: AvroValues(schemas)), good, poison)


CASES = {
    "json": json_case,
    "json-schema": json_schema_case,
    "avro": avro_case,
    "protobuf": protobuf_case,
    "debezium": debezium_json_case,
    "debezium in avro": debezium_avro_case,
}


def test_every_format_has_every_kind() -> None:
    """Only what does not say a length cannot announce more than it has."""
    for name, new_case in CASES.items():
        expected = set(KINDS)
        if "json" in name or name == "debezium":
            expected.remove("10 MB announced")
        assert set(new_case().poison) == expected, name


@pytest.mark.parametrize("name", CASES)
def test_poison_is_found_at_its_offset_and_its_neighbours_are_folded(name: str) -> None:
    """Each kind alone, between two good messages of other sessions."""
    case = CASES[name]()
    for kind, (value, cause) in case.poison.items():
        messages = [("before", case.good), ("poison", value), ("after", case.good)]
        folded = fold(Sum, messages, decoder=case.new_decoder)
        findings = [(found.finding, found.offset) for found in folded.findings]
        assert findings == [("poison", 1)], kind
        assert re.search(cause, folded.findings[0].cause), (kind, folded.findings[0].cause)
        assert [row["offset"] for row in folded.rows] == [0, 2], kind
        assert folded.states["before"] == folded.states["after"] == Total(7), kind


@pytest.mark.parametrize("name", CASES)
def test_the_memory_for_poison_is_in_proportion_to_the_message(name: str) -> None:
    """A value that announces more than it has takes none; one of 10 MB takes a bounded multiple."""
    case = CASES[name]()
    decode = case.new_decoder().for_type(Message)
    decode([case.good])
    for kind in ("10 MB announced", "10 MB", "recursion"):
        if kind not in case.poison:
            continue
        value, _ = case.poison[kind]
        used = peak_memory(partial(decode, [value]))
        assert used < 1_000_000 + MEMORY_FACTOR * len(value), kind
