"""Evidence: promises that no stock expectation can say, one row per partition and promise, for a suite to assert on.

dense     certificates account for every offset from the frontier before to the frontier after
counted   the partition's record files hold as many records as the ledger says
unique    each record is there once, in order, in a file of its own partition
folded    folding the new records over the old state gives the new state (stock machine)
linked    each before-image is the row as it was (stock machine, `before = true`)

Pure: a `Sight` reads the files and gives their new rows as parts.

Next room: check.py makes a verdict of what suites say; steps/check.py gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from zlib import crc32

from msgspec import Struct, field

from seriatim.core.ledger import Account, Certificate, Change, Entry, File
from seriatim.core.offsets import Partition
from seriatim.core.verify import Row, plain

Tables = Mapping[Any, Row]
Load = Callable[[str, list[str]], dict[str, Tables]]
"""Rows of these sessions of a life, as they were before."""


class Evidence(Struct, frozen=True, kw_only=True):
    """One promise about one partition: whether it holds, and where it does not."""

    partition: Partition
    promise: str
    broken: int = 0
    """How often it does not hold."""
    offset: int = -1
    """The first place where it does not."""
    expected: str = ""
    found: str = ""
    files: tuple[str, ...] = ()
    """Record files to blame; none: not known."""

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return not self.broken

    def row(self) -> dict[str, Any]:
        """As a row of the evidence frame."""
        return {
            "topic": self.partition.topic,
            "partition": self.partition.number,
            "promise": self.promise,
            "holds": self.holds,
            "broken": self.broken,
            "offset": self.offset,
        }


class Wanted(Struct, frozen=True, kw_only=True):
    """What is asked of a record file."""

    partition: Partition
    since: dict[str, int]
    """By topic id: the first offset that is new. Records of other lives are left out."""
    key: tuple[str, ...] = ()
    """Of the stock machine; none: its rows are not asked for."""
    columns: tuple[str, ...] = ()
    before: bool = False
    bucket: tuple[int, int] = (0, 1)
    """Rows of the sessions whose name falls into this one of so many."""


class Part(Struct, kw_only=True):
    """New rows of a record file, in order, as far as the promises need them."""

    rows: int = 0
    every: int = 0
    """Rows of the file that were passed, new or not."""
    disorder: int = -1
    """The offset of the first row that does not come after the one before it."""
    strange: int = -1
    """The offset of the first row of another topic or partition."""
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By topic id: first and last offset."""
    firsts: list[tuple[str, str, Any, Row | None, int]] = field(default_factory=list)
    """Rows of sessions as they are met: topic id, session, key, before-image (None: there was no row), offset."""
    lasts: list[tuple[str, str, Any, Row | None, int]] = field(default_factory=list)
    """The same as this part leaves them: topic id, session, key, row (None: deleted), offset."""
    unlinked: int = 0
    """Rows whose before-image is not the row before them in this part."""
    unlinked_at: int = -1


class Sight(Protocol):
    """Committed record files, read again a part at a time. Raises `Unreadable` (ports.py)."""

    def parts(self, file: File, wanted: Wanted) -> Iterator[Part]: ...


def dense(partition: Partition, was: Account | None, changes: Iterable[tuple[Entry, Change]], now: Account) -> Evidence:
    """Certificates join from the frontier before to the one now; a repair or a new life begins where it says."""
    broken: list[tuple[int, str, str]] = []
    at, life = (was.frontier, was.topic_id) if was else (-1, "")
    for entry, change in changes:
        if entry.kind != "slice":
            at, life = (change.until if entry.kind in ("repair", "accept") else at), change.topic_id
            continue
        begins = at if life == change.topic_id else change.frontier
        certificate = change.certificate
        if certificate is None or certificate.start != begins or _accounted(certificate) != _length(certificate):
            found = (
                "none"
                if certificate is None
                else f"[{certificate.start}, {certificate.until}) and {_accounted(certificate)} offsets"
            )
            broken.append((begins, f"a certificate for every offset from {begins} on", found))
        at, life = change.until, change.topic_id
    if at != now.frontier:
        broken.append((at, f"certificates up to the frontier {now.frontier}", f"up to {at}"))
    first = broken[0] if broken else (-1, "", "")
    return Evidence(
        partition=partition, promise="dense", broken=len(broken), offset=first[0], expected=first[1], found=first[2]
    )


def _accounted(certificate: Certificate) -> int:
    return certificate.counts.messages + sum(certificate.holes.values())


def _length(certificate: Certificate) -> int:
    return certificate.until - certificate.start


