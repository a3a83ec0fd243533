"""Temporary folders of Spark: gone afterwards, also those of processes that were killed."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from seriatim.kafka.spark_reader import scratch_folder


def test_what_a_killed_process_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next one on this machine; what lives, is another machine's or somebody else's stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host = socket.gethostname()
    dead = subprocess.Popen(["true"])
    dead.wait()
    others = [
        f"seriatim-use-{host}-{os.getpid()}-abcd_123",
        f"seriatim-use-{host}-2-{dead.pid}-abcd_123",
        f"seriatim-use-elsewhere-{dead.pid}-abcd_123",
        f"seriatim-other-{host}-{dead.pid}-abcd_123",
    ]
    for name in (*others, f"seriatim-use-{host}-{dead.pid}-abcd_123"):
        (tmp_path / name / "offsets").mkdir(parents=True)
    with scratch_folder("use") as mine:
        (mine / "file").write_text("x")
        assert {path.name for path in tmp_path.iterdir()} == {*others, mine.name}
        assert mine.name.startswith(f"seriatim-use-{host}-{os.getpid()}-")
    assert {path.name for path in tmp_path.iterdir()} == set(others)
