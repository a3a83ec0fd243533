"""Messages in Avro: what becomes of each type, how schemas change, and what is poison."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec import Struct

from seriatim import Machine
from seriatim.engine.messages import Poison
from seriatim.errors import ConfigError
from seriatim.formats.avro import SCHEMAS_CACHED_MAX, AvroDecoder, parse_reader_schema
from seriatim.stream_files import load_decoder, load_stream
from seriatim.testing import CRASH, MemorySchemas, fold, fold_table
from tests.formats.change_events import COLUMNS, ROW, UNAVAILABLE, encode, event, with_schema
from tests.formats.schema_values import avro_value

NODE = {
    "type": "record",
    "name": "Node",
    "fields": [{"name": "next", "type": ["null", "Node"]}],
}
CONNECT_DECIMAL = {
    "type": "bytes",
    "scale": 2,
    "precision": 10,
    "connect.version": 1,
    "connect.parameters": {"scale": "2", "connect.decimal.precision": "10"},
    "connect.name": "org.apache.kafka.connect.data.Decimal",
    "logicalType": "decimal",
}
ROW_RECORD = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "customer", "type": "string"},
        {"name": "amount", "type": ["null", CONNECT_DECIMAL]},
        {"name": "big", "type": ["null", "string"]},
        {
            "name": "at",
            "type": {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"},
        },
        {
            "name": "day",
            "type": ["null", {"type": "int", "connect.name": "io.debezium.time.Date"}],
        },
    ],
}
ENVELOPE = {
    "type": "record",
    "name": "shop.public.orders.Envelope",
    "fields": [
        {"name": "before", "type": ["null", ROW_RECORD], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "op", "type": "string"},
    ],
}
"""The schema of a change as Connect's Avro converters write it, shortened."""


def record_of(*fields: dict[str, Any], name: str = "Order") -> dict[str, Any]:
    """The schema of a record."""
    return {"type": "record", "name": name, "fields": list(fields)}


def decode(schema: Any, record: Any) -> Any:
    """A record, written and decoded."""
    schemas = MemorySchemas()
    header = schemas.register(schema)
    return AvroDecoder(schemas).to_plain(avro_value(header, schema, record))


@pytest.mark.parametrize(
    ("avro_type", "value"),
    [
        ("boolean", True),
        ("int", -1),
        ("long", 1 << 62),
        ("double", 0.1),
        ("bytes", b"\x00\xff"),
        ("string", "ä"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B"),
        ({"type": "fixed", "name": "F", "size": 2}, b"ab"),
        ({"type": "array", "items": "long"}, [1, 2]),
        ({"type": "map", "values": "long"}, {"a": 1}),
        (["null", "long"], None),
        (["null", "long"], 5),
        ({"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}]}, {"x": 1}),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2},
            Decimal("-123456789012345678901234567890.12"),
        ),
        ({"type": "int", "logicalType": "date"}, date(2026, 2, 28)),
        ({"type": "int", "logicalType": "time-millis"}, time(1, 2, 3)),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
        ),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            datetime(1969, 12, 31, 23, 59, tzinfo=UTC),
        ),
        ({"type": "string", "logicalType": "uuid"}, UUID(int=5)),
    ],
    ids=str,
)
def test_each_type_becomes_its_value(avro_type: Any, value: Any) -> None:
    """As the table in STREAMS.md says."""
    assert decode(record_of({"name": "v", "type": avro_type}), {"v": value}) == {
        "v": value,
        "type": "Order",
    }


class Quote(Struct, tag_field="type", tag="Quote"):
    """A message."""

    price: int
    note: str = ""


class Trade(Struct, tag_field="type", tag="Trade"):
    """Another message of the same topic."""

    size: int


class Total(Struct):
    """A state and a record."""

    total: int = 0


class Sums(Machine[Total, Quote | Trade, Total]):
    """Adds what the messages say."""

    def start(self, session: str) -> Total:  # noqa: ARG002  # the same for all
        """Nothing yet."""
        return Total()

    def apply(self, state: Total, message: Quote | Trade) -> list[Total]:
        """Add a price or a size."""
        state.total += message.price if isinstance(message, Quote) else message.size
        return [Total(state.total)]


