"""Retire: a person's decision that a topic, or one partition of it, is over.

Its state is kept and shown apart; discovery neither reads nor judges it any more, whatever Kafka
has under that name, until `seriatim accept` takes it back.

Next room: operations/slicing.py leaves retired ones out; operations/accept.py is the way back.
"""

from __future__ import annotations

from msgspec import Struct, field

from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.commit import commit
from seriatim.ledger.model import Account, Change
from seriatim.operations.accept import (
    decision_entry,
    find_named_partitions,
    refuse_held,
    require_head,
    unknown_topic_error,
)
from seriatim.operations.slicing import Bounds
from seriatim.ports import Clock, LedgerStore, Log


class RetiredPartition(Struct, kw_only=True):
    """What is known of a partition that is over."""

    partition: Partition
    topic_id: str
    frontier: int
    unread_messages: int
    """Messages, as far as is known, that are not read any more."""
    halt_finding: str = ""
    """The finding at which it waited."""


class RetireDecision(Struct, kw_only=True):
    """What was decided, or would be."""

    topic: str
    reason: str
    partitions: list[RetiredPartition] = field(default_factory=list)
    sequence: int = -1
    """The entry that says so; -1: none was made."""


def retire_topic(
    store: LedgerStore,
    log: Log,
    clock: Clock,
    stream: str,
    topics: str,
    name: str,
    attempt: str,
    reason: str,
    *,
    dry_run: bool = False,
) -> RetireDecision:
    """Retire a topic, or one partition of it (`topic/number`). Fenced, if a run moved its frontier
    meanwhile.
    """
    head = require_head(store, stream)
    ledger = head.ledger
    topic, partitions = find_named_partitions(ledger, name)
    if not partitions:
        raise unknown_topic_error(ledger, name)
    accounts = {partition: ledger.partitions[str(partition)] for partition in partitions}
    live = {partition: account for partition, account in accounts.items() if not account.retired}
    if not live:
        raise ConfigError(
            f"{stream}: {name} is retired already",
            next=f'seriatim accept {stream} {name} --because "…" takes it back',
        )
    refuse_held(ledger, list(live))
    bounds = log.bounds(topics)
    decision = RetireDecision(topic=topic, reason=reason)
    decision.partitions = [
        _retired_partition(partition, account, bounds.get(partition))
        for partition, account in live.items()
    ]
    if not dry_run:
        changes = [_unmoved_change(partition, account) for partition, account in live.items()]
        decision.sequence = commit(
            store, clock, head, decision_entry("retire", attempt, changes, reason)
        )[1].sequence
    return decision


def _retired_partition(
    partition: Partition, account: Account, bounds: Bounds | None
) -> RetiredPartition:
    end = (
        bounds.log_end
        if bounds is not None and bounds.topic_id == account.topic_id
        else account.log_end
    )
    return RetiredPartition(
        partition=partition,
        topic_id=account.topic_id,
        frontier=account.frontier,
        unread_messages=max(0, end - account.frontier),
        halt_finding=account.halt.finding if account.halt else "",
    )


def _unmoved_change(partition: Partition, account: Account) -> Change:
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
    )
