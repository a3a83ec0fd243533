"""Fields: what data has, and how much of it there is. No attribute that is not declared as data is
ever touched.

Next room: expression.py asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

INSPECTED_VALUES_MAX = 200
"""Values of a mapping that are looked into for their own size."""


def get_field(value: Any, name: str) -> tuple[bool, Any]:
    """A field that data has, and whether it has it: of Structs and dataclasses what they declare,
    of mappings a key.
    """
    if isinstance(value, Mapping):
        return name in value, value.get(name)
    if name in declared_fields(value):
        return True, getattr(value, name, None)
    return (True, tag) if (tag := get_tag(value, name)) is not None else (False, None)


def get_tag(value: Any, name: str) -> str | int | None:
    """What tells a Struct from others of its union, as it was sent: `message.type`, though no field
    is declared so.
    """
    told = value.__struct_config__ if isinstance(value, Struct) else None
    return told.tag if told is not None and told.tag_field == name else None


def declared_fields(value: Any) -> Collection[str]:
    """The fields that a Struct or a dataclass declares."""
    if isinstance(value, Struct):
        return value.__struct_fields__
    fields: Collection[str] = getattr(type(value), "__dataclass_fields__", ())
    return fields


def work_size(value: Any) -> int:
    """How much work it is to go through it: text is compared many characters at a time."""
    if isinstance(value, str | bytes):
        return 1 + len(value) // 256
    return max(1, len(value)) if isinstance(value, Sequence | Mapping | set | frozenset) else 1


def count_parts(value: Any, depth: int = 3) -> int:
    """How many parts a value has, as far as a look at its fields tells."""
    if isinstance(value, str | bytes) or not depth:
        return 0
    count = len(value) if isinstance(value, Sequence | Mapping | set | frozenset) else 0
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values() if count <= INSPECTED_VALUES_MAX else ()
    else:
        parts = (getattr(value, name, None) for name in declared_fields(value))
    return count + sum(count_parts(part, depth - 1) for part in parts)
