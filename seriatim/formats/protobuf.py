"""Messages in Protobuf, each with the id of its schema in the registry.

The registry has schemas as text, and a program cannot read messages by a text. So a stream names a
file of descriptors, which `protoc --include_imports --descriptor_set_out` writes. The schema of the
registry says which message a value holds: behind the id of the schema, a value has the place of its
message in the schema (Confluent calls it message indexes). The name of the message at this place is
looked up in the descriptors, so schema and descriptors may have their messages in another order. Fields
that only one of them has are no problem: Protobuf is made for that.

What Protobuf's types become is in docs/STREAMS.md, "Messages with a schema". The name of the message is
given as `type`, unless it has a field of that name.

Next: registry.py says which schema an id has.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from datetime import UTC
from operator import attrgetter
from typing import Any, get_args

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from msgspec import Struct

from seriatim.engine.decoding import NOT_POISON, DecodeValues, PlainDecoder
from seriatim.engine.messages import KeysOrValues, Poison
from seriatim.formats.registry import (
    HEADER_BYTES,
    SchemaSource,
    UnknownSchemaError,
    schema_id_of,
)

Convert = Callable[[Any], Any]
StructMaker = tuple[Callable[[bytes], Message], Callable[[Message], tuple[Any, ...]], type[Struct]]
"""Three things: what parses a message, what takes its values, and the Struct that is made of them."""
PLACE_LENGTH_MAX = 32
"""How deeply the message of a value may be nested in others."""
TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[\w.]+|\S', re.DOTALL
)
"""The words and signs of a schema; comments and texts are one token each."""
WRAPPERS = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in ("Bool", "Bytes", "Double", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
)
PYTHON_TYPES = {
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
}
"""The types of fields that are numbers."""


class MessageNames(Struct):
    """The messages that a schema defines, in their order, each with those inside it."""

    names: list[str] = []
    inner: list[MessageNames] = []

    def at(self, place: Sequence[int]) -> str:
        """The full name of the message at a place. Raises `LookupError` if there is none."""
        messages = self
        name = ""
        for number in place:
            if number < 0:
                raise LookupError(number)
            name = messages.names[number]
            messages = messages.inner[number]
        return name


def parse_message_names(schema: str) -> MessageNames:
    """The messages of a schema in Protobuf's language. Only what names them is read."""
    top = MessageNames()
    package = ""
    open_blocks: list[tuple[MessageNames, str] | None] = []
    """The blocks around the present word: the messages in it, and the prefix of their names; None
    for a block that is no message.
    """
    words = [word for word in TOKEN.findall(schema) if not word.startswith(("//", "/*"))]
    start = 0
    """Where the present statement begins."""
    for index, word in enumerate(words):
        # A statement ends with one of these signs. Only its first word and the word before the sign
        # are looked at: `message NAME {`, `package NAME ;`.
        if word not in ("{", "}", ";"):
            continue
        first, start = words[start], index + 1
        if word == "}" and open_blocks:
            open_blocks.pop()
        if word == ";" and first == "package" and not open_blocks:
            package = words[index - 1] + "."
        if word == "{":
            around = open_blocks[-1] if open_blocks else (top, package)
            if first != "message" or around is None:
                # An enum, a oneof, a service or an option: messages have no place in it.
                open_blocks.append(None)
                continue
            messages, prefix = around
            name = prefix + words[index - 1]
            messages.names.append(name)
            messages.inner.append(MessageNames())
            open_blocks.append((messages.inner[-1], f"{name}."))
    return top


