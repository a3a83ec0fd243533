"""Sessions while they are folded, and what folding a stretch gives. Values only.

Next room: fold.py walks; adapters/state.py keeps sessions between slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field


class Session(Struct, kw_only=True):
    """One session during a fold. `saved` is decoded when first needed."""

    state: Any = None
    saved: bytes | None = None
    version: int = 0
    sequence: int | None = None
    anchor: int | None = None
    """The sequence of the last snapshot: what is below was never ours to see."""
    buffer: bytes | None = None
    first_offset: int = -1
    last_offset: int = -1
    snapshot_offset: int = -1
    timestamp: int = 0
    finding: str | None = None
    """Set while the session is in quarantine."""
    finding_offset: int = -1
    awake: bool = False
    """Whether `state` is decoded, live, and may be applied to."""
    touched: bool = False
    careful: bool = False
    """The machine raised on this session in an earlier try: check and undo message by message."""


class Kept(Struct, frozen=True):
    """A message without effect, kept for a later repair: position in its stretch, and why."""

    position: int
    session: str
    finding: str
    cause: str


class Folded(Struct):
    """What one stretch gave: records in columns by position, and messages set aside."""

    positions: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    sequences: list[int | None] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    consumed: int = 0

    def name_records(self, names: Sequence[str | None], sequences: Sequence[int | None]) -> None:
        """Give each record its session, its sequence and its number within its message."""
        if self.positions == list(range(len(names))):  # one record for each message, as is usual
            self.sessions, self.sequences, self.indexes = list(names), list(sequences), [0] * len(names)  # type: ignore[arg-type]
            return
        self.sessions = [names[i] for i in self.positions]  # type: ignore[misc]  # a record has a session
        self.sequences = [sequences[i] for i in self.positions]
        self.indexes = [0] * len(self.positions)
        if len(set(self.positions)) < len(self.positions):
            for row in range(1, len(self.positions)):
                if self.positions[row] == self.positions[row - 1]:
                    self.indexes[row] = self.indexes[row - 1] + 1


class Counts(Struct):
    """What happened in one partition of one slice, in numbers."""

    messages: int = 0
    bytes: int = 0
    """Of their keys and values."""
    records: int = 0
    headless: int = 0
    snapshots: int = 0
    first_snapshot: int = -1
    last_snapshot: int = -1
    quarantined: int = 0
    """Sessions set aside."""
    released: int = 0
    findings: dict[str, int] = field(default_factory=dict)
