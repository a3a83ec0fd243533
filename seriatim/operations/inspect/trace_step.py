"""A step: what one message of a session did, as a trace tells it. Values only.

Next room: trace.py makes steps; cli/trace.py shows them.
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
"""What an expression may ask of a message before it is folded."""
NAMES_AFTER_FOLD = ("records", "findings", "after", "outcome")
"""What only its folding tells."""


class TraceFinding(Struct, frozen=True, omit_defaults=True):
    """A finding at one message, as a trace tells it."""

    finding: str
    level: str
    """error, warning, or counted: the tier does no more about it."""
    cause: str = ""


class TraceStep(Struct, kw_only=True):
    """One message of a session, and what it did."""

    offset: int
    timestamp: int
    session: str
    sequence: int | None
    message: Any
    """As the machine takes it; `Poison` if it cannot be decoded."""
    raw: bytes | None
    outcome: str
    """applied; ended, applied; waits; dropped; headless; set aside; skipped; halts."""
    before: Any
    """The machine's state; None: there is none."""
    after: Any
    records: list[dict[str, Any]] = field(default_factory=list)
    findings: list[TraceFinding] = field(default_factory=list)
    damaged: bool = False
    """After it, as the next."""
    quarantined: bool = False
    was_damaged: bool = False
    was_quarantined: bool = False
    ended: bool = False


def expression_names_after(runner: Runner, step: TraceStep) -> dict[str, Any]:
    """What an expression may ask of a message once it is folded. What it could ask before means the
    same.
    """
    return {
        "offset": step.offset,
        "time": step.timestamp,
        "session": step.session,
        "sequence": step.sequence,
        "message": view_of_message(runner, step.message, step.raw),
        "state": view_of_state(runner, step.before),
        "after": view_of_state(runner, step.after),
        "records": step.records,
        "findings": [one.finding for one in step.findings],
        "outcome": step.outcome,
        "damaged": step.was_damaged,
        "quarantined": step.was_quarantined,
    }
