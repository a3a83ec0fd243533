"""The contract of `LedgerStore`: compare-and-set or nothing, in memory and on a Delta table."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from msgspec.structs import replace

from seriatim import disk
from seriatim.adapters.delta import DeltaLedger
from seriatim.adapters.memory import MemoryClock, MemoryFiles, MemoryLedger
from seriatim.adapters.parquet import ParquetRecords, record_schema
from seriatim.core.errors import ConfigError, FencedError, IntegrityError
from seriatim.core.ledger import Change, Entry, File, Ledger, encode
from seriatim.core.message import Stretch
from seriatim.core.offsets import Partition
from seriatim.core.session import Folded
from seriatim.ports import Conflict, Head
from seriatim.steps.commit import build, commit, read_head, start
from seriatim.steps.sweep import sweep_dead

P, Q = Partition("in-a", 0), Partition("in-a", 1)
COLUMNS = {"op": "string", "at": "timestamp", "parts": "list<int64>"}
STRETCH = Stretch(0, [0], [b"s"], [b"v"])
NOTHING = Ledger(stream="s")


class MemorySide:
    """The fake ledger with its files, and what others may do to it."""

    def __init__(self) -> None:
        self.files = MemoryFiles(COLUMNS)
        self.store = MemoryLedger(self.files.read)

    def again(self) -> MemoryLedger:
        return self.store

    def foreign_append(self) -> None:
        self.store.foreign_commit("rows appended")

    def foreign_rewrite(self) -> None:
        self.store.foreign_commit()

    def lose(self, path: str) -> None:
        (self.files.files if path in self.files.files else self.store.manifests).pop(path)

    def damage(self, path: str) -> None:
        self.store.manifests[path] += b" "

    def active(self) -> list[str]:
        return [file.path for file in self.store.active()]


class RealSide:
    """A Delta table, and what others may do to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = ParquetRecords(root, COLUMNS, "zstd", ())
        self.store = self.again()

    def again(self) -> DeltaLedger:
        return DeltaLedger(self.root, record_schema(COLUMNS))

    def foreign_append(self) -> None:
        table = DeltaTable(self.root / "records")
        write_deltalake(table, pa.table({"op": ["mine"]}), mode="append", schema_mode="merge")

    def foreign_rewrite(self) -> None:
        made = DeltaTable(self.root / "records").optimize.compact()
        assert made["numFilesRemoved"] > 0

    def lose(self, path: str) -> None:
        (self.root / path).unlink()

    def damage(self, path: str) -> None:
        full = self.root / path
        full.write_bytes(full.read_bytes() + b" ")

    def active(self) -> list[str]:
        uris = DeltaTable(self.root / "records").file_uris()
        return sorted("records/" + uri.rpartition("/records/")[2] for uri in uris)


Side = MemorySide | RealSide


@pytest.fixture(params=["memory", "real"])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Side:
    """A ledger of either kind."""
    return MemorySide() if request.param == "memory" else RealSide(tmp_path)


def change(partition: Partition = P, frontier: int = 0, until: int = 0, *files: File) -> Change:
    """A change that moves a frontier."""
    return Change(partition=partition, epoch=0, frontier=frontier, until=until, topic_id="id", born=0, records=files)


def moved(frontier: int, until: int, *files: File, attempt: str = "a1", partition: Partition = P) -> Entry:
    """A slice."""
    return Entry(kind="slice", attempt=attempt, changes=(change(partition, frontier, until, *files),))


def begun(side: Side) -> Head:
    """A ledger with its first entry."""
    return start(side.store, MemoryClock(), "s", "a0", (change(), change(Q)))


def record_file(side: Side, stem: str) -> File:
    """A record file that is really there."""
    writer = side.files.records(P, "id", stem)
    writer.write(STRETCH, Folded([0], [0], [None], ["s"], [("insert", None, [1])], consumed=1))
    file = writer.close()
    assert file is not None
    return file


def attempted(side: Side, head: Head | None, entry: Entry) -> Callable[[], str]:
    """A commit by hand, ready to be tried: no rule, no second try. Gives the manifest's hash."""
    after, manifest = build(entry, NOTHING if head is None else head.ledger)
    path, sha256 = side.store.put_manifest(after.sequence, encode(manifest))
    store = side.again()

    def attempt() -> str:
        store.compare_and_set(head, manifest.entry, path, sha256)
        return sha256

    return attempt


