"""Messages in Protobuf: what becomes of each type, which message a value holds, and what is poison."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import (
    descriptor_pb2,
    duration_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from msgspec import Struct

from seriatim import Machine
from seriatim.engine.messages import Poison
from seriatim.errors import ConfigError
from seriatim.formats.protobuf import Descriptors, ProtobufDecoder, parse_message_names
from seriatim.stream_files import load_decoder, load_stream
from seriatim.testing import MemorySchemas, fold
from tests.formats.schema_values import (
    INTEGER,
    PROTO,
    TEXT,
    add_message,
    descriptors_of,
    protobuf_value,
    shop_file,
)

Field = descriptor_pb2.FieldDescriptorProto
FIRST_MESSAGE = b"\x00"


def order_descriptors() -> Descriptors:
    """A message with a field of each kind."""
    file = descriptor_pb2.FileDescriptorProto(
        name="order.proto",
        package="shop",
        syntax="proto3",
        dependency=[
            "google/protobuf/timestamp.proto",
            "google/protobuf/duration.proto",
            "google/protobuf/wrappers.proto",
        ],
    )
    enum = file.enum_type.add(name="Side")
    enum.value.add(name="BUY", number=0)
    enum.value.add(name="SELL", number=1)
    line = add_message(file, "Line", {"price": INTEGER})
    line.field.add(
        name="inner",
        number=2,
        type=Field.TYPE_MESSAGE,
        type_name=".shop.Line",
        label=Field.LABEL_OPTIONAL,
    )
    order = file.message_type.add(name="Order")
    entry = order.nested_type.add(name="LabelsEntry")
    entry.options.map_entry = True
    for number, field in ((1, "key"), (2, "value")):
        entry.field.add(name=field, number=number, type=TEXT, label=Field.LABEL_OPTIONAL)
    order.oneof_decl.add(name="_note")
    fields = [
        ("id", Field.TYPE_UINT64, "", Field.LABEL_OPTIONAL),
        ("name", Field.TYPE_STRING, "", Field.LABEL_OPTIONAL),
        ("content", Field.TYPE_BYTES, "", Field.LABEL_OPTIONAL),
        ("share", Field.TYPE_FLOAT, "", Field.LABEL_OPTIONAL),
        ("is_open", Field.TYPE_BOOL, "", Field.LABEL_OPTIONAL),
        ("side", Field.TYPE_ENUM, ".shop.Side", Field.LABEL_OPTIONAL),
        ("sizes", Field.TYPE_SINT32, "", Field.LABEL_REPEATED),
        ("lines", Field.TYPE_MESSAGE, ".shop.Line", Field.LABEL_REPEATED),
        ("first", Field.TYPE_MESSAGE, ".shop.Line", Field.LABEL_OPTIONAL),
        ("labels", Field.TYPE_MESSAGE, ".shop.Order.LabelsEntry", Field.LABEL_REPEATED),
        ("at", Field.TYPE_MESSAGE, ".google.protobuf.Timestamp", Field.LABEL_OPTIONAL),
        ("lasts", Field.TYPE_MESSAGE, ".google.protobuf.Duration", Field.LABEL_OPTIONAL),
        ("count", Field.TYPE_MESSAGE, ".google.protobuf.Int64Value", Field.LABEL_OPTIONAL),
        ("note", Field.TYPE_STRING, "", Field.LABEL_OPTIONAL),
    ]
    for number, (name, kind, type_name, label) in enumerate(fields, 1):
        order.field.add(
            name=name, number=number, type=kind, type_name=type_name or None, label=label
        )
    order.field[-1].oneof_index = 0
    order.field[-1].proto3_optional = True
    known: list[descriptor_pb2.FileDescriptorProto] = []
    for module in (timestamp_pb2, duration_pb2, wrappers_pb2):
        known.append(descriptor_pb2.FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(known[-1])
    return descriptors_of(*known, file)


ORDER_PROTO = "package shop; enum Side { BUY = 0; } message Order { } message Line { }"


def decode_order(**fields: Any) -> Any:
    """An order, written and decoded."""
    descriptors = order_descriptors()
    schemas = MemorySchemas()
    header = schemas.register(ORDER_PROTO, kind="PROTOBUF")
    value = protobuf_value(header, FIRST_MESSAGE, descriptors, "shop.Order", **fields)
    return ProtobufDecoder(schemas, descriptors).to_plain(value)


def test_fields_that_were_not_set() -> None:
    """Numbers, texts and lists have their defaults; what can be absent is absent."""
    assert decode_order() == {
        "type": "Order",
        "id": 0,
        "name": "",
        "content": b"",
        "share": 0.0,
        "is_open": False,
        "side": "BUY",
        "sizes": [],
        "lines": [],
        "labels": {},
    }


@pytest.mark.parametrize(
    ("field", "sent", "plain"),
    [
        ("id", 2**64 - 1, 2**64 - 1),
        ("name", "ä", "ä"),
        ("content", b"\xff\x00", b"\xff\x00"),
        ("share", 0.5, 0.5),
        ("is_open", True, True),
        ("side", 1, "SELL"),
        ("side", 7, 7),
        ("sizes", [-1, 2], [-1, 2]),
        ("lines", [{"price": 3}], [{"price": 3}]),
        ("first", {"inner": {"price": 5}}, {"price": 0, "inner": {"price": 5}}),
        ("labels", {"a": "b"}, {"a": "b"}),
        (
            "at",
            {"seconds": 1, "nanos": 2000},
            datetime(1970, 1, 1, 0, 0, 1, 2, tzinfo=UTC),
        ),
        ("lasts", {"seconds": 5}, timedelta(seconds=5)),
        ("count", {"value": 0}, 0),
        ("note", "", ""),
    ],
)
def test_each_type_becomes_its_value(field: str, sent: Any, plain: Any) -> None:
    """As the table in STREAMS.md says."""
    assert decode_order(**{field: sent})[field] == plain


def test_a_message_is_found_by_its_name() -> None:
    """The schema of the producer may have the messages in another order than our descriptors."""
    schemas = MemorySchemas()
    header = schemas.register(
        "package shop; message update { int64 seq = 1; } message other { string id = 1; }",
        kind="PROTOBUF",
    )
    descriptors = descriptors_of(shop_file())
    value = protobuf_value(header, b"\x02\x02", descriptors, "shop.other", id="x")
    assert ProtobufDecoder(schemas, descriptors).to_plain(value) == {"type": "other", "id": "x"}


def test_a_message_inside_another_is_found() -> None:
    """Its place has two numbers."""
    schemas = MemorySchemas()
    header = schemas.register(PROTO, kind="PROTOBUF")
    descriptors = descriptors_of(shop_file())
    value = protobuf_value(header, b"\x04\x00\x00", descriptors, "shop.other.inner", n=3)
    assert ProtobufDecoder(schemas, descriptors).to_plain(value) == {"type": "inner", "n": 3}


def test_names_are_read_out_of_a_schema() -> None:
    """Not out of comments, texts and options, and in the order of the schema."""
    names = parse_message_names(
        """
        syntax = "proto3"; package a.b; // message No {}
        /* message Neither {} */
        option (x) = { text: "message Nor { }" };
        message First {
          option deprecated = true;
          enum Kind { NONE = 0; }
          oneof choice { string message = 1; }
          message Inner { message Deep { } }
          message Second { }
        }
        service S { rpc Get (First) returns (Last) { } }
        extend First { }
        message Last { map<string, First> m = 1; }
        """
    )
    assert names.names == ["a.b.First", "a.b.Last"]
    assert names.at([0, 1]) == "a.b.First.Second"
    assert names.at([0, 0, 0]) == "a.b.First.Inner.Deep"
    for place in ([2], [0, 2], [-1]):
        with pytest.raises(LookupError):
            names.at(place)


def test_a_message_that_our_descriptors_lack_is_poison_that_names_it() -> None:
    """The file of descriptors is older than the producer."""
    schemas = MemorySchemas()
    header = schemas.register("package shop; message added { }", kind="PROTOBUF")
    decoder = ProtobufDecoder(schemas, descriptors_of(shop_file()))
    assert decoder.to_plain(header + FIRST_MESSAGE) == Poison(
        "the message shop.added is not in shop.desc"
    )


def test_a_message_that_is_nested_deeply_is_poison() -> None:
    """Protobuf's own limit holds."""
    schemas = MemorySchemas()
    header = schemas.register("package shop; message Line { }", kind="PROTOBUF")
    content = b""
    for _ in range(200):
        length = len(content)
        size = bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
        content = b"\x12" + size + content
    poison = ProtobufDecoder(schemas, order_descriptors()).to_plain(
        header + FIRST_MESSAGE + content
    )
    assert isinstance(poison, Poison)
    assert "wrong schema" in poison.cause


