"""What must hold after a seed, whatever happened in it: committed records, state and counts equal
those of the simple fold.

Next: straight.py is the simple fold, chaos.py runs the seed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import Session
from seriatim.ledger.entries import Entry, apply_entry
from seriatim.ledger.model import Account, Halt, Ledger, Totals
from seriatim.testing import MemoryDigests
from tests.sim.chaos import Chaos
from tests.sim.producer import COLUMNS
from tests.sim.straight import ExpectedFold

OWN = ("offset", "index", "session", "sequence")


def compare(chaos: Chaos) -> None:
    """Check everything, for every partition that the ledger knows."""
    entries = check_chain(chaos)
    accounts = chaos.world.accounts()
    assert set(accounts) >= set(chaos.world.kafka.bounds(chaos.stream.topics)), (
        "a partition was overlooked"
    )
    check_foreign(chaos, entries)
    for partition, account in accounts.items():
        check_partition(chaos, entries, partition, account)


def check_chain(chaos: Chaos) -> list[Entry]:
    """Every entry follows the one before, and applying them one after the other gives the ledger."""
    commits = [commit for commit in chaos.world.ledger.commits if commit.entry is not None]
    ledger, named = Ledger(stream="sim"), Counter[str]()
    totals = ledger.totals
    entries: list[Entry] = []
    for commit in commits:
        manifest = chaos.world.ledger.manifest_at("sim", commit.manifest.sequence)
        entry = manifest.entry
        assert (entry.sequence, entry.previous) == (ledger.sequence + 1, ledger.sha256), (
            "the chain is broken"
        )
        ledger = apply_entry(entry, ledger)
        ledger = replace(ledger, sha256=commit.manifest.sha256)
        assert manifest.ledger == ledger, "a manifest tells another ledger"
        check_totals(ledger.totals, totals)
        totals = ledger.totals
        for change in entry.changes:
            named.update(file.path for file in (*change.records, *change.quarantine_files))
        entries.append(entry)
    assert not [path for path, times in named.items() if times > 1], "a file is named twice"
    witness = chaos.world.ledger.stored_witness
    assert witness is None or witness.sequence <= ledger.sequence, "the witness is ahead"
    return entries


def check_totals(after: Totals, before: Totals) -> None:
    """No total ever falls."""
    for name in after.__struct_fields__:
        value, value_before = getattr(after, name), getattr(before, name)
        if name == "findings":
            assert all(value.get(kind, 0) >= count for kind, count in value_before.items()), (
                "the findings of a kind became fewer"
            )
        else:
            assert value >= value_before, f"the total of {name} fell"


def check_foreign(chaos: Chaos, entries: list[Entry]) -> None:
    """What others did to the data is told, once."""
    done = sum(bool(commit.foreign) for commit in chaos.world.ledger.commits)
    told = sum(finding.finding == "foreign" for entry in entries for finding in entry.findings)
    assert told == done, "foreign commits are told once each"


def check_partition(
    chaos: Chaos, entries: list[Entry], partition: Partition, account: Account
) -> None:
    """One partition's frontier, records, sessions and counts."""
    sent = chaos.history.get((account.topic_id, partition), [])
    passed = check_certificates(chaos, entries, partition, account)
    straight = ExpectedFold(chaos.stream)
    present = [o for o in range(account.initial_frontier, len(sent)) if o not in passed]
    end = _end(chaos, entries, partition, account)
    straight.fold((o, sent[o]) for o in present if o < end)
    check_frontier(chaos, partition, account, straight)
    check_records(chaos, partition, straight)
    check_sessions(chaos, account, straight)
    check_counts(entries, partition, account, straight)
    kept = [
        row
        for e in entries
        for c in e.changes
        if c.partition == partition
        for row in _rows(chaos, c.quarantine_files)
    ]
    places = sorted(
        {(row["offset"], row["session"]) for row in kept}
    )  # a refold keeps them once more
    assert places == sorted(straight.kept), "other messages are kept"


