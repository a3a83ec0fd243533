"""Debezium's messages: in JSON, with or without the schema in the message, and in Avro.

A value is `{"schema": …, "payload": {…}}` or the payload alone, as the connector's JsonConverter
writes it. A value that begins with a zero byte is Avro, with the id of its schema in the registry; no
JSON begins so. The payload has `op`, `before`, `after`, `source` and more. `DebeziumDecoder` gives the
payload as plain values. In the images of the row it replaces what JSON cannot express:

- Numbers and texts that stand for a time, a decimal or bytes become these. The schema says what they
  stand for. (Avro has some of them already.) Without a schema the column of the table says it, if
  there is only one way to read them.
- Columns with the placeholder for a value that the connector did not get are taken out, and named in
  `unavailable`.

Tombstones, heartbeats, and messages about transactions, schemas and snapshots concern no row: they are
passed over, wherever they arrive.

Next: engine/change_table.py folds the changes into a table; avro.py reads Avro.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from seriatim.engine.decoding import PlainDecoder
from seriatim.engine.messages import KeysOrValues, Poison
from seriatim.engine.table import decimal_size, rfc3339
from seriatim.stream import Stream

if TYPE_CHECKING:
    from seriatim.formats.avro import AvroSchema, AvroValues

Convert = Callable[[Any], Any]
"""Converts a value that is not null; raises `ValueError` with the reason if it cannot be."""
Converters = Mapping[str, Convert]
"""The columns whose values must be converted, each with its function."""

OPERATIONS = ("c", "u", "d", "r", "t", "m")
PLACEHOLDER = "__debezium_unavailable_value"
"""What PostgreSQL's connector sends in place of a value that is stored apart from its row (TOAST) and
did not change.
"""
PLACEHOLDERS = (PLACEHOLDER, b64encode(PLACEHOLDER.encode()).decode())
"""The placeholder in columns of text, and in columns of bytes, which JSON has as base64."""
PLACEHOLDER_BYTES = tuple(placeholder.encode() for placeholder in PLACEHOLDERS)
SCHEMAS_CACHED_MAX = 200
SCHEMA_CACHED_BYTES_MAX = 1 << 20
"""How many schemas a decoder remembers, and the size of one, at most. A topic has one for each
version of its table.
"""
DECIMAL_LENGTH_MAX = 200
"""Digits or bytes of a decimal. A column holds 38 digits; more would only cost time."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPOCH_DAY = date(1970, 1, 1).toordinal()
MICROSECONDS_OF_UNIT = {
    "milliseconds": (1000, 1),
    "microseconds": (1, 1),
    "nanoseconds": (1, 1000),
}
"""A unit of time in microseconds, as a fraction."""
UNIT_OF_TIMESTAMP = {
    "io.debezium.time.Timestamp": "milliseconds",
    "org.apache.kafka.connect.data.Timestamp": "milliseconds",
    "io.debezium.time.MicroTimestamp": "microseconds",
    "io.debezium.time.NanoTimestamp": "nanoseconds",
}
DATES = ("io.debezium.time.Date", "org.apache.kafka.connect.data.Date")
DECIMAL = "org.apache.kafka.connect.data.Decimal"
VARIABLE_DECIMAL = "io.debezium.data.VariableScaleDecimal"


class _Message(Struct):
    """The parts of a value with a schema. A value without one has neither."""

    schema: Raw | UnsetType = UNSET
    payload: Raw | UnsetType = UNSET


class FieldSchema(Struct):
    """What the schema in a message says about one field of it."""

    type: str = ""
    field: str = ""
    name: str | None = None
    """What the values stand for, such as `io.debezium.time.Date`."""
    parameters: dict[str, str] = {}
    fields: list[FieldSchema] = []


