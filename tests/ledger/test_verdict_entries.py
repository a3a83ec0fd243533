"""Verdicts: what opens the circuit, what closes it, and how far the ledger is checked whatever
happens.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.files import Certificate, File
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Counts
from seriatim.errors import BrokenPromiseError, IntegrityError
from seriatim.ledger.entries import (
    ENTRY_TYPES,
    CompactEntry,
    EntryKind,
    HoldEntry,
    SliceEntry,
    StartEntry,
    VerdictEntry,
    apply_entry,
)
from seriatim.ledger.manifests import Manifest, decode_manifest, encode_manifest
from seriatim.ledger.model import (
    Account,
    Change,
    FailedRange,
    Ledger,
    circuit_advice,
    refuse_open_circuit,
)

P, Q = Partition("a", 0), Partition("a", 1)


def begun() -> Ledger:
    """Two partitions at offset 0, entry 0."""
    births = [
        Change(partition=p, epoch=0, frontier=0, until=0, topic_id="id", initial_frontier=0)
        for p in (P, Q)
    ]
    return apply_entry(
        StartEntry(attempt="a", changes=tuple(births), sequence=0), Ledger(stream="s")
    )


def file(name: str, first: int, last: int) -> File:
    """A record file."""
    return File(name, 1, last - first + 1, "d", first, last)


def done(ledger: Ledger, kind: EntryKind, *changes: Change, **fields: Any) -> Ledger:
    """The ledger after an entry."""
    sequence = ledger.sequence + 1
    made = ENTRY_TYPES[kind](attempt="a", changes=changes, sequence=sequence, **fields)
    return apply_entry(made, ledger)


def slice_of(ledger: Ledger, partition: Partition, name: str, count: int = 10) -> Change:
    """The next ten messages of a partition, a record each."""
    account = ledger.partitions[str(partition)]
    start, until = account.frontier, account.frontier + count
    counts = Counts(messages=count, records=count)
    certificate = Certificate(
        partition=partition, epoch=account.epoch, start=start, until=until, counts=counts
    )
    return _change(
        account, partition, until, certificate=certificate, records=(file(name, start, until - 1),)
    )


def _change(account: Account, partition: Partition, until: int, **fields: Any) -> Change:
    base = Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=until,
        topic_id="id",
        initial_frontier=0,
    )
    return replace(base, **fields)


def folded(ledger: Ledger, *names: str, partition: Partition = P) -> Ledger:
    """Slices, a file each."""
    for name in names:
        ledger = done(ledger, "slice", slice_of(ledger, partition, name))
    return ledger


def verdict(
    ledger: Ledger, judged: int, *failed: FailedRange, good: tuple[str, ...] = ("a/0",)
) -> Ledger:
    """A verdict up to an entry."""
    results = dict.fromkeys(good, "good") | {one.partition: "bad" for one in failed}
    return done(
        ledger,
        "verdict",
        verdict=results,
        judged_after=ledger.judged_until,
        judged_until=judged,
        failed_ranges=failed,
    )


def failed(
    ledger: Ledger, *files: str, start: int = 0, until: int = 10, partition: str = "a/0"
) -> FailedRange:
    """A failed stretch, judged up to now."""
    epoch = ledger.partitions[partition].epoch
    return FailedRange(
        partition=partition,
        epoch=epoch,
        start=start,
        until=until,
        files=files,
        judged_until=ledger.sequence,
    )


def repaired(
    ledger: Ledger, *removed: str, name: str = "new", rewound: int = 0, partition: Partition = P
) -> Ledger:
    """A repair of a partition."""
    held = done(ledger, "hold", _change(ledger.partitions[str(partition)], partition, 0), hold="h")
    account = held.partitions[str(partition)]
    records = (file(name, rewound, account.frontier - 1),)
    change = _change(account, partition, account.frontier, replaced_from=rewound, records=records)
    return done(held, "repair", change, hold="h", removed_paths=removed)


def test_a_good_verdict_moves_checked_past_itself() -> None:
    """The verdict's own entry leaves nothing to judge."""
    ledger = folded(begun(), "f1", "f2")
    assert (ledger.checked, ledger.judged_until) == (0, 0)
    good = verdict(ledger, 2)
    assert (good.sequence, good.checked, good.judged_until, good.circuit) == (3, 3, 3, "closed")


def test_what_came_meanwhile_is_not_checked() -> None:
    """A verdict reaches as far as it looked; a slice that was committed meanwhile is the next
    one's.
    """
    ledger = folded(begun(), "f1", "f2")
    assert verdict(ledger, 1).checked == 1


def test_a_bad_verdict_opens_the_circuit_and_holds_checked() -> None:
    """What follows may be good: readers of the checked version see nothing past the failure."""
    ledger = verdict(folded(begun(), "f1"), 1)
    ledger = folded(ledger, "f2")
    bad = verdict(ledger, 3, failed(ledger, "f2", start=10, until=20))
    assert (bad.circuit, bad.checked, bad.judged_until) == ("open", 2, 4)
    later = verdict(folded(bad, "f3"), 5)
    assert (later.circuit, later.checked, later.judged_until) == ("open", 2, 6)