def _end(chaos: Chaos, entries: list[Entry], partition: Partition, account: Account) -> int:
    """How far the straight fold goes: to the log end, or to where poison or a fault of the topic
    stopped us.
    """
    if account.halt is not None:
        halts = [
            c.halt
            for e in entries
            for c in e.changes
            if c.partition == partition and c.halt is not None
        ]
        return account.frontier + any(
            (h.finding, h.offset) == ("poison", account.frontier) for h in halts
        )
    bounds = chaos.world.kafka.bounds(".*").get(partition)
    return account.frontier if bounds is None else bounds.log_end


def _rows(chaos: Chaos, files: Any) -> list[dict[str, Any]]:
    return [row for file in files for row in chaos.world.files.read(file).rows]


def check_certificates(
    chaos: Chaos, entries: list[Entry], partition: Partition, account: Account
) -> set[int]:
    """Certificates tile the way from birth to frontier; the offsets passed over, which must be
    justified.
    """
    at, passed = account.initial_frontier, set()
    for change in (
        c for e in entries for c in e.changes if c.partition == partition and c.certificate
    ):
        certificate = change.certificate
        assert certificate.start == at, "ranges overlap or skip"
        at = certificate.until
        offsets = OffsetRange(certificate.start, certificate.until)
        if "expired" in certificate.holes:
            assert at <= chaos.expired.get(partition, 0), "skipped, but not expired"
            passed |= set(range(offsets.start, offsets.end))
        else:
            lost = {
                o
                for o in range(offsets.start, offsets.end)
                if (partition, o) in chaos.world.reader.lost_offsets
            }
            assert certificate.holes == ({"unexplained": len(lost)} if lost else {}), (
                "holes are counted"
            )
            passed |= lost
    assert at == account.frontier, "the frontier is where the last certificate ends"
    return passed


def check_frontier(
    chaos: Chaos, partition: Partition, account: Account, straight: ExpectedFold
) -> None:
    """A partition is at its log end, or halted for a reason that is true."""
    bounds, halt, frontier = (
        chaos.world.kafka.bounds(".*").get(partition),
        account.halt,
        account.frontier,
    )
    if straight.halted_at is not None:
        assert halt is not None
        assert (halt.offset, frontier) == (straight.halted_at, straight.halted_at)
        assert halt.finding == "poison" or _justified(chaos, halt.finding, partition, account), (
            "a halt without a reason"
        )
    elif halt is None:
        same = bounds is None or (
            bounds.topic_id == account.topic_id and frontier == bounds.log_end
        )
        assert same, "a partition that is not halted is caught up"
    else:
        assert halt.offset == frontier, "a halt is at the frontier"
        assert _justified(chaos, halt.finding, partition, account), "a halt without a reason"


def _justified(chaos: Chaos, finding: str, partition: Partition, account: Account) -> bool:
    bounds, frontier = chaos.world.kafka.bounds(".*").get(partition), account.frontier
    if finding == "gap":
        return (
            chaos.stream.tier in ("strict", "once")
            and (partition, frontier) in chaos.world.reader.lost_offsets
        )
    if bounds is None or bounds.topic_id != account.topic_id:
        return chaos.topic_faults
    if finding == "truncated":
        return bounds.log_end < frontier
    return (
        finding == "expired"
        and chaos.stream.tier in ("strict", "once")
        and chaos.expired[partition] > frontier
    )


def check_records(chaos: Chaos, partition: Partition, straight: ExpectedFold) -> None:
    """The same records, in the same order."""
    columns = (*OWN, *chaos.machine().columns)
    files = [
        file
        for file in chaos.world.ledger.files_now()
        if file.path.startswith(f"records/{partition}/")
    ]
    files.sort(key=lambda file: file.first_offset)
    rows = [tuple(row[name] for name in columns) for row in _rows(chaos, files)]
    assert rows == straight.records, "records differ"
    places = [row[:2] for row in rows]
    assert len(set(places)) == len(places), "a record came twice"


