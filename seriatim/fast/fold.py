"""The fold over whole stretches: usual messages in bulk, the others one by one, as engine/fold.py
does it.

A stretch with too much that is unusual, or with few messages per session, is folded the plain way;
then the sessions' rows leave the arena, and do not move to and fro.

Next room: columns.py makes Arrow columns of what was folded; storage/record_files.py writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch, session_name_of_key
from seriatim.engine.session import FoldOutput, Session
from seriatim.errors import ensure
from seriatim.fast.columns import parse_values, to_columnar_records
from seriatim.fast.compiled import Array, compiled, int64
from seriatim.fast.parse import SNAPSHOT, UNSURE
from seriatim.fast.rows import BulkRecords, BulkSessions, fold_usual_messages
from seriatim.fast.table import ArenaSlot, BulkTable


class BulkFold(Fold):
    """One partition's walk, with a `BulkTable`."""

    unusual_max, messages_per_session_min = 1 / 8, 3
    """Beyond these the plain way is faster."""
    runner: BulkTable
    _bulk_messages: BulkMessages | None = None
    _is_arena_abandoned = False

    def _decode(self, stretch: MessageBatch) -> Any:
        self._bulk_messages = None
        batch = getattr(stretch, "record_batch", None)
        alone = (
            not self.undoable
            and self.window is None
            and self.expiry is None
            and self.session_filter is None
        )
        if (
            batch is not None
            and alone
            and not self.has_session_field
            and not self._is_arena_abandoned
            and len(stretch)
        ):
            names = BulkSessionNames(batch.column("key"))
            if len(names) >= self.messages_per_session_min * len(names.distinct):
                messages = BulkMessages(self.runner, names, batch.column("value"))
                if messages.unusual_share <= self.unusual_max:
                    self._bulk_messages = messages
                    return messages
        self._move_rows_out_of_arena()
        return super()._decode(stretch)

    def _move_rows_out_of_arena(self) -> None:
        """Take all rows out of the arena. Rows that were in it once do not come back in this task."""
        for session in self.sessions.values():
            if session.state.__class__ is ArenaSlot:
                session.state = self.runner.to_plain_rows(session.state)
                self._is_arena_abandoned = True
        self.runner.uses_arena = False

    def _session_names(self, stretch: MessageBatch, messages: Any) -> Any:
        return (
            super()._session_names(stretch, messages)
            if self._bulk_messages is None
            else self._bulk_messages.names
        )

    def _load_new_sessions(self, names: Any) -> None:
        if self._bulk_messages is None:
            super()._load_new_sessions(names)
            return
        self.runner.uses_arena = True
        super()._load_new_sessions(self._bulk_messages.names.distinct)
        self._bulk_messages.register_sessions(self.sessions)

    def _mark_touched(self, names: Any, consumed: int) -> None:
        bulk = self._bulk_messages
        if bulk is None:
            super()._mark_touched(names, consumed)
            return
        bulk.write_sequences_to_sessions(self.sessions)
        if self._skipped_positions:
            super()._mark_touched(list(names), consumed)
            return
        last = bulk.names.last_positions(consumed)
        times = self._batch.timestamps
        for name, i in zip(bulk.names.distinct, last.tolist(), strict=True):
            session = self.sessions.get(name) if i >= 0 and name is not None else None
            if session is not None and session.is_active:
                session.is_touched = True
                session.last_offset, session.timestamp = self._batch.start + i, int(times[i])

    def _measure_distance(self, stretch: MessageBatch, names: Any, consumed: int) -> None:
        bulk = self._bulk_messages
        if bulk is None or self._ended_positions or self.limits.distance_ms:
            super()._measure_distance(stretch, list(names), consumed)
            return
        distinct = [
            self.sessions.get(name) if name is not None else None for name in bulk.names.distinct
        ]
        lines = [
            (s.messages_since_snapshot, s.snapshot_distance_ms, s.snapshot_timestamp)
            if s
            else (0, 0, -1)
            for s in distinct
        ]
        kept = np.array(lines, np.int64).reshape(-1, 3)
        anchored = np.zeros(len(stretch), np.bool_)
        anchored[self._snapshot_positions] = True
        noted = np.zeros(len(distinct), np.bool_)
        most, longest = measure_snapshot_distances(
            bulk.names.codes[:consumed], np.asarray(stretch.timestamps), anchored, kept, noted
        )
        for session, line, was_noted in zip(distinct, kept.tolist(), noted.tolist(), strict=True):
            if session is not None:
                (
                    session.messages_since_snapshot,
                    session.snapshot_distance_ms,
                    session.snapshot_timestamp,
                ) = line
                session.is_touched |= was_noted
        self.counts.distance_messages = max(self.counts.distance_messages, most)
        self.counts.distance_ms = max(self.counts.distance_ms, longest)

    def fold_batch(self, stretch: MessageBatch) -> FoldOutput:
        """Fold messages in order until the end or a halt; `consumed` says how many."""
        out = super().fold_batch(stretch)
        if self._bulk_messages is not None:
            out.columnar_records = self._bulk_messages.columnar_records()
            self.counts.records += (
                0 if out.columnar_records is None else len(out.columnar_records.positions)
            )
            if self._bulk_messages.refused_count > self.unusual_max * len(stretch):
                self._move_rows_out_of_arena()
            self._bulk_messages = None
        self.runner.repack_heap()
        return out


