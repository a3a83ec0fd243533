"""Retire: a person's decision that a topic, or one partition of it, is over.

Its state is kept and shown apart; discovery neither reads nor judges it any more, whatever Kafka has under
that name, until `seriatim accept` takes it back.

Next room: core/slice.py leaves retired ones out; steps/accept.py is the way back.
"""

from __future__ import annotations

from msgspec import Struct, field

from seriatim.core.errors import ConfigError
from seriatim.core.ledger import Account, Change
from seriatim.core.offsets import Partition
from seriatim.core.slice import Bounds
from seriatim.ports import Clock, LedgerStore, Log
from seriatim.steps.accept import chosen, decision_entry, known_head, refuse_held, refuse_unknown
from seriatim.steps.commit import commit


class Over(Struct, kw_only=True):
    """What is known of a partition that is over."""

    partition: Partition
    topic_id: str
    frontier: int
    unread: int
    """Messages, as far as is known, that are not read any more."""
    waits: str = ""
    """The finding at which it waited."""


class Retired(Struct, kw_only=True):
    """What was decided, or would be."""

    topic: str
    reason: str
    partitions: list[Over] = field(default_factory=list)
    sequence: int = -1
    """The entry that says so; -1: none was made."""


def retire(
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
) -> Retired:
    """Retire a topic, or one partition of it (`topic/number`). Fenced, if a run moved its frontier meanwhile."""
    head = known_head(store, stream)
    ledger = head.ledger
    topic, partitions = chosen(ledger, name)
    if not partitions:
        raise refuse_unknown(ledger, name)
    accounts = {partition: ledger.partitions[str(partition)] for partition in partitions}
    live = {partition: account for partition, account in accounts.items() if not account.retired}
    if not live:
        raise ConfigError(
            f"{stream}: {name} is retired already",
            next=f'seriatim accept {stream} {name} --because "…" takes it back',
        )
    refuse_held(ledger, list(live))
    bounds = log.bounds(topics)
    decision = Retired(topic=topic, reason=reason)
    decision.partitions = [_over(partition, account, bounds.get(partition)) for partition, account in live.items()]
    if not dry_run:
        changes = [_change(partition, account) for partition, account in live.items()]
        decision.sequence = commit(store, clock, head, decision_entry("retire", attempt, changes, reason))[1].sequence
    return decision


def _over(partition: Partition, account: Account, seen: Bounds | None) -> Over:
    end = seen.log_end if seen is not None and seen.topic_id == account.topic_id else account.log_end
    return Over(
        partition=partition,
        topic_id=account.topic_id,
        frontier=account.frontier,
        unread=max(0, end - account.frontier),
        waits=account.halt.finding if account.halt else "",
    )


def _change(partition: Partition, account: Account) -> Change:
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        born=account.born,
    )