def check_sessions(chaos: Chaos, account: Account, straight: ExpectedFold) -> None:
    """The same state for every session; for the table machine, what its records give."""
    runner = chaos.machine()
    found = chaos.world.files.load_all(account.state)
    meant = {name: session for name, session in straight.sessions.items() if session.touched}
    assert set(found) == set(meant), "other sessions"
    for name, session in meant.items():
        state = _state(runner, found[name])
        assert state == session.state, "state differs"
        assert found[name].sequence == session.sequence, "sequence differs"
        assert found[name].finding == session.finding, "quarantine differs"
        if session.finding is not None:
            assert found[name].finding_offset == session.finding_offset, "quarantined elsewhere"
        if chaos.stream.machine == "table":
            assert _folded(straight.records, name) == (state or {}), (
                "records folded again give other rows"
            )


def _state(runner: Any, session: Session) -> Any:
    if session.state_bytes is None:
        return None
    state = runner.load(session.state_bytes, session.state_version)
    return state if isinstance(state, dict) else {"total": state.total}


def _folded(records: list[tuple[Any, ...]], session: str) -> dict[str, tuple[Any, ...]]:
    rows: dict[str, tuple[Any, ...]] = {}
    for _, _, name, _, op, key, *rest in records:
        if name == session and op == "delete":
            del rows[key]
        elif name == session:
            rows[key] = (key, *rest[: len(COLUMNS) - 1])
    return rows


def check_counts(
    entries: list[Entry], partition: Partition, account: Account, straight: ExpectedFold
) -> None:
    """The account's numbers, and every finding reported once."""
    assert account.messages == straight.messages, "messages miscounted"
    assert account.records == len(straight.records), "records miscounted"
    assert account.headless == straight.headless, "headless miscounted"
    in_quarantine = sum(s.finding is not None for s in straight.sessions.values())
    assert account.quarantined == in_quarantine, "quarantined sessions miscounted"
    own = {k: v for k, v in account.counts.items() if not k.startswith("hole: ")}
    reported = [
        (f.finding, f.offset, f.session)
        for e in entries
        for f in e.findings
        if f.partition_name == str(partition)
        and f.finding not in ("gap", "expired", "re-created", "truncated")
    ]
    for again in _found_again(entries, partition):
        # A person lifted the halt, and its cause was still there: that is counted and reported.
        reported.remove(again)
        own[again[0]] -= 1
    assert own == dict(straight.counts), "findings miscounted"
    assert reported == straight.findings, "other findings are reported"


def _found_again(entries: list[Entry], partition: Partition) -> list[tuple[str, int, str | None]]:
    """Findings that halted the partition again after a repair had lifted their halt."""
    found_again = []
    halt: Halt | None = None
    lifted: set[tuple[str, int]] = set()
    for entry in entries:
        for change in entry.changes:
            if change.partition != partition:
                continue
            if entry.kind == "repair" and halt is not None and change.halt is None:
                lifted.add((halt.finding, halt.offset))
            if entry.kind == "slice":
                for finding in entry.findings:
                    key = (finding.finding, finding.offset)
                    if finding.partition_name == str(partition) and key in lifted:
                        found_again.append((finding.finding, finding.offset, finding.session))
            if entry.kind in ("slice", "repair"):
                halt = change.halt
    return found_again


def check_digests(chaos: Chaos) -> None:
    """Digests do not depend on how messages were cut: one over each certificate's whole range is
    the same.
    """
    for commit in chaos.world.ledger.commits:
        for change in commit.entry.changes if commit.entry else ():
            topic = chaos.world.kafka.topics.get(change.partition.topic)
            certificate = change.certificate
            if not (certificate and certificate.digests) or certificate.holes:
                continue
            if topic is None or topic.id != change.topic_id:
                continue
            log = topic.messages[change.partition.number][certificate.start : certificate.until]
            if len(log) != certificate.until - certificate.start:
                continue
            digests = MemoryDigests()
            digests.update(
                MessageBatch(
                    certificate.start, [0] * len(log), [m.key for m in log], [m.value for m in log]
                )
            )
            assert digests.finish() == certificate.digests, "digests differ"