class BulkSessionNames:
    """The sessions' names of a stretch, each held once."""

    def __init__(self, keys: pa.Array) -> None:
        encoded = keys.dictionary_encode()
        self.distinct = [session_name_of_key(key) for key in encoded.dictionary.to_pylist()]
        codes = encoded.indices.fill_null(-1) if encoded.null_count else encoded.indices
        self.codes: Array = codes.to_numpy(zero_copy_only=False).astype(np.int64)
        nameless = [code for code, name in enumerate(self.distinct) if name is None]
        if nameless:
            self.codes[np.isin(self.codes, nameless)] = -1

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, i: int) -> str | None:
        code = self.codes[i]
        return None if code < 0 else self.distinct[code]

    def __iter__(self) -> Iterator[str | None]:
        return (None if code < 0 else self.distinct[code] for code in self.codes.tolist())

    def last_positions(self, count: int) -> Array:
        """Of each name, its last position among the first `count` messages; -1: none."""
        last = np.full(
            len(self.distinct) + 1, -1, np.int64
        )  # those without a name fall on the one more
        last[self.codes[:count]] = np.arange(count)
        return last[:-1]


class BulkMessages:
    """A stretch's messages, parsed in bulk; one of them is decoded when somebody asks for it."""

    def __init__(self, runner: BulkTable, names: BulkSessionNames, values: pa.Array) -> None:
        self.runner, self.names, self._values = runner, names, values
        self.sequences = BulkSequences(self)
        self._decoded_by_position: dict[int, Any] = {}
        self.data, self.edges, self.parsed = parse_values(values, runner.field_layout)
        self._record_count = 0
        self.refused_count = 0
        """Messages that looked usual, and were not: the rows or the sequence contradict them."""
        width, count = len(runner.columns) - 1, len(names)
        self._bulk_records = BulkRecords(
            np.empty(count, np.int64),
            np.empty(count, np.int8),
            np.empty((width, count), np.int64),
            np.empty((width, count), np.int32),
        )

    @property
    def unusual_share(self) -> float:
        """How much of it is not usual, by its looks."""
        return float(np.mean(self.parsed.kinds <= SNAPSHOT))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Any:
        if i not in self._decoded_by_position:
            (self._decoded_by_position[i],) = self.runner.decode([self._values[i].as_py()])
        return self._decoded_by_position[i]

    def __setitem__(self, i: int, message: Any) -> None:
        self._decoded_by_position[i] = message
        self.parsed.kinds[i] = UNSURE

    def register_sessions(self, sessions: Mapping[str, Session]) -> None:
        """Know the sessions of this stretch by number."""
        count = len(self.names.distinct)
        self._bulk_sessions = BulkSessions(
            self.names.codes,
            np.empty(count, np.int64),
            np.empty(count, np.int64),
            np.empty(count, np.bool_),
        )
        for code, name in enumerate(self.names.distinct):
            session = None if name is None else sessions[name]
            if session is not None and session.is_active and session.state.__class__ is dict:
                session.state = self.runner.move_into_arena(session.state)
            self._read_session(code, session)

    def _read_session(self, code: int, session: Session | None) -> None:
        uses_arena = (
            session is not None and session.is_active and session.state.__class__ is ArenaSlot
        )
        self._bulk_sessions.slots[code] = session.state.number if uses_arena and session else -1
        sequence = None if session is None else session.sequence
        self._bulk_sessions.sequences[code], self._bulk_sessions.has_sequence[code] = (
            sequence or 0,
            sequence is not None,
        )

    def fold_usual(self, sessions: Mapping[str, Session]) -> Iterator[int]:
        """Fold what is usual; gives the positions of the rest, each when it is its turn."""
        at, count = 0, len(self)
        while True:
            self.runner.reserve_capacity(count - at, int(self.edges[-1] - self.edges[at]))
            wanted = self.runner.field_layout
            at, self._record_count = fold_usual_messages(
                self.runner.arena,
                self.data,
                self.parsed,
                self._bulk_sessions,
                wanted.has_sequence,
                at,
                self._bulk_records,
                self._record_count,
            )
            if at == count:
                return
            code = int(self.names.codes[at])
            self.refused_count += (
                code >= 0
                and self._bulk_sessions.slots[code] >= 0
                and self.parsed.kinds[at] > SNAPSHOT
            )
            if code < 0:
                yield at
            else:
                session = sessions[self.names.distinct[code] or ""]
                self._write_sequence_to_session(code, session)
                yield at
                self._read_session(code, session)
            at += 1

    def _write_sequence_to_session(self, code: int, session: Session) -> None:
        if (
            self._bulk_sessions.slots[code] >= 0
            and self.runner.field_layout.has_sequence
            and self._bulk_sessions.has_sequence[code]
        ):
            session.sequence = int(self._bulk_sessions.sequences[code])

    def write_sequences_to_sessions(self, sessions: Mapping[str, Session]) -> None:
        """Let the sessions know their last sequence."""
        for code, name in enumerate(self.names.distinct):
            if name is not None:
                self._write_sequence_to_session(code, sessions[name])

    def columnar_records(self) -> Any:
        """What was folded in bulk, in columns."""
        made, count = self._bulk_records, self._record_count
        if count == 0:
            return None
        ensure(count <= len(self), "a usual message gives one record")
        return to_columnar_records(self.runner, self.names, self.parsed, made, count)