QUOTE_1 = record_of({"name": "price", "type": "int"}, name="a.Quote")
QUOTE_2 = record_of(
    {"name": "price", "type": "long"}, {"name": "note", "type": "string"}, name="a.Quote"
)
QUOTE_3 = record_of({"name": "price", "type": "long"}, name="a.Quote")
TRADE = record_of({"name": "size", "type": "int"}, name="a.Trade")


def test_a_machine_folds_records_of_three_versions_and_two_kinds() -> None:
    """Each message by the schema that it names; the name of its record says which Struct it is."""
    schemas = MemorySchemas()
    messages = []
    for schema, record in (
        (QUOTE_1, {"price": 1}),
        (TRADE, {"size": 10}),
        (QUOTE_2, {"price": 100, "note": "n"}),
        (QUOTE_3, {"price": 1000}),
    ):
        messages.append(avro_value(schemas.register(schema), schema, record))
    messages.insert(2, CRASH)
    folded = fold(Sums, messages, decoder=lambda: AvroDecoder(schemas))
    assert not folded.findings
    assert folded.state == Total(1111)


def test_a_union_of_records_says_which_one_it_is() -> None:
    """One schema for all kinds of messages of a topic."""
    union = [QUOTE_1, TRADE]
    schemas = MemorySchemas()
    header = schemas.register(union)
    decoder = AvroDecoder(schemas)
    assert decoder.to_plain(avro_value(header, union, ("a.Trade", {"size": 3}))) == {
        "size": 3,
        "type": "Trade",
    }
    assert isinstance(decoder.to_plain(header + b"\x04\x02"), Poison)


def test_a_field_named_type_is_kept() -> None:
    """The name of the record does not replace it."""
    schema = record_of({"name": "type", "type": "string"})
    assert decode(schema, {"type": "snapshot"}) == {"type": "snapshot"}


def test_schemas_that_others_define_are_found() -> None:
    """A record of another subject, named in a field."""
    schemas = MemorySchemas()
    schema = record_of({"name": "quote", "type": "a.Quote"})
    header = schemas.register(schema, references=[("a.Quote", QUOTE_1)])
    whole = record_of({"name": "quote", "type": QUOTE_1})
    value = avro_value(header, whole, {"quote": {"price": 7}})
    assert AvroDecoder(schemas).to_plain(value)["quote"] == {"price": 7}


def test_records_are_resolved_to_the_readers_schema() -> None:
    """By Avro's rules: fields renamed by aliases, left out, added with a default, widened."""
    reader = record_of(
        {"name": "cost", "aliases": ["price"], "type": "double"},
        {"name": "currency", "type": "string", "default": "EUR"},
        name="a.Quote",
    )
    schemas = MemorySchemas()
    header = schemas.register(QUOTE_2)
    content = str(reader).replace("'", '"').encode()
    decoder = AvroDecoder(schemas, parse_reader_schema(content))
    assert decoder.to_plain(avro_value(header, QUOTE_2, {"price": 5, "note": "n"})) == {
        "cost": 5.0,
        "currency": "EUR",
        "type": "Quote",
    }


def test_a_schema_that_contains_itself_is_read() -> None:
    """As long as it is not nested too deeply."""
    schemas = MemorySchemas()
    header = schemas.register(NODE)
    decoder = AvroDecoder(schemas)
    assert decoder.to_plain(header + b"\x02\x00") == {"next": {"next": None}, "type": "Node"}
    wide = record_of({"name": "nodes", "type": {"type": "array", "items": NODE}}, name="Nodes")
    nodes = {"nodes": [{"next": None}] * 5_000}
    assert decode(wide, nodes) == {**nodes, "type": "Nodes"}


@pytest.mark.parametrize("reader_schema", [None, NODE], ids=["writer's", "reader's"])
def test_a_value_that_is_nested_deeply_is_poison(reader_schema: Any) -> None:
    """The process lives: fastavro's reader alone would end it."""
    schemas = MemorySchemas()
    header = schemas.register(NODE)
    decoder = AvroDecoder(schemas, reader_schema)
    assert decoder.to_plain(header + b"\x02" * 1_000_000 + b"\x00") == Poison("nested too deeply")


