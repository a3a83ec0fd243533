"""`seriatim streams` as a user types it: one line for each stream file, whatever its state is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_run import STREAM
from tests.golden.product import FakeCluster, command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stream that has run, one that has not, one with a wrong file, one with a wrong machine."""
    folder = tmp_path / "streams"
    folder.mkdir()
    (folder / "ran.toml").write_text(STREAM.replace("lake/t", "lake/ran"))
    (folder / "fresh.toml").write_text(STREAM.replace("lake/t", "lake/fresh"))
    (folder / "wrong.toml").write_text(STREAM.replace("machine", "machin"))
    own_machine = 'topics = "x"\nmachine = "nowhere_at_all:Machine"\noutput = {path = "lake/o"}\n'
    (folder / "lost.toml").write_text(own_machine)
    return tmp_path


def test_each_stream_has_a_line(folder: Path) -> None:
    """Broken ones with the reason, and they do not hide the others; the exit code tells them."""
    cluster = FakeCluster()
    cluster.kafka.create("none-a")
    snapshot = {"type": "snapshot", "seq": 1, "rows": []}
    cluster.kafka.produce("none-a", "s", json.dumps(snapshot).encode(), timestamp=1)
    with cluster.installed(folder):
        assert command("run", "ran", "--json").code == 0
        answer = command("streams", "--json")
        shown = command("streams")
    (listed,) = answer.objects()
    streams = {stream["stream"]: stream for stream in listed["streams"]}
    assert list(streams) == ["fresh", "lost", "ran", "wrong"]
    assert [stream["state"] for stream in streams.values()] == ["new", "broken", "good", "broken"]
    assert streams["fresh"]["text"] == "never run: seriatim run fresh"
    assert streams["ran"]["text"] == "entry 1, 1 partition"
    assert "did you mean machine?" in streams["wrong"]["text"]
    assert "nowhere_at_all.py" in streams["lost"]["next"]
    assert (answer.code, shown.code) == (2, 2)
    assert "broken: lost, wrong" in shown.err
    assert f"4 stream files in {folder / 'streams'}" in shown.out


def test_without_a_broken_stream_all_is_well(folder: Path) -> None:
    """Kafka is not asked."""
    for name in ("wrong", "lost"):
        (folder / f"streams/{name}.toml").unlink()
    with FakeCluster().installed(folder):
        assert command("streams").code == 0


def test_no_stream_file_at_all_is_refused(tmp_path: Path) -> None:
    """The error says how to make the first one."""
    with FakeCluster().installed(tmp_path):
        answer = command("streams")
    assert answer.code == 2
    assert "seriatim new" in answer.err