class ProtobufDecoder:
    """Messages of Protobuf, by the descriptors of the user."""

    def __init__(self, source: SchemaSource, descriptors: Descriptors) -> None:
        self._source = source
        self._descriptors = descriptors
        self._names: dict[int, MessageNames | Poison] = {}
        self._plain = _PlainProtobuf(self)

    def for_type(self, message_type: Any) -> DecodeValues:
        """The function that decodes values to messages of this type."""
        decode_plainly = self._plain.for_type(message_type)
        structs = get_args(message_type) or (message_type,)
        makers: dict[bytes, StructMaker | None] = {}
        """How messages are made of values with the same beginning: the id and the place."""

        def decode_value(value: Any) -> Any:
            # Guess where the place of the message ends: the byte behind the header is twice the count
            # of its numbers (zigzag code), and most numbers take one byte. If the guess is wrong, there
            # is no maker, and the value is decoded plainly.
            start = HEADER_BYTES + 1 + value[HEADER_BYTES] // 2
            beginning = value[:start]
            maker = makers.get(beginning)
            if maker is None:
                if beginning not in makers:
                    makers[beginning] = self._maker_for_value(value, start, structs)
                    return decode_value(value)
                return decode_plainly([value])[0]
            parse, get_values, struct = maker
            return struct(*get_values(parse(value[start:])))

        def decode_values(values: KeysOrValues) -> list[Any]:
            # First all values at once, which is fast; one by one if something is wrong with one.
            try:
                return [decode_value(value) for value in values]
            except NOT_POISON:
                raise
            except Exception:  # noqa: BLE001  # a null value, or whatever a user's Struct raises
                return decode_plainly(values)

        return decode_values

    def _maker_for_value(
        self, value: bytes, start: int, structs: Sequence[Any]
    ) -> StructMaker | None:
        """How Structs are made of messages like this one, which begins at `start`; None if it is
        poison, or not made so simply.
        """
        parsed = self.parse(value)
        if isinstance(parsed, Poison) or _read_place(value, HEADER_BYTES)[1] != start:
            return None
        message, _ = parsed
        return _struct_maker(structs, type(message))

    def to_plain(self, value: bytes) -> Any:
        """The message of a value as plain values."""
        return self._plain.to_plain(value)

    def decode_raw(self, raw: bytes) -> Any:
        """What a `msgspec.Raw` in a message holds."""
        return self._plain.decode_raw(raw)

    def parse(self, value: bytes) -> tuple[Message, str] | Poison:
        """The message of a value, and its full name."""
        try:
            names = self._names_of(schema_id_of(value))
            place, start = _read_place(value, HEADER_BYTES)
        except ValueError as error:
            return Poison(str(error))
        if isinstance(names, Poison):
            return names
        try:
            name = names.at(place)
        except LookupError:
            return Poison(f"wrong schema: it has no message at {list(place)}")
        message_class = self._descriptors.message_class(name)
        if message_class is None:
            return Poison(f"the message {name} is not in {self._descriptors.file_name}")
        try:
            return message_class.FromString(value[start:]), name
        except DecodeError as error:
            return Poison(f"wrong schema: {error}")

    def _names_of(self, schema_id: int) -> MessageNames | Poison:
        names = self._names.get(schema_id)
        if names is None:
            names = self._load_names(schema_id)
            self._names[schema_id] = names
        return names

    def _load_names(self, schema_id: int) -> MessageNames | Poison:
        try:
            registered = self._source.schema(schema_id)
        except UnknownSchemaError:
            return Poison(f"unknown schema id {schema_id}")
        if registered.type != "PROTOBUF":
            return Poison(f"schema id {schema_id}: it is {registered.type}, not PROTOBUF")
        return parse_message_names(registered.schema)


class _PlainProtobuf(PlainDecoder):
    """Messages of Protobuf as dicts, for types that are made by no faster way."""

    def __init__(self, decoder: ProtobufDecoder) -> None:
        self._decoder = decoder
        self._converters: dict[str, Convert] = {}

    def to_plain(self, value: bytes) -> Any:
        parsed = self._decoder.parse(value)
        if isinstance(parsed, Poison):
            return parsed
        message, name = parsed
        convert = self._converters.get(name)
        if convert is None:
            convert = self._converters[name] = MessageConverter(message.DESCRIPTOR, {})
        plain = convert(message)
        plain.setdefault("type", name.rpartition(".")[2])
        return plain


class Descriptors:
    """The messages that a file of descriptors defines. Raises `ValueError` if it has none."""

    def __init__(self, content: bytes, file_name: str) -> None:
        self.file_name = file_name
        self._pool = descriptor_pool.DescriptorPool()
        self._classes: dict[str, type[Message] | None] = {}
        try:
            files = descriptor_pb2.FileDescriptorSet.FromString(content).file
            for file in files:
                self._pool.Add(file)
                # The pool builds a file only when it is asked for. Ask now, so that a set without
                # its imports is refused here, and not at the first message.
                self._pool.FindFileByName(file.name)
        except (DecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file_name} is no complete set of descriptors: {error}") from None

    def message_class(self, name: str) -> type[Message] | None:
        """The class of a message by its full name; None if it is not there."""
        if name not in self._classes:
            try:
                descriptor = self._pool.FindMessageTypeByName(name)
                self._classes[name] = message_factory.GetMessageClass(descriptor)
            except KeyError:
                self._classes[name] = None
        return self._classes[name]


