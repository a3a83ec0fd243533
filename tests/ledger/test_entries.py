"""Entries: one type for each kind of commit; each requires and does what the design says."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.files import Certificate, File
from seriatim.engine.findings import Finding
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Counts
from seriatim.errors import BrokenPromiseError, ConfigError
from seriatim.ledger.entries import ENTRY_TYPES, Entry, EntryKind, apply_entry
from seriatim.ledger.manifests import Manifest, decode_manifest, encode_manifest
from seriatim.ledger.model import Account, Change, Halt, Ledger, Totals, refuse_incompatible_machine

P, Q = Partition("a", 0), Partition("a", 1)
HALT = Halt("gap", 5, "4 missing")


def ledger(account: Account | None = None) -> Ledger:
    """A ledger that knows a/0 at offset 5."""
    account = account or Account(topic_id="id", frontier=5, initial_frontier=0)
    return Ledger(stream="s", sequence=3, sha256="sha", partitions={"a/0": account})


def change(**fields: object) -> Change:
    """What an entry does to a/0 at offset 5."""
    base = Change(partition=P, epoch=0, frontier=5, until=5, topic_id="id", initial_frontier=0)
    return replace(base, **fields)


def entry(kind: EntryKind, *changes: Change, **fields: object) -> Entry:
    """An entry of a kind."""
    if kind in ("hold", "release"):
        fields.setdefault("hold", "h0")
    return ENTRY_TYPES[kind](attempt="a1", changes=changes, **fields)


def folded(start: int, until: int, **counts: object) -> Change:
    """A slice of a/0."""
    certificate = Certificate(
        partition=P,
        epoch=0,
        start=start,
        until=until,
        counts=Counts(messages=until - start, **counts),
    )
    return change(frontier=start, until=until, certificate=certificate)


def test_a_ledger_begins_with_its_start_and_only_once() -> None:
    """The start entry needs an empty ledger; every other kind needs one that began."""
    begun = apply_entry(entry("start", change(frontier=0, until=0)), Ledger(stream="s"))
    assert (begun.sequence, begun.partitions["a/0"].frontier) == (0, 0)
    assert entry("start").unmet_requirements(begun) == ["there is a ledger already"]
    with pytest.raises(BrokenPromiseError, match="begins with"):
        entry("slice").unmet_requirements(Ledger(stream="s"))


MOVING: list[EntryKind] = ["slice", "repair", "accept", "retire"]
KNOWING: list[EntryKind] = ["hold", "release", "repair", "compact", "retire"]
EPOCHAL: list[EntryKind] = ["slice", "hold", "repair", "compact", "accept", "retire"]


@pytest.mark.parametrize("kind", MOVING)
def test_a_moved_frontier_is_refused(kind: EntryKind) -> None:
    """What was folded or decided from offset 4 does not hold at 5."""
    assert entry(kind, change(frontier=4)).unmet_requirements(ledger()) == [
        "a/0 is at offset 5, not 4"
    ]
    assert not entry(kind, change()).unmet_requirements(ledger())


@pytest.mark.parametrize("kind", EPOCHAL)
def test_a_raised_epoch_is_refused(kind: EntryKind) -> None:
    """After a repair, what was folded before it is void."""
    raised = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, epoch=1))
    assert "a/0 is at epoch 1, not 0" in entry(kind, change()).unmet_requirements(raised)


@pytest.mark.parametrize("kind", ["slice", "hold", "compact", "accept", "retire"])
def test_a_held_partition_takes_nothing_else(kind: EntryKind) -> None:
    """While a repair works there, nobody else does."""
    held = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, hold="h1"))
    assert entry(kind, change()).unmet_requirements(held) == ["a/0 is held by h1"]


@pytest.mark.parametrize("kind", ["repair", "release"])
def test_only_its_own_hold_counts(kind: EntryKind) -> None:
    """A repair whose hold was abandoned or taken over commits nothing."""
    held = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, hold="h2"))
    assert entry(kind, change(), hold="h1").unmet_requirements(held) == [
        "a/0 is held by h2, not by h1"
    ]
    assert entry(kind, change(), hold="h1").unmet_requirements(ledger()) == [
        "a/0 is held by None, not by h1"
    ]
    assert not entry(kind, change(), hold="h2").unmet_requirements(held)


@pytest.mark.parametrize("kind", KNOWING)
def test_only_a_slice_or_an_accept_may_meet_a_partition_first(kind: EntryKind) -> None:
    """Everything else is about partitions that are known."""
    assert entry(kind, change(partition=Q)).unmet_requirements(ledger()) == ["a/1 is not known"]
    assert not entry("slice", change(partition=Q)).unmet_requirements(ledger())
    assert not entry("accept", change(partition=Q)).unmet_requirements(ledger())


def test_a_halted_partition_takes_no_slice() -> None:
    """It waits for a person."""
    assert entry("slice", change()).unmet_requirements(
        ledger(Account(topic_id="id", frontier=5, initial_frontier=0, halt=HALT))
    ) == ["a/0 is halted at 5"]


def test_an_accept_is_of_the_finding_shown() -> None:
    """If the halt became another one meanwhile, the person decided about something else."""
    halted = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, halt=HALT))
    assert not entry("accept", change(halt=HALT)).unmet_requirements(halted)
    assert entry("accept", change()).unmet_requirements(halted) == [
        "a/0 has another finding than the one shown"
    ]


def test_a_new_life_is_that_of_all_partitions() -> None:
    """An accept that leaves a known partition in the old life would mix the two."""
    known = ledger()
    known = replace(
        known,
        partitions=known.partitions
        | {"a/1": Account(topic_id="id", frontier=2, initial_frontier=0)},
    )
    one = change(topic_id="id2", until=0)
    assert entry("accept", one).unmet_requirements(known) == ["a/1 belongs to it too"]
    assert not entry(
        "accept", one, change(partition=Q, frontier=2, topic_id="id2", until=0)
    ).unmet_requirements(known)
    assert not entry("accept", change()).unmet_requirements(known)


def test_a_new_life_begins_at_0_with_nothing_of_the_old() -> None:
    """State, halt, quarantine and log end are those of the old one; what was counted stays."""
    file = File("state/x", 1, 1, "d")
    old = Account(
        topic_id="id",
        frontier=5,
        initial_frontier=2,
        epoch=3,
        state=(file,),
        halt=HALT,
        retired=True,
        log_end=9,
        messages=3,
        records=4,
        quarantined=1,
        counts={"gap": 1},
    )
    deletes = File("records/x", 1, 7, "d")
    made = change(epoch=3, topic_id="id2", until=0, halt=HALT, records=(deletes,))
    assert apply_entry(entry("accept", made), ledger(old)).partitions["a/0"] == Account(
        topic_id="id2",
        frontier=0,
        initial_frontier=0,
        epoch=4,
        messages=3,
        records=11,
        counts={"gap": 1},
    )
    born = apply_entry(
        entry("accept", made, change(partition=Q, topic_id="id2", until=0)), ledger(old)
    ).partitions["a/1"]
    assert born == Account(topic_id="id2", frontier=0, initial_frontier=0)


def test_a_topic_accepted_as_it_is_goes_on_where_it_was() -> None:
    """It is retired no more; a finding in its messages stays, one of discovery is judged anew."""
    old = Account(
        topic_id="id", frontier=5, initial_frontier=2, halt=HALT, retired=True, quarantined=1
    )
    after = apply_entry(entry("accept", change(halt=HALT)), ledger(old)).partitions["a/0"]
    assert after == replace(old, epoch=1, retired=False)
    seen = Halt("re-created", 5, "made again")
    assert (
        apply_entry(entry("accept", change(halt=seen)), ledger(replace(old, halt=seen)))
        .partitions["a/0"]
        .halt
        is None
    )


def test_a_retired_partition_takes_no_slice_and_is_dropped_from_one() -> None:
    """The rest of the slice commits."""
    known = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, retired=True))
    assert entry("slice", folded(5, 9)).unmet_requirements(known) == ["a/0 is retired"]
    assert entry("slice", folded(5, 9), change(partition=Q)).without_held_partitions(
        known
    ).changes == (change(partition=Q),)


def test_a_halted_partition_may_be_found_to_be_made_again() -> None:
    """That is another decision for a person than the one it waits for; told once."""
    made_again = Halt("re-created", 5, "made again")
    known = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, halt=HALT))
    assert not entry("slice", change(halt=made_again)).unmet_requirements(known)
    again = apply_entry(entry("slice", change(halt=made_again)), known)
    assert entry("slice", change(halt=made_again)).unmet_requirements(again) == [
        "a/0 is halted at 5"
    ]


def test_a_verdict_requires_nothing() -> None:
    """Judging moves no frontier."""
    assert not entry("verdict", verdict={"a/0": "good"}, judged_until=2).unmet_requirements(
        ledger()
    )


def test_an_unmet_entry_cannot_be_applied() -> None:
    """The adapter's word is not enough: the pure ledger refuses too."""
    with pytest.raises(BrokenPromiseError, match="requirements hold"):
        apply_entry(entry("slice", change(frontier=4)), ledger())


