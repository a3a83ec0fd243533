"""Outcomes: what a process that ended means, as an error of ours. Pure.

Next room: airflow/command.py and airflow/fold.py raise it; core/errors.py has the tree and the codes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any

import msgspec

from seriatim.core.errors import (
    SIGKILL_ADVICE,
    SIGKILL_CAUSE,
    BrokenPromiseError,
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    SeriatimError,
)

KINDS: tuple[type[SeriatimError], ...] = (
    BrokenPromiseError,
    ConfigError,
    IntegrityError,
    PlatformError,
    FencedError,
)
BY_CODE = {kind.exit_code: kind for kind in KINDS}
HEADLINE = re.compile(rf"({'|'.join(kind.__name__ for kind in KINDS)}): (.*)")
SHELL_SIGNAL = 128
"""A shell reports a process that ended by a signal with a code this much higher."""
LINES_KEPT = 200
SCREEN_LINES_MAX = 40


def screen_of(said: Sequence[str]) -> str:
    """The last screen in what a process said: its error, headline first; empty if it left none."""
    said = [part for line in said for part in _in_words(line)]
    heads = [number for number, line in enumerate(said) if HEADLINE.match(line)]
    if not heads:
        return ""
    head = said[heads[-1]]
    below = []
    for line in said[heads[-1] + 1 :]:
        if not line.startswith("  "):
            break
        below.append(line)
    return "\n".join([head, *below[:SCREEN_LINES_MAX]])


def _in_words(line: str) -> list[str]:
    """A line as it is; an error that was told as JSON, for a script, as the screen that people read."""
    if not line.startswith('{"error":'):
        return [line]
    try:
        told = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return [line]
    kind = {kind.__name__: kind for kind in KINDS}.get(str(told.pop("error")), PlatformError)
    message, advice = str(told.pop("message", "")), str(told.pop("next", ""))
    return kind(message, next=advice, **told).render().splitlines()


def error_of(name: str, code: int, said: Sequence[str]) -> SeriatimError:
    """The error that an exit code stands for, in the words of the process itself where it had any."""
    screen = screen_of(said)
    found = HEADLINE.match(screen)
    kind = BY_CODE.get(code, PlatformError)
    if code == BrokenPromiseError.exit_code and not (found and found[1] == BrokenPromiseError.__name__):
        kind = PlatformError  # not our screen: Spark's own launcher also ends with 1
    if found and found[1] == kind.__name__:
        return kind(found[2], next=_next(screen))
    goes_on = "a run goes on from the last commit"
    if code in (-signal.SIGKILL, SHELL_SIGNAL + signal.SIGKILL):
        message = f"{name} was ended by signal {signal.SIGKILL:d} and left no word"
        return kind(message, cause=SIGKILL_CAUSE, next=f"{SIGKILL_ADVICE}.\n{goes_on}")
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return kind(f"{name} {ended} and left no word", next=f"read the log above; {goes_on}")


def _next(screen: str) -> str:
    """What the screen says to do."""
    _, _, after = screen.partition("\n  next ")
    return "\n".join(line.strip() for line in after.splitlines())
