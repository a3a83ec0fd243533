"""A stream whose output is in a bucket."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import BROKER_HOME
from tests.integration.lab import Lab, fold_messages, fold_records
from tests.integration.test_slices import tables


def _expect(lab: Lab, exit_code: int, *arguments: str) -> str:
    """Run a command; what it printed."""
    run = lab.command(*arguments)
    assert run.returncode == exit_code, run.stdout + run.stderr
    return run.stdout + run.stderr


class _ProcessWatch:
    """Looks at the command lines of all processes meanwhile, for a text that must be in none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.seen = 0
        self.leaks: list[list[str]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._is_over.wait(0.5):
            for process in psutil.process_iter(["cmdline"]):
                command = process.info["cmdline"] or []
                self.seen += 1
                if self.text in " ".join(command):
                    self.leaks.append(command)

    def __enter__(self) -> _ProcessWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def test_a_stream_in_a_bucket_is_a_straight_fold(
    lab: Lab, topic: Callable[..., str], s3_url: str, s3_variables: dict[str, str]
) -> None:
    """Run in slices, checked, published, compacted and verified. The secret of the bucket is in no
    output, object, log or command line.
    """
    secret = s3_variables["AWS_SECRET_ACCESS_KEY"]
    names = {topic(2): 2, topic(1): 1}
    lab.send(tables(names, 20, 2000))
    stream = lab.stream("inbucket", "|".join(names), output={"path": s3_url})
    with _ProcessWatch(secret) as watch:
        printed = _expect(lab, 0, "run", stream, "--messages-max", "1200", "--check")
    expected = {}
    for name, partitions in names.items():
        for session, rows in fold_messages(lab.read_topic(name, partitions)).items():
            expected[name, session] = rows
    assert fold_records(lab.records(stream)) == expected
    printed += _expect(lab, 0, "compact", stream)
    printed += _expect(lab, 0, "verify", stream)
    assert fold_records(lab.records(stream)) == expected
    assert list(lab.store(stream).keys("probes/")) == []

    assert watch.seen > 0
    assert watch.leaks == []
    assert secret not in printed
    assert _files_with(Path(os.environ[BROKER_HOME]) / "s3", secret) == ["server.properties"]


@pytest.mark.full
def test_a_bucket_has_the_digests_of_a_disk(
    lab: Lab, topic: Callable[..., str], s3_url: str
) -> None:
    """Records and state of a stream are the same wherever it writes, also after compaction."""
    names = {topic(2): 2, topic(1): 1}
    lab.send(tables(names, 20, 3000))
    pattern = "|".join(names)
    on_disk = lab.stream("ondisk", pattern)
    lab.fold(on_disk, messages_max=1200)
    in_bucket = lab.stream("inbucket", pattern, output={"path": s3_url})
    _expect(lab, 0, "run", in_bucket, "--messages-max", "1200", "--check")
    assert lab.digest(in_bucket) == lab.digest(on_disk)
    _expect(lab, 0, "compact", in_bucket)
    _expect(lab, 0, "verify", in_bucket)
    assert lab.digest(in_bucket) == lab.digest(on_disk)


def _files_with(folder: Path, text: str) -> list[str]:
    """The files below a folder that have a text in them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if text.encode() in path.read_bytes()]
