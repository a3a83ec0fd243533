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
from types import FrameType
from typing import Any, Literal, Self

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seriatim.cli import Options, print_json, print_notice
from seriatim.engine.findings import Finding

LINE_EVERY_SECONDS = 10.0
BAR_WIDTH = 24
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
        if self.is_closed or now_seconds - self.began_seconds < self.silent_seconds:
            return
        is_too_early = now_seconds - self.printed_seconds < LINE_EVERY_SECONDS
        if not self.is_live and is_too_early and done < total:
            return
        self.printed_seconds = now_seconds
        rate = done / max(now_seconds - self.began_seconds, 1e-9)
        remaining_seconds = (total - done) / rate if rate else 0
        text = (
            f"{self.stream}: {done:,} of {total:,} {self.unit} · {rate:,.0f}/s"
            f" · {_render_duration(remaining_seconds)} to go"
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
    """Print findings on stderr: one screen each, or one JSON object per line."""
    for finding in findings:
        if Options.json:
            print_json(finding.to_dict(stream), err=True)
        else:
            typer.echo(finding.render(stream) + "\n", err=True)


def errors_among(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that make a command fail."""
    return [finding for finding in findings if finding.level == "error"]


def render_table(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> str:
    """A table of these columns, or of all columns of the first row. Numbers have no separators,
    since people paste them.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if columns is None:
        columns = list(rows[0])
    for column in columns:
        is_number_column = bool(rows) and all(
            isinstance(row.get(column), int | float) for row in rows
        )
        justify: Literal["left", "right"] = "right" if is_number_column else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        # Text, since rich would read square brackets in a plain string as markup.
        cells = [Text(_render_cell(row.get(column))) for column in columns]
        table.add_row(*cells)
    # In a log or a pipe rich would cut at 80 characters.
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().removesuffix("\n")


def print_table(columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Print a table on stdout."""
    typer.echo(render_table(rows, columns))


def count_of(number: int, noun: str) -> str:
    """A count with its noun: `1 slice`, `2 slices`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sequence_or_none(sequence: int) -> int | None:
    """Operations say -1 where there is no entry; JSON says null."""
    return sequence if sequence >= 0 else None


def _render_cell(value: Any) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    return str(value)


def _render_duration(total_seconds: float) -> str:
    total_minutes, seconds = divmod(round(total_seconds), 60)
    hours, minutes = divmod(total_minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {seconds} s"
    return f"{seconds} s"


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
