"""Doubt: after lost messages were passed over, whose were they? Pure rules on one session.

The frontier went on behind them at `headless_since`. A session last met before that offset may have
lost some, so its next message decides: a snapshot begins it anew; a sequence that follows its last
one proves that none was its own; with any other it is headless until its next snapshot. Nothing is
scanned for it: who is never met is never judged.

Next room: judge.py asks when it wakes a session; repair_forward.py moves the frontier over a loss.
"""

from __future__ import annotations

from seriatim.engine.findings import Tier, tier_action
from seriatim.engine.session import Session


def tier_doubts_after_loss(tier: Tier) -> bool:
    """Whether a tier doubts its sessions: those that set them aside when a sequence is missing. A
    window waits.
    """
    return tier_action("sequence gap", tier) == "halt"


def is_in_doubt(session: Session, headless_since: int) -> bool:
    """Whether a session has a state, and may have lost messages since it was last met or began
    anew.
    """
    known = session.state_bytes is not None or session.state is not None
    return known and max(session.last_offset, session.snapshot_offset) < headless_since


def needs_snapshot(session: Session, headless_since: int) -> bool:
    """Whether a message of a session in doubt was set aside already: only a snapshot helps it now."""
    return session.damaged_since_offset >= headless_since


def sequence_proves_no_loss(session: Session, sequence: int | None, headless_since: int) -> bool:
    """Whether its sequence proves that a session in doubt lost nothing."""
    if sequence is None or session.sequence is None or needs_snapshot(session, headless_since):
        return False
    return sequence == session.sequence + 1