class Files:
    """A partition's record files as they are read: counted, unique, in order."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.rows = 0
        self.miscounted: list[tuple[File, int]] = []
        self.wrong: list[tuple[File, int, str]] = []
        self._ends: dict[str, tuple[int, File]] = {}

    def take(self, file: File, parts: Iterable[Part]) -> Iterator[Part]:
        """Pass a file's parts on, and look at them. Files come by their first offset."""
        every, spans = 0, dict[str, tuple[int, int]]()
        for part in parts:
            every += part.every
            self.rows += part.rows
            for offset, what in ((part.disorder, "out of order, or twice"), (part.strange, "of another partition")):
                if offset >= 0:
                    self.wrong.append((file, offset, what))
            for life, (first, last) in part.spans.items():
                spans[life] = (spans[life][0] if life in spans else first, last)
            yield part
        if every != file.rows:
            self.miscounted.append((file, every))
        for life, (first, last) in spans.items():
            if life in self._ends and first <= self._ends[life][0]:
                self.wrong.append((file, first, f"also in {self._ends[life][1].path}"))
            self._ends[life] = (last, file)

    def evidence(self, total: int, now: Account) -> Iterator[Evidence]:
        """Counted and unique. `total`: the records of all files of the partition, of which the ledger has the sum."""
        expected, found, count = (
            f"{now.records} records in all",
            f"{total} in the table's files",
            abs(total - now.records),
        )
        if self.miscounted and not count:
            file, seen = self.miscounted[0]
            expected, found, count = f"{file.rows} records in {file.path}", f"{seen}", abs(file.rows - seen)
        yield Evidence(
            partition=self.partition,
            promise="counted",
            broken=count,
            expected=expected if count else "",
            found=found if count else "",
            files=tuple(file.path for file, _ in self.miscounted),
        )
        first = self.wrong[0] if self.wrong else None
        yield Evidence(
            partition=self.partition,
            promise="unique",
            broken=len(self.wrong),
            offset=first[1] if first else -1,
            expected="each record once, in order" if first else "",
            found=f"a record {first[2]}" if first else "",
            files=tuple(dict.fromkeys(file.path for file, _, _ in self.wrong)),
        )


class Walk:
    """New records folded over the rows as they were."""

    def __init__(self, names: Iterable[str], load: Load, *, before: bool) -> None:
        self.names, self.load, self.before = list(names), load, before
        self.tables: dict[tuple[str, str], dict[Any, tuple[Row, int]]] = {}
        self.unlinked, self.unlinked_at, self.link = 0, -1, ("", "")
        self.differs, self.differs_at, self.difference = 0, -1, ("", "")
        self.files: dict[str, set[str]] = {"linked": set(), "folded": set()}

    def take(self, part: Part, path: str) -> None:
        """Fold a part."""
        self.meet({(life, session) for life, session, _, _, _ in part.firsts})
        if self.before:
            self._link(part, path)
        for life, session, key, row, offset in part.lasts:
            if row is None:
                self.tables[life, session].pop(key, None)
            else:
                self.tables[life, session][key] = (row, offset)

    def meet(self, sessions: set[tuple[str, str]]) -> None:
        """Have these sessions, by topic id, as they were before."""
        by_life: dict[str, list[str]] = {}
        for life, name in sessions - self.tables.keys():
            by_life.setdefault(life, []).append(name)
        for life, names in by_life.items():
            was = self.load(life, names)
            for name in names:
                self.tables[life, name] = {key: (row, -1) for key, row in was.get(name, {}).items()}

    def _link(self, part: Part, path: str) -> None:
        if part.unlinked:
            self._unlinked(part.unlinked, part.unlinked_at, path, ("the row before it in the records", "another one"))
        for life, session, key, before, offset in part.firsts:
            was = self.tables[life, session].get(key)
            if not same(before, was[0] if was else None):
                row = was[0] if was else None
                self._unlinked(1, offset, path, (self.shown(row), self.shown(before)))

    def _unlinked(self, count: int, offset: int, path: str, link: tuple[str, str]) -> None:
        self.unlinked += count
        self.files["linked"].add(path)
        if self.unlinked_at < 0 or offset < self.unlinked_at:
            self.unlinked_at, self.link = offset, link

    def compare(self, life: str, name: str, kept: Tables) -> None:
        """Hold a session's rows, as its records make them, against its state. It is done with then."""
        made = self.tables.pop((life, name))
        for key in {*made, *kept}:
            row, offset = made.get(key, (None, -1))
            if not same(row, kept.get(key)):
                self.differs += 1
                if self.differs == 1 or 0 <= offset < self.differs_at:
                    found = f"{self.shown(kept.get(key))} in session {name[:100]!r}"
                    self.differs_at, self.difference = offset, (self.shown(row), found)

    def shown(self, row: Row | None) -> str:
        """A row for a person."""
        if row is None:
            return "no such row"
        return ", ".join(f"{name}={value!r}" for name, value in zip(self.names, row, strict=True))[:200]


def walked(partition: Partition, walks: Iterable[Walk], files: tuple[str, ...]) -> Iterator[Evidence]:
    """Folded and linked, of walks through all sessions."""
    walks = list(walks)
    differ = [walk for walk in walks if walk.differs]
    first = min(differ, key=lambda walk: walk.differs_at, default=None)
    yield Evidence(
        partition=partition,
        promise="folded",
        broken=sum(walk.differs for walk in walks),
        offset=first.differs_at if first else -1,
        expected=first.difference[0] if first else "",
        found=first.difference[1] if first else "",
        files=files if differ else (),
    )
    if any(walk.before for walk in walks):
        broken = [walk for walk in walks if walk.unlinked]
        first = min(broken, key=lambda walk: walk.unlinked_at, default=None)
        yield Evidence(
            partition=partition,
            promise="linked",
            broken=sum(walk.unlinked for walk in walks),
            offset=first.unlinked_at if first else -1,
            expected=first.link[0] if first else "",
            found=first.link[1] if first else "",
            files=tuple(sorted({path for walk in broken for path in walk.files["linked"]})),
        )


def in_bucket(name: str, bucket: tuple[int, int]) -> bool:
    """Whether a session's name falls into this one of so many."""
    number, of = bucket
    return of == 1 or crc32(name.encode("utf-8", "surrogatepass")) % of == number


def same(one: Row | None, other: Row | None) -> bool:
    """Whether two rows are the same; a time without a zone is in UTC."""
    return one == other or (one is not None and other is not None and plain(one) == plain(other))
