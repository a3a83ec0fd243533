"""The derived tables: the fake and the Delta tables keep the same promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from msgspec.structs import replace

from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.session import QuarantinedMessage
from seriatim.errors import IntegrityError, PlatformError
from seriatim.ledger.gaps import Gap, QuarantineFile
from seriatim.ledger.model import EntryMark
from seriatim.memory import MemoryDerived, MemoryFiles
from seriatim.ports import CommitConflictError, DerivedTableName
from seriatim.storage import derived_tables as real
from seriatim.storage.derived_tables import DeltaDerived
from seriatim.storage.record_files import QUARANTINE_FILE_SCHEMA, ParquetRecords
from seriatim.storage.store import LocalStore

P, OTHER = Partition("in-a", 0), Partition("in-a", 1)
RELEASE = ("released_by", "released_how", "released_offset")


class Kit:
    """A store, a way to set messages aside, and what a reader of its tables sees."""

    def __init__(
        self, store: Any, files: Any, rows: Callable[[DerivedTableName], list[dict[str, Any]]]
    ) -> None:
        self.store, self.files, self.rows = store, files, rows
        self.count = 0

    def aside(
        self, sequence: int, *offsets: int, session: str = "s", place: Partition = P
    ) -> QuarantineFile:
        """A file with messages that an entry set aside."""
        self.count += 1
        stretch = MessageBatch(
            0, list(range(100)), [b"k"] * 100, [b"v"] * 100, [[("h", b"x")]] * 100
        )
        writer = self.files.quarantine_writer(place, "one", f"0-0-{self.count}")
        writer.write(
            stretch, [QuarantinedMessage(offset, session, "raised", "c") for offset in offsets]
        )
        return QuarantineFile(writer.close(), sequence)

    def releases(self) -> dict[tuple[str, int, int], tuple[Any, ...]]:
        """How messages were released, by session, partition and offset."""
        rows = self.rows("quarantine")
        found = {
            (row["session"], row["partition"], row["offset"]): tuple(row[name] for name in RELEASE)
            for row in rows
        }
        assert len(found) == len(rows), "a message is in twice"
        return found


@pytest.fixture(params=["memory", "delta"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Kit:
    """Both kinds of store."""
    if request.param == "memory":
        files = MemoryFiles({})
        store = MemoryDerived(lambda file: files.read(file).rows)
        return Kit(store, files, store.rows)
    return on_disk(tmp_path)


def on_disk(root: Path) -> Kit:
    """The real store."""
    return Kit(
        DeltaDerived(LocalStore(root)),
        ParquetRecords(LocalStore(root), {}, "zstd", ()),
        lambda table: (
            DeltaTable(root / table).to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
        ),
    )


def at(sequence: int) -> EntryMark:
    """An entry."""
    return EntryMark(sequence, f"sha-{sequence}")


def gap(start: int, until: int | None = None, opened: int = 0, **fields: Any) -> Gap:
    """A stay in quarantine, ended by entry 9 if it has an end."""
    ended = {} if until is None else {"until": until, "closed": 9, "closed_how": "snapshot"}
    given = {
        "session": "s",
        "partition": 0,
        "topic_id": "one",
        "quarantined": True,
        **ended,
        **fields,
    }
    return Gap(topic="in-a", start=start, finding="raised", cause="c", opened=opened, **given)


def where(kit: Kit, table: DerivedTableName) -> tuple[int, str]:
    """How far a table is."""
    reached = kit.store.applied_version(table)
    return reached.sequence, reached.sha256


def test_a_table_that_is_not_there_has_reached_nothing(kit: Kit) -> None:
    """And is made by the first put, empty if need be."""
    assert where(kit, "gaps") == where(kit, "quarantine") == (-1, "")
    kit.store.put_gaps(kit.store.applied_version("gaps"), at(3), [])
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(4), [], [])
    assert (where(kit, "gaps"), where(kit, "quarantine")) == ((3, "sha-3"), (4, "sha-4"))
    assert kit.rows("gaps") == kit.rows("quarantine") == []


def test_gaps_come_back_as_they_were_put(kit: Kit) -> None:
    """In their order, with nothing bent; the next put replaces them all."""
    gaps = [
        gap(3),
        gap(1, 5, opened=2, session=None),
        gap(7, opened=2, session="Zoë\n", quarantined=False),
    ]
    for number, some in enumerate((gaps[:1], gaps, gaps[1:], [])):
        kit.store.put_gaps(kit.store.applied_version("gaps"), at(number), some)
        reached = kit.store.applied_version("gaps")
        assert (reached.sequence, kit.store.gaps(reached)) == (number, some)
        assert kit.rows("gaps") == [one.to_row() for one in some]


def test_messages_are_added_whole(kit: Kit) -> None:
    """With their headers, and the entry that kept them; nobody has released them yet."""
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(2), [kit.aside(2, 4)], [])
    (row,) = kit.rows("quarantine")
    headers = [tuple(one.values()) if isinstance(one, dict) else one for one in row["headers"]]
    assert (row["key"], row["value"], headers) == (b"k", b"v", [("h", b"x")])
    assert (row["topic"], row["topic_id"], row["finding"], row["cause"]) == (
        "in-a",
        "one",
        "raised",
        "c",
    )
    assert (row["kept_by"], *(row[name] for name in RELEASE)) == (2, None, None, None)


def test_messages_released_in_the_same_put_say_so(kit: Kit) -> None:
    """Those after the end of the stay do not."""
    kit.store.put_quarantine(
        kit.store.applied_version("quarantine"), at(9), [kit.aside(9, 4, 5, 8)], [gap(4, 6)]
    )
    done, waits = (9, "snapshot", 6), (None, None, None)
    assert kit.releases() == {("s", 0, 4): done, ("s", 0, 5): done, ("s", 0, 8): waits}


def test_messages_released_later_say_so(kit: Kit) -> None:
    """Of that session and partition alone, beside new ones, and once said it stays said."""
    asides = [kit.aside(1, 4, 5), kit.aside(1, 4, session="t"), kit.aside(1, 4, place=OTHER)]
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(1), asides, [])
    kit.store.put_quarantine(
        kit.store.applied_version("quarantine"), at(9), [kit.aside(9, 20)], [gap(4, 6)]
    )
    later = gap(20, 30, closed=11, closed_how="hand")
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(11), [], [later])
    waits = (None, None, None)
    assert kit.releases() == {
        ("s", 0, 4): (9, "snapshot", 6),
        ("s", 0, 5): (9, "snapshot", 6),
        ("t", 0, 4): waits,
        ("s", 1, 4): waits,
        ("s", 0, 20): (11, "hand", 30),
    }
    assert where(kit, "quarantine") == (11, "sha-11")


def test_a_put_on_nothing_makes_the_table_as_a_whole(kit: Kit) -> None:
    """What was there goes, in the same commit."""
    kit.store.put_quarantine(
        kit.store.applied_version("quarantine"), at(1), [kit.aside(1, 4, 5)], []
    )
    kit.store.put_gaps(kit.store.applied_version("gaps"), at(1), [gap(4)])
    anew = {
        table: replace(kit.store.applied_version(table), sequence=-1)
        for table in ("gaps", "quarantine")
    }
    kit.store.put_quarantine(anew["quarantine"], at(9), [kit.aside(1, 7)], [gap(4, 8)])
    kit.store.put_gaps(anew["gaps"], at(9), [])
    assert kit.releases() == {("s", 0, 7): (9, "snapshot", 8)}
    assert kit.rows("gaps") == []


@pytest.mark.parametrize("whole", [False, True])
def test_a_put_on_a_table_that_moved_is_refused(kit: Kit, whole: bool) -> None:
    """Two runs that catch up at the same time never put a message in twice."""
    for step in range(2):
        seen = {table: kit.store.applied_version(table) for table in ("gaps", "quarantine")}
        if whole:
            seen = {table: replace(reached, sequence=-1) for table, reached in seen.items()}
        kit.store.put_gaps(seen["gaps"], at(step), [gap(step)])
        kit.store.put_quarantine(seen["quarantine"], at(step), [kit.aside(step, step)], [])
        with pytest.raises(CommitConflictError):
            kit.store.put_gaps(seen["gaps"], at(step), [])
        with pytest.raises(CommitConflictError):
            kit.store.put_quarantine(seen["quarantine"], at(step), [kit.aside(step, step)], [])
        assert [row["from"] for row in kit.rows("gaps")] == [step]
        assert ("s", 0, step) in kit.releases()


def test_a_note_takes_both_tables_further(kit: Kit) -> None:
    """Without a commit; it is void once a table is another one, and never takes one back."""
    kit.store.put_gaps(kit.store.applied_version("gaps"), at(1), [])
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(1), [], [])
    kit.store.note_up_to_date(at(5), 0)
    assert where(kit, "gaps") == where(kit, "quarantine") == (5, "sha-5")
    kit.store.put_gaps(kit.store.applied_version("gaps"), at(7), [gap(1)])
    assert (where(kit, "gaps"), where(kit, "quarantine")) == ((7, "sha-7"), (5, "sha-5"))
    kit.store.note_up_to_date(at(6), 1)
    assert (where(kit, "gaps"), where(kit, "quarantine")) == ((7, "sha-7"), (6, "sha-6"))


def test_a_file_of_messages_that_was_damaged_is_refused(tmp_path: Path) -> None:
    """Nothing of it is put; the ledger's digest decides."""
    kit = on_disk(tmp_path)
    aside = kit.aside(1, 4)
    full = tmp_path / aside.file.path
    full.write_bytes(full.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match="its digest is"):
        kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(1), [aside], [])
    full.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(1), [aside], [])
    assert where(kit, "quarantine") == (-1, "")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"sequence": "x"}', b'{"sequence": 5, "sha256": 1, "gaps": "0"}'],
)
def test_a_note_that_was_damaged_means_nothing(tmp_path: Path, content: bytes) -> None:
    """Losing it costs a walk, and nothing else."""
    kit = on_disk(tmp_path)
    kit.store.put_gaps(kit.store.applied_version("gaps"), at(1), [])
    (tmp_path / "derived.json").write_bytes(content)
    assert where(kit, "gaps") == (1, "sha-1")


