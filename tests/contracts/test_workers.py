"""The contract of workers: one answer per work, in order, failures as values, and nothing crosses the
border that cannot be pickled.

`PicklingWorkers` stands for workers in other processes: it pickles what would be sent. To put a kind
of workers in, add it to `KINDS`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace
from pyspark.sql import SparkSession

from seriatim.engine.failure import Failure
from seriatim.engine.files import File
from seriatim.errors import ConfigError, DamagedFileError, PlatformError
from seriatim.memory.check import MemoryChecker
from seriatim.operations.prove.check import CheckAttempt
from seriatim.operations.prove.partition_rules import (
    PartitionClaims,
    PartitionProver,
    state_row_reader,
)
from seriatim.operations.prove.verify import Verification
from seriatim.spark_workers import ClusterSession, SparkWorkers
from seriatim.storage.audit import FileAudit
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import LocalStore
from seriatim.workers import LocalWorkers, Workers, map_or_raise
from tests.contracts.disk_streams import create_filled_output
from tests.operations.check_helper import shipped_suites


def pickled(value: Any) -> Any:
    """The value as another process would get it."""
    return pickle.loads(pickle.dumps(value))


class PicklingWorkers:
    """Workers that could be anywhere: function, works and answers are pickled on their way."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def map(self, function: Callable[[Any], Any], works: Iterable[Any]) -> Iterator[Any]:
        """The answers of all works, done before the first one is given."""
        works = list(works)
        self.works += works
        answers = list(LocalWorkers().map(pickled(function), map(pickled, works)))
        return iter(map(pickled, answers))


def spark_workers(session: SparkSession) -> SparkWorkers:
    """The workers of a Spark session, whose tasks run in other processes."""
    return SparkWorkers(lambda: ClusterSession(session, "no-files"))


KINDS: dict[str, Callable[[], Workers]] = {
    "this process": LocalWorkers,
    "pickling": PicklingWorkers,
}


@pytest.fixture(params=[*KINDS, "Spark"])
def workers(request: pytest.FixtureRequest, spark: Callable[[], SparkSession]) -> Workers:
    """Each kind of workers."""
    if request.param == "Spark":
        return spark_workers(spark())
    return KINDS[request.param]()


def double(number: int) -> int:
    """A function of a module."""
    return 2 * number


class Times(Struct):
    """A function that is a value."""

    factor: int

    def __call__(self, number: int) -> int:
        return self.factor * number


ERRORS: dict[int, Exception] = {
    1: DamagedFileError("it is damaged", path="records/x", next="repair it"),
    2: OSError(28, "No space left on device"),
    3: ZeroDivisionError("by zero"),
    4: ConfigError("no", key="tier", next="fix it"),
    5: MemoryError(),
}


def fail_at(number: int) -> int:
    """A function that fails for some works."""
    if number in ERRORS:
        raise ERRORS[number]
    return number


def test_answers_come_in_the_order_of_the_works(workers: Workers) -> None:
    """Whatever order they are done in."""
    assert list(workers.map(double, range(100))) == list(range(0, 200, 2))
    assert list(workers.map(Times(3), [3, 1, 2])) == [9, 3, 6]


def test_no_work_has_no_answer(workers: Workers) -> None:
    """Nothing is done for nothing."""
    assert list(workers.map(fail_at, [])) == []


def test_a_failure_is_a_value_and_the_others_have_their_answers(workers: Workers) -> None:
    """An error of ours keeps its class and facts; any other says at which work it was raised."""
    answers = list(workers.map(fail_at, range(7)))
    assert (answers[0], answers[6]) == (0, 6)
    failures = answers[1:6]
    assert all(isinstance(failure, Failure) for failure in failures)
    damaged, disk, bug, config, memory = (failure.to_error() for failure in failures)
    assert isinstance(damaged, DamagedFileError)
    assert (damaged.path, damaged.next) == ("records/x", "repair it")
    assert isinstance(disk, PlatformError)
    assert disk.message == "2: OSError: [Errno 28] No space left on device"
    assert (bug.exit_code, bug.message) == (1, "3: ZeroDivisionError: by zero")
    assert "by zero" in bug.fields["detail"]
    assert (config.exit_code, config.fields) == (2, {"key": "tier"})
    assert memory.exit_code == 4


def test_the_first_failure_is_raised_where_the_caller_needs_every_answer(workers: Workers) -> None:
    """The answers before it are given first."""
    answers = map_or_raise(workers, fail_at, [0, 9, 1, 2])
    assert [next(answers), next(answers)] == [0, 9]
    with pytest.raises(DamagedFileError, match="it is damaged"):
        next(answers)


