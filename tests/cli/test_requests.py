"""How many requests a run, an idle run and the page make of a bucket.

Requests are what a bucket costs in money and in time. They are counted by a proxy, so that the
figures are exact on any machine. The messages come from a broker in memory; `bench/requests.py` counts
whole runs with Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seriatim import context
from seriatim.cli import run as run_command
from seriatim.ledger.commit import read_head
from seriatim.ledger.entries import StartEntry
from seriatim.ledger.manifests import Manifest, ManifestFiles
from seriatim.ledger.model import Account, EntryMark, Ledger
from seriatim.memory.check import MemoryChecker
from seriatim.memory.stream import OpenMemoryStream
from seriatim.operations.status import StreamStatus
from seriatim.storage.audit import FileAudit
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import open_store
from seriatim.stream_files import StreamFile
from seriatim.web.read import PageReader
from tests.contracts.disk_streams import DiskStream
from tests.operations.check_helper import run_check
from tests.s3_proxy import ProxyProcess, proxy_process

SLICE_REQUESTS_MAX = 95
REQUESTS_PER_PARTITION_MAX = 5
IDLE_REQUESTS_MAX = 12
DELAY_SECONDS = 0.03
DELAY_OF_A_SLICE_SECONDS_MAX = 2.5
PAGE_STREAMS = 50
REFRESHES_MAX = 8
STREAM_FILE = """
topics = "in-.*"
machine = "table"
table = {key = ["id"], columns = {id = "string"}}
output = {path = "PATH"}
"""


class _NoSpark:
    """In place of Spark, which these runs do not need."""

    traced_sessions: tuple[str, ...] = ()

    def stop(self) -> None:
        """Nothing was started."""


class _Bucket:
    """A stream in a bucket behind a proxy that counts."""

    def __init__(
        self, folder: Path, url: str, proxy: ProxyProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.proxy = proxy
        self.made = DiskStream(folder, url=url)
        self.file = StreamFile(self.made.stream, str(folder))
        monkeypatch.setattr(context, "open_for_fold", self._open)

    def _open(self, *_: Any) -> OpenMemoryStream:
        return self.made.open().with_ports(file=self.file, spark=_NoSpark())

    def send(self, partitions: int, *values: Any) -> None:
        """The same messages for two sessions of every partition."""
        for number in range(partitions):
            for session in ("x", "y"):
                self.made.send(f"in-a/{number}", session, *values)

    def accounts(self) -> list[Account]:
        """What the ledger says of each partition."""
        head = read_head(self.made.open().ledger, "s")
        assert head is not None
        return list(head.ledger.partitions.values())

    def count_run(self) -> Counter[str]:
        """Run the stream as `seriatim run` does; the requests by method."""
        self.proxy.take_requests()
        messages_max = self.file.stream.slice.messages_max
        run_command._fold_stream(self._open(), messages_max, None)
        self.requests = self.proxy.take_requests()
        return Counter(method for method, _ in self.requests)


@pytest.fixture
def bucket(
    tmp_path: Path, s3_url: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[_Bucket]:
    """An empty output."""
    with proxy_process(s3_variables["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield _Bucket(tmp_path, s3_url, proxy, monkeypatch)


def _requests_of_slice(bucket: _Bucket, partitions: int) -> Counter[str]:
    """The requests of a run of one slice that has messages for every partition, and in which all
    state is merged into one file for each.
    """
    bucket.made.kafka.create("in-a", partitions)
    bucket.send(partitions, ["a", "b"], 1)
    bucket.count_run()
    bucket.send(partitions, 2, 3)
    return bucket.count_run()


def test_a_slice_and_an_idle_run_make_few_requests(bucket: _Bucket) -> None:
    """A task reads its state once and writes two files, and the commit looks at each record file: four
    requests for a partition. Nothing is listed but the newest commits and the reports.
    """
    requests = _requests_of_slice(bucket, 12)
    assert requests == {"PUT": 31, "GET": 20, "HEAD": 12, "LIST": 5}
    assert requests.total() <= SLICE_REQUESTS_MAX
    # What a server further away adds, even if no two requests were under way at the same time.
    assert requests.total() * DELAY_SECONDS <= DELAY_OF_A_SLICE_SECONDS_MAX
    idle = bucket.count_run()
    assert idle == {"GET": 6, "LIST": 1, "PUT": 1}
    assert idle.total() <= IDLE_REQUESTS_MAX


def test_a_state_file_that_is_not_merged_yet_is_one_request_more(bucket: _Bucket) -> None:
    """A slice that touches few sessions leaves a small state file beside the large one. The next slice
    reads both.
    """
    bucket.made.kafka.create("in-a", 12)
    for number in range(12):
        for session in "xyzuvw":
            bucket.made.send(f"in-a/{number}", session, ["a", "b"], 1)
    bucket.count_run()
    totals = []
    for _ in range(2):
        for number in range(12):
            bucket.made.send(f"in-a/{number}", "x", 2)
        totals.append(bucket.count_run().total())
        unmerged = {len(account.state) for account in bucket.accounts()}
        assert unmerged == {2}
    assert totals == [68, 68]
    for number in range(12):
        bucket.made.send(f"in-a/{number}", "y", 2)
    assert bucket.count_run() == {"PUT": 31, "GET": 20 + 12, "HEAD": 12, "LIST": 5}


def test_a_check_lists_no_files(bucket: _Bucket) -> None:
    """It reads what is new. Whether the state is there with which it begins is asked by name."""
    _requests_of_slice(bucket, 12)
    audit = FileAudit(bucket.made.ledger.store)
    checker = MemoryChecker(lambda file: list(audit.rows(file.path)))

    def check() -> None:
        result = run_check(bucket.made, checker=checker, record_scanner=RecordScan(audit.store))
        assert result.ledger.circuit == "closed"

    check()
    bucket.send(12, 4)
    bucket.count_run()
    bucket.proxy.take_requests()
    check()
    listings = {path for method, path in bucket.proxy.take_requests() if method == "LIST"}
    assert listings
    assert all("_delta_log" in path for path in listings)


def test_requests_grow_slowly_with_partitions(bucket: _Bucket) -> None:
    """With twice the partitions of the other test."""
    grown = _requests_of_slice(bucket, 24).total() - 68
    assert grown == 12 * 4
    assert grown <= 12 * REQUESTS_PER_PARTITION_MAX


def test_requests_do_not_grow_with_the_log(bucket: _Bucket) -> None:
    """A table is loaded neither for a slice nor for its checkpoint, which is due after a hundred
    commits.
    """
    bucket.made.kafka.create("in-a", 1)
    bucket.send(1, ["a"])
    totals = []
    for number in range(10):
        bucket.send(1, number)
        totals.append(bucket.count_run().total())
    # After every tenth commit a note and a listing tell whether a checkpoint is due.
    assert max(totals[1:]) - min(totals[1:]) == 2


class _Page:
    """The list of many streams in a bucket, and how many requests each refresh of it makes."""

    def __init__(self, bucket: _Bucket, folder: Path) -> None:
        self.proxy = bucket.proxy
        self.names = [f"s{number}" for number in range(PAGE_STREAMS)]
        self.files = {}
        for name in self.names:
            path = f"{bucket.file.stream.output.path}/{name}"
            (folder / f"{name}.toml").write_text(STREAM_FILE.replace("PATH", path))
            self.files[name] = StatusFiles(open_store(path), name)
            self.commit(name, 0)
            self.write_status(name, 0)
        self.reader = PageReader(folder, lambda: 0.0)
        self.requests: list[int] = []

    def commit(self, name: str, sequence: int) -> None:
        """A new entry, of which the status file knows nothing."""
        manifests = ManifestFiles(self.files[name].store)
        ledger = Ledger(stream=name, sequence=sequence)
        manifest = Manifest(entry=StartEntry(attempt="a", sequence=sequence), ledger=ledger)
        manifests.put_witness(EntryMark(sequence, manifests.write(manifest).sha256))

    def write_status(self, name: str, sequence: int, verdict: str = "good") -> None:
        """What a run does at its end."""
        status = StreamStatus(stream=name, verdict=verdict, sequence=sequence)
        self.files[name].write_status(status)

    def refresh(self) -> list[StreamStatus]:
        """What the list shows."""
        self.proxy.take_requests()
        statuses = self.reader.stream_statuses(self.names)
        self.requests.append(len(self.proxy.take_requests()))
        return statuses

    def refresh_until_seen(self, sequence: int) -> None:
        """Refresh until all streams are shown as of this entry."""
        for _ in range(REFRESHES_MAX):
            if {status.sequence for status in self.refresh()} == {sequence}:
                return
        raise AssertionError(self.requests)


def test_a_refresh_of_the_page_is_at_most_one_request_for_a_stream(
    bucket: _Bucket, tmp_path: Path
) -> None:
    """At the first look, when nothing is new, and when every stream has a new entry, with its status or
    without. What is not read by one refresh is by the next ones.
    """
    page = _Page(bucket, tmp_path)
    page.refresh_until_seen(0)
    for name in page.names:
        page.commit(name, 1)
    page.refresh_until_seen(1)
    assert {status.trouble for status in page.refresh()} == {""}
    assert page.requests[-1] == PAGE_STREAMS
    for name in page.names:
        page.commit(name, 2)
        page.write_status(name, 2)
    page.refresh_until_seen(2)
    assert max(page.requests) == PAGE_STREAMS
