"""Check over worlds in memory: what is good, what is bad, and what is neither because the check
itself is broken.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.errors import BrokenPromiseError, ConfigError, FencedError, IntegrityError
from seriatim.ledger.commit import commit, read_head
from seriatim.ledger.entries import CompactEntry
from seriatim.ledger.model import Change
from seriatim.memory.check import MemorySight
from seriatim.operations.prove.check import (
    CheckAttempt,
    PartitionCheck,
    accept_failed_check,
    unjudged_entries,
)
from seriatim.operations.prove.partition_rules import PartitionProver
from seriatim.operations.prove.suite import Expectation
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.operations.report_findings import unreported_findings
from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryChecker, MemoryStream
from tests.operations.check_helper import (
    committed_rows,
    run_check,
    shipped_suites,
    values_between,
)
from tests.operations.memory_streams import A0, A1, create_filled_stream, create_stream, kinds, send

NO_PRICE = Expectation(
    "expect_column_values_to_not_be_null", {"column": "price"}, suite="expectations/s.json"
)


def with_before(partitions: int = 1, **fields: Any) -> MemoryStream:
    """A world whose records have before-images."""
    table = TableSettings(key=("id",), columns={"id": "string", "v": "int64"}, before=True)
    stream = Stream(
        name="s",
        topics="in-.*",
        machine="table",
        table=table,
        output=OutputSettings(path="memory"),
        **fields,
    )
    made = MemoryStream(stream, stream.table_machine)
    made.kafka.create("in-a", partitions)
    for number in range(partitions):
        send(made, Partition("in-a", number), ["a", "b"], 1, 2)
    return made


def test_a_clean_stream_is_good_and_checked_up_to_its_verdict() -> None:
    """Every promise holds for every partition; the verdict is an entry of its own."""
    made = with_before(2)
    made.run()
    done = run_check(made)
    assert done.verdict == {"in-a/0": "good", "in-a/1": "good"}
    assert {(str(one.partition), one.promise) for one in done.evidence} == {
        (place, promise)
        for place in ("in-a/0", "in-a/1")
        for promise in ("dense", "counted", "unique", "folded", "linked")
    }
    assert all(one.holds for one in done.evidence)
    assert (done.records, done.findings) == (8, [])
    assert kinds(made)[-1] == "verdict"
    assert done.ledger.checked == done.ledger.sequence == done.sequence


def test_a_check_that_other_runs_overtake_at_every_try_is_fenced() -> None:
    """Files are gone because the ledger went on: that is no damage and no bug."""
    made = create_filled_stream()
    made.run()

    def run_meanwhile(file: File) -> list[dict[str, Any]]:
        send(made, A0, 3)
        made.run()
        raise IntegrityError(f"{file.path} is missing")

    with pytest.raises(FencedError, match="other runs committed") as fenced:
        run_check(made, record_scanner=MemorySight(run_meanwhile))
    assert fenced.value.exit_code == 5
    assert "verdict" not in kinds(made)


def test_its_rate_counts_from_the_first_record_on() -> None:
    """What came before, such as imports, would make the time to go many times too long."""
    made = create_filled_stream()
    made.run()
    told: list[tuple[int, int]] = []
    run_check(made, progress=lambda done, total: told.append((done, total)))
    assert told[0] == (0, told[-1][1])
    assert told[-1][0] == told[-1][1] > 0


def test_nothing_new_is_nothing_to_judge() -> None:
    """No verdict upon verdicts."""
    made = create_filled_stream()
    made.run()
    run_check(made)
    before = kinds(made)
    again = run_check(made)
    assert (again.sequence, again.verdict) == (-1, {})
    assert kinds(made) == before


def test_only_what_is_new_is_read_again() -> None:
    """And it is folded over the state as of the last judged entry."""
    made = with_before()
    made.run()
    run_check(made)
    send(made, A0, 3, 4)
    made.run()
    done = run_check(made)
    assert (done.records, done.verdict) == (2, {"in-a/0": "good"})


def test_several_slices_are_judged_at_once_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many sessions are walked through a few at a time: the verdict is the same."""
    monkeypatch.setattr("seriatim.operations.prove.check.ROWS_AT_ONCE", 3)
    monkeypatch.setattr("seriatim.operations.prove.partition_rules.SESSIONS_AT_ONCE", 2)
    made = with_before()
    for session in "tuvwx":
        send(made, A0, ["a"], 7, session=session)
    made.run(messages_max=4)
    done = run_check(made)
    assert (done.verdict, done.records) == ({"in-a/0": "good"}, 4 + 5 * 2)
    send(made, A0, 8, session="v")
    made.run()
    committed_rows(made)[-1]["before_v"] = 99
    bad = run_check(made)
    assert [finding.cause for finding in bad.findings] == ["linked (expectations/state.json)"]


