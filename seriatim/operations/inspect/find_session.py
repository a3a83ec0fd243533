"""Finding a session: the partition that has its saved state. Nothing is read from Kafka.

Next: operations/inspect/session_replay.py folds the session again in that partition.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account, Ledger
from seriatim.ports import OpenStream


class SessionLocation(Struct, kw_only=True):
    """The partition of a session, and the session as it was saved there."""

    partition: Partition
    session: Session
    other_partitions: list[Partition] = field(default_factory=list)
    """Partitions of the topic that have state of the session as well."""


def find_session(
    open_stream: OpenStream,
    head: LedgerHead,
    name: str,
    topic: str | None = None,
    partition: Partition | None = None,
) -> SessionLocation:
    """The partition that has the session's state: of several, where its last message came.

    A ConfigError is raised if no partition has it, or if partitions of several topics have it and
    `topic` names none of them. A `partition` that is given is taken, whether it has state or not.
    """
    if partition is not None:
        return _location_in_partition(open_stream, head.ledger, name, partition)
    stream_name = open_stream.stream.name
    sessions: dict[Partition, Session] = {}
    for topic_partition, account in _accounts_of_topic(head.ledger, topic):
        if open_stream.state.find_names(account.state, [name]):
            sessions[topic_partition] = open_stream.state.load(account.state, [name])[name]
    if not sessions:
        in_topic = f" in topic {topic}" if topic else ""
        raise ConfigError(
            f"{stream_name}: there is no session {name!r}{in_topic}",
            next="check the name; a session whose messages never had an effect is found by"
            " --partition TOPIC/NUMBER",
        )
    topics = sorted({session_partition.topic for session_partition in sessions})
    if len(topics) > 1:
        raise ConfigError(
            f"{stream_name}: session {name!r} lives in {', '.join(topics)}",
            next="choose one with --topic",
        )
    # A session that moved has state in two partitions: its messages come to the newer one.
    newest = max(sessions, key=lambda candidate: sessions[candidate].timestamp)
    other_partitions = [candidate for candidate in sessions if candidate != newest]
    return SessionLocation(
        partition=newest, session=sessions[newest], other_partitions=other_partitions
    )


def _location_in_partition(
    open_stream: OpenStream, ledger: Ledger, name: str, partition: Partition
) -> SessionLocation:
    account = ledger.account(partition)
    if account is None:
        partition_names = ", ".join(list(ledger.partitions)[:8])
        raise ConfigError(
            f"{open_stream.stream.name}: it has no partition {partition}",
            next=f"it has {partition_names}",
        )
    session = open_stream.state.load(account.state, [name]).get(name)
    return SessionLocation(partition=partition, session=session or Session())


def _accounts_of_topic(ledger: Ledger, topic: str | None) -> Iterator[tuple[Partition, Account]]:
    """The accounts of a topic's partitions; of all topics if it is None."""
    for partition_name, account in ledger.partitions.items():
        partition = Partition.parse(partition_name)
        if topic is None or topic == partition.topic:
            yield partition, account
