"""What commands print: tables and progress for people, plain lines in a log, JSON for scripts.

Findings and progress go to stderr; the result of the command goes to stdout.

Next: cli/__init__.py prints results, notices and errors; cli/lookback.py prints the steps of a
session.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

import typer
from msgspec import Struct
from msgspec.structs import asdict
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seriatim.cli import CommandResult, JsonObject, Options, print_json, print_notice
from seriatim.engine.findings import Finding, count_of, format_duration, group_findings
from seriatim.errors import PlatformError

LINE_EVERY_SECONDS = 10.0
SLOW_RATE = 10.0
"""A lower rate is shown with a decimal: 0 a second would say that nothing happens."""
BAR_WIDTH = 24
SESSION_WIDTH_MAX = 60
"""A session's name up to this width is not broken in a table."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunProgress:
    """Progress with rate and remaining time: one line that is rewritten on a terminal, else lines
    in a log.
    """

    def __init__(self, stream: str, unit: str = "messages", *, silent_seconds: float = 0.0) -> None:
        self.stream = stream
        self.unit = unit
        self.is_live = sys.stderr.isatty() and not Options.json
        self.began_seconds = time.monotonic()
        self.printed_seconds = self.began_seconds
        self.silent_seconds = silent_seconds
        """Nothing is shown before so many seconds have passed."""
        self.has_open_line = False
        self.is_closed = False

    def __call__(self, done: int, total: int) -> None:
        now_seconds = time.monotonic()
        if not done:
            # The work begins now. What came before, like the start of Spark, says nothing about it.
            self.began_seconds = now_seconds
            return
        if self.is_closed or now_seconds - self.began_seconds < self.silent_seconds:
            return
        is_too_early = now_seconds - self.printed_seconds < LINE_EVERY_SECONDS
        if not self.is_live and is_too_early and done < total:
            return
        self.printed_seconds = now_seconds
        rate = done / max(now_seconds - self.began_seconds, 1e-9)
        remaining_seconds = (total - done) / rate if rate else 0
        rate_text = f"{rate:,.0f}" if rate >= SLOW_RATE else f"{rate:.1f}"
        text = (
            f"{self.stream}: {done:,} of {total:,} {self.unit} · {rate_text}/s"
            f" · {format_duration(remaining_seconds)} to go"
        )
        if self.is_live:
            self._rewrite_line(done / total if total else 1, text)
        else:
            print_notice(text, done=done, total=total)

    def _rewrite_line(self, share: float, text: str) -> None:
        bar_length = round(share * BAR_WIDTH)
        bar = "━" * bar_length + "╌" * (BAR_WIDTH - bar_length)
        # Back to the start of the line, and clear it.
        typer.echo(f"\r\033[K{bar} {share:4.0%} {text}", err=True, nl=False)
        self.has_open_line = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Show nothing more, and end the line that is rewritten: other output begins on a new one."""
        self.is_closed = True
        if self.has_open_line:
            typer.echo("", err=True)
            self.has_open_line = False


class RunningServer(CommandResult):
    """An embedded server that is running."""

    info: Struct

    def to_json(self) -> Struct:
        """Its address, its process, and what else clients need."""
        return self.info

    def render(self) -> str:
        """A line for each of them."""
        values = asdict(self.info)
        width = max(map(len, values))
        return "\n".join(f"{name:<{width}} {value}" for name, value in values.items())


def require_running(
    info: Struct | None, info_type: type[Struct], name: str, start_command: str, home: Path
) -> RunningServer:
    """The server that is running. If none is, scripts get the usual object with nulls, and the error
    says how to start one.
    """
    if info is not None:
        return RunningServer(info)
    if Options.json:
        print_json(dict.fromkeys(info_type.__struct_fields__))
    raise PlatformError(f"no embedded {name} is running", home=str(home), next=start_command)


def print_derived_error(stream: str, derived_error: str) -> None:
    """Print that the derived tables could not follow the ledger. That undoes no commit."""
    if not derived_error:
        return
    text = (
        f"{stream}: the tables gaps and quarantine are behind; the next run catches up."
        " Records are complete."
    )
    if not Options.json:
        text += f"\n{derived_error}"
    print_notice(text, behind=derived_error)


def print_findings(stream: str, findings: list[Finding]) -> None:
    """Print findings on stderr: a few lines for each kind and cause, or with `--all` for each
    finding; as JSON one object per line.
    """
    if Options.json:
        for finding in findings:
            print_json(finding.to_dict(stream), err=True)
        return
    for text in render_findings(stream, findings, list_all=Options.all_findings):
        typer.echo(text + "\n", err=True)


def render_findings(stream: str, findings: list[Finding], *, list_all: bool) -> list[str]:
    """Findings as texts for people, of a few lines each. Many are put into groups."""
    if list_all:
        return [finding.render(stream) for finding in findings]
    groups = group_findings(findings)
    texts = [group.render(stream) for group in groups]
    if len(groups) < len(findings):
        texts.append(
            f"{stream}: {count_of(len(findings), 'finding')} in all; with --all each is printed"
        )
    return texts


def errors_among(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that make a command fail."""
    return [finding for finding in findings if finding.level == "error"]


