"""What it costs that files are hashed while they are written: the digests alone, and a task with and
without SHA-256.

    python -m bench.hashing

A task of 400,000 messages is run in this process, by turns with and without SHA-256, so that a busy
machine slows down both.

Next: growth.py measures tasks; docs/PERFORMANCE.md has the figures.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import xxhash

from bench.growth import Message, create_stream, fold_batches, snapshot, to_batches, total_bytes
from seriatim.storage import store

ROUNDS = 7
MESSAGES = 400_000
SESSIONS = 1_000
MEGABYTES = 300


class NoDigest:
    """Stands for SHA-256 in the rounds without it."""

    def update(self, _: Any) -> None:
        """Count nothing."""

    def hexdigest(self) -> str:
        """Nothing was counted."""
        return ""


def milliseconds_per_megabyte(digest: Any) -> float:
    """CPU of a digest."""
    block = random.randbytes(1 << 20)
    began = time.process_time()
    for _ in range(MEGABYTES):
        digest.update(block)
    return (time.process_time() - began) / MEGABYTES * 1000


def make_messages() -> list[Message]:
    """Updates with numbers that do not compress well."""
    messages: list[Message] = [(f"s-{n}", snapshot(1, 3)) for n in range(SESSIONS)]
    for number in range(MESSAGES - SESSIONS):
        message = {
            "type": "update",
            "seq": 2 + number // SESSIONS,
            "id": f"r{number % 3}",
            "price": random.random() * 1000,
            "size": random.randrange(10**6),
        }
        messages.append((f"s-{number % SESSIONS}", message))
    return messages


def main() -> None:
    """Measure and print."""
    for name, digest in (("XXH3-128", xxhash.xxh3_128()), ("SHA-256", hashlib.sha256())):
        print(f"{name}: {milliseconds_per_megabyte(digest):.3f} ms of CPU per MB")
    seconds: dict[str, list[float]] = {"with SHA-256": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        file = create_stream(Path(folder))
        batches = to_batches(0, make_messages())
        fold_batches(file, batches)
        for _ in range(ROUNDS):
            for name, digest_class in (("with SHA-256", hashlib.sha256), ("without", NoDigest)):
                store.new_sha256 = digest_class
                began = time.process_time()
                result = fold_batches(file, batches)
                seconds[name].append(time.process_time() - began)
        written_bytes = total_bytes([*result.records, *(result.state or ())])
    for name, figures in seconds.items():
        best = min(figures) / MESSAGES * 1e6
        print(f"task {name}: {best:.3f} µs of CPU per message, best of {ROUNDS}")
    print(f"written: {written_bytes / MESSAGES:.1f} bytes per message")


if __name__ == "__main__":
    main()
