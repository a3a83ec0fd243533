"""The fold of one helper: its share of the partition's sessions, by the plain fold.

A helper has some of the partition's messages, so it numbers them without holes, and puts the real
offsets back at the end.

Next: __main__.py calls it; engine/fold.py does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from seriatim.engine.files import UnfitRecordsError
from seriatim.engine.fold import Fold
from seriatim.engine.session import STORED_FIELDS, Counts, FoldOutput, Session, pack_session
from seriatim.engine.task import PartitionWork, TaskContext
from seriatim.errors import ensure
from seriatim.fast.helpers.pipes import FIRST_HELPER_OFFSET, HelperResult
from seriatim.storage.arrow import ArrowMessageBatch
from seriatim.storage.record_files import ParquetRecords

SESSION_OFFSET_FIELDS = [name for name in STORED_FIELDS if name.endswith("_offset")]
COUNT_OFFSET_FIELDS = ("first_snapshot", "last_snapshot")


class HelperFold:
    """One helper's fold. It gives up at the first thing that is not clean."""

    def __init__(self, work: PartitionWork, task_context: TaskContext) -> None:
        records = task_context.records
        ensure(isinstance(records, ParquetRecords), "records become columns of Parquet")
        self.task_context = task_context
        self.message_count = 0
        self.has_given_up = False
        self.real_offsets: list[Any] = []
        """The real offsets of the messages so far, one array per batch."""
        self.fold = Fold(
            work.partition,
            task_context.runner,
            task_context.tier,
            task_context.on_poison,
            lambda names: task_context.state.load(work.state, names),
            limits=task_context.limits,
            message_time_ms=work.message_time_ms,
            headless_since=work.headless_since,
        )

    def fold_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The records of these messages; None if anything is not clean, now or before."""
        if self.has_given_up:
            return None
        first_offset = FIRST_HELPER_OFFSET + self.message_count
        messages = ArrowMessageBatch(batch, first_offset)
        output = self.fold.fold_batch(messages)
        self.real_offsets.append(batch.column("offset").to_numpy())
        self.message_count += len(messages)
        if not self._is_clean(output) or output.consumed_messages != len(messages):
            self.has_given_up = True
            return None
        positions = batch.column("position").to_numpy()
        try:
            return self._record_columns(output, positions)
        except UnfitRecordsError:
            self.has_given_up = True
            return None

    def finish(self) -> HelperResult | None:
        """What is to be saved; None if anything was not clean."""
        touched_sessions = self.fold.touched_sessions()
        if self.has_given_up or self.fold.half_changed_sessions:
            return None
        real_offsets = np.concatenate([np.zeros(0, np.int64), *self.real_offsets])
        packed_sessions: dict[str, bytes] = {}
        for name, session in touched_sessions.items():
            _restore_offsets(session, SESSION_OFFSET_FIELDS, real_offsets)
            session.join_rows()
            packed_sessions[name] = pack_session(session)
        counts = self.fold.counts
        _restore_offsets(counts, COUNT_OFFSET_FIELDS, real_offsets)
        sessions_without_state: dict[str, int] = {}
        for name, offset in self.fold.sessions_without_state.items():
            sessions_without_state[name] = _real_offset(offset, real_offsets)
        return HelperResult(counts, packed_sessions, sessions_without_state)

    def _is_clean(self, output: FoldOutput) -> bool:
        """Whether there is nothing but records: no finding, mark, halt or quarantined message."""
        fold = self.fold
        if fold.halt or fold.half_changed_sessions:
            return False
        if fold.tally.findings or fold.tally.marks:
            return False
        if output.quarantined_messages or output.source_messages:
            return False
        return not fold.counts.quarantined and not fold.counts.released

    def _record_columns(self, output: FoldOutput, positions: Any) -> pa.RecordBatch:
        """The records in columns: position in the task's batch, index, sequence, session, and the
        machine's columns.
        """
        records = self.task_context.records
        assert isinstance(records, ParquetRecords)
        record_positions = positions[np.asarray(output.positions, np.int64)]
        columns = [
            pa.array(record_positions, pa.int64()),
            pa.array(output.indexes, pa.int32()),
            pa.array(output.sequences, pa.int64()),
            pa.array(output.sessions, pa.string()),
            *records.machine_columns(output.rows),
        ]
        names = [str(number) for number in range(len(columns))]
        return pa.RecordBatch.from_arrays(columns, names=names)


def _real_offset(offset: int, real_offsets: Any) -> int:
    """The real offset of a message; one that is not the helper's own number stays as it is."""
    if offset < FIRST_HELPER_OFFSET:
        return offset
    return int(real_offsets[offset - FIRST_HELPER_OFFSET])


def _restore_offsets(owner: Session | Counts, names: Sequence[str], real_offsets: Any) -> None:
    for name in names:
        offset = getattr(owner, name)
        setattr(owner, name, _real_offset(offset, real_offsets))