def test_a_slice_never_goes_back() -> None:
    """Only repair and accept may move a frontier to an earlier offset."""
    with pytest.raises(BrokenPromiseError, match="never goes back"):
        apply_entry(entry("slice", change(until=4)), ledger())
    assert apply_entry(entry("repair", change(until=4)), ledger()).partitions["a/0"].frontier == 4


@given(st.integers(1, 40), st.sets(st.integers(1, 39)))
def test_a_ledger_is_the_same_however_its_entries_were_cut(end: int, cuts: set[int]) -> None:
    """One slice or many: frontier, counts and findings come to the same account."""
    begun = apply_entry(entry("start", change(frontier=0, until=0)), Ledger(stream="s"))
    edges = [0, *sorted(cut for cut in cuts if cut < end), end]
    many = begun
    for start, until in itertools.pairwise(edges):
        count = until - start
        counts = {
            "records": 2 * count,
            "headless": count,
            "quarantined": count,
            "findings": {"repeat": count},
        }
        many = apply_entry(entry("slice", folded(start, until, **counts)), many)
    counts = {"records": 2 * end, "headless": end, "quarantined": end, "findings": {"repeat": end}}
    once = apply_entry(entry("slice", folded(0, end, **counts)), begun)
    assert many.partitions == once.partitions
    assert many.sequence == len(edges) - 1


