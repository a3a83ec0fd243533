"""The compiled fold: usual messages by compiled code, the others one by one, as engine/fold.py does.

A batch with too many unusual messages is folded by the plain fold. The sessions' rows leave the arena
then, and do not come back in this task.

Next: sessions.py has the sessions in columns; columns.py makes Arrow columns of the records;
storage/record_files.py writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch, session_name_of_key
from seriatim.engine.row_parts import StoredRows
from seriatim.engine.session import ColumnarRecords, FoldOutput, Session, SessionsByName
from seriatim.errors import ensure
from seriatim.fast.columns import parse_values, to_columnar_records
from seriatim.fast.compiled import Array, compiled, int64
from seriatim.fast.packed_state import find_unread_keys, packed_key_bound
from seriatim.fast.parse import SNAPSHOT, UNSURE
from seriatim.fast.rows import RecordBuffers, fold_usual_messages
from seriatim.fast.sessions import TaskSessions
from seriatim.fast.table import ArenaSlot, CompiledTable


class CompiledFold(Fold):
    """The fold of one partition with a `CompiledTable`.

    It overrides the steps of `Fold.fold_batch` that look at every message; `_compiled_batch` is the
    batch under way, or None if it goes through the plain fold.
    """

    unusual_max = 1 / 8
    """With a larger share of unusual messages the plain fold is faster."""
    runner: CompiledTable
    _compiled_batch: CompiledBatch | None = None
    _task_sessions: TaskSessions | None = None
    _is_arena_abandoned = False

    def fold_batch(self, batch: MessageBatch) -> FoldOutput:
        """Fold messages in order until the end or a halt; `consumed_messages` says how many."""
        output = super().fold_batch(batch)
        compiled_batch = self._compiled_batch
        if compiled_batch is not None:
            records = compiled_batch.columnar_records()
            output.columnar_records = records
            if records is not None:
                self.counts.records += len(records.positions)
            if compiled_batch.refused_count > self.unusual_max * len(batch):
                self._move_rows_out_of_arena()
            self._compiled_batch = None
        self.runner.repack_heap()
        return output

    def _decode(self, batch: MessageBatch) -> Any:
        self._compiled_batch = self._parse_if_usual(batch)
        if self._compiled_batch is not None:
            return self._compiled_batch
        self._move_rows_out_of_arena()
        return super()._decode(batch)

    def _parse_if_usual(self, batch: MessageBatch) -> CompiledBatch | None:
        """The batch, parsed by compiled code; None if the plain fold must take it, or is faster."""
        # 1. Rules that compiled code does not know.
        if self.window is not None or self.expiry is not None:
            return None
        if self.session_filter is not None or self.has_session_field or self.undoable:
            return None
        if self._is_arena_abandoned:
            return None
        # 2. Only messages in Arrow columns can be parsed.
        record_batch = getattr(batch, "record_batch", None)
        if record_batch is None or len(batch) == 0:
            return None
        # 3. Many unusual messages cost more than they gain.
        names = BatchSessionNames(record_batch.column("key"))
        compiled_batch = CompiledBatch(self.runner, names, batch, record_batch.column("value"))
        if compiled_batch.unusual_share > self.unusual_max:
            return None
        return compiled_batch

    def _move_rows_out_of_arena(self) -> None:
        """Take all rows out of the arena. Moving to and fro would cost more than it gains, so rows
        that were in the arena do not come back in this task.
        """
        self._write_sessions()
        self._task_sessions = None
        for session in self.sessions.values():
            if session.state.__class__ is ArenaSlot:
                session.state = self.runner.to_plain_rows(session.state)
                self._is_arena_abandoned = True
        self.runner.uses_arena = False

    def _session_names(self, batch: MessageBatch, messages: Any) -> Any:
        if self._compiled_batch is None:
            return super()._session_names(batch, messages)
        return self._compiled_batch.names

    def _load_new_sessions(self, names: Any) -> None:
        if self._compiled_batch is None:
            super()._load_new_sessions(names)
            return
        self.runner.uses_arena = True
        super()._load_new_sessions(self._compiled_batch.names.distinct)
        if self._task_sessions is None:
            self._task_sessions = TaskSessions(self.runner, self.headless_since)
        self._compiled_batch.set_sessions(self._task_sessions, self.sessions)

    def _read_stored_rows(self, names: Any, messages: Any) -> None:
        if self._compiled_batch is None:
            super()._read_stored_rows(names, messages)
            return
        self._compiled_batch.read_stored_rows()

    def _mark_touched(self, names: Any, consumed: int) -> None:
        compiled_batch = self._compiled_batch
        if compiled_batch is None:
            super()._mark_touched(names, consumed)
            return
        # 1. The sessions that compiled code has begun.
        self._add_begun_sessions(compiled_batch)
        # 2. Where each session was last met.
        if self._skipped_positions:
            table = compiled_batch.table
            table.write(compiled_batch.distinct_numbers)
            super()._mark_touched(list(names), consumed)
            for number in compiled_batch.distinct_numbers:
                table.read(number)
            return
        columns = compiled_batch.table.columns
        mark_touched_sessions(
            compiled_batch.session_numbers[:consumed],
            np.asarray(self._batch.timestamps),
            self._batch.start,
            columns.is_active,
            columns.last_offsets,
            columns.timestamps,
            columns.is_touched,
        )

    def _add_begun_sessions(self, compiled_batch: CompiledBatch) -> None:
        """Note and count the snapshots with which compiled code has begun sessions."""
        compiled_batch.begin_objects(compiled_batch.distinct_numbers)
        positions = sorted(compiled_batch.begin_positions)
        if not positions:
            return
        self._snapshot_positions += positions
        counts = self.counts
        counts.snapshots += len(positions)
        counts.last_snapshot = max(counts.last_snapshot, self._batch.start + positions[-1])
        first_offset = self._batch.start + positions[0]
        if counts.first_snapshot < 0 or first_offset < counts.first_snapshot:
            counts.first_snapshot = first_offset

    def _measure_distance(self, batch: MessageBatch, names: Any, consumed: int) -> None:
        compiled_batch = self._compiled_batch
        if compiled_batch is None:
            super()._measure_distance(batch, names, consumed)
            return
        table = compiled_batch.table
        if self._ended_positions or self.limits.distance_ms:
            table.write(compiled_batch.distinct_numbers)
            super()._measure_distance(batch, list(names), consumed)
            for number in compiled_batch.distinct_numbers:
                table.read(number)
            return
        is_snapshot = np.zeros(len(batch), np.bool_)
        is_snapshot[self._snapshot_positions] = True
        most_messages, longest_ms = measure_snapshot_distances(
            compiled_batch.session_numbers[:consumed],
            np.asarray(batch.timestamps),
            is_snapshot,
            table.columns.distances,
            table.columns.is_touched,
        )
        self.counts.distance_messages = max(self.counts.distance_messages, most_messages)
        self.counts.distance_ms = max(self.counts.distance_ms, longest_ms)

    def touched_sessions(self) -> SessionsByName:
        """Sessions to be saved, with their state as bytes or what changed of their rows. Of the sessions
        in the arena, all that are stored as one value are packed at once.
        """
        self._write_sessions()
        sessions = []
        for session in self.sessions.values():
            if session.is_touched and session.state.__class__ is ArenaSlot:
                sessions.append(session)
        states = self.runner.dump_sessions([session.state for session in sessions])
        for session, state_bytes in zip(sessions, states, strict=True):
            if state_bytes is not None:
                session.store_as_one_value(state_bytes)
        return super().touched_sessions()

    def _write_sessions(self) -> None:
        """Bring the objects of all sessions up to date."""
        if self._task_sessions is not None:
            self._task_sessions.write_all()


class BatchSessionNames:
    """The session of each message of a batch, as a code; every name is held once."""

    def __init__(self, keys: pa.Array) -> None:
        encoded = keys.dictionary_encode()
        self.distinct = _names_of_keys(encoded.dictionary)
        codes = encoded.indices.fill_null(-1) if encoded.null_count else encoded.indices
        self.codes: Array = codes.to_numpy(zero_copy_only=False).astype(np.int64)
        """Positions in `distinct`; -1: the message has no session."""
        nameless = [code for code, name in enumerate(self.distinct) if name is None]
        if nameless:
            self.codes[np.isin(self.codes, nameless)] = -1

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, i: int) -> str | None:
        return self._name_of(self.codes[i])

    def __iter__(self) -> Iterator[str | None]:
        return map(self._name_of, self.codes.tolist())

    def _name_of(self, code: int) -> str | None:
        return None if code < 0 else self.distinct[code]

    def last_positions(self, count: int) -> Array:
        """Each name's last position among the first `count` messages; -1: none."""
        # Messages without a session have the code -1, so they fall on one entry more at the end.
        positions = np.full(len(self.distinct) + 1, -1, np.int64)
        positions[self.codes[:count]] = np.arange(count)
        return positions[:-1]