def test_a_bad_verdict_says_what_is_bad() -> None:
    """A bad partition without its stretch could never be closed."""
    with pytest.raises(BrokenPromiseError, match="says what is bad"):
        done(folded(begun(), "f1"), "verdict", verdict={"a/0": "bad"}, judged_until=1)


def test_accept_closes_what_was_judged_up_to_its_entry() -> None:
    """And nothing that failed later: nobody has seen that."""
    ledger = folded(begun(), "f1")
    one = verdict(ledger, 1, failed(ledger, "f1"))
    two = folded(one, "f2")
    both = verdict(two, 3, failed(two, "f2", start=10, until=20))
    part = done(both, "accept", judged_until=1, reason="known")
    assert [one.files for one in part.failed_ranges] == [("f2",)]
    assert (part.circuit, part.checked) == ("open", 0)
    whole = done(part, "accept", judged_until=3, reason="known")
    assert (whole.circuit, whole.failed_ranges, whole.checked) == ("closed", (), whole.sequence)


def test_accepting_a_check_takes_nothing_else_back() -> None:
    """What others wrote to the table is another matter."""
    ledger = folded(begun(), "f1")
    ledger = replace(verdict(ledger, 1, failed(ledger, "f1")), foreign_sequence=1)
    assert done(ledger, "accept", judged_until=1).foreign_sequence == 1
    assert done(ledger, "accept").foreign_sequence == -1


def test_a_topics_new_life_closes_no_circuit() -> None:
    """The old life's records stay in the table."""
    ledger = folded(begun(), "f1")
    bad = verdict(ledger, 1, failed(ledger, "f1"))
    changes = [_change(bad.partitions[str(p)], p, 0, topic_id="new", state=()) for p in (P, Q)]
    assert done(bad, "accept", *changes).circuit == "open"


def test_a_repair_closes_the_circuit_after_a_good_check() -> None:
    """The files are gone with the repair; whether what came instead is good, the check says."""
    ledger = folded(begun(), "f1", "f2")
    bad = verdict(ledger, 2, failed(ledger, "f1"))
    mended = repaired(bad, "f1", "f2")
    assert (mended.circuit, mended.failed_ranges[0].replaced_by_sequence, mended.checked) == (
        "open",
        mended.sequence,
        0,
    )
    good = verdict(mended, mended.sequence)
    assert (good.circuit, good.failed_ranges, good.checked) == ("closed", (), good.sequence)
    again = verdict(mended, mended.sequence, failed(mended, "new"))
    assert [one.files for one in again.failed_ranges] == [("new",)]


def test_a_repair_of_other_files_closes_nothing() -> None:
    """What was bad is still in the table, whatever the next check says of the rest."""
    ledger = folded(begun(), "f1", "f2")
    bad = verdict(ledger, 2, failed(ledger, "f1", "f2", until=20))
    half = repaired(bad, "f2", rewound=10)
    assert (half.failed_ranges[0].files, half.failed_ranges[0].replaced_by_sequence) == (
        ("f1",),
        -1,
    )
    assert verdict(half, half.sequence).circuit == "open"


def test_a_failure_without_a_file_wants_output_made_again_from_its_start() -> None:
    """A certificate that does not join has no file to blame."""
    ledger = folded(begun(), "f1", "f2")
    bad = verdict(ledger, 2, failed(ledger, start=5, until=10))
    late, early = repaired(bad, "f2", rewound=6), repaired(bad, "f1", rewound=5)
    assert verdict(late, late.sequence).circuit == "open"
    assert verdict(early, early.sequence).circuit == "closed"


def test_a_compaction_carries_the_failure_along() -> None:
    """Same content, other files: still bad, and a repair must now replace the new ones."""
    ledger = folded(begun(), "f1", "f2", "f3")
    bad = verdict(ledger, 3, failed(ledger, "f1"))
    change = _change(bad.partitions["a/0"], P, 30, records=(file("c1", 0, 19), file("c2", 20, 29)))
    packed = done(bad, "compact", change, removed_paths=("f1", "f2", "f3"))
    assert (packed.failed_ranges[0].files, packed.failed_ranges[0].replaced_by_sequence) == (
        ("c1",),
        -1,
    )
    assert verdict(packed, packed.sequence).circuit == "open"
    mended = repaired(packed, "c1")
    assert verdict(mended, mended.sequence).circuit == "closed"


def test_a_verdict_is_void_where_the_partition_was_repaired_meanwhile() -> None:
    """It would call files bad that are gone; the same where others judged as far."""
    ledger = folded(begun(), "f1")
    bad = VerdictEntry(
        attempt="a",
        verdict={"a/0": "bad"},
        judged_until=1,
        failed_ranges=(failed(ledger, "f1"),),
    )
    assert bad.unmet_requirements(ledger) == []
    assert bad.unmet_requirements(repaired(ledger, "f1")) == [
        "a/0 was repaired or accepted meanwhile"
    ]
    assert bad.unmet_requirements(verdict(ledger, 1)) == ["it was judged up to entry 2 meanwhile"]


