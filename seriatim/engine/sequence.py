"""Sequences: what the producer's own counter says about missing, late and repeated messages. Pure
rules on one session.

A session remembers the last ranges of sequences that were passed over. That is how a message that
comes late is distinguished from one that comes twice. A snapshot begins the count anew.

Next: engine/fold.py asks whenever a sequence does not follow; engine/window.py waits for late
messages.
"""

from __future__ import annotations

from hashlib import blake2b

from seriatim.engine.session import Session

MISSING_RANGES_MAX = 64
"""Ranges of missing sequences that a session remembers. A late message of an older range looks like
a repeat.
"""


def sequence_finding(session: Session, sequence: int) -> str:
    """The finding for a sequence that does not follow the session's last one."""
    if session.sequence is None or sequence > session.sequence:
        return "sequence gap"
    if is_missing_sequence(session, sequence):
        return "disorder"
    # What is below the last snapshot was sent before the session began: it cannot be a repeat.
    first_sequence = session.snapshot_sequence
    if first_sequence is None:
        first_sequence = session.sequence
    return "repeat" if sequence >= first_sequence else "disorder"


def is_missing_sequence(session: Session, sequence: int) -> bool:
    """Whether a sequence was passed over."""
    return any(start <= sequence < end for start, end in session.missing_sequences)


def add_missing_sequences(session: Session, sequence: int) -> None:
    """Remember that everything between the last sequence and this one is missing."""
    if session.sequence is None:
        return
    missing_range = (session.sequence + 1, sequence)
    ranges = [*session.missing_sequences, missing_range]
    session.missing_sequences = ranges[-MISSING_RANGES_MAX:]


def remove_missing_sequence(session: Session, sequence: int) -> None:
    """Take one sequence off the missing ones."""
    ranges: list[tuple[int, int]] = []
    for start, end in session.missing_sequences:
        if not start <= sequence < end:
            ranges.append((start, end))
            continue
        if start < sequence:
            ranges.append((start, sequence))
        if sequence + 1 < end:
            ranges.append((sequence + 1, end))
    session.missing_sequences = ranges


def fingerprint(value: bytes | None) -> bytes:
    """Eight bytes by which two snapshots can be compared."""
    return blake2b(value or b"", digest_size=8).digest()


def is_same_snapshot(session: Session, sequence: int | None, value: bytes | None) -> bool:
    """Whether a snapshot is the one that the session last began with, sent again before any other
    message followed it.

    Once another message has followed, the same snapshot may as well be a producer that begins anew.
    """
    if sequence is None or session.sequence != sequence or session.snapshot_sequence != sequence:
        return False
    return fingerprint(value) == session.snapshot_fingerprint