def render_table(rows: Sequence[JsonObject], columns: Sequence[str] | None = None) -> str:
    """A table of these columns, or of all columns of the first row. Numbers have no separators,
    since people paste them.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if columns is None:
        columns = list(rows[0])
    for column in columns:
        cells = [row.get(column) for row in rows]
        has_only_numbers = all(isinstance(cell, int | float) for cell in cells)
        # Numbers end at the same place, so that their sizes can be compared at a glance.
        justify: Literal["left", "right"] = "left"
        if cells and has_only_numbers:
            justify = "right"
        min_width = None
        if column == "session":
            # A name that is broken in the middle cannot be pasted: other columns are folded first.
            widths = [len(_render_cell(cell)) for cell in cells]
            min_width = min(max(widths, default=0), SESSION_WIDTH_MAX)
        table.add_column(column, justify=justify, overflow="fold", min_width=min_width)
    for row in rows:
        # Text, since rich would read square brackets in a plain string as markup.
        table.add_row(*[Text(_render_cell(row.get(column))) for column in columns])
    # In a log or a pipe rich would cut at 80 characters.
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().removesuffix("\n")


def print_table(columns: list[str], rows: list[JsonObject]) -> None:
    """Print a table on stdout."""
    typer.echo(render_table(rows, columns))


def sequence_or_none(sequence: int) -> int | None:
    """Operations say -1 where there is no entry; JSON says null."""
    return sequence if sequence >= 0 else None


def _render_cell(value: Any) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    return str(value)


@contextmanager
def exit_on_signal(name: str, before_exit: Callable[[], None]) -> Iterator[None]:
    """Within this context Ctrl-C and SIGTERM call `before_exit`, print a notice, and exit at once.

    The output is safe at any kill, so nothing has to be waited for.
    The exit code is 128 plus the number of the signal, as shells have it.
    """

    def stop(signal_number: int, _: FrameType | None) -> None:
        # A second Ctrl-C must not interrupt the steps below.
        for handled_signal in SIGNALS:
            signal.signal(handled_signal, signal.SIG_IGN)
        try:
            before_exit()
            print_notice(
                f"{name}: stopped; run again goes on from the last commit",
                stopped=signal.Signals(signal_number).name,
            )
        finally:
            # Not an exception: it would come out of Spark's threads as pages of stack traces.
            os._exit(128 + signal_number)

    actions_before = {
        handled_signal: signal.signal(handled_signal, stop) for handled_signal in SIGNALS
    }
    try:
        yield
    finally:
        for handled_signal, action in actions_before.items():
            signal.signal(handled_signal, action)
