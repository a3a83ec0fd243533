"""Find: in which partition a session lives. By its saved state; nothing is read from Kafka.

Next room: operations/inspect/session_replay.py goes its way there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.ledger.model import Account
from seriatim.operations.inspect.session_replay import ReplayContext
from seriatim.ports import LedgerHead


class SessionLocation(Struct, kw_only=True):
    """Where a session lives."""

    partition: Partition
    session: Session
    other_partitions: list[Partition] = field(default_factory=list)


def find_session(
    context: ReplayContext,
    head: LedgerHead,
    name: str,
    topic: str | None = None,
    partition: Partition | None = None,
) -> SessionLocation:
    """The partition in which a session lives: the one where it was last met, of one topic."""
    ledger, stream = head.ledger, context.stream.name
    if partition is not None:
        account = ledger.account(partition)
        if account is None:
            known = ", ".join(list(ledger.partitions)[:8])
            raise ConfigError(f"{stream}: it has no partition {partition}", next=f"it has {known}")
        return SessionLocation(
            partition=partition,
            session=context.state.load(account.state, [name]).get(name) or Session(),
        )
    found: list[tuple[Partition, Session]] = []
    for place, account in _accounts_of_topic(ledger.partitions.items(), topic):
        if context.state.find_names(account.state, [name]):
            found.append((place, context.state.load(account.state, [name])[name]))
    if not found:
        raise ConfigError(
            f"{stream}: there is no session {name!r}{f' in topic {topic}' if topic else ''}",
            next="check the name; a session whose messages never had an effect is found by --partition TOPIC/NUMBER",
        )
    topics = sorted({place.topic for place, _ in found})
    if len(topics) > 1:
        raise ConfigError(
            f"{stream}: session {name!r} lives in {', '.join(topics)}",
            next="choose one with --topic",
        )
    place, session = max(found, key=lambda one: one[1].timestamp)
    return SessionLocation(
        partition=place,
        session=session,
        other_partitions=[other for other, _ in found if other != place],
    )


def _accounts_of_topic(
    accounts: Iterable[tuple[str, Account]], topic: str | None
) -> Iterator[tuple[Partition, Account]]:
    for text, account in accounts:
        place = Partition.parse(text)
        if topic in (None, place.topic):
            yield place, account
