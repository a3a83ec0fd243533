"""Findings on real parts: the poison corpus, machines that raise, what is kept and what is told."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.lab import Lab, fold_records
from tests.integration.test_slices import snapshot, update

DEEP = b"[" * 100_000 + b"]" * 100_000
POISON: dict[str, tuple[bytes | None, bytes | None]] = {
    "not JSON": (b"s1", b"hello"),
    "cut short": (b"s2", b'{"type": "update", "seq": 2'),
    "wrong schema": (b"s3", b'{"type": "update", "seq": 2, "id": "a", "price": "dear"}'),
    "unknown type": (b"s4", b'{"type": "upsert", "seq": 2, "id": "a"}'),
    "no sequence": (b"s5", b'{"type": "update", "id": "a", "price": 1}'),
    "null value": (b"s6", None),
    "0 bytes": (b"s7", b""),
    "10 MB": (b"s8", b"x" * 10_000_000),
    "deep nesting": (b"s9", b'{"type": "update", "seq": 2, "id": "a", "more": ' + DEEP + b"}"),
    "NaN": (b"s10", b'{"type": "update", "seq": 2, "id": "a", "price": NaN}'),
    "bad UTF-8": (b"s11", b'{"type": "update", "seq": 2, "id": "a", "note": "\xff"}'),
    "null key": (None, b'{"type": "update", "seq": 2, "id": "a", "price": 1}'),
}
KEYED = [kind for kind in POISON if kind != "null key"]


@pytest.fixture
def corpus(lab: Lab, topic: Callable[..., str]) -> tuple[str, dict[str, int]]:
    """A topic with a good session, one session per kind of poison, and where each poison is."""
    name = topic(1, {"max.message.bytes": "20000000"})
    lab.send([(name, 0, "good", snapshot(1, ("a", 0.0, 0)))])
    lab.send((name, 0, f"s{i}", snapshot(1, ("a", 0.0, 0), ("b", 1.0, 1))) for i in range(1, 12))
    offsets = {}
    for number, kind in enumerate(KEYED):
        offsets[kind] = 12 + 2 * number
        lab.send(
            [(name, 0, *POISON[kind]), (name, 0, "good", update(2 + number, "a", float(number)))]
        )
    lab.send((name, 0, f"s{i}", update(3, "a", 9.0)) for i in range(1, 12))
    return name, offsets


def test_poison_sets_its_session_aside(lab: Lab, corpus: tuple[str, dict[str, int]]) -> None:
    """Each kind is named by offset, its session waits with its last good state, the others go on."""
    name, offsets = corpus
    stream = lab.stream("poisoned", name)

    outcome = lab.fold(stream)

    assert {f.offset: f.session for f in outcome.findings} == {
        offset: f"s{number}" for number, offset in enumerate(offsets.values(), 1)
    }
    assert {f.finding for f in outcome.findings} == {"poison"}
    sessions = lab.sessions(stream)
    assert sessions[name, "good"]["state"]["rows"] == [{"id": "a", "price": 10.0, "size": 0}]
    assert all(sessions[name, f"s{i}"]["finding"] == "poison" for i in range(1, 12))
    assert all(len(sessions[name, f"s{i}"]["state"]["rows"]) == 2 for i in range(1, 12))
    kept = lab.quarantined_rows(stream)
    assert len(kept) == 22
    assert {row["offset"]: row["value"] for row in kept}[offsets["bad UTF-8"]] == POISON[
        "bad UTF-8"
    ][1]
    assert lab.ledger(stream).partitions[f"{name}/0"].quarantined == 11

    lab.send((name, 0, f"s{i}", snapshot(9, ("b", 5.0, 5))) for i in range(1, 12))
    again = lab.fold(stream)

    assert again.findings == []
    assert lab.ledger(stream).partitions[f"{name}/0"].quarantined == 0
    tables = {
        key: {row["id"]: row for row in one["state"]["rows"]}
        for key, one in lab.sessions(stream).items()
    }
    assert fold_records(lab.records(stream)) == tables
    assert tables[name, "s1"] == {"b": {"id": "b", "price": 5.0, "size": 5}}


def test_poison_may_halt_the_partition(lab: Lab, corpus: tuple[str, dict[str, int]]) -> None:
    """With on_poison = halt the partition stops at the message; what is before it is committed."""
    name, offsets = corpus
    stream = lab.stream("halting", name, on_poison="halt")

    outcome = lab.fold(stream)

    (finding,) = outcome.findings
    assert (finding.finding, finding.offset, finding.scope) == (
        "poison",
        offsets["not JSON"],
        "partition",
    )
    account = lab.ledger(stream).partitions[f"{name}/0"]
    assert account.frontier == offsets["not JSON"]
    assert account.halt is not None
    assert lab.fold(stream).findings == []


def test_poison_may_be_skipped(lab: Lab, corpus: tuple[str, dict[str, int]]) -> None:
    """With on_poison = skip (not under strict) each is named as a warning and the rest is folded."""
    name, offsets = corpus
    lab.send([(name, 0, *POISON["null key"])])
    stream = lab.stream("skipping", name, tier="none", on_poison="skip", sequence=None)

    outcome = lab.fold(stream)

    named = {finding.offset for finding in outcome.findings}
    assert all(finding.level == "warning" for finding in outcome.findings)
    assert named == (set(offsets.values()) | {45}) - {offsets["no sequence"]}
    assert lab.sessions(stream)[name, "s1"]["state"]["rows"][0]["price"] == 9.0


def test_a_message_without_a_key_halts(lab: Lab, topic: Callable[..., str]) -> None:
    """A message whose session cannot be known could be anybody's: the partition waits at it."""
    name = topic(1)
    lab.send([(name, 0, "s", snapshot(1, ("a", 0.0, 0))), (name, 0, *POISON["null key"])])
    lab.send([(name, 0, "s", update(2, "a", 1.0))])

    outcome = lab.fold(lab.stream("keyless", name))

    (finding,) = outcome.findings
    assert (finding.finding, finding.offset, finding.session) == ("poison", 1, None)
    assert outcome.messages == 1


