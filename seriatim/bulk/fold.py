"""The fold over whole stretches: usual messages in bulk, the others one by one, as core/fold.py does it.

A stretch with too much that is unusual, or with few messages per session, is folded the plain way; then the
sessions' rows leave the arena, and do not move to and fro.

Next room: columns.py makes Arrow columns of what was folded; adapters/parquet.py writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from seriatim.bulk.columns import gathered, parsed_values
from seriatim.bulk.compiled import Array, compiled, int64
from seriatim.bulk.parse import SNAPSHOT, UNSURE
from seriatim.bulk.rows import Made, Met, fold
from seriatim.bulk.table import BulkTable, Slot
from seriatim.core.errors import ensure
from seriatim.core.fold import Fold
from seriatim.core.message import Stretch, session_name
from seriatim.core.session import Folded, Session


class BulkFold(Fold):
    """One partition's walk, with a `BulkTable`."""

    unusual_max, messages_per_session_min = 1 / 8, 3
    """Beyond these the plain way is faster."""
    runner: BulkTable
    _bulk: Messages | None = None
    _plain_for_good = False

    def _decoded(self, stretch: Stretch) -> Any:
        self._bulk = None
        batch = getattr(stretch, "batch", None)
        alone = not self.careful and self.window is None and self.expiry is None and self.within is None
        if batch is not None and alone and not self.session_field and not self._plain_for_good and len(stretch):
            names = Names(batch.column("key"))
            if len(names) >= self.messages_per_session_min * len(names.distinct):
                messages = Messages(self.runner, names, batch.column("value"))
                if messages.unusual_share <= self.unusual_max:
                    self._bulk = messages
                    return messages
        self._leave_arena()
        return super()._decoded(stretch)

    def _leave_arena(self) -> None:
        """Take all rows out of the arena. Rows that were in it once do not come back in this task."""
        for session in self.sessions.values():
            if session.state.__class__ is Slot:
                session.state = self.runner.plain(session.state)
                self._plain_for_good = True
        self.runner.in_arena = False

    def _named(self, stretch: Stretch, messages: Any) -> Any:
        return super()._named(stretch, messages) if self._bulk is None else self._bulk.names

    def _meet(self, names: Any) -> None:
        if self._bulk is None:
            super()._meet(names)
            return
        self.runner.in_arena = True
        super()._meet(self._bulk.names.distinct)
        self._bulk.meet(self.sessions)

    def _touch(self, names: Any, consumed: int) -> None:
        bulk = self._bulk
        if bulk is None:
            super()._touch(names, consumed)
            return
        bulk.settle(self.sessions)
        if self._skipped:
            super()._touch(list(names), consumed)
            return
        last = bulk.names.last(consumed)
        times = self._stretch.timestamps
        for name, i in zip(bulk.names.distinct, last.tolist(), strict=True):
            session = self.sessions.get(name) if i >= 0 and name is not None else None
            if session is not None and session.awake:
                session.touched = True
                session.last_offset, session.timestamp = self._stretch.start + i, int(times[i])

    def _measure(self, stretch: Stretch, names: Any, consumed: int) -> None:
        bulk = self._bulk
        if bulk is None or self._gone or self.limits.distance_ms:
            super()._measure(stretch, list(names), consumed)
            return
        distinct = [self.sessions.get(name) if name is not None else None for name in bulk.names.distinct]
        lines = [(s.since_snapshot, s.reach_ms, s.snapshot_timestamp) if s else (0, 0, -1) for s in distinct]
        kept = np.array(lines, np.int64).reshape(-1, 3)
        anchored = np.zeros(len(stretch), np.bool_)
        anchored[self._anchored] = True
        noted = np.zeros(len(distinct), np.bool_)
        most, longest = measure(bulk.names.codes[:consumed], np.asarray(stretch.timestamps), anchored, kept, noted)
        for session, line, was_noted in zip(distinct, kept.tolist(), noted.tolist(), strict=True):
            if session is not None:
                session.since_snapshot, session.reach_ms, session.snapshot_timestamp = line
                session.touched |= was_noted
        self.counts.distance_messages = max(self.counts.distance_messages, most)
        self.counts.distance_ms = max(self.counts.distance_ms, longest)

    def stretch(self, stretch: Stretch) -> Folded:
        """Fold messages in order until the end or a halt; `consumed` says how many."""
        out = super().stretch(stretch)
        if self._bulk is not None:
            out.gathered = self._bulk.records()
            self.counts.records += 0 if out.gathered is None else len(out.gathered.positions)
            if self._bulk.refused > self.unusual_max * len(stretch):
                self._leave_arena()
            self._bulk = None
        self.runner.tidy()
        return out


