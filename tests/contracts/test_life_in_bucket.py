"""The whole life of a stream in a bucket: crashes, two runs at once, check, publish, compact, verify,
damage, repair and backfill. After each step it has the records and the state of the same life on a
disk, and in the end those of a straight fold.

The messages come from a broker in memory. tests/integration/test_s3.py has real processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from deltalake import DeltaTable

from seriatim.engine.crash_points import CRASH_POINTS, arm
from seriatim.engine.files import file_paths
from seriatim.engine.offsets import Partition
from seriatim.errors import FencedError, IntegrityError, PlatformError
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import Ledger
from seriatim.operations.prove.great_expectations_suites import GreatExpectations
from seriatim.operations.prove.partition_rules import state_row_reader
from seriatim.operations.prove.verify import Verification
from seriatim.operations.publish import publish_current
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.storage.audit import FileAudit
from seriatim.storage.current_table import DeltaCurrent
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import ParquetRewriter, record_schema
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import Store, open_store
from seriatim.stream_files import StreamFile
from seriatim.testing import OpenMemoryStream
from seriatim.web.read import PageReader
from seriatim.web.write_status import write_status_after_run
from tests.contracts.disk_streams import DiskStream
from tests.contracts.verify_helper import flip_bit
from tests.operations.check_helper import run_check
from tests.operations.compact_helper import run_compaction
from tests.s3_proxy import proxy_process

POINTS_SAMPLE = ("mid-fold", "manifest-written", "committed", "derived-half")
TROUBLE_SHARE = 0.2
LOSSY_SLICES = 4
PLACES = ("in-a/0", "in-a/1", "in-b/0")


class _CrashError(BaseException):  # no code of ours may catch it
    """Ends a run at a crash point, as kill -9 would."""


class _Life:
    """A stream at one place, and what is done to it."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.made = DiskStream(folder, url=url)
        self.folder = folder
        self.made.kafka.create("in-a", 2)
        self.made.kafka.create("in-b", 1)
        for place in PLACES:
            for session in ("x", "y", "z"):
                self.made.send(place, session, ["a", "b"], 1)

    @property
    def store(self) -> Store:
        """Its output, opened anew."""
        return open_store(self.made.stream.output.path)

    def open(self) -> OpenMemoryStream:
        """The stream with all its ports, as a process of its own opens it."""
        return self.made.open().with_ports(
            joiner=ParquetJoiner(self.store, "s"), rewriter=ParquetRewriter(self.store, "s")
        )

    def send(self, value: int) -> None:
        """A message for every session."""
        for place in PLACES:
            for session in ("x", "y", "z"):
                self.made.send(place, session, value)

    def crash(self, point: str) -> None:
        """A run that ends at a crash point."""

        def on_point(name: str) -> None:
            if name == point:
                raise _CrashError

        arm(on_point)
        try:
            with pytest.raises(_CrashError):
                self.made.run(messages_max=9)
        finally:
            arm(None)

    def overtake(self) -> None:
        """A run that another one overtakes before its commit: it is fenced, or has nothing left."""
        other_runs = [self.made.run]

        def on_point(name: str) -> None:
            if name == "slice-folded" and other_runs:
                other_runs.pop()()

        arm(on_point)
        try:
            self.made.run(messages_max=1000)
        except FencedError:
            pass
        finally:
            arm(None)
        assert other_runs == []

    def check_and_publish(self) -> None:
        """Everything is judged good, and `current` shows it."""
        checked = run_check(
            self.made,
            checker=GreatExpectations(self.store),
            record_scanner=RecordScan(self.store),
            open_stream=self.open(),
        )
        assert checked.ledger.circuit == "closed"
        assert checked.ledger.checked == checked.ledger.sequence
        row_key_spec = self.made.runner.row_key_spec
        assert row_key_spec is not None
        schema = record_schema(self.made.runner.columns)
        current = DeltaCurrent(self.store, "s", schema, row_key_spec)
        publish_current("s", self.made.ledger, current)
        assert current.published_version().sequence == checked.ledger.checked

    def verify(self) -> str:
        """What verify says is different; empty if nothing is."""
        reader = state_row_reader(self.made.runner)
        audit = FileAudit(self.store)
        result = Verification("s", audit, from_first_entry=True, row_reader=reader).run()
        return result.difference.description if result.difference else ""

    def compact(self) -> None:
        """Small files become one for each partition, and orphans are deleted."""
        run_compaction(self.made, rewriter=ParquetRewriter(self.store, "s"))

    def repair(self, **request: object) -> None:
        """Plan a repair, and apply it."""
        tools = self.open()
        RepairRun(tools).apply(plan_repair(tools, RepairRequest(**request)), 1000)  # type: ignore[arg-type]

    def damage(self, key: str) -> None:
        """Flip a bit in the middle of an object."""
        content = self.store.read(key)
        self.store.replace(key, flip_bit(content, 4 * len(content)))

    def ledger(self) -> Ledger:
        """The ledger as a new process reads it."""
        self.made.open()
        head = read_head(self.made.ledger, "s")
        assert head is not None
        return head.ledger

    def record_paths(self) -> list[str]:
        """The record files that readers see."""
        return sorted(self.made.ledger.active_paths(self.made.ledger.head("s")))

    def look(self) -> str:
        """What the page says after a look as `watch` makes it."""
        open_stream = self.made.open()
        file = StreamFile(self.made.stream, str(self.folder))
        trouble = write_status_after_run(
            file, open_stream.log, open_stream.ledger, open_stream.state, open_stream.clock
        )
        assert trouble == ""
        text = "topics = 'in-.*'\nmachine = 'table'\ntable = {key = ['id'], columns = {id = 'string'}}\n"
        text += f"output = {{path = '{self.made.stream.output.path}'}}\n"
        (self.folder / "s.toml").write_text(text)
        status = PageReader(self.folder, lambda: 0.0).stream_status("s")
        assert status.trouble == ""
        return f"{status.verdict} {len(status.partitions)}"

    def digests(self) -> tuple[str, str]:
        """One digest of all records as any Delta reader sees them, and one of all state."""
        store = self.store
        table = DeltaTable(f"{store.url}/records", storage_options=store.delta_options())
        rows = table.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
        rows.sort(key=lambda row: (row["topic"], row["partition"], row["offset"], row["index"]))
        sessions = []
        for name, account in sorted(self.ledger().partitions.items()):
            state = self.made.open().open_state()
            for session, value in sorted(state.all_sessions(account.state)):
                sessions.append(f"{name} {session} {value}")
        records = json.dumps(rows, default=str, sort_keys=True).encode()
        states = "".join(sessions).encode()
        return xxhash.xxh3_128_hexdigest(records), xxhash.xxh3_128_hexdigest(states)


