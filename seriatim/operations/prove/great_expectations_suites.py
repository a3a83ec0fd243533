"""Great expectations: suites over committed record files and over evidence. In this process,
without Spark.

Record files are read a stretch of rows at a time, only the columns that the suite looks at, and
judged as pandas frames: an expectation about all rows together (a mean, a count) is about such a
stretch. The library takes seconds to import and talks a lot, so it is imported when the first suite
is judged, silenced before. An expectation that raises does not raise here by itself: its trouble is
looked for in every result.

Next room: operations/prove/verdict_rules.py makes a verdict of what comes back.
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

from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.model import File
from seriatim.operations.prove.evidence import Evidence
from seriatim.operations.prove.suite import Expectation, Suite
from seriatim.operations.prove.verdict_rules import BrokenCheckError, Judgement
from seriatim.ports import UnreadableFileError

ROWS_AT_ONCE = 250_000
EXAMPLES_MAX = 200
"""Rows that are not as expected, named by great-expectations; with more the whole stretch is to
blame.
"""
POSITION_COLUMNS = ("topic", "partition", "offset")
READ_ERRORS = (OSError, pa.ArrowException, ValueError)
"""What reading a damaged file raises."""


class GreatExpectations:
    """Judges the record files of one stream, below its output path."""

    def __init__(self, root: Path, rows_at_once: int = ROWS_AT_ONCE) -> None:
        self.root, self.rows_at_once = root, rows_at_once

    def check_records(
        self,
        suite: Suite,
        partition: Partition,
        files: Sequence[File],
        first_new_offsets: Mapping[str, int],
    ) -> list[Judgement]:
        """Judge new records, stretch by stretch."""
        found: dict[int, Judgement] = {}
        for table, within in self._row_batches(suite, partition, files, first_new_offsets):
            for number, judgement in self._failed_expectations(suite, partition, table, within):
                found[number] = _merge_judgements(found.get(number), judgement)
        return [found[number] for number in sorted(found)]

    def check_evidence(self, suite: Suite, evidence: Sequence[Evidence]) -> list[Judgement]:
        """Judge evidence: all of it, and where that is not as expected, a partition at a time to
        see whose it is.
        """
        if not evidence or not any(
            True
            for _ in self._failed_expectations(
                suite, evidence[0].partition, _evidence_table(evidence), ()
            )
        ):
            return []
        judged: list[Judgement] = []
        for partition in dict.fromkeys(row.partition for row in evidence):
            mine = {row.promise: row for row in evidence if row.partition == partition}
            for _, one in self._failed_expectations(
                suite, partition, _evidence_table(list(mine.values())), ()
            ):
                promise = mine.get(str(one.expectation.meta.get("promise", "")))
                judged.append(one if promise is None else _with_evidence(one, promise))
        return judged

    def _row_batches(
        self, suite: Suite, partition: Partition, files: Sequence[File], since: Mapping[str, int]
    ) -> Iterator[tuple[pa.Table, Sequence[File]]]:
        """New rows of files, joined to stretches of a good size."""
        waiting: list[tuple[File, pa.Table]] = []
        for file in files:
            for table in self._new_row_groups(suite, partition, file, since):
                if (
                    waiting
                    and sum(one.num_rows for _, one in waiting) + table.num_rows > self.rows_at_once
                ):
                    yield _concatenate(waiting)
                    waiting = []
                waiting.append((file, table))
        if waiting:
            yield _concatenate(waiting)

    def _new_row_groups(
        self, suite: Suite, partition: Partition, file: File, since: Mapping[str, int]
    ) -> Iterator[pa.Table]:
        try:
            with pq.ParquetFile(self.root / file.path, page_checksum_verification=True) as parquet:
                names = [
                    *parquet.schema_arrow.names,
                    *(n for n in POSITION_COLUMNS if n not in parquet.schema_arrow.names),
                ]
                wanted = _columns_to_read(suite, names)
                there = [name for name in wanted if name in parquet.schema_arrow.names]
                for group in range(parquet.num_row_groups):
                    table = parquet.read_row_group(group, there, use_threads=False)
                    table = table.filter(_is_new_record(table, since))
                    if not file.path.startswith(f"records/{partition}/"):
                        table = table.filter(_is_in_partition(table, partition, file.path))
                    if table.num_rows:
                        yield _with_partition_columns(table, partition).select(wanted)
        except READ_ERRORS as error:
            raise UnreadableFileError(f"{file.path}: {str(error).splitlines()[0][:300]}") from None

    def _failed_expectations(
        self, suite: Suite, partition: Partition, table: pa.Table, files: Sequence[File]
    ) -> Iterator[tuple[int, Judgement]]:
        """What is not as expected in a frame, by the expectation's number in its suite."""
        if not suite.expectations:
            return
        made = self._library_suite(suite)
        formats = {
            "result_format": "SUMMARY",
            "partial_unexpected_count": EXAMPLES_MAX,
            "unexpected_index_column_names": ["offset"],
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = self._batch_definition.get_batch({"dataframe": _to_pandas(table)})
            results = batch.validate(made, result_format=formats).results
        judged = {int(result.expectation_config.meta["number"]): result for result in results}
        for number, expectation in enumerate(suite.expectations):
            result = judged.get(number)
            if result is None:  # the library drops what it does not know, without a word
                raise BrokenCheckError(
                    expectation,
                    f"great-expectations does not know {expectation.type}, or not like this",
                )
            if trouble := _validation_error(result):
                raise BrokenCheckError(expectation, trouble)
            if not result.success:
                yield number, _to_judgement(expectation, partition, result.result, table, files)

    def _library_suite(self, suite: Suite) -> Any:
        configs = [
            {**one.config(), "meta": {**one.meta, "number": number}}
            for number, one in enumerate(suite.expectations)
        ]
        try:
            return self._library.ExpectationSuite(name=suite.name, expectations=configs)
        except Exception as error:  # whatever the library raises about a suite that it cannot take
            for one in suite.expectations:
                try:
                    self._library.ExpectationSuite(name=suite.name, expectations=[one.config()])
                except Exception as own:  # noqa: BLE001  # the one that it is about
                    raise BrokenCheckError(one, str(own).strip()) from None
            raise BrokenCheckError(suite.expectations[0], str(error).strip()) from error

    @cached_property
    def _library(self) -> Any:
        _silence_logging()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import great_expectations
        except ImportError as error:
            raise ConfigError(
                f"great-expectations cannot be imported: {error}",
                next="install it: `make setup`, or the extra seriatim[airflow]",
            ) from None
        _silence_logging()  # its rooms set levels of their own as they are imported
        return great_expectations

    @cached_property
    def _batch_definition(self) -> Any:
        context = self._library.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False}
        context.enable_analytics(enable=False)
        asset = context.data_sources.add_pandas("seriatim").add_dataframe_asset("frame")
        return asset.add_batch_definition_whole_dataframe("whole")


