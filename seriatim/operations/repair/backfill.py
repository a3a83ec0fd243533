"""Backfill: the range that a person asks for, as offsets or times, becomes ranges of offsets.

Only what was folded can be folded again: a range is cut to what the ledger has, and a range of
which nothing is left is refused.

Next: operations/run_request.py checks what a person writes; operations/repair/damage.py plans and
applies.
"""

from __future__ import annotations

from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.model import Ledger
from seriatim.operations.rewind import END_OFFSET
from seriatim.operations.run_request import RangeEdge, RunRequest
from seriatim.ports import Log

PARTITIONS_SHOWN_MAX = 10
TOPICS_SHOWN_MAX = 20


def backfill_ranges(request: RunRequest, ledger: Ledger, log: Log) -> dict[str, tuple[int, int]]:
    """The offsets that are folded again, by partition.

    Topics and partitions that were never read or are retired are refused, and so is a range of
    which nothing was folded yet.
    """
    _refuse_unknown(request, ledger)
    partitions = _partitions_of_request(request, ledger)
    if not partitions:
        raise _all_retired_error(request, ledger)
    starts = _edge_offsets(request.start, partitions, log)
    ends = _edge_offsets(request.until, partitions, log)
    ranges: dict[str, tuple[int, int]] = {}
    for partition in partitions:
        account = ledger.partitions[str(partition)]
        start = max(account.initial_frontier, starts.get(partition, account.initial_frontier))
        until = min(account.frontier, ends.get(partition, account.frontier))
        if start < until:
            ranges[str(partition)] = (start, until)
    if not ranges:
        raise ConfigError(
            f"{ledger.stream}: nothing of this was folded yet, so there is nothing to fold again",
            folded=_describe_folded_ranges(ledger, partitions),
            next="choose a range within what was folded;"
            f" `seriatim run {ledger.stream}` folds what is new",
        )
    return ranges


def _partitions_of_request(request: RunRequest, ledger: Ledger) -> list[Partition]:
    """The partitions that a request is about, without retired ones."""
    return [
        partition
        for partition in ledger.known_partitions()
        if request.includes(partition) and not ledger.partitions[str(partition)].retired
    ]


def _all_retired_error(request: RunRequest, ledger: Ledger) -> ConfigError:
    """The error for a request of which every partition is retired."""
    retired_partitions = [p for p in ledger.known_partitions() if request.includes(p)]
    if not retired_partitions:
        return ConfigError(
            f"{ledger.stream}: nothing was folded yet, so there is nothing to fold again",
            next=f"seriatim run {ledger.stream}",
        )
    names = [str(partition) for partition in retired_partitions]
    if not request.partitions:
        names = sorted({partition.topic for partition in retired_partitions})
    verb = "is" if len(names) == 1 else "are"
    return ConfigError(
        f"{ledger.stream}: {', '.join(names[:PARTITIONS_SHOWN_MAX])} {verb} retired, and what is"
        " retired is not folded again",
        next=f'take it back first: seriatim accept {ledger.stream} {names[0]} --because "…"',
    )


def _refuse_unknown(request: RunRequest, ledger: Ledger) -> None:
    """Refuse topics and partitions that were never read."""
    known_partitions = set(ledger.known_partitions())
    known_topics = {partition.topic for partition in known_partitions}
    unknown_topics = sorted(set(request.topics) - known_topics)
    unknown_partitions = sorted(set(request.partitions) - known_partitions)
    unknown_names = [*unknown_topics, *map(str, unknown_partitions)]
    if unknown_names:
        raise ConfigError(
            f"{ledger.stream}: {unknown_names[0]} was never read",
            known=", ".join(sorted(known_topics)[:TOPICS_SHOWN_MAX]),
            next=f"name topics or partitions that `seriatim status {ledger.stream}` lists",
        )


def _edge_offsets(
    edge: RangeEdge | None, partitions: list[Partition], log: Log
) -> dict[Partition, int]:
    """The edge of a range as an offset in each partition; empty if the edge is open.

    A time that is later than all messages is the offset after the last of them.
    """
    if edge is None:
        return {}
    if edge.offset is not None:
        return dict.fromkeys(partitions, edge.offset)
    log_offsets = log.offsets_for_time(partitions, edge.time_ms or 0)
    offsets: dict[Partition, int] = {}
    for partition in partitions:
        offset = log_offsets.get(partition, -1)
        offsets[partition] = END_OFFSET if offset < 0 else offset
    return offsets


def _describe_folded_ranges(ledger: Ledger, partitions: list[Partition]) -> str:
    descriptions: list[str] = []
    for partition in partitions[:PARTITIONS_SHOWN_MAX]:
        account = ledger.partitions[str(partition)]
        descriptions.append(f"{partition} [{account.initial_frontier}, {account.frontier})")
    return ", ".join(descriptions)
