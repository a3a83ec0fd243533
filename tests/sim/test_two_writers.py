"""Two writers of one ledger in an object store, in every order that a seed chooses: each call of the
store is a place where the other writer may go on, where an answer may get lost, and where the store
may refuse.

The ledger is the real one: a commit is one `create` of the next version. The store is in memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

from seriatim.engine.offsets import Partition
from seriatim.errors import FencedError, PlatformError
from seriatim.ledger.commit import build_manifest, commit, read_head
from seriatim.ledger.delta_store import DeltaLedger
from seriatim.ledger.entries import SliceEntry, StartEntry
from seriatim.ledger.model import Change, Ledger
from seriatim.memory import MemoryClock
from seriatim.memory.store import MemoryStore
from seriatim.storage.delta_table import COMMIT_METADATA_KEY
from seriatim.storage.store import Buffer

P, Q = Partition("in-a", 0), Partition("in-a", 1)
STEPS = 6
"""How far each writer moves its frontier."""
TROUBLE_SHARE = 0.15


class _Turns:
    """Lets one of several threads run at a time. A seed decides whose turn it is."""

    def __init__(self, chance: random.Random, writers: int) -> None:
        self.chance = chance
        self.alive = set(range(writers))
        self._may_go_on = [threading.Semaphore(0) for _ in range(writers)]
        self._local = threading.local()

    def begin(self, writer: int) -> None:
        """Wait for the first turn."""
        self._local.writer = writer
        self._may_go_on[writer].acquire()

    def end(self) -> None:
        """This writer is done."""
        self.alive.discard(self._local.writer)
        self.pass_on()

    def pass_on(self) -> None:
        """Let somebody go on, perhaps this one."""
        if not self.alive:
            return
        writer = getattr(self._local, "writer", None)
        chosen = self.chance.choice(sorted(self.alive))
        self._may_go_on[chosen].release()
        if writer in self.alive:
            self._may_go_on[writer].acquire()


class _SharedStore(MemoryStore):
    """A store in memory that behaves like a bucket: calls take turns, and some have trouble."""

    is_remote = True

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.turns: _Turns | None = None

    def _call(self) -> bool:
        """Let others go on. Returns whether the answer of this call gets lost."""
        if self.turns is None:
            return False
        self.turns.pass_on()
        if self.chance.random() >= TROUBLE_SHARE:
            return False
        if self.chance.random() < 0.5:
            raise PlatformError("the store answers 503")
        return True

    @staticmethod
    def _answer(is_lost: bool) -> None:
        if is_lost:
            raise PlatformError("the answer got lost")

    def create(self, key: str, content: Buffer) -> None:
        is_lost = self._call()
        super().create(key, content)
        self._answer(is_lost)

    def replace(self, key: str, content: Buffer) -> None:
        is_lost = self._call()
        super().replace(key, content)
        self._answer(is_lost)

    def read(self, key: str) -> bytes:
        is_lost = self._call()
        content = super().read(key)
        self._answer(is_lost)
        return content

    def keys(self, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        is_lost = self._call()
        listed = super().keys(prefix, after)
        self._answer(is_lost)
        return listed

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        self._call()
        return super().sizes(keys)


def _change(partition: Partition, frontier: int, until: int) -> Change:
    return Change(
        partition=partition,
        epoch=0,
        frontier=frontier,
        until=until,
        topic_id="id",
        initial_frontier=0,
    )


def _begin_ledger(store: _SharedStore) -> None:
    """Entry 0, as the first commit of the table has it."""
    ledger = DeltaLedger(store)
    entry = StartEntry(attempt="a0", changes=(_change(P, 0, 0), _change(Q, 0, 0)))
    manifest = build_manifest(entry, Ledger(stream="s"))
    reference = ledger.put_manifest(manifest)
    mark = {
        "sequence": 0,
        "previous": "",
        "manifest": reference.path,
        "sha256": reference.sha256,
    }
    ledger.table._append(0, {COMMIT_METADATA_KEY: mark}, [], True)


def _move_frontier(store: _SharedStore, writer: int, partition: Partition) -> int:
    """Move a frontier step by step. After trouble, or when the other one was first, go on from where
    the ledger is, as the next run would. Returns how many steps this writer was told it made.
    """
    confirmed = 0
    attempts = 0
    while True:
        attempts += 1
        try:
            ledger = DeltaLedger(store)
            head = read_head(ledger, "s")
            assert head is not None
            account = head.ledger.account(partition)
            assert account is not None
            if account.frontier >= STEPS:
                return confirmed
            change = _change(partition, account.frontier, account.frontier + 1)
            entry = SliceEntry(attempt=f"{writer}-{attempts}", changes=(change,))
            commit(ledger, MemoryClock(), head, entry)
            confirmed += 1
        except (PlatformError, FencedError):
            continue


def _race(seed: int, partitions: tuple[Partition, Partition]) -> tuple[_SharedStore, list[int]]:
    """Two writers, until both are done; how many steps each was told it made."""
    chance = random.Random(seed)
    store = _SharedStore(chance)
    _begin_ledger(store)
    turns = _Turns(chance, len(partitions))
    confirmed = [-1, -1]

    def write(writer: int) -> None:
        turns.begin(writer)
        try:
            confirmed[writer] = _move_frontier(store, writer, partitions[writer])
        finally:
            turns.end()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in (0, 1)]
    for thread in threads:
        thread.start()
    store.turns = turns
    turns.pass_on()
    for thread in threads:
        thread.join()
    store.turns = None
    return store, confirmed


def _assert_each_entry_once(store: _SharedStore, entries_expected: int) -> None:
    """The ledger is a chain of as many entries, each on top of the one before, and no commit is
    doubled: frontiers rise by one.
    """
    ledger = DeltaLedger(store)
    head = read_head(ledger, "s")
    assert head is not None
    assert head.ledger.sequence == entries_expected
    frontiers = {P: 0, Q: 0}
    previous = ledger.manifest_at("s", 0).ledger.sha256
    for sequence, manifest in enumerate(ledger.entries("s", 0), 1):
        assert manifest.entry.sequence == sequence
        assert manifest.entry.previous == previous
        previous = manifest.ledger.sha256
        (change,) = manifest.entry.changes
        assert change.frontier == frontiers[change.partition]
        frontiers[change.partition] = change.until


def test_two_writers_of_different_partitions_lose_and_double_nothing(seeds: range) -> None:
    """Both get to their end, whoever is refused how often."""
    for seed in seeds:
        store, confirmed = _race(seed, (P, Q))
        _assert_each_entry_once(store, 2 * STEPS)
        assert min(confirmed) >= 0, seed


def test_two_writers_of_one_partition_fold_each_offset_once(seeds: range) -> None:
    """Whoever is later is fenced: no offset is committed twice."""
    for seed in seeds:
        store, confirmed = _race(seed, (P, P))
        _assert_each_entry_once(store, STEPS)
        assert sum(confirmed) <= STEPS, seed
