"""A part: the sessions of one helper, folded by the plain fold.

It sees some of the partition's messages, so it numbers them by itself, and gives real offsets back at the end.

Next room: __main__.py feeds it; core/fold.py does the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from seriatim.adapters.arrow import ArrowStretch
from seriatim.adapters.parquet import ParquetRecords
from seriatim.core.errors import ensure
from seriatim.core.fold import Fold
from seriatim.core.session import Counts, Folded, Session
from seriatim.ports import UnfitRecords
from seriatim.spread.pipes import BASE, End
from seriatim.steps.task import Kit, Work

OFFSETS = ("first_offset", "last_offset", "snapshot_offset")


class Part:
    """One helper's fold."""

    def __init__(self, work: Work, kit: Kit) -> None:
        ensure(isinstance(kit.records, ParquetRecords), "records become columns of Parquet")
        self.kit, self.count, self.over = kit, 0, False
        self.known: list[Any] = []
        """The real offsets of the messages so far."""
        self.core = Fold(
            work.partition,
            kit.runner,
            kit.tier,
            kit.on_poison,
            lambda names: kit.state.load(work.state, names),
            limits=kit.limits,
            time=work.time,
            headless_since=work.headless_since,
        )

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The records of these messages; None if something is not as usual."""
        if self.over:
            return None
        stretch = ArrowStretch(batch, BASE + self.count)
        folded = self.core.stretch(stretch)
        self.known.append(batch.column("offset").to_numpy())
        self.count += len(stretch)
        self.over = not self._is_clean(folded) or folded.consumed != len(stretch)
        try:
            return None if self.over else self._records(folded, batch.column("position").to_numpy())
        except UnfitRecords:
            self.over = True
            return None

    def end(self) -> End | None:
        """What is to be saved; None if something is not as usual."""
        touched = self.core.touched()
        if self.over or self.core.raised:
            return None
        known = np.concatenate(self.known) if self.known else np.zeros(0, np.int64)
        for session in touched.values():
            _give_back(session, OFFSETS, known)
            session.state = None
        counts = self.core.counts
        _give_back(counts, ("first_snapshot", "last_snapshot"), known)
        strangers = {name: _real(offset, known) for name, offset in self.core.strangers.items()}
        return End(counts, touched, strangers)

    def _is_clean(self, folded: Folded) -> bool:
        core = self.core
        trouble = core.halt or core.raised or core.tally.findings or core.tally.marks or folded.kept or folded.sources
        return not trouble and not core.counts.quarantined and not core.counts.released

    def _records(self, folded: Folded, positions: Any) -> pa.RecordBatch:
        records = self.kit.records
        assert isinstance(records, ParquetRecords)
        own = [
            pa.array(positions[np.asarray(folded.positions, np.int64)], pa.int64()),
            pa.array(folded.indexes, pa.int32()),
            pa.array(folded.sequences, pa.int64()),
            pa.array(folded.sessions, pa.string()),
        ]
        columns = [*own, *records.machine_columns(folded.rows)]
        return pa.RecordBatch.from_arrays(columns, names=[str(number) for number in range(len(columns))])


def _real(offset: int, known: Any) -> int:
    return int(known[offset - BASE]) if offset >= BASE else offset


def _give_back(owner: Session | Counts, names: tuple[str, ...], known: Any) -> None:
    for name in names:
        setattr(owner, name, _real(getattr(owner, name), known))
