"""Scans of record files and judgement of suites, in memory and plain Python, for the few expectations
that tests need.

Next: storage/record_scan.py and operations/prove/great_expectations_suites.py are the real ones,
held to the same contract tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import RISING_COLUMN_NAMES, Record, RowImage, RowKeySpec, same_rows
from seriatim.errors import IntegrityError
from seriatim.operations.prove.partition_rules import Evidence
from seriatim.operations.prove.suite import BrokenCheckError, Expectation, Judgement, Suite
from seriatim.ports import FileOutline, ScannedRecords, ScanRequest, UnreadableFileError

ReadRows = Callable[[File], Sequence[Record]]


class MemorySight:
    """Scans record files row by row."""

    def __init__(self, read: ReadRows) -> None:
        self.read = read

    def scan(self, files: Sequence[File], request: ScanRequest) -> ScannedRecords:
        """What record files contain, and the rows that their records make."""
        scanned = ScannedRecords()
        first_rows: dict[Any, RowImage] = {}
        last_rows: dict[Any, RowImage] = {}
        for file in files:
            rows = _read_rows(self.read, file)
            if request.with_outlines:
                scanned.outlines.append(_outline_rows(rows))
            for row in rows:
                if not _is_new(row, request.first_offsets):
                    continue
                scanned.new_rows += 1
                name = row["session"]
                spec = request.row_key_spec
                if spec is None or name is None:
                    continue
                if request.bucket is not None and not request.includes_session(name):
                    continue
                before, after = _row_images(row, spec)
                row_name = (after.topic_id, after.session, after.key)
                previous = last_rows.get(row_name)
                if previous is None:
                    first_rows[row_name] = before
                elif spec.has_before_images and not same_rows(previous.row, before.row):
                    scanned.unlinked_rows += 1
                    scanned.unlinked_files.append(file.path)
                    if scanned.unlinked_offset < 0:
                        scanned.unlinked_offset = row["offset"]
                last_rows[row_name] = after
        scanned.first_rows = list(first_rows.values())
        scanned.last_rows = list(last_rows.values())
        return scanned


def _outline_rows(rows: Sequence[Record]) -> FileOutline:
    """What a record file with these rows contains."""
    outline = FileOutline(rows=len(rows))
    previous: dict[str, tuple[int, int]] = {}
    offsets = [row["offset"] for row in rows]
    for row in rows:
        topic_id = row["topic_id"]
        position = (row["offset"], row["index"])
        before = previous.get(topic_id, (-1, 0))
        if position <= before and outline.first_disorder is None:
            outline.first_disorder = position
        if position[0] != before[0]:
            outline.distinct_offsets += 1
        if row.get("source_offset", 0) > row["offset"] and outline.early_offset < 0:
            outline.early_offset = row["offset"]
        previous[topic_id] = position
    outline.first_offset = min(offsets, default=-1)
    outline.last_offset = max(offsets, default=-1)
    outline.topics = {row["topic"] for row in rows}
    for topic_id in previous:
        own_offsets = [row["offset"] for row in rows if row["topic_id"] == topic_id]
        outline.offsets_by_topic_id[topic_id] = (min(own_offsets), max(own_offsets))
    outline.partitions = {row["partition"] for row in rows}
    for name in RISING_COLUMN_NAMES:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            outline.value_ranges[name] = (min(values), max(values))
    outline.session_count = len({row["session"] for row in rows})
    return outline


def _row_images(row: Record, spec: RowKeySpec) -> tuple[RowImage, RowImage]:
    """The row before a record, as the record says, and after it."""
    before = None
    # A key is never null. So where it is, there was no row before.
    if spec.has_before_images and row[f"before_{spec.key[0]}"] is not None:
        before = tuple(row[f"before_{name}"] for name in spec.columns)
    after = None
    if not spec.deletes_row(row):
        after = tuple(row[name] for name in spec.columns)
    topic_id = row["topic_id"]
    session = row["session"]
    image = RowImage(topic_id, session, spec.key_of(row), before, row["offset"])
    return image, image._replace(row=after)


def _is_new(row: Record, first_offsets: Mapping[str, int] | None) -> bool:
    if first_offsets is None:
        return True
    first_offset = first_offsets.get(row["topic_id"])
    return first_offset is not None and row["offset"] >= first_offset


class MemoryChecker:
    """Judges suites by rules of our own for a few types of expectations. Other types are refused."""

    def __init__(self, read: ReadRows) -> None:
        self.read = read

    def check_records(
        self,
        suite: Suite,
        partition: Partition,
        files: Sequence[File],
        first_new_offsets: Mapping[str, int],
    ) -> list[Judgement]:
        """The judgements on new records."""
        new_rows: list[tuple[str, Record]] = []
        for file in files:
            rows = _read_rows(self.read, file)
            new_rows += [(file.path, row) for row in rows if _is_new(row, first_new_offsets)]
        judgements = []
        for expectation in suite.expectations:
            judgement = _judge_expectation(expectation, partition, new_rows)
            if judgement is not None:
                judgements.append(judgement)
        return judgements

    def check_evidence(self, suite: Suite, evidence: Sequence[Evidence]) -> list[Judgement]:
        """The judgements on evidence, one partition at a time."""
        by_partition: dict[Partition, dict[str, Evidence]] = {}
        for promise in evidence:
            by_partition.setdefault(promise.partition, {})[promise.promise] = promise
        judgements = []
        for partition, promises in by_partition.items():
            rows = [("", promise.to_row()) for promise in promises.values()]
            for expectation in suite.expectations:
                judgement = _judge_expectation(expectation, partition, rows)
                if judgement is None:
                    continue
                broken = promises.get(str(expectation.meta.get("promise", "")))
                if broken is not None:
                    judgement = Judgement(
                        expectation=expectation,
                        partition=partition,
                        broken_count=broken.broken_count,
                        example_offset=broken.offset,
                        files=broken.files,
                    )
                judgements.append(judgement)
        return judgements


def _read_rows(read: ReadRows, file: File) -> Sequence[Record]:
    try:
        return read(file)
    except IntegrityError as error:
        raise UnreadableFileError(file.path, error.message) from None


def _judge_expectation(
    expectation: Expectation,
    partition: Partition,
    rows: list[tuple[str, Record]],
) -> Judgement | None:
    """The judgement on rows with the paths of their files; None if all are as expected."""
    if not rows:
        return None
    columns = rows[0][1]
    for name in expectation.columns() or ():
        if name not in columns:
            raise BrokenCheckError(
                expectation, f"there is no column {name!r}; there are {', '.join(columns)}"
            )
    condition = expectation.kwargs.get("row_condition")
    judged_rows = [row for _, row in rows if _matches_condition(condition, row)]
    unexpected_rows = _unexpected_rows(expectation, judged_rows)
    if not unexpected_rows:
        return None
    column = expectation.kwargs.get("column", "")
    examples = [repr(row.get(column)) for row in unexpected_rows[:3]]
    offsets = [row["offset"] for row in unexpected_rows]
    # By identity: two rows may be equal, and only one of them unexpected.
    unexpected_ids = set(map(id, unexpected_rows))
    files: list[str] = []
    for path, row in rows:
        if path and path not in files and id(row) in unexpected_ids:
            files.append(path)
    return Judgement(
        expectation=expectation,
        partition=partition,
        broken_count=len(unexpected_rows),
        row_count=len(rows),
        example_offset=min(offsets),
        found=", ".join(dict.fromkeys(examples)),
        files=tuple(files),
    )


def _matches_condition(condition: Any, row: Record) -> bool:
    if condition is None:
        return True
    value = row[condition["column"]["name"]]
    return bool(same_rows((value,), (condition["parameter"],)))


def _unexpected_rows(expectation: Expectation, rows: list[Record]) -> list[Record]:
    """The rows that are not as expected."""
    options = expectation.kwargs
    kind = expectation.type
    if kind == "expect_column_pair_values_a_to_be_greater_than_b":
        return [row for row in rows if row[options["column_A"]] < row[options["column_B"]]]
    if kind == "expect_compound_columns_to_be_unique":
        keys = [tuple(row[name] for name in options["column_list"]) for row in rows]
        counts = Counter(keys)
        return [row for row, key in zip(rows, keys, strict=True) if counts[key] > 1]
    column = str(options.get("column", ""))
    if kind == "expect_column_values_to_not_be_null":
        return [row for row in rows if row[column] is None]
    rows_with_value = [row for row in rows if column in row and row[column] is not None]
    if kind == "expect_column_values_to_be_in_set":
        return [row for row in rows_with_value if row[column] not in options["value_set"]]
    if kind == "expect_column_values_to_be_between":
        lowest = options.get("min_value", float("-inf"))
        highest = options.get("max_value", float("inf"))
        return [row for row in rows_with_value if not lowest <= row[column] <= highest]
    raise BrokenCheckError(expectation, f"{kind} is not known")
