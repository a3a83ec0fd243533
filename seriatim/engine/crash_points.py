"""Crash points: named places in the code where a test may crash the process.

The product calls `crash_point("manifest-written")`. That does nothing unless a test has armed a
hook. In a test with real processes the hook kills the process (config.py reads the name of the
point); in the simulator it raises.

Next: docs/ARCHITECTURE.md says what must survive a crash at each point.
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
"""Points of repair and backfill, which a run does not pass."""
COMPACT_POINTS = ("compact-intended", "compact-written", "compact-committed", "sweep-half")
"""Points of compact, which a run does not pass."""
PUBLISH_POINTS = ("current-half", "current-written", "current-published")
"""Points of publish, which a run does not pass."""
OUTPUT_POINTS = ("output-half",)
"""Points of tables other than `records`, which few streams have."""
CHECK_POINTS = ("check-judged",)
"""Points of check."""
ALERT_POINTS = ("alert-kept", "alert-sent")
"""Points of alert, which watch passes."""
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
    """Call `hook` with the name of each point that is passed from now on. None: call nothing."""
    _armed_hooks.clear()
    if hook is not None:
        _armed_hooks.append(hook)


def crash_point(name: str) -> None:
    """Call the armed hook, if there is one."""
    if _armed_hooks:
        ensure(name in ALL_CRASH_POINTS, "unknown crash point", name=name)
        _armed_hooks[0](name)
