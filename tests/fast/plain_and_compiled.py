"""Twins: the plain fold and the bulk fold over the same stretches, and everything that they must
agree on.

Next room: test_twins.py draws the stretches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from seriatim.engine.fold import Fold
from seriatim.engine.offsets import Partition
from seriatim.engine.session import FoldOutput, QuarantinedMessage, Session
from seriatim.engine.table import TableMachine
from seriatim.fast.fold import CompiledFold
from seriatim.fast.table import CompiledTable
from seriatim.storage.arrow import message_batches
from seriatim.storage.record_files import ParquetRecords

PARTITION = Partition("in-a", 0)
COLUMNS = {"id": "string", "n": "int64", "x": "float64", "ok": "bool", "t": "string"}
SCHEMA = pa.schema(
    [
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)
Sent = tuple[bytes | None, bytes | None, int]
"""Key, value and time in milliseconds."""


class EagerFold(CompiledFold):
    """A bulk fold that never finds it better to fold the plain way."""

    unusual_max, messages_per_session_min = 1.0, 0  # type: ignore[assignment]


class _Sheet:
    """In place of a file: keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)


class Twin:
    """One of two that fold the same."""

    def __init__(
        self, kind: type[Fold], machine: type[TableMachine], table: dict[str, Any], **fold: Any
    ) -> None:
        self.kind, self.machine, self.table, self.given = kind, machine, table, fold
        self.sheet = _Sheet()
        self.saved: dict[str, Session] = {}
        self.kept: list[Any] = []
        self.told: list[Any] = []
        self.in_bulk = 0
        self.begin()

    def begin(self) -> None:
        """A new task, with the state that the last one saved."""
        runner = self.machine(**self.table)
        self.fold = self.kind(PARTITION, runner, load_sessions=self._load, **self.given)
        store = ParquetRecords(Path("nowhere"), runner.columns, "zstd", (), values_are_checked=True)
        self.writer = store.record_writer(PARTITION, "id", "stem")
        self.writer.file = self.sheet  # type: ignore[assignment]

    def _load(self, names: list[str]) -> dict[str, Session]:
        return {
            name: msgspec.structs.replace(self.saved[name]) for name in names if name in self.saved
        }

    def take(self, batch: pa.RecordBatch) -> None:
        """Fold a batch, as the task does."""
        for stretch in message_batches([batch]):
            if self.fold.halt is None:
                folded = self.fold.fold_batch(stretch)
                self.in_bulk += (
                    0 if folded.columnar_records is None else len(folded.columnar_records.positions)
                )
                self.told.append(_told(folded))
                self.writer.write(stretch.first_messages(folded.consumed_messages), folded)
                self.kept += [kept.to_row(stretch) for kept in folded.quarantined_messages]

    def end(self) -> None:
        """The task is over: what it touched is saved, what it found is told."""
        for name, session in self.fold.touched_sessions().items():
            self.saved[name] = _as_saved(session)
        fold = self.fold
        self.told.append(
            [
                fold.tally.findings,
                fold.tally.marks,
                fold.counts,
                fold.halt,
                fold.sessions_without_state,
                fold.half_changed_sessions,
            ]
        )

    def outcome(self) -> dict[str, Any]:
        """All that counts."""
        rows = [row for batch in self.sheet.batches for row in batch.to_pylist()]
        return {"rows": rows, "kept": self.kept, "told": self.told, "saved": self.saved}


def _told(folded: FoldOutput) -> list[Any]:
    return [
        folded.consumed_messages,
        [kept for kept in folded.quarantined_messages if isinstance(kept, QuarantinedMessage)],
    ]


def _as_saved(session: Session) -> Session:
    return msgspec.structs.replace(
        session, state=None, is_active=False, is_touched=False, is_undoable=False
    )


def both(table: dict[str, Any], eager: bool = True, **fold: Any) -> tuple[Twin, Twin]:
    """The plain one and the one in bulk."""
    in_bulk: type[Fold] = EagerFold if eager else CompiledFold
    return Twin(Fold, TableMachine, table, **fold), Twin(in_bulk, CompiledTable, table, **fold)


def batch(sent: Sequence[Sent], start: int) -> pa.RecordBatch:
    """Messages as Spark gives them."""
    keys, values, times = zip(*sent, strict=True)
    offsets = range(start, start + len(sent))
    columns = [
        pa.array(offsets, pa.int64()),
        [time * 1000 for time in times],
        list(keys),
        list(values),
    ]
    made = pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)],
        schema=SCHEMA,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(made)
    copied = bytearray(sink.getvalue())  # what Spark sends lies in memory that could be written to
    return next(iter(pa.ipc.open_stream(pa.py_buffer(copied))))


def agree(twins: tuple[Twin, Twin], tasks: Iterable[Sequence[Sequence[Sent]]]) -> Twin:
    """Let both fold the tasks' batches; what they give is the same. The one in bulk."""
    offset = 0
    for task in tasks:
        for sent in task:
            for twin in twins:
                twin.take(batch(sent, offset))
            offset += len(sent)
        for twin in twins:
            twin.end()
            twin.begin()
    plain, bulk = (twin.outcome() for twin in twins)
    for what in plain:
        assert repr(bulk[what]) == repr(plain[what]), what  # by their text: 0.0 is not -0.0
    return twins[1]


