"""Sessions while they are folded, and what folding a stretch gives. Values only.

Next room: fold.py walks; storage/state_files.py keeps sessions between slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from seriatim.engine.messages import MessageBatch


class WaitingMessage(Struct, frozen=True, array_like=True):
    """A message that came before its turn."""

    sequence: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    is_snapshot: bool


class Session(Struct, kw_only=True):
    """One session during a fold. `saved` is decoded when first needed."""

    state: Any = None
    state_bytes: bytes | None = None
    state_version: int = 0
    sequence: int | None = None
    snapshot_sequence: int | None = None
    """The sequence of the last snapshot: what is below was never ours to see."""
    snapshot_fingerprint: bytes = b""
    """Of the last snapshot: to know it again."""
    missing_sequences: list[tuple[int, int]] = field(default_factory=list)
    """Sequences passed over since the last snapshot, [from, until)."""
    waiting_messages: list[WaitingMessage] = field(default_factory=list)
    """Tier window: messages that came before their turn, by sequence."""
    damaged_since_offset: int = -1
    """The offset since which the session's output is not to be trusted."""
    messages_since_snapshot: int = 0
    """Messages since the last snapshot."""
    snapshot_timestamp: int = -1
    snapshot_distance_ms: int = 0
    """The longest time from the last snapshot to a message after it."""
    first_offset: int = -1
    last_offset: int = -1
    snapshot_offset: int = -1
    timestamp: int = 0
    finding: str | None = None
    """Set while the session is in quarantine."""
    finding_offset: int = -1
    is_active: bool = False
    """Whether `state` is decoded, live, and may be applied to."""
    is_touched: bool = False
    is_undoable: bool = False
    """The machine raised on this session in an earlier try: check and undo message by message."""


class QuarantinedMessage(Struct, frozen=True):
    """A message without effect, kept for a later repair: position in its stretch, and why."""

    position: int
    session: str
    finding: str
    cause: str
    waiting_message: WaitingMessage | None = None
    """The message itself, where it waited in a window and is not that of its position."""

    def to_row(self, batch: MessageBatch) -> dict[str, Any]:
        """The message whole, and why it had no effect. Headers of one that waited are not known any
        more.
        """
        i, waited, headers = self.position, self.waiting_message, None
        if waited is None:
            offset, time, key, value = (
                batch.start + i,
                batch.timestamps[i],
                batch.keys[i],
                batch.values[i],
            )
            headers = None if batch.headers is None else batch.headers[i]
        else:
            offset, time, key, value = waited.offset, waited.timestamp, waited.key, waited.value
        return {
            "offset": offset,
            "timestamp": int(time),
            "session": self.session,
            "key": key,
            "value": value,
            "headers": headers,
            "finding": self.finding,
            "cause": self.cause,
        }


class ColumnarRecords(Struct, frozen=True):
    """Records that were made in columns, one per message: the positions of their messages, and
    Arrow's arrays.
    """

    positions: Any
    sessions: Any
    sequences: Any
    columns: Sequence[Any]
    """The machine's own."""
    indexes: Any = None
    """Their numbers within their messages, where a message may have several."""


class FoldOutput(Struct):
    """What one stretch gave: records in columns by position, and messages set aside."""

    positions: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    sequences: list[int | None] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    quarantined_messages: list[QuarantinedMessage] = field(default_factory=list)
    source_messages: dict[int, WaitingMessage] = field(default_factory=dict)
    """Records of messages that waited: row to message. The others come from the message of their
    position.
    """
    consumed_messages: int = 0
    columnar_records: ColumnarRecords | None = None
    """Records of messages that were folded in bulk; those above are of the others."""

    def name_records(self, names: Sequence[str | None], sequences: Sequence[int | None]) -> None:
        """Give each record its session, its sequence and its number within its message."""
        has_one_record_per_message = self.positions == list(range(len(names)))
        if not self.source_messages and has_one_record_per_message:  # the usual case
            self.sessions = list(names)  # type: ignore[arg-type]  # a record has a session
            self.sequences = list(sequences)
            self.indexes = [0] * len(names)
            return
        self.sessions = [names[i] for i in self.positions]  # type: ignore[misc]  # a record has a session
        self.sequences = [sequences[i] for i in self.positions]
        self.indexes = [0] * len(self.positions)
        if len(set(self.positions)) < len(self.positions):
            for row in range(1, len(self.positions)):
                if self.positions[row] == self.positions[row - 1]:
                    self.indexes[row] = self.indexes[row - 1] + 1
        for row, source in self.source_messages.items():
            self.sequences[row] = source.sequence


class SessionEndRecords(Struct):
    """Records that take back the output of sessions that end, in columns."""

    indexes: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    sequences: list[int | None] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(
        self, name: str, session: Session, first_index: int, rows: Sequence[tuple[Any, ...]]
    ) -> None:
        """Records of one session, counted from `first`, as of its last message."""
        count = len(rows)
        self.indexes += range(first_index, first_index + count)
        self.timestamps += [session.timestamp] * count
        self.sessions += [name] * count
        self.sequences += [session.sequence] * count
        self.rows += rows


class Counts(Struct, rename={"message_bytes": "bytes", "other_records": "others"}):
    """What happened in one partition of one slice, in numbers."""

    messages: int = 0
    message_bytes: int = 0
    """Of their keys and values."""
    records: int = 0
    """Of the table `records`."""
    other_records: dict[str, int] = field(default_factory=dict)
    """Of the machine's other tables, by name."""
    headless: int = 0
    snapshots: int = 0
    first_snapshot: int = -1
    last_snapshot: int = -1
    quarantined: int = 0
    """Sessions set aside."""
    released: int = 0
    ended: int = 0
    """Sessions that expired."""
    distance_messages: int = 0
    """The most messages between two snapshots of one session."""
    distance_ms: int = 0
    """The longest time between them, by the messages' own."""
    findings: dict[str, int] = field(default_factory=dict)
