"""What scripts may rely on in the JSON of a command: keys, nesting, types, and values where they
are stable.

Texts for people become `<text>`, what depends on the machine or on a library becomes `<int>`,
`<number>` or `<str>`, and progress lines are left out: how many there are depends on the time that
a command takes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.golden.product import Answer

TEXTS = {
    "age",
    "because",
    "behind",
    "cause",
    "closes",
    "does",
    "expected",
    "fix",
    "found",
    "message",
    "next",
    "note",
    "poison",
    "text",
    "unasked",
    "way",
    "why",
}
"""Keys whose values are written for people: their wording may change."""
LISTS_OF_TEXTS = {"notes", "not_compared"}
UNSTABLE = {
    "approval",
    "bootstrap_servers",
    "bytes",
    "bytes_after",
    "data",
    "endpoint",
    "master",
    "messages_per_second",
    "peak_memory_bytes",
    "pid",
    "product",
    "sha256",
}
"""Keys whose values differ from machine to machine, or with the version of a library."""
PROGRESS = {"done", "total", "message"}
HEX = re.compile(r"\b[0-9a-f]{32,64}\b")


def shape(value: Any, folder: Path, key: str = "") -> Any:
    """A value as the golden files have it."""
    if isinstance(value, dict):
        # The facts of an error or a plan, and what two views have at an offset, are sentences under names of their own.
        sentences = "error" in value or key in ("views", "facts")
        return {
            name: shape(part, folder, "text" if sentences and is_text(part) else name)
            for name, part in value.items()
        }
    if isinstance(value, list):
        inner = "text" if key in LISTS_OF_TEXTS else key
        return [shape(part, folder, inner) for part in value]
    if key in UNSTABLE and value is not None:
        return f"<{type(value).__name__}>"
    if key in TEXTS and isinstance(value, str):
        return "<text>"
    if isinstance(value, str):
        return HEX.sub("<hex>", value.replace(str(folder), "<folder>"))
    return value


def is_text(value: Any) -> bool:
    """Whether a value has more than one word."""
    return isinstance(value, str) and " " in value


def kinds(value: Any) -> Any:
    """The types of an object's values alone, for what differs from machine to machine."""
    return {name: f"<{type(part).__name__}>" for name, part in value.items()}


def answer_shape(words: Sequence[str], answer: Answer, folder: Path) -> dict[str, Any]:
    """A command, its exit code, and the objects on stdout and stderr."""
    told = [line for line in answer.told() if set(line) != PROGRESS]
    return {
        "command": " ".join(shape(word, folder) for word in words),
        "exit": answer.code,
        "stdout": [shape(line, folder) for line in answer.objects()],
        "stderr": [shape(line, folder) for line in told],
    }
