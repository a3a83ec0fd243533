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
from seriatim.formats.debezium import DebeziumDecoder

STREAMS_PAGE = Path(__file__).parents[2] / "docs" / "STREAMS.md"


class Update(Struct, tag_field="type", tag="update"):
    """The message that every format of the contract can express."""

    seq: int
    id: str
    price: float
    size: int


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
    return [json_case, comma_case, debezium_case]
