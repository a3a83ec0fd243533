"""The validator: one judge of messages, wherever they are looked at: in a raw capture, in Kafka, in the output. Pure.

Each session begins by a snapshot, its sequence has no hole, repeat or disorder, and no offset is missing.
`Validator` names the first place where each is wrong; `parting` the first offset at which two views differ.

Next room: steps/validate.py makes sightings of messages and records; fold.py does what a tier says instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct, field

from seriatim.core.offsets import OffsetRange, Partition

Explained = Callable[[Partition, OffsetRange], bool]
"""Whether certificates say why the offsets of a hole are missing."""
Level = Literal["error", "warning"]


class Sighting(Struct, frozen=True, kw_only=True, gc=False):
    """One message as it was seen somewhere."""

    offset: int
    session: str | None = None
    sequence: int | None = None
    snapshot: bool | None = False
    """None: it cannot be told from what is there."""
    poison: str = ""
    content: int | None = None
    """A hash of key and value, where they are there."""
    gives: bool = True
    """Whether it must have left a record, if nothing was wrong with it."""
    ends: bool = False
    """Records that take rows back: the end of a session, or a snapshot without rows."""


class Wrong(Struct, kw_only=True):
    """The first place where something is wrong, and how often it is."""

    kind: str
    partition: Partition
    offset: int
    session: str | None = None
    expected: str = ""
    found: str = ""
    level: Level = "error"
    count: int = 1


class _Session(Struct):
    """A session so far."""

    last: int | None = None
    anchor: int | None = None
    missing: list[tuple[int, int]] = field(default_factory=list)
    """Sequences that were passed over, as half-open ranges."""

    def was_missing(self, sequence: int) -> bool:
        """Whether a sequence was passed over before; it is there now."""
        for number, (start, end) in enumerate(self.missing):
            if start <= sequence < end:
                parts = [(start, sequence), (sequence + 1, end)]
                self.missing[number : number + 1] = [part for part in parts if part[0] < part[1]]
                return True
        return False


class Validator:
    """One view's messages, partition by partition, in the order in which they are there."""

    def __init__(self, *, contiguous: bool, has_snapshots: bool = True, explained: Explained | None = None) -> None:
        self.contiguous, self.has_snapshots = contiguous, has_snapshots
        self.explained = explained or (lambda _partition, _hole: False)
        self.wrongs: dict[tuple[str, Level], Wrong] = {}
        self.messages = 0

    def walk(self, partition: Partition, sightings: Iterable[Sighting]) -> Iterator[tuple[Sighting, bool]]:
        """Each message, and whether it should have an effect: nothing is wrong with it that could take it away."""
        expected: int | None = None
        sessions: dict[str, _Session] = {}
        from_birth = False
        for seen in sightings:
            self.messages += 1
            if expected is None:
                from_birth = seen.offset == 0
            elif self.contiguous and seen.offset != expected:
                self._jump(partition, expected, seen)
            expected = seen.offset + 1 if expected is None else max(expected, seen.offset + 1)
            if seen.poison or seen.session is None:
                self._wrong("poison", partition, seen, "a message that can be read", seen.poison or "no readable key")
                yield seen, False
                continue
            yield seen, self._of_session(partition, sessions, seen, from_birth=from_birth)

    def _jump(self, partition: Partition, expected: int, seen: Sighting) -> None:
        if seen.offset < expected:
            self._wrong("offset again", partition, seen, f"offset {expected}", f"offset {seen.offset}")
            return
        hole = OffsetRange(expected, seen.offset)
        known = self.explained(partition, hole)
        found = f"offset {seen.offset}" + (" (explained when it was folded)" if known else "")
        self._wrong("gap", partition, seen, f"offset {expected}", found, "warning" if known else "error")

    def _of_session(
        self, partition: Partition, sessions: dict[str, _Session], seen: Sighting, *, from_birth: bool
    ) -> bool:
        """Judge a message by its session; whether it counts."""
        session = sessions.get(seen.session or "")
        headless = session is None and seen.snapshot is False and self.has_snapshots and not seen.ends
        if headless:
            level: Level = "error" if from_birth else "warning"
            self._wrong("headless", partition, seen, "a snapshot first", "another message", level)
        if session is None:
            session = sessions[seen.session or ""] = _Session()
        counts = self._in_sequence(partition, session, seen)
        if headless or (session.anchor is None and self.has_snapshots and seen.snapshot is False):
            return False
        return counts

    def _in_sequence(self, partition: Partition, session: _Session, seen: Sighting) -> bool:
        sequence, last = seen.sequence, session.last
        if seen.snapshot:
            if sequence is not None and last is not None and sequence > last + 1:
                closed = f"sequence {sequence}, closed by this snapshot"
                self._wrong("sequence gap", partition, seen, f"sequence {last + 1}", closed, "warning")
            session.last, session.anchor, session.missing = sequence, -1 if sequence is None else sequence, []
            return True
        if sequence is None or last is None:
            session.last = sequence
            return True
        if sequence == last + 1:
            session.last = sequence
            return True
        return self._out_of_sequence(partition, session, seen, sequence, last)

    def _out_of_sequence(
        self, partition: Partition, session: _Session, seen: Sighting, sequence: int, last: int
    ) -> bool:
        level: Level = "warning" if seen.snapshot is None else "error"
        expected, found = f"sequence {last + 1}", f"sequence {sequence}"
        if sequence > last:
            session.missing.append((last + 1, sequence))
            session.last = sequence
            self._wrong("sequence gap", partition, seen, expected, found, level)
            return True
        if seen.ends:
            return True
        before = session.anchor is not None and sequence < session.anchor
        kind = "disorder" if session.was_missing(sequence) or before else "repeat"
        self._wrong(kind, partition, seen, expected, found, level)
        return False

    def _wrong(
        self, kind: str, partition: Partition, seen: Sighting, expected: str, found: str, level: Level = "error"
    ) -> None:
        known = self.wrongs.get((kind, level))
        if known is not None:
            known.count += 1
            return
        self.wrongs[kind, level] = Wrong(
            kind=kind,
            partition=partition,
            offset=seen.offset,
            session=seen.session,
            expected=expected,
            found=found,
            level=level,
        )


