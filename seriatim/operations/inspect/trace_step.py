"""Trace steps: what one message of a session did. Values only.

Next: operations/inspect/tracing.py makes steps; cli/lookback.py shows them.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from seriatim.engine.machine import Runner
from seriatim.operations.inspect.views import view_of_message, view_of_state

NAMES_BEFORE_FOLD = (
    "offset",
    "time",
    "session",
    "sequence",
    "message",
    "state",
    "damaged",
    "quarantined",
)
"""The names that a condition about a message has before the message is folded."""
NAMES_AFTER_FOLD = ("records", "findings", "after", "outcome")
"""The names that it has only after the message is folded."""


class TraceFinding(Struct, frozen=True, omit_defaults=True):
    """A finding at one message."""

    finding: str
    level: str
    """error, warning, or counted: the tier only counts it."""
    cause: str = ""


class TraceStep(Struct, kw_only=True):
    """One message of a session, and what it did to the session."""

    offset: int
    timestamp: int
    session: str
    sequence: int | None
    message: Any
    """The message as the machine takes it; `Poison` if it cannot be decoded."""
    raw: bytes | None
    outcome: str
    """applied; ended, applied; waits; dropped; headless; set aside; skipped; halts."""
    before: Any
    """The machine's state before the message; None: there was none."""
    after: Any
    records: list[dict[str, Any]] = field(default_factory=list)
    findings: list[TraceFinding] = field(default_factory=list)
    damaged: bool = False
    """Whether the session is damaged after the message."""
    quarantined: bool = False
    """Whether the session is in quarantine after the message."""
    was_damaged: bool = False
    was_quarantined: bool = False
    ended: bool = False


def condition_names_after(runner: Runner, step: TraceStep) -> dict[str, Any]:
    """The names of a condition about a message that is folded.

    Names that exist before folding as well have the same values here: `state` is the state before
    the message, and `damaged` and `quarantined` say how the session was before it.
    """
    finding_kinds = [finding.finding for finding in step.findings]
    return {
        "offset": step.offset,
        "time": step.timestamp,
        "session": step.session,
        "sequence": step.sequence,
        "message": view_of_message(runner, step.message, step.raw),
        "state": view_of_state(runner, step.before),
        "after": view_of_state(runner, step.after),
        "records": step.records,
        "findings": finding_kinds,
        "outcome": step.outcome,
        "damaged": step.was_damaged,
        "quarantined": step.was_quarantined,
    }
