"""Decoders: how the value of a Kafka message becomes the message that a machine takes.

A decoder is a message format. JSON comes with Seriatim (`JsonDecoder`); a user adds a format by a
subclass of `PlainDecoder`, named in the stream file. A machine asks its decoder once for a function
that decodes values to its own type of message (`Decoder.for_type`), and calls that for every batch.

What cannot be decoded is a `Poison` in the place of its message, never an exception: the fold knows
its offset, and `on_poison` decides what is done. The one exception is an error of ours: a decoder
that cannot reach what it needs, such as a schema registry, raises `PlatformError`, and the run ends
with nothing committed of that slice.

Next: engine/machine.py and engine/table.py use it; stream_files.py loads the decoder of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import msgspec

from seriatim.engine.messages import KeysOrValues, Poison
from seriatim.errors import SeriatimError

DecodeValues = Callable[[KeysOrValues], list[Any]]
"""Decodes many values: for each one, in order, a message or a `Poison`. None is a null value."""
CAUSE_LENGTH_MAX = 500
"""Characters of an error text that a cause keeps. Causes are stored in the ledger."""
NOT_POISON = (SeriatimError, MemoryError)
"""Errors that say nothing about the value: the same value may be decoded by the next run."""


class Decoder(Protocol):
    """A message format. tests/contracts/test_decoders.py says what holds for every decoder."""

    def for_type(self, message_type: Any) -> DecodeValues:
        """The function that decodes values to messages of this type, a Struct or a union of Structs.

        It gives one result per value, in order, and raises nothing but a `SeriatimError`. A type
        that cannot be decoded is refused here, by any exception.
        """
        ...

    def to_plain(self, value: bytes) -> Any:
        """A value as dicts, lists and scalars, as it was sent, to show it to people. It may raise."""
        ...

    def decode_raw(self, raw: bytes) -> Any:
        """What a `msgspec.Raw` in a decoded message holds, as plain values. It may raise."""
        ...


class JsonDecoder:
    """Messages in JSON, one per value."""

    def for_type(self, message_type: Any) -> DecodeValues:
        """The function that decodes JSON to messages of this type."""
        decode = msgspec.json.Decoder(message_type).decode

        def decode_values(values: KeysOrValues) -> list[Any]:
            # Each value is decoded by itself. A decoder of lines would misread a value with two
            # messages, or a message that is spread over two values, and it would not be faster.
            #
            # First all values at once, which is fast. msgspec does not check the UTF-8 of fields
            # that it skips or keeps raw, so one decode of all values does. If anything raises, the
            # slow loop below finds out which value it was.
            try:
                b"\n".join(values).decode()  # type: ignore[arg-type]  # a null value raises
                return list(map(decode, values))  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001, S110  # a user's message type may raise anything
                pass
            return [_decode_json(decode, value) for value in values]

        return decode_values

    def to_plain(self, value: bytes) -> Any:
        """The value as it was sent."""
        return msgspec.json.decode(value)

    def decode_raw(self, raw: bytes) -> Any:
        """What a `msgspec.Raw` holds: JSON."""
        return msgspec.json.decode(raw)


def _decode_json(decode: Callable[[bytes], Any], value: bytes | None) -> Any:
    """One typed message, or the `Poison` that stands in for it."""
    if value is None:
        return Poison("the value is null")
    try:
        value.decode()
        return decode(value)
    except msgspec.ValidationError as error:
        return Poison(f"wrong schema: {error}")
    except msgspec.DecodeError as error:
        return Poison(f"not JSON: {error}" if value else "the value has 0 bytes")
    except UnicodeDecodeError as error:
        return Poison(f"not UTF-8: byte {error.start} is 0x{value[error.start]:02x}")
    except Exception as error:  # noqa: BLE001  # a user's own message type may raise anything
        return _poison_of(error)


class PlainDecoder:
    """A message format that turns a value into plain values: dicts, lists, texts, numbers, bytes,
    times. Subclass it and write `to_plain`.

    Seriatim converts the plain values to the machine's type of message, so one decoder serves the
    table machine and any machine of a user. A decoder is made once per machine and process, without
    arguments; it may keep a cache.
    """

    def to_plain(self, value: bytes) -> Any:
        """The message of one value: the plain values that it would have in JSON.

        Raise any exception, or return `Poison("why")`, if the value cannot be decoded: the message
        is poison then. The value is never null.
        """
        raise NotImplementedError

    def to_plain_values(self, values: KeysOrValues) -> Sequence[Any]:
        """One result of `to_plain` per value, in order.

        Override it where many values at once are faster, or where a null value means something. If
        it raises, each value is decoded again by itself, so that only the wrong one is poison.
        """
        return [self._to_plain_or_poison(value) for value in values]

    def _to_plain_or_poison(self, value: bytes | None) -> Any:
        if value is None:
            return Poison("the value is null")
        try:
            return self.to_plain(value)
        except NOT_POISON:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code may raise anything
            return _poison_of(error)

    def describe_schema(self, value: bytes) -> str:  # noqa: ARG002  # most values name none
        """What a value says about its own schema, as the end of the cause if it does not fit the
        machine's type of message; empty if it says nothing.
        """
        return ""

    @final
    def for_type(self, message_type: Any) -> DecodeValues:
        """The function that decodes values to messages of this type."""
        return _PlainToMessages(self, message_type).decode_values

    @final
    def decode_raw(self, raw: bytes) -> Any:
        """What a `msgspec.Raw` holds: MessagePack, whatever the format of the message."""
        return msgspec.msgpack.decode(raw)


class _PlainToMessages:
    """Decodes values by a `PlainDecoder`, and converts what it gives to one type of message.

    Plain values become a message by way of MessagePack. `msgspec.convert` is as fast, but it lets
    Structs pass without a look at their fields, and texts that are not UTF-8.
    """

    def __init__(self, decoder: PlainDecoder, message_type: Any) -> None:
        self.to_plain_values = decoder.to_plain_values
        self.describe_schema = decoder.describe_schema
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(message_type).decode

    def decode_values(self, values: KeysOrValues) -> list[Any]:
        """One message or `Poison` per value, in order."""
        values = tuple(values)  # whatever the user's code does, these stay as they are
        # First all values at once; one by one only if something is wrong with one of them.
        try:
            results = list(self.to_plain_values(values))
            if len(results) == len(values):
                return [self._to_message(result) for result in results]
        except NOT_POISON:
            raise
        except (Exception, SystemExit):  # noqa: BLE001, S110  # the user's code may raise anything
            pass
        return [self._decode_value(value) for value in values]

    def _decode_value(self, value: bytes | None) -> Any:
        try:
            results = list(self.to_plain_values((value,)))
            if len(results) != 1:
                return Poison(f"the decoder gave {len(results)} results for one value")
            return self._to_message(results[0])
        except NOT_POISON:
            raise
        except msgspec.ValidationError as error:
            of_schema = self.describe_schema(value) if value is not None else ""
            return Poison(f"wrong schema: {error}{of_schema}")
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code may raise anything
            return _poison_of(error)

    def _to_message(self, result: Any) -> Any:
        if result.__class__ is Poison:
            return Poison(_short_text(result.cause), has_no_effect=result.has_no_effect)
        return self.decode(self.encode(result))


def _poison_of(error: BaseException) -> Poison:
    """The poison of a value whose decoding raised this error."""
    if isinstance(error, RecursionError):
        return Poison("nested too deeply")
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # an exception of the user may fail to say what it is
        text = type(error).__name__
    return Poison(_short_text(text))


def _short_text(text: Any) -> str:
    """A text that can be stored: of bounded length, and UTF-8."""
    shortened = str(text)[:CAUSE_LENGTH_MAX]
    return shortened.encode("utf-8", "backslashreplace").decode()


def plain_values(value: Any, decode_raw: Callable[[bytes], Any]) -> Any:
    """A Struct as dicts, lists and scalars. A `msgspec.Raw` in it becomes what it holds, or text if
    it cannot be decoded.
    """

    def decode_or_text(raw: Any) -> Any:
        if not isinstance(raw, msgspec.Raw):
            raise TypeError(f"{type(raw).__name__} has no plain value")
        try:
            return decode_raw(bytes(raw))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return bytes(raw).decode(errors="backslashreplace")

    return msgspec.to_builtins(value, enc_hook=decode_or_text)
