"""The reader of Avro: the same as fastavro's for what fits a schema, and an error for what does not."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seriatim.engine.messages import Poison
from seriatim.formats.avro import AvroDecoder, parse_reader_schema
from seriatim.formats.avro_reader import read_long, reader_of
from seriatim.memory import MemorySchemas

INT_64 = st.integers(-(1 << 63), (1 << 63) - 1)
ENUM = {"type": "enum", "name": "Side", "symbols": ["BUY", "SELL"]}
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.integers(-(1 << 31), (1 << 31) - 1)),
    ("long", INT_64),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary(max_size=200)),
    ("string", st.text(max_size=200)),
    (DECIMAL, st.decimals(-(10**7), 10**7, places=2)),
    ({"type": "long", "logicalType": "timestamp-micros"}, st.integers(0, 1 << 50)),
    ({"type": "int", "logicalType": "date"}, st.integers(0, 100_000)),
    ({"type": "string", "logicalType": "uuid"}, st.uuids().map(str)),
]


@st.composite
def schemas_and_values(draw: st.DrawFn, depth: int = 0) -> tuple[Any, Any]:
    """A schema, and a value of it."""
    kinds = ["leaf"] if depth > 2 else ["leaf", "array", "map", "optional", "record"]
    kind = draw(st.sampled_from(kinds))
    if kind == "leaf":
        schema, values = draw(st.sampled_from(LEAVES))
        return schema, draw(values)
    if kind == "optional":
        schema, value = draw(st.sampled_from(LEAVES[1:]))
        return ["null", schema], draw(st.none() | value)
    schema, value = draw(schemas_and_values(depth + 1))
    if kind == "record":
        name = f"R{draw(st.uuids()).hex}"
        fields = [{"name": "a", "type": schema}, {"name": "b", "type": "string"}]
        return {"type": "record", "name": name, "fields": fields}, {"a": value, "b": "ä"}
    count = draw(st.integers(0, 3))
    if kind == "array":
        return {"type": "array", "items": schema}, [value] * count
    return {"type": "map", "values": schema}, {str(i): value for i in range(count)}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(schemas_and_values())
def test_it_reads_what_fastavro_reads(schema_and_value: tuple[Any, Any]) -> None:
    """Whatever schema and value, to the last byte."""
    schema, value = schema_and_value
    named: dict[str, Any] = {}
    parsed = fastavro.parse_schema(schema, named)
    content = io.BytesIO()
    fastavro.schemaless_writer(content, parsed, value)
    written = b"xx" + content.getvalue()
    content.seek(0)
    expected = fastavro.schemaless_reader(content, parsed, None)
    assert reader_of(parsed, named)(written, 2) == (expected, len(written))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(INT_64)
def test_a_number_is_read_back(number: int) -> None:
    """Of one to ten bytes, with any sign."""
    content = io.BytesIO()
    fastavro.schemaless_writer(content, "long", number)
    assert read_long(content.getvalue(), 0) == (number, content.tell())


@pytest.mark.parametrize(
    ("schema", "content", "said"),
    [
        (["null", "long"], b"\x01\x04", "branch -1 of a union of 2 types"),
        (["null", "long"], b"\x04\x04", "branch 2 of a union of 2 types"),
        (ENUM, b"\x01", "symbol -1 of an enum of 2"),
        (ENUM, b"\x04", "symbol 2 of an enum of 2"),
        ("boolean", b"\x02", "a boolean is 0x02"),
        ("string", b"\x01", "a length is -1"),
        ("bytes", b"\x03ab", "a length is -2"),
        ("long", b"\xff" * 11, "a number has more than 10 bytes"),
        ("long", b"\xff" * 9 + b"\x7f", "a number has more than 64 bits"),
        ("string", b"\x02\xff", "can't decode byte 0xff"),
        ("string", b"\x04a", "ends too early"),
        ("bytes", b"\x04a", "ends too early"),
        ("long", b"\x80", "ends too early"),
        ("double", b"1234567", "ends too early"),
        ("float", b"123", "ends too early"),
        ({"type": "fixed", "name": "F", "size": 3}, b"ab", "ends too early"),
        ({"type": "array", "items": "long"}, b"\x06\x02\x02", "ends too early"),
        ({"type": "map", "values": "null"}, b"\xfe\xff\xff\xff\xff\x01", "ends too early"),
        ("long", b"\x02\x02", "1 bytes are left behind the message"),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_reader_schema", [False, True])
def test_damaged_bytes_are_no_other_data(
    schema: Any, content: bytes, said: str, has_reader_schema: bool
) -> None:
    """As a field of a record, also where the record is resolved to the schema of the reader."""
    record = {"type": "record", "name": "R", "fields": [{"name": "v", "type": schema}]}
    schemas = MemorySchemas()
    header = schemas.register(record)
    reader_schema = parse_reader_schema(json.dumps(record).encode()) if has_reader_schema else None
    (result,) = AvroDecoder(schemas, reader_schema).to_plain_values([header + content])
    assert isinstance(result, Poison)
    assert said in result.cause


def test_a_union_of_records_has_no_branch_below_the_first() -> None:
    """A number of a branch that is negative would count from the last one."""
    branches = [
        {"type": "record", "name": name, "fields": [{"name": "v", "type": "long"}]}
        for name in ("A", "B")
    ]
    schemas = MemorySchemas()
    header = schemas.register(branches)
    decoder = AvroDecoder(schemas)
    assert decoder.to_plain(header + b"\x02\x04") == {"v": 2, "type": "B"}
    (result,) = decoder.to_plain_values([header + b"\x01\x04"])
    assert result == Poison("wrong schema: branch -1 of a union of 2 types (schema id 1)")


def test_an_array_in_blocks_with_their_sizes_is_read() -> None:
    """Some writers say the size of each block, for readers that skip it."""
    parsed = fastavro.parse_schema({"type": "array", "items": "long"})
    content = b"\x03\x04\x02\x04" + b"\x02\x06" + b"\x00"
    assert reader_of(parsed, {})(content, 0) == ([1, 2, 3], len(content))


def test_a_named_type_has_its_logical_type_wherever_it_is_used() -> None:
    """It is said once, at the definition; other fields have the name alone."""
    money = {
        "type": "fixed",
        "name": "Money",
        "size": 8,
        "logicalType": "decimal",
        "precision": 10,
        "scale": 2,
    }
    fields = [
        {"name": "a", "type": money},
        {"name": "b", "type": "Money"},
        {"name": "c", "type": ["null", "Money"]},
    ]
    schema = {"type": "record", "name": "R", "fields": fields}
    schemas = MemorySchemas()
    header = schemas.register(schema)
    record = {"a": Decimal("1.25"), "b": Decimal("2.50"), "c": Decimal("3.50")}
    written = io.BytesIO()
    fastavro.schemaless_writer(written, fastavro.parse_schema(schema), record)
    decoded = AvroDecoder(schemas).to_plain(header + written.getvalue())
    assert decoded == {**record, "type": "R"}


def test_a_field_that_the_reader_drops_is_not_converted() -> None:
    """A date that Python does not know is no fault of a message whose reader does not ask for it."""
    infinity = {"type": "long", "logicalType": "timestamp-micros"}
    fields = [{"name": "a", "type": "int"}, {"name": "old", "type": infinity}]
    schemas = MemorySchemas()
    header = schemas.register({"type": "record", "name": "R", "fields": fields})
    reader = {"type": "record", "name": "R", "fields": fields[:1]}
    decoder = AvroDecoder(schemas, parse_reader_schema(json.dumps(reader).encode()))
    written = io.BytesIO()
    plain = {"type": "record", "name": "R", "fields": [fields[0], {"name": "old", "type": "long"}]}
    fastavro.schemaless_writer(
        written, fastavro.parse_schema(plain), {"a": 1, "old": 9223372036825200000}
    )
    (result,) = decoder.to_plain_values([header + written.getvalue()])
    assert result == {"a": 1, "type": "R"}
