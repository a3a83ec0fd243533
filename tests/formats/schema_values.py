"""Schemas and values for tests of Avro and Protobuf."""

from __future__ import annotations

import io
from typing import Any

import fastavro
from google.protobuf import descriptor_pb2

from seriatim.formats.protobuf import Descriptors

UPDATE_SCHEMA = {
    "type": "record",
    "name": "shop.update",
    "fields": [
        {"name": "seq", "type": "long"},
        {"name": "id", "type": "string"},
        {"name": "price", "type": "double"},
        {"name": "size", "type": "long"},
    ],
}
"""The record of the contract's message. Its name is the message's tag."""

PROTO = """
// message Comment { is no message }
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
option java_package = "message { }";
message other { string id = 1; message inner { int32 n = 1; } }
message update { int64 seq = 1; string id = 2; double price = 3; int64 size = 4; }
"""
"""The schema of the contract's message, in Protobuf's language."""

INTEGER = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
TEXT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
FLOAT = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE


def avro_value(header: bytes, schema: Any, record: Any) -> bytes:
    """A record as a value in the wire format."""
    content = io.BytesIO()
    fastavro.schemaless_writer(content, fastavro.parse_schema(schema), record)
    return header + content.getvalue()


def add_message(
    file: descriptor_pb2.FileDescriptorProto, name: str, fields: dict[str, int]
) -> descriptor_pb2.DescriptorProto:
    """Add a message with fields of these types to a file of descriptors."""
    message = file.message_type.add(name=name)
    for number, (field, kind) in enumerate(fields.items(), 1):
        message.field.add(
            name=field,
            number=number,
            type=kind,
            label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        )
    return message


def shop_file() -> descriptor_pb2.FileDescriptorProto:
    """The descriptors of PROTO, as protoc would write them."""
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    other = add_message(file, "other", {"id": TEXT})
    inner = other.nested_type.add(name="inner")
    inner.field.add(
        name="n",
        number=1,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
    )
    add_message(file, "update", {"seq": INTEGER, "id": TEXT, "price": FLOAT, "size": INTEGER})
    return file


def descriptors_of(*files: descriptor_pb2.FileDescriptorProto) -> Descriptors:
    """A set of descriptors with these files."""
    content = descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()
    return Descriptors(content, "shop.desc")


def protobuf_value(
    header: bytes, place: bytes, descriptors: Descriptors, message: str, /, **fields: Any
) -> bytes:
    """A message as a value in the wire format. `place` says where the message is in its schema."""
    message_class = descriptors.message_class(message)
    assert message_class is not None
    return header + place + message_class(**fields).SerializeToString()
