"""Great expectations: suites over committed record files and over evidence. In this process, without Spark.

Record files are read a stretch of rows at a time, only the columns that the suite looks at, and judged as pandas
frames: an expectation about all rows together (a mean, a count) is about such a stretch. The library takes seconds to
import and talks a lot, so it is imported when the first suite is judged, silenced before. An expectation that raises
does not raise here by itself: its trouble is looked for in every result.

Next room: core/check.py makes a verdict of what comes back.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seriatim.core.check import CheckBroken, Judgement
from seriatim.core.errors import ConfigError
from seriatim.core.evidence import Evidence
from seriatim.core.ledger import File
from seriatim.core.offsets import Partition
from seriatim.core.suite import Expectation, Suite
from seriatim.ports import Unreadable

ROWS_AT_ONCE = 250_000
EXAMPLES_MAX = 200
"""Rows that are not as expected, named by great-expectations; with more the whole stretch is to blame."""
PLACED = ("topic", "partition", "offset")
BROKEN = (OSError, pa.ArrowException, ValueError)
"""What reading a damaged file raises."""


class GreatExpectations:
    """Judges the record files of one stream, below its output path."""

    def __init__(self, root: Path, rows_at_once: int = ROWS_AT_ONCE) -> None:
        self.root, self.rows_at_once = root, rows_at_once

    def records(
        self, suite: Suite, partition: Partition, files: Sequence[File], since: Mapping[str, int]
    ) -> list[Judgement]:
        """Judge new records, stretch by stretch."""
        found: dict[int, Judgement] = {}
        for table, within in self._stretches(suite, partition, files, since):
            for number, judgement in self._validated(suite, partition, table, within):
                found[number] = _joined(found.get(number), judgement)
        return [found[number] for number in sorted(found)]

    def evidence(self, suite: Suite, rows: Sequence[Evidence]) -> list[Judgement]:
        """Judge evidence: all of it, and where that is not as expected, a partition at a time to see whose it is."""
        if not rows or not any(True for _ in self._validated(suite, rows[0].partition, _evidence(rows), ())):
            return []
        judged: list[Judgement] = []
        for partition in dict.fromkeys(row.partition for row in rows):
            mine = {row.promise: row for row in rows if row.partition == partition}
            for _, one in self._validated(suite, partition, _evidence(list(mine.values())), ()):
                promise = mine.get(str(one.expectation.meta.get("promise", "")))
                judged.append(one if promise is None else _about(one, promise))
        return judged

    def _stretches(
        self, suite: Suite, partition: Partition, files: Sequence[File], since: Mapping[str, int]
    ) -> Iterator[tuple[pa.Table, Sequence[File]]]:
        """New rows of files, joined to stretches of a good size."""
        waiting: list[tuple[File, pa.Table]] = []
        for file in files:
            for table in self._groups(suite, partition, file, since):
                if waiting and sum(one.num_rows for _, one in waiting) + table.num_rows > self.rows_at_once:
                    yield _together(waiting)
                    waiting = []
                waiting.append((file, table))
        if waiting:
            yield _together(waiting)

    def _groups(self, suite: Suite, partition: Partition, file: File, since: Mapping[str, int]) -> Iterator[pa.Table]:
        try:
            with pq.ParquetFile(self.root / file.path, page_checksum_verification=True) as parquet:
                names = [*parquet.schema_arrow.names, *(n for n in PLACED if n not in parquet.schema_arrow.names)]
                wanted = _columns(suite, names)
                there = [name for name in wanted if name in parquet.schema_arrow.names]
                for group in range(parquet.num_row_groups):
                    table = parquet.read_row_group(group, there, use_threads=False)
                    table = table.filter(_is_new(table, since))
                    if not file.path.startswith(f"records/{partition}/"):
                        table = table.filter(_of(table, partition, file.path))
                    if table.num_rows:
                        yield _placed(table, partition).select(wanted)
        except BROKEN as error:
            raise Unreadable(f"{file.path}: {str(error).splitlines()[0][:300]}") from None

    def _validated(
        self, suite: Suite, partition: Partition, table: pa.Table, files: Sequence[File]
    ) -> Iterator[tuple[int, Judgement]]:
        """What is not as expected in a frame, by the expectation's number in its suite."""
        if not suite.expectations:
            return
        made = self._suite(suite)
        formats = {
            "result_format": "SUMMARY",
            "partial_unexpected_count": EXAMPLES_MAX,
            "unexpected_index_column_names": ["offset"],
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = self._batch_definition.get_batch({"dataframe": _frame(table)})
            results = batch.validate(made, result_format=formats).results
        judged = {int(result.expectation_config.meta["number"]): result for result in results}
        for number, expectation in enumerate(suite.expectations):
            result = judged.get(number)
            if result is None:  # the library drops what it does not know, without a word
                raise CheckBroken(expectation, f"great-expectations does not know {expectation.type}, or not like this")
            if trouble := _trouble(result):
                raise CheckBroken(expectation, trouble)
            if not result.success:
                yield number, _judgement(expectation, partition, result.result, table, files)

    def _suite(self, suite: Suite) -> Any:
        configs = [
            {**one.config(), "meta": {**one.meta, "number": number}} for number, one in enumerate(suite.expectations)
        ]
        try:
            return self._library.ExpectationSuite(name=suite.name, expectations=configs)
        except Exception as error:  # whatever the library raises about a suite that it cannot take
            for one in suite.expectations:
                try:
                    self._library.ExpectationSuite(name=suite.name, expectations=[one.config()])
                except Exception as own:  # noqa: BLE001  # the one that it is about
                    raise CheckBroken(one, str(own).strip()) from None
            raise CheckBroken(suite.expectations[0], str(error).strip()) from error

    @cached_property
    def _library(self) -> Any:
        _silence()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import great_expectations
        except ImportError as error:
            raise ConfigError(
                f"great-expectations cannot be imported: {error}",
                next="install it: `make setup`, or the extra seriatim[airflow]",
            ) from None
        _silence()  # its rooms set levels of their own as they are imported
        return great_expectations

    @cached_property
    def _batch_definition(self) -> Any:
        context = self._library.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False}
        context.enable_analytics(enable=False)
        asset = context.data_sources.add_pandas("seriatim").add_dataframe_asset("frame")
        return asset.add_batch_definition_whole_dataframe("whole")


