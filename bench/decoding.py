"""What it costs to decode a message in each format, and where the time of Debezium's changes goes.

    python -m bench.decoding

The same message with seven fields as a Struct of a machine, and the change of the same row with six
columns by the table machine. Microseconds of CPU per message, the formats by turns, best of several
rounds, so that a busy machine slows down all of them. Nothing but decoding is measured.

Next: docs/PERFORMANCE.md has the figures; seriatim/formats has the decoders.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import fastavro
import msgspec
from google.protobuf import descriptor_pb2
from msgspec import Struct

from seriatim.engine.decoding import JsonDecoder
from seriatim.formats.avro import AvroDecoder, AvroValues
from seriatim.formats.debezium import debezium_decoder
from seriatim.formats.json_schema import JsonSchemaDecoder
from seriatim.formats.protobuf import Descriptors, ProtobufDecoder
from seriatim.memory import MemorySchemas
from seriatim.stream import parse_stream

ROUNDS = 9
MESSAGES = 2_000
Decode = Callable[[Sequence[bytes]], Any]


class Quote(Struct, tag_field="type", tag="quote"):
    """The message."""

    seq: int
    id: str
    price: float
    size: int
    account: str
    is_open: bool
    note: str


FIELDS: dict[str, Any] = {
    "seq": 41_337,
    "id": "3f2b9c1e",
    "price": 1234.5,
    "size": 100,
    "account": "account-0000123456",
    "is_open": True,
    "note": "a note of forty characters, or nearly so",
}
AVRO_TYPES = {int: "long", str: "string", float: "double", bool: "boolean"}
PROTOBUF_TYPES = {
    int: descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    str: descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    float: descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    bool: descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
}
COLUMNS = {
    "id": "int64",
    "customer": "string",
    "amount": "decimal(10,2)",
    "big": "string",
    "at": "timestamp",
    "day": "date",
}
ROW: dict[str, Any] = {
    "id": 1,
    "customer": "customer-17",
    "amount": "1234.50",
    "big": "some text of twenty",
    "at": 1_767_225_601_000_000,
    "day": 20_455,
}
SOURCE: dict[str, Any] = {
    "version": "3.6.1.Final",
    "connector": "postgresql",
    "name": "shop",
    "ts_ms": 1_767_225_601_000,
    "snapshot": "false",
    "db": "shop",
    "sequence": '["26420888","26420999"]',
    "ts_us": 1_767_225_601_000_000,
    "ts_ns": 1_767_225_601_000_000_000,
    "schema": "public",
    "table": "orders",
    "txId": 730,
    "lsn": 26_420_888,
    "xmin": None,
}
CHANGE: dict[str, Any] = {
    "before": ROW,
    "after": {**ROW, "customer": "customer-18"},
    "source": SOURCE,
    "transaction": None,
    "op": "u",
    "ts_ms": 1_767_225_601_100,
    "ts_us": 1_767_225_601_100_000,
    "ts_ns": 1_767_225_601_100_000_000,
}


def to_json(message: dict[str, Any]) -> bytes:
    """As compact as producers write it."""
    return json.dumps(message, separators=(",", ":")).encode()


def avro_schema(name: str, record: dict[str, Any], **types: Any) -> dict[str, Any]:
    """A record with the fields of another, whose types are seen by their values; null is a number."""
    fields = []
    for field, value in record.items():
        kind = types.get(field) or AVRO_TYPES.get(type(value), ["null", "long"])
        fields.append({"name": field, "type": kind})
    return {"type": "record", "name": name, "fields": fields}


def to_avro(header: bytes, schema: dict[str, Any], record: dict[str, Any]) -> bytes:
    """A record behind the header of its schema."""
    content = io.BytesIO()
    fastavro.schemaless_writer(content, fastavro.parse_schema(schema), record)
    return header + content.getvalue()


def quote_descriptors() -> Descriptors:
    """The message as protoc would describe it."""
    file = descriptor_pb2.FileDescriptorProto(name="quote.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="quote")
    for number, (name, value) in enumerate(FIELDS.items(), 1):
        kind = PROTOBUF_TYPES[type(value)]
        optional = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
        message.field.add(name=name, number=number, type=kind, label=optional)
    content = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    return Descriptors(content, "quote.desc")


def message_formats() -> dict[str, tuple[Decode, bytes]]:
    """For each format its function for the Struct, and the message."""
    schemas = MemorySchemas()
    json_value = to_json({"type": "quote", **FIELDS})
    json_header = schemas.register("{}", kind="JSON")
    schema = avro_schema("quote", FIELDS)
    avro_value = to_avro(schemas.register(schema), schema, FIELDS)
    proto_header = schemas.register("package shop; message quote { }", kind="PROTOBUF")
    descriptors = quote_descriptors()
    message_class: Any = descriptors.message_class("shop.quote")
    proto_value = proto_header + b"\x00" + message_class(**FIELDS).SerializeToString()
    return {
        "json": (JsonDecoder().for_type(Quote), json_value),
        "json-schema": (JsonSchemaDecoder(schemas).for_type(Quote), json_header + json_value),
        "protobuf": (ProtobufDecoder(schemas, descriptors).for_type(Quote), proto_value),
        "avro": (AvroDecoder(schemas).for_type(Quote), avro_value),
    }


def connect_type(kind: str, name: str) -> dict[str, str]:
    """A type as Connect's Avro converters write it."""
    return {"type": kind, "connect.name": f"io.debezium.time.{name}"}


