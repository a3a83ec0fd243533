"""Reads values of Avro, each kind of schema by a function that is made once for it.

It is stricter than fastavro, and faster on records with many fields: a branch of a union or a symbol
of an enum that is not there, a negative length and a value that ends too early are errors. Damaged
bytes must not become other data silently.

Avro values do not say where they end, so a reader takes the whole value and a position, and gives what
it has read and the position behind it.

Next: avro.py parses schemas and reads messages by `reader_of`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastavro.read import LOGICAL_READERS

ReadAvro = Callable[[bytes, int], tuple[Any, int]]
"""Reads a value at a position. Raises `EOFError` or `IndexError` if the bytes end too early, and other
exceptions if they do not fit.
"""

NUMBER_BITS = 64
INT_LIMIT = 1 << 31
FLOAT = struct.Struct("<f")
DOUBLE = struct.Struct("<d")


def reader_of(schema: Any, named: Mapping[str, Any], *, converts: bool = True) -> ReadAvro:
    """The function that reads values of a schema, as fastavro has parsed it. `named` has its named
    types. Raises `LookupError` for a type that is not known.

    Without `converts` dates, decimals and so on stay numbers and bytes: whoever only looks whether
    the bytes fit does not refuse a date that Python does not know.
    """
    return _ReaderFactory(named, converts=converts).reader(schema)


def read_long(content: bytes, position: int) -> tuple[int, int]:
    """A whole number: seven bits in each byte, the lowest first, and the sign in the last bit."""
    byte = content[position]
    position += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position
    number = byte & 0x7F
    shift = 7
    while byte >= 0x80:
        byte = content[position]
        position += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if shift > NUMBER_BITS + 7:
            raise ValueError("a number has more than 10 bytes")
    if number >> NUMBER_BITS:
        raise ValueError("a number has more than 64 bits")
    return (number >> 1) ^ -(number & 1), position


def read_int(content: bytes, position: int) -> tuple[int, int]:
    """A whole number of 32 bits."""
    number, position = read_long(content, position)
    if not -INT_LIMIT <= number < INT_LIMIT:
        raise ValueError(f"an int is {number}")
    return number, position


def read_bytes(content: bytes, position: int) -> tuple[bytes, int]:
    """Bytes behind their number."""
    length, position = read_long(content, position)
    end = position + length
    if length < 0:
        raise ValueError(f"a length is {length}")
    if end > len(content):
        raise EOFError
    return content[position:end], end


def read_string(content: bytes, position: int) -> tuple[str, int]:
    """A text behind the number of its bytes."""
    byte = content[position]
    if byte & 0x81:
        text, position = read_bytes(content, position)
        return text.decode(), position
    # Most texts are short: their length is one byte, twice the length.
    position += 1
    end = position + (byte >> 1)
    if end > len(content):
        raise EOFError
    return content[position:end].decode(), end


def read_null(content: bytes, position: int) -> tuple[None, int]:  # noqa: ARG001  # takes no bytes
    """Nothing."""
    return None, position


def read_boolean(content: bytes, position: int) -> tuple[bool, int]:
    """One byte."""
    byte = content[position]
    if byte > 1:
        raise ValueError(f"a boolean is 0x{byte:02x}")
    return byte == 1, position + 1


def read_float(content: bytes, position: int) -> tuple[float, int]:
    """Four bytes."""
    end = position + FLOAT.size
    if end > len(content):
        raise EOFError
    return FLOAT.unpack_from(content, position)[0], end


def read_double(content: bytes, position: int) -> tuple[float, int]:
    """Eight bytes."""
    end = position + DOUBLE.size
    if end > len(content):
        raise EOFError
    return DOUBLE.unpack_from(content, position)[0], end


PRIMITIVES: Mapping[str, ReadAvro] = {
    "null": read_null,
    "boolean": read_boolean,
    "int": read_int,
    "long": read_long,
    "float": read_float,
    "double": read_double,
    "bytes": read_bytes,
    "string": read_string,
}


class _ReaderFactory:
    """Makes the readers of one schema."""

    def __init__(self, named: Mapping[str, Any], *, converts: bool) -> None:
        self._named = named
        self._converts = converts
        self._named_readers: dict[str, ReadAvro] = {}

    def reader(self, schema: Any) -> ReadAvro:
        """The reader of a type."""
        if isinstance(schema, list):
            return _union_reader([self.reader(branch) for branch in schema])
        if isinstance(schema, str):
            return PRIMITIVES.get(schema) or self._named_reader(schema)
        kind = schema["type"]
        if kind in ("record", "error", "enum", "fixed"):
            # Its logical type belongs to its definition: other places have only its name.
            return self._named_reader(schema["name"])
        if kind == "array":
            read = _array_reader(self.reader(schema["items"]))
        elif kind == "map":
            read = _map_reader(self.reader(schema["values"]))
        else:
            read = self.reader(kind)
        return self._logical_reader(read, schema)

    def _named_reader(self, name: str) -> ReadAvro:
        """The reader of a named type. A record may contain itself: the reader inside it finds the
        whole one when it is called.
        """
        named_reader = self._named_readers.get(name)
        if named_reader is not None:
            return named_reader

        def read_later(content: bytes, position: int) -> tuple[Any, int]:
            return self._named_readers[name](content, position)

        self._named_readers[name] = read_later
        read = self._definition_reader(self._named[name])
        self._named_readers[name] = read
        return read

    def _definition_reader(self, schema: Mapping[str, Any]) -> ReadAvro:
        kind = schema["type"]
        if kind == "enum":
            return _enum_reader(schema["symbols"])
        if kind == "fixed":
            return self._logical_reader(_fixed_reader(schema["size"]), schema)
        return _record_reader(
            [(field["name"], self.reader(field["type"])) for field in schema["fields"]]
        )

    def _logical_reader(self, read: ReadAvro, schema: Mapping[str, Any]) -> ReadAvro:
        """A reader that makes a date, a decimal and so on of what another has read. The names of
        these types, and what becomes of them, are fastavro's.
        """
        if not self._converts or "logicalType" not in schema:
            return read
        convert = LOGICAL_READERS.get(f"{schema['type']}-{schema['logicalType']}")
        if convert is None:
            return read
        definition = dict(schema)

        def read_logical(content: bytes, position: int) -> tuple[Any, int]:
            value, position = read(content, position)
            return convert(value, definition, None), position

        return read_logical


def _record_reader(fields: Sequence[tuple[str, ReadAvro]]) -> ReadAvro:
    def read_record(content: bytes, position: int) -> tuple[dict[str, Any], int]:
        record = {}
        for name, read in fields:
            record[name], position = read(content, position)
        return record, position

    return read_record


def _union_reader(branches: Sequence[ReadAvro]) -> ReadAvro:
    # Nearly all unions have few branches, whose numbers are one byte: twice the number.
    by_first_byte = {2 * number: read for number, read in enumerate(branches[:64])}

    def read_union(content: bytes, position: int) -> tuple[Any, int]:
        read = by_first_byte.get(content[position])
        if read is not None:
            return read(content, position + 1)
        number, position = read_long(content, position)
        if not 0 <= number < len(branches):
            raise ValueError(f"branch {number} of a union of {len(branches)} types")
        return branches[number](content, position)

    return read_union


def _enum_reader(symbols: Sequence[str]) -> ReadAvro:
    def read_enum(content: bytes, position: int) -> tuple[str, int]:
        number, position = read_long(content, position)
        if not 0 <= number < len(symbols):
            raise ValueError(f"symbol {number} of an enum of {len(symbols)}")
        return symbols[number], position

    return read_enum


def _fixed_reader(size: int) -> ReadAvro:
    def read_fixed(content: bytes, position: int) -> tuple[bytes, int]:
        end = position + size
        if end > len(content):
            raise EOFError
        return content[position:end], end

    return read_fixed


def _block_length(content: bytes, position: int) -> tuple[int, int]:
    """How many items the next block of an array or map has; 0 after the last one. A wrong number
    fills no memory: each item takes a byte at least, so the content ends first.
    """
    count, position = read_long(content, position)
    if count < 0:
        # The size of the block in bytes follows. It is for readers that skip blocks.
        count = -count
        _, position = read_long(content, position)
    return count, position


def _array_reader(read_item: ReadAvro) -> ReadAvro:
    def read_array(content: bytes, position: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        count, position = _block_length(content, position)
        while count:
            for _ in range(count):
                item, position = read_item(content, position)
                items.append(item)
            count, position = _block_length(content, position)
        return items, position

    return read_array


def _map_reader(read_value: ReadAvro) -> ReadAvro:
    def read_map(content: bytes, position: int) -> tuple[dict[str, Any], int]:
        entries: dict[str, Any] = {}
        count, position = _block_length(content, position)
        while count:
            for _ in range(count):
                key, position = read_string(content, position)
                entries[key], position = read_value(content, position)
            count, position = _block_length(content, position)
        return entries, position

    return read_map