def test_commits_of_others_are_looked_through(tmp_path: Path) -> None:
    """A vacuum or an OPTIMIZE takes nothing from what the table has reached."""
    kit = on_disk(tmp_path)
    for number in range(3):
        kit.store.put_quarantine(
            kit.store.applied_version("quarantine"), at(number), [kit.aside(number, number)], []
        )
    table = DeltaTable(tmp_path / "quarantine")
    for _ in range(5):
        table.vacuum(dry_run=False)
    table.optimize.compact()
    assert where(kit, "quarantine") == (2, "sha-2")
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(9), [], [gap(0, 2)])
    assert [release[0] for _, release in sorted(kit.releases().items())] == [9, 9, None]


@pytest.mark.parametrize(("hours", "files"), [(0, 2), (1, 4)])
def test_files_that_no_reader_needs_go_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int, files: int
) -> None:
    """The table is looked at now and then; what was replaced lately stays for readers who have it
    open.
    """
    monkeypatch.setattr(real, "VACUUM_EVERY", 2)
    monkeypatch.setattr(real, "READERS_HOURS", hours)
    kit = on_disk(tmp_path)
    for number in range(4):
        kit.store.put_gaps(kit.store.applied_version("gaps"), at(number), [gap(number)])
    assert where(kit, "gaps") == (3, "sha-3")
    assert len(list((tmp_path / "gaps").glob("*.parquet"))) == files
    assert [row["from"] for row in kit.rows("gaps")] == [3]