def test_this_process_does_no_more_than_is_asked_for() -> None:
    """A verification that ends at a difference does not read the rest."""
    started: list[int] = []

    def note(number: int) -> int:
        started.append(number)
        return number

    answers = LocalWorkers().map(note, range(10))
    assert [next(answers), next(answers)] == [0, 1]
    assert started == [0, 1]


def test_verify_gives_the_same_result_by_any_workers(tmp_path: Path, workers: Workers) -> None:
    """Its works are files and partitions: they name files by path and digest, and whoever does them
    opens the store and loads the machine.
    """
    made = create_filled_output(tmp_path)
    here = Verification(
        "s",
        FileAudit(LocalStore(tmp_path)),
        row_reader=state_row_reader(made.runner),
        from_first_entry=True,
    ).run()
    audit = FileAudit(LocalStore(tmp_path), workers)
    row_reader = state_row_reader(made.runner, made.stream.table_machine)
    elsewhere = Verification("s", audit, row_reader=row_reader, from_first_entry=True).run()
    assert elsewhere == here
    assert here.difference is None
    assert here.has_folded_records
    assert here.files > 0
    if isinstance(workers, PicklingWorkers):
        partitions = [work for work in workers.works if isinstance(work, PartitionClaims)]
        assert len(workers.works) == here.files + len(partitions)
        assert [str(work) for work in partitions] == ["in-a/0", "in-a/1", "in-b/0"]
        for work in workers.works:
            file_count = 0
            if isinstance(work, PartitionClaims):
                file_count = len(work.record_files) + len(work.state_files)
            assert len(pickle.dumps(work)) < 1_000 + 1_000 * file_count
    damage_a_file(tmp_path)
    audit = FileAudit(LocalStore(tmp_path), workers)
    difference = Verification("s", audit, from_first_entry=True).run().difference
    assert difference is not None
    assert difference.description == "a file is damaged"


def test_check_gives_the_same_verdict_by_any_workers(tmp_path: Path, workers: Workers) -> None:
    """Its works are partitions, good and bad ones."""
    made = create_filled_output(tmp_path)
    store = LocalStore(tmp_path)
    head = made.ledger.head("s")
    assert head is not None
    account = replace(head.ledger.partitions["in-b/0"], records=1)
    head.ledger.partitions["in-b/0"] = account
    proofs = []
    for load_runner, chosen_workers in (
        (None, LocalWorkers()),
        (made.stream.table_machine, workers),
    ):
        row_reader = state_row_reader(made.runner, load_runner)
        prover = PartitionProver(RecordScan(store), StateFiles(store, "s"), row_reader)
        attempt = CheckAttempt(
            made.open(), head, shipped_suites(made.stream), MemoryChecker(list), prover
        )
        claims = map(attempt.claims, attempt.partitions)
        proofs.append(list(map_or_raise(chosen_workers, prover, claims)))
    assert proofs[0] == proofs[1]
    broken = [one for proof in proofs[1] for one in proof.evidence if not one.holds]
    assert [(str(one.partition), one.promise) for one in broken] == [("in-b/0", "counted")]


def damage_a_file(root: Path) -> Path:
    """Flip a bit in the middle of a record file."""
    path = min((root / "records").rglob("*.parquet"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def test_damaged_files_are_the_same_by_any_workers(tmp_path: Path, workers: Workers) -> None:
    """Found by their digest, or by their size alone."""
    create_filled_output(tmp_path)
    good = FileAudit(LocalStore(tmp_path))
    files = []
    for path in sorted((tmp_path / "records").rglob("*.parquet")):
        key = str(path.relative_to(tmp_path))
        digest, _ = good.digests(key, with_sha256=False)
        files.append(File(path=key, size_bytes=path.stat().st_size, rows=1, digest=digest))
    missing = File(path="records/in-a/0/none.parquet", size_bytes=1, rows=1, digest="0")
    damaged = str(damage_a_file(tmp_path).relative_to(tmp_path))
    joiner = ParquetJoiner(LocalStore(tmp_path), "s", workers=workers)
    by_digest = joiner.find_damaged_files([*files, missing])
    assert list(by_digest) == [damaged, missing.path]
    assert by_digest[damaged].startswith("its digest is ")
    assert by_digest[missing.path] == "it is missing"
    by_size = joiner.find_damaged_files([*files, missing], check_digests=False)
    assert by_size == {missing.path: "it is missing"}
    assert joiner.find_damaged_files([]) == {}