def _silence_logging() -> None:
    for name in ("great_expectations", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "great_expectations":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _columns_to_read(suite: Suite, available: Sequence[str]) -> list[str]:
    """The columns to read: those that the suite looks at, and where a row is."""
    named = suite.columns()
    for one in suite.expectations:
        if missing := [name for name in one.columns() or () if name not in available]:
            raise BrokenCheckError(
                one, f"there is no column {missing[0]!r}; there are {', '.join(available)}"
            )
    wanted = available if named is None else [*POSITION_COLUMNS, "topic_id", *named]
    return list(dict.fromkeys(wanted))


def _evidence_table(rows: Sequence[Evidence]) -> pa.Table:
    return pa.Table.from_pylist([row.to_row() for row in rows])


def _is_new_record(table: pa.Table, since: Mapping[str, int]) -> Any:
    """Records since then. One without an offset or topic id is looked at in any case."""
    offsets = pc.fill_null(table.column("offset"), np.iinfo(np.int64).max).to_numpy()
    lives = table.column("topic_id").combine_chunks().dictionary_encode(null_encoding="encode")
    last = np.iinfo(np.int64).max
    least = [0 if life is None else since.get(life, last) for life in lives.dictionary.to_pylist()]
    return pa.array(
        offsets >= np.array(least, dtype=np.int64)[lives.indices.to_numpy(zero_copy_only=False)]
    )


def _is_in_partition(table: pa.Table, partition: Partition, path: str) -> Any:
    """Records of this partition, where somebody else's OPTIMIZE has put several into one file, or
    into folders.
    """
    mine = pa.array(np.ones(table.num_rows, dtype=bool))
    for name, value in (("topic", partition.topic), ("partition", partition.number)):
        if name in table.column_names:
            mine = pc.and_(mine, pc.equal(table.column(name), value))
        elif f"{name}={value}" not in path.split("/"):
            mine = pa.array(np.zeros(table.num_rows, dtype=bool))
    return mine


def _with_partition_columns(table: pa.Table, partition: Partition) -> pa.Table:
    """With the columns that are a folder's name."""
    count = table.num_rows
    for name, value in (
        ("topic", partition.topic),
        ("partition", pa.scalar(partition.number, pa.int32())),
    ):
        if name not in table.column_names:
            table = table.append_column(name, pa.repeat(value, count))
    return table


def _concatenate(file_tables: Sequence[tuple[File, pa.Table]]) -> tuple[pa.Table, Sequence[File]]:
    files = {file.path: file for file, _ in file_tables}
    return pa.concat_tables([table for _, table in file_tables]), tuple(files.values())


def _to_pandas(table: pa.Table) -> Any:
    """As pandas; whole numbers and truth with nothing between them stay what they are, never become
    fractions.
    """
    import pandas as pd

    kept = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype()}
    nulls = {column.type for column in table.columns if column.null_count}
    return table.to_pandas(types_mapper=lambda kind: kept.get(kind) if kind in nulls else None)


