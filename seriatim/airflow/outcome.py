"""Outcomes: the typed error of a process that ended.

A task names a file in the environment of the command that it starts, and the command writes there
how it ended, as a value (engine/failure.py). A process that died early, or that is not ours (Spark's
launcher), writes none: then only its exit code is known.

Next: airflow/command.py and airflow/fold.py raise the error; cli/__init__.py writes the outcome.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from seriatim.engine.failure import CommandOutcome
from seriatim.errors import (
    SIGKILL_ADVICE,
    SIGKILL_CAUSE,
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    SeriatimError,
)

ERROR_TYPE_BY_EXIT_CODE: dict[int, type[SeriatimError]] = {
    error_class.exit_code: error_class
    for error_class in (ConfigError, IntegrityError, PlatformError, FencedError)
}
"""Without code 1: Spark's launcher ends with it as well, so it alone does not mean a bug of ours."""
SHELL_SIGNAL = 128
"""A shell reports a process that ended by a signal with a code this much higher."""
SCREEN_LINES_MAX = 41
"""How many lines of an error's text go into a note, its headline included."""


@contextmanager
def outcome_file() -> Iterator[Path]:
    """The path of a file for the outcome of one process. It is deleted when the block is left."""
    with tempfile.TemporaryDirectory(prefix="seriatim-outcome-") as folder:
        yield Path(folder) / "outcome.json"


def read_outcome(path: Path) -> CommandOutcome | None:
    """The outcome that a process wrote; None: there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CommandOutcome)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def build_error(name: str, code: int, outcome: CommandOutcome | None) -> SeriatimError:
    """The error of a process that ended with `code`: that of its outcome, or else one by its code."""
    # A process can be killed after it wrote its outcome. Then the code differs, and says the truth.
    if outcome is not None and outcome.failure is not None and outcome.exit_code == code:
        return outcome.failure.to_error()
    error_class = ERROR_TYPE_BY_EXIT_CODE.get(code, PlatformError)
    goes_on = "a run goes on from the last commit"
    if code in (-signal.SIGKILL, SHELL_SIGNAL + signal.SIGKILL):
        return error_class(
            f"{name} was ended by signal {signal.SIGKILL:d} and left no message",
            cause=SIGKILL_CAUSE,
            next=f"{SIGKILL_ADVICE}.\n{goes_on}",
        )
    ending = f"ended with code {code}"
    if code < 0:
        ending = f"was ended by signal {-code}"
    return error_class(
        f"{name} {ending} and left no message", next=f"read the log above; {goes_on}"
    )


def extract_error_screen(error: SeriatimError) -> str:
    """The text of an error for a note, cut where it is too long for a mail."""
    lines = error.render().splitlines()
    return "\n".join(lines[:SCREEN_LINES_MAX])