class DebeziumDecoder(PlainDecoder):
    """Changes as plain values: the payload, with the images of the row converted.

    `columns` are those of the table machine. Without them, for a machine of the user, values are
    converted as the message's schema says, and stay as they were sent if there is none.
    """

    def __init__(
        self,
        columns: Mapping[str, str] | None = None,
        *,
        decimals: str = "",
        timestamps: str = "",
        metadata: Mapping[str, str] | None = None,
        open_avro: Callable[[], AvroValues] | None = None,
    ) -> None:
        self.columns = columns
        self.decimals = decimals
        """How messages without a schema write decimals: precise, string or double. Empty: only what
        can be read in one way is accepted.
        """
        self.timestamps = timestamps
        """The unit of numbers that are timestamps in messages without a schema. Empty: not known."""
        self._metadata: list[tuple[str, list[str], Convert | None]] = []
        """Columns that are not of the row: where their values are in the payload, and how they are
        converted.
        """
        for name, path in (metadata or {}).items():
            convert = _metadata_converter((columns or {})[name], path)
            self._metadata.append((name, path.split("."), convert))
        self._decode_message = msgspec.json.Decoder(_Message).decode
        self._decode_payload = msgspec.json.Decoder().decode
        self._decode_schema = msgspec.json.Decoder(FieldSchema).decode
        self._converters_without_schema = self._converters_of_fields(None)
        self._converters_by_schema: dict[bytes, Converters] = {}
        self._open_avro = open_avro
        """Opens the schema registry. It is called for the first value in Avro."""
        self._avro: AvroValues | None = None
        self._converters_by_avro_schema: dict[AvroSchema, Converters] = {}

    def to_plain_values(self, values: KeysOrValues) -> Sequence[Any]:
        """One result of `to_plain` per value. A null value is a tombstone, for Kafka's compaction."""
        return [
            Poison("a tombstone", has_no_effect=True)
            if value is None
            else self._to_plain_or_poison(value)
            for value in values
        ]

    def describe_schema(self, value: bytes) -> str:
        """The id of the schema that a value in Avro names."""
        if value[:1] != b"\x00":
            return ""
        # Imported here: messages in JSON need no client of a registry.
        from seriatim.formats.registry import describe_schema_id

        return describe_schema_id(value)

    def to_plain(self, value: bytes) -> Any:
        """The payload of a value, or a `Poison` if it is no change of a row."""
        if value[:1] == b"\x00":
            payload, converters = self._read_avro(value)
        else:
            payload, converters = self._read_json(value)
        if payload is None:
            return Poison("a tombstone", has_no_effect=True)
        if isinstance(payload, Poison):
            return payload
        if not isinstance(payload, dict):
            return Poison(f"the payload is no object but {type(payload).__name__}")
        if "op" not in payload:
            return _judge_other_message(payload)
        if any(placeholder in value for placeholder in PLACEHOLDER_BYTES):
            _take_out_placeholders(payload)
        if self.columns is not None:
            payload["position"] = _position(payload.get("source"))
        fault = _describe_wrong_operation(payload) or _convert_images(payload, converters)
        if fault:
            return Poison(f"{fault}{self.describe_schema(value)}")
        if self._metadata:
            self._put_metadata(payload)
        return payload

    def _put_metadata(self, payload: dict[str, Any]) -> None:
        """Put values that are not of the row into the row after the change. A column of the source
        with the same name is left out of both rows.
        """
        before = payload.get("before")
        after = payload.get("after")
        unavailable = payload.get("unavailable", [])
        for name, path, convert in self._metadata:
            if before is not None:
                before.pop(name, None)
            if after is None:
                continue
            if name in unavailable:
                unavailable.remove(name)
            value: Any = payload
            for field in path:
                value = value.get(field) if isinstance(value, dict) else None
            if value is not None and convert is not None:
                value = convert(value)
            after[name] = value

    def _read_json(self, value: bytes) -> tuple[Any, Converters]:
        """The payload of a value in JSON, and what its row must be converted by."""
        message = self._decode_message(value)
        payload = self._decode_payload(value if message.payload is UNSET else message.payload)
        if isinstance(message.schema, Raw):
            return payload, self._converters_of_schema(bytes(message.schema))
        return payload, self._converters_without_schema

    def _read_avro(self, value: bytes) -> tuple[Any, Converters]:
        """The payload of a value in Avro, or a `Poison`, and what its row must be converted by."""
        if self._avro is None:
            if self._open_avro is None:
                return Poison("the value is in Avro, and there is no schema registry here"), {}
            self._avro = self._open_avro()
        decoded = self._avro.read(value)
        if isinstance(decoded, Poison):
            return decoded, {}
        schema, _, payload = decoded
        converters = self._converters_by_avro_schema.get(schema)
        if converters is None:
            converters = self._converters_of_fields(_avro_row_fields(schema))
            if len(self._converters_by_avro_schema) >= SCHEMAS_CACHED_MAX:
                self._converters_by_avro_schema.clear()
            self._converters_by_avro_schema[schema] = converters
        return payload, converters

    def _converters_of_schema(self, schema: bytes) -> Converters:
        """The converters for messages with this schema. It is parsed once, not for each message."""
        converters = self._converters_by_schema.get(schema)
        if converters is None:
            fields = None
            if schema != b"null":
                fields = _row_fields_of(self._decode_schema(schema))
            converters = self._converters_of_fields(fields)
            if len(schema) > SCHEMA_CACHED_BYTES_MAX:
                return converters
            if len(self._converters_by_schema) >= SCHEMAS_CACHED_MAX:
                self._converters_by_schema.clear()
            self._converters_by_schema[schema] = converters
        return converters

    def _converters_of_fields(self, fields: Mapping[str, FieldSchema] | None) -> Converters:
        """The converters of a row. `fields` is its schema; None if the message has none."""
        converters: dict[str, Convert] = {}
        if self.columns is None:
            for name, field in (fields or {}).items():
                convert = _converter_of_field(field)
                if convert is not None:
                    converters[name] = convert
            return converters
        for name, type_name in self.columns.items():
            column_field = None if fields is None else fields.get(name)
            convert = self._converter_of_column(type_name, column_field)
            if convert is not None:
                converters[name] = convert
        for name, _, _ in self._metadata:
            converters.pop(name, None)
        return converters

    def _converter_of_column(self, type_name: str, field: FieldSchema | None) -> Convert | None:
        """How values become those of a column; None if they are taken as they were sent."""
        size = decimal_size(type_name)
        if size is not None:
            _, scale = size
            return self._decimal_converter(scale, field)
        if type_name == "timestamp":
            unit = self.timestamps
            if field is not None:
                unit = UNIT_OF_TIMESTAMP.get(field.name or "", "")
            return _timestamp_converter(unit)
        if type_name == "date":
            is_number_of_days = field is None or field.name in DATES
            return _date_from_days_or_text if is_number_of_days else _date_from_text
        if type_name == "binary":
            return _bytes_from_base64
        if type_name == "string" and field is not None and field.type == "bytes":
            return _refuse_bytes
        return None

    def _decimal_converter(self, scale: int, field: FieldSchema | None) -> Convert:
        """How values become decimals: as the schema or the stream file says, or else only those
        that can be read in one way.
        """
        if field is not None:
            return _converter_of_field(field) or _decimal_from_text_or_number
        if self.decimals == "precise":
            return _precise_converter(scale)
        if self.decimals in ("string", "double"):
            return _decimal_from_text_or_number
        return _unambiguous_decimal


