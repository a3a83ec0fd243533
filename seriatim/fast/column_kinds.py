"""Kinds of columns that the compiled fold knows, and whether a stream can use it.

Next: choose.py asks; parse.py and packed_state.py know the kinds by number.
"""

from __future__ import annotations

from seriatim.stream import Stream

TEXT, INTEGER, FLOAT, BOOL = 0, 1, 2, 3
COLUMN_KINDS = {"string": TEXT, "int64": INTEGER, "float64": FLOAT, "bool": BOOL}


def can_use_compiled_fold(stream: Stream) -> bool:
    """Whether a stream's table can be folded by compiled code.

    Its messages must be JSON, its columns of a known kind, its sessions named by the message key, its messages folded
    in the order in which they come, and no field of a message may mean two things.
    """
    if stream.decoder != "json":
        return False
    if stream.machine != "table" or stream.session != "key":
        return False
    if stream.limits.window is not None or stream.limits.timeout_ms:
        return False
    table = stream.table
    if any(kind not in COLUMN_KINDS for kind in table.columns.values()):
        return False
    # 0.0 and -0.0 are equal keys, but different bits, and compiled code compares bits.
    if any(table.columns[name] == "float64" for name in table.key):
        return False
    fields = [table.type_field, table.rows_field, *table.columns]
    for field in (stream.sequence, stream.before_field):
        if field:
            fields.append(field)
    return len(set(fields)) == len(fields)
