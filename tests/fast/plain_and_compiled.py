"""Twins: the plain fold and the compiled fold over the same batches, and everything that they must
agree on.

Next: test_plain_and_compiled.py draws the batches.
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
from seriatim.storage.store import LocalStore

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
    """A compiled fold that never leaves a batch to the plain fold."""

    unusual_max = 1.0  # type: ignore[assignment]


class _Sheet:
    """Stands in for a file: it keeps the batches in memory."""

    written_bytes = 0

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)


class Twin:
    """One of two folds of the same messages, with what it gave."""

    def __init__(
        self, kind: type[Fold], machine: type[TableMachine], table: dict[str, Any], **fold: Any
    ) -> None:
        self.kind, self.machine, self.table, self.fold_settings = kind, machine, table, fold
        self.sheet = _Sheet()
        self.saved: dict[str, Session] = {}
        self.quarantined_rows: list[Any] = []
        self.reports: list[Any] = []
        self.compiled_record_count = 0
        self.begin()

    def begin(self) -> None:
        """A new task, with the state that the last one saved."""
        runner = self.machine(**self.table)
        self.fold = self.kind(PARTITION, runner, load_sessions=self._load, **self.fold_settings)
        store = ParquetRecords(
            LocalStore(Path("nowhere")), runner.columns, "zstd", (), values_are_checked=True
        )
        self.writer = store.record_writer(PARTITION, "id", "stem")
        self.writer.file = self.sheet  # type: ignore[assignment]

    def _load(self, names: list[str]) -> dict[str, Session]:
        return {
            name: msgspec.structs.replace(self.saved[name]) for name in names if name in self.saved
        }

    def take(self, batch: pa.RecordBatch) -> None:
        """Fold a batch, as the task does."""
        for message_batch in message_batches([batch]):
            if self.fold.halt is None:
                folded = self.fold.fold_batch(message_batch)
                self.compiled_record_count += (
                    0 if folded.columnar_records is None else len(folded.columnar_records.positions)
                )
                self.reports.append(_told(folded))
                self.writer.write(message_batch.first_messages(folded.consumed_messages), folded)
                self.quarantined_rows += [
                    quarantined.to_row(message_batch) for quarantined in folded.quarantined_messages
                ]

    def end(self) -> None:
        """End the task: save the sessions that it touched, and note what it reports."""
        for name, session in self.fold.touched_sessions().items():
            self.saved[name] = _as_saved(session)
        fold = self.fold
        self.reports.append(
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
        """Everything that both twins must have in common."""
        rows = [row for batch in self.sheet.batches for row in batch.to_pylist()]
        return {
            "rows": rows,
            "kept": self.quarantined_rows,
            "told": self.reports,
            "saved": self.saved,
        }


def _told(folded: FoldOutput) -> list[Any]:
    return [
        folded.consumed_messages,
        [
            quarantined
            for quarantined in folded.quarantined_messages
            if isinstance(quarantined, QuarantinedMessage)
        ],
    ]


def _as_saved(session: Session) -> Session:
    return msgspec.structs.replace(
        session, state=None, is_active=False, is_touched=False, is_undoable=False
    )


def create_twins(table: dict[str, Any], eager: bool = True, **fold: Any) -> tuple[Twin, Twin]:
    """The plain twin and the compiled one."""
    fold_class: type[Fold] = EagerFold if eager else CompiledFold
    return Twin(Fold, TableMachine, table, **fold), Twin(fold_class, CompiledTable, table, **fold)


def to_record_batch(sent: Sequence[Sent], start: int) -> pa.RecordBatch:
    """Messages as Spark gives them."""
    keys, values, times = zip(*sent, strict=True)
    offsets = range(start, start + len(sent))
    columns = [
        pa.array(offsets, pa.int64()),
        [time * 1000 for time in times],
        list(keys),
        list(values),
    ]
    record_batch = pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)],
        schema=SCHEMA,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(record_batch)
    # Batches of Spark lie in memory that can be written to, so this one does, too.
    copied = bytearray(sink.getvalue())
    return next(iter(pa.ipc.open_stream(pa.py_buffer(copied))))


def assert_twins_agree(twins: tuple[Twin, Twin], tasks: Iterable[Sequence[Sequence[Sent]]]) -> Twin:
    """Let both twins fold the tasks' batches, and assert that they give the same; the compiled twin."""
    offset = 0
    for task in tasks:
        for sent in task:
            for twin in twins:
                twin.take(to_record_batch(sent, offset))
            offset += len(sent)
        for twin in twins:
            twin.end()
            twin.begin()
    plain, compiled = twins
    plain_outcome = plain.outcome()
    compiled_outcome = compiled.outcome()
    for name in plain_outcome:
        # Compared as text: 0.0 equals -0.0, but is another value.
        assert repr(compiled_outcome[name]) == repr(plain_outcome[name]), name
    return compiled


