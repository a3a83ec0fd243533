"""A stream whose output is in a bucket: its whole life, beside the same stream on a disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from seriatim import context, stream_files
from seriatim.ledger.commit import read_head
from tests.conftest import BROKER_HOME
from tests.integration.lab import Lab
from tests.integration.test_slices import tables


def _expect(lab: Lab, exit_code: int, *arguments: str) -> str:
    """Run a command; what it printed."""
    run = lab.command(*arguments)
    assert run.returncode == exit_code, run.stdout + run.stderr
    return run.stdout + run.stderr


def _flip_a_bit(lab: Lab, stream: str, key: str) -> None:
    store = lab.store(stream)
    content = bytearray(store.read(key))
    content[len(content) // 2] ^= 4
    store.replace(key, content)


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


def test_the_whole_life_of_a_stream_in_a_bucket(
    lab: Lab, topic: Callable[..., str], s3_url: str, s3_variables: dict[str, str]
) -> None:
    """Run in slices, check, publish, compact, verify; damaged and repaired: as on a disk. Its secret
    is in no output, object, log or command line.
    """
    secret = s3_variables["AWS_SECRET_ACCESS_KEY"]
    names = {topic(2): 2, topic(1): 1}
    lab.send(tables(names, 20, 3000))
    pattern = "|".join(names)
    on_disk = lab.stream("ondisk", pattern)
    lab.fold(on_disk, messages_max=1200)
    bucket = lab.stream("inbucket", pattern, output={"path": s3_url})
    with _ProcessWatch(secret) as watch:
        printed = _expect(lab, 0, "run", bucket, "--messages-max", "1200", "--check")
    assert lab.digest(bucket) == lab.digest(on_disk)
    printed += _expect(lab, 0, "compact", bucket)
    printed += _expect(lab, 0, "verify", bucket)
    printed += _expect(lab, 0, "status", bucket, "--json")
    assert lab.digest(bucket) == lab.digest(on_disk)

    damaged = _record_file(lab, bucket)
    _flip_a_bit(lab, bucket, damaged)
    found = _expect(lab, 3, "verify", bucket)
    assert damaged in found
    printed += found
    printed += _expect(lab, 0, "repair", bucket, "--apply")
    printed += _expect(lab, 0, "verify", bucket)
    assert lab.digest(bucket) == lab.digest(on_disk)

    assert watch.seen > 0
    assert watch.leaks == []
    assert secret not in printed
    assert _files_with(Path(os.environ[BROKER_HOME]) / "s3", secret) == ["server.properties"]


def _record_file(lab: Lab, stream: str) -> str:
    """The key of a record file that the table has."""
    ledger = context.ledger(stream_files.load_stream(stream, lab.settings.streams))
    head = read_head(ledger, stream)
    assert head is not None
    return min(ledger.active_paths(head))


def _files_with(folder: Path, text: str) -> list[str]:
    """The files below a folder that have a text in them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if text.encode() in path.read_bytes()]
