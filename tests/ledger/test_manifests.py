"""Manifests, whole and partial: what is read is what was folded, and little of it is read."""

from __future__ import annotations

import errno
import hashlib
from collections import Counter

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, PlatformError
from seriatim.ledger.commit import build_manifest
from seriatim.ledger.entries import SliceEntry, StartEntry
from seriatim.ledger.manifests import (
    MANIFEST_FORMAT,
    WHOLE_AFTER_ENTRIES,
    Manifest,
    ManifestFiles,
    ManifestReference,
    UnreadableManifestError,
    decode_manifest,
    encode_manifest,
    manifest_reference,
)
from seriatim.ledger.model import Change, Ledger
from seriatim.memory.store import MemoryStore


class CountingStore(MemoryStore):
    """Counts how often each object is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Counter[str]()

    def read(self, key: str) -> bytes:
        self.reads[key] += 1
        return super().read(key)


class History:
    """A ledger that is folded in memory, with its manifests in a store."""

    def __init__(self) -> None:
        self.store = CountingStore()
        self.files = ManifestFiles(self.store)
        self.ledgers: list[Ledger] = []
        """As they were folded, by entry."""
        self.references: list[ManifestReference] = []

    def commit(self, numbers: set[int], manifest_format: int = MANIFEST_FORMAT) -> None:
        """Add an entry that moves the frontiers of these partitions by one."""
        ledger = self.ledgers[-1] if self.ledgers else Ledger(stream="s")
        changes = tuple(_change(ledger, number) for number in sorted(numbers))
        entry_type = SliceEntry if self.ledgers else StartEntry
        manifest = build_manifest(entry_type(attempt="a", changes=changes), ledger)
        if manifest_format < MANIFEST_FORMAT:
            reference = self._write_as_before(replace(manifest, format=manifest_format))
        else:
            reference = self.files.write(manifest)
        self.references.append(reference)
        self.ledgers.append(replace(manifest.ledger, sha256=reference.sha256))

    def _write_as_before(self, manifest: Manifest) -> ManifestReference:
        """Write a manifest as versions before 0.2.0 did: whole, and without the field `base`."""
        fields = msgspec.to_builtins(manifest)
        assert fields.pop("base") is None
        return self.put(manifest.entry.sequence, fields)

    def put(self, sequence: int, fields: object) -> ManifestReference:
        """Store any content as a manifest."""
        packed = pa.compress(msgspec.json.encode(fields), codec="zstd", asbytes=True)
        reference = manifest_reference(sequence, hashlib.sha256(packed).hexdigest())
        self.store.create(reference.path, packed)
        return reference

    def whole_entries(self) -> list[int]:
        """The entries whose manifests are whole."""
        files = ManifestFiles(self.store)
        manifests = [files.read(reference) for reference in self.references]
        return [manifest.entry.sequence for manifest in manifests if manifest.base is None]

    def reads_of(self, *references: ManifestReference) -> int:
        """How many reads it takes to open these ledgers, one after the other."""
        self.store.reads.clear()
        files = ManifestFiles(self.store)
        for reference in references:
            files.read(reference)
        return self.store.reads.total()


def _change(ledger: Ledger, number: int) -> Change:
    partition = Partition("in", number)
    account = ledger.account(partition)
    frontier = 0 if account is None else account.frontier
    return Change(
        partition=partition,
        epoch=0,
        frontier=frontier,
        until=frontier + (ledger.sequence >= 0),
        topic_id="id",
        initial_frontier=0,
    )


def history(*entries: set[int]) -> History:
    """A history of entries, each given by the partitions that it changes."""
    made = History()
    for numbers in entries:
        made.commit(numbers)
    return made


def unpacked(made: History, reference: ManifestReference) -> bytes:
    """The content of a manifest's file."""
    packed = pa.BufferReader(made.store.objects[reference.path])
    content: bytes = pa.CompressedInputStream(packed, "zstd").read()
    return content


