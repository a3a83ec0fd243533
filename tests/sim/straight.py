"""The simple fold: what the design says comes out of messages, written in the simplest way.

It shares no code with the product: a mistake there shows as a difference here.

Next: producer.py has the messages; test_sim.py compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field

from seriatim.stream import Stream
from tests.sim.producer import Sent

HALTS = {
    "none": {"raised"},
    "once": {"sequence gap", "precondition", "raised"},
    "order": {"raised"},
    "strict": {"sequence gap", "repeat", "disorder", "precondition", "raised"},
}
DROPS = {"none": set(), "once": {"repeat"}, "order": {"repeat", "disorder"}, "strict": set()}
"""The findings at which each tier stops a session, and those whose messages it drops. It counts all
others.
"""


class Dropped(Exception):  # noqa: N818  # an answer
    """A message that is counted and has no effect."""


class Refusal(Exception):  # noqa: N818  # named as the findings are
    """A message that may not be applied: the finding's name."""


class ExpectedSession(Struct):
    """A session as it should be."""

    state: Any = None
    sequence: int | None = None
    anchor: int | None = None
    snapshot: Any = None
    missing: set[int] = field(default_factory=set)
    finding: str | None = None
    finding_offset: int = -1
    touched: bool = False


class ExpectedFold:
    """One partition, from its birth on."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.halts, self.drops = stream, HALTS[stream.tier], DROPS[stream.tier]
        self.sessions: dict[str, ExpectedSession] = {}
        self.records: list[tuple[Any, ...]] = []
        """(offset, index, session, sequence, …the machine's own columns)."""
        self.kept: list[tuple[int, str]] = []
        self.findings: list[tuple[str, int, str | None]] = []
        self.counts: Counter[str] = Counter()
        self.messages = self.headless = 0
        self.halted_at: int | None = None

    def fold(self, sent: Iterable[tuple[int, Sent]]) -> None:
        """Take messages in order, up to a halt."""
        for offset, message in sent:
            if message.kind == "poison" and not self._poison(message, offset):
                self.halted_at = offset
                return
            self.messages += 1
            if message.kind != "poison":
                self._take(message, offset)

    def _poison(self, message: Sent, offset: int) -> bool:
        session = message.session
        if self.stream.on_poison == "skip":
            self._tell("poison", offset, session)
            return True
        if self.stream.on_poison == "halt" or session is None:
            self._tell("poison", offset, None)
            return False
        self._set_aside(session, "poison", offset)
        return True

    def _take(self, message: Sent, offset: int) -> None:  # noqa: C901  # in one go, as the module says
        name = message.session or ""
        session = self.sessions.setdefault(name, ExpectedSession())
        if message.kind != "snapshot":
            if session.finding is not None:
                self.kept.append((offset, name))
                return
            if session.state is None:
                self.headless += 1
                return
        if session.finding is not None:
            session.finding = session.sequence = None
        try:
            self._judge_sequence(session, message)
            before = session.state if session.state is not None else self._start()
            session.state, records = self._apply(dict(before), message)
        except Dropped:
            session.touched = True
            return
        except Refusal as refusal:
            session.state = session.state if session.state is not None else self._start()
            self._set_aside(name, str(refusal), offset)
            return
        session.touched = True
        if message.kind == "snapshot":
            last = session.sequence
            if last is not None and message.sequence is not None and message.sequence > last + 1:
                self._tell("sequence gap", offset, name)
            session.missing = set()
            session.sequence = session.anchor = message.sequence
            session.snapshot = message
        elif message.sequence is not None:
            session.sequence = max(session.sequence or 0, message.sequence)
        for index, record in enumerate(records):
            self.records.append((offset, index, name, message.sequence, *record))

    def _start(self) -> dict[Any, Any]:
        return {} if self.stream.machine == "table" else {"total": 0}

    def _judge_sequence(self, session: ExpectedSession, message: Sent) -> None:
        last, now = session.sequence, message.sequence
        if now is None or last is None or now == last + 1:
            return
        if message.kind == "snapshot" and now not in session.missing:
            if message == session.snapshot and now == last and "repeat" in self.drops:
                self.counts["repeat"] += 1
                raise Dropped
            return
        low = now < (last if session.anchor is None else session.anchor) or now in session.missing
        kind = "sequence gap" if now > last else "disorder" if low else "repeat"
        if kind in self.halts:
            raise Refusal(kind)
        self.counts[kind] += 1
        if message.kind != "snapshot":
            session.missing |= set(range(last + 1, now))
            session.missing.discard(now)
        if kind in self.drops:
            raise Dropped

    def _set_aside(self, name: str, kind: str, offset: int) -> None:
        session = self.sessions.setdefault(name, ExpectedSession())
        self.kept.append((offset, name))
        session.touched = True
        if session.finding is None:
            session.finding, session.finding_offset = kind, offset
            self._tell(kind, offset, name)

    def _tell(self, kind: str, offset: int, session: str | None) -> None:
        self.counts[kind] += 1
        self.findings.append((kind, offset, session))

    def _apply(
        self, state: dict[Any, Any], message: Sent
    ) -> tuple[dict[Any, Any], list[tuple[Any, ...]]]:
        if self.stream.machine != "table":
            return self._tally(state, message)
        rows = state
        if message.kind == "snapshot":
            return self._snapshot(rows, message)
        (given,) = message.rows
        self._judge_before_image(rows, message)
        if message.kind == "update" and message.before and message.before[0] not in (..., given[0]):
            return self._change_key(rows, message.before[0], given)
        old = rows.get(given[0])
        if (message.kind == "insert") != (old is None):
            self._contradicted()
        if message.kind == "delete":
            rows.pop(given[0], None)
            return rows, [self._record("delete", (given[0], None, None), old)] if old else []
        was = old if old is not None and message.kind == "update" else (None, None, None)
        new = tuple(b if a is ... else a for a, b in zip(given, was, strict=True))
        rows[given[0]] = new
        return rows, [self._record("insert" if old is None else "update", new, old)]

    def _judge_before_image(self, rows: dict[Any, Any], message: Sent) -> None:
        if message.before is None:
            return
        key = message.rows[0][0]
        if message.kind == "update" and message.before[0] is not ...:
            key = message.before[0]
        old = rows.get(key)
        if old is None:
            return
        if any(b is not ... and b != a for a, b in zip(old, message.before, strict=True)):
            self._contradicted()

    def _change_key(
        self, rows: dict[Any, Any], old_key: Any, given: tuple[Any, ...]
    ) -> tuple[dict[Any, Any], list[tuple[Any, ...]]]:
        old = rows.get(old_key)
        if old is None:
            self._contradicted()
        there = rows.get(given[0])
        if there is not None:
            self._contradicted()
        records = []
        if old is not None:
            del rows[old_key]
            records.append(self._record("delete", (old_key, None, None), old))
        was = old or (None, None, None)
        new = tuple(b if a is ... else a for a, b in zip(given, was, strict=True))
        rows[given[0]] = new
        records.append(self._record("insert" if there is None else "update", new, there))
        return rows, records

    def _snapshot(
        self, rows: dict[Any, Any], message: Sent
    ) -> tuple[dict[Any, Any], list[tuple[Any, ...]]]:
        table: dict[Any, Any] = {}
        for row in message.rows:
            if row[0] in table:
                self._contradicted()
            table[row[0]] = row
        records = [self._record("snapshot", row, rows.get(key)) for key, row in table.items()]
        gone = [old for key, old in rows.items() if key not in table]
        return table, records + [self._record("delete", (old[0], None, None), old) for old in gone]

    def _record(
        self, op: str, new: tuple[Any, ...], old: tuple[Any, ...] | None
    ) -> tuple[Any, ...]:
        before = (None, None, None) if old is None else old
        return (op, *new, *(before if self.stream.table.before else ()))

    def _contradicted(self) -> None:
        if "precondition" in self.halts:
            raise Refusal("precondition")
        self.counts["precondition"] += 1

    def _tally(
        self, state: dict[Any, Any], message: Sent
    ) -> tuple[dict[Any, Any], list[tuple[Any, ...]]]:
        if message.kind in ("boom", "unfit", "spoil"):
            raise Refusal("raised")
        total = message.value if message.kind == "snapshot" else state["total"] + message.value
        return {"total": total}, [(total, message.value)] * (2 if message.kind == "snapshot" else 1)
