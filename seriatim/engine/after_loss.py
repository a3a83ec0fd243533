"""Doubt after a loss: which sessions may have lost messages. Pure rules on one session.

When lost messages are passed over, the frontier goes on at `headless_since`. A session last met
before that offset may have lost some of its messages, so its next message decides:
- A snapshot begins the session anew.
- A sequence that follows the last one proves that no lost message was of this session.
- With any other message the session is headless until its next snapshot.
No table is scanned for this: a session without a further message is never judged.

Next: engine/fold.py asks when a session becomes active; operations/repair/forward.py moves the
frontier over a loss.
"""

from __future__ import annotations

from seriatim.engine.findings import Tier, tier_action
from seriatim.engine.session import Session


def tier_doubts_after_loss(tier: Tier) -> bool:
    """Whether a tier doubts its sessions after a loss. These are the tiers that quarantine a session
    when a sequence is missing.
    """
    return tier_action("sequence gap", tier) == "halt"


def is_in_doubt(session: Session, headless_since: int) -> bool:
    """Whether a session has a state and may have lost messages after its last message."""
    last_certain_offset = max(session.last_offset, session.snapshot_offset)
    return session.has_state and last_certain_offset < headless_since


def needs_snapshot(session: Session, headless_since: int) -> bool:
    """Whether a session in doubt had a headless message already. From then on only a snapshot helps."""
    return session.damaged_since_offset >= headless_since


def sequence_proves_no_loss(session: Session, sequence: int | None, headless_since: int) -> bool:
    """Whether the sequence of a message proves that a session in doubt lost nothing."""
    if sequence is None or session.sequence is None:
        return False
    if needs_snapshot(session, headless_since):
        return False
    return sequence == session.sequence + 1
