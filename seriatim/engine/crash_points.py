"""Crash points: named places where a test may end the world. No-ops unless armed.

The product calls `crash_point("manifest-written")`; a test arms one name. Real processes kill
themselves there (config.py reads which), the simulator raises. What must be survived at each
is in docs/ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable

from seriatim.errors import ensure

CRASH_POINTS = (
    "ledger-read",
    "table-created",
    "plan-made",
    "first-fetch",
    "mid-fetch",
    "state-loaded",
    "mid-fold",
    "record-file-open",
    "record-file-half",
    "record-file-written",
    "state-file-written",
    "slice-folded",
    "manifest-written",
    "committed",
    "witness-written",
    "swept",
    "derived-half",
    "derived",
)
REPAIR_POINTS = ("held", "stage-folded", "refolded")
"""Those of repair and backfill, which runs do not pass."""
COMPACT_POINTS = ("compact-intended", "compact-written", "compact-committed", "sweep-half")
"""Those of compact, which runs do not pass."""
PUBLISH_POINTS = ("current-half", "current-written", "current-published")
"""Those of publish, which runs do not pass."""
OUTPUT_POINTS = ("output-half",)
"""Of tables beside `records`, which few streams have."""
CHECK_POINTS = ("check-judged",)
"""Those of check."""

ALERT_POINTS = ("alert-kept", "alert-sent")
"""Those of alert, which watch passes."""
ALL_CRASH_POINTS = (
    CRASH_POINTS
    + REPAIR_POINTS
    + COMPACT_POINTS
    + PUBLISH_POINTS
    + OUTPUT_POINTS
    + CHECK_POINTS
    + ALERT_POINTS
)

_armed_hooks: list[Callable[[str], None]] = []


def arm(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of each point passed from now on; None disarms."""
    _armed_hooks[:] = [] if hook is None else [hook]


def crash_point(name: str) -> None:
    """A place where a test may end the world."""
    if _armed_hooks:
        ensure(name in ALL_CRASH_POINTS, "unknown crash point", name=name)
        _armed_hooks[0](name)
