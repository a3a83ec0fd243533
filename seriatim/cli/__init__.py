"""The command line: thin commands that connect operations to the real adapters.

There is one module for each family of commands. Nothing heavy is imported at the top of these
modules, so `seriatim --help` answers at once: a command imports what it needs when it runs. An
error ends as one screen on stderr and an exit code. A stack trace is shown with `--debug` only.

Next: cli/run.py has the main command; cli/output.py prints for people and scripts.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from seriatim import __version__, config
from seriatim.engine.failure import CommandOutcome, Failure
from seriatim.errors import BrokenPromiseError, PlatformError, SeriatimError

app = typer.Typer(
    name="seriatim",
    help="Fold Kafka messages in order, with state, into Delta tables, and prove the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help answers in half the time
)


class Options:
    """Options that hold for the whole process, whichever command runs."""

    debug = False
    """Whether stack traces are shown."""
    json = False
    """Whether every line on stderr is a JSON object. A command with `--json` sets it."""
    is_own_process = False
    """Whether the process runs this command only. It is False inside tests and Airflow tasks."""


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"seriatim {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces of errors.")] = False,
    version: Annotated[  # noqa: ARG001  # its callback does the work
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Fold Kafka messages in order, with state, into Delta tables, and prove the result."""
    Options.debug = debug
    # In tests and Airflow one process runs several commands: the last one's choice must not stay.
    Options.json = False
    _print_log_messages()


def print_notice(text: str, **fields: Any) -> None:
    """Print progress or a remark on stderr, so that stdout has the command's result only.

    With `--json` it becomes one JSON object: `fields`, and the text as `message`.
    """
    line = text
    if Options.json:
        line = _encode_json({**fields, "message": text})
    typer.echo(line, err=True)


class _LogNotices(logging.Handler):
    """Prints what the product logs as notices. A record may carry `fields` for scripts."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        print_notice(record.getMessage(), **getattr(record, "fields", {}))


_log_notices = _LogNotices()


def _print_log_messages() -> None:
    """Print what the product logs as notices from now on. A second call changes nothing."""
    logger = logging.getLogger("seriatim")
    logger.addHandler(_log_notices)
    # Whatever the root logger prints to would show them a second time.
    logger.propagate = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process with its exit code.

    An error becomes one screen on stderr. If the environment names an outcome file, the way the
    command ended is written there too, as a value that another process can read.
    """
    Options.is_own_process = arguments is None
    outcome_path = config.take_outcome_path()
    try:
        app(arguments)
    except SystemExit as system_exit:  # Typer ends every command this way if it raised no error
        leave_outcome(outcome_path, CommandOutcome(exit_code=_exit_code(system_exit)))
        raise
    except Exception as error:
        seriatim_error = as_seriatim_error(error)
        if Options.debug:
            leave_outcome(outcome_path, _failed_outcome(seriatim_error))
            raise
        fail(seriatim_error, outcome_path)


def fail(error: SeriatimError, outcome_path: Path | None) -> NoReturn:
    """Print an error, write the outcome, and end the process with the error's exit code."""
    print_error(error)
    leave_outcome(outcome_path, _failed_outcome(error))
    sys.exit(error.exit_code)


def _failed_outcome(error: SeriatimError) -> CommandOutcome:
    return CommandOutcome(exit_code=error.exit_code, failure=Failure.of(error))


def leave_outcome(path: Path | None, outcome: CommandOutcome) -> None:
    """Write how the command ended to `path`, completely or not at all; None writes nothing.

    A disk that refuses the file is reported only: the exit code still says the most important.
    """
    if path is None:
        return
    # The reader is another process, which must never see half of the file.
    draft = path.with_name(f"{path.name}.draft")
    try:
        draft.write_bytes(msgspec.json.encode(outcome))
        draft.replace(path)
    except OSError as error:
        typer.echo(f"the outcome cannot be written to {path}: {error.strerror}", err=True)


def _exit_code(system_exit: SystemExit) -> int:
    """The exit code that the process will have."""
    code = system_exit.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    return 1  # Python prints any other value and exits with 1


def print_error(error: SeriatimError) -> None:
    """Print an error on stderr: as a screen, or as one line of JSON for scripts."""
    text = error.render()
    if Options.json:
        text = _encode_json(_error_values(error))
    typer.echo(text, err=True)


def _error_values(error: SeriatimError) -> dict[str, Any]:
    return {"error": error.title, "message": error.message, **error.fields, "next": error.next}


def _encode_json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def as_seriatim_error(error: Exception) -> SeriatimError:
    """The error itself if it is ours, else `unexpected_error` of it."""
    if isinstance(error, SeriatimError):
        return error
    return unexpected_error(error)


def unexpected_error(error: Exception) -> SeriatimError:
    """An error that no operation expected: trouble with the disk or the network, or our own bug."""
    description = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return PlatformError(
            description,
            next="look at the disk (free space, permissions) and the network, then run again",
        )
    raising_frame = traceback.extract_tb(error.__traceback__)[-1]
    return BrokenPromiseError(
        description,
        where=f"{raising_frame.filename}:{raising_frame.lineno} in {raising_frame.name}",
        next="report this as a bug, with the output of --debug",
    )


# Each module adds its commands to `app`, so these imports must come after it.
from seriatim.cli import (  # noqa: E402, F401
    accept,
    bisect,
    check,
    compact,
    diff,
    doctor,
    explain,
    gaps,
    jars,
    kafka,
    produce,
    publish,
    repair,
    replay,
    report,
    run,
    s3,
    state,
    status,
    top,
    trace,
    verify,
    watch,
)