class Update(Struct, tag_field="type", tag="update"):
    """A message with the fields of the schema, made without a detour."""

    seq: int
    id: str
    price: float
    size: int


class Other(Struct, tag_field="type", tag="other"):
    """A message that is made by way of a dict."""

    id: str = ""
    note: str | None = None


class Totals(Struct):
    """A state and a record."""

    total: int = 0


class Sizes(Machine[Totals, Update | Other, Totals]):
    """Adds sizes, and one for other messages."""

    def start(self, session: str) -> Totals:  # noqa: ARG002  # the same for all
        """Nothing yet."""
        return Totals()

    def apply(self, state: Totals, message: Update | Other) -> list[Totals]:
        """Add."""
        state.total += message.size if isinstance(message, Update) else 1
        return [Totals(state.total)]


def test_a_machine_folds_messages_of_two_kinds() -> None:
    """Poison between them stands alone."""
    schemas = MemorySchemas()
    header = schemas.register(PROTO, kind="PROTOBUF")
    descriptors = descriptors_of(shop_file())
    update = protobuf_value(header, b"\x02\x02", descriptors, "shop.update", seq=1, size=10)
    other = protobuf_value(header, FIRST_MESSAGE, descriptors, "shop.other", id="x")
    folded = fold(
        Sizes,
        [update, other, update],
        decoder=lambda: ProtobufDecoder(schemas, descriptors),
    )
    assert not folded.findings
    assert folded.state == Totals(21)