def hurt(made: MemoryStream, **values: Any) -> None:
    """Change the last committed record."""
    committed_rows(made)[-1].update(values)


@pytest.mark.parametrize(
    ("values", "promises"),
    [
        ({"v": 99}, {"folded"}),
        ({"before_v": 99}, {"linked"}),
        ({"before_id": None}, {"linked"}),
        ({"offset": 1}, {"unique"}),
        ({"partition": 0}, {"unique"}),
        ({"op": "delete"}, {"folded"}),
        ({"op": "nonsense"}, {"op is known"}),
        ({"session": None}, {"session is there"}),
        ({"index": -1}, {"index is not negative"}),
        ({"source_offset": 7}, {"source comes first"}),
    ],
)
def test_every_hurt_record_makes_its_partition_bad(
    values: dict[str, Any], promises: set[str]
) -> None:
    """And no other one: the finding says what was expected, and the offset where it is known."""
    made = with_before(2)
    made.run()
    hurt(made, **values)
    done = run_check(made)
    assert done.verdict == {"in-a/0": "good", "in-a/1": "bad"}
    assert promises <= {finding.cause.partition(" (")[0] for finding in done.findings}
    assert {finding.partition_name for finding in done.findings} == {"in-a/1"}
    assert (done.ledger.circuit, done.ledger.checked) == ("open", 0)


def test_lost_and_doubled_records_are_found() -> None:
    """The files hold what the ledger counts, each once."""
    for change in ("lost", "doubled"):
        made = with_before()
        made.run()
        stored = made.files.files[made.ledger.files_now()[-1].path].rows
        stored.pop() if change == "lost" else stored.append(dict(stored[-1]))
        assert "counted" in {
            finding.cause.partition(" (")[0] for finding in run_check(made).findings
        }


def test_state_that_changed_without_a_record_is_found() -> None:
    """Sessions that a new state file has are held against their records, also those no record
    touched.
    """
    made = with_before()
    send(made, A0, ["a"], session="t")
    made.run()
    run_check(made)
    send(made, A0, 5)
    made.run()
    account = made.accounts()[A0]
    sessions = made.files.load_all(account.state)
    runner = made.machine()
    sessions["t"].state_bytes = runner.dump({"a": ("a", 77)})
    (other,) = made.files.save(A0, "stranger", sessions, ())
    head = read_head(made.ledger, "s")
    assert head is not None
    change = Change(
        partition=A0,
        epoch=0,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=0,
    )
    entry = CompactEntry(
        attempt="x",
        changes=(replace(change, state=(other,), merged_state_paths=paths(account.state)),),
    )
    commit(made.ledger, made.clock, head, entry)
    done = run_check(made)
    assert [finding.cause for finding in done.findings] == ["folded (expectations/state.json)"]
    assert "v=77 in session 't'" in done.findings[0].found


def paths(files: tuple[Any, ...]) -> tuple[str, ...]:
    """Of state files."""
    return tuple(file.path for file in files)


def test_a_certificate_that_does_not_join_is_found() -> None:
    """The frontier moved past offsets that nobody accounts for."""
    made = create_filled_stream()
    made.run()
    head = read_head(made.ledger, "s")
    assert head is not None
    head.ledger.partitions["in-a/0"] = replace(head.ledger.partitions["in-a/0"], frontier=5)
    made.ledger.head = lambda _stream: head  # type: ignore[method-assign]
    suites = shipped_suites(made.stream)
    scanner = MemorySight(lambda file: made.files.files[file.path].rows)
    prover = PartitionProver(scanner, made.files)
    partition_check = PartitionCheck(prover, MemoryChecker(scanner.read), suites.records)
    judging = CheckAttempt(made.open(), head, suites, partition_check)
    dense = judging.dense_evidence(judging.partitions[0])
    assert (dense.broken_count, dense.offset, dense.expected) == (1, 3, "3")
    assert dense.found == "a partition's frontier is not where its change ends: 5"


