"""Kinds of columns that can be folded in bulk, and whether a stream can be.

Next room: choose.py asks; parse.py and packed.py know them by number.
"""

from __future__ import annotations

from seriatim.stream import Stream

TEXT, INTEGER, FLOAT, BOOL = 0, 1, 2, 3
COLUMN_KINDS = {"string": TEXT, "int64": INTEGER, "float64": FLOAT, "bool": BOOL}


def can_fold_in_bulk(stream: Stream) -> bool:
    """Whether a stream's table can be folded in bulk: plain columns, sessions by key, and no field
    wanted twice.
    """
    table = stream.table
    if stream.machine != "table":
        return False
    fields = [
        table.type_field,
        table.rows_field,
        *([stream.sequence] if stream.sequence else []),
        *table.columns,
    ]
    plain = all(kind in COLUMN_KINDS for kind in table.columns.values())
    exact = all(
        table.columns[name] != "float64" for name in table.key
    )  # 0.0 and -0.0 are one key, and two numbers
    in_order = stream.limits.window is None and not stream.limits.timeout_ms
    return (
        plain
        and exact
        and in_order
        and stream.session_field is None
        and len(set(fields)) == len(fields)
    )