def frontier(side: Side) -> tuple[int, int]:
    """The last sequence, and how far the first partition is."""
    head = side.again().head("s")
    assert head is not None
    return head.ledger.sequence, head.ledger.partitions[str(P)].frontier


def test_there_is_no_ledger_before_the_first_entry(side: Side) -> None:
    """Neither a head nor a witness, whatever files and manifests lie around: they mean nothing."""
    record_file(side, "0-0-a")
    _, sha256 = side.store.put_manifest(0, b"{}")
    assert (side.store.head("s"), side.store.witness()) == (None, None)
    assert not side.store.has(sha256, -1)
    with pytest.raises(ConfigError, match="no ledger entry 0"):
        side.store.at("s", 0)


def test_entries_are_read_back_as_committed(side: Side) -> None:
    """The head, and the ledger as of every earlier entry, each with its hash: a chain."""
    heads = [begun(side)]
    for number in range(3):
        head, done = commit(side.store, MemoryClock(), heads[-1], moved(number * 5, number * 5 + 5))
        assert (done.sequence, done.previous) == (number + 1, heads[-1].ledger.sha256)
        heads.append(head)
    found = read_head(side.again(), "s")
    assert found is not None
    assert (found.ledger, found.foreign) == (heads[-1].ledger, [])
    assert found.ledger.partitions["in-a/0"].frontier == 15
    assert [side.again().at("s", number) for number in range(4)] == [head.ledger for head in heads]


@pytest.mark.parametrize("sequence", [-1, 2, 99])
def test_an_entry_that_is_not_there_is_refused_by_number(side: Side, sequence: int) -> None:
    """Whoever asks has mistyped it."""
    commit(side.store, MemoryClock(), begun(side), moved(0, 5))
    with pytest.raises(ConfigError, match=f"no ledger entry {sequence}"):
        side.store.at("s", sequence)


def test_an_entry_is_known_by_its_manifest_after_another(side: Side) -> None:
    """`has` looks only after the entry that it was given."""
    first = begun(side)
    second, _ = commit(side.store, MemoryClock(), first, moved(0, 5))
    one, two, store = first.ledger.sha256, second.ledger.sha256, side.again()
    assert [store.has(two, after) for after in (-1, 0, 1)] == [True, True, False]
    assert [store.has(one, after) for after in (-1, 0, 1)] == [True, False, False]
    assert not store.has("0" * 64, -1)


def test_a_long_ledger_is_read_to_its_beginning(side: Side) -> None:
    """Entries far back are found as the last ones are."""
    head = first = begun(side)
    for number in range(20):
        head, _ = commit(side.store, MemoryClock(), head, moved(number, number + 1))
    assert side.again().at("s", 0) == first.ledger
    assert side.again().at("s", 20) == head.ledger
    assert side.again().has(first.ledger.sha256, -1)


def test_entries_are_walked_from_any_of_them_on(side: Side) -> None:
    """Oldest first, past what others committed in between; none where there is nothing later, or no ledger."""
    assert list(side.store.entries("s", -1)) == []
    head = begun(side)
    for number in range(20):
        head = commit(side.store, MemoryClock(), head, moved(number, number + 1))[0]
    for after in (-1, 0, 17, 20, 99):
        found = [manifest.entry.sequence for manifest in side.store.entries("s", after)]
        assert found == list(range(after + 1, 21))
    assert next(side.store.entries("s", 4)) == side.store.manifest("s", 5)


def test_a_commit_on_an_old_head_changes_nothing(side: Side) -> None:
    """It may only be set on exactly the head that was read; by the rule its maker is fenced."""
    old = begun(side)
    file = record_file(side, "0-0-zombie")
    commit(side.store, MemoryClock(), old, moved(0, 5))
    with pytest.raises(Conflict):
        attempted(side, old, moved(0, 3, file, attempt="zombie"))()
    with pytest.raises(Conflict):
        attempted(side, None, Entry(kind="start", attempt="zombie"))()
    assert frontier(side) == (1, 5)
    assert side.active() == []
    with pytest.raises(FencedError):
        commit(side.store, MemoryClock(), old, moved(0, 3, attempt="zombie"))
    assert frontier(side) == (1, 5)


