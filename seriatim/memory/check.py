"""Scans of record files and judgement of suites, in memory and plain Python, for the few expectations
that tests need.

Next: storage/record_scan.py and operations/prove/great_expectations_suites.py are the real ones,
held to the same contract tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import RowImage, RowKeySpec, same_rows
from seriatim.errors import IntegrityError
from seriatim.operations.prove.evidence import (
    Evidence,
    EvidenceRequest,
    PartitionEvidence,
    in_bucket,
)
from seriatim.operations.prove.suite import Expectation, Suite
from seriatim.operations.prove.verdict_rules import BrokenCheckError, Judgement
from seriatim.ports import UnreadableFileError

Row = dict[str, Any]
ReadRows = Callable[[File], Sequence[Row]]


class MemorySight:
    """Scans record files row by row: nothing is seen together that the real scan may see apart."""

    def __init__(self, read: ReadRows) -> None:
        self.read = read

    def scan(self, file: File, request: EvidenceRequest) -> Iterator[PartitionEvidence]:
        """The evidence of a file, one row at a time."""
        owner = (request.partition.topic, request.partition.number)
        previous: tuple[str, int, int] | None = None
        for row in _read_rows(self.read, file):
            topic_id = row["topic_id"]
            offset = row["offset"]
            position = (topic_id, offset, row["index"])
            evidence = PartitionEvidence(total_rows=1)
            if previous is not None and previous[0] == topic_id and position <= previous:
                evidence.disorder_offset = offset
            if (row["topic"], row["partition"]) != owner:
                evidence.foreign_offset = offset
            previous = position
            if _is_new(row, request.first_new_offsets):
                evidence.new_rows = 1
                evidence.offset_spans = {topic_id: (offset, offset)}
                if request.row_key_spec is not None and in_bucket(row["session"], request.bucket):
                    self._add_row(evidence, row, request.row_key_spec)
            yield evidence

    def _add_row(
        self,
        evidence: PartitionEvidence,
        row: Row,
        spec: RowKeySpec,
    ) -> None:
        key = spec.key_of(row)
        before = None
        if spec.has_before_images and row[f"before_{spec.key[0]}"] is not None:
            before = tuple(row[f"before_{name}"] for name in spec.columns)
        after = None
        if not spec.deletes_row(row):
            after = tuple(row[name] for name in spec.columns)
        topic_id = row["topic_id"]
        session = row["session"]
        offset = row["offset"]
        evidence.first_rows = [RowImage(topic_id, session, key, before, offset)]
        evidence.last_rows = [RowImage(topic_id, session, key, after, offset)]


def _is_new(row: Row, first_new_offsets: Mapping[str, int]) -> bool:
    first_new_offset = first_new_offsets.get(row["topic_id"])
    return first_new_offset is not None and row["offset"] >= first_new_offset


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
        new_rows: list[tuple[str, Row]] = []
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


def _read_rows(read: ReadRows, file: File) -> Sequence[Row]:
    try:
        return read(file)
    except IntegrityError as error:
        raise UnreadableFileError(error.message) from None


def _judge_expectation(
    expectation: Expectation,
    partition: Partition,
    rows: list[tuple[str, Row]],
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
    judged = [(path, row) for path, row in rows if _matches_condition(condition, row)]
    # By identity: two rows may be equal, and only one of them unexpected.
    unexpected_ids = set(map(id, _unexpected_rows(expectation, [row for _, row in judged])))
    unexpected = [(path, row) for path, row in judged if id(row) in unexpected_ids]
    if not unexpected:
        return None
    column = expectation.kwargs.get("column", "")
    examples = [repr(row.get(column)) for _, row in unexpected[:3]]
    return Judgement(
        expectation=expectation,
        partition=partition,
        broken_count=len(unexpected),
        row_count=len(rows),
        example_offset=min(row["offset"] for _, row in unexpected),
        found=", ".join(dict.fromkeys(examples)),
        files=tuple(dict.fromkeys(path for path, _ in unexpected if path)),
    )


def _matches_condition(condition: Any, row: Row) -> bool:
    if condition is None:
        return True
    value = row[condition["column"]["name"]]
    return bool(same_rows((value,), (condition["parameter"],)))


def _unexpected_rows(expectation: Expectation, rows: list[Row]) -> list[Row]:
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