def debezium_decoder(
    stream: Stream, open_avro: Callable[[], AvroValues] | None = None
) -> DebeziumDecoder:
    """The decoder of a stream with `decoder = "debezium"`."""
    columns = stream.table.columns if stream.machine == "table" else None
    settings = stream.debezium
    return DebeziumDecoder(
        columns,
        decimals=settings.decimals,
        timestamps=settings.timestamps,
        metadata=settings.metadata,
        open_avro=open_avro,
    )


def _judge_other_message(payload: Mapping[str, Any]) -> Poison:
    """What a message without an operation is: one that concerns no row, or none of Debezium's."""
    if payload.keys() == {"ts_ms"}:
        return Poison("a heartbeat", has_no_effect=True)
    if payload.keys() >= {"status", "id", "data_collections"}:
        return Poison("the begin or end of a transaction", has_no_effect=True)
    if payload.keys() >= {"source", "tableChanges"}:
        return Poison("a change of the schema", has_no_effect=True)
    if payload.keys() >= {"id", "aggregate_type", "type"}:
        return Poison("a notification of the connector", has_no_effect=True)
    return Poison(
        "no change of Debezium: it has no op. If the connector unwraps the rows"
        " (ExtractNewRecordState), remove that transformation"
    )


def _position(source: Any) -> tuple[int, int] | None:
    """The position of a change and the time of its commit; None if the connector's positions cannot
    be compared.

    In PostgreSQL a row can be changed only after the change before it was committed. So the changes
    of one row rise in the log, although those of different rows may not. An insert may stand before
    the delete that it had to wait for: only the time of its commit is later, perhaps by less than a
    millisecond.
    """
    if not isinstance(source, dict) or source.get("connector") != "postgresql":
        return None
    lsn: Any = source.get("lsn")
    time_us: Any = source.get("ts_us")
    time_ms: Any = source.get("ts_ms")
    if time_us is None and _is_whole_number(time_ms):
        time_us = time_ms * 1000  # before Debezium 2.6
    is_known = _is_whole_number(lsn) and _is_whole_number(time_us)
    return (lsn, time_us) if is_known else None