def test_of_two_on_one_head_one_wins(side: Side) -> None:
    """Each read the ledger before the other wrote; the loser is told so."""
    begun(side)
    first, second = side.again().head("s"), side.again().head("s")
    attempted(side, first, moved(0, 5))()
    with pytest.raises(Conflict):
        attempted(side, second, moved(0, 7, attempt="b"))()
    assert frontier(side) == (1, 5)


def test_of_two_who_create_one_wins(side: Side) -> None:
    """Both saw no ledger; by the rule the second takes the first one's."""
    births = (change(), change(Q))
    one, two = (attempted(side, None, Entry(kind="start", attempt=a, changes=births)) for a in "ab")
    sha256 = one()
    with pytest.raises(Conflict):
        two()
    head = side.again().head("s")
    assert head is not None
    assert head.ledger.sha256 == sha256
    assert start(side.store, MemoryClock(), "s", "b", births).ledger == head.ledger


@pytest.mark.parametrize("first", [True, False], ids=["create", "append"])
def test_at_the_same_moment_one_wins_too(tmp_path: Path, first: bool) -> None:
    """Four at once on the real store: three are refused, and the one that is there was answered well."""
    side = RealSide(tmp_path)
    if not first:
        begun(side)
    entries = [Entry(kind="start", attempt=a, changes=(change(),)) if first else moved(0, 5, attempt=a) for a in "abcd"]
    tries = [attempted(side, None if first else side.again().head("s"), entry) for entry in entries]
    with ThreadPoolExecutor(4) as pool:
        outcomes = [future.exception() or future.result() for future in [pool.submit(one) for one in tries]]
    won = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(won) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 3
    head = side.again().head("s")
    assert head is not None
    assert [head.ledger.sha256] == won


def test_committed_record_files_are_in_the_table(side: Side) -> None:
    """Only those that an entry names; others are invisible."""
    named, _ = record_file(side, "0-0-a"), record_file(side, "0-0-orphan")
    commit(side.store, MemoryClock(), begun(side), moved(0, 5, named))
    assert side.active() == [named.path]


def test_a_file_that_is_gone_is_never_named(side: Side) -> None:
    """Another run has swept it: nothing is committed."""
    head, file = begun(side), record_file(side, "0-0-a")
    side.lose(file.path)
    with pytest.raises(Conflict, match="0-0-a"):
        attempted(side, head, moved(0, 5, file))()
    assert frontier(side) == (0, 0)


def test_a_manifest_is_stored_under_what_it_says(side: Side) -> None:
    """Twice the same is the same place, other content is another: none is ever overwritten."""
    one, same, other, later = (
        side.store.put_manifest(sequence, content)
        for sequence, content in ((3, b"{}"), (3, b"{}"), (3, b"{ }"), (4, b"{}"))
    )
    assert one == same
    assert len({one[0], other[0], later[0]}) == 3
    assert all(sha256 in path for path, sha256 in (one, other, later))


def test_manifests_that_lost_are_swept(side: Side) -> None:
    """Up to the head, by another hash; those in the chain, and of entries to come, stay."""
    first = begun(side)
    head, _ = commit(side.store, MemoryClock(), first, moved(0, 5))
    lost = [side.store.put_manifest(number, b"{}")[0] for number in (0, 1)]
    coming, _ = side.store.put_manifest(2, b"{}")
    assert side.again().sweep(head) == sorted(lost)
    assert side.again().sweep(head) == []
    assert [side.again().at("s", number) for number in (0, 1)] == [first.ledger, head.ledger]
    side.lose(coming)


def test_the_table_tells_its_files(side: Side) -> None:
    """As of the head, by the paths that entries name."""
    head = begun(side)
    assert side.store.active_paths(head) == set()
    file = record_file(side, "0-0-a")
    head, _ = commit(side.store, MemoryClock(), head, moved(0, 5, file))
    assert side.store.active_paths(head) == {file.path}


def test_dead_files_are_swept_on_either_side(side: Side) -> None:
    """A late attempt at an older start goes; what is named, and what is at the frontier, stays."""
    head = begun(side)
    for number in range(3):
        head, _ = commit(side.store, MemoryClock(), head, moved(number, number + 1, record_file(side, f"0-{number}-a")))
    late, live = record_file(side, "0-1-late-3"), record_file(side, "0-3-b")
    assert sweep_dead(side.store, side.files, head) == [late.path]
    assert sorted(side.files.paths(P)) == sorted([*side.active(), live.path])