def test_only_files_with_released_messages_are_written_anew(tmp_path: Path) -> None:
    """The others stay as they are, byte for byte."""
    kit = on_disk(tmp_path)
    asides = [
        kit.aside(1, 4),
        kit.aside(1, 5, session="t"),
        kit.aside(1, 6, place=OTHER),
        kit.aside(1, 50),
    ]
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(1), asides, [])
    before = set(DeltaTable(tmp_path / "quarantine").file_uris())
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(9), [], [gap(4, 8)])
    after = set(DeltaTable(tmp_path / "quarantine").file_uris())
    assert (len(before & after), len(after)) == (3, 4)


def test_a_table_that_cannot_be_read_is_to_be_moved_away(tmp_path: Path) -> None:
    """The message says where it is, and that nothing is lost."""
    kit = on_disk(tmp_path)
    kit.store.put_gaps(kit.store.applied_version("gaps"), at(1), [gap(4)])
    reached = kit.store.applied_version("gaps")
    for file in (tmp_path / "gaps").glob("*.parquet"):
        file.unlink()
    with pytest.raises(PlatformError, match="gaps cannot be read") as caught:
        kit.store.gaps(reached)
    assert str(tmp_path / "gaps") in caught.value.next
    (tmp_path / "gaps" / "_delta_log" / f"{0:020d}.json").write_text("{")
    with pytest.raises(PlatformError, match="gaps cannot be read"):
        kit.store.applied_version("gaps")


def test_the_quarantine_table_begins_with_the_columns_of_its_files() -> None:
    """The two schemas are written down in two rooms."""
    assert list(real.QUARANTINE_SCHEMA)[: len(QUARANTINE_FILE_SCHEMA)] == list(
        QUARANTINE_FILE_SCHEMA
    )


def test_what_is_noted_names_versions(tmp_path: Path) -> None:
    """A table that was deleted, or put back from a backup, is not taken for the one that was noted."""
    kit = on_disk(tmp_path)
    kit.store.put_gaps(kit.store.applied_version("gaps"), at(1), [])
    kit.store.put_quarantine(kit.store.applied_version("quarantine"), at(1), [], [])
    kit.store.note_up_to_date(at(5), 0)
    noted = json.loads((tmp_path / "derived.json").read_bytes())
    assert noted == {
        "sequence": 5,
        "sha256": "sha-5",
        "gaps": 0,
        "quarantine": 0,
        "open_gaps": 0,
    }
