"""The message formats that tests/contracts/test_decoders.py holds to one contract.

To put a decoder of yours in, add a `DecoderCase` to `cases`, and its name to `NAMES` in the test.
"""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from seriatim.engine.decoding import Decoder, JsonDecoder
from seriatim.formats.avro import AvroDecoder
from seriatim.formats.debezium import DebeziumDecoder
from seriatim.formats.json_schema import JsonSchemaDecoder
from seriatim.formats.protobuf import ProtobufDecoder
from seriatim.memory import MemorySchemas
from tests.formats.schema_values import (
    PROTO,
    UPDATE_SCHEMA,
    avro_value,
    descriptors_of,
    protobuf_value,
    shop_file,
)

RECORD = {"seq": 1, "id": "a", "price": 1.5, "size": 10}
SMALL_RECORD = {"seq": 2, "id": "", "price": 0.0, "size": 0}
STREAMS_PAGE = Path(__file__).parents[2] / "docs" / "STREAMS.md"


class Update(Struct, tag_field="type", tag="update"):
    """The message that every format of the contract can express."""

    seq: int
    id: str
    price: float
    size: int


UPDATE = Update(1, "a", 1.5, 10)
SMALL_UPDATE = Update(2, "", 0.0, 0)


class DecoderCase(Struct, frozen=True):
    """A format, and values in it."""

    name: str
    decoder: Decoder
    good: dict[bytes, Update]
    """Values, and the messages that they are."""
    wrong: dict[bytes, str]
    """Values that are no message, and a pattern that their cause has."""


def write_example_files(folder: Path) -> None:
    """Write the files of the example in docs/STREAMS.md, each of which says its name first."""
    blocks = re.findall(
        r"^```(?:python|toml)\n# (?:streams/)?(\S+)\n(.*?)^```",
        STREAMS_PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    for name, content in blocks:
        (folder / name).write_text(content)


def import_example(folder: Path, name: str) -> ModuleType:
    """Import a module of the example."""
    spec = spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def cases(folder: Path) -> list[DecoderCase]:
    """Every format that is held to the contract. `folder` has the files of the example."""
    comma: Any = import_example(folder, "comma")
    json_case = DecoderCase(
        name="json",
        decoder=JsonDecoder(),
        good={
            b'{"type":"update","seq":1,"id":"a","price":1.5,"size":10}': Update(1, "a", 1.5, 10),
            b'{"type":"update","seq":2,"id":"","price":-0.0,"size":0,"x":[]}': Update(
                2, "", 0.0, 0
            ),
        },
        wrong={
            b'{"type":"update","seq":"1","id":"a","price":1.5,"size":10}': "wrong schema",
            b'{"type":"update","seq":1}': "wrong schema",
            b'{"type":"other","seq":1}': "wrong schema",
            b'{"type":"update","seq":1,"id":"\xff","price":1.5,"size":10}': "not UTF-8",
        },
    )
    comma_case = DecoderCase(
        name="comma-separated",
        decoder=comma.CommaSeparated(),
        good={
            b"update,1\na,1.5,10": Update(1, "a", 1.5, 10),
            b"update,2\n,0.0,0": Update(2, "", 0.0, 0),
        },
        wrong={
            b"update,one\na,1.5,10": "ValueError: invalid literal",
            b"update,1\na": "wrong schema: .* missing required field `price`",
            b"other,1\na,1.5,10": "wrong schema: Invalid value 'other'",
            b"update,1": "ValueError: not enough values",
            b"update,1\n\xff,1.5,10": "UnicodeDecodeError",
        },
    )
    change = b'{"op":"u","type":"update","seq":1,"id":"a","price":1.5,"size":10}'
    debezium_case = DecoderCase(
        name="debezium",
        decoder=DebeziumDecoder(),
        good={
            change: Update(1, "a", 1.5, 10),
            b'{"schema":{"type":"struct"},"payload":' + change + b"}": Update(1, "a", 1.5, 10),
        },
        wrong={
            change[:-9]: "DecodeError",
            b'{"type":"update","seq":1}': "no change of Debezium: it has no op",
            b'{"op":"x"}': "op is 'x', not one of c u d r t m",
            b'{"op":"u","after":[1]}': "after is no row but list",
            b'{"op":"u","type":"update","seq":"1"}': "wrong schema",
            b'{"op":"u","type":"\xff"}': "UTF-8|utf-8|DecodeError",
            b'{"schema":[],"payload":' + change + b"}": "ValidationError",
            b'{"payload":' + b"[" * 100_000: "nested too deeply|DecodeError",
            b'{"schema":' + b'{"fields":[' * 100_000: "nested too deeply|DecodeError",
        },
    )
    return [json_case, comma_case, debezium_case, *registry_cases()]


def registry_cases() -> list[DecoderCase]:
    """The formats whose messages name their schema in a registry."""
    schemas = MemorySchemas()
    header = schemas.register(UPDATE_SCHEMA)
    other_header = schemas.register({**UPDATE_SCHEMA, "name": "other"})
    avro = avro_value(header, UPDATE_SCHEMA, RECORD)
    wrong_id = b"\x00\x00\x00\x00\x63"
    avro_case = DecoderCase(
        name="avro",
        decoder=AvroDecoder(schemas),
        good={avro: UPDATE, avro_value(header, UPDATE_SCHEMA, SMALL_RECORD): SMALL_UPDATE},
        wrong={
            avro[:-1]: "wrong schema: the value ends too early",
            avro + b"\x00": "wrong schema: 1 bytes are left",
            avro_value(other_header, UPDATE_SCHEMA, RECORD): "wrong schema: Invalid value 'other'",
            wrong_id + avro[5:]: "unknown schema id 99",
            b'{"type":"update","seq":1}': "begins with 0x7b",
            header + b"\x02\x06\xff\xff\xff": "wrong schema",
            header + b"\xff" * 20: "wrong schema",
        },
    )
    proto_header = schemas.register(PROTO, kind="PROTOBUF")
    descriptors = descriptors_of(shop_file())
    protobuf = protobuf_value(proto_header, b"\x02\x02", descriptors, "shop.update", **RECORD)
    small = protobuf_value(proto_header, b"\x02\x02", descriptors, "shop.update", **SMALL_RECORD)
    protobuf_case = DecoderCase(
        name="protobuf",
        decoder=ProtobufDecoder(schemas, descriptors),
        good={protobuf: UPDATE, small: SMALL_UPDATE},
        wrong={
            protobuf[:-1]: "wrong schema",
            proto_header + b"\x02\x04": r"wrong schema: it has no message at \[2\]",
            proto_header + b"\x00\x0a\x01a": "wrong schema: .*other",
            proto_header + b"\x01": "has -1 numbers",
            proto_header + b"\x80": "ends before its message begins",
            wrong_id + protobuf[5:]: "unknown schema id 99",
            header + protobuf[5:]: "it is AVRO, not PROTOBUF",
        },
    )
    json_header = schemas.register("{}", kind="JSON")
    json = json_header + b'{"type":"update","seq":1,"id":"a","price":1.5,"size":10}'
    json_schema_case = DecoderCase(
        name="json-schema",
        decoder=JsonSchemaDecoder(schemas),
        good={json: UPDATE},
        wrong={
            json[:-1]: "not JSON",
            json[5:]: "begins with 0x7b",
            wrong_id + json[5:]: "unknown schema id 99",
            header + json[5:]: "it is AVRO, not JSON",
        },
    )
    return [avro_case, protobuf_case, json_schema_case]
