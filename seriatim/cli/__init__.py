"""The command line: thin commands that join steps to adapters. One file per family of commands.

Nothing heavy is imported here at the top: `seriatim --help` answers at once. A command imports
what it needs when it runs. Errors end as one screen on stderr and an exit code, never a stack trace
(`--debug` shows it).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from seriatim import __version__, config
from seriatim.errors import BrokenPromiseError, PlatformError, SeriatimError
from seriatim.failure import CommandOutcome, Failure

app = typer.Typer(
    name="seriatim",
    help="Ordered, stateful streams from Kafka into Delta tables, with proof.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help answers in half the time
)


class Options:
    """What is said before the command and holds for all of it."""

    debug = False
    json = False
    """Every line on stderr is a JSON object. Set by the command that promises it."""
    is_own_process = False
    """Whether the process is the command's own, and nobody else is in it."""


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"seriatim {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces.")] = False,
    version: Annotated[  # noqa: ARG001  # its callback does it
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Ordered, stateful streams from Kafka into Delta tables, with proof."""
    Options.debug, Options.json = debug, False


def print_notice(text: str, **fields: Any) -> None:
    """Progress and asides, on stderr, so that stdout stays what was asked for. `fields` are for
    scripts.
    """
    typer.echo(_encode_json({**fields, "message": text}) if Options.json else text, err=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; turn our errors into one screen, an exit code, and an outcome for whoever
    asked for one.
    """
    Options.is_own_process = arguments is None
    outcome_path = config.take_outcome_path()
    try:
        app(arguments)
    except SystemExit as ended:  # how Typer ends every command that raised no error of ours
        leave_outcome(outcome_path, CommandOutcome(exit_code=_code(ended)))
        raise
    except Exception as error:
        known = error if isinstance(error, SeriatimError) else unexpected_error(error)
        if Options.debug:
            leave_outcome(
                outcome_path, CommandOutcome(exit_code=known.exit_code, failure=Failure.of(known))
            )
            raise
        fail(known, outcome_path)


def fail(error: SeriatimError, outcome_path: Path | None) -> NoReturn:
    """End the command with an error."""
    print_error(error)
    leave_outcome(
        outcome_path, CommandOutcome(exit_code=error.exit_code, failure=Failure.of(error))
    )
    sys.exit(error.exit_code)


def leave_outcome(path: Path | None, outcome: CommandOutcome) -> None:
    """Leave how the command ended, whole or not at all. If the disk refuses, the exit code still
    says the most.
    """
    if path is None:
        return
    draft = path.with_name(f"{path.name}.draft")
    try:
        draft.write_bytes(msgspec.json.encode(outcome))
        draft.replace(path)
    except OSError as error:
        typer.echo(f"the outcome cannot be left in {path}: {error.strerror}", err=True)


def _code(ended: SystemExit) -> int:
    """The exit code that the process will have."""
    if ended.code is None:
        return 0
    return ended.code if isinstance(ended.code, int) else 1


def print_error(error: SeriatimError) -> None:
    """An error on stderr: a screen, or one line of JSON for scripts."""
    typer.echo(_encode_json(_error_values(error)) if Options.json else error.render(), err=True)


def _error_values(error: SeriatimError) -> dict[str, Any]:
    return {"error": error.title, "message": error.message, **error.fields, "next": error.next}


def _encode_json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def unexpected_error(error: Exception) -> SeriatimError:
    """What no step foresaw: trouble with the disk or network, or our own bug."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return PlatformError(
            what, next="look at the disk (room, rights) and the network, then run again"
        )
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.filename}:{last.lineno} in {last.name}"
    return BrokenPromiseError(
        what, where=where, next="report this as a bug, with the output of --debug"
    )


# Each module adds its commands to `app`, so they come after it.
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
    state,
    status,
    top,
    trace,
    verify,
    watch,
)
