"""State files: how many of them to merge when a new one is written. Log-structured, newest last.

A slice writes one new file with only the sessions that it touched. It merges the newest files into
it as long as they are no larger than what is written anyway. So each session is rewritten a
logarithmic number of times, and a slice that touches few sessions writes few.

Next: engine/task.py asks; storage/state_files.py writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.errors import ensure

STATE_FILES_MAX = 24
"""Opening more files than this would cost more than merging them."""


def merge_count(rows_per_file: Sequence[int], new_sessions: int) -> int:
    """How many of the newest files to merge into a file of `new_sessions` sessions. `rows_per_file`
    is in the order of the files, oldest first.
    """
    ensure(new_sessions > 0, "nothing to write")
    count = 0
    rows_to_write = new_sessions
    for rows in reversed(rows_per_file):
        if rows > rows_to_write:
            break
        rows_to_write += rows
        count += 1
    files_too_many = len(rows_per_file) + 1 - STATE_FILES_MAX
    return max(count, files_too_many)
