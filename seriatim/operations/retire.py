"""Retire: a person decides that a topic, or one partition of it, is over.

Its state is kept and shown apart. Discovery neither reads nor judges it any more, whatever Kafka has
under that name, until `seriatim accept` takes it back.

Next: operations/plan.py leaves retired partitions out; operations/accept.py takes them back.
"""

from __future__ import annotations

from msgspec import Struct, field

from seriatim import __version__
from seriatim.engine.offsets import Bounds, Partition
from seriatim.errors import ConfigError
from seriatim.ledger.commit import commit, require_head
from seriatim.ledger.entries import RetireEntry
from seriatim.ledger.model import Account, Ledger, unmoved_change
from seriatim.operations.accept import (
    find_named_partitions,
    refuse_held,
    unknown_topic_error,
)
from seriatim.ports import Clock, LedgerStore, Log


class RetiredPartition(Struct, kw_only=True):
    """What is known about a partition that was retired."""

    partition: Partition
    topic_id: str
    frontier: int
    unread_messages: int
    """Messages that will not be read any more, as far as is known."""
    halt_finding: str = ""
    """The finding that had halted it; empty if it was not halted."""


class RetireDecision(Struct, kw_only=True):
    """What was decided; after a dry run, what would be decided."""

    topic: str
    reason: str
    partitions: list[RetiredPartition] = field(default_factory=list)
    sequence: int = -1
    """The entry of the decision; -1 if nothing was committed."""


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
    """Retire a topic, or one partition of it (`topic/number`). A FencedError is raised if a run
    moved its frontier meanwhile.
    """
    head = require_head(store, stream)
    ledger = head.ledger
    topic, live_accounts = _find_live_accounts(ledger, name)
    refuse_held(ledger, list(live_accounts))
    bounds = log.bounds(topics)
    decision = RetireDecision(topic=topic, reason=reason)
    changes = []
    for partition, account in live_accounts.items():
        decision.partitions.append(_retired_partition(partition, account, bounds.get(partition)))
        changes.append(unmoved_change(partition, account))
    if not dry_run:
        entry = RetireEntry(
            attempt=attempt,
            product_version=__version__,
            changes=tuple(changes),
            reason=reason,
        )
        _, committed = commit(store, clock, head, entry)
        decision.sequence = committed.sequence
    return decision


def _find_live_accounts(ledger: Ledger, name: str) -> tuple[str, dict[Partition, Account]]:
    """The topic that a person names, and its accounts that are not retired yet. Refused if nothing of
    that name was ever read, or if all of it is retired.
    """
    topic, partitions = find_named_partitions(ledger, name)
    if not partitions:
        raise unknown_topic_error(ledger, name)
    live_accounts = {}
    for partition in partitions:
        account = ledger.partitions[str(partition)]
        if not account.retired:
            live_accounts[partition] = account
    if not live_accounts:
        raise ConfigError(
            f"{ledger.stream}: {name} is retired already",
            next=f'seriatim accept {ledger.stream} {name} --because "…" takes it back',
        )
    return topic, live_accounts


def _retired_partition(
    partition: Partition, account: Account, bounds: Bounds | None
) -> RetiredPartition:
    log_end = account.log_end
    if bounds is not None and bounds.topic_id == account.topic_id:
        log_end = bounds.log_end
    return RetiredPartition(
        partition=partition,
        topic_id=account.topic_id,
        frontier=account.frontier,
        unread_messages=max(0, log_end - account.frontier),
        halt_finding=account.halt.finding if account.halt else "",
    )
