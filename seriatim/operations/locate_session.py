"""Where a session is: the partitions whose saved state has it. A session that moved to another partition
has state in both.

Next: operations/inspect/session_replay.py and operations/status.py take the one where its newest message
came; operations/repair/damage.py chooses for its own purpose.
"""

from __future__ import annotations

from collections.abc import Mapping

from seriatim.engine.files import StateStore
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.ledger.model import Ledger


def split_off_newest(
    sessions: Mapping[Partition, Session],
) -> tuple[Partition, dict[Partition, Session]]:
    """Of the partitions that have a session, the one where its last message came; and the others.

    A session that moved has state in two partitions: its messages come to the newer one.
    """
    newest = max(sessions, key=lambda partition: sessions[partition].timestamp)
    other_sessions = {
        partition: session for partition, session in sessions.items() if partition != newest
    }
    return newest, other_sessions


def locate_session(
    state: StateStore,
    ledger: Ledger,
    name: str,
    topic: str | None = None,
    *,
    further_advice: str = "",
) -> list[Partition]:
    """The partitions that have state of a session. A session that none of them has is refused;
    `further_advice` is what else the caller's command can do then.
    """
    partitions = []
    for partition in ledger.known_partitions():
        if topic not in (None, partition.topic):
            continue
        if state.find_names(ledger.partitions[str(partition)].state, [name]):
            partitions.append(partition)
    if partitions:
        return partitions
    in_topic = f" in topic {topic}" if topic else ""
    raise ConfigError(
        f"{ledger.stream}: there is no session {name!r}{in_topic} at entry {ledger.sequence}",
        next=f"check the name; `seriatim status {ledger.stream}` shows the topics and the sessions in"
        f" quarantine{further_advice}",
    )
