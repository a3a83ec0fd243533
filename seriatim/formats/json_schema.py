"""Messages in JSON, each with the id of its JSON Schema in the registry before it.

The machine's own types check the message, as they do without a registry. The id is asked for, so that
a message with a wrong or unknown one is found.

Next: registry.py says which schema an id has.
"""

from __future__ import annotations

from typing import Any

from seriatim.engine.decoding import DecodeValues, JsonDecoder
from seriatim.engine.messages import KeysOrValues, Poison
from seriatim.formats.registry import (
    HEADER_BYTES,
    SchemaSource,
    UnknownSchemaError,
    schema_id_of,
)


class JsonSchemaDecoder:
    """Messages in JSON behind the id of a schema."""

    def __init__(self, source: SchemaSource) -> None:
        self._source = source
        self._json = JsonDecoder()
        self._faults: dict[bytes, str] = {}
        """What is wrong with values that begin with a header; empty: nothing."""

    def for_type(self, message_type: Any) -> DecodeValues:
        """The function that decodes values to messages of this type."""
        decode_json = self._json.for_type(message_type)

        def decode_values(values: KeysOrValues) -> list[Any]:
            contents = [self._content_or_poison(value) for value in values]
            messages = iter(
                decode_json([content for content in contents if not isinstance(content, Poison)])
            )
            return [
                content if isinstance(content, Poison) else next(messages) for content in contents
            ]

        return decode_values

    def to_plain(self, value: bytes) -> Any:
        """The value as it was sent, without its header."""
        return self._json.to_plain(value[HEADER_BYTES:])

    def decode_raw(self, raw: bytes) -> Any:
        """What a `msgspec.Raw` in a message holds: JSON."""
        return self._json.decode_raw(raw)

    def _content_or_poison(self, value: bytes | None) -> bytes | Poison:
        """The JSON in a value."""
        if value is None:
            return Poison("the value is null")
        header = value[:HEADER_BYTES]
        fault = self._faults.get(header)
        if fault is None:
            fault = self._describe_fault(value)
            # A value that is too short has no header: its fault is its own.
            if len(header) == HEADER_BYTES:
                self._faults[header] = fault
        return Poison(fault) if fault else value[HEADER_BYTES:]

    def _describe_fault(self, value: bytes) -> str:
        try:
            schema_id = schema_id_of(value)
            kind = self._source.schema(schema_id).type
        except ValueError as error:
            return str(error)
        except UnknownSchemaError:
            return f"unknown schema id {schema_id}"
        return "" if kind == "JSON" else f"schema id {schema_id}: it is {kind}, not JSON"
