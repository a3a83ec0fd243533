"""The compiled fold: usual messages by compiled code, the others one by one, as engine/fold.py does.

A batch with too many unusual messages, or with few messages per session, is folded by the plain
fold. The sessions' rows leave the arena then, and do not come back in this task.

Next: columns.py makes Arrow columns of the records; storage/record_files.py writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch, session_name_of_key
from seriatim.engine.row_parts import StoredRows
from seriatim.engine.session import ColumnarRecords, FoldOutput, Session
from seriatim.engine.table import stored_rows_of
from seriatim.errors import ensure
from seriatim.fast.columns import parse_values, to_columnar_records
from seriatim.fast.compiled import Array, compiled, int64
from seriatim.fast.packed_state import find_unread_keys, packed_key_bound
from seriatim.fast.parse import SNAPSHOT, UNSURE
from seriatim.fast.rows import RecordBuffers, SessionColumns, fold_usual_messages
from seriatim.fast.table import ArenaSlot, CompiledTable


class CompiledFold(Fold):
    """The fold of one partition with a `CompiledTable`.

    It overrides the steps of `Fold.fold_batch` that look at every message; `_compiled_batch` is the
    batch under way, or None if it goes through the plain fold.
    """

    unusual_max, messages_per_session_min = 1 / 8, 3
    """With more unusual messages, or fewer messages per session, the plain fold is faster."""
    runner: CompiledTable
    _compiled_batch: CompiledBatch | None = None
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
        # 3. Many sessions, or many unusual messages, cost more than they gain.
        names = BatchSessionNames(record_batch.column("key"))
        if len(names) < self.messages_per_session_min * len(names.distinct):
            return None
        compiled_batch = CompiledBatch(self.runner, names, record_batch.column("value"))
        if compiled_batch.unusual_share > self.unusual_max:
            return None
        return compiled_batch

    def _move_rows_out_of_arena(self) -> None:
        """Take all rows out of the arena. Moving to and fro would cost more than it gains, so rows
        that were in the arena do not come back in this task.
        """
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
        self._compiled_batch.register_sessions(self.sessions)

    def _read_stored_rows(self, names: Any, messages: Any) -> None:
        if self._compiled_batch is None:
            super()._read_stored_rows(names, messages)
            return
        self._compiled_batch.read_stored_rows(self.sessions)

    def _mark_touched(self, names: Any, consumed: int) -> None:
        compiled_batch = self._compiled_batch
        if compiled_batch is None:
            super()._mark_touched(names, consumed)
            return
        compiled_batch.write_sequences_to_sessions(self.sessions)
        if self._skipped_positions:
            super()._mark_touched(list(names), consumed)
            return
        batch = self._batch
        last_positions = compiled_batch.names.last_positions(consumed).tolist()
        for name, position in zip(compiled_batch.names.distinct, last_positions, strict=True):
            if position < 0 or name is None:
                continue
            session = self.sessions.get(name)
            if session is not None and session.is_active:
                session.is_touched = True
                session.last_offset = batch.start + position
                session.timestamp = int(batch.timestamps[position])

    def _measure_distance(self, batch: MessageBatch, names: Any, consumed: int) -> None:
        compiled_batch = self._compiled_batch
        if compiled_batch is None or self._ended_positions or self.limits.distance_ms:
            super()._measure_distance(batch, list(names), consumed)
            return
        # 1. The distances so far, one line per session.
        sessions = [self._session_or_none(name) for name in compiled_batch.names.distinct]
        distances = _distances_of(sessions)
        is_snapshot = np.zeros(len(batch), np.bool_)
        is_snapshot[self._snapshot_positions] = True
        is_changed = np.zeros(len(sessions), np.bool_)
        # 2. Walk through the messages.
        codes = compiled_batch.names.codes[:consumed]
        times = np.asarray(batch.timestamps)
        most_messages, longest_ms = measure_snapshot_distances(
            codes, times, is_snapshot, distances, is_changed
        )
        # 3. Write the distances back.
        for code, session in enumerate(sessions):
            if session is not None:
                session.messages_since_snapshot = int(distances[code, 0])
                session.snapshot_distance_ms = int(distances[code, 1])
                session.snapshot_timestamp = int(distances[code, 2])
                session.is_touched |= bool(is_changed[code])
        self.counts.distance_messages = max(self.counts.distance_messages, most_messages)
        self.counts.distance_ms = max(self.counts.distance_ms, longest_ms)

    def _session_or_none(self, name: str | None) -> Session | None:
        return None if name is None else self.sessions.get(name)


def _distances_of(sessions: list[Session | None]) -> Array:
    """One line per session: (messages since its snapshot, longest time since, snapshot's time)."""
    distances = np.zeros((len(sessions), 3), np.int64)
    for code, session in enumerate(sessions):
        if session is None:
            distances[code, 2] = -1
        else:
            distances[code, 0] = session.messages_since_snapshot
            distances[code, 1] = session.snapshot_distance_ms
            distances[code, 2] = session.snapshot_timestamp
    return distances


class BatchSessionNames:
    """The session of each message of a batch, as a code; every name is held once."""

    def __init__(self, keys: pa.Array) -> None:
        encoded = keys.dictionary_encode()
        self.distinct = [session_name_of_key(key) for key in encoded.dictionary.to_pylist()]
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


class CompiledBatch:
    """The messages of a batch, parsed by compiled code.

    It stands in for the list of decoded messages: a single message is decoded by msgspec when the
    plain fold asks for it.
    """

    def __init__(self, runner: CompiledTable, names: BatchSessionNames, values: pa.Array) -> None:
        self.runner = runner
        self.names = names
        self._values = values
        self.sequences = LazySequences(self)
        self._decoded_by_position: dict[int, Any] = {}
        self.data, self.edges, self.parsed = parse_values(values, runner.field_layout)
        self._record_count = 0
        self.refused_count = 0
        """Messages that were parsed, and then refused: the rows or the sequence contradict them."""
        width = len(runner.columns) - 1  # without the operation
        count = len(names)
        self._records = RecordBuffers(
            positions=np.empty(count, np.int64),
            operations=np.empty(count, np.int8),
            cells=np.empty((width, count), np.int64),
            sizes=np.empty((width, count), np.int32),
        )

    @property
    def unusual_share(self) -> float:
        """The share of snapshots and of messages that were not parsed: between 0 and 1."""
        return float(np.mean(self.parsed.kinds <= SNAPSHOT))

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

    def register_sessions(self, sessions: Mapping[str, Session]) -> None:
        """Copy what compiled code must know of the sessions into arrays, by their codes."""
        count = len(self.names.distinct)
        self._sessions = SessionColumns(
            session_codes=self.names.codes,
            slots=np.empty(count, np.int64),
            sequences=np.empty(count, np.int64),
            has_sequence=np.empty(count, np.bool_),
        )
        for code, name in enumerate(self.names.distinct):
            session = None if name is None else sessions[name]
            if session is not None and session.is_active and isinstance(session.state, dict):
                session.state = self.runner.move_into_arena(session.state)
            self._read_session(code, session)

    def _read_session(self, code: int, session: Session | None) -> None:
        """Copy a session's slot and sequence into the arrays."""
        slot = -1
        sequence = None
        if session is not None:
            sequence = session.sequence
            if session.is_active and session.state.__class__ is ArenaSlot:
                slot = session.state.number
        self._sessions.slots[code] = slot
        self._sessions.sequences[code] = sequence or 0
        self._sessions.has_sequence[code] = sequence is not None

    def read_stored_rows(self, sessions: Mapping[str, Session]) -> None:
        """Read the rows that the messages name, of sessions that are stored row by row.

        1. Find these sessions.
        2. The keys of parsed messages, as far as their rows are not in the arena.
        3. The keys of messages that the plain machine will fold.
        4. Read, session by session. Rows of a session that is not active yet wait until it is.
        """
        # 1. The sessions.
        stored_by_code: dict[int, StoredRows] = {}
        for code, name in enumerate(self.names.distinct):
            stored_rows = None if name is None else stored_rows_of(sessions[name])
            if stored_rows is not None:
                stored_by_code[code] = stored_rows
        if not stored_by_code:
            return
        # 2. Parsed messages.
        codes, key_hashes = self._find_unread_keys(list(stored_by_code))
        # 3. Messages that were not parsed.
        other_hashes: dict[int, set[int]] = {code: set() for code in stored_by_code}
        for position in np.flatnonzero(self.parsed.kinds == UNSURE).tolist():
            code = int(self.names.codes[position])
            if code in stored_by_code:
                other_hashes[code].update(self.runner.hashes_named_by(self[position]))
        # 4. Read.
        for code, stored_rows in stored_by_code.items():
            hashes_of_session = np.unique(key_hashes[codes == code]).tolist()
            stored_rows.read(other_hashes[code].union(hashes_of_session))
            session = sessions[self.names.distinct[code] or ""]
            self.runner.take_read_rows(session.state)

    def _find_unread_keys(self, stored_codes: list[int]) -> tuple[Array, Array]:
        """The sessions and hashes of keys of parsed messages whose rows are not in the arena."""
        is_stored = np.zeros(len(self.names.distinct), np.bool_)
        is_stored[stored_codes] = True
        codes = np.empty(len(self), np.int64)
        key_hashes = np.empty(len(self), np.uint64)
        count = find_unread_keys(
            self.runner.arena,
            self.data,
            self.parsed,
            self._sessions,
            is_stored,
            np.empty(packed_key_bound(self.runner.arena, self.parsed), np.uint8),
            codes,
            key_hashes,
        )
        return codes[:count], key_hashes[:count]

    def fold_usual(self, sessions: Mapping[str, Session]) -> Iterator[int]:
        """Fold the usual messages; gives the position of every other message at its turn.

        Compiled code folds as far as it can. The caller folds the message at which it stopped, and
        compiled code goes on behind it.
        """
        position = 0
        while True:
            remaining_bytes = int(self.edges[-1] - self.edges[position])
            self.runner.reserve_capacity(len(self) - position, remaining_bytes)
            position, self._record_count = fold_usual_messages(
                self.runner.arena,
                self.data,
                self.parsed,
                self._sessions,
                self.runner.field_layout.has_sequence,
                position,
                self._records,
                self._record_count,
            )
            if position == len(self):
                return
            code = int(self.names.codes[position])
            if code < 0:
                yield position
            else:
                if self._sessions.slots[code] >= 0 and self.parsed.kinds[position] > SNAPSHOT:
                    self.refused_count += 1
                # The caller changes the session: it must know the sequence that compiled code has
                # come to, and compiled code must know afterwards what became of it.
                session = sessions[self.names.distinct[code] or ""]
                self._write_sequence_to_session(code, session)
                yield position
                self._read_session(code, session)
            position += 1

    def _write_sequence_to_session(self, code: int, session: Session) -> None:
        in_arena = self._sessions.slots[code] >= 0
        has_sequence = self.runner.field_layout.has_sequence and self._sessions.has_sequence[code]
        if in_arena and has_sequence:
            session.sequence = int(self._sessions.sequences[code])

    def write_sequences_to_sessions(self, sessions: Mapping[str, Session]) -> None:
        """Write the last sequence of every session that compiled code folded into the session."""
        for code, name in enumerate(self.names.distinct):
            if name is not None:
                self._write_sequence_to_session(code, sessions[name])

    def columnar_records(self) -> ColumnarRecords | None:
        """The records of compiled code, in columns; None if there are none."""
        count = self._record_count
        if count == 0:
            return None
        ensure(count <= len(self), "a usual message gives one record")
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
def measure_snapshot_distances(
    codes: Array, times: Array, is_snapshot: Array, distances: Array, is_changed: Array
) -> tuple[int, int]:
    """How far messages are from their session's snapshot: (most messages, longest time in ms).

    `distances` has a line per session: (messages since its snapshot, longest time since, snapshot's
    time, or -1 before the first one).
    """
    most_messages = int64(0)
    longest_ms = int64(0)
    for message in range(len(codes)):
        code = codes[message]
        if code < 0:
            continue
        if is_snapshot[message]:
            distances[code, 0] = 0
            distances[code, 1] = 0
            distances[code, 2] = times[message]
        elif distances[code, 2] >= 0:
            distances[code, 0] += 1
            elapsed_ms = times[message] - distances[code, 2]
            distances[code, 1] = max(distances[code, 1], elapsed_ms)
            is_changed[code] = True
            most_messages = max(most_messages, distances[code, 0])
            longest_ms = max(longest_ms, distances[code, 1])
    return most_messages, longest_ms