class BulkSequences:
    """The producer's counters, taken from messages when somebody asks."""

    def __init__(self, messages: BulkMessages) -> None:
        self._sample_messages = messages

    def __getitem__(self, i: int) -> int | None:
        return (
            self._sample_messages[i].sequence
            if self._sample_messages.runner.field_layout.has_sequence
            else None
        )

    def __len__(self) -> int:
        return len(self._sample_messages)

    def __iter__(self) -> Iterator[int | None]:
        return (self[i] for i in range(len(self)))


@compiled
def measure_snapshot_distances(
    codes: Array, times: Array, anchored: Array, distances: Array, is_changed: Array
) -> tuple[int, int]:
    """How far sessions are from their snapshots; `kept` has (messages since, longest time,
    snapshot's time) of each.

    The most messages and the longest time of all.
    """
    most, longest = int64(0), int64(0)
    for m in range(len(codes)):
        code = codes[m]
        if code < 0:
            continue
        if anchored[m]:
            distances[code, 0], distances[code, 1], distances[code, 2] = 0, 0, times[m]
        elif distances[code, 2] >= 0:
            distances[code, 0] += 1
            distances[code, 1] = max(distances[code, 1], times[m] - distances[code, 2])
            is_changed[code] = True
            most, longest = max(most, distances[code, 0]), max(longest, distances[code, 1])
    return most, longest
