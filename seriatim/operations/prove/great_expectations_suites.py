"""Check suites over committed record files and over evidence by great-expectations, in this process
and without Spark.

Record files are read a batch of rows at a time, only the columns that the suite is about, and are
checked as pandas frames. So an expectation about all rows together (a mean, a count) is about one
batch. The library takes seconds to import and logs a lot: it is imported when the first suite is
checked, and silenced. An expectation that raises does not raise in the library's caller, so every
result is searched for an exception.

Next: operations/prove/check.py makes a verdict of what comes back.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import POSITION_COLUMNS
from seriatim.errors import ConfigError
from seriatim.operations.prove.partition_rules import Evidence
from seriatim.operations.prove.suite import BrokenCheckError, Expectation, Judgement, Suite
from seriatim.ports import UnreadableFileError
from seriatim.storage.parquet import open_parquet, with_added_columns
from seriatim.storage.store import Store

ROWS_AT_ONCE = 250_000
EXAMPLES_MAX = 200
"""How many bad rows the library names. If there are more, all files of the batch are blamed."""
VALUES_SHOWN_MAX = 20
READ_ERRORS = (OSError, pa.ArrowException, ValueError)
"""What reading a damaged file raises."""
OFFSET_MAX = np.iinfo(np.int64).max


class GreatExpectations:
    """Checks the record files of one stream. It can be sent to other processes."""

    def __init__(
        self,
        store: Store,
        rows_at_once: int = ROWS_AT_ONCE,
        addable_fields: Sequence[pa.Field] = (),
    ) -> None:
        """`addable_fields` are columns that the table may have got after a file was written."""
        self.store = store
        self.rows_at_once = rows_at_once
        self.addable_fields = list(addable_fields)

    def check_records(
        self,
        suite: Suite,
        partition: Partition,
        files: Sequence[File],
        first_new_offsets: Mapping[str, int],
    ) -> list[Judgement]:
        """Check new records, batch by batch. Only what is not as expected comes back."""
        judgements: dict[int, Judgement] = {}
        for table, batch_files in self._row_batches(suite, partition, files, first_new_offsets):
            failures = self._failed_expectations(suite, partition, table, batch_files)
            for number, judgement in failures:
                judgements[number] = _merge_judgements(judgements.get(number), judgement)
        return [judgements[number] for number in sorted(judgements)]

    def check_evidence(self, suite: Suite, evidence: Sequence[Evidence]) -> list[Judgement]:
        """Check evidence. Only what is not as expected comes back.

        All evidence is checked at once, because that is fast. If something is not as expected, it
        is checked again partition by partition, to see which one it is.
        """
        if not evidence:
            return []
        whole_table = _evidence_table(evidence)
        failures = self._failed_expectations(suite, evidence[0].partition, whole_table, ())
        if next(failures, None) is None:
            return []
        judgements: list[Judgement] = []
        for partition in dict.fromkeys(row.partition for row in evidence):
            rows = {row.promise: row for row in evidence if row.partition == partition}
            table = _evidence_table(list(rows.values()))
            for _, judgement in self._failed_expectations(suite, partition, table, ()):
                promise = str(judgement.expectation.meta.get("promise", ""))
                if promise in rows:
                    judgement = _with_evidence(judgement, rows[promise])  # noqa: PLW2901
                judgements.append(judgement)
        return judgements

    def _row_batches(
        self,
        suite: Suite,
        partition: Partition,
        files: Sequence[File],
        first_new_offsets: Mapping[str, int],
    ) -> Iterator[tuple[pa.Table, Sequence[File]]]:
        """New rows of files, joined to batches of a good size, each with its files."""
        waiting: list[tuple[File, pa.Table]] = []
        waiting_rows = 0
        for file in files:
            for table in self._new_row_groups(suite, partition, file, first_new_offsets):
                if waiting and waiting_rows + table.num_rows > self.rows_at_once:
                    yield _concatenate(waiting)
                    waiting = []
                    waiting_rows = 0
                waiting.append((file, table))
                waiting_rows += table.num_rows
        if waiting:
            yield _concatenate(waiting)

    def _new_row_groups(
        self,
        suite: Suite,
        partition: Partition,
        file: File,
        first_new_offsets: Mapping[str, int],
    ) -> Iterator[pa.Table]:
        """The new rows of a file that are of the partition, one row group at a time."""
        is_own_file = file.path.startswith(f"records/{partition}/")
        try:
            with open_parquet(self.store, file.path) as parquet:
                file_columns = parquet.schema_arrow.names
                # Where a row is can be the name of a folder instead of a column.
                added_columns = [field.name for field in self.addable_fields]
                all_columns = [*file_columns, *POSITION_COLUMNS, *added_columns]
                all_columns = list(dict.fromkeys(all_columns))
                columns = _columns_to_read(suite, all_columns)
                columns_in_file = [name for name in columns if name in file_columns]
                for group in range(parquet.num_row_groups):
                    table = parquet.read_row_group(group, columns_in_file, use_threads=False)
                    table = table.filter(_is_new_record(table, first_new_offsets))
                    if not is_own_file:
                        table = table.filter(_is_in_partition(table, partition, file.path))
                    if table.num_rows:
                        table = with_added_columns(table, self.addable_fields)
                        yield _with_partition_columns(table, partition).select(columns)
        except READ_ERRORS as error:
            first_line = str(error).splitlines()[0][:300]
            raise UnreadableFileError(file.path, first_line) from None

    def _failed_expectations(
        self, suite: Suite, partition: Partition, table: pa.Table, files: Sequence[File]
    ) -> Iterator[tuple[int, Judgement]]:
        """What is not as expected in a table, by the number of the expectation in its suite."""
        if not suite.expectations:
            return
        library_suite = self._library_suite(suite)
        result_format = {
            "result_format": "SUMMARY",
            "partial_unexpected_count": EXAMPLES_MAX,
            "unexpected_index_column_names": ["offset"],
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = _batch_definition().get_batch({"dataframe": _to_pandas(table)})
            results = batch.validate(library_suite, result_format=result_format).results
        # Results come in an order of the library's own.
        result_by_number: dict[int, Any] = {}
        for result in results:
            result_by_number[int(result.expectation_config.meta["number"])] = result
        for number, expectation in enumerate(suite.expectations):
            result = result_by_number.get(number)
            if result is None:  # The library silently drops what it does not know.
                raise BrokenCheckError(
                    expectation,
                    f"great-expectations does not know {expectation.type}, or not like this",
                )
            error_text = _validation_error(result)
            if error_text:
                raise BrokenCheckError(expectation, error_text)
            if not result.success:
                yield number, _to_judgement(expectation, partition, result.result, table, files)

    def _library_suite(self, suite: Suite) -> Any:
        """A suite as an object of the library. `BrokenCheckError` names an expectation that the
        library refuses.
        """
        configs: list[dict[str, Any]] = []
        for number, expectation in enumerate(suite.expectations):
            config = expectation.config()
            config["meta"] = {**expectation.meta, "number": number}
            configs.append(config)
        try:
            return _library().ExpectationSuite(name=suite.name, expectations=configs)
        except Exception as error:  # The library raises anything about a suite that it refuses.
            # Its error does not say which expectation it is about, so each is tried alone.
            for expectation in suite.expectations:
                self._refuse_expectation(suite.name, expectation)
            raise BrokenCheckError(suite.expectations[0], str(error).strip()) from error

    def _refuse_expectation(self, suite_name: str, expectation: Expectation) -> None:
        """Raise `BrokenCheckError` if the library refuses an expectation."""
        try:
            _library().ExpectationSuite(name=suite_name, expectations=[expectation.config()])
        except Exception as error:  # noqa: BLE001  # See `_library_suite`.
            raise BrokenCheckError(expectation, str(error).strip()) from None


@cache
def _library() -> Any:
    """The library. It is imported once in a process, and never sent to another one."""
    _silence_logging()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import great_expectations
    except ImportError as error:
        raise ConfigError(
            f"great-expectations cannot be imported: {error}",
            next="install it: `make setup`, or one of the extras seriatim[airflow] and seriatim[spark]",
        ) from None
    _silence_logging()  # Its modules set levels of their own while they are imported.
    return great_expectations


@cache
def _batch_definition() -> Any:
    context = _library().get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    context.enable_analytics(enable=False)
    asset = context.data_sources.add_pandas("seriatim").add_dataframe_asset("frame")
    return asset.add_batch_definition_whole_dataframe("whole")


def _silence_logging() -> None:
    for name in ("great_expectations", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "great_expectations":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _columns_to_read(suite: Suite, available: Sequence[str]) -> list[str]:
    """The columns to read: those that the suite is about, and those that say where a row is.

    Raises `BrokenCheckError` for an expectation about a column that is not there.
    """
    for expectation in suite.expectations:
        for column in expectation.columns() or ():
            if column not in available:
                reason = f"there is no column {column!r}; there are {', '.join(available)}"
                raise BrokenCheckError(expectation, reason)
    suite_columns = suite.columns()
    if suite_columns is None:
        return list(available)
    return list(dict.fromkeys([*POSITION_COLUMNS, *suite_columns]))


def _evidence_table(rows: Sequence[Evidence]) -> pa.Table:
    return pa.Table.from_pylist([row.to_row() for row in rows])


def _is_new_record(table: pa.Table, first_new_offsets: Mapping[str, int]) -> Any:
    """A mask of the records that are new.

    A record without an offset or a topic id is always checked, because that is wrong by itself.
    Records of other topic ids are left out.
    """
    offsets = pc.fill_null(table.column("offset"), OFFSET_MAX).to_numpy()
    topic_ids = table.column("topic_id").combine_chunks()
    encoded = topic_ids.dictionary_encode(null_encoding="encode")
    first_offsets: list[int] = []
    for topic_id in encoded.dictionary.to_pylist():
        if topic_id is None:
            first_offsets.append(0)
        else:
            first_offsets.append(first_new_offsets.get(topic_id, OFFSET_MAX))
    indices = encoded.indices.to_numpy(zero_copy_only=False)
    first_offset_of_row = np.array(first_offsets, dtype=np.int64)[indices]
    return pa.array(offsets >= first_offset_of_row)


def _is_in_partition(table: pa.Table, partition: Partition, path: str) -> Any:
    """A mask of the records of this partition, in a file that another program's OPTIMIZE made.

    Such a file may hold several partitions, or have their numbers as names of folders.
    """
    mask = pa.array(np.ones(table.num_rows, dtype=bool))
    for name, value in (("topic", partition.topic), ("partition", partition.number)):
        if name in table.column_names:
            mask = pc.and_(mask, pc.equal(table.column(name), value))
        elif f"{name}={value}" not in path.split("/"):
            mask = pa.array(np.zeros(table.num_rows, dtype=bool))
    return mask


def _with_partition_columns(table: pa.Table, partition: Partition) -> pa.Table:
    """A table with the columns topic and partition, also if they are names of folders."""
    if "topic" not in table.column_names:
        topics = pa.repeat(partition.topic, table.num_rows)
        table = table.append_column("topic", topics)
    if "partition" not in table.column_names:
        numbers = pa.repeat(pa.scalar(partition.number, pa.int32()), table.num_rows)
        table = table.append_column("partition", numbers)
    return table


def _concatenate(file_tables: Sequence[tuple[File, pa.Table]]) -> tuple[pa.Table, Sequence[File]]:
    files = {file.path: file for file, _ in file_tables}
    tables = [table for _, table in file_tables]
    # By name: files of before and after a column was added have their columns in another order.
    return pa.concat_tables(tables, promote_options="default"), tuple(files.values())


def _to_pandas(table: pa.Table) -> Any:
    """A table as a pandas frame.

    Without the nullable types pandas would make floats of integers and objects of booleans, as soon
    as one value of a column is null.
    """
    import pandas as pd

    nullable_types = {
        pa.int64(): pd.Int64Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.bool_(): pd.BooleanDtype(),
    }
    types_with_nulls = {column.type for column in table.columns if column.null_count}

    def pandas_type(arrow_type: Any) -> Any:
        if arrow_type not in types_with_nulls:
            return None
        return nullable_types.get(arrow_type)

    return table.to_pandas(types_mapper=pandas_type)


def _validation_error(result: Any) -> str:
    """Why an expectation could not be checked; empty if it was."""
    exception_info = result.exception_info or {}
    # The library has one record of an exception, or one for each metric.
    infos = list(exception_info.values())
    if "raised_exception" in exception_info:
        infos = [exception_info]
    for info in infos:
        if isinstance(info, dict) and info.get("raised_exception"):
            return str(info.get("exception_message") or "it raised").strip()
    return ""


def _to_judgement(
    expectation: Expectation,
    partition: Partition,
    result: Mapping[str, Any],
    table: pa.Table,
    files: Sequence[File],
) -> Judgement:
    """What a result of the library says."""
    unexpected_count = result.get("unexpected_count")
    example_rows = [
        row for row in result.get("partial_unexpected_index_list") or () if isinstance(row, dict)
    ]
    offsets = sorted({int(row["offset"]) for row in example_rows if row.get("offset") is not None})
    blamed_files = files
    if unexpected_count is not None and len(example_rows) >= unexpected_count:
        # All bad rows are known, so only the files that have them are blamed.
        blamed_files = [file for file in files if _has_any_offset(file, offsets)]
    example_offset = offsets[0] if offsets else pc.min(table.column("offset")).as_py()
    return Judgement(
        expectation=expectation,
        partition=partition,
        broken_count=1 if unexpected_count is None else int(unexpected_count),
        row_count=table.num_rows,
        example_offset=example_offset,
        found=_describe_values(result)[:300],
        files=tuple(file.path for file in blamed_files),
    )


def _has_any_offset(file: File, offsets: Sequence[int]) -> bool:
    return any(file.first_offset <= offset <= file.last_offset for offset in offsets)


def _describe_values(result: Mapping[str, Any]) -> str:
    """Some values that are not as expected, for people."""
    texts: list[str] = []
    for value in (result.get("partial_unexpected_list") or ())[:VALUES_SHOWN_MAX]:
        # numpy's scalars show their type in their repr.
        plain_value = value.item() if hasattr(value, "item") else value
        texts.append(repr(plain_value))
    if not texts:
        return str(result.get("observed_value", ""))
    distinct_texts = list(dict.fromkeys(texts))
    return ", ".join(distinct_texts[:3])


def _with_evidence(judgement: Judgement, evidence: Evidence) -> Judgement:
    """A judgement about evidence, with what the evidence says."""
    return Judgement(
        expectation=judgement.expectation,
        partition=judgement.partition,
        broken_count=evidence.broken_count,
        example_offset=evidence.offset,
        files=evidence.files,
    )


def _merge_judgements(left: Judgement | None, right: Judgement) -> Judgement:
    """The judgements of two batches as one."""
    if left is None:
        return right
    return replace(
        left,
        broken_count=left.broken_count + right.broken_count,
        row_count=left.row_count + right.row_count,
        files=tuple(dict.fromkeys([*left.files, *right.files])),
    )
