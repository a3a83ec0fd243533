"""Fields of data: which fields a value has, and how large the value is.

Only what is declared as data is ever read, never another attribute of a Python object.

Next: operations/inspect/expression.py reads fields with these functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

INSPECTED_VALUES_MAX = 200
"""How many values a mapping may have for each of them to be counted as well."""


def get_field(value: Any, name: str) -> tuple[bool, Any]:
    """Whether data has a field, and the field's value.

    Structs and dataclasses have the fields that they declare, mappings have their keys.
    """
    if isinstance(value, Mapping):
        return name in value, value.get(name)
    if name in declared_fields(value):
        return True, getattr(value, name, None)
    tag = get_tag(value, name)
    return tag is not None, tag


def get_tag(value: Any, name: str) -> str | int | None:
    """The tag by which a Struct is told from others of its union, if `name` is its tag field.

    Messages are sent with it, as in `message.type`, although no field of that name is declared.
    """
    if not isinstance(value, Struct):
        return None
    config = value.__struct_config__
    if config.tag_field != name:
        return None
    return config.tag


def declared_fields(value: Any) -> Collection[str]:
    """The fields that a Struct or a dataclass declares; none of any other value."""
    if isinstance(value, Struct):
        return value.__struct_fields__
    fields: Collection[str] = getattr(type(value), "__dataclass_fields__", ())
    return fields


def work_size(value: Any) -> int:
    """How many steps it takes to go through a value. Text is compared many characters at a time."""
    if isinstance(value, str | bytes):
        return 1 + len(value) // 256
    return max(1, _length(value))


def count_parts(value: Any, depth: int = 3) -> int:
    """How many parts a value has, down to `depth` levels of fields.

    It is an estimate that is fast to make: elements of lists and of large mappings are counted,
    and not looked into.
    """
    if isinstance(value, str | bytes) or not depth:
        return 0
    count = _length(value)
    children: Iterable[Any] = ()
    if not isinstance(value, Mapping):
        children = [getattr(value, name, None) for name in declared_fields(value)]
    elif count <= INSPECTED_VALUES_MAX:
        children = value.values()
    for child in children:
        count += count_parts(child, depth - 1)
    return count


def _length(value: Any) -> int:
    """The length of a collection; 0 of anything else."""
    if isinstance(value, Sequence | Mapping | set | frozenset):
        return len(value)
    return 0
