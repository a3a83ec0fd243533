"""Two runs at once: one wins, the other is refused or finds nothing left; the output is right."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from seriatim.ledger.delta_store import DeltaLedger
from tests.integration.lab import Lab
from tests.integration.test_slices import tables


def test_two_runs_at_once(lab: Lab, topic: Callable[..., str], full: bool) -> None:
    """Started at random distances, both end with 0 or 5, and the output is that of one."""
    name = topic(2)
    chance = random.Random(7)
    lab.send(tables({name: 2}, 20, 4000))
    one = lab.stream("one", name)
    lab.fold(one)
    for number in range(20 if full else 3):
        stream = lab.stream(f"race{number}", name)
        first = lab.start("run", stream, "--messages-max", "1000")
        time.sleep(chance.uniform(0, 4))
        second = lab.start("run", stream, "--messages-max", "1000")
        ends = [process.communicate(timeout=900)[1] for process in (first, second)]
        codes = {first.returncode, second.returncode}

        assert codes <= {0, 5}, ends
        assert all("Traceback" not in text for text in ends)
        if 0 not in codes:
            lab.fold(stream)
        assert lab.digest(stream) == lab.digest(one)


def test_a_zombie_is_refused(lab: Lab, topic: Callable[..., str]) -> None:
    """A driver stopped before its commit, overtaken by a second run, then continued: refused, no
    harm.
    """
    name = topic(1)
    lab.send(tables({name: 1}, 20, 3000))
    stream, one = lab.stream("zombie", name), lab.stream("one", name)
    lab.fold(one)
    zombie = lab.start("run", stream, "--messages-max", "1500")
    store = lab.store(stream)
    while zombie.poll() is None and not list(store.keys(f"records/{name}/0/")):
        time.sleep(0.005)
    family = [psutil.Process(zombie.pid), *psutil.Process(zombie.pid).children(recursive=True)]
    for process in family:
        os.kill(process.pid, signal.SIGSTOP)
    at_stop = lab.ledger(stream).sequence

    lab.fold(stream)
    for process in family:
        os.kill(process.pid, signal.SIGCONT)
    _, errors = zombie.communicate(timeout=900)

    assert at_stop == 0
    assert zombie.returncode in (0, 5), errors
    assert "Traceback" not in errors
    assert lab.digest(stream) == lab.digest(one)


def test_a_lost_answer_is_no_second_commit(
    lab: Lab, topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that happened but was answered by an error is recognised as our own."""
    from seriatim.ports import CommitConflictError

    name = topic(1)
    lab.send(tables({name: 1}, 5, 500))
    stream = lab.stream("lost", name)
    real = DeltaLedger.compare_and_set

    def dropped(self: DeltaLedger, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        raise CommitConflictError("the answer was lost")

    # Undone alone: the variables of a bucket are the same fixture's.
    with monkeypatch.context() as patch:
        patch.setattr(DeltaLedger, "compare_and_set", dropped)
        outcome = lab.fold(stream, messages_max=200)

    assert outcome.messages == 500
    assert lab.ledger(stream).sequence == outcome.slices
    assert len({(row["offset"], row["index"]) for row in lab.records(stream)}) == len(
        lab.records(stream)
    )