def test_ten_thousand_schemas_are_read_and_few_are_kept_ready() -> None:
    """A schema that was dropped is made ready again, from the source that has its text."""
    schemas = MemorySchemas()
    decoder = AvroDecoder(schemas)
    values = []
    for number in range(10_000):
        schema = record_of({"name": "price", "type": "int"}, name=f"a.Quote{number}")
        values.append(avro_value(schemas.register(schema), schema, {"price": number}))
    for number, value in enumerate(values):
        assert decoder.to_plain(value) == {"price": number, "type": f"Quote{number}"}
    assert len(decoder._values._schemas) <= SCHEMAS_CACHED_MAX
    assert decoder.to_plain(values[0]) == {"price": 0, "type": "Quote0"}


@pytest.mark.parametrize(
    "items",
    [
        "null",
        {"type": "record", "name": "Empty", "fields": []},
        {"type": "record", "name": "R", "fields": [{"name": "n", "type": "null"}]},
        {"type": "fixed", "name": "F", "size": 0},
    ],
    ids=str,
)
def test_a_list_of_nothings_does_not_fill_the_memory(items: Any) -> None:
    """Five bytes could say that a thousand million of them follow."""
    schemas = MemorySchemas()
    schema = record_of({"name": "v", "type": {"type": "array", "items": items}})
    header = schemas.register(schema)
    poison = AvroDecoder(schemas).to_plain(header + b"\x80\xa8\xd6\xb9\x07\x00")
    assert isinstance(poison, Poison)
    assert "items take no bytes" in poison.cause


@pytest.mark.parametrize(
    ("schema", "kind", "cause"),
    [
        ("{", "AVRO", "schema id 1: it is no schema of Avro"),
        ({"type": "recrd", "name": "R"}, "AVRO", "schema id 1: it is no schema of Avro"),
        (record_of({"name": "v", "type": "a.Quote"}), "AVRO", "it is no schema of Avro: a.Quote"),
        ("message A {}", "PROTOBUF", "schema id 1: it is PROTOBUF, not AVRO"),
    ],
)
def test_a_schema_that_cannot_be_used_is_poison(schema: Any, kind: str, cause: str) -> None:
    """It is the producer's, and the stream goes on by `on_poison`."""
    schemas = MemorySchemas()
    header = schemas.register(schema, kind=kind)
    poison = AvroDecoder(schemas).to_plain(header + b"\x00")
    assert isinstance(poison, Poison)
    assert cause in poison.cause


def test_an_unknown_id_is_healed_once_it_is_known() -> None:
    """The message was poison; a decoder of a later process asks again."""
    schemas = MemorySchemas()
    value = b"\x00\x00\x00\x00\x01\x04"
    assert AvroDecoder(schemas).to_plain(value) == Poison("unknown schema id 1")
    schemas.register(QUOTE_1)
    assert AvroDecoder(schemas).to_plain(value) == {"price": 2, "type": "Quote"}


def test_the_table_machine_takes_avro() -> None:
    """With decimals, times and bytes as they are."""
    row = record_of(
        {"name": "id", "type": "long"},
        {
            "name": "amount",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
        },
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "content", "type": "bytes"},
        name="Row",
    )
    snapshot = record_of({"name": "rows", "type": {"type": "array", "items": row}}, name="snapshot")
    schemas = MemorySchemas()
    values = {
        "id": 1,
        "amount": Decimal("1.20"),
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "content": b"\x00\xff",
    }
    message = avro_value(schemas.register(snapshot), snapshot, {"rows": [values]})
    folded = fold_table(
        [message],
        key=["id"],
        columns={
            "id": "int64",
            "amount": "decimal(10,2)",
            "at": "timestamp",
            "content": "binary",
        },
        decoder=lambda: AvroDecoder(schemas),
    )
    assert not folded.findings
    assert folded.records == [{"op": "snapshot", **values}]


def test_a_field_of_another_type_is_poison_that_names_its_schema() -> None:
    """At the offset where the new version begins; what keeps its type is folded on."""
    schemas = MemorySchemas()
    as_text = record_of({"name": "price", "type": "string"}, name="a.Quote")
    first = schemas.register(QUOTE_1)
    second = schemas.register(as_text)
    folded = fold(
        Sums,
        [
            avro_value(first, QUOTE_1, {"price": 1}),
            avro_value(second, as_text, {"price": "2"}),
        ],
        decoder=lambda: AvroDecoder(schemas),
    )
    (finding,) = folded.findings
    assert (finding.finding, finding.offset) == ("poison", 1)
    assert finding.cause == "wrong schema: Expected `int`, got `str` - at `$.price` (schema id 2)"