class View(Struct, kw_only=True):
    """One partition as one view has it: what is there, in which range, by offset."""

    name: str
    span: OffsetRange
    seen: dict[int, Sighting]
    clean: set[int] = field(default_factory=set)
    """Offsets whose messages should have an effect."""
    kept: set[int] = field(default_factory=set)
    """Output: offsets of messages set aside."""
    headless: dict[str, list[OffsetRange]] = field(default_factory=dict)
    """Output: where sessions waited for a snapshot, because messages were lost that may have been theirs."""
    whole: bool = True
    """Whether every message is there: not so in the output, where only those with an effect left a record."""


class Parting(Struct, frozen=True, kw_only=True):
    """The first offset at which two views differ."""

    partition: Partition
    offset: int
    what: str
    views: Mapping[str, str]
    """What each of them has there."""


def parting(partition: Partition, views: list[View], *, must_give: bool) -> Parting | None:
    """Where views of a partition part. `must_give`: a message without fault always leaves a record."""
    found: list[Parting] = []
    for number, one in enumerate(views):
        for two in views[number + 1 :]:
            first = _first(partition, one, two, must_give=must_give)
            found += [first] if first else []
    return min(found, key=lambda each: each.offset, default=None)


def _first(partition: Partition, one: View, two: View, *, must_give: bool) -> Parting | None:
    start, end = max(one.span.start, two.span.start), min(one.span.end, two.span.end)
    offsets = sorted(offset for offset in {*one.seen, *two.seen, *one.kept, *two.kept} if start <= offset < end)
    for offset in offsets:
        what = _differs(one, two, offset, must_give=must_give)
        if what:
            views = {view.name: _shown(view, offset) for view in (one, two)}
            return Parting(partition=partition, offset=offset, what=what, views=views)
    return None


def _differs(one: View, two: View, offset: int, *, must_give: bool) -> str:
    """What differs at an offset; empty if nothing does."""
    left, right = one.seen.get(offset), two.seen.get(offset)
    if one.whole and two.whole:
        if left is None or right is None:
            return "a message that only one of them has"
        return "" if left.content == right.content else "another key or value"
    return _output_differs(*((one, two) if one.whole else (two, one)), offset, must_give=must_give)


def _output_differs(given: View, output: View, offset: int, *, must_give: bool) -> str:
    """What differs between messages and the records that are left of them."""
    message, record = given.seen.get(offset), output.seen.get(offset)
    if message is None:
        return f"the output has a message that {given.name} has not"
    if record is None:
        waits = any(offset in whole for whole in output.headless.get(message.session or "", ()))
        lacks = must_give and offset in given.clean and message.gives and offset not in output.kept and not waits
        return "the output has no record of a message without fault" if lacks else ""
    if record.session != message.session:
        return "another session"
    if record.ends:
        return ""
    unlike = record.snapshot is not None and record.snapshot != message.snapshot
    return "another sequence" if record.sequence != message.sequence else "a snapshot only in one" if unlike else ""


def _shown(view: View, offset: int) -> str:
    seen = view.seen.get(offset)
    if seen is None:
        return "set aside" if offset in view.kept else "nothing"
    kind = "poison" if seen.poison else "a snapshot" if seen.snapshot else "a message"
    return f"{kind} of session {seen.session}, sequence {seen.sequence}"