class Producer:
    """Tables as producers send them, mostly right, with a chance of everything else."""

    def __init__(self, chance: random.Random, oddness: float, sequenced: bool) -> None:
        self.chance, self.oddness, self.sequenced = chance, oddness, sequenced
        self.rows: dict[str, set[Any]] = {}
        self.sequences: dict[str, int] = {}
        self.time = 1_700_000_000_000

    def send(self) -> Sent:
        """The next message of some session."""
        self.time += self.chance.choice((0, 1, 1000, -5))
        name = self.chance.choice(("s1", "s2", "sß", "s4"))
        value = self._odd_value(name) if self.chance.random() < self.oddness else self._value(name)
        key: bytes | None = name.encode()
        if self.chance.random() < self.oddness / 20:
            key = self.chance.choice((None, b"\xff\xfe", b""))
        odd_time = self.chance.random() < self.oddness / 20
        return key, value, self.chance.choice((-(10**14), 10**15)) if odd_time else self.time

    def _next(self, name: str) -> dict[str, Any]:
        self.sequences[name] = self.sequences.get(name, 0) + 1
        return {"seq": self.sequences[name]} if self.sequenced else {}

    def _cells(self, identity: Any) -> dict[str, Any]:
        draw = self.chance
        numbers = (
            0,
            1,
            -1,
            127,
            128,
            -32,
            -33,
            255,
            256,
            65535,
            65536,
            -129,
            2**31,
            -(2**31) - 1,
            2**32,
            10**17,
        )
        floats = (
            0.0,
            -0.0,
            1.5,
            57.35,
            1e-7,
            1e22,
            1e23,
            0.1 + 0.2,
            123456.789,
            2**53 + 1.0,
            5e-324,
            1e300,
            -3,
        )
        texts = ("", "a", "ü", "日本", "x" * 31, "x" * 32, "y" * 300, "same", "😀")
        full = {
            "n": draw.choice(numbers),
            "x": draw.choice((*floats, round(draw.uniform(-100, 100), 2), draw.random())),
            "ok": draw.choice((True, False)),
            "t": draw.choice(texts),
        }
        left = {name: cell for name, cell in full.items() if draw.random() < 0.85}
        return {
            "id": identity,
            **{name: None if draw.random() < 0.1 else cell for name, cell in left.items()},
        }

    def _value(self, name: str) -> bytes:
        rows, draw = self.rows.get(name), self.chance.random()
        if rows is None or draw < 0.05:
            rows = self.rows[name] = {f"row-{i}" for i in range(self.chance.randrange(6))}
            body: dict[str, Any] = {
                "type": "snapshot",
                "rows": [self._cells(row) for row in sorted(rows)],
            }
        elif draw < 0.25 or not rows:
            rows.add(identity := f"new-{self.chance.randrange(10**6)}")
            body = {"type": "insert", **self._cells(identity)}
        else:
            identity = self.chance.choice(sorted(rows))
            body = {"type": "update", **self._cells(identity)}
            if draw < 0.4:
                rows.discard(identity)
                body = {"type": "delete", "id": identity}
        return self._text(body | self._next(name))

    def _text(self, body: dict[str, Any]) -> bytes:
        if self.chance.random() < 0.3:
            body["note"] = self.chance.choice(
                ("x" * 40, {"a": [1, {"b": None}], "c": 'q"\\n'}, [], -1.5e-9, "é", True)
            )
        items = list(body.items())
        if self.chance.random() < 0.3:
            self.chance.shuffle(items)
        compact = self.chance.random() < 0.5
        separators = (",", ":") if compact else (", ", " : ")
        return json.dumps(
            dict(items), ensure_ascii=self.chance.random() < 0.1, separators=separators
        ).encode()

    def _odd_value(self, name: str) -> bytes | None:
        draw, known = self.chance, sorted(self.rows.get(name, ())) or ["a"]
        jump = draw.choice((0, 0, 2, -1))
        self.sequences[name] = self.sequences.get(name, 1) + jump - 1
        one = draw.choice((*known, "nobody"))
        kind = draw.choice(("insert", "update", "delete", "snapshot"))
        body: dict[str, Any] = {"type": kind, **self._cells(one), **self._next(name)}
        if kind == "snapshot":
            body["rows"] = [self._cells(row) for row in draw.choices(known, k=2)]
        value = self._text(body)
        if draw.random() < 0.4:
            return value
        return draw.choice(
            (None, b"", self._mangled(value), self._mangled(value), value.replace(b"type", b"typo"))
        )

    def _mangled(self, value: bytes) -> bytes:
        """A byte changed, dropped or put in, or a stretch of one value put in place of another."""
        at, draw = self.chance.randrange(len(value)), self.chance.random()
        other = self.chance.choice(
            (b'"', b"\\", b"0", b"-", b"e", b".", b"}", b"]", b",", b"\xff", b"\x01", b" ", b"null")
        )
        if draw < 0.4:
            return value[:at] + other + value[at + 1 :]
        return value[:at] + other + value[at:] if draw < 0.7 else value[:at] + value[at + 1 :]
