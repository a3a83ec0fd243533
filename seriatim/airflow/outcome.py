"""Outcomes: what a process that ended means, as an error of ours.

A task names a file in the environment of the command it starts, and the command leaves there how it
ended, as a value (failure.py). A process that died on the way, or that was never ours (Spark's
launcher), leaves none: then its exit code is all that is known.

Next room: airflow/command.py and airflow/fold.py raise the error; cli/__init__.py leaves the
outcome.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from seriatim.errors import (
    SIGKILL_ADVICE,
    SIGKILL_CAUSE,
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    SeriatimError,
)
from seriatim.failure import CommandOutcome

ERROR_TYPE_BY_EXIT_CODE: dict[int, type[SeriatimError]] = {
    error_class.exit_code: error_class
    for error_class in (ConfigError, IntegrityError, PlatformError, FencedError)
}
"""Without code 1: Spark's launcher also ends with it, so that alone does not mean a bug of ours."""
SHELL_SIGNAL = 128
"""A shell reports a process that ended by a signal with a code this much higher."""
SCREEN_LINES_MAX = 41
"""Of a screen that goes into a note: the headline, and so many lines below it."""


@contextmanager
def outcome_file() -> Iterator[Path]:
    """A place for the outcome of one process, gone when the block is left."""
    with tempfile.TemporaryDirectory(prefix="seriatim-outcome-") as folder:
        yield Path(folder) / "outcome.json"


def read_outcome(path: Path) -> CommandOutcome | None:
    """What a process left; None: nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CommandOutcome)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def build_error(name: str, code: int, outcome: CommandOutcome | None) -> SeriatimError:
    """The error of a process that ended with `code`: its own, where it left one that belongs to
    this end.
    """
    # A process can still be killed after it left its outcome: then the code, which is how it really ended, differs.
    if outcome is not None and outcome.failure is not None and outcome.exit_code == code:
        return outcome.failure.to_error()
    error_class = ERROR_TYPE_BY_EXIT_CODE.get(code, PlatformError)
    goes_on = "a run goes on from the last commit"
    if code in (-signal.SIGKILL, SHELL_SIGNAL + signal.SIGKILL):
        message = f"{name} was ended by signal {signal.SIGKILL:d} and left no word"
        return error_class(message, cause=SIGKILL_CAUSE, next=f"{SIGKILL_ADVICE}.\n{goes_on}")
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return error_class(f"{name} {ended} and left no word", next=f"read the log above; {goes_on}")


def extract_error_screen(error: SeriatimError) -> str:
    """An error as its note shows it: one screen, cut where it is too long for a mail."""
    return "\n".join(error.render().splitlines()[:SCREEN_LINES_MAX])
