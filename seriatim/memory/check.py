"""Record files seen again, and suites judged, in memory: the few expectations that tests need, in
plain Python.

Next room: storage/record_scan.py and operations/prove/great_expectations_suites.py are the real
ones, held to the same contract tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.errors import IntegrityError
from seriatim.ledger.model import File
from seriatim.operations.prove.evidence import (
    Evidence,
    EvidenceRequest,
    PartitionEvidence,
    in_bucket,
    same_rows,
)
from seriatim.operations.prove.suite import Expectation, Suite
from seriatim.operations.prove.verdict_rules import BrokenCheckError, Judgement
from seriatim.ports import UnreadableFileError

Row = dict[str, Any]
ReadRows = Callable[[File], Sequence[Row]]


class MemorySight:
    """Record files, a row in each part: nothing is seen together that the real one may see apart."""

    def __init__(self, read: ReadRows) -> None:
        self.read = read

    def scan(self, file: File, request: EvidenceRequest) -> Iterator[PartitionEvidence]:
        """A file's rows, one by one."""
        last: dict[str, tuple[int, int]] = {}
        for row in _read_rows(self.read, file):
            life, place = row["topic_id"], (row["offset"], row["index"])
            part, mine = (
                PartitionEvidence(total_rows=1),
                (request.partition.topic, request.partition.number),
            )
            part.disorder_offset = row["offset"] if life in last and place <= last[life] else -1
            part.foreign_offset = row["offset"] if (row["topic"], row["partition"]) != mine else -1
            last = {life: place}
            if (
                life in request.first_new_offsets
                and row["offset"] >= request.first_new_offsets[life]
            ):
                part.new_rows, part.offset_spans = 1, {life: (row["offset"], row["offset"])}
                if request.key_columns and in_bucket(row["session"], request.bucket):
                    self._add_row(part, row, request)
            yield part

    def _add_row(self, part: PartitionEvidence, row: Row, wanted: EvidenceRequest) -> None:
        key = (
            row[wanted.key_columns[0]]
            if len(wanted.key_columns) == 1
            else tuple(row[name] for name in wanted.key_columns)
        )
        there = wanted.has_before_images and row[f"before_{wanted.key_columns[0]}"] is not None
        before = tuple(row[f"before_{name}"] for name in wanted.columns) if there else None
        now = None if row["op"] == "delete" else tuple(row[name] for name in wanted.columns)
        part.first_rows = [(row["topic_id"], row["session"], key, before, row["offset"])]
        part.last_rows = [(row["topic_id"], row["session"], key, now, row["offset"])]


class MemoryChecker:
    """Suites, by rules of our own for a few types of expectations; others are broken."""

    def __init__(self, read: ReadRows) -> None:
        self.read = read

    def check_records(
        self,
        suite: Suite,
        partition: Partition,
        files: Sequence[File],
        first_new_offsets: Mapping[str, int],
    ) -> list[Judgement]:
        """Judge new records."""
        rows = [
            (file.path, row)
            for file in files
            for row in _read_rows(self.read, file)
            if row["topic_id"] in first_new_offsets
            and row["offset"] >= first_new_offsets[row["topic_id"]]
        ]
        return [
            one
            for one in (_judge_expectation(each, partition, rows) for each in suite.expectations)
            if one is not None
        ]

    def check_evidence(self, suite: Suite, evidence: Sequence[Evidence]) -> list[Judgement]:
        """Judge evidence, a partition at a time."""
        found = []
        for partition in dict.fromkeys(row.partition for row in evidence):
            mine = {row.promise: row for row in evidence if row.partition == partition}
            for expectation in suite.expectations:
                frame = [("", row.to_row()) for row in mine.values()]
                if (judged := _judge_expectation(expectation, partition, frame)) is None:
                    continue
                promise = mine.get(str(expectation.meta.get("promise", "")))
                if promise is not None:
                    judged = Judgement(
                        expectation=expectation,
                        partition=partition,
                        broken_count=promise.broken_count,
                        example_offset=promise.offset,
                        files=promise.files,
                    )
                found.append(judged)
        return found


def _read_rows(read: ReadRows, file: File) -> Sequence[Row]:
    try:
        return read(file)
    except IntegrityError as error:
        raise UnreadableFileError(error.message) from None


def _judge_expectation(
    expectation: Expectation, partition: Partition, rows: list[tuple[str, Row]]
) -> Judgement | None:
    if not rows:
        return None
    for name in expectation.columns() or ():
        if name not in rows[0][1]:
            raise BrokenCheckError(
                expectation, f"there is no column {name!r}; there are {', '.join(rows[0][1])}"
            )
    chosen = [
        (path, row)
        for path, row in rows
        if _matches_condition(expectation.kwargs.get("row_condition"), row)
    ]
    unexpected = {id(row) for row in _unexpected_rows(expectation, [row for _, row in chosen])}
    wrong = [(path, row) for path, row in chosen if id(row) in unexpected]
    if not wrong:
        return None
    return Judgement(
        expectation=expectation,
        partition=partition,
        broken_count=len(wrong),
        row_count=len(rows),
        example_offset=min(row["offset"] for _, row in wrong),
        found=", ".join(
            dict.fromkeys(
                repr(row.get(expectation.kwargs.get("column", ""))) for _, row in wrong[:3]
            )
        ),
        files=tuple(dict.fromkeys(path for path, _ in wrong if path)),
    )


def _matches_condition(condition: Any, row: Row) -> bool:
    return condition is None or bool(
        same_rows((row[condition["column"]["name"]],), (condition["parameter"],))
    )


def _unexpected_rows(expectation: Expectation, rows: list[Row]) -> list[Row]:
    """The rows that are not as expected."""
    given, kind = expectation.kwargs, expectation.type
    if kind == "expect_column_values_to_not_be_null":
        return [row for row in rows if row[given["column"]] is None]
    if kind == "expect_column_values_to_be_in_set":
        return [row for row in rows if row[given["column"]] not in (None, *given["value_set"])]
    if kind == "expect_column_values_to_be_between":
        least, most = given.get("min_value", float("-inf")), given.get("max_value", float("inf"))
        return [
            row
            for row in rows
            if (value := row[given["column"]]) is not None and not least <= value <= most
        ]
    if kind == "expect_column_pair_values_a_to_be_greater_than_b":
        return [row for row in rows if row[given["column_A"]] < row[given["column_B"]]]
    if kind == "expect_compound_columns_to_be_unique":
        places = [tuple(row[name] for name in given["column_list"]) for row in rows]
        counts = Counter(places)
        return [row for row, place in zip(rows, places, strict=True) if counts[place] > 1]
    raise BrokenCheckError(expectation, f"{kind} is not known")
