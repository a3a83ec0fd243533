"""What ended an incident is read from the ledger: by which entry, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from seriatim.alerts.endings import find_endings
from seriatim.alerts.incidents import REPAIR, REPAIR_DAG, Incident, Note
from seriatim.engine.findings import Concern
from seriatim.errors import IntegrityError
from seriatim.ledger.manifests import Manifest
from seriatim.operations.release import release_session
from seriatim.testing import MemoryStream
from tests.alerts.test_alert import Watcher, repaired
from tests.operations.decision_helper import retire
from tests.operations.memory_streams import A0, create_filled_stream, send
from tests.operations.repair.test_swapped_messages import stream_of, tell


def halted() -> Watcher:
    """A stream whose one partition halted at offset 3, and was looked at."""
    made = create_filled_stream(sequence=None)
    made.run()
    watcher = Watcher(made)
    watcher.look()
    made.reader.lost_offsets.add((A0, 3))
    send(made, A0, 5, 6)
    made.run()
    watcher.look()
    return watcher


def quarantined(sessions: int = 1) -> Watcher:
    """A stream with sessions in quarantine, each by a message that is no JSON, and looked at."""
    made = create_filled_stream()
    made.run()
    watcher = Watcher(made)
    watcher.look()
    for number in range(sessions):
        send(made, A0, ["a"], b"?", session=f"s{number}")
    made.run()
    watcher.look()
    return watcher


def last_ending(watcher: Watcher) -> str:
    """What the newest mail says of the end of an incident."""
    watcher.made.clock.sleep(60)
    watcher.look()
    mail = watcher.post.mails[-1]
    assert "over: " in mail.subject
    (line,) = [line for line in mail.text.splitlines() if line.startswith("  ended by")]
    return line.removeprefix("  ended by").strip()


def test_a_repair_that_is_followed_by_runs_has_ended_a_halt() -> None:
    """Not the run, though it came later and changed the same partition."""
    watcher = halted()
    made = watcher.made
    repaired(made)
    end = made.ledger.head("s")
    assert end is not None
    send(made, A0, 7)
    made.reader.lost_offsets.clear()
    made.run()
    assert last_ending(watcher) == f"a repair (entry {end.ledger.sequence})"


def snapshot(made: MemoryStream) -> None:
    """The producer sends a snapshot, and a run folds it."""
    send(made, A0, ["a"], session="s0")
    made.run()


def released(made: MemoryStream) -> None:
    """A person takes the session out of quarantine."""
    release_session(made.open(), "s0", "it was a test")


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (
            snapshot,
            "session s0 in in-a/0 from offset 5 on: a snapshot from the producer made it right",
        ),
        (released, "session s0 in in-a/0 from offset 5 on: a person released it: it was a test"),
        (retire, "a person retired the topic: over"),
    ],
)
def test_what_took_a_session_out_of_quarantine_is_said(
    act: Callable[[MemoryStream], Any], expected: str
) -> None:
    """With the entry, and the words of the person who decided."""
    watcher = quarantined()
    act(watcher.made)
    head = watcher.made.ledger.head("s")
    assert head is not None
    assert last_ending(watcher) == f"{expected} (entry {head.ledger.sequence})"


def test_many_sessions_are_not_all_named() -> None:
    """The first three stand for the others."""
    watcher = quarantined(5)
    for number in range(5):
        send(watcher.made, A0, ["a"], session=f"s{number}")
    watcher.made.run()
    ending = last_ending(watcher)
    assert "session s2 in" in ending
    assert "session s3 in" not in ending
    assert "; and 2 more sessions (entry" in ending


def test_a_swap_that_a_snapshot_has_settled_is_not_ended_by_later_runs() -> None:
    """Runs after the snapshot fold other sessions of the same partition. They ended nothing."""
    made = stream_of(3, 2)
    concern = Concern(kind="swapped", location=str(A0), text="session s", next="")
    incident = Incident(concern=concern, since_seconds=made.clock.now_seconds())
    tell(made, 4, rows=["a"])
    made.run()
    end = made.ledger.head("s")
    assert end is not None
    tell(made, 3, session="other")
    made.run()
    endings = find_endings(made.stream, made.ledger, [incident])
    assert endings["swapped in-a/0"] == (
        "session s in in-a/0 from offset 5 on: a snapshot from the producer made it right"
        f" (entry {end.ledger.sequence})"
    )


@pytest.mark.parametrize(("delay_seconds", "is_named"), [(60, False), (-60, True)])
def test_a_failed_repair_is_not_ended_by_its_own_entry(
    delay_seconds: int, *, is_named: bool
) -> None:
    """It committed and failed afterwards. An entry that came later has ended it."""
    watcher = halted()
    made = watcher.made
    repaired(made)
    end = made.ledger.head("s")
    assert end is not None
    entry = made.ledger.manifest_at("s", end.ledger.sequence).entry
    since = entry.at_seconds + delay_seconds
    concern = Concern(kind=REPAIR, text="it failed", next="")
    endings = find_endings(
        made.stream, made.ledger, [Incident(concern=concern, since_seconds=since)]
    )
    assert bool(endings) == is_named


def test_an_entry_that_cannot_be_read_hides_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mail comes with the finding of the same look. Only what ended the incident is left out."""
    watcher = halted()
    made = watcher.made
    repaired(made)
    made.reader.lost_offsets.clear()
    send(made, A0, ["a"], b"?", session="s1")
    made.run()

    def refuse_manifest(stream: str, sequence: int) -> Manifest:
        raise IntegrityError(f"{stream}: entry {sequence} cannot be read")

    monkeypatch.setattr(made.ledger, "manifest_at", refuse_manifest)
    watcher.look()
    text = watcher.post.mails[-1].text
    assert "PoisonError" in text
    assert "over: halted in-a/0" in text
    assert "ended by" not in text


def test_a_repair_that_stays_failed_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be open for weeks, with a look every minute: entries are read once it is over."""
    watcher = Watcher(create_filled_stream(sequence=None))
    made = watcher.made
    made.run()
    watcher.look()
    now_seconds = made.clock.now_seconds()
    failed_repair = Note(kind="failed", at_seconds=now_seconds, dag=REPAIR_DAG, run="r1", text="no")
    watcher.outbox.add_note(failed_repair)
    watcher.look()
    searched_sequences: list[int] = []
    read_manifest = made.ledger.manifest_at

    def record_manifest(stream: str, sequence: int) -> Manifest:
        searched_sequences.append(sequence)
        return read_manifest(stream, sequence)

    monkeypatch.setattr(made.ledger, "manifest_at", record_manifest)
    watcher.look()
    assert REPAIR in watcher.outbox.alert_state().open_incidents
    assert searched_sequences == []
    made.clock.sleep(60)
    repaired(made)
    watcher.look()
    assert "ended by   a repair (entry 3)" in watcher.post.mails[-1].text
    assert searched_sequences