def test_a_warning_is_told_and_holds_nothing() -> None:
    """Its severity is in the suite; info is not even told."""
    made = create_filled_stream()
    made.run()
    done = run_check(
        made, values_between("v", 0, 1, "warning"), values_between("offset", 0, 1, "info")
    )
    assert (done.verdict, done.ledger.circuit) == ({"in-a/0": "good"}, "closed")
    assert [(finding.level, finding.finding) for finding in done.findings] == [("warning", "check")]
    assert "a warning holds nothing back" in done.findings[0].advice("s")


def test_a_bad_verdict_says_all_that_a_person_needs() -> None:
    """Partition, expectation, how many rows, an example, the next command; told once."""
    made = create_filled_stream()
    made.run()
    done = run_check(made, values_between("v", 0, 1, name="v is small"))
    finding = done.findings[0]
    assert (finding.partition_name, finding.offset) == ("in-a/0", 2)
    told = finding.render("s")
    assert "1 of 4 records: 2" in told
    assert "v is small (expectations/s.json)" in told
    assert f"seriatim accept s --sequence {done.judged_until} --because" in told
    assert "seriatim repair s --partition in-a/0" in told
    assert unreported_findings(made.ledger, "s") == [finding]
    assert run_check(made, values_between("v", 0, 1)).findings == []


def test_a_broken_check_is_never_a_pass() -> None:
    """A column that is not there, a type that is not known: no verdict, and exit 2 with the file to
    fix.
    """
    made = create_filled_stream()
    made.run()
    for own in (
        NO_PRICE,
        Expectation("expect_the_moon", {"column": "v"}, suite="expectations/s.json"),
    ):
        with pytest.raises(ConfigError, match="the check itself is broken") as told:
            run_check(made, own)
        assert "fix expectations/s.json" in told.value.next
        assert "this check judged nothing" in told.value.next
    assert "verdict" not in kinds(made)
    head = read_head(made.ledger, "s")
    assert head is not None
    assert head.ledger.checked == 0


def test_an_expectation_that_raises_is_no_pass() -> None:
    """Whatever breaks: nothing is committed."""
    made = create_filled_stream()
    made.run()

    class Angry:
        """Raises."""

        def check_records(self, *_: Any) -> Any:
            raise ZeroDivisionError("by the suite")

        check_evidence = check_records

    with pytest.raises(BrokenPromiseError, match="by the suite"):
        run_check(made, checker=Angry())
    assert "verdict" not in kinds(made)


def test_a_missing_file_is_an_integrity_error() -> None:
    """It is no verdict about the data that is there."""
    made = create_filled_stream()
    made.run()
    del made.files.files[made.ledger.files_now()[0].path]
    with pytest.raises(IntegrityError, match="cannot be read"):
        run_check(made)


def test_a_stream_that_never_ran_has_nothing_to_check() -> None:
    """It says what to do."""
    with pytest.raises(ConfigError, match="never run"):
        run_check(create_stream())


def test_of_two_checks_at_once_one_is_enough() -> None:
    """The second sees that all is judged."""
    made = create_filled_stream()
    made.run()
    outer = []

    def meanwhile(call: str) -> None:
        if call == "put_manifest" and not outer:
            outer.append(call)
            run_check(made)

    made.ledger.on_call = meanwhile
    assert run_check(made).sequence == -1
    assert kinds(made).count("verdict") == 1


def test_accept_closes_the_circuit_with_its_reason() -> None:
    """And nothing but what failed up to that entry; without a failure there is nothing to accept."""
    made = create_filled_stream(2)
    made.run()
    with pytest.raises(ConfigError, match="the circuit is closed"):
        accept_failed_check(made.ledger, made.clock, "s", "x", 1, "why")
    done = run_check(made, values_between("v", 0, 1))
    with pytest.raises(ConfigError, match="judged up to entry 0") as told:
        accept_failed_check(made.ledger, made.clock, "s", "x", 0, "why")
    assert f"--sequence {done.judged_until}" in told.value.next
    looked = accept_failed_check(
        made.ledger, made.clock, "s", "x", done.judged_until, "", dry_run=True
    )
    assert (len(looked.failures), looked.ledger.circuit) == (2, "open")
    after = accept_failed_check(
        made.ledger, made.clock, "s", "x", done.judged_until, "known since May"
    ).ledger
    assert (after.circuit, after.checked) == ("closed", after.sequence)
    assert made.ledger.manifest_at("s", after.sequence).entry.reason == "known since May"