def test_a_slice_changes_its_account() -> None:
    """Files, halts, counts: what the entry did, and nothing else moves."""
    file = File("state/x", 1, 1, "d")
    made = replace(folded(5, 9, quarantined=2, released=1), state=(file,), halt=HALT)
    account = apply_entry(entry("slice", made, sequence=4), ledger()).partitions["a/0"]
    assert (account.frontier, account.messages, account.quarantined) == (9, 4, 1)
    assert account.state == (file,)
    assert account.halt == replace(HALT, sequence=4)
    untouched = apply_entry(
        entry("slice", folded(5, 9)),
        ledger(Account(topic_id="id", frontier=5, initial_frontier=0, state=(file,))),
    )
    assert untouched.partitions["a/0"].state == (file,)


def test_an_accept_raises_the_epoch_and_ends_the_halt() -> None:
    """What was folded under the old epoch is fenced from then on."""
    before = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, halt=HALT))
    account = apply_entry(
        entry("accept", change(topic_id="id2", initial_frontier=2, until=2, halt=HALT)), before
    ).partitions["a/0"]
    assert (account.epoch, account.halt) == (1, None)
    assert (account.topic_id, account.initial_frontier, account.frontier) == ("id2", 2, 2)


def test_a_repair_replaces_and_gives_its_hold_back() -> None:
    """Records, state, frontier and halt are as the repair says, in a new epoch; the rest stays."""
    old, new = File("records/x", 1, 10, "d"), File("records/y", 1, 7, "d")
    base = Account(
        topic_id="id",
        frontier=5,
        initial_frontier=0,
        halt=HALT,
        hold="h",
        records=12,
        quarantined=3,
        messages=5,
    )
    made = change(until=4, records=(new,), removed_rows=old.rows, quarantined=1, headless_since=4)
    account = apply_entry(entry("repair", made, hold="h"), ledger(base)).partitions["a/0"]
    assert (account.epoch, account.halt, account.hold, account.frontier) == (1, None, None, 4)
    assert (account.records, account.quarantined, account.headless_since, account.messages) == (
        9,
        1,
        4,
        5,
    )
    assert (
        apply_entry(entry("repair", change(halt=HALT), hold="h"), ledger(base))
        .partitions["a/0"]
        .halt
        == HALT
    )


