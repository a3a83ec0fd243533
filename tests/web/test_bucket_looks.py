"""When the list of streams asks a bucket again."""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim.errors import IntegrityError
from seriatim.ledger.entries import StartEntry
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import EntryMark, Ledger
from seriatim.memory.store import MemoryStore
from seriatim.operations.status import StreamStatus
from seriatim.storage.status_file import StatusFiles
from seriatim.web import read
from seriatim.web.bucket_looks import BucketLooks, RequestBudget
from seriatim.web.read import PageReader

LIST_STREAMS = 50
REFRESHES_MAX = 8
STREAM_FILE = """
topics = "in-.*"
machine = "table"
table = {key = ["id"], columns = {id = "string"}}
output = {path = "s3://bucket/NAME"}
"""
WHOLE_LOOK = 5
"""The most requests that one look makes: a listing, status file, witness, and two manifests."""


class _CountingStore(MemoryStore):
    is_remote = True
    requests = 0

    def __init__(self, url: str = "memory://") -> None:
        super().__init__()
        self.url = url

    def read(self, key: str) -> bytes:
        self.requests += 1
        return super().read(key)

    def stamps(self, prefix: str) -> dict[str, str]:
        self.requests += 1
        return super().stamps(prefix)


class _Bucket:
    """The output of a stream in a bucket, and the looks at it."""

    def __init__(self, name: str = "s") -> None:
        self.name = name
        self.store = _CountingStore(f"s3://bucket/{name}")
        self.looks = BucketLooks()

    def commit(self, sequence: int) -> None:
        """A new entry, of which the status file knows nothing."""
        files = StatusFiles(self.store, self.name)
        entry = StartEntry(attempt="a", sequence=sequence)
        manifest = Manifest(entry=entry, ledger=Ledger(stream=self.name, sequence=sequence))
        reference = files._manifests.write(manifest)
        files._manifests.put_witness(EntryMark(sequence, reference.sha256))

    def write_status(self, sequence: int, verdict: str = "good") -> None:
        """What a run does at its end."""
        status = StreamStatus(stream=self.name, verdict=verdict, sequence=sequence)
        StatusFiles(self.store, self.name).write_status(status)

    def look(self, requests_max: int | None = None) -> tuple[int, int, int]:
        """The entry of the status and of the ledger that are shown (-1: none), and the requests."""
        self.store.requests = 0
        budget = RequestBudget(requests_max)
        status, ledger = self.looks.look(StatusFiles(self.store, "s"), budget)
        shown_status = -1 if status is None else status.sequence
        shown_ledger = -1 if ledger is None else ledger.sequence
        assert requests_max is None or self.store.requests <= requests_max
        return shown_status, shown_ledger, self.store.requests


@pytest.fixture
def bucket() -> _Bucket:
    """An output with one entry, of which the status file tells."""
    bucket = _Bucket()
    bucket.commit(0)
    bucket.write_status(0)
    return bucket


def test_the_first_look_of_a_list_is_one_request(bucket: _Bucket) -> None:
    """Its status file. The next look reads the witness, too; after that a listing is enough."""
    bucket.commit(1)
    assert bucket.look(WHOLE_LOOK) == (0, -1, 1)
    status, ledger, _ = bucket.look(WHOLE_LOOK)
    assert (status, ledger) == (0, 1)
    assert bucket.look(WHOLE_LOOK) == (0, 1, 1)


def test_a_look_without_a_limit_reads_everything_at_once(bucket: _Bucket) -> None:
    """For a command that looks only once."""
    bucket.commit(1)
    assert bucket.look()[:2] == (0, 1)
    bucket.write_status(1)
    assert bucket.look()[:2] == (1, -1)


def test_what_changed_waits_until_requests_are_left(bucket: _Bucket) -> None:
    """Until then the stream is shown as it was, and nothing is shown twice or older than before."""
    bucket.look()
    bucket.commit(1)
    bucket.write_status(1)
    bucket.commit(2)
    for requests_max in (0, 1, 2):
        assert bucket.look(requests_max)[:2] == (0, -1)
    # Status file and witness can be read, the ledger cannot.
    assert bucket.look(4)[:2] == (1, -1)
    assert bucket.look(WHOLE_LOOK)[:2] == (1, 2)
    bucket.write_status(3)
    bucket.commit(3)
    bucket.commit(4)
    # The ledger of before is older than the status now.
    assert bucket.look(4)[:2] == (3, -1)


