"""The rules of verify as values: accounts follow from entries, certificates join, files do not
overlap.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from seriatim.engine.files import Certificate, File
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Counts, Session
from seriatim.errors import BrokenPromiseError
from seriatim.ledger.entries import ENTRY_TYPES, apply_entry
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Change, Halt, Ledger
from seriatim.operations.prove import partition_rules
from seriatim.operations.prove.partition_rules import (
    WRITTEN_WRONG_ADVICE,
    CommittedFile,
    PartitionClaims,
    _PartitionReading,
    check_content,
    check_overlaps,
)
from seriatim.operations.prove.stream_rules import (
    check_chain,
    check_ledger_step,
    check_rewrites,
    check_witness,
    replay_expected_files,
)
from seriatim.ports import AddedFile, Commit, CommitSignature, FileOutline, ScanRequest

P, Q = Partition("a", 0), Partition("b", 1)
FILE = File("records/a/0/0-5-x.parquet", 10, 3, "d", 5, 9)
STATE = (File("state/a/0/0-5-x.parquet", 10, 2, "e"),)
BEFORE = Ledger(
    stream="s",
    sequence=3,
    partitions={
        str(P): Account(topic_id="id", frontier=5, initial_frontier=0, messages=5, records=4),
        str(Q): Account(topic_id="id", frontier=7, initial_frontier=2, epoch=1, state=STATE),
    },
)


def change(**fields: Any) -> Change:
    """A slice of five messages, three records."""
    certificate = Certificate(
        partition=P, epoch=0, start=5, until=10, counts=Counts(messages=5, records=3), sessions=2
    )
    given = {
        "partition": P,
        "epoch": 0,
        "frontier": 5,
        "until": 10,
        "topic_id": "id",
        "initial_frontier": 0,
        "records": (FILE,),
    }
    return Change(**{**given, "certificate": certificate, "state": STATE, **fields})


def manifest(kind: Any = "slice", **fields: Any) -> Manifest:
    """An entry, and the ledger that rightly follows from it."""
    hold = {"hold": "h"} if kind == "hold" else {}
    entry = ENTRY_TYPES[kind](attempt="x", sequence=4, changes=(change(**fields),), **hold)
    return Manifest(entry=entry, ledger=apply_entry(entry, BEFORE))


def tampered(made: Manifest, place: Partition = P, **fields: Any) -> Manifest:
    """The same entry with another account in its ledger."""
    account = replace(made.ledger.partitions[str(place)], **fields)
    return replace(
        made,
        ledger=replace(made.ledger, partitions={**made.ledger.partitions, str(place): account}),
    )


def first(made: Manifest) -> str:
    """What is wrong first."""
    return next((difference.description for difference in check_ledger_step(made, BEFORE)), "")


RIGHT: list[Callable[[], Manifest]] = [
    manifest,
    lambda: manifest(state=None),
    lambda: manifest(until=5, certificate=None, records=(), state=None, halt=Halt("gap", 5, "why")),
    lambda: manifest(
        "accept", topic_id="new", initial_frontier=3, until=3, certificate=None, state=()
    ),
    lambda: manifest("accept", until=5, certificate=None, records=(), state=STATE),
    lambda: manifest("retire", until=5, certificate=None, records=(), state=None),
    lambda: manifest("hold", until=5, certificate=None, records=(), state=None),
    lambda: manifest("repair"),
]


@pytest.mark.parametrize("made", RIGHT)
def test_what_follows_is_right(made: Callable[[], Manifest]) -> None:
    """Slices, halts, new lives, releases, decisions and repairs."""
    assert first(made()) == ""


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"frontier": 11}, "frontier is not where its change ends"),
        ({"frontier": 9}, "frontier is not where its change ends"),
        ({"epoch": 1}, "epoch"),
        ({"topic_id": "other"}, "topic id changed"),
        ({"initial_frontier": 4}, "born elsewhere"),
        ({"state": ()}, "state files are not those"),
        ({"records": 99}, "sum of records"),
        ({"messages": 99}, "sum of messages"),
        ({"headless": 99}, "sum of headless"),
    ],
)
def test_an_account_that_does_not_follow_is_found(fields: dict[str, Any], what: str) -> None:
    """Each of the numbers that a next run would go on from."""
    assert what in first(tampered(manifest(), **fields))


@pytest.mark.parametrize(
    "fields", [{"frontier": 8}, {"epoch": 0}, {"topic_id": "x"}, {"state": ()}]
)
def test_a_partition_that_changed_without_a_change_is_found(fields: dict[str, Any]) -> None:
    """An entry that says nothing of it leaves it alone."""
    assert "without a change" in first(tampered(manifest(), Q, **fields))
    gone = manifest()
    left = {str(P): gone.ledger.partitions[str(P)]}
    assert "left the ledger" in first(replace(gone, ledger=replace(gone.ledger, partitions=left)))


def certificate(start: int, until: int, **fields: Any) -> Certificate:
    """A certificate of another range, in itself right."""
    counts = Counts(messages=until - start, records=3)
    return Certificate(
        **{"partition": P, "epoch": 0, "start": start, "until": until, "counts": counts, **fields}
    )


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"frontier": 6, "certificate": certificate(6, 10)}, "does not begin at the frontier"),
        ({"frontier": 4, "certificate": certificate(4, 10)}, "does not begin at the frontier"),
        ({"certificate": certificate(6, 10)}, "another range"),
        ({"certificate": certificate(5, 9)}, "another range"),
        ({"certificate": certificate(5, 10, partition=Q)}, "another range"),
        ({"certificate": certificate(5, 10, epoch=1)}, "another range"),
        ({"certificate": None}, "without a certificate"),
        ({"certificate": certificate(5, 10), "records": ()}, "other records than its files"),
        ({"records": (replace(FILE, last_offset=10),)}, "outside its certificate"),
        ({"records": (replace(FILE, first_offset=4),)}, "outside its certificate"),
    ],
)
def test_certificates_join_without_hole_or_overlap(fields: dict[str, Any], what: str) -> None:
    """Whatever the ledger after it says."""
    made = manifest()
    entry = replace(made.entry, changes=(change(**fields),))
    assert what in first(replace(made, entry=entry))


def test_an_accept_that_moves_more_than_it_may_is_found() -> None:
    """The life that is known goes on where it was; a new one begins without state."""
    same = manifest("accept", until=5, certificate=None, records=(), state=None)
    assert "moved a partition" in first(tampered(same, frontier=6))
    assert "raises the epoch" in first(tampered(same, epoch=0))
    new = manifest(
        "accept", topic_id="new", initial_frontier=3, until=3, certificate=None, state=()
    )
    assert "new life" in first(tampered(new, state=STATE))


def test_active_files_with_offsets_in_common_are_found() -> None:
    """Of one partition and topic id; another life, or another partition, is another matter."""

    def one(
        path: str, low: int, high: int, topic_id: str = "id", place: Partition = P
    ) -> tuple[CommittedFile, FileOutline]:
        named = CommittedFile(replace(FILE, path=path), 4, change(partition=place))
        spans = dict.fromkeys(topic_id.split("+"), (low, high))
        return named, FileOutline(first_offset=low, last_offset=high, offsets_by_topic_id=spans)

    apart = [one("a", 0, 4), one("b", 5, 9), one("c", 0, 9, "new"), one("d", 3, 4, place=Q)]
    assert list(check_overlaps(apart)) == []
    (found,) = check_overlaps([*apart, one("e", 9, 12)])
    assert (found.file, found.offset, found.partition) == ("e", 9, "a/0")


def test_a_file_of_several_topic_ids_overlaps_in_each_of_them() -> None:
    """A repair may write such a file. Each of its topic ids is compared with the files of that one;
    and a long file with all that begin in it, not with the next one only.
    """

    def one(path: str, **spans: tuple[int, int]) -> tuple[CommittedFile, FileOutline]:
        named = CommittedFile(replace(FILE, path=path), 4, change(partition=P))
        return named, FileOutline(offsets_by_topic_id=spans)

    both = one("both", old=(0, 9), new=(0, 4))
    assert list(check_overlaps([both, one("later", new=(5, 6))])) == []
    (found,) = check_overlaps([both, one("again", new=(4, 6))])
    assert (found.file, found.offset) == ("again", 4)
    long = [one("long", old=(0, 99)), one("b", old=(10, 20)), one("c", old=(50, 60))]
    assert [difference.file for difference in check_overlaps(long)] == ["b", "c"]


def commit(version: int, sequence: int, previous: str, **fields: Any) -> Commit:
    """A commit of ours."""
    sha256 = f"{sequence:064d}"
    sign = CommitSignature(
        sequence, previous, f"manifests/{sequence:010d}-{sha256}.json.zst", sha256
    )
    return Commit(**{"version": version, "signature": sign, "transaction": sequence, **fields})


def test_entries_follow_each_other_whatever_others_commit_between() -> None:
    """Foreign commits have no place in the chain; a missing, doubled or swapped entry breaks it."""
    chain = [
        commit(0, 0, ""),
        Commit(version=1),
        commit(2, 1, f"{0:064d}"),
        commit(3, 2, f"{1:064d}"),
    ]
    assert list(check_chain(chain)) == []
    for broken, what in [
        ([chain[0], *chain[2:]], "is missing"),
        ([chain[0], chain[1], commit(2, 2, f"{0:064d}")], "chain"),
        ([chain[0], chain[1], commit(2, 1, f"{9:064d}")], "chain"),
        ([commit(0, 0, "", transaction=1)], "transaction"),
        ([commit(0, 0, "", read_error="no JSON")], "cannot be read"),
    ]:
        assert what in next(check_chain(broken)).description


def test_a_rule_about_files_may_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it says nothing, the file was written wrong, which is a bug."""
    outline = FileOutline(rows=3, first_offset=5, last_offset=9, early_offset=7)
    committed_file = CommittedFile(FILE, 4, change())
    (difference,) = check_content(committed_file, outline)
    assert difference.next == WRITTEN_WRONG_ADVICE
    knowing = committed_file.difference("it is late", "unique", advice="look at the clock")
    monkeypatch.setattr(partition_rules, "_check_rows", lambda *_: [knowing])
    assert list(check_content(committed_file, outline)) == [knowing]