def test_drafts_are_swept(tmp_path: Path) -> None:
    """Of manifests and of the witness; nothing else that begins with a dot."""
    side = RealSide(tmp_path)
    head = begun(side)
    drafts = [".head.json.0a1b2c3d", f"manifests/.{'0' * 10}-{'a' * 64}.json.zst.0a1b2c3d"]
    for name in (*drafts, ".keep"):
        (tmp_path / name).write_bytes(b"half")
    assert side.store.sweep(head) == drafts
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".keep"]


def test_a_file_whose_draft_was_swept_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run cannot tell a draft being written from a dead one's."""
    swept: list[str] = []

    def sweeping(path: Path) -> None:
        if not swept:
            swept.extend(disk.sweep_drafts(tmp_path))
        sync(path)

    sync = disk.sync
    monkeypatch.setattr(disk, "sync", sweeping)
    disk.write_file(tmp_path / "head.json", b"{}")
    assert len(swept) == 1
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("head.json", b"{}")]


@pytest.mark.parametrize("how", ["damage", "lose"])
def test_a_hurt_manifest_is_refused_by_name(side: Side, how: str) -> None:
    """The last one leaves no head; an earlier one does no harm until it is asked for."""
    first = begun(side)
    after, manifest = build(moved(0, 5), first.ledger)
    path, sha256 = side.store.put_manifest(after.sequence, encode(manifest))
    side.store.compare_and_set(first, manifest.entry, path, sha256)
    getattr(side, how)(path)
    for read in (lambda: side.again().head("s"), lambda: side.again().at("s", 1)):
        with pytest.raises(IntegrityError) as caught:
            read()
        assert path in caught.value.render()
    assert side.again().at("s", 0) == first.ledger


def test_the_witness_is_what_was_last_written(side: Side) -> None:
    """It is beside the ledger, and stays when the ledger does not."""
    assert side.store.witness() is None
    side.store.put_witness(3, "a")
    side.store.put_witness(4, "b")
    assert side.again().witness() == (4, "b")
    with pytest.raises(IntegrityError, match="there is no ledger"):
        read_head(side.again(), "s")


def test_rows_appended_by_others_are_one_finding_until_told(side: Side) -> None:
    """The next entry carries it; a commit on the head from before is refused."""
    before = begun(side)
    side.foreign_append()
    with pytest.raises(Conflict):
        attempted(side, before, moved(0, 3))()
    head = side.again().head("s")
    assert head is not None
    assert [finding.finding for finding in head.foreign] == ["foreign"]
    assert head.ledger == before.ledger
    after, done = commit(side.store, MemoryClock(), head, moved(0, 5))
    assert done.findings == tuple(head.foreign)
    assert (after.foreign, frontier(side)) == ([], (1, 5))


def test_files_rewritten_by_others_are_no_finding(side: Side) -> None:
    """A foreign OPTIMIZE changes no record; the ledger goes on."""
    head = begun(side)
    for number in range(2):
        file = record_file(side, f"0-{number}-a")
        head, _ = commit(side.store, MemoryClock(), head, moved(number, number + 1, file))
    side.foreign_rewrite()
    found = side.again().head("s")
    assert found is not None
    assert (found.ledger, found.foreign) == (head.ledger, [])
    commit(side.store, MemoryClock(), found, moved(2, 5))
    assert frontier(side) == (3, 5)


def test_another_streams_ledger_is_refused(side: Side) -> None:
    """Two streams must not share an output path: whose it is is told."""
    begun(side)
    for read in (lambda: side.again().head("other"), lambda: side.again().at("other", 0)):
        with pytest.raises(ConfigError, match="holds stream 's'"):
            read()


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"op": "int64", "at": "timestamp", "parts": "list<int64>"}, "'op' is string in the records table, int64"),
        ({"at": "timestamp", "parts": "list<int64>"}, "'op' is string in the records table, not there"),
        ({**COLUMNS, "new": "date"}, "'new' is not there in the records table, date32"),
        ({**COLUMNS, "parts": "list<string>"}, "'parts' is list"),
    ],
    ids=["type", "gone", "new", "inside a list"],
)
def test_other_columns_are_refused_by_name(tmp_path: Path, columns: dict[str, str], told: str) -> None:
    """What the table has and what the stream file says; reading alone needs no schema."""
    begun(RealSide(tmp_path))
    with pytest.raises(ConfigError) as caught:
        DeltaLedger(tmp_path, record_schema(columns)).head("s")
    assert told in caught.value.message
    assert DeltaLedger(tmp_path).head("s") is not None