def test_a_hold_is_taken_over_by_its_name_alone() -> None:
    """A repair that died leaves its hold; whoever resumes names it, and only the first one finds
    it.
    """
    held = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, hold="h1"))
    assert entry("hold", change(), hold="h2").unmet_requirements(held) == ["a/0 is held by h1"]
    resumed = apply_entry(replace(entry("hold", change(), hold="h2"), resumed_hold="h1"), held)
    assert resumed.partitions["a/0"].hold == "h2"
    late = replace(entry("hold", change(), hold="h3"), resumed_hold="h1")
    assert late.unmet_requirements(resumed) == ["a/0 is held by h2"]


def test_compacted_state_files_stay_below_what_came_meanwhile() -> None:
    """Slices go on while state is merged: only the files that were merged are replaced."""
    one, two, three, merged = (File(f"state/{name}", 1, 1, "d") for name in ("1", "2", "3", "m"))
    base = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, state=(one, two, three)))
    made = entry("compact", change(state=(merged,), merged_state_paths=("state/1", "state/2")))
    assert apply_entry(made, base).partitions["a/0"].state == (merged, three)
    moved = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, state=(one, three)))
    assert made.unmet_requirements(moved) == ["a/0 has other state files than were merged"]


def test_hold_release_retire_and_compact_change_one_thing_each() -> None:
    """The rest of the account stays byte for byte."""
    base = Account(topic_id="id", frontier=5, initial_frontier=0, messages=7)
    held = apply_entry(entry("hold", change(), hold="h1"), ledger(base))
    assert held.partitions["a/0"] == replace(base, hold="h1")
    assert apply_entry(entry("release", change(), hold="h1"), held).partitions["a/0"] == base
    assert apply_entry(entry("retire", change()), ledger(base)).partitions["a/0"] == replace(
        base, retired=True
    )
    file = File("state/x", 1, 1, "d")
    compacted = apply_entry(entry("compact", change(state=(file,))), ledger(base))
    assert compacted.partitions["a/0"] == replace(base, state=(file,))


def test_newly_held_partitions_leave_a_slice_with_all_that_is_theirs() -> None:
    """The rest still commits; a finding of a dropped partition is found again when it is folded
    again.
    """
    held = ledger(Account(topic_id="id", frontier=5, initial_frontier=0, hold="h1"))
    findings = tuple(
        Finding(finding="gap", topic="a", partition=number, offset=1) for number in (0, 1)
    )
    other = change(partition=Q)
    kept = entry("slice", change(), other, findings=findings).without_held_partitions(held)
    assert (kept.changes, kept.findings) == ((other,), findings[1:])
    release = entry("release", change(), hold="h1")
    assert release.without_held_partitions(held) == release


def test_a_certificate_accounts_for_every_offset() -> None:
    """Messages and holes make up the range, or there is no certificate."""
    Certificate(
        partition=P, epoch=0, start=0, until=5, counts=Counts(messages=3), holes={"unexplained": 2}
    )
    with pytest.raises(BrokenPromiseError, match="every offset"):
        Certificate(partition=P, epoch=0, start=0, until=5, counts=Counts(messages=3))


def a_runner(machine: str, version: int, *, can_upgrade: bool, shape: str = "key id") -> Runner:
    """A runner of a machine, as far as the ledger looks at one."""
    runner = SimpleNamespace(
        name=machine,
        state_version=version,
        can_upgrade=can_upgrade,
        shape=shape,
        older_columns=lambda older_shape: {"op": "string"} if older_shape in shape else None,
    )
    return cast("Runner", runner)


