"""The task's side: it sends messages to the helpers of their sessions and puts the records in order.

Messages go out a few batches ahead of their answers, so that helpers work while the task reads and
writes. Records come back with the position of their message and are sorted by it: the file is the
same as that of a single fold.

Next: helper_fold.py is what a helper does; engine/task.py proves, writes and saves.
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
from seriatim.engine.session import ColumnarRecords, Counts, FoldOutput, Session, unpack_session
from seriatim.engine.task import PartitionWork, TaskContext
from seriatim.errors import PlatformError, ensure
from seriatim.fast.helpers.pipes import (
    HelperResult,
    HelperStart,
    decode_batch,
    encode_batch,
    receive_frame,
    send_frame,
)
from seriatim.storage.arrow import ArrowMessageBatch
from seriatim.stream_files import StreamFile

MESSAGES_MIN = 20_000
"""Messages from which on helpers are worth starting, which takes a second."""
HELPERS_MAX = 16
BATCHES_AHEAD = 3
SENT_COLUMNS = ("offset", "timestamp", "key", "value")


def choose_helper_count(
    file: StreamFile, work: PartitionWork, task_context: TaskContext, cores: int
) -> int:
    """The number of helpers for a task: as many as its share of the slice is worth, or 1 for none.

    None where a rule looks beyond one session (windows and expiry go by the partition's time),
    where the key does not name the session, and where the fold is compiled: that is faster than
    sending messages to other processes.
    """
    stream = file.stream
    if stream.parallelism != "session" or stream.session != "key":
        return 1
    if task_context.make_fold is not Fold or task_context.runner.other_columns:
        return 1
    if stream.limits.window is not None or stream.limits.timeout_ms:
        return 1
    if work.scope is not None or work.undoable or work.moved_sessions:
        return 1
    if work.end - work.start < MESSAGES_MIN:
        return 1
    helper_count = min(round(work.share * cores), cores, HELPERS_MAX)
    return max(1, helper_count)


@contextmanager
def with_helpers(
    file: StreamFile,
    work: PartitionWork,
    task_context: TaskContext,
    helper_count: int = 0,
    cores: int = 1,
) -> Iterator[TaskContext]:
    """The context of a task, whose fold uses helpers if they are worth it. They end with the block.
    `cores`: how many there are for this task and its neighbours.
    """
    if helper_count == 0:
        helper_count = choose_helper_count(file, work, task_context, cores)
    if helper_count < 2:
        yield task_context
        return
    helpers = [HelperProcess(_start_process()) for _ in range(helper_count)]
    message_count = (work.end - work.start) // helper_count
    start_frame = msgspec.msgpack.encode(HelperStart(file, work, message_count))
    try:
        for helper in helpers:
            helper.send(start_frame)
        yield replace(task_context, make_fold=partial(SpreadFold, helpers=helpers))
    finally:
        for helper in helpers:
            helper.close()


def _start_process() -> subprocess.Popen[bytes]:
    environment = dict(config.child_environment())
    # The helper must find the same modules, also those of paths that were added at run time.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "seriatim.fast.helpers"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class HelperProcess:
    """A process that folds some of the sessions.

    A thread writes the frames. Otherwise task and helper could wait for each other for ever, each
    writing into a full pipe that the other does not read.
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
            except OSError:
                # The helper died: `receive` reports it. The queue must be emptied all the same, or
                # `send` would wait for ever.
                continue

    def send(self, content: bytes | memoryview) -> None:
        """Send a frame as soon as the helper takes one."""
        self._send_queue.put(content)

    def receive(self) -> bytes:
        """The next answer of the helper. Raises `PlatformError` if it has died."""
        content = receive_frame(self.from_helper)
        if content is None:
            raise PlatformError(
                f"a helper process of a hot partition died (exit {self.process.wait()})",
                next='look at the memory of the workers, or set parallelism = "partition", then run again',
            )
        return content

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        self._send_queue.put(None)
        self._sender.join()
        self.from_helper.close()
        # Closing flushes what the helper has not read, which is lost on purpose.
        with suppress(OSError):
            self.to_helper.close()


class SpreadFold(Fold):
    """A fold whose sessions are in helper processes."""

    def __init__(self, *args: Any, helpers: Sequence[HelperProcess], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.helpers = helpers
        self.has_given_up = False
        self._helpers_of_sent_batches: deque[list[HelperProcess]] = deque()
        """For each batch that was sent and not answered: the helpers that have messages of it."""

    def read_ahead(self, batches: Iterable[MessageBatch]) -> Iterator[MessageBatch]:
        """The batches; each is sent to the helpers a little before its turn."""
        waiting: deque[MessageBatch] = deque()
        for batch in batches:
            self._send_batch(batch)
            waiting.append(batch)
            if len(waiting) > BATCHES_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def fold_batch(self, batch: MessageBatch) -> FoldOutput:
        """The helpers' records of a batch, in the order of its messages."""
        helpers = self._helpers_of_sent_batches.popleft()
        answers = [helper.receive() for helper in helpers]
        if not all(answers):
            self.has_given_up = True
        if self.has_given_up:
            return FoldOutput(consumed_messages=len(batch))
        records = pa.concat_batches([decode_batch(answer) for answer in answers])
        if len(answers) > 1:
            # A stable sort: records of one message stay in the order in which it gave them.
            order = np.argsort(records.column(0).to_numpy(), kind="stable")
            records = records.take(order)
        self.counts.messages += len(batch)
        self.counts.records += len(records)
        if len(records) == 0:
            return FoldOutput(consumed_messages=len(batch))
        positions, indexes, sequences, sessions, *columns = records.columns
        columnar = ColumnarRecords(positions.to_numpy(), sessions, sequences, columns, indexes)
        return FoldOutput(consumed_messages=len(batch), columnar_records=columnar)

    def must_fold_again(self, halt: Finding | None) -> bool:
        """Whether anything was not clean.

        A halt is one: when it is known, the helpers have folded messages behind it already.
        """
        return self.has_given_up or halt is not None

    def touched_sessions(self) -> dict[str, Session]:
        """The sessions that the helpers touched; none if everything must be folded again."""
        if self.has_given_up or self._helpers_of_sent_batches:
            return {}
        for helper in self.helpers:
            helper.send(b"")
        sessions: dict[str, Session] = {}
        for helper in self.helpers:
            answer = helper.receive()
            if not answer:
                self.has_given_up = True
                continue
            result = msgspec.msgpack.decode(answer, type=HelperResult)
            _add_counts(self.counts, result.counts)
            self.sessions_without_state.update(result.sessions_without_state)
            for name, packed in result.packed_sessions.items():
                sessions[name] = unpack_session(packed)
        return sessions

    def _send_batch(self, batch: MessageBatch) -> None:
        """Send each helper its messages of a batch, with their positions in it."""
        ensure(isinstance(batch, ArrowMessageBatch), "what is spread comes in columns")
        assert isinstance(batch, ArrowMessageBatch)
        helper_numbers = self._helper_numbers(batch.record_batch.column("key"))
        columns = batch.record_batch.select(list(SENT_COLUMNS))
        helpers_with_messages = []
        for number, helper in enumerate(self.helpers):
            positions = np.flatnonzero(helper_numbers == number)
            if len(positions) == 0:
                continue
            rows = columns.take(pa.array(positions))
            rows = rows.append_column("position", pa.array(positions, pa.int64()))
            helper.send(encode_batch(rows))
            helpers_with_messages.append(helper)
        self._helpers_of_sent_batches.append(helpers_with_messages)

    def _helper_numbers(self, keys: pa.Array) -> Any:
        """The number of the helper of each message: by a hash of its key, 0 if it has none."""
        encoded = keys.dictionary_encode()
        distinct_keys = encoded.dictionary.to_pylist()
        if not distinct_keys:
            return np.zeros(len(keys), np.int64)
        key_helpers = [zlib.crc32(key) % len(self.helpers) for key in distinct_keys]
        # A message without a key has no session and is not clean: any helper will say so.
        key_codes = encoded.indices.fill_null(0).to_numpy()
        return np.array(key_helpers, np.int64)[key_codes]


def _add_counts(counts: Counts, helper_counts: Counts) -> None:
    """Add what a helper counted. Messages and records are counted by the task as they come."""
    counts.headless += helper_counts.headless
    counts.snapshots += helper_counts.snapshots
    first_snapshots = [counts.first_snapshot, helper_counts.first_snapshot]
    counts.first_snapshot = min((offset for offset in first_snapshots if offset >= 0), default=-1)
    counts.last_snapshot = max(counts.last_snapshot, helper_counts.last_snapshot)
    counts.distance_messages = max(counts.distance_messages, helper_counts.distance_messages)
    counts.distance_ms = max(counts.distance_ms, helper_counts.distance_ms)
    for kind, number in helper_counts.findings.items():
        counts.findings[kind] = counts.findings.get(kind, 0) + number
