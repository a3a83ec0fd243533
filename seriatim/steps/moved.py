"""Moved sessions: those that turn up in a partition without a snapshot while they live in another one of their topic.

Only sessions that are strangers where they came are looked for, and only by name: what is kept of all
the others is not read.

Next room: steps/fold.py folds their partitions again, knowing it.
"""

from __future__ import annotations

from collections.abc import Mapping

from seriatim.core.ledger import File, Ledger
from seriatim.core.offsets import Partition
from seriatim.ports import StateStore
from seriatim.steps.task import Result, Work

Moved = dict[Partition, dict[str, str]]
"""By partition where they came: session, and where it lives."""


def moved(
    ledger: Ledger,
    works: Mapping[Partition, Work],
    results: Mapping[Partition, Result],
    state: StateStore,
    *,
    has_snapshots: bool,
) -> Moved:
    """The strangers of a slice that live elsewhere, beyond those its works know already.

    Without snapshots a session may begin in two partitions in one slice: then it lives in the first of them.
    """
    found: Moved = {}
    for partition, result in results.items():
        names = set(result.strangers) - set(works[partition].moved)
        for home in _siblings(ledger, partition) if names else ():
            files = _files(ledger, results, home)
            known = state.load(files, state.holds(files, names))
            living = {name for name, session in known.items() if session.saved is not None}
            if not has_snapshots and home in results and partition < home:
                living -= set(results[home].strangers)
            for name in living:
                found.setdefault(partition, {})[name] = str(home)
            names -= living
    return found


def _siblings(ledger: Ledger, partition: Partition) -> list[Partition]:
    return [other for other in ledger.known() if other.topic == partition.topic and other != partition]


def _files(ledger: Ledger, results: Mapping[Partition, Result], partition: Partition) -> tuple[File, ...]:
    """State files of a partition as this slice leaves them."""
    result, account = results.get(partition), ledger.account(partition)
    if result is not None and result.state is not None:
        return result.state
    return account.state if account is not None else ()