def _take_out_placeholders(payload: dict[str, Any]) -> None:
    """Take columns without a value out of the images. `unavailable` names those of `after`."""
    for side in ("before", "after"):
        image = payload.get(side)
        if not isinstance(image, dict):
            continue
        names = [name for name, value in image.items() if _is_placeholder(value)]
        for name in names:
            del image[name]
        if side == "after":
            payload["unavailable"] = names


def _is_placeholder(value: Any) -> bool:
    if isinstance(value, list):  # an array of texts
        return value == [PLACEHOLDER]
    return value in PLACEHOLDERS or value == PLACEHOLDER_BYTES[0]


def _describe_wrong_operation(payload: Mapping[str, Any]) -> str:
    if payload["op"] in OPERATIONS:
        return ""
    return f"op is {_shorten(payload['op'])}, not one of {' '.join(OPERATIONS)}"


def _convert_images(payload: Mapping[str, Any], converters: Converters) -> str:
    """Convert the values of both rows in place. Returns what is wrong with one; empty if nothing is."""
    for side in ("before", "after"):
        image = payload.get(side)
        if image is None:
            continue
        if not isinstance(image, dict):
            return f"{side} is no row but {type(image).__name__}"
        for name, convert in converters.items():
            value = image.get(name)
            if value is None:
                continue
            try:
                image[name] = convert(value)
            except ValueError as error:
                return f"{side}: {name} {error}"
    return ""


def _row_fields_of(schema: FieldSchema) -> dict[str, FieldSchema]:
    """The schema of a row, by column."""
    for image in schema.fields:
        if image.field in ("after", "before") and image.fields:
            return {column.field: column for column in image.fields}
    return {}


def _avro_row_fields(schema: AvroSchema) -> dict[str, FieldSchema]:
    """The schema of a row, by column. Connect's converters write what a field stands for as
    properties of its type.
    """
    images = schema.record_fields(schema.parsed)
    for side in ("after", "before"):
        columns = schema.record_fields(images.get(side))
        if columns:
            return {name: _field_of_avro_type(schema, kind) for name, kind in columns.items()}
    return {}


def _field_of_avro_type(schema: AvroSchema, avro_type: Any) -> FieldSchema:
    """A type of Avro, or the type beside null in a union, as Connect's schema of the field."""
    if isinstance(avro_type, list):
        avro_type = next((kind for kind in avro_type if kind != "null"), "null")
    resolved = schema.resolve(avro_type)
    if not isinstance(resolved, dict):
        return FieldSchema(type=str(resolved))
    return FieldSchema(
        type=str(resolved.get("type", "")),
        name=resolved.get("connect.name"),
        parameters=resolved.get("connect.parameters", {}),
    )


def _converter_of_field(field: FieldSchema) -> Convert | None:
    """How values become what the schema says that they are; None if they are that already."""
    name = field.name or ""
    unit = UNIT_OF_TIMESTAMP.get(name)
    if unit is not None:
        return _timestamp_converter(unit)
    if name in DATES:
        return _date_from_days_or_text
    if name == DECIMAL:
        return _precise_converter(int(field.parameters.get("scale", "0")))
    if name == VARIABLE_DECIMAL:
        return _variable_decimal
    if field.type == "bytes":
        return _bytes_from_base64
    return None