def _names_of_keys(keys: pa.Array) -> list[str | None]:
    try:
        # Arrow decodes all at once, if all are UTF-8.
        names: list[str | None] = keys.cast(pa.string()).to_pylist()
    except pa.ArrowInvalid:
        names = [session_name_of_key(key) for key in keys.to_pylist()]
    return names


class CompiledBatch:
    """The messages of a batch, parsed by compiled code.

    It stands in for the list of decoded messages: a single message is decoded by msgspec when the
    plain fold asks for it.
    """

    def __init__(
        self,
        runner: CompiledTable,
        names: BatchSessionNames,
        batch: MessageBatch,
        values: pa.Array,
    ) -> None:
        self.runner = runner
        self.names = names
        self.batch = batch
        self._values = values
        self.sequences = LazySequences(self)
        self._decoded_by_position: dict[int, Any] = {}
        parsed_values = parse_values(values, runner.field_layout)
        self.data, self.edges, self.parsed, self._snapshots, self._rows = parsed_values
        self.begin_positions: list[int] = []
        """The positions of snapshots with which compiled code has begun a session, in any order."""
        self._record_count = 0
        self.refused_count = 0
        """Messages that were parsed, and then refused: the rows or the sequence contradict them."""
        width = len(runner.columns) - 1  # without the operation
        row_count = len(self._rows.kinds)
        count = len(names) + row_count
        self._record_count_max = count
        self._records = RecordBuffers(
            positions=np.empty(count, np.int64),
            indexes=np.empty(count, np.int64),
            operations=np.empty(count, np.int8),
            cells=np.empty((width, count), np.int64),
            sizes=np.empty((width, count), np.int32),
        )

    @property
    def unusual_share(self) -> float:
        """The share of messages that were not parsed: between 0 and 1."""
        is_parsed = self.parsed.kinds > SNAPSHOT
        is_parsed |= (self.parsed.kinds == SNAPSHOT) & (self._snapshots.row_counts >= 0)
        return 1.0 - float(np.mean(is_parsed))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Any:
        if i not in self._decoded_by_position:
            (message,) = self.runner.decode([self._values[i].as_py()])
            self._decoded_by_position[i] = message
        return self._decoded_by_position[i]

    def __setitem__(self, i: int, message: Any) -> None:
        self._decoded_by_position[i] = message
        self.parsed.kinds[i] = UNSURE

    def set_sessions(self, table: TaskSessions, sessions: Mapping[str, Session]) -> None:
        """Set the table that has the sessions of the batch. Those that it lacks are added."""
        self.table = table
        numbers = table.numbers_of(self.names.distinct, sessions)
        self.distinct_numbers = [number for number in numbers if number >= 0]
        # A message without a session has the code -1, which is the last entry here.
        self.session_numbers: Array = np.array([*numbers, -1], np.int64)[self.names.codes]

    def begin_objects(self, numbers: Sequence[int]) -> None:
        """Let the objects of sessions know that compiled code has begun them."""
        self.begin_positions += self.table.begin_objects(
            numbers, self.batch, self._values, self.parsed.sequences
        )

    def read_stored_rows(self) -> None:
        """Read the rows that the messages name, of sessions that are stored row by row.

        1. Find these sessions.
        2. The keys of parsed messages, as far as their rows are not in the arena.
        3. The keys of messages that the plain machine will fold.
        4. Read, session by session. Rows of a session that is not active yet wait until it is.
        """
        # 1. The sessions.
        stored_by_number = self.table.find_stored_rows(self.distinct_numbers)
        if not stored_by_number:
            return
        # 2. Parsed messages.
        numbers, key_hashes = self._find_unread_keys(stored_by_number)
        # 3. Messages that were not parsed.
        other_hashes: dict[int, set[int]] = {number: set() for number in stored_by_number}
        for position in np.flatnonzero(self.parsed.kinds == UNSURE).tolist():
            number = int(self.session_numbers[position])
            if number in stored_by_number:
                other_hashes[number].update(self.runner.hashes_named_by(self[position]))
        # 4. Read.
        for number, stored_rows in stored_by_number.items():
            hashes_of_session = np.unique(key_hashes[numbers == number]).tolist()
            stored_rows.read(other_hashes[number].union(hashes_of_session))
            self.runner.take_read_rows(self.table.sessions[number].state)

    def _find_unread_keys(self, stored_by_number: Mapping[int, StoredRows]) -> tuple[Array, Array]:
        """The sessions and hashes of keys of parsed messages whose rows are not in the arena."""
        is_stored = np.zeros(len(self.table.sessions), np.bool_)
        is_stored[list(stored_by_number)] = True
        numbers = np.empty(len(self), np.int64)
        key_hashes = np.empty(len(self), np.uint64)
        count = find_unread_keys(
            self.runner.arena,
            self.data,
            self.parsed,
            self.session_numbers,
            self.table.columns.slots,
            is_stored,
            np.empty(packed_key_bound(self.runner.arena, self.parsed), np.uint8),
            numbers,
            key_hashes,
        )
        return numbers[:count], key_hashes[:count]

    def fold_usual(self, sessions: Mapping[str, Session]) -> Iterator[int]:
        """Fold the usual messages; gives the position of every other message at its turn.

        Compiled code folds as far as it can. The caller folds the message at which it stopped, and
        compiled code goes on behind it.
        """
        position = 0
        while True:
            remaining_bytes = int(self.edges[-1] - self.edges[position])
            row_count = len(self) - position + len(self._rows.kinds)
            self.runner.reserve_capacity(row_count, remaining_bytes)
            position, self._record_count = fold_usual_messages(
                self.runner.arena,
                self.data,
                self.parsed,
                self._snapshots,
                self._rows,
                self.session_numbers,
                self.table.columns,
                self.runner.field_layout.has_sequence,
                position,
                self._records,
                self._record_count,
            )
            if position == len(self):
                return
            number = int(self.session_numbers[position])
            if number < 0:
                yield position
            else:
                if self._is_refused(position, number):
                    self.refused_count += 1
                # The caller changes the session: it must know what compiled code has come to, and
                # compiled code must know afterwards what became of it.
                self.begin_objects([number])
                self.table.write([number])
                yield position
                self.table.read(number)
            position += 1

    def _is_refused(self, position: int, number: int) -> bool:
        """Whether a message was parsed, and compiled code did not fold it."""
        is_in_arena = self.table.columns.slots[number] >= 0
        is_parsed_snapshot = self._snapshots.row_counts[position] >= 0
        return bool(is_in_arena and (self.parsed.kinds[position] > SNAPSHOT or is_parsed_snapshot))

    def columnar_records(self) -> ColumnarRecords | None:
        """The records of compiled code, in columns; None if there are none."""
        count = self._record_count
        if count == 0:
            return None
        ensure(count <= self._record_count_max, "a message or a row of a snapshot gives one record")
        return to_columnar_records(self.runner, self.names, self.parsed, self._records, count)