def _silence() -> None:
    for name in ("great_expectations", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "great_expectations":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _columns(suite: Suite, there: Sequence[str]) -> list[str]:
    """The columns to read: those that the suite looks at, and where a row is."""
    named = suite.columns()
    for one in suite.expectations:
        if missing := [name for name in one.columns() or () if name not in there]:
            raise CheckBroken(one, f"there is no column {missing[0]!r}; there are {', '.join(there)}")
    wanted = there if named is None else [*PLACED, "topic_id", *named]
    return list(dict.fromkeys(wanted))


def _evidence(rows: Sequence[Evidence]) -> pa.Table:
    return pa.Table.from_pylist([row.row() for row in rows])


def _is_new(table: pa.Table, since: Mapping[str, int]) -> Any:
    """Records since then. One without an offset or topic id is looked at in any case."""
    offsets = pc.fill_null(table.column("offset"), np.iinfo(np.int64).max).to_numpy()
    lives = table.column("topic_id").combine_chunks().dictionary_encode(null_encoding="encode")
    last = np.iinfo(np.int64).max
    least = [0 if life is None else since.get(life, last) for life in lives.dictionary.to_pylist()]
    return pa.array(offsets >= np.array(least, dtype=np.int64)[lives.indices.to_numpy(zero_copy_only=False)])


def _of(table: pa.Table, partition: Partition, path: str) -> Any:
    """Records of this partition, where somebody else's OPTIMIZE has put several into one file, or into folders."""
    mine = pa.array(np.ones(table.num_rows, dtype=bool))
    for name, value in (("topic", partition.topic), ("partition", partition.number)):
        if name in table.column_names:
            mine = pc.and_(mine, pc.equal(table.column(name), value))
        elif f"{name}={value}" not in path.split("/"):
            mine = pa.array(np.zeros(table.num_rows, dtype=bool))
    return mine


def _placed(table: pa.Table, partition: Partition) -> pa.Table:
    """With the columns that are a folder's name."""
    count = table.num_rows
    for name, value in (("topic", partition.topic), ("partition", pa.scalar(partition.number, pa.int32()))):
        if name not in table.column_names:
            table = table.append_column(name, pa.repeat(value, count))
    return table


def _together(waiting: Sequence[tuple[File, pa.Table]]) -> tuple[pa.Table, Sequence[File]]:
    files = {file.path: file for file, _ in waiting}
    return pa.concat_tables([table for _, table in waiting]), tuple(files.values())


def _frame(table: pa.Table) -> Any:
    """As pandas; whole numbers and truth with nothing between them stay what they are, never become fractions."""
    import pandas as pd

    kept = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype()}
    nulls = {column.type for column in table.columns if column.null_count}
    return table.to_pandas(types_mapper=lambda kind: kept.get(kind) if kind in nulls else None)


def _trouble(result: Any) -> str:
    """Why an expectation could not be judged; empty: it was."""
    info = result.exception_info or {}
    nested = [info] if "raised_exception" in info else list(info.values())
    for one in nested:
        if isinstance(one, dict) and one.get("raised_exception"):
            return str(one.get("exception_message") or "it raised").strip()
    return ""


def _judgement(
    expectation: Expectation, partition: Partition, result: Mapping[str, Any], table: pa.Table, files: Sequence[File]
) -> Judgement:
    """What a result says; files are blamed by the offsets of its examples, where these are all."""
    broken = result.get("unexpected_count")
    places = [row.get("offset") for row in result.get("partial_unexpected_index_list") or () if isinstance(row, dict)]
    offsets = sorted({int(offset) for offset in places if offset is not None})
    all_known = broken is not None and len(places) >= broken
    blamed = [f for f in files if not all_known or any(f.first <= offset <= f.last for offset in offsets)]
    values = (result.get("partial_unexpected_list") or ())[:20]
    examples = list(dict.fromkeys(repr(value.item() if hasattr(value, "item") else value) for value in values))
    found = ", ".join(examples[:3]) if examples else str(result.get("observed_value", ""))
    return Judgement(
        expectation=expectation,
        partition=partition,
        broken=1 if broken is None else int(broken),
        of=table.num_rows,
        offset=offsets[0] if offsets else pc.min(table.column("offset")).as_py(),
        found=found[:300],
        files=tuple(file.path for file in blamed),
    )


def _about(one: Judgement, row: Evidence) -> Judgement:
    """A judgement of evidence, with what the evidence says."""
    return Judgement(
        expectation=one.expectation, partition=one.partition, broken=row.broken, offset=row.offset, files=row.files
    )


def _joined(one: Judgement | None, other: Judgement) -> Judgement:
    """What two stretches say."""
    if one is None:
        return other
    return Judgement(
        expectation=one.expectation,
        partition=one.partition,
        broken=one.broken + other.broken,
        of=one.of + other.of,
        offset=one.offset,
        found=one.found,
        files=tuple(dict.fromkeys([*one.files, *other.files])),
    )