MACHINE = """
from msgspec import Struct, field
from seriatim import Machine

class Counts(Struct):
    seen: list[int] = field(default_factory=list)

class Tick(Struct):
    n: int
    whole: bool = False

class Seen(Struct):
    n: int
    total: int

class Fragile(Machine[Counts, Tick, Seen]):
    def start(self, session): return Counts()
    def is_snapshot(self, tick): return tick.whole
    def apply(self, state, tick):
        if tick.whole:
            state.seen.clear()
        state.seen.append(tick.n)
        yield Seen(tick.n, sum(state.seen))
        if tick.n == 1000:
            raise RuntimeError("cannot take 1000")
"""


def test_a_machine_that_raises_hurts_its_session_alone(lab: Lab, topic: Callable[..., str]) -> None:
    """The session waits with the state it had before the message; its messages are kept; the others
    are right.
    """
    name = topic(1)
    (lab.folder / "streams" / "fragile.py").write_text(MACHINE)
    lab.send(
        (name, 0, "bad" if i % 2 else "fine", {"n": i // 2, "whole": i < 2}) for i in range(2400)
    )
    lab.send(
        [
            (name, 0, "fine", {"n": 7}),
            (name, 0, "bad", {"n": 5, "whole": True}),
            (name, 0, "bad", {"n": 6}),
        ]
    )
    given = {"machine": "fragile:Fragile"}
    stream = lab.stream("fragile", name, given)

    outcome = lab.fold(stream, until={f"{name}/0": 2400})

    findings = [(f.finding, f.session, f.offset) for f in outcome.findings]
    assert findings == [("raised", "fine", 2000), ("raised", "bad", 2001)]
    assert "RuntimeError: cannot take 1000" in outcome.findings[0].cause
    assert lab.sessions(stream)[name, "bad"]["state"] == {"seen": list(range(1000))}
    records = lab.records(stream)
    assert len(records) == 2000
    assert records[-1]["total"] == sum(range(1000))

    lab.fold(stream)

    sessions = lab.sessions(stream)
    assert sessions[name, "bad"] == {
        "state": {"seen": [5, 6]},
        "finding": None,
        "sequence": None,
        "last_offset": 2402,
        "snapshot_offset": 2401,
    }
    assert sessions[name, "fine"]["finding"] == "raised"
    kept = lab.quarantined_rows(stream)
    assert len(kept) == 401


def test_errors_fit_on_one_screen(lab: Lab, topic: Callable[..., str]) -> None:
    """The real command tells each finding once, as JSON if asked, also what a killed run had no
    time to tell.
    """
    name = topic(1)
    lab.send([(name, 0, "s", snapshot(1, ("a", 0.0, 0))), (name, 0, "s", update(3, "a", 1.0))])
    stream = lab.stream("told", name)

    killed = lab.command("run", stream, SERIATIM_CRASH_POINT="committed:2")
    ended = lab.command("run", stream, "--json")

    assert killed.returncode == -signal.SIGKILL
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stderr
    told = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    keys = {
        "finding",
        "stream",
        "topic",
        "partition",
        "offset",
        "session",
        "expected",
        "found",
        "cause",
        "next",
    }
    assert keys <= set(told[0])
    assert (told[0]["finding"], told[0]["offset"], told[0]["session"]) == ("sequence gap", 1, "s")
    assert json.loads(ended.stdout)["messages"] == 0
    again = lab.command("run", stream)
    assert again.returncode == 0
    status: dict[str, Any] = json.loads(lab.command("status", stream, "--json").stdout)
    (quarantined,) = status["quarantined"]
    told_session = {
        "session": "s",
        "topic": name,
        "partition": 0,
        "offset": 1,
        "finding": "sequence gap",
    }
    assert told_session.items() <= quarantined.items()