def test_with_stop_a_run_is_refused_until_the_circuit_closes() -> None:
    """Exit 3 with the next command; with hold-publish folding goes on."""
    for rule, refused in (("stop", True), ("hold-publish", False)):
        made = create_filled_stream(on_check_failure=rule)
        made.run()
        done = run_check(made, values_between("v", 0, 1))
        send(made, A0, 3)
        if refused:
            with pytest.raises(IntegrityError, match="on_check_failure"):
                made.run()
            accept_failed_check(made.ledger, made.clock, "s", "x", done.judged_until, "known")
        assert made.run().messages == 1


def test_a_machine_of_ones_own_is_judged_by_what_can_be() -> None:
    """Its records do not say how they fold: dense, counted, unique and the records suite."""
    made = create_filled_stream()
    made.run()
    open_stream = made.open()
    open_stream.runner = copy(open_stream.runner)
    open_stream.runner.row_key_spec = None
    done = run_check(made, open_stream=open_stream)
    assert {one.promise for one in done.evidence} == {"dense", "counted", "unique"}
    assert done.verdict == {"in-a/0": "good"}


def test_quarantine_restarts_and_deletes_are_good() -> None:
    """What hurt sessions leave behind is right: their records fold to their state."""
    made = with_before()
    made.run()
    send(made, A0, b"poison", 3, ["a", "c"], 4)
    send(made, A0, ["x"], 5, session="t")
    made.run(messages_max=2)
    assert made.accounts()[A0].counts["poison"] == 1
    assert run_check(made).verdict == {"in-a/0": "good"}
    assert A1 not in made.accounts()


def test_a_repair_of_what_failed_closes_the_circuit_after_a_good_check() -> None:
    """Repair finds by itself what the check called bad; the next check judges what came instead."""
    made = with_before(2)
    made.run()
    send(made, A1, 3)
    made.run()
    hurt(made, v=99)
    assert run_check(made).verdict == {"in-a/0": "good", "in-a/1": "bad"}
    tools = made.open()
    RepairRun(tools).apply(plan_repair(tools, RepairRequest()), 1000)
    head = read_head(made.ledger, "s")
    assert head is not None
    assert (
        head.ledger.circuit,
        [one.replaced_by_sequence >= 0 for one in head.ledger.failed_ranges],
    ) == ("open", [True])
    done = run_check(made)
    assert done.verdict == {"in-a/1": "good"}
    assert (done.ledger.circuit, done.ledger.checked) == ("closed", done.sequence)


def test_what_a_repair_made_wrong_again_stays_bad() -> None:
    """The new files are judged like any others, from the state before them."""
    made = with_before()
    made.run()
    hurt(made, v=99)
    run_check(made)
    tools = made.open()
    RepairRun(tools).apply(plan_repair(tools, RepairRequest()), 1000)
    hurt(made, before_v=98)
    done = run_check(made)
    assert (done.verdict, done.ledger.circuit) == ({"in-a/0": "bad"}, "open")
    assert [one.replaced_by_sequence for one in done.ledger.failed_ranges] == [-1]


def test_entries_that_wait_for_a_check_hold_only_accounts_that_changed() -> None:
    """A ledger has an account for each partition. Many entries of many partitions would not fit into
    memory if each came with its whole ledger.
    """
    made = create_stream()
    made.kafka.create("in-a", 3)
    for number in range(3):
        send(made, Partition("in-a", number), ["a"], 1)
    made.run()
    for _ in range(4):
        send(made, A1, ["a"])
        made.run()
    manifests = list(made.ledger.entries("s", -1))
    entries = list(unjudged_entries(manifests))
    assert sum(len(manifest.ledger.partitions) for manifest in manifests[1:]) == 15
    assert [sorted(entry.accounts) for entry in entries[2:]] == [["in-a/1"]] * 4
    accounts = {}
    for entry, manifest in zip(entries, manifests, strict=True):
        accounts |= entry.accounts
        assert accounts == manifest.ledger.partitions


def test_a_partition_that_is_gone_from_the_ledger_is_told() -> None:
    """As None, so that the evidence sees it."""
    made = create_filled_stream()
    made.run()
    first, second, *_ = made.ledger.entries("s", -1)
    without = replace(second, ledger=replace(second.ledger, partitions={}))
    *_, last = unjudged_entries([first, second, without])
    assert last.accounts == dict.fromkeys(second.ledger.partitions)