class LazySequences:
    """The producer's counters of a batch, read from a message when they are asked for."""

    def __init__(self, messages: CompiledBatch) -> None:
        self._messages = messages
        self._has_sequence = messages.runner.field_layout.has_sequence

    def __getitem__(self, i: int) -> int | None:
        if not self._has_sequence:
            return None
        sequence: int | None = self._messages[i].sequence
        return sequence

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[int | None]:
        for i in range(len(self)):
            yield self[i]


@compiled
def mark_touched_sessions(
    session_numbers: Array,
    times: Array,
    first_offset: int,
    is_active: Array,
    last_offsets: Array,
    timestamps: Array,
    is_touched: Array,
) -> None:
    """Note in the columns of all sessions where each active one was last met."""
    for message in range(len(session_numbers)):
        number = session_numbers[message]
        if number >= 0 and is_active[number]:
            last_offsets[number] = first_offset + message
            timestamps[number] = times[message]
            is_touched[number] = True


@compiled
def measure_snapshot_distances(
    session_numbers: Array, times: Array, is_snapshot: Array, distances: Array, is_touched: Array
) -> tuple[int, int]:
    """How far messages are from their session's snapshot: (most messages, longest time in ms).

    `distances` and `is_touched` are columns of all sessions of the task.
    """
    most_messages = int64(0)
    longest_ms = int64(0)
    for message in range(len(session_numbers)):
        number = session_numbers[message]
        if number < 0:
            continue
        if is_snapshot[message]:
            distances[number, 0] = 0
            distances[number, 1] = 0
            distances[number, 2] = times[message]
        elif distances[number, 2] >= 0:
            distances[number, 0] += 1
            elapsed_ms = times[message] - distances[number, 2]
            distances[number, 1] = max(distances[number, 1], elapsed_ms)
            is_touched[number] = True
            most_messages = max(most_messages, distances[number, 0])
            longest_ms = max(longest_ms, distances[number, 1])
    return most_messages, longest_ms
