"""Raw captures: messages that somebody wrote to a file of JSON lines, one per message.

Fields: topic, partition, offset, key, value (text or null), timestamp. Bytes that are not text come
as `key_base64` and `value_base64`. The output of `kcat -J` (payload, ts) is accepted as well.

Next: operations/prove/verify_at.py checks captured messages.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from seriatim.engine.messages import CapturedMessage
from seriatim.engine.offsets import TOPIC_NAME, Partition
from seriatim.errors import ConfigError


def read_capture(path: Path) -> list[CapturedMessage]:
    """All messages of a capture, in the order of the file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"--capture {path}: {error.strerror}", next="give a file of JSON lines"
        ) from None
    messages = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            messages.append(_parse_line(path, number, line))
    return messages


def _parse_line(path: Path, number: int, line: bytes) -> CapturedMessage:
    try:
        fields = json.loads(line)
        topic = fields["topic"]
        partition = int(fields["partition"])
        offset = int(fields["offset"])
        if not TOPIC_NAME.fullmatch(topic) or partition < 0 or offset < 0:
            raise ValueError("topic, partition or offset is none")
        timestamp = fields.get("timestamp", fields.get("ts"))
        value_name = "payload" if "payload" in fields else "value"
        return CapturedMessage(
            partition=Partition(topic, partition),
            offset=offset,
            key=_decode_bytes(fields, "key"),
            value=_decode_bytes(fields, value_name),
            timestamp=timestamp if isinstance(timestamp, int) else 0,
        )
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ConfigError(
            f"{path.name}:{number}: not a captured message: {type(error).__name__}: {error}",
            allowed='{"topic": "a", "partition": 0, "offset": 7, "key": "s", "value": "…", "timestamp": 0}',
            next="bytes that are no text go into key_base64 and value_base64",
        ) from None


def _decode_bytes(fields: dict[str, Any], name: str) -> bytes | None:
    """The bytes of a key or value: from base64, from text, or None for null."""
    if f"{name}_base64" in fields:
        return base64.b64decode(fields[f"{name}_base64"], validate=True)
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be text or null")
    return None if value is None else value.encode()