def _validation_error(result: Any) -> str:
    """Why an expectation could not be judged; empty: it was."""
    info = result.exception_info or {}
    nested = [info] if "raised_exception" in info else list(info.values())
    for one in nested:
        if isinstance(one, dict) and one.get("raised_exception"):
            return str(one.get("exception_message") or "it raised").strip()
    return ""


def _to_judgement(
    expectation: Expectation,
    partition: Partition,
    result: Mapping[str, Any],
    table: pa.Table,
    files: Sequence[File],
) -> Judgement:
    """What a result says; files are blamed by the offsets of its examples, where these are all."""
    broken = result.get("unexpected_count")
    places = [
        row.get("offset")
        for row in result.get("partial_unexpected_index_list") or ()
        if isinstance(row, dict)
    ]
    offsets = sorted({int(offset) for offset in places if offset is not None})
    all_known = broken is not None and len(places) >= broken
    blamed = [
        f
        for f in files
        if not all_known or any(f.first_offset <= offset <= f.last_offset for offset in offsets)
    ]
    values = (result.get("partial_unexpected_list") or ())[:20]
    examples = list(
        dict.fromkeys(repr(value.item() if hasattr(value, "item") else value) for value in values)
    )
    found = ", ".join(examples[:3]) if examples else str(result.get("observed_value", ""))
    return Judgement(
        expectation=expectation,
        partition=partition,
        broken_count=1 if broken is None else int(broken),
        row_count=table.num_rows,
        example_offset=offsets[0] if offsets else pc.min(table.column("offset")).as_py(),
        found=found[:300],
        files=tuple(file.path for file in blamed),
    )


def _with_evidence(judgement: Judgement, evidence: Evidence) -> Judgement:
    """A judgement of evidence, with what the evidence says."""
    return Judgement(
        expectation=judgement.expectation,
        partition=judgement.partition,
        broken_count=evidence.broken_count,
        example_offset=evidence.offset,
        files=evidence.files,
    )


def _merge_judgements(left: Judgement | None, right: Judgement) -> Judgement:
    """What two stretches say."""
    if left is None:
        return right
    return Judgement(
        expectation=left.expectation,
        partition=left.partition,
        broken_count=left.broken_count + right.broken_count,
        row_count=left.row_count + right.row_count,
        example_offset=left.example_offset,
        found=left.found,
        files=tuple(dict.fromkeys([*left.files, *right.files])),
    )