class Names:
    """The sessions' names of a stretch, each held once."""

    def __init__(self, keys: pa.Array) -> None:
        encoded = keys.dictionary_encode()
        self.distinct = [session_name(key) for key in encoded.dictionary.to_pylist()]
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

    def last(self, count: int) -> Array:
        """Of each name, its last position among the first `count` messages; -1: none."""
        last = np.full(len(self.distinct) + 1, -1, np.int64)  # those without a name fall on the one more
        last[self.codes[:count]] = np.arange(count)
        return last[:-1]


class Messages:
    """A stretch's messages, parsed in bulk; one of them is decoded when somebody asks for it."""

    def __init__(self, runner: BulkTable, names: Names, values: pa.Array) -> None:
        self.runner, self.names, self._values = runner, names, values
        self.sequences = Sequences(self)
        self._decoded: dict[int, Any] = {}
        self.data, self.edges, self.parsed = parsed_values(values, runner.wanted)
        self._records = 0
        self.refused = 0
        """Messages that looked usual, and were not: the rows or the sequence contradict them."""
        width, count = len(runner.columns) - 1, len(names)
        self._made = Made(
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
        if i not in self._decoded:
            (self._decoded[i],) = self.runner.decode([self._values[i].as_py()])
        return self._decoded[i]

    def __setitem__(self, i: int, message: Any) -> None:
        self._decoded[i] = message
        self.parsed.kinds[i] = UNSURE

    def meet(self, sessions: Mapping[str, Session]) -> None:
        """Know the sessions of this stretch by number."""
        count = len(self.names.distinct)
        self._met = Met(
            self.names.codes, np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.bool_)
        )
        for code, name in enumerate(self.names.distinct):
            session = None if name is None else sessions[name]
            if session is not None and session.awake and session.state.__class__ is dict:
                session.state = self.runner.into_arena(session.state)
            self._know(code, session)

    def _know(self, code: int, session: Session | None) -> None:
        in_arena = session is not None and session.awake and session.state.__class__ is Slot
        self._met.slots[code] = session.state.number if in_arena and session else -1
        sequence = None if session is None else session.sequence
        self._met.sequences[code], self._met.has_sequence[code] = sequence or 0, sequence is not None

    def unusual(self, sessions: Mapping[str, Session]) -> Iterator[int]:
        """Fold what is usual; gives the positions of the rest, each when it is its turn."""
        at, count = 0, len(self)
        while True:
            self.runner.make_room(count - at, int(self.edges[-1] - self.edges[at]))
            wanted = self.runner.wanted
            at, self._records = fold(
                self.runner.arena, self.data, self.parsed, self._met, wanted.sequenced, at, self._made, self._records
            )
            if at == count:
                return
            code = int(self.names.codes[at])
            self.refused += code >= 0 and self._met.slots[code] >= 0 and self.parsed.kinds[at] > SNAPSHOT
            if code < 0:
                yield at
            else:
                session = sessions[self.names.distinct[code] or ""]
                self._tell(code, session)
                yield at
                self._know(code, session)
            at += 1

    def _tell(self, code: int, session: Session) -> None:
        if self._met.slots[code] >= 0 and self.runner.wanted.sequenced and self._met.has_sequence[code]:
            session.sequence = int(self._met.sequences[code])

    def settle(self, sessions: Mapping[str, Session]) -> None:
        """Let the sessions know their last sequence."""
        for code, name in enumerate(self.names.distinct):
            if name is not None:
                self._tell(code, sessions[name])

    def records(self) -> Any:
        """What was folded in bulk, in columns."""
        made, count = self._made, self._records
        if count == 0:
            return None
        ensure(count <= len(self), "a usual message gives one record")
        return gathered(self.runner, self.names, self.parsed, made, count)


class Sequences:
    """The producer's counters, taken from messages when somebody asks."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def __getitem__(self, i: int) -> int | None:
        return self._messages[i].sequence if self._messages.runner.wanted.sequenced else None

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[int | None]:
        return (self[i] for i in range(len(self)))


@compiled
def measure(codes: Array, times: Array, anchored: Array, kept: Array, noted: Array) -> tuple[int, int]:
    """How far sessions are from their snapshots; `kept` has (messages since, longest time, snapshot's time) of each.

    The most messages and the longest time of all.
    """
    most, longest = int64(0), int64(0)
    for m in range(len(codes)):
        code = codes[m]
        if code < 0:
            continue
        if anchored[m]:
            kept[code, 0], kept[code, 1], kept[code, 2] = 0, 0, times[m]
        elif kept[code, 2] >= 0:
            kept[code, 0] += 1
            kept[code, 1] = max(kept[code, 1], times[m] - kept[code, 2])
            noted[code] = True
            most, longest = max(most, kept[code, 0]), max(longest, kept[code, 1])
    return most, longest