def test_a_column_of_another_type_is_poison_that_names_its_schema() -> None:
    """In Debezium's changes, too."""
    schemas = MemorySchemas()
    row = record_of({"name": "id", "type": "long"}, {"name": "day", "type": "string"}, name="R")
    envelope = record_of(
        {"name": "op", "type": "string"},
        {"name": "before", "type": ["null", row]},
        {"name": "after", "type": ["null", "R"]},
        name="E",
    )
    change_of_text = change("c", {"id": 1, "day": "no day"})
    message = avro_value(schemas.register(envelope), envelope, change_of_text)
    folded = fold_table(
        [message],
        key=["id"],
        columns={"id": "int64", "day": "date"},
        decoder="debezium",
        schemas=schemas,
    )
    (finding,) = folded.findings
    assert finding.finding == "poison"
    assert finding.cause.endswith("(schema id 1)")


def change(op: str, after: dict[str, Any] | None = None, before: Any = None) -> dict[str, Any]:
    """A change as Connect gives it to its Avro converter."""
    return {"op": op, "after": after, "before": before}


def avro_row(**values: Any) -> dict[str, Any]:
    """The row of the source as its Avro schema has it."""
    row = {name: value for name, value in ROW.items() if name in COLUMNS}
    microseconds = 1_767_225_601_000_000
    return {**row, "amount": Decimal("1.25"), "at": microseconds, **values}


def test_debezium_in_avro_gives_the_rows_of_debezium_in_json() -> None:
    """Dates, times, decimals and values that were not sent; with one schema for all."""
    schemas = MemorySchemas()
    header = schemas.register(ENVELOPE)
    changes = [
        change("r", avro_row()),
        change("u", avro_row(customer="c2", big=UNAVAILABLE)),
        change("u", avro_row(amount=None, day=None)),
        change("d", None, avro_row()),
    ]
    in_json = [
        event("r", dict(ROW)),
        event("u", {**ROW, "customer": "c2", "big": UNAVAILABLE}),
        event("u", {**ROW, "amount": None, "day": None}),
        event("d", None, dict(ROW)),
    ]
    settings: dict[str, Any] = {"key": ["id"], "columns": COLUMNS, "decoder": "debezium"}
    avro_messages = [avro_value(header, ENVELOPE, message) for message in changes]
    folded = fold_table([*avro_messages, None], schemas=schemas, **settings)
    expected = fold_table(
        [*(encode(with_schema(message)) for message in in_json), None], **settings
    )
    assert not folded.findings
    assert folded.records == expected.records
    assert folded.states == expected.states


def test_debezium_in_avro_without_a_registry_is_poison_that_says_so() -> None:
    """One such message in a topic of JSON must not stop the stream."""
    folded = fold_table(
        [b"\x00\x00\x00\x00\x01abc"], key=["id"], columns=COLUMNS, decoder="debezium"
    )
    (finding,) = folded.findings
    assert "is in Avro, and there is no schema registry" in str(finding)


STREAM = """
topics  = "orders"
machine = "table"
decoder = "avro"
[table]
key     = ["id"]
columns = { id = "int64" }
[output]
path = "out"
"""


def test_a_stream_file_names_the_readers_schema(tmp_path: Path) -> None:
    """A file beside it. A file that is missing or no schema is refused by name."""
    path = tmp_path / "orders.toml"
    path.write_text(STREAM)
    assert isinstance(load_decoder(load_stream(str(path), tmp_path)), AvroDecoder)
    path.write_text(STREAM + '[avro]\nreader_schema = "orders.avsc"\n')
    with pytest.raises(ConfigError, match=r"avro.reader_schema: .*orders.avsc: No such file"):
        load_decoder(load_stream(str(path), tmp_path))
    (tmp_path / "orders.avsc").write_text('"long"')
    with pytest.raises(ConfigError, match=r"orders.avsc is no schema of a record"):
        load_decoder(load_stream(str(path), tmp_path))


def test_a_stream_without_a_registry_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first message is decoded, and not as poison: the setting is wrong, not the message."""
    monkeypatch.delenv("SERIATIM_REGISTRY_URL", raising=False)
    path = tmp_path / "orders.toml"
    path.write_text(STREAM)
    decoder = load_decoder(load_stream(str(path), tmp_path))
    with pytest.raises(ConfigError, match="no schema registry is set"):
        decoder.for_type(Quote)([b"\x00\x00\x00\x00\x01\x02"])