def _metadata_converter(type_name: str, path: str) -> Convert | None:
    """How a value of the message beside its rows becomes one of a column. The name of a time ends
    with its unit.
    """
    if type_name != "timestamp":
        return None
    units = {"ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
    return _timestamp_converter(units.get(path[-2:], ""))


# Each of these takes a value that is not null, and raises `ValueError` if it does not fit. Avro has
# dates, times, decimals and bytes of its own: they are taken as they are.


def _timestamp_converter(unit: str) -> Convert:
    """Numbers of a unit since 1970 as times; texts in any form that the table machine accepts."""

    def convert(value: Any) -> Any:
        if isinstance(value, datetime):
            return value
        if isinstance(value, str):
            return rfc3339(value) or value
        if not _is_whole_number(value):
            raise ValueError(f"is no time: {_shorten(value)}")
        if not unit:
            raise ValueError(
                f"is the number {value}, and the message has no schema that says its unit:"
                " set debezium.timestamps in the stream file"
            )
        factor, divisor = MICROSECONDS_OF_UNIT[unit]
        # Rounded, as the digits below the microsecond of a text are.
        microseconds = (value * factor + divisor // 2) // divisor
        try:
            return EPOCH + timedelta(microseconds=microseconds)
        except OverflowError:
            raise ValueError(f"is out of range: {value} {unit}") from None

    return convert


def _date_from_days_or_text(value: Any) -> Any:
    if not _is_whole_number(value):
        return _date_from_text(value)
    try:
        return date.fromordinal(EPOCH_DAY + value)
    except (OverflowError, ValueError):
        raise ValueError(f"is out of range: {value} days") from None


def _date_from_text(value: Any) -> Any:
    """A date as text. Debezium writes a `Z` behind it, if it is set to write dates as text."""
    if isinstance(value, date):
        return value
    if not isinstance(value, str):
        raise ValueError(f"is no date: {_shorten(value)}")
    return value.removesuffix("Z")


def _bytes_from_base64(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"is no base64: {_shorten(value)}")
    try:
        return b64decode(value, validate=True)
    except ValueError:
        raise ValueError(f"is no base64: {_shorten(value)}") from None


def _refuse_bytes(value: Any) -> Any:
    raise ValueError(
        f"is text, but the source has bytes: {_shorten(value)}; change its column type"
    )


def _precise_converter(scale: int) -> Convert:
    """The unscaled number as bytes in base64, which is `decimal.handling.mode = precise`."""

    def convert(value: Any) -> Decimal:
        if isinstance(value, Decimal):
            return value
        if isinstance(value, dict):
            return _variable_decimal(value)
        content = _bytes_from_base64(value)
        if len(content) > DECIMAL_LENGTH_MAX:
            raise ValueError(f"is a decimal of {len(content)} bytes")
        sign, digits, _ = Decimal(int.from_bytes(content, signed=True)).as_tuple()
        # Any calculation would round to the precision of the context.
        return Decimal((sign, digits, -scale))

    return convert


def _variable_decimal(value: Any) -> Decimal:
    """A decimal that brings its own scale, for a column that has none in the source."""
    if not isinstance(value, dict) or not _is_whole_number(value.get("scale")):
        raise ValueError(f"is no decimal with a scale: {_shorten(value)}")
    unscaled = value.get("value")
    if not isinstance(unscaled, str | bytes):
        raise ValueError(f"is no decimal with a scale: {_shorten(value)}")
    convert = _precise_converter(value["scale"])
    return convert(unscaled)


def _decimal_from_text_or_number(value: Any) -> Any:
    if isinstance(value, Decimal):
        return value
    if isinstance(value, dict):
        return _variable_decimal(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_short_text = isinstance(value, str) and len(value) <= DECIMAL_LENGTH_MAX
    if not is_number and not is_short_text:
        raise ValueError(f"is no decimal: {_shorten(value)}")
    try:
        return Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"is no decimal: {_shorten(value)}") from None


def _unambiguous_decimal(value: Any) -> Any:
    """A decimal of a message without a schema. A text may be a decimal, or bytes in base64 that look
    like one: `1000` is both. It is a decimal for certain if it cannot be base64.
    """
    if isinstance(value, str):
        can_be_base64 = len(value) % 4 == 0 and not set(value) & {".", "-"}
        if can_be_base64:
            raise ValueError(
                f"is {_shorten(value)}, which may be a decimal or base64, and the message has no"
                " schema that says it: set debezium.decimals in the stream file"
            )
    return _decimal_from_text_or_number(value)


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shorten(value: Any) -> str:
    """A value for people. Of a text only the beginning is looked at: it may have megabytes."""
    if isinstance(value, str):
        return repr(value[:60])
    return repr(value)[:60]
