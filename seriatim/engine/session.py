"""Sessions while they are folded, how they are packed to be stored, and the output of folding a batch.
Values only.

Next: engine/fold.py changes them; storage/state_files.py keeps sessions between slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.messages import MessageBatch, SequenceNumbers
from seriatim.engine.row_parts import RowChanges, RowsSummary, StoredRows, join_rows
from seriatim.errors import ConfigError, ensure

PACKED_VERSION = 1
"""The version of packed sessions that is written. A newer one is refused, not guessed at."""
PACKED_HEAD_VERSION = 2
"""The version of the head of a session that is stored row by row: this version, the session packed without
its state, and its `RowsSummary`.
"""

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


class StoredSession(Struct, kw_only=True, array_like=True, tag=PACKED_VERSION):
    """What is stored of a session between slices. This is the only list of these fields.

    A packed session is a msgpack array: the version, then the fields in this order. Whoever changes
    the list, even by a field at its end, must raise `PACKED_VERSION` and read the old versions, too.
    """

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
    """The time of the last message that met the session, in most cases the one at `last_offset`. During
    a batch both are those of an earlier batch: `Fold._mark_touched` sets them at its end. Only a
    message that waits in a window, that ends or quarantines its session, or that finds it in doubt
    after a loss sets its time at once.
    """
    finding: str | None = None
    """Set while the session is in quarantine."""
    finding_offset: int = -1


STORED_FIELDS = StoredSession.__struct_fields__


class Session(StoredSession, kw_only=True):
    """One session during a fold: what is stored of it, and what is known only while it is folded."""

    state: Any = None
    """The decoded state. `state_bytes` is decoded when the first message comes."""
    rows_summary: RowsSummary | None = None
    """What is known of the rows, if the session is stored row by row. With `state_bytes` it was, and
    `state_bytes` has all rows.
    """
    stored_rows: StoredRows | None = None
    """The rows where they are stored, until the first message comes."""
    row_changes: RowChanges | None = None
    """What is to be stored of the rows."""
    is_active: bool = False
    """Whether `state` is decoded, live, and may be applied to."""
    is_touched: bool = False
    is_undoable: bool = False
    """The machine raised on this session in an earlier try. So in this try each message is checked
    and can be undone.
    """

    @property
    def has_state(self) -> bool:
        """Whether there is a state: decoded, as bytes, or stored row by row."""
        if self.state_bytes is not None or self.state is not None:
            return True
        return self.rows_summary is not None

    @property
    def is_head(self) -> bool:
        """Whether its rows are stored row by row, and not in `state_bytes`."""
        return self.state_bytes is None and self.rows_summary is not None

    def set_decoded_state(self, state: Any) -> None:
        """Set the decoded state, in place of all that was stored."""
        self.state = state
        self.state_bytes = None
        self.stored_rows = None
        self.rows_summary = None

    def store_as_one_value(self, state_bytes: bytes) -> None:
        """Set the bytes of the state, which are to be stored."""
        self.state_bytes = state_bytes
        self.rows_summary = None
        self.row_changes = None

    def join_rows(self) -> None:
        """Make the session one value, for a store that does not store row by row. All of its rows are
        known.
        """
        changes = self.row_changes
        if changes is None:
            return
        ensure(changes.is_complete, "all rows of a session are known where it becomes one value")
        self.state_bytes = join_rows([row.packed for row in changes.rows])
        self.row_changes = None

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

    def without_finding(self) -> Session:
        """A copy that is out of quarantine and in no doubt. Everything else is as it was."""
        return replace(self, finding=None, finding_offset=-1, damaged_since_offset=-1)


_stored_values = attrgetter(*STORED_FIELDS)
_encode_packed = msgspec.msgpack.Encoder().encode
# An array that ends early leaves the remaining fields at their defaults. So what `pack_session` writes
# can be decoded as a `Session`, without a step between.
_decode_packed = msgspec.msgpack.Decoder(Session).decode
_decode_head = msgspec.msgpack.Decoder(tuple[int, bytes, RowsSummary]).decode


def pack_session(session: Session) -> bytes:
    """What is stored of a session, as bytes; without its rows if they are stored row by row."""
    packed = _encode_packed((PACKED_VERSION, *_stored_values(session)))
    if session.is_head:
        return _encode_packed((PACKED_HEAD_VERSION, packed, session.rows_summary))
    return packed


def unpack_session(packed: bytes) -> Session:
    """The session that `pack_session` packed. One that a newer Seriatim packed is refused."""
    try:
        return _decode_packed(packed)
    except msgspec.ValidationError:
        version = msgspec.msgpack.decode(packed)[0]
        if version == PACKED_HEAD_VERSION:
            return _unpack_head(packed)
        if version == PACKED_VERSION:
            raise
    raise ConfigError(
        f"the state was written by a newer Seriatim: a session is packed in version {version},"
        f" this one knows {PACKED_HEAD_VERSION}",
        next="install a version that is at least as new as the one that wrote it",
    )


def _unpack_head(packed: bytes) -> Session:
    _, packed_session, summary = _decode_head(packed)
    session = _decode_packed(packed_session)
    session.rows_summary = summary
    return session


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

    def name_records(self, names: Sequence[str | None], sequences: SequenceNumbers) -> None:
        """Give each record its session, its sequence and its number within its message."""
        positions = self.positions
        self.indexes = [0] * len(positions)
        # Comparing two lists is faster than any loop over the records.
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


SessionsByName = dict[str, Session]
SwappedRanges = dict[str, tuple[tuple[int, int], ...]]
"""By session: ranges of offsets in which its messages were swapped."""


class RefoldScope(Struct, frozen=True, kw_only=True):
    """Which sessions are folded again in one stage of a refold."""

    sessions: tuple[str, ...] | None = None
    """None: all sessions."""
    finished_sessions: tuple[str, ...] = ()
    """Sessions whose refold is over. They are passed over."""
    swapped_ranges: SwappedRanges = field(default_factory=dict)
    """There the messages of a session are applied in the order of their sequences, in every tier."""


class SessionFilter(Struct, frozen=True, kw_only=True):
    """A scope in the form that the fold asks for each message."""

    sessions: frozenset[str] | None
    finished_sessions: frozenset[str]

    @classmethod
    def from_scope(cls, scope: RefoldScope | None) -> SessionFilter | None:
        """The filter of a scope; None if there is no scope, so that all sessions are folded."""
        if scope is None:
            return None
        sessions = None if scope.sessions is None else frozenset(scope.sessions)
        return cls(sessions=sessions, finished_sessions=frozenset(scope.finished_sessions))

    def excludes(self, name: str | None) -> bool:
        """Whether a message of this session is passed over. A message without a session key concerns
        the whole partition, so it is folded only if all sessions are.
        """
        if name is None:
            return self.sessions is not None
        if name in self.finished_sessions:
            return True
        return self.sessions is not None and name not in self.sessions


class ReplacedRecords(Struct, frozen=True, kw_only=True):
    """Which committed records a refold replaces."""

    start: int
    """The first offset."""
    end: int
    """The end offset, unless `session_ends` has another one for the session."""
    sessions: frozenset[str] | None = None
    """None: all sessions."""
    session_ends: dict[str, int] = field(default_factory=dict)
    """Sessions whose refold ended at another offset, and that offset."""

    def includes(self, session: str, offset: int) -> bool:
        """Whether a record of this session, at this offset, is replaced."""
        if self.sessions is not None and session not in self.sessions:
            return False
        return self.start <= offset < self.session_ends.get(session, self.end)

    def covers(self, first_offset: int, last_offset: int) -> bool:
        """Whether every record from `first_offset` to `last_offset` is replaced, whatever its
        session is.
        """
        if self.sessions is not None:
            return False
        earliest_end = min([self.end, *self.session_ends.values()])
        return self.start <= first_offset and last_offset < earliest_end

    @property
    def end_offset(self) -> int:
        """No record at or after this offset is replaced."""
        return max([self.end, *self.session_ends.values()])
