"""The command line: thin commands that connect operations to the real adapters.

There is one module for each family of commands. `COMMANDS` is the table of all commands: the module
of a command is imported when the command is used, so that `seriatim --help` and the completion of
names answer at once. An error ends as one screen on stderr and an exit code. A stack trace is shown
with `--debug` only.

Next: cli/run.py has the main command; cli/options.py has what commands share; cli/output.py prints.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
import typer.main
from msgspec import Struct
from typer.core import TyperCommand, TyperGroup

from seriatim import __version__, config
from seriatim.engine.failure import CommandOutcome, Failure
from seriatim.errors import BrokenPromiseError, PlatformError, SeriatimError

NAME_WIDTH = 10
JsonObject = dict[str, Any]
"""What a command prints for scripts, or a part of it."""


class LazyCommand(TyperCommand):
    """A command, or a group of commands, whose module is imported when it is used.

    Until then only its name and its line of help are known. That line is the first one of the
    command's own help.
    """

    def __init__(self, name: str, target: str, line: str) -> None:
        super().__init__(name, short_help=line)
        self.target = target
        """`module:function`. The function may also be a `typer.Typer` with commands of its own."""

    @cached_property
    def loaded(self) -> Any:
        """The command itself."""
        module_name, _, attribute = self.target.partition(":")
        target = getattr(import_module(f"seriatim.cli.{module_name}"), attribute)
        parent = typer.Typer(rich_markup_mode=None)
        if isinstance(target, typer.Typer):
            parent.add_typer(target, name=self.name)
        else:
            parent.command(self.name)(target)
        return typer.main.get_group(parent).commands[str(self.name)]

    def make_context(self, *args: Any, **settings: Any) -> typer.Context:
        """Begin to run or to complete the command. From here on the loaded command does the work."""
        context: typer.Context = self.loaded.make_context(*args, **settings)
        return context


COMMANDS = {
    "Run": [
        LazyCommand("compact", "compact:compact", "Join small files, and delete outdated ones."),
        LazyCommand("plan", "run:plan", "Show what the next run would do, and commit nothing."),
        LazyCommand(
            "publish", "publish:publish", "Bring the table `current` to the last checked entry."
        ),
        LazyCommand("run", "run:run", "Fold a stream from its frontier to the current log ends."),
    ],
    "Look": [
        LazyCommand("gaps", "gaps:gaps", "List the gaps: output that must not be trusted."),
        LazyCommand(
            "report", "report:report", "Write a report of the last entries as one HTML file."
        ),
        LazyCommand(
            "status", "status:status", "Show partitions, lag, time left, halts and quarantine."
        ),
        LazyCommand(
            "streams",
            "streams:streams",
            "List the stream files with the state of each in one line.",
        ),
        LazyCommand("top", "top:top", "Show all streams at a glance, live."),
        LazyCommand(
            "topics", "topics:topics", "List topics with partitions, messages, first and last time."
        ),
        LazyCommand(
            "version", "status:version", "Print the Delta version that a ledger entry made."
        ),
        LazyCommand("watch", "watch:watch", "Report lag, time left, and what needs a person."),
    ],
    "Prove": [
        LazyCommand(
            "check", "check:check", "Judge the ledger entries that no check has judged yet."
        ),
        LazyCommand(
            "verify", "verify:verify", "Check a stream's output independently of its runs."
        ),
    ],
    "Repair and decide": [
        LazyCommand(
            "accept", "accept:accept", "Accept a changed topic, a restored ledger, or a bad check."
        ),
        LazyCommand(
            "backfill",
            "repair:backfill",
            "Fold a range again, and replace its output in one commit.",
        ),
        LazyCommand("quarantine", "gaps:quarantine", "Take sessions out of quarantine by hand."),
        LazyCommand("rebuild", "gaps:rebuild", "Make the tables `gaps` and `quarantine` again."),
        LazyCommand(
            "repair", "repair:repair", "Find what is damaged, and show or apply the repair."
        ),
        LazyCommand("retire", "accept:retire", "Retire a topic that is over."),
    ],
    "Hunt": [
        LazyCommand(
            "bisect", "bisect:bisect", "Find the first message after which an invariant is broken."
        ),
        LazyCommand("diff", "diff:diff", "Compare the records of two outputs, offset by offset."),
        LazyCommand(
            "explain", "explain:explain", "Show every message that touched a row of the output."
        ),
        LazyCommand(
            "replay", "replay:replay", "Fold messages again without a commit, to look into them."
        ),
        LazyCommand(
            "state", "state:state", "Show what the machine holds for a session, now or earlier."
        ),
        LazyCommand(
            "trace", "lookback:trace", "Show a session message by message, with what each did."
        ),
    ],
    "Set up": [
        LazyCommand("cluster", "cluster:cluster", "Start and stop the embedded Spark cluster."),
        LazyCommand("doctor", "set_up:doctor", "Check what Seriatim needs on this host."),
        LazyCommand(
            "jars", "set_up:jars", "Fetch the JARs that Spark and the embedded broker need."
        ),
        LazyCommand("kafka", "set_up:kafka", "Start and stop the embedded Kafka broker."),
        LazyCommand(
            "new", "new:new", "Make a new stream: stream file, machine, test and expectations."
        ),
        LazyCommand(
            "produce", "produce:produce", "Send a file of JSON lines, or sample data, to Kafka."
        ),
        LazyCommand("s3", "s3:s3", "Start and stop the embedded S3 server."),
    ],
}
"""All commands, in the groups that `seriatim --help` shows."""


class GroupedCommands(TyperGroup):
    """The commands of `COMMANDS`. Its help shows them group by group."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for commands in COMMANDS.values():
            for command in commands:
                self.add_command(command)

    def format_commands(self, _: Any, formatter: Any) -> None:
        """Write a section for each group, with the lines of its commands."""
        for title, commands in COMMANDS.items():
            # Names of one width, so that the lines of all groups are aligned.
            lines = [(f"{command.name:<{NAME_WIDTH}}", command.short_help) for command in commands]
            with formatter.section(title):
                formatter.write_dl(lines)


