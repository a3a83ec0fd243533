"""Messages in Avro, each with the id of its schema in the registry.

A record becomes a dict with its fields. What Avro's types become is in docs/STREAMS.md, "Messages
with a schema". The name of the record is given as `type`, unless it has a field of that name: so a
topic with several kinds of records fits a machine whose messages are a union of Structs.

Next: registry.py says which schema an id has; avro_reader.py reads the values; debezium.py reads
changes by `AvroValues`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import fastavro
import msgspec
from fastavro.schema import SchemaParseException, UnknownType

from seriatim.engine.decoding import PlainDecoder
from seriatim.engine.messages import Poison
from seriatim.formats.avro_reader import read_long, reader_of
from seriatim.formats.registry import (
    HEADER_BYTES,
    RegisteredSchema,
    SchemaSource,
    UnknownSchemaError,
    describe_schema_id,
    schema_id_of,
)

BRANCHES_MAX = 64
"""How many kinds of records one topic may have in one schema."""
SCHEMAS_CACHED_MAX = 1_000
"""How many schemas are kept ready to read values. A topic has one for each version of each kind of
message; garbage may name any number of them.
"""
UNREADABLE = (
    SchemaParseException,
    UnknownType,
    msgspec.MsgspecError,
    RecursionError,
    LookupError,
)
"""What a schema raises that is none of Avro."""
NAMED_TYPES = ("record", "error", "enum", "fixed")


class UnreadableSchemaError(Exception):
    """A schema in the registry with which no message can be read."""


class AvroSchema:
    """A schema by which values are read."""

    def __init__(self, registered: RegisteredSchema, reader: dict[str, Any] | None) -> None:
        if registered.type != "AVRO":
            raise UnreadableSchemaError(f"it is {registered.type}, not AVRO")
        self.named: dict[str, Any] = {}
        """The named types of the schema, by full name."""
        try:
            # Each reference adds its types to `named`, where the schemas after it find them.
            for reference in registered.references:
                fastavro.parse_schema(msgspec.json.decode(reference.schema), self.named)
            self.parsed: Any = fastavro.parse_schema(
                msgspec.json.decode(registered.schema), self.named
            )
            # With a schema of the reader, fastavro converts what is left after resolution.
            self._read = reader_of(self.parsed, self.named, converts=reader is None)
        except UNREADABLE as error:
            raise UnreadableSchemaError(f"it is no schema of Avro: {error}") from None
        self._reader_schema = reader
        if isinstance(self.parsed, list) and len(self.parsed) > BRANCHES_MAX:
            raise UnreadableSchemaError(f"it is a union of more than {BRANCHES_MAX} types")
        if _has_items_without_bytes(self.parsed, self.named):
            raise UnreadableSchemaError(
                "it has a list whose items take no bytes, so a short message could fill the memory"
            )

    def read(self, value: bytes) -> tuple[str, Any]:
        """The name of the record, and its fields. Raises an exception if the bytes do not fit."""
        record, position = self._read(value, HEADER_BYTES)
        # Avro has no end mark: bytes that are left say that the value was written with another schema.
        if position != len(value):
            raise ValueError(f"{len(value) - position} bytes are left behind the message")
        if self._reader_schema is not None:
            # fastavro knows the rules of resolution. It takes some damaged bytes for other data, and
            # too many levels of records would end the process: that is why the value was read before.
            content = io.BytesIO(value[HEADER_BYTES:])
            record = fastavro.schemaless_reader(content, self.parsed, self._reader_schema)
            return _short_name(self._reader_schema), record
        if isinstance(self.parsed, list):
            # The value of a union begins with the number of its branch.
            branch, _ = read_long(value, HEADER_BYTES)
            return _short_name(self.resolve(self.parsed[branch])), record
        return _short_name(self.resolve(self.parsed)), record

    def resolve(self, schema: Any) -> Any:
        """A type by its definition, where it is only named."""
        return self.named.get(schema, schema) if isinstance(schema, str) else schema

    def record_fields(self, schema: Any) -> dict[str, Any]:
        """The fields of a record, or of the record in a union with null; empty if it is neither."""
        branches = schema if isinstance(schema, list) else [schema]
        for branch in branches:
            resolved = self.resolve(branch)
            if isinstance(resolved, dict) and resolved.get("type") == "record":
                return {field["name"]: field["type"] for field in resolved["fields"]}
        return {}


class AvroValues:
    """Reads values, each by the schema that it names."""

    def __init__(self, source: SchemaSource, reader_schema: dict[str, Any] | None = None) -> None:
        self._source = source
        self._reader_schema = reader_schema
        self._schemas: dict[int, AvroSchema | Poison] = {}

    def read(self, value: bytes) -> tuple[AvroSchema, str, Any] | Poison:
        """The schema that a value names, the name of its record, and the record."""
        try:
            schema_id = schema_id_of(value)
        except ValueError as error:
            return Poison(str(error))
        schema = self._schemas.get(schema_id)
        if schema is None:
            schema = self._load(schema_id)
            if len(self._schemas) >= SCHEMAS_CACHED_MAX:
                self._schemas.clear()
            self._schemas[schema_id] = schema
        if isinstance(schema, Poison):
            return schema
        try:
            name, record = schema.read(value)
        except RecursionError:
            return Poison("nested too deeply")
        except (EOFError, IndexError):
            return Poison(f"wrong schema: the value ends too early{describe_schema_id(value)}")
        except (ValueError, ArithmeticError, LookupError) as error:
            return Poison(f"wrong schema: {error}{describe_schema_id(value)}")
        return schema, name, record

    def _load(self, schema_id: int) -> AvroSchema | Poison:
        try:
            return AvroSchema(self._source.schema(schema_id), self._reader_schema)
        except UnknownSchemaError:
            return Poison(f"unknown schema id {schema_id}")
        except UnreadableSchemaError as error:
            return Poison(f"schema id {schema_id}: {error}")


class AvroDecoder(PlainDecoder):
    """Records of Avro as dicts."""

    def __init__(self, source: SchemaSource, reader_schema: dict[str, Any] | None = None) -> None:
        self._values = AvroValues(source, reader_schema)

    def describe_schema(self, value: bytes) -> str:
        """The id of the schema that a value names."""
        return describe_schema_id(value)

    def to_plain(self, value: bytes) -> Any:
        """The record of a value, with the name of the record as `type`."""
        decoded = self._values.read(value)
        if isinstance(decoded, Poison):
            return decoded
        _, name, record = decoded
        if isinstance(record, dict):
            record.setdefault("type", name)
        return record


def parse_reader_schema(content: bytes) -> dict[str, Any]:
    """A schema of the user, to which records of older and newer schemas are resolved. Raises
    `ValueError` if it is none.
    """
    try:
        parsed = fastavro.parse_schema(msgspec.json.decode(content))
    except (SchemaParseException, UnknownType, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise ValueError("it is no record")
    return parsed


def _short_name(schema: Any) -> str:
    """The name of a record without its namespace; empty for a type without a name."""
    if isinstance(schema, Mapping):
        return str(schema.get("name", "")).rpartition(".")[2]
    return ""


def _parts(schema: Any, named: Mapping[str, Any]) -> Iterator[Any]:
    """The types that a type is made of."""
    if isinstance(schema, str):
        schema = named.get(schema)
    if isinstance(schema, list):
        yield from schema
    elif isinstance(schema, Mapping):
        kind = schema.get("type")
        if kind in ("record", "error"):
            yield from (field["type"] for field in schema["fields"])
        elif kind == "array":
            yield schema["items"]
        elif kind == "map":
            yield schema["values"]
        elif isinstance(kind, list | Mapping):
            yield kind


def _name_of(schema: Any) -> str:
    """The full name of a type that has one."""
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping) and schema.get("type") in NAMED_TYPES:
        return str(schema["name"])
    return ""


def _has_items_without_bytes(schema: Any, named: Mapping[str, Any]) -> bool:
    """Whether a list in a type has items that take no bytes: its length is limited by nothing."""
    seen: set[str] = set()
    pending = [schema]
    while pending:
        part = pending.pop()
        name = _name_of(part)
        if name in named:
            if name in seen:
                continue
            seen.add(name)
        is_array = isinstance(part, Mapping) and part.get("type") == "array"
        if is_array and _takes_no_bytes(part["items"], named):
            return True
        pending.extend(_parts(part, named))
    return False


def _takes_no_bytes(schema: Any, named: Mapping[str, Any]) -> bool:
    """Whether every value of a type is written as nothing. Recursion ends at unions and lists, which
    take at least one byte, and without one of them no type can contain itself.
    """
    resolved = named.get(schema, schema) if isinstance(schema, str) else schema
    if resolved == "null":
        return True
    if not isinstance(resolved, Mapping):
        return False
    kind = resolved.get("type")
    if kind in ("record", "error"):
        return all(_takes_no_bytes(field["type"], named) for field in resolved["fields"])
    if kind == "fixed":
        return bool(resolved["size"] == 0)
    return bool(kind == "null")
