"""A raw capture: messages as somebody wrote them down, JSON lines, one per message.

Fields: topic, partition, offset, key, value (text, or null), timestamp; bytes that are no text come
as `key_base64` and `value_base64`. What `kcat -J` writes (payload, ts) is taken too.

Next room: operations/prove/verify_at.py judges what was captured.
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
    """All messages of a capture, in the order in which they are there."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"--capture {path}: {error.strerror}", next="give a file of JSON lines"
        ) from None
    return [_parse_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_line(path: Path, number: int, line: bytes) -> CapturedMessage:
    try:
        given = json.loads(line)
        topic, partition, offset = given["topic"], given["partition"], given["offset"]
        if not TOPIC_NAME.fullmatch(topic) or min(int(partition), int(offset)) < 0:
            raise ValueError("topic, partition or offset is none")
        timestamp = given.get("timestamp", given.get("ts"))
        return CapturedMessage(
            partition=Partition(topic, int(partition)),
            offset=int(offset),
            key=_decode_bytes(given, "key"),
            value=_decode_bytes(given, "value" if "payload" not in given else "payload"),
            timestamp=timestamp if isinstance(timestamp, int) else 0,
        )
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ConfigError(
            f"{path.name}:{number}: not a captured message: {type(error).__name__}: {error}",
            allowed='{"topic": "a", "partition": 0, "offset": 7, "key": "s", "value": "…", "timestamp": 0}',
            next="bytes that are no text go into key_base64 and value_base64",
        ) from None


def _decode_bytes(fields: dict[str, Any], name: str) -> bytes | None:
    if f"{name}_base64" in fields:
        return base64.b64decode(fields[f"{name}_base64"], validate=True)
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be text or null")
    return None if value is None else value.encode()