def test_a_rule_about_files_names_its_promise() -> None:
    """One without a promise, or with one that files do not prove, would count as another promise."""
    prover: Any = SimpleNamespace(row_reader=None)
    account = BEFORE.partitions[str(P)]
    reading = _PartitionReading(prover, PartitionClaims(partition=P, account=account))
    committed_file = CommittedFile(FILE, 4, change())
    reading._add_differences([committed_file.difference("too many", "counted")])
    assert (reading.counted.evidence.broken_count, reading.unique.evidence.broken_count) == (1, 0)
    for promise in ("", "folded"):
        nameless = committed_file.difference("no promise", cast("Any", promise))
        with pytest.raises(BrokenPromiseError, match="counted or unique"):
            reading._add_differences([nameless])


def test_a_witness_has_seen_an_entry_of_the_ledger() -> None:
    """Any earlier one will do: a crash may come before it is written. None at all is warned of."""
    signs = {n: CommitSignature(n, "", "", f"sha{n}") for n in range(3)}
    assert list(check_witness(b'{"sequence": 1, "sha256": "sha1"}', signs)) == []
    assert [one.level for one in check_witness(None, signs)] == ["warning"]
    assert list(check_witness(None, {0: signs[0]})) == []
    for wrong in (
        b'{"sequence": 3, "sha256": "sha2"}',
        b'{"sequence": 1, "sha256": "sha2"}',
        b"",
        b"[]",
        b"\xff",
    ):
        (found,) = check_witness(wrong, signs)
        assert (found.file, found.level) == ("head.json", "error")