class Picky(Struct):
    """A message that refuses some values by itself."""

    seq: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size is negative")


def test_what_a_struct_refuses_is_poison_alone() -> None:
    """Its neighbours are messages."""
    schemas = MemorySchemas()
    header = schemas.register(PROTO, kind="PROTOBUF")
    descriptors = descriptors_of(shop_file())
    values = [
        protobuf_value(header, b"\x02\x02", descriptors, "shop.update", seq=1, size=size)
        for size in (1, -1, 2)
    ]
    results = ProtobufDecoder(schemas, descriptors).for_type(Picky)(values)
    assert results[0] == Picky(1, 1)
    assert results[2] == Picky(1, 2)
    assert isinstance(results[1], Poison)
    assert "size is negative" in results[1].cause


STREAM = """
topics  = "orders"
machine = "table"
decoder = "protobuf"
[protobuf]
descriptors = "shop.desc"
[table]
key     = ["id"]
columns = { id = "string" }
[output]
path = "out"
"""


def test_a_stream_file_names_the_descriptors(tmp_path: Path) -> None:
    """A file beside it. A file that is missing or not complete is refused by name."""
    path = tmp_path / "orders.toml"
    path.write_text(STREAM)
    file = load_stream(str(path), tmp_path)
    with pytest.raises(ConfigError, match=r"protobuf.descriptors: .*shop.desc: No such file"):
        load_decoder(file)
    (tmp_path / "shop.desc").write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="no complete set of descriptors"):
        load_decoder(file)
    incomplete = descriptor_pb2.FileDescriptorProto(name="a.proto", dependency=["b.proto"])
    files = descriptor_pb2.FileDescriptorSet(file=[incomplete])
    (tmp_path / "shop.desc").write_bytes(files.SerializeToString())
    with pytest.raises(ConfigError, match="no complete set of descriptors"):
        load_decoder(file)
    files = descriptor_pb2.FileDescriptorSet(file=[shop_file()])
    (tmp_path / "shop.desc").write_bytes(files.SerializeToString())
    assert isinstance(load_decoder(file), ProtobufDecoder)