def _read_place(value: bytes, start: int) -> tuple[Sequence[int], int]:
    """Where the message of a value is among those of its schema, and where its bytes begin."""
    length, start = _read_number(value, start)
    if length == 0:  # a short form for the first message, which is the most frequent
        return (0,), start
    if not 0 < length <= PLACE_LENGTH_MAX:
        raise ValueError(f"the place of the message in its schema has {length} numbers")
    place = []
    for _ in range(length):
        number, start = _read_number(value, start)
        place.append(number)
    return place, start


def _read_number(value: bytes, start: int) -> tuple[int, int]:
    """A number of variable length with its sign in the last bit, and where it ends."""
    number = 0
    for position in range(start, min(start + 5, len(value))):
        byte = value[position]
        number |= (byte & 0x7F) << 7 * (position - start)
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), position + 1
    raise ValueError("the value ends before its message begins")


class MessageConverter:
    """Makes a dict of a message. `converters` has those of messages that are in work already: a
    message may contain itself.
    """

    def __init__(self, descriptor: Descriptor, converters: dict[str, MessageConverter]) -> None:
        converters[descriptor.full_name] = self
        self._optional: list[tuple[str, Convert | None]] = []
        self._always: list[tuple[str, Convert | None]] = []
        for field in descriptor.fields:
            has_presence = field.has_presence and not field.is_repeated
            fields = self._optional if has_presence else self._always
            fields.append((field.name, _field_converter(field, converters)))

    def __call__(self, message: Any) -> dict[str, Any]:
        plain = {}
        for name, convert in self._always:
            value = getattr(message, name)
            plain[name] = value if convert is None else convert(value)
        for name, convert in self._optional:
            if message.HasField(name):
                value = getattr(message, name)
                plain[name] = value if convert is None else convert(value)
        return plain


def _field_converter(
    field: FieldDescriptor, converters: dict[str, MessageConverter]
) -> Convert | None:
    """How the value of a field becomes a plain value; None if it is one already."""
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        convert_value = _value_converter(inner.fields_by_name["value"], converters)
        if convert_value is None:
            return dict
        return lambda entries: {key: convert_value(entries[key]) for key in entries}
    convert_item = _value_converter(field, converters)
    if not field.is_repeated:
        return convert_item
    if convert_item is None:
        return list
    return lambda items: [convert_item(item) for item in items]


def _value_converter(
    field: FieldDescriptor, converters: dict[str, MessageConverter]
) -> Convert | None:
    """As `_field_converter`, for one value of a field."""
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        # A number that our descriptors do not know yet stays a number.
        return lambda number: names.get(number, number)
    inner = field.message_type
    if inner is None:
        return None
    if inner.full_name == "google.protobuf.Timestamp":
        return lambda timestamp: timestamp.ToDatetime(tzinfo=UTC)
    if inner.full_name == "google.protobuf.Duration":
        return lambda duration: duration.ToTimedelta()
    if inner.full_name in WRAPPERS:
        return attrgetter("value")
    known = converters.get(inner.full_name)
    return known or MessageConverter(inner, converters)


def _struct_maker(structs: Sequence[Any], message_class: type[Message]) -> StructMaker | None:
    """How a Struct is made of a message without a detour; None if no Struct of these has exactly the
    fields and types that the message brings.
    """
    descriptor = message_class.DESCRIPTOR
    for struct in structs:
        if not (isinstance(struct, type) and issubclass(struct, Struct)):
            continue
        if struct.__struct_config__.tag not in (None, descriptor.name):
            continue
        names = []
        for field in msgspec.structs.fields(struct):
            source = descriptor.fields_by_name.get(field.encode_name)
            if source is not None and _is_same_type(source, field.type):
                names.append(field.encode_name)
        parameters = inspect.signature(struct).parameters.values()
        is_positional = all(
            parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters
        )
        # attrgetter gives no tuple for one name.
        if is_positional and len(names) == len(parameters) > 1:
            return message_class.FromString, attrgetter(*names), struct
    return None


def _is_same_type(source: FieldDescriptor, wanted: Any) -> bool:
    """Whether a field always brings a value of exactly this type."""
    if source.is_repeated or source.has_presence or source.enum_type is not None:
        return False
    if source.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        kind: type = bytes if source.type == FieldDescriptor.TYPE_BYTES else str
    else:
        kind = PYTHON_TYPES.get(source.cpp_type, object)
    return wanted is kind