def test_rewriting_keeps_every_row() -> None:
    """Whoever says that no data changed must leave as many rows; the table is then made of their
    files.
    """
    ours = commit(0, 0, "", adds=(AddedFile(path="a", rows=3), AddedFile(path="b", rows=4)))
    kept = Commit(
        version=1, is_rewrite=True, adds=(AddedFile(path="c", rows=7),), removes=("a", "b")
    )
    assert list(check_rewrites([ours, kept])) == []
    assert list(replay_expected_files([ours, kept])) == ["c"]
    lost = replace(kept, adds=(AddedFile(path="c", rows=6),))
    (found,) = check_rewrites([ours, lost])
    assert (found.expected, found.found) == ("7 rows", "6 rows")


def test_a_round_remembers_the_sessions_of_its_bucket_alone() -> None:
    """A partition may have more sessions than fit into memory: that is why there are rounds."""
    names = [f"s{i}" for i in range(100)]

    class State:
        """Each file has all sessions."""

        def all_sessions(self, _files: Any, *, with_rows: bool) -> Iterator[tuple[str, Session]]:
            assert not with_rows
            yield from ((name, Session(last_offset=1)) for name in names)

    prover: Any = SimpleNamespace(state=State(), row_reader=None)
    file = CommittedFile(FILE, 4, change())
    account = BEFORE.partitions[str(P)]
    claims = PartitionClaims(partition=P, account=account, state_files=(file, file))
    reading = _PartitionReading(prover, claims)
    request = ScanRequest(bucket=(0, 10), with_outlines=False)
    own_names = [name for name in names if request.includes_session(name)]
    reader = cast("Generator[str]", reading._names_in_state(request))
    assert [next(reader) for _ in own_names] == own_names
    assert inspect.getgeneratorlocals(reader)["seen_names"] == set(own_names)
    assert list(reader) == []