def test_another_partitioning_is_refused(tmp_path: Path) -> None:
    """The table cannot change it, so the stream file must not."""
    begun(RealSide(tmp_path))
    with pytest.raises(ConfigError, match="partitioned by"):
        DeltaLedger(tmp_path, record_schema(COLUMNS), ("topic",)).head("s")


def test_a_table_by_somebody_else_is_refused(tmp_path: Path) -> None:
    """Neither folded into nor taken for an empty ledger."""
    write_deltalake(tmp_path / "records", pa.table({"op": ["mine"]}))
    with pytest.raises(ConfigError, match="did not make"):
        RealSide(tmp_path).store.head("s")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"sequence": 1}', b'{"sequence": "x", "sha256": "y"}', b'{"sequence": 1e999, "sha256": "y"}'],
)
def test_a_witness_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes) -> None:
    """It is never taken for no witness."""
    (tmp_path / "head.json").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"head\.json cannot be read"):
        RealSide(tmp_path).store.witness()


def rewritten(side: RealSide, old: str, new: str) -> None:
    """The last commit's log with other text."""
    log = max((side.root / "records" / "_delta_log").glob("*.json"))
    text = log.read_text()
    assert old in text
    log.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [('"sha256":', '"sha":'), ('"sequence":1', '"sequence":"x"'), ('"seriatim":{', '"seriatim":3,"other":{')],
    ids=["a key is missing", "not a number", "not an object"],
)
def test_a_damaged_mark_is_a_ledger_that_cannot_be_read(tmp_path: Path, old: str, new: str) -> None:
    """Whoever reads it is told so, and which commit it is."""
    side = RealSide(tmp_path)
    commit(side.store, MemoryClock(), begun(side), moved(0, 5))
    rewritten(side, old, new)
    reads = (lambda: side.again().head("s"), lambda: side.again().at("s", 0), lambda: side.again().has("0" * 64, -1))
    for read in reads:
        with pytest.raises(IntegrityError, match="the ledger cannot be read") as caught:
            read()
        assert "Delta version 1" in caught.value.render()


def test_half_a_commit_is_told_in_one_line(tmp_path: Path) -> None:
    """Without the frames of the library that met it."""
    side = RealSide(tmp_path)
    commit(side.store, MemoryClock(), begun(side), moved(0, 5, record_file(side, "0-0-a")))
    log = tmp_path / "records" / "_delta_log" / f"{1:020d}.json"
    log.write_text(log.read_text()[:-200])
    with pytest.raises(IntegrityError, match="the ledger cannot be read") as caught:
        side.again().head("s")
    assert len(str(caught.value.fields["cause"]).splitlines()) == 1


def test_a_commit_says_which_entry_it_is(tmp_path: Path) -> None:
    """Any Delta reader finds sequence, chain and manifest in the log, and the stream's transaction."""
    side = RealSide(tmp_path)
    first = begun(side)
    head, _ = commit(side.store, MemoryClock(), first, moved(0, 5))
    log = (tmp_path / "records" / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    actions = {name: content for line in log for name, content in json.loads(line).items()}
    mark = actions["commitInfo"]["seriatim"]
    assert (mark["sequence"], mark["previous"]) == (1, first.ledger.sha256)
    assert mark["sha256"] == head.ledger.sha256
    assert (tmp_path / mark["manifest"]).is_file()
    assert (actions["txn"]["appId"], actions["txn"]["version"]) == ("seriatim", 1)
    assert side.store.delta_version("s", 1) == 1


def test_a_manifest_of_another_entry_is_refused(tmp_path: Path) -> None:
    """A commit that names it is damaged, even if the hash is right."""
    side = RealSide(tmp_path)
    head = begun(side)
    _, manifest = build(moved(0, 5), head.ledger)
    path, sha256 = side.store.put_manifest(1, encode(replace(manifest, entry=replace(manifest.entry, sequence=7))))
    side.store.compare_and_set(head, manifest.entry, path, sha256)
    with pytest.raises(IntegrityError) as caught:
        side.again().head("s")
    assert "entry 7, not 1" in caught.value.render()