TEN = set(range(10))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 11), max_size=8), min_size=1, max_size=70),
    st.integers(0, 6),
    st.sampled_from([2, 3]),
    st.booleans(),
)
def test_the_value_that_is_read_is_the_value_that_was_folded(
    entries: list[set[int]], old_entries: int, old_format: int, is_reopened: bool
) -> None:
    """At every entry, for any partitions changed or new, also after a history of older formats, and
    whether the writer remembers what it wrote or opens the ledger anew.
    """
    made = History()
    for number, partitions in enumerate(entries):
        if is_reopened:
            made.files = ManifestFiles(made.store)
        made.commit(partitions, old_format if number < old_entries else MANIFEST_FORMAT)
    one_reader = ManifestFiles(made.store)
    for reference, ledger in zip(made.references, made.ledgers, strict=True):
        manifest = one_reader.read(reference)
        assert manifest.ledger == ledger
        assert list(manifest.ledger.partitions) == sorted(ledger.partitions)
        assert ManifestFiles(made.store).read_ledger(reference).ledger == ledger
        assert made.reads_of(reference) <= 2
    assert made.reads_of(*made.references) == len(made.references)


def test_a_manifest_is_whole_at_the_start_and_every_fifty_entries() -> None:
    """In between it carries what changed since the last whole one."""
    made = history(TEN, *([{number % 5} for number in range(120)]))
    assert made.whole_entries() == [0, WHOLE_AFTER_ENTRIES, 2 * WHOLE_AFTER_ENTRIES]
    sizes = [len(unpacked(made, reference)) for reference in made.references]
    assert max(sizes[1:WHOLE_AFTER_ENTRIES]) < sizes[WHOLE_AFTER_ENTRIES]


def test_a_manifest_is_whole_if_most_accounts_have_changed() -> None:
    """Since its base: half of the accounts are carried, more than half are not."""
    made = history(TEN, {0, 1, 2}, {3, 4}, {1}, {5}, {6}, TEN, {1})
    assert made.whole_entries() == [0, 4, 6]


def test_an_account_that_is_as_in_the_base_is_not_carried() -> None:
    """Whether the writer has the very object of the base or an equal one."""
    made = history(TEN, {1})
    made.files = ManifestFiles(made.store)
    made.commit({2})
    stored = decode_manifest(unpacked(made, made.references[2]), Manifest)
    assert sorted(stored.ledger.partitions) == ["in/1", "in/2"]


def test_the_next_entry_is_written_without_a_read() -> None:
    """Whoever has opened the ledger, or committed the entry before, knows its base."""
    made = history(TEN, {1}, {2})
    made.files = ManifestFiles(made.store)
    made.files.read_ledger(made.references[-1])
    made.store.reads.clear()
    for _ in range(3):
        made.commit({3})
        made.files.read_ledger(made.references[-1])
    assert made.store.reads.total() == 0


def test_a_history_is_read_backward_with_few_reads() -> None:
    """Each base is read once for the entries that it serves, and once for itself."""
    made = history(TEN, *([{1}] * 60))
    assert made.reads_of(*reversed(made.references)) <= len(made.references) + 2


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_base_that_cannot_be_read_is_named(how: str) -> None:
    """The error names the file of the base, not that of the entry that needs it. The next entry does
    without it.
    """
    made = history(TEN, {1}, {2})
    base, _, last = made.references
    if how == "lost":
        made.store.delete([base.path])
    else:
        made.store.objects[base.path] += b" "
    with pytest.raises(UnreadableManifestError) as refused:
        ManifestFiles(made.store).read_ledger(last)
    assert refused.value.reference == base
    made.files = ManifestFiles(made.store)
    made.commit({3})
    assert ManifestFiles(made.store).read(made.references[-1]).base is None


