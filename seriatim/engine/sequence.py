"""Sequences: what a producer's own counter says about the messages before it. Pure rules on one
session.

Sequences passed over are remembered (the last few), so that one that comes late is told from one
that comes twice. A snapshot begins the count anew.

Next room: fold.py asks at every jump; window.py waits for late ones.
"""

from __future__ import annotations

from hashlib import blake2b

from seriatim.engine.session import Session

MISSING_RANGES_MAX = 64
"""Stretches of missing sequences remembered per session; later than that, a late message looks like
a repeat.
"""


def sequence_finding(session: Session, sequence: int) -> str:
    """What a sequence is that does not follow the session's last one."""
    last = session.sequence if session.sequence is not None else sequence - 1
    if sequence > last:
        return "sequence gap"
    if is_missing_sequence(session, sequence):
        return "disorder"
    anchor = session.snapshot_sequence if session.snapshot_sequence is not None else last
    return "repeat" if sequence >= anchor else "disorder"


def is_missing_sequence(session: Session, sequence: int) -> bool:
    """Whether a sequence was passed over."""
    return any(start <= sequence < end for start, end in session.missing_sequences)


def add_missing_sequences(session: Session, sequence: int) -> None:
    """Remember that everything between the last sequence and this one is missing."""
    if session.sequence is not None:
        session.missing_sequences = [*session.missing_sequences, (session.sequence + 1, sequence)][
            -MISSING_RANGES_MAX:
        ]


def remove_missing_sequence(session: Session, sequence: int) -> None:
    """Take one sequence off the missing ones."""
    left: list[tuple[int, int]] = []
    for start, end in session.missing_sequences:
        if start <= sequence < end:
            left += [(a, b) for a, b in ((start, sequence), (sequence + 1, end)) if a < b]
        else:
            left.append((start, end))
    session.missing_sequences = left


def fingerprint(value: bytes | None) -> bytes:
    """Eight bytes that tell two snapshots apart."""
    return blake2b(value or b"", digest_size=8).digest()


def is_same_snapshot(session: Session, sequence: int | None, value: bytes | None) -> bool:
    """Whether a snapshot is the one the session last began with, sent again before anything
    followed it.

    Later it could as well be a producer's new life that begins like the old one.
    """
    same = sequence is not None and sequence == session.snapshot_sequence == session.sequence
    return same and fingerprint(value) == session.snapshot_fingerprint
