"""The sessions of one task in columns, so that a message costs the same in few and in many sessions.

The plain fold has an object for each session. While compiled code folds, what changes with every
message is in columns over all sessions, and the objects may be outdated. `TaskSessions.write` brings
an object up to date before the plain fold sees it, and `read` takes over what the plain fold has made
of it.

Next: fold.py has such a table; rows.py folds with its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from seriatim.engine.messages import MessageBatch
from seriatim.engine.row_parts import StoredRows
from seriatim.engine.rules import fingerprint, is_in_doubt
from seriatim.engine.session import Session
from seriatim.engine.table import stored_rows_of
from seriatim.fast.compiled import Array
from seriatim.fast.rows import SessionColumns
from seriatim.fast.table import ArenaSlot, CompiledTable

SNAPSHOT_TIME = 2
"""The column of `SessionColumns.distances` with the time of the snapshot."""


class TaskSessions:
    """All sessions that the compiled fold has met, by number."""

    def __init__(self, runner: CompiledTable, headless_since: int) -> None:
        self.runner = runner
        self.headless_since = headless_since
        self.sessions: list[Session] = []
        """The object of each session."""
        self.number_by_name: dict[str, int] = {}
        self.columns = _empty_columns(1_024)
        self._numbers_with_stored_rows: set[int] = set()
        """The sessions that were stored row by row when they were added."""

    def numbers_of(self, names: Sequence[str | None], sessions: Mapping[str, Session]) -> list[int]:
        """The number of each name; -1 for None. Sessions that were not met before are added."""
        number_by_name = self.number_by_name
        new_names = [name for name in names if name is not None and name not in number_by_name]
        if new_names:
            first = len(self.sessions)
            number_by_name.update(zip(new_names, range(first, first + len(new_names)), strict=True))
            self._add([sessions[name] for name in new_names])
        return [-1 if name is None else number_by_name[name] for name in names]

    def _add(self, sessions: list[Session]) -> None:
        """Add sessions by their objects. States of stored ones are loaded, all at once; rows that are
        stored by themselves are not.
        """
        first = len(self.sessions)
        count = len(sessions)
        self.sessions += sessions
        self.columns = _with_capacity(self.columns, first + count)
        self._load_states(sessions)
        for number, session in enumerate(sessions, first):
            if stored_rows_of(session) is not None:
                self._numbers_with_stored_rows.add(number)
            if session.is_active and isinstance(session.state, dict):
                session.state = self.runner.move_into_arena(session.state)
        added = slice(first, first + count)
        self._set_columns(added, sessions)
        # Sessions that may begin get an empty slot each.
        is_new = np.array(list(map(_is_new, sessions)), np.bool_)
        new_count = int(is_new.sum())
        if new_count:
            first_slot = self.runner.reserve_slots(new_count)
            free_slots = np.arange(first_slot, first_slot + new_count)
            self.columns.free_slots[added][is_new] = free_slots

    def _set_columns(self, added: slice, sessions: Sequence[Session]) -> None:
        """Set these lines of the columns by the objects of their sessions."""
        columns = self.columns
        columns.slots[added] = list(map(_slot_of, sessions))
        columns.free_slots[added] = -1
        columns.begin_positions[added] = -1
        columns.sequences[added] = [session.sequence or 0 for session in sessions]
        columns.has_sequence[added] = [session.sequence is not None for session in sessions]
        columns.is_active[added] = [session.is_active for session in sessions]
        distances = columns.distances[added]
        distances[:, 0] = [session.messages_since_snapshot for session in sessions]
        distances[:, 1] = [session.snapshot_distance_ms for session in sessions]
        distances[:, SNAPSHOT_TIME] = [session.snapshot_timestamp for session in sessions]
        columns.last_offsets[added] = [session.last_offset for session in sessions]
        columns.timestamps[added] = [session.timestamp for session in sessions]
        columns.is_touched[added] = [session.is_touched for session in sessions]

    def _load_states(self, sessions: Sequence[Session]) -> None:
        """Load the states of stored sessions that any next message would make active."""
        stored = [session for session in sessions if self._goes_on(session)]
        if not stored:
            return
        states = [session.state_bytes or b"" for session in stored]
        for session, slot in zip(stored, self.runner.load_sessions(states), strict=True):
            if slot >= 0:
                session.set_decoded_state(ArenaSlot(slot))
                session.is_active = True

    def find_stored_rows(self, numbers: Iterable[int]) -> dict[int, StoredRows]:
        """The stored rows of those of these sessions that are stored row by row, and whose rows were not
        all read.
        """
        stored_by_number = {}
        for number in self._numbers_with_stored_rows.intersection(numbers):
            stored_rows = stored_rows_of(self.sessions[number])
            if stored_rows is not None:
                stored_by_number[number] = stored_rows
        return stored_by_number

    def _goes_on(self, session: Session) -> bool:
        """Whether a stored session becomes active with its next message, whatever that is."""
        return (
            session.state_bytes is not None
            and session.state is None
            and session.state_version == self.runner.state_version
            and session.finding is None
            and not session.waiting_messages
            and not session.is_undoable
            and session.first_offset >= 0
            and not is_in_doubt(session, self.headless_since)
        )

    def read(self, number: int) -> None:
        """Take over what the plain fold has made of a session."""
        session = self.sessions[number]
        columns = self.columns
        columns.slots[number] = _slot_of(session)
        if not _is_new(session):
            columns.free_slots[number] = -1
        columns.sequences[number] = session.sequence or 0
        columns.has_sequence[number] = session.sequence is not None
        columns.is_active[number] = session.is_active
        columns.distances[number] = (
            session.messages_since_snapshot,
            session.snapshot_distance_ms,
            session.snapshot_timestamp,
        )
        columns.last_offsets[number] = session.last_offset
        columns.timestamps[number] = session.timestamp
        columns.is_touched[number] = session.is_touched

    def write(self, numbers: Sequence[int]) -> None:
        """Bring the objects of sessions up to date, which compiled code has begun already."""
        columns = self.columns
        has_sequence_field = self.runner.field_layout.has_sequence
        chosen = np.array(numbers, np.int64)
        is_sequence_known = (columns.slots[chosen] >= 0) & columns.has_sequence[chosen]
        is_sequence_known &= has_sequence_field
        values = zip(
            map(self.sessions.__getitem__, numbers),
            is_sequence_known.tolist(),
            columns.sequences[chosen].tolist(),
            columns.distances[chosen].tolist(),
            columns.last_offsets[chosen].tolist(),
            columns.timestamps[chosen].tolist(),
            columns.is_touched[chosen].tolist(),
            strict=True,
        )
        for session, is_known, sequence, distances, last_offset, timestamp, is_touched in values:
            if is_known:
                session.sequence = sequence
            session.messages_since_snapshot = distances[0]
            session.snapshot_distance_ms = distances[1]
            session.snapshot_timestamp = distances[SNAPSHOT_TIME]
            session.last_offset = last_offset
            session.timestamp = timestamp
            session.is_touched = is_touched

    def write_all(self) -> None:
        """Bring the objects of all sessions up to date. Only those that were touched can differ."""
        self.write(np.flatnonzero(self.columns.is_touched[: len(self.sessions)]).tolist())

    def begin_objects(
        self,
        numbers: Sequence[int],
        batch: MessageBatch,
        values: pa.Array,
        sequences: Array,
    ) -> list[int]:
        """Let objects know that compiled code has begun their sessions with a snapshot of this batch;
        the positions of these snapshots. It does what `Fold` does at the first message of a session,
        if that is a snapshot. `values` and `sequences` are those of all messages of the batch.
        """
        columns = self.columns
        chosen = np.array(numbers, np.int64)
        chosen = chosen[columns.begin_positions[chosen] >= 0]
        positions: list[int] = columns.begin_positions[chosen].tolist()
        columns.begin_positions[chosen] = -1
        has_sequence = self.runner.field_layout.has_sequence
        state_version = self.runner.state_version
        snapshots = zip(
            map(self.sessions.__getitem__, chosen.tolist()),
            positions,
            columns.slots[chosen].tolist(),
            sequences[positions].tolist(),
            values.take(pa.array(positions, pa.int64())).to_pylist(),
            strict=True,
        )
        for session, position, slot, sequence, value in snapshots:
            session.state = ArenaSlot(slot)
            session.state_version = state_version
            session.is_active = True
            session.first_offset = session.snapshot_offset = batch.start + position
            if has_sequence:
                session.sequence = session.snapshot_sequence = sequence
                session.snapshot_fingerprint = fingerprint(value)
        return positions


def _slot_of(session: Session) -> int:
    """The slot in which compiled code finds the rows of a session; -1 if it must not."""
    if session.is_active and session.state.__class__ is ArenaSlot:
        number: int = session.state.number
        return number
    return -1


def _is_new(session: Session) -> bool:
    """Whether a session has had no message yet that had an effect on it."""
    return (
        session.last_offset < 0
        and not session.is_active
        and not session.has_state
        and session.finding is None
        and session.sequence is None
        and session.damaged_since_offset < 0
        and not session.waiting_messages
    )


def _empty_columns(capacity: int) -> SessionColumns:
    return SessionColumns(
        slots=np.empty(capacity, np.int64),
        free_slots=np.empty(capacity, np.int64),
        begin_positions=np.empty(capacity, np.int64),
        sequences=np.empty(capacity, np.int64),
        has_sequence=np.empty(capacity, np.bool_),
        is_active=np.empty(capacity, np.bool_),
        distances=np.empty((capacity, 3), np.int64),
        last_offsets=np.empty(capacity, np.int64),
        timestamps=np.empty(capacity, np.int64),
        is_touched=np.empty(capacity, np.bool_),
    )


def _with_capacity(columns: SessionColumns, count: int) -> SessionColumns:
    """The same columns for at least so many sessions; they at least double, so that copying stays
    cheap.
    """
    capacity: Array = len(columns.slots)
    if count <= capacity:
        return columns
    grown = _empty_columns(max(count, 2 * capacity))
    for new, old in zip(grown, columns, strict=True):
        new[:capacity] = old
    return grown
