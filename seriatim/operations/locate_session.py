"""Where a session is: the partitions whose saved state has it. A session that moved to another partition
has state in both.

Next: operations/inspect/session_replay.py, operations/repair/damage.py and operations/status.py choose
among these partitions, each for its purpose.
"""

from __future__ import annotations

from seriatim.engine.files import StateStore
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.model import Ledger


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
