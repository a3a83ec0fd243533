"""Verify raises no false alarm, whatever a stream lives through: new lives, releases, windows,
expiry, crashes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from seriatim.engine.crash_points import CRASH_POINTS, arm
from seriatim.operations.prove.stream_rules import ORPHAN_OF_RUNNING_RUN
from seriatim.operations.prove.verify import VerifyResult
from seriatim.operations.release import release_session
from seriatim.storage.audit import FileAudit
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.contracts.verify_helper import verify
from tests.operations.decision_helper import accept, retire
from tests.operations.test_crash_points import Killed, killer

HOUR_MS = 3_600_000


def assert_good(made: DiskStream) -> VerifyResult:
    """Good on from the last pass, and good as a whole."""
    later, whole = verify(made.root), verify(made.root, everything=True)
    assert (later.difference, whole.difference) == (None, None)
    assert whole.has_folded_records
    return whole


@pytest.mark.long
def test_a_topic_that_began_a_new_life(tmp_path: Path) -> None:
    """Both lives are in the records, told apart by topic id; the first one's sessions were ended by
    the accept.
    """
    made = create_filled_output(tmp_path)
    assert_good(made)
    made.kafka.delete("in-a")
    made.kafka.create("in-a", 3)
    made._sequences.clear()
    made.run()
    accept(made)
    assert_good(made)
    for place in ("in-a/0", "in-a/2"):
        made.send(place, "x", ["a", "n"], 1, 2)
    made.run()
    assert assert_good(made).warnings == []


@pytest.mark.long
def test_a_session_released_by_hand(tmp_path: Path) -> None:
    """State changes without a slice, and the count of those in quarantine with it."""
    made = create_filled_output(tmp_path)
    assert_good(made)
    release_session(made.open(), "y", "looked at", topic="in-b")
    assert_good(made)
    made.send("in-b/0", "y", 9)
    made.run()
    assert_good(made)


@pytest.mark.long
def test_a_topic_retired_and_taken_back(tmp_path: Path) -> None:
    """Nothing of it moves."""
    made = create_filled_output(tmp_path)
    retire(made, "in-b")
    assert_good(made)
    accept(made, "in-b")
    assert_good(made)


def numbered(made: DiskStream, session: str, sequence: int, timestamp: int | None = None) -> None:
    """Send one message with a number of its own; every twentieth is a snapshot."""
    body: dict[str, Any] = {"type": "update", "id": "a", "v": sequence, "seq": sequence}
    if sequence % 20 == 1:
        body = {
            "type": "snapshot",
            "rows": [{"id": "a", "v": 0}, {"id": "b", "v": 1}],
            "seq": sequence,
        }
    made.kafka.produce("in-a", session, json.dumps(body).encode(), partition=0, timestamp=timestamp)


@pytest.mark.long
@pytest.mark.parametrize("tier", ["none", "once", "order", "window", "strict"])
def test_messages_out_of_order_missing_and_again(tmp_path: Path, tier: Any) -> None:
    """In every tier: waiting in windows across slices, dropped, counted or in quarantine."""
    made, dice = DiskStream(tmp_path, tier=tier, window_messages=5), random.Random(tier)
    made.kafka.create("in-a", 1)
    for _ in range(3):
        for session in ("x", "y", "z"):
            numbers = [n for n in range(1, 61) if n % 20 == 1 or dice.random() > 0.03]
            for i in range(1, len(numbers) - 3, 5):
                if dice.random() < 0.5 and not any(n % 20 == 1 for n in numbers[i : i + 3]):
                    numbers[i], numbers[i + 2] = numbers[i + 2], numbers[i]
            for number in numbers:
                numbered(made, session, number)
                if dice.random() < 0.02:
                    numbered(made, session, number)
        made.run(messages_max=37)
        assert_good(made)


@pytest.mark.long
def test_sessions_that_expired(tmp_path: Path) -> None:
    """Their rows are taken back when they are next touched."""
    made = DiskStream(tmp_path, tier="order", session_timeout_hours=1)
    made.kafka.create("in-a", 1)
    for number in range(1, 6):
        numbered(made, "x", number, number)
        numbered(made, "y", number, number)
    made.run(messages_max=4)
    numbered(made, "x", 6, 5 * HOUR_MS)
    numbered(made, "y", 21, 5 * HOUR_MS)
    made.run()
    assert assert_good(made).sessions == 2


@pytest.mark.long
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_run_that_was_killed(tmp_path: Path, point: str) -> None:
    """Killed anywhere: no damage, at most files that nobody names yet; after the next run none are
    left.
    """
    made = create_filled_output(tmp_path)
    made.send("in-a/0", "x", 6, 7, b"?", 8)
    made.send("in-a/1", "y", 6, 7)
    arm(killer(point, 1))
    try:
        made.run(messages_max=3)
    except Killed:
        pass
    finally:
        arm(None)
    assert_good(made)
    made.send("in-a/1", "x", 9)
    made.run()
    done = assert_good(made)
    assert (done.orphans, done.warnings) == (0, [])


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    ["witness", "sign_off", "commits", "paths_readers_see", "digests", "paths", "put_sign_off"],
)
def test_a_run_at_work_meanwhile(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after whatever is read, another run commits, and another verify signs off: no
    alarm.
    """
    made = create_filled_output(tmp_path)

    def run() -> None:
        monkeypatch.undo()
        made.send("in-a/0", "x", 6, 7)
        made.run()
        assert verify(tmp_path).difference is None

    for after in (False, True):
        plain = getattr(FileAudit, call)

        def meanwhile(
            audit: FileAudit, *given: Any, after: bool = after, plain: Any = plain, **options: Any
        ) -> Any:
            found = plain(audit, *given, **options) if after else None
            run()
            return found if after else plain(audit, *given, **options)

        monkeypatch.setattr(FileAudit, call, meanwhile)
        done = verify(tmp_path)
        assert done.difference is None
        assert {warning.next for warning in done.warnings} <= {ORPHAN_OF_RUNNING_RUN}
    assert assert_good(made).warnings == []


def test_a_stream_without_a_message(tmp_path: Path) -> None:
    """A ledger that knows a partition, and nothing else."""
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.run()
    done = assert_good(made)
    assert (done.files, done.records, done.sessions) == (0, 0, 0)