def test_who_waits_longest_is_first() -> None:
    """A stream of which nothing is known comes before all others; a look that could not be completed
    does not count.
    """
    looks = BucketLooks()
    files = [StatusFiles(_CountingStore(), name) for name in ("a", "b", "c")]
    looks.look(files[1], RequestBudget())
    looks.look(files[0], RequestBudget())
    looks.look(files[1], RequestBudget(0))
    assert sorted(files, key=looks.waiting_rank) == [files[2], files[1], files[0]]


def test_a_damaged_stream_stays_damaged(bucket: _Bucket) -> None:
    """Also at a look without requests, and until it is mended."""
    bucket.look()
    bucket.store.replace("head.json", b"torn")
    for requests_max in (WHOLE_LOOK, 0, 1, WHOLE_LOOK, None):
        with pytest.raises(IntegrityError, match=r"head\.json cannot be read"):
            bucket.look(requests_max)
    bucket.commit(1)
    assert bucket.look(WHOLE_LOOK)[:2] == (0, 1)


class _List:
    """The list of many streams, and how many requests each refresh of it makes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = [f"s{number}" for number in range(LIST_STREAMS)]
        self.buckets = {name: _Bucket(name) for name in self.names}
        for name, bucket in self.buckets.items():
            (folder / f"{name}.toml").write_text(STREAM_FILE.replace("NAME", name))
            bucket.commit(0)
            bucket.write_status(0)
        monkeypatch.setattr(
            read, "open_store", lambda path: self.buckets[path.rpartition("/")[2]].store
        )
        self.reader = PageReader(folder, lambda: 0.0)
        self.requests: list[int] = []

    def refresh(self) -> list[StreamStatus]:
        """What the list shows."""
        for bucket in self.buckets.values():
            bucket.store.requests = 0
        statuses = self.reader.stream_statuses(self.names)
        self.requests.append(sum(bucket.store.requests for bucket in self.buckets.values()))
        return statuses

    def refresh_until_seen(self, sequence: int) -> None:
        """Refresh until all streams are shown as of this entry."""
        for _ in range(REFRESHES_MAX):
            if {status.sequence for status in self.refresh()} == {sequence}:
                return
        raise AssertionError(self.requests)


@pytest.fixture
def streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _List:
    """A list that was refreshed until all is known."""
    streams = _List(tmp_path, monkeypatch)
    for _ in range(REFRESHES_MAX):
        assert [status.verdict for status in streams.refresh()] == ["good"] * LIST_STREAMS
    return streams


def test_a_refresh_is_at_most_one_request_for_a_stream(streams: _List) -> None:
    """At first, when nothing is new, and when every stream has a new entry, with its status or without.
    What one refresh does not read, the next ones do.
    """
    assert streams.requests[0] == streams.requests[-1] == LIST_STREAMS
    for bucket in streams.buckets.values():
        bucket.commit(1)
        bucket.write_status(1)
    streams.refresh_until_seen(1)
    for bucket in streams.buckets.values():
        bucket.commit(2)
    streams.refresh_until_seen(2)
    assert max(streams.requests) <= LIST_STREAMS


def test_what_is_new_in_a_quiet_list_is_shown_at_once(streams: _List) -> None:
    """A status, and an entry without one, of streams that were read before others."""
    streams.buckets["s7"].write_status(0, "bad")
    streams.buckets["s8"].commit(1)
    statuses = streams.refresh()
    assert statuses[7].verdict == "bad"
    assert statuses[8].sequence == 1
    assert {status.sequence for status in statuses[9:]} == {0}
    assert streams.requests[-1] <= LIST_STREAMS


def test_a_damaged_stream_stays_damaged_on_the_list(streams: _List) -> None:
    """Also while others have much that is new, and until it is mended."""
    streams.buckets["s3"].store.replace("head.json", b"torn")
    streams.refresh()
    for name, bucket in streams.buckets.items():
        if name != "s3":
            bucket.commit(1)
    for _ in range(REFRESHES_MAX):
        assert "head.json cannot be read" in streams.refresh()[3].trouble
    streams.buckets["s3"].commit(1)
    streams.refresh_until_seen(1)


def test_a_stream_alone_is_always_read_whole(streams: _List) -> None:
    """By commands that show it once, without a limit of requests."""
    bucket = streams.buckets["s5"]
    bucket.commit(1)
    assert streams.reader.stream_status("s5").sequence == 1
    bucket.store.requests = 0
    assert streams.reader.stream_status("s5").sequence == 1
    assert bucket.store.requests == 1
