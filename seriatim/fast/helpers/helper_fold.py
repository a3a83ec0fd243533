"""A part: the sessions of one helper, folded by the plain fold.

It sees some of the partition's messages, so it numbers them by itself, and gives real offsets back
at the end.

Next room: __main__.py feeds it; engine/fold.py does the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from seriatim.engine.fold import Fold
from seriatim.engine.session import Counts, FoldOutput, Session
from seriatim.engine.task import PartitionWork, TaskContext
from seriatim.errors import ensure
from seriatim.fast.helpers.pipes import FIRST_HELPER_OFFSET, HelperResult
from seriatim.ports import UnfitRecordsError
from seriatim.storage.arrow import ArrowMessageBatch
from seriatim.storage.record_files import ParquetRecords

OFFSET_FIELDS = ("first_offset", "last_offset", "snapshot_offset")


class HelperFold:
    """One helper's fold."""

    def __init__(self, work: PartitionWork, kit: TaskContext) -> None:
        ensure(isinstance(kit.records, ParquetRecords), "records become columns of Parquet")
        self.kit, self.message_count, self.has_given_up = kit, 0, False
        self.real_offsets: list[Any] = []
        """The real offsets of the messages so far."""
        self.fold = Fold(
            work.partition,
            kit.runner,
            kit.tier,
            kit.on_poison,
            lambda names: kit.state.load(work.state, names),
            limits=kit.limits,
            message_time_ms=work.message_time_ms,
            headless_since=work.headless_since,
        )

    def fold_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The records of these messages; None if something is not as usual."""
        if self.has_given_up:
            return None
        stretch = ArrowMessageBatch(batch, FIRST_HELPER_OFFSET + self.message_count)
        folded = self.fold.fold_batch(stretch)
        self.real_offsets.append(batch.column("offset").to_numpy())
        self.message_count += len(stretch)
        self.has_given_up = not self._is_clean(folded) or folded.consumed_messages != len(stretch)
        try:
            return (
                None
                if self.has_given_up
                else self._record_columns(folded, batch.column("position").to_numpy())
            )
        except UnfitRecordsError:
            self.has_given_up = True
            return None

    def finish(self) -> HelperResult | None:
        """What is to be saved; None if something is not as usual."""
        touched = self.fold.touched_sessions()
        if self.has_given_up or self.fold.half_changed_sessions:
            return None
        known = np.concatenate(self.real_offsets) if self.real_offsets else np.zeros(0, np.int64)
        for session in touched.values():
            _restore_offsets(session, OFFSET_FIELDS, known)
            session.state = None
        counts = self.fold.counts
        _restore_offsets(counts, ("first_snapshot", "last_snapshot"), known)
        strangers = {
            name: _real_offset(offset, known)
            for name, offset in self.fold.sessions_without_state.items()
        }
        return HelperResult(counts, touched, strangers)

    def _is_clean(self, folded: FoldOutput) -> bool:
        core = self.fold
        trouble = (
            core.halt
            or core.half_changed_sessions
            or core.tally.findings
            or core.tally.marks
            or folded.quarantined_messages
            or folded.source_messages
        )
        return not trouble and not core.counts.quarantined and not core.counts.released

    def _record_columns(self, folded: FoldOutput, positions: Any) -> pa.RecordBatch:
        records = self.kit.records
        assert isinstance(records, ParquetRecords)
        own = [
            pa.array(positions[np.asarray(folded.positions, np.int64)], pa.int64()),
            pa.array(folded.indexes, pa.int32()),
            pa.array(folded.sequences, pa.int64()),
            pa.array(folded.sessions, pa.string()),
        ]
        columns = [*own, *records.machine_columns(folded.rows)]
        return pa.RecordBatch.from_arrays(
            columns, names=[str(number) for number in range(len(columns))]
        )


def _real_offset(offset: int, real_offsets: Any) -> int:
    return (
        int(real_offsets[offset - FIRST_HELPER_OFFSET]) if offset >= FIRST_HELPER_OFFSET else offset
    )


def _restore_offsets(owner: Session | Counts, names: tuple[str, ...], real_offsets: Any) -> None:
    for name in names:
        setattr(owner, name, _real_offset(getattr(owner, name), real_offsets))
