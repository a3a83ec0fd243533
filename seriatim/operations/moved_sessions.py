"""Moved sessions: sessions that appear in a partition without a snapshot, while they live in
another partition of the same topic.

Only sessions that have no state where they appeared are looked for, and only by name: the state of
all other sessions is not read.

Next: operations/retry.py folds their partitions again with what is found here.
"""

from __future__ import annotations

from collections.abc import Mapping

from seriatim.engine.offsets import Partition
from seriatim.engine.task import PartitionWork, TaskResult
from seriatim.ledger.model import File, Ledger
from seriatim.ports import StateStore

MovedSessions = dict[Partition, dict[str, str]]
"""By the partition where they appeared: the session, and the partition where it lives."""


def find_moved_sessions(
    ledger: Ledger,
    works: Mapping[Partition, PartitionWork],
    results: Mapping[Partition, TaskResult],
    state: StateStore,
    *,
    has_snapshots: bool,
) -> MovedSessions:
    """The sessions without state of a slice that live in another partition, except those that the
    works name already.

    Without snapshots a session may begin in two partitions in one slice. Then it lives in the first
    of them.
    """
    moved: MovedSessions = {}
    for partition, result in results.items():
        sessions = set(result.sessions_without_state) - set(works[partition].moved_sessions)
        if not sessions:
            continue
        for home in _other_partitions_of_topic(ledger, partition):
            living = _find_living_sessions(ledger, results, home, sessions, state)
            if not has_snapshots and home in results and partition < home:
                # The session begins in both partitions, and this one is the first: it stays here.
                living -= set(results[home].sessions_without_state)
            for session in living:
                moved.setdefault(partition, {})[session] = str(home)
            sessions -= living
    return moved


def _other_partitions_of_topic(ledger: Ledger, partition: Partition) -> list[Partition]:
    return [
        candidate
        for candidate in ledger.known_partitions()
        if candidate.topic == partition.topic and candidate != partition
    ]


def _find_living_sessions(
    ledger: Ledger,
    results: Mapping[Partition, TaskResult],
    partition: Partition,
    sessions: set[str],
    state: StateStore,
) -> set[str]:
    """Those of the sessions that have a state in this partition after the slice."""
    files = _state_files_after_slice(ledger, results, partition)
    names = state.find_names(files, sessions)
    living = set()
    for name, session in state.load(files, names).items():
        if session.state_bytes is not None:
            living.add(name)
    return living


def _state_files_after_slice(
    ledger: Ledger, results: Mapping[Partition, TaskResult], partition: Partition
) -> tuple[File, ...]:
    """The state files of a partition as this slice leaves them."""
    result = results.get(partition)
    if result is not None and result.state is not None:
        return result.state
    account = ledger.account(partition)
    return account.state if account is not None else ()
