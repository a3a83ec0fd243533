"""State files: how many to merge when a new one is written. Log-structured, newest last.

A slice writes only the sessions it touched, as one new file. It takes in the newest files as long
as they are no larger than what is being written anyway, so each session is rewritten a logarithmic
number of times, and a slice that touches few sessions writes few.

Next room: operations/run.py asks; storage/record_files.py writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.errors import ensure

STATE_FILES_MAX = 24
"""More files than this would cost more to open than to merge."""


def merge_count(rows_per_file: Sequence[int], new_sessions: int) -> int:
    """How many of the newest files (rows per file, oldest first) to merge into a file of `new`
    sessions.
    """
    ensure(new_sessions > 0, "nothing to write")
    count, written = 0, new_sessions
    while count < len(rows_per_file) and rows_per_file[-1 - count] <= written:
        written += rows_per_file[-1 - count]
        count += 1
    return max(count, len(rows_per_file) + 1 - STATE_FILES_MAX)