class Options:
    """Options that hold for the whole process, whichever command runs."""

    debug = False
    """Whether stack traces are shown."""
    json = False
    """Whether results, and every line on stderr, are JSON. The option `--json` sets it."""
    all_findings = False
    """Whether every finding is printed, and not only groups. The option `--all` sets it."""
    is_own_process = False
    """Whether the process runs this command only. It is False inside tests and Airflow tasks."""


class CommandResult(Struct):
    """What a command returns: it is printed once, for people or as JSON."""

    def to_json(self) -> Any:
        """What `--json` prints. A result whose fields are the keys of its JSON is printed itself."""
        return self

    def render(self) -> str:
        """The lines for people."""
        raise NotImplementedError

    def error(self) -> SeriatimError | None:
        """The error with which the command ends, after the result was printed; None if all is well."""
        return None


def print_result(result: CommandResult | None, **_: Any) -> None:
    """Print what a command returned. Its error is raised afterwards: scripts read the result of a
    failed command as well.
    """
    if result is None:
        return
    if Options.json:
        print_json(result.to_json())
    else:
        text = result.render()
        if text:
            typer.echo(text)
    error = result.error()
    if error is not None:
        raise error


def print_json(value: Any, *, err: bool = False) -> None:
    """Print one JSON object on a line of stdout or stderr."""
    typer.echo(msgspec.json.encode(value, enc_hook=str).decode(), err=err)


app = typer.Typer(
    name="seriatim",
    cls=GroupedCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help answers in half the time
    result_callback=print_result,
)


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
    if Options.json:
        print_json({**fields, "message": text}, err=True)
    else:
        typer.echo(text, err=True)


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
    if Options.json:
        print_json(
            {"error": error.title, "message": error.message, **error.fields, "next": error.next},
            err=True,
        )
    else:
        typer.echo(error.render(), err=True)


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
