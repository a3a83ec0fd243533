"""Moved sessions: those that turn up in a partition without a snapshot while they live in another
one of their topic.

Only sessions that are strangers where they came are looked for, and only by name: what is kept of
all the others is not read.

Next room: operations/run.py folds their partitions again, knowing it.
"""

from __future__ import annotations

from collections.abc import Mapping

from seriatim.engine.offsets import Partition
from seriatim.engine.task import PartitionWork, TaskResult
from seriatim.ledger.model import File, Ledger
from seriatim.ports import StateStore

MovedSessions = dict[Partition, dict[str, str]]
"""By partition where they came: session, and where it lives."""


def find_moved_sessions(
    ledger: Ledger,
    works: Mapping[Partition, PartitionWork],
    results: Mapping[Partition, TaskResult],
    state: StateStore,
    *,
    has_snapshots: bool,
) -> MovedSessions:
    """The strangers of a slice that live elsewhere, beyond those its works know already.

    Without snapshots a session may begin in two partitions in one slice: then it lives in the first
    of them.
    """
    found: MovedSessions = {}
    for partition, result in results.items():
        names = set(result.sessions_without_state) - set(works[partition].moved_sessions)
        for home in _siblings(ledger, partition) if names else ():
            files = _state_files_after_slice(ledger, results, home)
            known = state.load(files, state.find_names(files, names))
            living = {name for name, session in known.items() if session.state_bytes is not None}
            if not has_snapshots and home in results and partition < home:
                living -= set(results[home].sessions_without_state)
            for name in living:
                found.setdefault(partition, {})[name] = str(home)
            names -= living
    return found


def _siblings(ledger: Ledger, partition: Partition) -> list[Partition]:
    return [
        other
        for other in ledger.known_partitions()
        if other.topic == partition.topic and other != partition
    ]


def _state_files_after_slice(
    ledger: Ledger, results: Mapping[Partition, TaskResult], partition: Partition
) -> tuple[File, ...]:
    """State files of a partition as this slice leaves them."""
    result, account = results.get(partition), ledger.account(partition)
    if result is not None and result.state is not None:
        return result.state
    return account.state if account is not None else ()