def change_formats() -> tuple[dict[str, tuple[Decode, bytes]], dict[str, Callable[[], Any]]]:
    """The same for the table machine and a row, and the steps of a change in JSON and in Avro."""
    settings: dict[str, Any] = {
        "topics": "t",
        "machine": "table",
        "table": {"key": ["id"], "columns": COLUMNS},
        "output": {"path": "lake"},
    }
    plain = parse_stream("bench", {**settings, "sequence": "seq"}, "bench")
    row = {**ROW, "at": "2026-01-01T00:00:01Z", "day": "2026-01-02"}
    plain_value = to_json({"type": "update", "seq": 1, **row})

    captured = {"decoder": "debezium", "debezium": {"timestamps": "microseconds"}}
    stream = parse_stream("bench", {**settings, **captured}, "bench")
    schemas = MemorySchemas()
    decoder = debezium_decoder(stream, lambda: AvroValues(schemas))
    machine = stream.table_machine(decoder=decoder)
    row_schema = avro_schema(
        "Value", ROW, at=connect_type("long", "MicroTimestamp"), day=connect_type("int", "Date")
    )
    envelope = avro_schema(
        "Envelope",
        CHANGE,
        before=["null", row_schema],
        after=["null", "Value"],
        source=avro_schema("Source", SOURCE),
    )
    json_value = to_json(CHANGE)
    avro_value = to_avro(schemas.register(envelope), envelope, CHANGE)
    formats = {
        "a row in json": (plain.table_machine(decoder=JsonDecoder()).decode, plain_value),
        "its change in json": (machine.decode, json_value),
        "its change in avro": (machine.decode, avro_value),
    }
    parse_json = msgspec.json.Decoder().decode
    values = AvroValues(schemas)
    payload = decoder.to_plain(json_value)
    pack = msgspec.msgpack.Encoder().encode
    packed = pack(payload)
    unpack = msgspec.msgpack.Decoder(type(machine.decode([json_value])[0])).decode
    steps: dict[str, Callable[[], Any]] = {
        "json: parsed to a dict": lambda: parse_json(json_value),
        "json: parsed, and its row converted": lambda: decoder.to_plain(json_value),
        "avro: parsed to a dict": lambda: values.read(avro_value),
        "avro: parsed, and its row converted": lambda: decoder.to_plain(avro_value),
        "both: packed as MessagePack": lambda: pack(payload),
        "both: unpacked to the machine's type": lambda: unpack(packed),
    }
    assert machine.decode([json_value])[0].after.c2 in ("1234.50", Decimal("1234.50"))
    return formats, steps


def best_microseconds(works: dict[str, Callable[[], Any]], messages: int) -> dict[str, float]:
    """CPU per message of each, by turns. Each call works on so many messages."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            calls = MESSAGES // messages
            began = time.process_time()
            for _ in range(calls):
                work()
            spent = (time.process_time() - began) / MESSAGES * 1e6
            best[name] = min(best[name], spent)
    return best


def print_formats(formats: dict[str, tuple[Decode, bytes]]) -> None:
    """A line per format. The first one is what the others are compared with."""
    works: dict[str, Callable[[], Any]] = {}
    for name, (decode, value) in formats.items():
        works[name] = lambda decode=decode, values=[value] * 1_000: decode(values)  # type: ignore[misc]
        assert isinstance(decode([value])[0], Struct), decode([value])
    best = best_microseconds(works, 1_000)
    first = next(iter(best.values()))
    for name, spent in best.items():
        size = len(formats[name][1])
        print(f"{name:22} {size:4} bytes {spent:6.2f} µs  {spent / first:5.2f} ×")


def main() -> None:
    """Measure and print."""
    print_formats(message_formats())
    formats, steps = change_formats()
    print_formats(formats)
    for name, spent in best_microseconds(steps, 1).items():
        print(f"{name:38} {spent:6.2f} µs")


if __name__ == "__main__":
    main()
