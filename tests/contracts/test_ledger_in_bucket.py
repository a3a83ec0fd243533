"""Two writers of one ledger in a bucket, while a fifth of all requests has trouble."""

from __future__ import annotations

import threading

import pytest

from seriatim.clock import WallClock
from seriatim.engine.offsets import Partition
from seriatim.errors import PlatformError
from seriatim.ledger.commit import commit, read_head
from tests.contracts.ledger_sides import BucketSide, P, Q, slice_entry, start_side
from tests.s3_proxy import troubled_proxy

COMMITS_SAMPLE = 8
COMMITS_FULL = 100
TROUBLE_SHARE = 0.2


def test_two_writers_lose_and_double_nothing(
    s3_url: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Answers are lost after the server did what was asked, requests are refused or cut off: each
    entry is in the ledger once, and each writer is told so.
    """
    commits = COMMITS_FULL if full else COMMITS_SAMPLE
    side = BucketSide(s3_url)
    start_side(side)
    with troubled_proxy(s3_variables["AWS_ENDPOINT_URL"], TROUBLE_SHARE, 1) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        errors: list[Exception] = []

        def write(partition: Partition) -> None:
            try:
                _commit_entries(side, partition, commits)
            except Exception as error:  # noqa: BLE001  # shown by the test
                errors.append(error)

        threads = [threading.Thread(target=write, args=(partition,)) for partition in (P, Q)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_variables["AWS_ENDPOINT_URL"])
    assert errors == []
    head = read_head(side.again(), "s")
    assert head is not None
    assert head.ledger.sequence == 2 * commits
    assert [head.ledger.partitions[str(place)].frontier for place in (P, Q)] == [commits] * 2
    entries = [manifest.entry for manifest in side.again().entries("s", 0)]
    assert [entry.sequence for entry in entries] == list(range(1, 2 * commits + 1))


def _commit_entries(side: BucketSide, partition: Partition, commits: int) -> None:
    """Move a frontier step by step. After platform trouble go on from where the ledger is, as the
    next run would.
    """
    while True:
        try:
            ledger = side.again()
            head = read_head(ledger, "s")
            assert head is not None
            done = head.ledger.partitions[str(partition)].frontier
            if done == commits:
                return
            entry = slice_entry(done, done + 1, attempt=f"{partition}-{done}", partition=partition)
            commit(ledger, WallClock(), head, entry)
        except PlatformError:
            continue