def test_code_that_would_misread_the_state_is_refused() -> None:
    """Another machine, older code, or a newer version without a way up: each says what to do."""
    written = Ledger(stream="s", machine="table", shape="key id", state_version=2)
    refuse_incompatible_machine(written, a_runner("table", 2, can_upgrade=False))
    refuse_incompatible_machine(written, a_runner("table", 3, can_upgrade=True))
    refuse_incompatible_machine(Ledger(stream="s"), a_runner("anything", 7, can_upgrade=False))
    other_machine = a_runner("book:Book", 2, can_upgrade=False)
    refuse_incompatible_machine(written, other_machine, may_be_another=True)
    for machine, version, said in (
        ("book:Book", 2, "book:Book"),
        ("table", 1, "knows only 1"),
        ("table", 3, "no `upgrade`"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            refuse_incompatible_machine(written, a_runner(machine, version, can_upgrade=False))
        assert refused.value.next
    # With more columns: they are added by a run, and everything else can read what is there.
    more_columns = a_runner("table", 2, can_upgrade=False, shape="key id; more")
    refuse_incompatible_machine(written, more_columns, may_have_more=True)
    with pytest.raises(ConfigError, match="does not have yet") as refused:
        refuse_incompatible_machine(written, more_columns)
    assert refused.value.next is not None
    assert "seriatim run s" in refused.value.next
    other_shape = a_runner("table", 2, can_upgrade=False, shape="key other")
    with pytest.raises(ConfigError, match="misread the state"):
        refuse_incompatible_machine(written, other_shape)


def test_what_was_made_with_other_columns_is_not_committed() -> None:
    """Columns are added once, to those that were there; slices and repairs of before are fenced."""
    few = replace(ledger(), shape="few")
    grow = entry("columns", added={"x": "string"}, shape="more", older_shape="few")
    more = apply_entry(grow, few)
    assert more.shape == "more"
    assert grow.unmet_requirements(more) == ["the table has other columns by now"]
    for kind in ("slice", "repair"):
        made_before = entry(kind, machine="table", shape="few")
        assert made_before.unmet_requirements(few) == []
        assert made_before.unmet_requirements(more) == ["the table has other columns by now"]
        assert entry(kind, machine="table", shape="more").unmet_requirements(more) == []


def test_machine_and_version_are_remembered() -> None:
    """The first name stays, the highest version counts."""
    one = apply_entry(entry("slice", machine="table", state_version=3), ledger())
    two = apply_entry(entry("slice", machine="table", state_version=2), one)
    assert (two.machine, two.state_version) == ("table", 3)


def test_manifests_are_the_same_bytes_for_the_same_value() -> None:
    """Their hash is the chain; a newer format is refused, not guessed at."""
    manifest = Manifest(entry=entry("slice", folded(5, 9)), ledger=ledger())
    assert decode_manifest(encode_manifest(manifest), Manifest) == manifest
    assert encode_manifest(decode_manifest(encode_manifest(manifest), Manifest)) == encode_manifest(
        manifest
    )
    for other, way in ((5, "deploy it"), (1, "new output path")):
        strange = msgspec.json.encode({**msgspec.to_builtins(manifest), "format": other})
        with pytest.raises(ConfigError, match=f"format {other}") as refused:
            decode_manifest(strange, Manifest)
        assert way in refused.value.render()


def test_an_entry_of_an_unknown_kind_is_refused() -> None:
    """A newer version made it: like a newer format, it is not guessed at."""
    manifest = Manifest(entry=entry("slice", folded(5, 9)), ledger=ledger())
    fields = msgspec.to_builtins(manifest)
    fields["entry"]["kind"] = "promote"
    with pytest.raises(ConfigError, match="'promote'") as refused:
        decode_manifest(msgspec.json.encode(fields), Manifest)
    assert "deploy it" in refused.value.render()


FIELDS_BEFORE_TYPES = {
    "attempt": "a1",
    "run": "r",
    "product": "0.1.0",
    "machine": "table",
    "shape": "s",
    "state_version": 2,
    "sequence": 7,
    "previous": "sha",
    "changes": [],
    "removed": ["records/f"],
    "findings": [],
    "held": "h1",
    "resumes": None,
    "request": "{}",
    "verdict": {"a/0": "good"},
    "since": 3,
    "judged": 6,
    "failed": [],
    "reason": "why",
    "peak_memory_bytes": 9,
    "at_seconds": 1.5,
    "took_seconds": 0.5,
}
"""All fields of an entry as manifests of formats 2 and 3 have them, whatever its kind."""


@pytest.mark.parametrize("kind", [kind for kind in ENTRY_TYPES if kind != "columns"])
def test_entries_of_earlier_formats_are_read(kind: EntryKind) -> None:
    """They had the fields of all kinds. Each type takes its own by the same names, and no others."""
    content = {
        "format": 3,
        "entry": {"kind": kind, **FIELDS_BEFORE_TYPES},
        "ledger": msgspec.to_builtins(ledger()),
    }
    decoded = decode_manifest(msgspec.json.encode(content), Manifest).entry
    assert type(decoded) is ENTRY_TYPES[kind]
    assert decoded.kind == kind
    written = msgspec.json.decode(msgspec.json.encode(decoded))
    assert written.pop("kind") == kind
    assert written.pop("refolded_messages", 0) == 0
    assert written.pop("cluster_id", "") == ""
    assert written == {name: FIELDS_BEFORE_TYPES[name] for name in written}
    assert {"attempt", "product", "changes", "reason", "took_seconds"} <= set(written)
    assert ("removed" in written) == (kind in ("repair", "compact"))
    assert ("held" in written) == (kind in ("hold", "release", "repair"))
    assert ("verdict" in written) == (kind == "verdict")
    assert ("judged" in written) == (kind in ("verdict", "accept"))
    assert ("machine" in written) == (kind in ("slice", "repair"))


def files(*sizes: int) -> tuple[File, ...]:
    """Files of these sizes, a row per byte."""
    return tuple(File(f"f{size}", size, size, "d") for size in sizes)


def test_totals_count_what_entries_did() -> None:
    """Messages, records, bytes of new files, findings, refolded messages and seconds."""
    slice_change = replace(
        folded(5, 9, records=3, findings={"disorder": 2}),
        records=files(10),
        state=files(20),
        quarantine_files=files(30),
        other_records={"trades": files(40)},
    )
    reported = (Finding(finding="disorder", topic="a"), Finding(finding="foreign"))
    one = apply_entry(
        entry("slice", slice_change, findings=reported, took_seconds=1.5, sequence=4), ledger()
    )
    assert one.totals == Totals(
        messages=4,
        records=3,
        bytes_written=100,
        findings={"disorder": 2, "foreign": 1},
        fold_seconds=1.5,
    )
    # The state file of before is named again, and is not written again.
    repair_change = change(
        frontier=9, until=9, records=files(5), removed_rows=7, state=files(20, 50)
    )
    repair = entry("repair", repair_change, refolded_messages=4, took_seconds=9.0)
    two = apply_entry(repair, one)
    assert two.partitions["a/0"].records == 1
    assert two.totals == replace(one.totals, bytes_written=155, refolded_messages=4)


def test_state_that_was_compacted_meanwhile_is_not_counted_as_written_again() -> None:
    """A slice names the state files that it was folded on. If a compaction merged them before the
    commit, only the slice's own file is new.
    """
    one = apply_entry(entry("slice", replace(folded(5, 9), state=files(20))), ledger())
    two = apply_entry(entry("slice", replace(folded(9, 12), state=files(20, 30))), one)
    merge = change(frontier=12, until=12, state=files(45), merged_state_paths=("f20", "f30"))
    three = apply_entry(entry("compact", merge), two)
    late = replace(folded(12, 15), state=files(20, 30, 7))
    four = apply_entry(entry("slice", late), three)
    assert [file.path for file in four.partitions["a/0"].state] == ["f45", "f7"]
    written = [ledger_after.totals.bytes_written for ledger_after in (one, two, three, four)]
    assert written == [20, 50, 95, 102]


def test_totals_of_ledgers_of_before_begin_with_what_the_accounts_know() -> None:
    """Messages, records and findings; the next entry adds to them."""
    known = Account(
        topic_id="id",
        frontier=5,
        initial_frontier=0,
        messages=5,
        records=8,
        counts={"disorder": 2, "hole: compacted": 3},
    )
    before = ledger(known)
    assert before.totals == Totals(messages=5, records=8, findings={"disorder": 2})
    after = apply_entry(entry("slice", folded(5, 9, records=1)), before)
    assert after.totals == Totals(messages=9, records=9, findings={"disorder": 2})
