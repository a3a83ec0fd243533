"""Sessions while they are folded, and the output of folding a batch. Values only.

Next: engine/fold.py changes them; storage/state_files.py keeps sessions between slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from seriatim.engine.messages import MessageBatch

Row = tuple[Any, ...]
"""The values of one record, or of one row of a table, in the order of the columns."""


class WaitingMessage(Struct, frozen=True, array_like=True):
    """A message that came before its turn and waits in the window."""

    sequence: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    is_snapshot: bool


class Session(Struct, kw_only=True):
    """One session during a fold."""

    state: Any = None
    """The decoded state. `state_bytes` is decoded when the first message comes."""
    state_bytes: bytes | None = None
    state_version: int = 0
    sequence: int | None = None
    snapshot_sequence: int | None = None
    """The sequence of the last snapshot. Lower sequences are from before the session began."""
    snapshot_fingerprint: bytes = b""
    """A hash of the last snapshot, to recognize it when it is sent again."""
    missing_sequences: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of sequences that were passed over since the last snapshot, half-open."""
    waiting_messages: list[WaitingMessage] = field(default_factory=list)
    """Tier window: messages that came before their turn, ordered by sequence."""
    damaged_since_offset: int = -1
    """The offset since which the session's output is not to be trusted."""
    messages_since_snapshot: int = 0
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
    """The machine raised on this session in an earlier try. So in this try each message is checked
    and can be undone.
    """

    @property
    def has_state(self) -> bool:
        """Whether there is a state, decoded or as bytes."""
        return self.state_bytes is not None or self.state is not None

    def quarantine(self, finding: str, offset: int, timestamp: int) -> None:
        """Go into quarantine because of a finding at this offset."""
        self.is_active = False
        self.is_touched = True
        self.finding = finding
        self.finding_offset = offset
        self.last_offset = offset
        self.timestamp = timestamp
        if self.first_offset < 0:
            self.first_offset = offset


class QuarantinedMessage(Struct, frozen=True):
    """A message that had no effect and is stored for a later repair: its position in the batch, and
    why.
    """

    position: int
    session: str
    finding: str
    cause: str
    waiting_message: WaitingMessage | None = None
    """The message itself, if it waited in a window. Then it is not the message at `position`."""

    def to_row(self, batch: MessageBatch) -> dict[str, Any]:
        """All of the message, and why it had no effect. If it waited, its headers are not known any
        more.
        """
        waited = self.waiting_message
        headers = None
        if waited is not None:
            offset = waited.offset
            timestamp = waited.timestamp
            key = waited.key
            value = waited.value
        else:
            i = self.position
            offset = batch.start + i
            timestamp = batch.timestamps[i]
            key = batch.keys[i]
            value = batch.values[i]
            if batch.headers is not None:
                headers = batch.headers[i]
        return {
            "offset": offset,
            "timestamp": int(timestamp),
            "session": self.session,
            "key": key,
            "value": value,
            "headers": headers,
            "finding": self.finding,
            "cause": self.cause,
        }


class ColumnarRecords(Struct, frozen=True):
    """Records in Arrow arrays, as a compiled fold makes them: the positions of their messages, and
    the columns.
    """

    positions: Any
    sessions: Any
    sequences: Any
    columns: Sequence[Any]
    """The machine's own columns."""
    indexes: Any = None
    """The numbers of the records within their messages. None: each message has one record."""


class FoldOutput(Struct):
    """The output of one batch: records in columns, and quarantined messages."""

    positions: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    sequences: list[int | None] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    quarantined_messages: list[QuarantinedMessage] = field(default_factory=list)
    source_messages: dict[int, WaitingMessage] = field(default_factory=dict)
    """The messages of records whose message waited in the window, by row. All other records come
    from the message at their position.
    """
    consumed_messages: int = 0
    columnar_records: ColumnarRecords | None = None
    """Records of messages that a compiled fold has folded. The lists above are of the others."""

    def add_records(
        self, position: int, records: Sequence[Row], source: WaitingMessage | None = None
    ) -> None:
        """Add the records of the message at this position, or of `source`, a message that waited and
        was released at this position.
        """
        if source is not None:
            first_row = len(self.rows)
            for row in range(first_row, first_row + len(records)):
                self.source_messages[row] = source
        self.positions += [position] * len(records)
        self.rows += records

    def name_records(self, names: Sequence[str | None], sequences: Sequence[int | None]) -> None:
        """Give each record its session, its sequence and its number within its message."""
        positions = self.positions
        self.indexes = [0] * len(positions)
        has_one_record_per_message = positions == list(range(len(names)))
        if has_one_record_per_message and not self.source_messages:  # the usual case
            self.sessions = list(names)  # type: ignore[arg-type]  # a record has a session
            self.sequences = list(sequences)
            return
        self.sessions = [names[i] for i in positions]  # type: ignore[misc]  # a record has a session
        self.sequences = [sequences[i] for i in positions]
        has_several_per_message = len(set(positions)) < len(positions)
        if has_several_per_message:
            self._number_records()
        for row, message in self.source_messages.items():
            self.sequences[row] = message.sequence

    def _number_records(self) -> None:
        """Number the records of each message from 0. They follow each other."""
        previous_position = -1
        index = 0
        for row, position in enumerate(self.positions):
            index += 1
            if position != previous_position:
                index = 0
            self.indexes[row] = index
            previous_position = position


class SessionEndRecords(Struct):
    """Records that take back the output of sessions that end, in columns."""

    indexes: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    sequences: list[int | None] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, session: Session, first_index: int, rows: Sequence[Row]) -> None:
        """Add the records of one session, numbered from `first_index`, with the timestamp and
        sequence of its last message.
        """
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
    """The size of their keys and values."""
    records: int = 0
    """Records of the table `records`."""
    other_records: dict[str, int] = field(default_factory=dict)
    """Records of the machine's other tables, by table."""
    headless: int = 0
    snapshots: int = 0
    first_snapshot: int = -1
    last_snapshot: int = -1
    quarantined: int = 0
    """Sessions that went into quarantine."""
    released: int = 0
    ended: int = 0
    """Sessions that expired."""
    distance_messages: int = 0
    """The most messages between two snapshots of one session."""
    distance_ms: int = 0
    """The longest time between two snapshots of one session, by the messages' timestamps."""
    findings: dict[str, int] = field(default_factory=dict)

    def add_snapshot(self, offset: int) -> None:
        """Count a snapshot at this offset."""
        self.snapshots += 1
        self.last_snapshot = offset
        if self.first_snapshot < 0:
            self.first_snapshot = offset
