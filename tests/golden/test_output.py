"""An output that an earlier version wrote is read, folded on, repaired, compacted and published by
this one.

The output, the messages that made it and what must come of it are golden files:
tests/golden/output.py.
"""

from __future__ import annotations

from pathlib import Path

from tests.golden.output import (
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


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Records, state, gaps, quarantine, current and status of the old files are those of then, and
    verify agrees.
    """
    with opened(tmp_path):
        assert everything(tmp_path) == pinned()["read"]
        assert verified("--all", "--kafka") == pinned()["verified"]


def test_it_is_folded_on(tmp_path: Path) -> None:
    """Further messages go on from the old state: a quarantined session begins again, one that waits
    goes on.
    """
    with opened(tmp_path) as cluster:
        assert folded_on(cluster) == pinned()["runs"]
        assert everything(tmp_path) == pinned()["folded"]


def test_it_is_repaired(tmp_path: Path) -> None:
    """A record file that is gone and a state file with a wrong byte are made again, as they were."""
    with opened(tmp_path):
        assert repaired(tmp_path) == pinned()["repaired"]
    assert (
        pinned()["repaired"]["outcome"]["orders"]["records"]
        == pinned()["read"]["orders"]["records"]
    )


def test_it_is_compacted_checked_and_published(tmp_path: Path) -> None:
    """Compaction changes no record, the check goes on after the old verdict, and current is brought
    to it.
    """
    with opened(tmp_path) as cluster:
        assert published(tmp_path, cluster) == pinned()["published"]
    assert (
        pinned()["published"]["outcome"]["orders"]["records"]
        == pinned()["folded"]["orders"]["records"]
    )


def test_derived_tables_are_rebuilt(tmp_path: Path) -> None:
    """The tables gaps, quarantine and the further one, made again of the old ledger alone, are what
    they were.
    """
    with opened(tmp_path):
        for stream in STREAMS:
            assert told_of("rebuild", stream)["exit"] == 0
        assert everything(tmp_path) == pinned()["read"]
