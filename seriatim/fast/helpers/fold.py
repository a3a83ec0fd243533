"""The task's side: messages to the helpers whose sessions they are, records back into one order.

Messages go out a few stretches ahead of their answers, so that helpers work while the task reads
and writes. Records come back with the position of their message and are sorted by it: the file is
the one that a single fold writes.

Next room: part.py is what a helper does; engine/task.py proves, writes and saves.
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
from seriatim.engine.findings import Finding
from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch
from seriatim.engine.session import ColumnarRecords, Counts, FoldOutput, Session
from seriatim.engine.task import PartitionWork, TaskContext
from seriatim.errors import PlatformError, ensure
from seriatim.fast.helpers.pipes import (
    HelperResult,
    HelperStart,
    encode_batch,
    receive_frame,
    send_frame,
)
from seriatim.fast.helpers.pipes import decode_batch as columns_of
from seriatim.storage.arrow import ArrowMessageBatch
from seriatim.stream_files import StreamFile

MESSAGES_MIN = 20_000
"""Starting helpers takes a second."""
HELPERS_MAX = 16
BATCHES_AHEAD = 3
SENT_COLUMNS = ("offset", "timestamp", "key", "value")


def choose_helper_count(file: StreamFile, work: PartitionWork, kit: TaskContext, cores: int) -> int:
    """Over how many processes a task's sessions are spread: as many as its share of the slice is
    worth, or 1.

    Not where a rule looks beyond one session (windows and expiry go by the partition's time), where
    the key does not name the session, and where the fold is compiled: reading is slower than that.
    """
    stream = file.stream
    plain = (
        kit.make_fold is Fold
        and not kit.runner.other_columns
        and not stream.session_field
        and work.scope is None
    )
    simple = (
        stream.limits.window is None
        and not stream.limits.timeout_ms
        and not work.undoable
        and not work.moved_sessions
    )
    if (
        stream.parallelism != "session"
        or not plain
        or not simple
        or work.end - work.start < MESSAGES_MIN
    ):
        return 1
    return max(1, min(round(work.share * cores), cores, HELPERS_MAX))


@contextmanager
def with_helpers(
    file: StreamFile, work: PartitionWork, kit: TaskContext, helper_count: int = 0
) -> Iterator[TaskContext]:
    """The kit of a task, with helpers where they help."""
    helper_count = helper_count or choose_helper_count(file, work, kit, os.cpu_count() or 1)
    if helper_count < 2:
        yield kit
        return
    helpers = [HelperProcess(_start_process()) for _ in range(helper_count)]
    begin = msgspec.msgpack.encode(HelperStart(file, work, (work.end - work.start) // helper_count))
    try:
        for helper in helpers:
            helper.send(begin)
        yield replace(kit, make_fold=partial(SpreadFold, helpers=helpers))
    finally:
        for helper in helpers:
            helper.close()


def _start_process() -> subprocess.Popen[bytes]:
    environment = {
        **config.child_environment(),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "seriatim.fast.helpers"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class HelperProcess:
    """A process that folds some sessions. Frames are written by a thread: it may be busy with an
    answer.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        ensure(process.stdin is not None and process.stdout is not None, "a helper has pipes")
        self.process = process
        self.to_helper: IO[bytes] = process.stdin  # type: ignore[assignment]  # see above
        self.from_helper: IO[bytes] = process.stdout  # type: ignore[assignment]
        self._send_queue: Queue[bytes | memoryview | None] = Queue(BATCHES_AHEAD + 2)
        self._sender = threading.Thread(target=self._send_frames, daemon=True)
        self._sender.start()

    def _send_frames(self) -> None:
        while (content := self._send_queue.get()) is not None:
            try:
                send_frame(self.to_helper, content)
            except OSError:  # it died: who waits for its answer is told
                continue

    def send(self, content: bytes | memoryview) -> None:
        """A frame, as soon as it takes one."""
        self._send_queue.put(content)

    def receive(self) -> bytes:
        """Its next answer."""
        content = receive_frame(self.from_helper)
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
        self._send_queue.put(None)
        self._sender.join()
        self.from_helper.close()
        with suppress(OSError):  # what it did not read is lost on purpose
            self.to_helper.close()


class SpreadFold(Fold):
    """A fold whose sessions are elsewhere."""

    def __init__(self, *args: Any, helpers: Sequence[HelperProcess], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.helpers, self.has_given_up = helpers, False
        self._helpers_asked: deque[list[bool]] = deque()
        """Of each stretch on its way: which helpers have messages of it."""

    def read_ahead(self, stretches: Iterable[MessageBatch]) -> Iterator[MessageBatch]:
        """The stretches, each sent out a little before its turn."""
        waiting: deque[MessageBatch] = deque()
        for stretch in stretches:
            self._send_batch(stretch)
            waiting.append(stretch)
            if len(waiting) > BATCHES_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def fold_batch(self, stretch: MessageBatch) -> FoldOutput:
        """The helpers' records of a stretch, in order."""
        asked = self._helpers_asked.popleft()
        answers = [helper.receive() for helper, has in zip(self.helpers, asked, strict=True) if has]
        self.has_given_up |= not all(answers)
        if self.has_given_up:
            return FoldOutput(consumed_messages=len(stretch))
        made = pa.concat_batches([columns_of(answer) for answer in answers])
        if len(answers) > 1:
            made = made.take(np.argsort(made.column(0).to_numpy(), kind="stable"))
        positions, indexes, sequences, sessions, *columns = made.columns
        self.counts.messages += len(stretch)
        self.counts.records += len(made)
        gathered = ColumnarRecords(positions.to_numpy(), sessions, sequences, columns, indexes)
        return FoldOutput(
            consumed_messages=len(stretch), columnar_records=gathered if len(made) else None
        )

    def must_fold_again(self, halt: Finding | None) -> bool:
        """Whether something was not as usual. A halt is known too late: messages behind it are
        folded by now.
        """
        return self.has_given_up or halt is not None

    def touched_sessions(self) -> dict[str, Session]:
        """All that the helpers have in their hands."""
        if self.has_given_up or self._helpers_asked:
            return {}
        for helper in self.helpers:
            helper.send(b"")
        answers = [helper.receive() for helper in self.helpers]
        self.has_given_up |= not all(answers)
        ends = [msgspec.msgpack.decode(answer, type=HelperResult) for answer in answers if answer]
        for end in ends:
            _add_counts(self.counts, end.counts)
            self.sessions_without_state.update(end.sessions_without_state)
        return {name: session for end in ends for name, session in end.sessions.items()}

    def _send_batch(self, message_batch: MessageBatch) -> None:
        ensure(isinstance(message_batch, ArrowMessageBatch), "what is spread comes in columns")
        assert isinstance(message_batch, ArrowMessageBatch)
        keys = message_batch.record_batch.column("key").dictionary_encode()
        owners = np.array(
            [zlib.crc32(key) % len(self.helpers) for key in keys.dictionary.to_pylist()], np.int64
        )
        indices = keys.indices.fill_null(0).to_numpy()
        owner = owners[indices] if len(owners) else np.zeros(len(message_batch), np.int64)
        batch = message_batch.record_batch.select(list(SENT_COLUMNS))
        asked = []
        for number, helper in enumerate(self.helpers):
            places = np.flatnonzero(owner == number)
            asked.append(len(places) > 0)
            if len(places):
                part = batch.take(pa.array(places))
                helper.send(
                    encode_batch(part.append_column("position", pa.array(places, pa.int64())))
                )
        self._helpers_asked.append(asked)


def _add_counts(counts: Counts, helper_counts: Counts) -> None:
    """What a helper counted. Messages and records are counted here, as they come."""
    counts.headless += helper_counts.headless
    counts.snapshots += helper_counts.snapshots
    firsts = [
        first for first in (counts.first_snapshot, helper_counts.first_snapshot) if first >= 0
    ]
    counts.first_snapshot = min(firsts, default=-1)
    counts.last_snapshot = max(counts.last_snapshot, helper_counts.last_snapshot)
    counts.distance_messages = max(counts.distance_messages, helper_counts.distance_messages)
    counts.distance_ms = max(counts.distance_ms, helper_counts.distance_ms)
    for kind, number in helper_counts.findings.items():
        counts.findings[kind] = counts.findings.get(kind, 0) + number