def _live(life: _Life, points: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, str]]]:
    """A whole life, step by step; records and state after each."""
    for number, point in enumerate(points):
        life.send(number)
        life.crash(point)
    life.made.run()
    yield "crashes", life.digests()
    life.send(100)
    life.overtake()
    life.made.run()
    yield "two runs", life.digests()
    life.check_and_publish()
    assert life.verify() == ""
    life.compact()
    assert life.verify() == ""
    yield "compacted", life.digests()
    life.send(200)
    life.made.run()
    life.damage(life.record_paths()[0])
    assert life.verify() != ""
    life.repair(partition="in-a/0")
    assert life.verify() == ""
    yield "flipped", life.digests()
    account = life.ledger().account(Partition("in-b", 0))
    assert account is not None
    life.store.delete(file_paths(account.state))
    life.send(300)
    with pytest.raises(IntegrityError, match="it is missing"):
        life.made.run()
    life.repair()
    life.made.run()
    assert life.verify() == ""
    yield "deleted", life.digests()
    life.repair(ranges={"in-a/1": (3, 9)})
    life.check_and_publish()
    assert life.verify() == ""
    assert life.look() == "good 3"
    yield "folded again", life.digests()


def test_a_life_in_a_bucket_is_that_on_a_disk(tmp_path: Path, s3_url: str, full: bool) -> None:
    """Step by step, and in the end a straight fold of the same messages."""
    points = POINTS_SAMPLE
    if full:
        points = tuple(point for point in CRASH_POINTS if point not in NEVER_PASSED)
    on_disk = dict(_live(_Life(tmp_path / "disk"), points))
    in_bucket = _Life(tmp_path / "bucket", s3_url)
    (tmp_path / "bucket").mkdir(exist_ok=True)
    for step, digests in _live(in_bucket, points):
        assert digests == on_disk[step], step
    straight = _Life(tmp_path / "straight")
    for number in [*range(len(points)), 100, 200, 300]:
        straight.send(number)
    straight.made.run()
    assert straight.digests() == in_bucket.digests()


def test_a_lossy_way_to_the_bucket_changes_nothing(
    tmp_path: Path, s3_url: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of all requests is refused or cut off, or its answer gets lost. Runs and compactions end
    by themselves, or say platform trouble, and the next one goes on.
    """
    straight = _Life(tmp_path / "straight")
    lossy = _Life(tmp_path / "lossy", s3_url)
    with proxy_process(s3_variables["AWS_ENDPOINT_URL"], TROUBLE_SHARE, seed=5) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        for number in range(LOSSY_SLICES):
            for life in (straight, lossy):
                life.send(number)
            _until_no_trouble(lossy.made.run)
        _until_no_trouble(lossy.compact)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_variables["AWS_ENDPOINT_URL"])
    straight.made.run()
    assert lossy.digests() == straight.digests()
    assert lossy.verify() == ""


def _until_no_trouble(work: Callable[[], object]) -> None:
    """Do something again and again, as the next run would."""
    while True:
        try:
            work()
        except PlatformError:
            continue
        return


def test_deleted_tables_of_gaps_are_made_again(tmp_path: Path, s3_url: str) -> None:
    """Runs believe the note of how far the tables are. The first that needs a table finds it gone,
    says so and commits all the same; the next one makes it again.
    """
    life = _Life(tmp_path, s3_url)
    life.made.run()
    store = life.store
    store.delete([key for key, _ in store.keys("gaps/")])
    life.send(1)
    assert life.made.run().derived_error == ""
    life.made.send("in-a/0", "x", b"poison")
    outcome = life.made.run()
    assert outcome.slices == 1
    assert "the table gaps cannot be read" in outcome.derived_error
    assert life.made.run().derived_error == ""
    table = DeltaTable(f"{store.url}/gaps", storage_options=store.delta_options())
    assert table.to_pyarrow_dataset().to_table(use_threads=False).num_rows == 1


NEVER_PASSED = ("table-created", "first-fetch", "mid-fetch", "record-file-open", "record-file-half")
"""Points that such small runs without Spark do not pass, or not every one of them."""