def test_with_stop_an_open_circuit_refuses_to_fold() -> None:
    """It names what failed and the command; with hold-publish folding goes on."""
    ledger = folded(begun(), "f1")
    bad = verdict(ledger, 1, failed(ledger, "f1"))
    refuse_open_circuit(bad, "hold-publish")
    refuse_open_circuit(ledger, "stop")
    with pytest.raises(IntegrityError, match="on_check_failure") as refused:
        refuse_open_circuit(bad, "stop")
    assert "a/0 [0, 10), judged up to entry 1" in refused.value.render()
    assert "seriatim accept s --sequence 1 --because" in refused.value.next
    assert circuit_advice(repaired(bad, "f1")) == "seriatim check s"


def test_what_leaves_nothing_to_judge() -> None:
    """Births, halts, holds and verdicts; a slice or a compaction does not."""
    ledger = begun()
    assert HoldEntry(
        attempt="a", hold="h", changes=(_change(ledger.partitions["a/0"], P, 0),)
    ).has_nothing_to_judge
    assert not SliceEntry(attempt="a", changes=(slice_of(ledger, P, "f"),)).has_nothing_to_judge
    assert not CompactEntry(attempt="a", removed_paths=("f",)).has_nothing_to_judge


class Model:
    """A ledger beside what is true: the table's files after each entry, which are bad, judged and
    accepted.
    """

    def __init__(self) -> None:
        self.ledger, self.tables = begun(), [set[str]()]
        self.bad, self.accepted, self.seen = set[str](), set[str](), set[str]()

    def step(self, what: str, partition: Partition, fresh: str) -> None:
        """Something happens, if it can."""
        mine = {name for name in self.tables[-1] if name.startswith(str(partition))}
        if what == "slice":
            self._on(folded(self.ledger, fresh, partition=partition), self.tables[-1] | {fresh})
        elif what == "hold":
            nothing = _change(self.ledger.partitions[str(partition)], partition, 0)
            self._on(done(self.ledger, "hold", nothing, hold="h"))
            self._on(done(self.ledger, "release", nothing, hold="h"))
        elif what in ("good", "bad") and self.ledger.judged_until < self.ledger.sequence:
            self._judge(bad=what == "bad")
        elif what == "accept" and self.ledger.failed_ranges:
            self.accepted |= self.bad
            self._on(
                done(
                    self.ledger,
                    "accept",
                    judged_until=max(one.judged_until for one in self.ledger.failed_ranges),
                )
            )
        elif what in ("repair", "half a repair") and mine:
            gone = mine if what == "repair" else {min(mine)}
            self.tables.append(self.tables[-1])  # its hold
            after = (self.tables[-1] - gone) | {fresh}
            self._on(repaired(self.ledger, *gone, name=fresh, partition=partition), after)
        elif what == "compact" and mine:
            self._compact(partition, mine, fresh)

    def _on(self, ledger: Ledger, table: set[str] | None = None) -> None:
        self.ledger = ledger
        self.tables.append(self.tables[-1] if table is None else table)

    def _judge(self, *, bad: bool) -> None:
        new = self.tables[-1] - self.seen
        self.seen |= new
        self.bad |= new if bad else set()
        files = {
            place: sorted(name for name in new if bad and name.startswith(place))
            for place in ("a/0", "a/1")
        }
        found = [
            failed(self.ledger, *names, partition=place) for place, names in files.items() if names
        ]
        self._on(verdict(self.ledger, self.ledger.sequence, *found, good=tuple(files)))

    def _compact(self, partition: Partition, mine: set[str], fresh: str) -> None:
        account = self.ledger.partitions[str(partition)]
        records = (file(fresh, 0, account.frontier - 1),)
        self.bad |= {fresh} if mine & (self.bad - self.accepted) else set()
        self.seen |= {fresh} if mine <= self.seen else set()
        change = _change(account, partition, account.frontier, records=records)
        self._on(
            done(self.ledger, "compact", change, removed_paths=tuple(mine)),
            (self.tables[-1] - mine) | {fresh},
        )


STEPS = ["slice", "good", "bad", "accept", "repair", "half a repair", "compact", "hold"]


@pytest.mark.long
@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from([P, Q])), max_size=25))
def test_checked_is_never_past_what_is_bad(steps: list[tuple[str, Partition]]) -> None:
    """Whatever happens: at `checked` every file is judged, and none is bad that nobody accepted."""
    model = Model()
    for number, (what, partition) in enumerate(steps):
        before = model.ledger.checked
        model.step(what, partition, f"{partition}/f{number}")
        ledger = model.ledger
        assert len(model.tables) == ledger.sequence + 1
        assert before <= ledger.checked <= ledger.judged_until <= ledger.sequence
        assert (ledger.circuit == "open") == bool(ledger.failed_ranges)
        assert not model.tables[ledger.checked] & (model.bad - model.accepted)
        assert model.tables[ledger.checked] <= model.seen
        assert (
            decode_manifest(
                encode_manifest(Manifest(entry=VerdictEntry(attempt="a"), ledger=ledger)), Manifest
            ).ledger
            == ledger
        )
