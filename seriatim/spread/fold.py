"""The task's side: messages to the helpers whose sessions they are, records back into one order.

Messages go out a few stretches ahead of their answers, so that helpers work while the task reads and writes. Records
come back with the position of their message and are sorted by it: the file is the one that a single fold writes.

Next room: part.py is what a helper does; steps/task.py proves, writes and saves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Queue
from typing import IO, Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from seriatim import config
from seriatim.adapters.arrow import ArrowStretch
from seriatim.core.errors import PlatformError, ensure
from seriatim.core.fold import Fold
from seriatim.core.integrity import Finding
from seriatim.core.message import Stretch
from seriatim.core.session import Counts, Folded, Gathered, Session
from seriatim.spread.pipes import Begin, End, packed, receive, send
from seriatim.spread.pipes import unpacked as columns_of
from seriatim.steps.task import Kit, Work
from seriatim.streams import StreamFile

MESSAGES_MIN = 20_000
"""Starting helpers takes a second."""
PARTS_MAX = 16
AHEAD = 3
SENT = ("offset", "timestamp", "key", "value")


def parts_of(file: StreamFile, work: Work, kit: Kit, cores: int) -> int:
    """Over how many processes a task's sessions are spread: as many as its share of the slice is worth, or 1.

    Not where a rule looks beyond one session (windows and expiry go by the partition's time), where the key does not
    name the session, and where the fold is compiled: reading is slower than that.
    """
    stream = file.stream
    plain = kit.fold is Fold and not kit.runner.others and not stream.session_field and work.scope is None
    simple = stream.limits.window is None and not stream.limits.timeout_ms and not work.careful and not work.moved
    if stream.parallelism != "session" or not plain or not simple or work.end - work.start < MESSAGES_MIN:
        return 1
    return max(1, min(round(work.share * cores), cores, PARTS_MAX))


@contextmanager
def spread(file: StreamFile, work: Work, kit: Kit, parts: int = 0) -> Iterator[Kit]:
    """The kit of a task, with helpers where they help."""
    parts = parts or parts_of(file, work, kit, os.cpu_count() or 1)
    if parts < 2:
        yield kit
        return
    helpers = [Helper(_started()) for _ in range(parts)]
    begin = msgspec.msgpack.encode(Begin(file, work, (work.end - work.start) // parts))
    try:
        for helper in helpers:
            helper.send(begin)
        yield replace(kit, fold=partial(SpreadFold, helpers=helpers))
    finally:
        for helper in helpers:
            helper.close()


def _started() -> subprocess.Popen[bytes]:
    environment = {**config.environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "seriatim.spread"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class Helper:
    """A process that folds some sessions. Frames are written by a thread: it may be busy with an answer."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        ensure(process.stdin is not None and process.stdout is not None, "a helper has pipes")
        self.process = process
        self.to: IO[bytes] = process.stdin  # type: ignore[assignment]  # see above
        self.come: IO[bytes] = process.stdout  # type: ignore[assignment]
        self._waiting: Queue[bytes | memoryview | None] = Queue(AHEAD + 2)
        self._sender = threading.Thread(target=self._run, daemon=True)
        self._sender.start()

    def _run(self) -> None:
        while (content := self._waiting.get()) is not None:
            try:
                send(self.to, content)
            except OSError:  # it died: who waits for its answer is told
                continue

    def send(self, content: bytes | memoryview) -> None:
        """A frame, as soon as it takes one."""
        self._waiting.put(content)

    def receive(self) -> bytes:
        """Its next answer."""
        content = receive(self.come)
        if content is None:
            raise PlatformError(
                f"a helper process of a hot partition died (exit {self.process.wait()})",
                next='look at the memory of the workers, or set parallelism = "partition", then run again',
            )
        return content

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        self._waiting.put(None)
        self._sender.join()
        self.come.close()
        with suppress(OSError):  # what it did not read is lost on purpose
            self.to.close()


class SpreadFold(Fold):
    """A fold whose sessions are elsewhere."""

    def __init__(self, *given: Any, helpers: Sequence[Helper], **more: Any) -> None:
        super().__init__(*given, **more)
        self.helpers, self.gave_up = helpers, False
        self._sent: deque[list[bool]] = deque()
        """Of each stretch on its way: which helpers have messages of it."""

    def ahead(self, stretches: Iterable[Stretch]) -> Iterator[Stretch]:
        """The stretches, each sent out a little before its turn."""
        waiting: deque[Stretch] = deque()
        for stretch in stretches:
            self._send(stretch)
            waiting.append(stretch)
            if len(waiting) > AHEAD:
                yield waiting.popleft()
        yield from waiting

    def stretch(self, stretch: Stretch) -> Folded:
        """The helpers' records of a stretch, in order."""
        asked = self._sent.popleft()
        answers = [helper.receive() for helper, has in zip(self.helpers, asked, strict=True) if has]
        self.gave_up |= not all(answers)
        if self.gave_up:
            return Folded(consumed=len(stretch))
        made = pa.concat_batches([columns_of(answer) for answer in answers])
        if len(answers) > 1:
            made = made.take(np.argsort(made.column(0).to_numpy(), kind="stable"))
        positions, indexes, sequences, sessions, *columns = made.columns
        self.counts.messages += len(stretch)
        self.counts.records += len(made)
        gathered = Gathered(positions.to_numpy(), sessions, sequences, columns, indexes)
        return Folded(consumed=len(stretch), gathered=gathered if len(made) else None)

    def must_repeat(self, halt: Finding | None) -> bool:
        """Whether something was not as usual. A halt is known too late: messages behind it are folded by now."""
        return self.gave_up or halt is not None

    def touched(self) -> dict[str, Session]:
        """All that the helpers have in their hands."""
        if self.gave_up or self._sent:
            return {}
        for helper in self.helpers:
            helper.send(b"")
        answers = [helper.receive() for helper in self.helpers]
        self.gave_up |= not all(answers)
        ends = [msgspec.msgpack.decode(answer, type=End) for answer in answers if answer]
        for end in ends:
            _add(self.counts, end.counts)
            self.strangers.update(end.strangers)
        return {name: session for end in ends for name, session in end.sessions.items()}

    def _send(self, stretch: Stretch) -> None:
        ensure(isinstance(stretch, ArrowStretch), "what is spread comes in columns")
        assert isinstance(stretch, ArrowStretch)
        keys = stretch.batch.column("key").dictionary_encode()
        owners = np.array([zlib.crc32(key) % len(self.helpers) for key in keys.dictionary.to_pylist()], np.int64)
        indices = keys.indices.fill_null(0).to_numpy()
        owner = owners[indices] if len(owners) else np.zeros(len(stretch), np.int64)
        batch = stretch.batch.select(list(SENT))
        asked = []
        for number, helper in enumerate(self.helpers):
            places = np.flatnonzero(owner == number)
            asked.append(len(places) > 0)
            if len(places):
                part = batch.take(pa.array(places))
                helper.send(packed(part.append_column("position", pa.array(places, pa.int64()))))
        self._sent.append(asked)


def _add(counts: Counts, more: Counts) -> None:
    """What a helper counted. Messages and records are counted here, as they come."""
    counts.headless += more.headless
    counts.snapshots += more.snapshots
    firsts = [first for first in (counts.first_snapshot, more.first_snapshot) if first >= 0]
    counts.first_snapshot = min(firsts, default=-1)
    counts.last_snapshot = max(counts.last_snapshot, more.last_snapshot)
    counts.distance_messages = max(counts.distance_messages, more.distance_messages)
    counts.distance_ms = max(counts.distance_ms, more.distance_ms)
    for kind, number in more.findings.items():
        counts.findings[kind] = counts.findings.get(kind, 0) + number
