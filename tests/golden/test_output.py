"""An output that an earlier version wrote is read, folded on, repaired, compacted and published by
this one.

The output, the messages that made it and what must come of it are golden files:
tests/golden/output.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.output import (
    GOLDEN,
    GOLDENS,
    NEWEST,
    STREAMS,
    everything,
    folded_on,
    opened,
    pinned,
    published,
    repaired,
    told_of,
    verified,
)


@pytest.fixture(params=GOLDENS, ids=[golden.name for golden in GOLDENS])
def golden(request: pytest.FixtureRequest) -> Path:
    """A golden output of each format."""
    folder: Path = request.param
    return folder


def test_every_format_keeps_the_same() -> None:
    """The same messages and commands gave outputs that say the same, whatever the files look like."""
    assert pinned(NEWEST)["read"] == pinned(GOLDEN)["read"]


def test_it_is_read_as_it_was_written(golden: Path, tmp_path: Path) -> None:
    """Records, state, gaps, quarantine, current and status of the old files are those of then, and
    verify agrees.
    """
    with opened(tmp_path, golden):
        assert everything(tmp_path) == pinned(golden)["read"]
        assert verified("--all", "--kafka") == pinned(golden)["verified"]


def test_it_is_folded_on(golden: Path, tmp_path: Path) -> None:
    """Further messages go on from the old state: a quarantined session begins again, one that waits
    goes on.
    """
    with opened(tmp_path, golden) as cluster:
        assert folded_on(cluster) == pinned(golden)["runs"]
        assert everything(tmp_path) == pinned(golden)["folded"]


def test_it_is_repaired(golden: Path, tmp_path: Path) -> None:
    """A record file that is gone and a state file with a wrong byte are made again, as they were."""
    with opened(tmp_path, golden):
        assert repaired(tmp_path) == pinned(golden)["repaired"]
    assert (
        pinned(golden)["repaired"]["outcome"]["orders"]["records"]
        == pinned(golden)["read"]["orders"]["records"]
    )


def test_it_is_compacted_checked_and_published(golden: Path, tmp_path: Path) -> None:
    """Compaction changes no record, the check goes on after the old verdict, and current is brought
    to it.
    """
    with opened(tmp_path, golden) as cluster:
        assert published(tmp_path, cluster) == pinned(golden)["published"]
    assert (
        pinned(golden)["published"]["outcome"]["orders"]["records"]
        == pinned(golden)["folded"]["orders"]["records"]
    )


def test_derived_tables_are_rebuilt(golden: Path, tmp_path: Path) -> None:
    """The tables gaps, quarantine and the further one, made again of the old ledger alone, are what
    they were.
    """
    with opened(tmp_path, golden):
        for stream in STREAMS:
            assert told_of("rebuild", stream)["exit"] == 0
        assert everything(tmp_path) == pinned(golden)["read"]
