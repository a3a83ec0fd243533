"""The messages of simulated producers, as bytes and as meaning: the simple fold never parses.

Next: straight.py folds the meaning; chaos.py disturbs the real fold of the bytes.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from msgspec import Struct, field

from seriatim.engine.machine import Machine
from seriatim.engine.offsets import Partition
from seriatim.stream import OutputSettings, Stream, TableSettings

COLUMNS = {"id": "string", "v": "int64", "w": "float64"}
IDS = "abcd"
POISONS: tuple[bytes | None, ...] = (
    None,
    b"",
    b"{",
    b"\xff\xfe",
    b'{"type":"nonsense"}',
    b'{"type":"insert","id":7}',
    b'{"type":"update","v":1}',
    b"[" * 5000,
    b"NaN",
    b'{"type":"delete"}{"type":"delete"}',
    b'{"kind":"boom","value":"\xc3(","seq":1}',
)


class Sent(Struct, frozen=True):
    """The meaning of one message. `kind` is poison, snapshot, insert, update, delete, or one of the
    tally machine.
    """

    kind: str
    session: str | None
    sequence: int | None = None
    rows: tuple[tuple[Any, ...], ...] = ()
    """Of a table; an update's row has `...` where a column is left out."""
    before: tuple[Any, ...] | None = None
    """The before-image of an update or delete, with `...` where a column is left out."""
    value: int = 0


class Tally(Struct):
    """The state of the user machine in the simulation."""

    total: int = 0
    notes: list[str] = []


class Add(Struct):
    """Its message."""

    kind: str
    value: int
    seq: int = 0


class Total(Struct):
    """Its record."""

    total: int
    step: int


class TallyMachine(Machine[Tally, Add, Total]):
    """Adds up. Some kinds of messages make it raise with its state half changed, give records that do
    not fit, or spoil its state.
    """

    def start(self, session: str) -> Tally:
        """Zero."""
        return Tally(0, [session])

    def apply(self, state: Tally, message: Add) -> list[Total]:
        """One record per add; two for a snapshot."""
        state.total = message.value if message.kind == "snapshot" else state.total + message.value
        if message.kind == "boom":
            raise ValueError("boom")
        if message.kind == "spoil":
            state.notes = "spoilt"  # type: ignore[assignment]
        step: Any = "unfit" if message.kind == "unfit" else message.value
        records = [Total(state.total, step)]
        return records * 2 if message.kind == "snapshot" else records

    def is_snapshot(self, message: Add) -> bool:
        """A snapshot sets the total."""
        return message.kind == "snapshot"


