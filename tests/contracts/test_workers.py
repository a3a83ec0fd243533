"""The contract of workers: one answer per work, in order, failures as values, and nothing crosses the
border that cannot be pickled.

`PicklingWorkers` stands for workers in other processes: it pickles what would be sent. To put a kind
of workers in, add it to `KINDS`.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from msgspec import Struct
from msgspec.structs import replace
from pyspark.sql import SparkSession

from seriatim.engine.failure import Failure
from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.session import ReplacedRecords
from seriatim.errors import ConfigError, DamagedFileError, PlatformError
from seriatim.operations.compact import CompactResult, compact_stream
from seriatim.operations.prove.check import CheckAttempt, CheckedPartition, PartitionCheck
from seriatim.operations.prove.great_expectations_suites import GreatExpectations
from seriatim.operations.prove.partition_rules import (
    PartitionClaims,
    PartitionProver,
    state_row_reader,
)
from seriatim.operations.prove.suite import BrokenCheckError, Suites
from seriatim.operations.prove.verify import Verification
from seriatim.operations.publish import PublishResult, publish_current
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun, TableJoiner, TableToJoin
from seriatim.ports import UnreadableFileError
from seriatim.spark_workers import ClusterSession, SparkWorkers
from seriatim.storage.audit import FileAudit
from seriatim.storage.current_table import DeltaCurrent
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import ParquetRewriter, record_schema
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import LocalStore, digest_object
from seriatim.testing import MemoryStream
from seriatim.workers import ChooseWorkers, LocalWorkers, Workers, map_or_raise, this_process
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.operations.check_helper import shipped_suites, values_between


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
    assert (config.exit_code, config.fields["key"]) == (2, "tier")
    if isinstance(workers, SparkWorkers):
        assert config.fields["worker"] == socket.gethostname()
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


def check_partitions(
    output: MemoryStream, root: Path, workers: Workers, suites: Suites, *, elsewhere: bool
) -> list[CheckedPartition]:
    """What is found in each partition of an output whose ledger counts wrongly in one of them."""
    head = output.ledger.head("s")
    assert head is not None
    account = replace(head.ledger.partitions["in-b/0"], records=1)
    head.ledger.partitions["in-b/0"] = account
    store = LocalStore(root)
    load_runner = output.stream.table_machine if elsewhere else None
    row_reader = state_row_reader(output.runner, load_runner)
    prover = PartitionProver(RecordScan(store), StateFiles(store, "s"), row_reader)
    partition_check = PartitionCheck(prover, GreatExpectations(store), suites.records)
    attempt = CheckAttempt(output.open(), head, suites, partition_check)
    works = map(attempt.work_of, attempt.partitions)
    return list(map_or_raise(workers, partition_check, works))


def test_check_gives_the_same_verdict_by_any_workers(tmp_path: Path, workers: Workers) -> None:
    """Its works are partitions, good and bad ones. Each is judged by rules, and by great-expectations
    where its files are read.
    """
    output = create_filled_output(tmp_path)
    suites = shipped_suites(output.stream, values_between("offset", 0, 1, "warning"))
    here = check_partitions(output, tmp_path, LocalWorkers(), suites, elsewhere=False)
    there = check_partitions(output, tmp_path, workers, suites, elsewhere=True)
    assert there == here
    broken = [one for checked in there for one in checked.proof.evidence if not one.holds]
    assert [(str(one.partition), one.promise) for one in broken] == [("in-b/0", "counted")]
    judged = [str(one.partition) for checked in there for one in checked.judgements]
    assert "in-a/0" in judged


def test_a_check_that_cannot_be_made_is_said_by_any_workers(
    tmp_path: Path, workers: Workers
) -> None:
    """An expectation about a column that is not there, and a file that cannot be read."""
    output = create_filled_output(tmp_path)
    suites = shipped_suites(output.stream, values_between("colour", 0, 1))
    checked = check_partitions(output, tmp_path, workers, suites, elsewhere=True)
    with pytest.raises(BrokenCheckError, match="there is no column 'colour'"):
        checked[0].raise_errors()
    for path in (tmp_path / "records").rglob("*.parquet"):
        path.unlink()
    checked = check_partitions(output, tmp_path, workers, suites, elsewhere=True)
    with pytest.raises(UnreadableFileError, match="records/in-a/0/"):
        checked[0].raise_errors()


def published_table(root: Path) -> pa.Table:
    """The table `current` as any reader sees it, in an order of its own."""
    table = DeltaTable(root / "current").to_pyarrow_dataset().to_table(use_threads=False)
    columns = ("topic", "partition", "session", "id")
    return table.sort_by([(name, "ascending") for name in columns])


def test_publish_gives_the_same_table_by_any_workers(tmp_path: Path, workers: Workers) -> None:
    """Its works are partitions: built from nothing, and with new records merged into rows that are
    there.
    """
    output = create_filled_output(tmp_path)
    row_key_spec = output.runner.row_key_spec
    assert row_key_spec is not None
    chosen_for: list[int] = []

    def choose(records: int) -> Workers:
        chosen_for.append(records)
        return workers

    def publish(choose_workers: ChooseWorkers, *, rebuild: bool) -> PublishResult:
        schema = record_schema(output.runner.columns)
        store = LocalStore(tmp_path)
        current = DeltaCurrent(store, "s", schema, row_key_spec, choose_workers=choose_workers)
        return publish_current("s", output.ledger, current, rebuild=rebuild)

    here = publish(this_process, rebuild=False)
    table_here = published_table(tmp_path)
    there = publish(choose, rebuild=True)
    assert published_table(tmp_path).equals(table_here)
    assert there.written.written_files == here.written.written_files == 3
    assert chosen_for == [there.records_to_read()]
    output.send("in-a/0", "x", ["a", "b"], 42)
    output.run()
    merged = publish(choose, rebuild=False)
    assert (merged.written.written_files, merged.written.removed_files) == (1, 1)
    merged_table = published_table(tmp_path)
    publish(this_process, rebuild=True)
    assert published_table(tmp_path).equals(merged_table)


def test_storage_that_fails_while_publishing_is_trouble_by_any_workers(
    tmp_path: Path, workers: Workers
) -> None:
    """The work says so as a value, and the caller tries again before it gives up."""
    output = create_filled_output(tmp_path)
    row_key_spec = output.runner.row_key_spec
    assert row_key_spec is not None
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "in-a").write_text("not a folder")
    schema = record_schema(output.runner.columns)
    store = LocalStore(tmp_path)
    current = DeltaCurrent(store, "s", schema, row_key_spec, choose_workers=lambda _: workers)
    with pytest.raises(PlatformError, match="the table current"):
        publish_current("s", output.ledger, current)


def active_files(output: DiskStream) -> list[File]:
    """The record files that are in the table, by offset, with the digests that they have."""
    head = output.ledger.head("s")
    assert head is not None
    store = LocalStore(output.root)
    files = sorted(output.ledger.active_files(head), key=lambda file: file.first_offset)
    return [replace(file, digest=digest_object(store, file.path)) for file in files]


def active_digests(output: DiskStream) -> dict[str, str]:
    """The record files that are in the table, with their digests."""
    return {file.path: file.digest for file in active_files(output)}


def state_digests(output: MemoryStream) -> dict[str, str]:
    """The state files of all partitions, with their digests."""
    head = output.ledger.head("s")
    assert head is not None
    accounts = head.ledger.partitions.values()
    return {file.path: file.digest for account in accounts for file in account.state}


def damage_input(root: Path) -> None:
    """Flip a bit in the first record file of one partition."""
    path = min((root / "records" / "in-a" / "1").glob("*.parquet"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def compact_files(root: Path, workers: Workers) -> tuple[DiskStream, CompactResult]:
    """An output with one damaged file, after its compaction."""
    output = create_filled_output(root)
    damage_input(root)
    store = LocalStore(root)
    open_stream = output.open().with_ports(
        rewriter=ParquetRewriter(store, "s"), state=StateFiles(store, "s")
    )
    return output, compact_stream(open_stream, choose_workers=lambda _: workers)


def test_compaction_writes_the_same_files_by_any_workers(tmp_path: Path, workers: Workers) -> None:
    """Its works are groups of files: the same new files, with the same digests. A damaged input is
    named, and nothing of its group is replaced.
    """
    here, result_here = compact_files(tmp_path / "here", LocalWorkers())
    there, result_there = compact_files(tmp_path / "there", workers)
    assert active_digests(there) == active_digests(here)
    assert state_digests(there) == state_digests(here)
    assert [str(piece) for piece in result_there.pieces] == [
        str(piece) for piece in result_here.pieces
    ]
    assert any(path.rpartition("/")[2].startswith("compact-") for path in active_digests(there))
    damaged = [path for piece in result_there.pieces for path in piece.damaged_inputs]
    assert [path.split("/")[:3] for path in damaged] == [["records", "in-a", "1"]]
    assert set(damaged) < set(active_digests(there))


def test_a_piece_that_is_overtaken_stops_no_other_by_any_workers(
    tmp_path: Path, workers: Workers
) -> None:
    """Another run replaces the files of one piece after its works were given out."""
    output = create_filled_output(tmp_path)
    store = LocalStore(tmp_path)
    open_stream = output.open().with_ports(
        rewriter=ParquetRewriter(store, "s"), state=StateFiles(store, "s")
    )

    class Overtaken:
        """Workers beside whom another compaction of one partition is made first."""

        def map(self, function: Callable[[Any], Any], works: Iterable[Any]) -> Iterator[Any]:
            """The answers, after the other compaction."""
            answers = list(workers.map(function, works))
            other = output.open().with_ports(
                rewriter=ParquetRewriter(store, "s"), state=StateFiles(store, "s")
            )
            compact_stream(other, Partition.parse("in-a/1"))
            return iter(answers)

    result = compact_stream(open_stream, choose_workers=lambda _: Overtaken())
    dropped = {str(piece.partition) for piece in result.pieces if piece.drop_reason}
    committed = {str(piece.partition) for piece in result.pieces if piece.sequence >= 0}
    assert dropped == {"in-a/1"}
    assert committed == {"in-a/0", "in-b/0"}
    assert Verification("s", FileAudit(store), from_first_entry=True).run().difference is None


def repair_damage(root: Path, workers: Workers) -> DiskStream:
    """An output of which a lost file was made again."""
    output = create_filled_output(root)
    min((root / "records" / "in-a" / "1").glob("*.parquet")).unlink()
    open_stream = output.open().with_ports(joiner=ParquetJoiner(LocalStore(root), "s"))
    repair_run = RepairRun(open_stream, choose_workers=lambda _: workers)
    repair_run.apply(plan_repair(open_stream, RepairRequest()), 1_000)
    return output


def test_a_repair_writes_the_same_files_by_any_workers(tmp_path: Path, workers: Workers) -> None:
    """What was folded again is joined with what stays, and verify agrees."""
    here = repair_damage(tmp_path / "here", LocalWorkers())
    there = repair_damage(tmp_path / "there", workers)
    assert active_digests(there) == active_digests(here)
    audit = FileAudit(LocalStore(tmp_path / "there"))
    assert Verification("s", audit).run().difference is None


def rebuild_lost_state(root: Path, workers: Workers) -> DiskStream:
    """An output whose state file is gone, as the messages that made it: state is made of records."""
    output = DiskStream(root)
    output.kafka.create("in-a", 1)
    for session in "xyz":
        output.send("in-a/0", session, ["a", "b"], 1, None)
    output.run()
    output.send("in-a/0", "x", ["a", "c"], 3)
    output.run()
    output.kafka.delete_records(Partition.parse("in-a/0"), 11)
    (root / min(state_digests(output))).unlink()
    store = LocalStore(root)
    open_stream = output.open().with_ports(
        joiner=ParquetJoiner(store, "s"), state=StateFiles(store, "s")
    )
    repair_run = RepairRun(
        open_stream,
        choose_workers=lambda _: workers,
        load_runner=output.stream.table_machine,
    )
    repair_run.apply(plan_repair(open_stream, RepairRequest(forward=True)), 1_000)
    return output


def test_state_is_rebuilt_the_same_by_any_workers(tmp_path: Path, workers: Workers) -> None:
    """The same state files of the same records, and verify finds the rows of the records in them."""
    here = rebuild_lost_state(tmp_path / "here", LocalWorkers())
    there = rebuild_lost_state(tmp_path / "there", workers)
    assert state_digests(there) == state_digests(here) != {}
    audit = FileAudit(LocalStore(tmp_path / "there"))
    row_reader = state_row_reader(there.runner)
    result = Verification("s", audit, row_reader=row_reader, from_first_entry=True).run()
    assert result.difference is None
    assert result.has_folded_records


def test_a_repair_that_must_change_nothing_is_refused_by_any_workers(
    tmp_path: Path, workers: Workers
) -> None:
    """The records that were made differ from those that they replace: nothing is committed."""
    output = create_filled_output(tmp_path)
    open_stream = output.open().with_ports(joiner=ParquetJoiner(LocalStore(tmp_path), "s"))
    before = active_digests(output)
    partition = Partition.parse("in-a/1")
    files = [file for file in active_files(output) if str(partition) in file.path]
    assert len(files) > 1
    joined = TableJoiner(open_stream.joiner)
    work = TableToJoin(
        partition=partition,
        table="",
        stem="0-other",
        old_files=tuple(files),
        new_files=(files[0],),
        replaced=ReplacedRecords(start=0, end=1_000),
        must_be_unchanged=True,
    )
    (answer,) = map_or_raise(workers, joined, [work])
    # The second file is not among what was made again.
    assert answer.changed_offset == files[1].first_offset
    assert answer.joined_files == ()
    assert active_digests(output) == before


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