class OddProducer:
    """Sends tables as producers do: mostly right, with a chance of everything else."""

    def __init__(
        self,
        chance: random.Random,
        oddness: float,
        sequenced: bool,
        images: float = 0.0,
        session_count: int = 4,
    ) -> None:
        self.chance, self.oddness, self.sequenced = chance, oddness, sequenced
        self.names = ["s1", "s2", "sß", "s4", *(f"k{number}" for number in range(4, session_count))]
        self.images = images
        """The share of updates and deletes that carry a before-image."""
        self.rows: dict[str, dict[Any, dict[str, Any]]] = {}
        self.sequences: dict[str, int] = {}
        self.time = 1_700_000_000_000

    def send(self) -> Sent:
        """The next message of some session."""
        # Whoever adds a choice here takes a `random.Random` of its own for it: one more draw from
        # this one would change the world of every seed.
        self.time += self.chance.choice((0, 1, 1000, -5))
        name = self.chance.choice(self.names)
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
        named_cells = {name: cell for name, cell in full.items() if draw.random() < 0.85}
        return {
            "id": identity,
            **{name: None if draw.random() < 0.1 else cell for name, cell in named_cells.items()},
        }

    def _value(self, name: str) -> bytes:
        rows, draw = self.rows.get(name), self.chance.random()
        if rows is None or draw < 0.05:
            identities = [f"row-{i}" for i in range(self.chance.randrange(6))]
            rows = self.rows[name] = {
                identity: self._cells(identity) for identity in sorted(identities)
            }
            body: dict[str, Any] = {"type": "snapshot", "rows": list(rows.values())}
        elif draw < 0.25 or not rows:
            identity = f"new-{self.chance.randrange(10**6)}"
            rows[identity] = self._cells(identity)
            body = {"type": "insert", **rows[identity]}
        else:
            body = self._changed(rows, self.chance.choice(sorted(rows)), is_delete=draw < 0.4)
        return self._text(body | self._next(name))

    def _changed(
        self, rows: dict[Any, dict[str, Any]], identity: Any, *, is_delete: bool
    ) -> dict[str, Any]:
        """An update or a delete of a row, some with a before-image, and some of these with a new key."""
        old = rows.pop(identity)
        body = {"type": "delete", "id": identity}
        if not is_delete:
            body = {"type": "update", **self._cells(identity)}
        if self.images and self.chance.random() < self.images:
            columns = [column for column in old if self.chance.random() < 0.6]
            before = {column: old[column] for column in columns}
            if before and self.chance.random() < self.oddness:
                before[self.chance.choice(columns)] = self.chance.choice((None, 7, "odd"))
            if not is_delete and self.chance.random() < 0.3:
                before["id"] = identity
                identity = f"moved-{self.chance.randrange(10**6)}"
                body["id"] = identity
            body["before"] = self.chance.choice((before, before, before, None))
        if not is_delete:
            cells = {column: cell for column, cell in body.items() if column in COLUMNS}
            rows[identity] = old | cells
        return body

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
        draw, row_ids = self.chance, sorted(self.rows.get(name, ())) or ["a"]
        jump = draw.choice((0, 0, 2, -1))
        self.sequences[name] = self.sequences.get(name, 1) + jump - 1
        row_id = draw.choice((*row_ids, "nobody"))
        kind = draw.choice(("insert", "update", "delete", "snapshot"))
        body: dict[str, Any] = {"type": kind, **self._cells(row_id), **self._next(name)}
        if kind == "snapshot":
            body["rows"] = [self._cells(row) for row in draw.choices(row_ids, k=2)]
        value = self._text(body)
        if draw.random() < 0.4:
            return value
        return draw.choice(
            (None, b"", self._mangled(value), self._mangled(value), value.replace(b"type", b"typo"))
        )

    def _mangled(self, value: bytes) -> bytes:
        """The value with a byte changed, inserted or dropped."""
        at, draw = self.chance.randrange(len(value)), self.chance.random()
        new_byte = self.chance.choice(
            (b'"', b"\\", b"0", b"-", b"e", b".", b"}", b"]", b",", b"\xff", b"\x01", b" ", b"null")
        )
        if draw < 0.4:
            return value[:at] + new_byte + value[at + 1 :]
        return value[:at] + new_byte + value[at:] if draw < 0.7 else value[:at] + value[at + 1 :]