def test_a_whole_manifest_in_the_place_of_another_is_refused() -> None:
    """Its content can be read, and is not what was committed: only the hash tells."""
    made = history(TEN, {1})
    rival = history(TEN | {10}, {1})
    base, last = made.references
    made.store.objects[base.path] = rival.store.objects[rival.references[0].path]
    with pytest.raises(UnreadableManifestError, match="hash differs") as refused:
        ManifestFiles(made.store).read_ledger(last)
    assert refused.value.reference == base
    assert refused.value.actual_sha256 == rival.references[0].sha256


def test_a_partial_manifest_is_no_base() -> None:
    """Its file has not the whole ledger. Reading on from it would lose accounts."""
    made = history(TEN, {1}, {2})
    _, partial, last = made.references
    content = msgspec.json.decode(unpacked(made, last))
    content["base"] = msgspec.to_builtins(partial)
    forged = made.put(2, content)
    with pytest.raises(UnreadableManifestError, match="not the whole ledger") as refused:
        ManifestFiles(made.store).read_ledger(forged)
    assert refused.value.reference == partial


def test_a_newer_format_is_refused_with_the_version_to_install() -> None:
    """The version that wrote it is named; where it is not known, only the format is."""
    manifest = Manifest(
        entry=StartEntry(attempt="a", product_version="0.9.1"), ledger=Ledger(stream="s")
    )
    newer = msgspec.to_builtins(replace(manifest, format=MANIFEST_FORMAT + 1))
    strange = {**newer, "entry": {"kind": "of the future", "product": "0.9.1"}, "ledger": []}
    for fields in (newer, strange):
        with pytest.raises(ConfigError, match=r"a newer Seriatim \(0.9.1\): format 5") as refused:
            decode_manifest(msgspec.json.encode(fields), Manifest)
        assert refused.value.next == "install Seriatim 0.9.1 or newer"
        assert refused.value.exit_code == 2
    assert decode_manifest(encode_manifest(manifest), Manifest) == manifest


def test_a_ledger_after_an_entry_of_an_unknown_kind_is_refused() -> None:
    """Also where the entry itself is not read: its ledger may mean something else."""
    made = history(TEN, {1})
    content = msgspec.json.decode(unpacked(made, made.references[-1]))
    content["entry"] |= {"kind": "archive", "product": "0.9.1"}
    reference = made.put(1, content)
    for read in (ManifestFiles(made.store).read_ledger, ManifestFiles(made.store).read):
        with pytest.raises(ConfigError, match="no entry of kind 'archive'") as refused:
            read(reference)
        assert refused.value.next == "install Seriatim 0.9.1 or newer"


class TroubledStore(CountingStore):
    """Its disk cannot be read at the moment."""

    is_troubled = False

    def read(self, key: str) -> bytes:
        if self.is_troubled:
            raise OSError(errno.EIO, "Input/output error", key)
        return super().read(key)


def test_a_store_in_trouble_is_no_damage() -> None:
    """A manifest that is missing or changed is damaged; one that cannot be read now may be well. The
    one is for a person to repair, the other to be tried again.
    """
    history = History()
    history.store = store = TroubledStore()
    history.files = ManifestFiles(store)
    history.commit({0, 1, 2})
    history.commit({0})
    store.is_troubled = True
    with pytest.raises(PlatformError, match="Input/output error") as caught:
        ManifestFiles(store).read(history.references[-1])
    assert caught.value.exit_code == 4
    assert history.references[-1].path in caught.value.message
    store.is_troubled = False
    assert ManifestFiles(store).read(history.references[-1]).entry.sequence == 1


def test_an_entry_is_written_whole_if_its_base_cannot_be_read() -> None:
    """A whole manifest needs nothing but itself."""
    history = History()
    history.store = store = TroubledStore()
    history.files = ManifestFiles(store)
    history.commit({0, 1, 2})
    store.is_troubled = True
    history.files = ManifestFiles(store)
    history.commit({0})
    store.is_troubled = False
    assert history.whole_entries() == [0, 1]
