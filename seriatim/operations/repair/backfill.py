"""Backfill: a person's range, as offsets or times, turned into what is folded again.

Only what was folded can be folded again: a range is cut to what the ledger has, and an empty one
says so.

Next room: airflow/run_request.py checks what a person writes; operations/repair/repair.py plans and
applies.
"""

from __future__ import annotations

from seriatim.airflow.run_request import RangeEdge, RunRequest
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.model import Account, Ledger
from seriatim.ports import Log


def backfill_ranges(request: RunRequest, ledger: Ledger, log: Log) -> dict[str, tuple[int, int]]:
    """What is folded again, by partition."""
    chosen = [
        p
        for p in ledger.known_partitions()
        if request.includes(p) and not ledger.partitions[str(p)].retired
    ]
    _refuse_unknown(request, ledger)
    starts, ends = (
        _edge_offsets(request.start, chosen, log),
        _edge_offsets(request.until, chosen, log),
    )
    found = {}
    for partition in chosen:
        account = ledger.partitions[str(partition)]
        start, until = _clip_to_folded(account, starts.get(partition), ends.get(partition))
        if start < until:
            found[str(partition)] = (start, until)
    if not found:
        raise ConfigError(
            f"{ledger.stream}: nothing of this was folded yet, so there is nothing to fold again",
            folded=_describe_folded_ranges(ledger, chosen),
            next=f"choose a range within these; `seriatim run {ledger.stream}` folds what is new",
        )
    return found


def _refuse_unknown(request: RunRequest, ledger: Ledger) -> None:
    known = set(ledger.known_partitions())
    topics = {partition.topic for partition in known}
    for name in [
        *sorted(set(request.topics) - topics),
        *map(str, sorted(set(request.partitions) - known)),
    ]:
        raise ConfigError(
            f"{ledger.stream}: {name} was never read",
            known=", ".join(sorted(topics)[:20]),
            next=f"name topics or partitions that `seriatim status {ledger.stream}` lists",
        )


def _edge_offsets(
    edge: RangeEdge | None, partitions: list[Partition], log: Log
) -> dict[Partition, int]:
    """An edge in each partition. A time later than all messages is after the last of them."""
    if edge is None:
        return {}
    if edge.offset is not None:
        return dict.fromkeys(partitions, edge.offset)
    found = log.offsets_for_time(partitions, edge.time_ms or 0)
    return {p: AFTER_LAST_OFFSET if found.get(p, -1) < 0 else found[p] for p in partitions}


AFTER_LAST_OFFSET = 1 << 62


def _clip_to_folded(account: Account, start: int | None, until: int | None) -> tuple[int, int]:
    begin = account.initial_frontier if start is None else max(account.initial_frontier, start)
    return begin, account.frontier if until is None else min(account.frontier, until)


def _describe_folded_ranges(ledger: Ledger, partitions: list[Partition]) -> str:
    places = [(p, ledger.partitions[str(p)]) for p in partitions[:10]]
    return ", ".join(
        f"{p} [{account.initial_frontier}, {account.frontier})" for p, account in places
    )