class ProducedSession(Struct):
    """A session as its producer sees it."""

    sequence: int = 0
    rows: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class MessageProducer:
    """Draws messages for one stream."""

    def __init__(self, random: Random, stream: Stream) -> None:
        self.random, self.stream = random, stream
        self.lives: dict[tuple[Partition, str], ProducedSession] = {}
        self.fault_rate = random.choice((0.0, 0.0, 0.02, 0.1))
        """The share of messages that are wrong in some way."""
        self.no_session_rate = random.choice((0.0, 0.0, 0.01)) if self.fault_rate else 0.0
        """The share of messages without a readable session: they halt a partition."""
        self.image_rate = random.choice((0.0, 0.0, 0.3, 0.9))
        """The share of updates and deletes that carry a before-image."""

    def draw(self, partition: Partition) -> tuple[bytes | None, bytes | None, Sent]:
        """A message for a partition: key, value, meaning."""
        session = f"s{partition.number}{self.random.randrange(4)}"
        if self.random.random() < self.no_session_rate:
            return self._without_session(session)
        if self.random.random() < self.fault_rate / 4:
            unknown = self.stream.session_field is not None
            poison = Sent("poison", None if unknown else session)
            return session.encode(), self.random.choice(POISONS), poison
        life = self.lives.setdefault((partition, session), ProducedSession())
        sent = (
            self._table(session, life)
            if self.stream.machine == "table"
            else self._tally(session, life)
        )
        return session.encode(), self._encode(sent), sent

    def _without_session(self, session: str) -> tuple[bytes | None, bytes | None, Sent]:
        """Poison that belongs to no session."""
        if self.stream.session_field is not None:
            return session.encode(), b'{"type":"snapshot","rows":[]}', Sent("poison", None)
        value = self._encode(Sent("snapshot", session, 1, ()))
        return self.random.choice((None, b"\xff")), value, Sent("poison", None)

    def _number(self, life: ProducedSession, snapshot: bool) -> int | None:
        if self.stream.sequence is None:
            return None
        life.sequence += 1
        if snapshot and self.random.random() < 0.2:
            life.sequence = self.random.randrange(1, 50)
        if self.random.random() < self.fault_rate:
            life.sequence = max(0, life.sequence + self.random.choice((-3, -1, 1, 4)))
        return life.sequence

    def _table(self, session: str, life: ProducedSession) -> Sent:
        kind = self.random.choice(("insert", "update", "update", "update", "delete"))
        if not life.rows or self.random.random() < 0.08:
            kind = "snapshot"
        number = self._number(life, kind == "snapshot")
        if kind == "snapshot":
            chosen = [i for i in IDS if self.random.random() < 0.6]
            if chosen and self.random.random() < self.fault_rate:
                chosen.append(chosen[0])
            rows = tuple(self._row(i) for i in chosen)
            life.rows = {row[0]: row for row in rows}
            return Sent("snapshot", session, number, rows)
        right = [i for i in IDS if (i in life.rows) == (kind != "insert")]
        wrong = self.random.random() < self.fault_rate or not right
        row = self._row(self.random.choice(IDS if wrong else right), partial=kind == "update")
        before = None
        if kind != "insert" and self.random.random() < self.image_rate:
            before = self._before_image(life.rows.get(row[0], row), row)
        old = life.rows.pop(row[0], (row[0], None, None))
        new_ids = [i for i in IDS if i not in life.rows and i != row[0]]
        if kind == "update" and before is not None and new_ids and self.random.random() < 0.3:
            before = (row[0], *before[1:])
            row = (self.random.choice(new_ids), *row[1:])
        if kind != "delete":
            merged = [was if now is ... else now for now, was in zip(row, old, strict=True)]
            life.rows[row[0]] = tuple(merged)
        return Sent(kind, session, number, (row,), before)

    def _before_image(self, old: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the row was, of some columns; now and then it is wrong."""
        image = [... if self.random.random() < 0.4 else value for value in old]
        if self.random.random() < self.fault_rate:
            image[1] = self.random.randrange(100)
        image[0] = self.random.choice((..., row[0]))
        return tuple(image)

    def _row(self, key: str, *, partial: bool = False) -> tuple[Any, ...]:
        v = self.random.choice((None, self.random.randrange(100)))
        w = self.random.choice((None, self.random.randrange(100) / 4))
        left_out = partial and self.random.random() < 0.5
        return (key, ... if left_out else v, ... if left_out and self.random.random() < 0.5 else w)

    def _tally(self, session: str, life: ProducedSession) -> Sent:
        kind = "snapshot" if not life.sequence or self.random.random() < 0.1 else "add"
        if self.random.random() < self.fault_rate:
            kind = self.random.choice(("boom", "unfit", "spoil"))
        number = self._number(life, kind == "snapshot")
        life.sequence = life.sequence or 1
        return Sent(kind, session, number, value=self.random.randrange(1, 9))

    def _encode(self, sent: Sent) -> bytes:
        if self.stream.machine != "table":
            return json.dumps(
                {"kind": sent.kind, "value": sent.value, "seq": sent.sequence or 0}
            ).encode()
        body: dict[str, Any] = {"type": sent.kind}
        if sent.sequence is not None:
            body["seq"] = sent.sequence
        if self.stream.session_field is not None:
            body["who"] = sent.session
        rows = [_row_fields(row, self.random) for row in sent.rows]
        body |= {"rows": rows} if sent.kind == "snapshot" else {"rows": "ignored", **rows[0]}
        if sent.before is not None:
            body["before"] = _row_fields(sent.before, self.random)
        elif self.random.random() < 0.05:
            body["before"] = None
        text = json.dumps(body, indent=self.random.choice((None, None, None, 1)))
        return text.encode()


def _row_fields(row: tuple[Any, ...], random: Random) -> dict[str, Any]:
    fields = {name: value for name, value in zip(COLUMNS, row, strict=True) if value is not ...}
    if random.random() < 0.1:
        fields["extra"] = {"unknown": [1, 2]}
    return fields


def draw_stream(random: Random) -> Stream:
    """A stream file of this seed."""
    machine = random.choice(("table", "table", "table", "tally:TallyMachine"))
    tier = random.choice(("strict", "strict", "none", "once", "order"))
    poison = (
        ("quarantine", "quarantine", "halt") if tier == "strict" else ("quarantine", "skip", "halt")
    )
    field_name = "field:who" if machine == "table" and random.random() < 0.2 else "key"
    return Stream(
        name="sim",
        topics="in-.*",
        machine=machine,
        tier=tier,
        on_poison=random.choice(poison),
        session=field_name,
        sequence="seq" if tier in ("once", "order") else random.choice((None, "seq")),
        table=TableSettings(key=("id",), columns=COLUMNS, before=random.random() < 0.7),
        output=OutputSettings(path="memory"),
    )
