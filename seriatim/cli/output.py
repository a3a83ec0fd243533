"""What commands print: tables and progress for people, plain lines in a log, JSON for scripts.

Findings and progress go to stderr; the result of the command goes to stdout.

Next: cli/run.py prints with it; cli/lookback.py prints the steps of a session.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seriatim.cli import Options, print_json, print_notice
from seriatim.engine.findings import Finding, new_findings_error
from seriatim.errors import ConfigError
from seriatim.ledger.model import Ledger
from seriatim.operations.plan import SlicePlan
from seriatim.operations.retention import ShortRetention
from seriatim.operations.run import RunOutcome
from seriatim.stream import Stream

LINE_EVERY_SECONDS = 10.0
BAR_WIDTH = 24


class RunProgress:
    """Progress with rate and remaining time: one line that is rewritten on a terminal, else lines
    in a log.
    """

    def __init__(self, stream: str, unit: str = "messages") -> None:
        self.stream = stream
        self.unit = unit
        self.is_live = sys.stderr.isatty() and not Options.json
        self.began_seconds = time.monotonic()
        self.printed_seconds = self.began_seconds
        self.has_open_line = False

    def __call__(self, done: int, total: int) -> None:
        now_seconds = time.monotonic()
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

    def close(self) -> None:
        """End the line that is rewritten, so that other output begins on a new one."""
        if self.has_open_line:
            typer.echo("", err=True)
            self.has_open_line = False


def print_outcome(stream: str, outcome: RunOutcome, *, json: bool) -> None:
    """Print what a run did. New findings are raised, so that the run fails.

    1. Findings. 2. Notices about what a person should know. 3. The result. 4. The error, if any.
    """
    # 1. Findings.
    print_findings(stream, outcome.findings, json=json)
    # 2. Notices.
    _print_outcome_notices(stream, outcome, json=json)
    # 3. The result, on stdout.
    if json:
        print_json(_outcome_values(stream, outcome))
    else:
        _print_summary(stream, outcome)
    # 4. The error: only now, since scripts read the result of a failed run as well.
    errors = [finding for finding in outcome.findings if finding.level == "error"]
    if errors:
        raise new_findings_error(stream, errors)
    if outcome.missing_partitions and not outcome.matched_partitions:
        raise ConfigError(
            f"{stream}: none of its topics is there any more",
            next="check `topics` in the stream file (it must match whole names)"
            " and the broker's address",
        )


def _print_outcome_notices(stream: str, outcome: RunOutcome, *, json: bool) -> None:
    for partition, halt in outcome.earlier_halts:
        print_notice(
            f"{stream} {partition}: waits at offset {halt.offset} since entry {halt.sequence}:"
            f" {halt.finding}, {halt.cause}",
            waiting=str(partition),
            offset=halt.offset,
        )
    for partition in outcome.missing_partitions:
        print_notice(
            f"{stream} {partition}: gone from Kafka, or matched no more; its state is kept",
            gone=str(partition),
        )
    if outcome.quarantined:
        print_notice(
            f"{stream}: {outcome.quarantined} in quarantine; `seriatim status {stream}` lists them",
            quarantined=outcome.quarantined,
        )
    if outcome.foreign_sequence >= 0:
        print_notice(
            f"{stream}: others wrote to the records table (reported by entry"
            f" {outcome.foreign_sequence}); `seriatim verify {stream}` says what differs",
            foreign=outcome.foreign_sequence,
        )
    if outcome.derived_error:
        print_derived_error(stream, outcome.derived_error, json=json)
    if outcome.snapshot_request_error:
        text = (
            f"{stream}: producers were not asked for the snapshots that sessions need;"
            " the next run asks again."
        )
        if not json:
            text += f"\n{outcome.snapshot_request_error}"
        print_notice(text, unasked=outcome.snapshot_request_error)


def print_derived_error(stream: str, derived_error: str, *, json: bool) -> None:
    """Print that the derived tables could not follow the ledger. That undoes no commit."""
    text = (
        f"{stream}: the tables gaps and quarantine are behind; the next run catches up."
        " Records are complete."
    )
    if not json:
        text += f"\n{derived_error}"
    print_notice(text, behind=derived_error)


def _print_summary(stream: str, outcome: RunOutcome) -> None:
    if not outcome.slices:
        typer.echo(f"{stream}: nothing new")
        return
    headless = f", {outcome.headless} headless" if outcome.headless else ""
    plural = "s" if outcome.slices > 1 else ""
    typer.echo(
        f"{stream}: {outcome.messages} messages{headless} → {outcome.records} records"
        f" in {outcome.slices} slice{plural}, ledger at entry {outcome.sequence}"
    )


def _outcome_values(stream: str, outcome: RunOutcome) -> dict[str, Any]:
    return {
        "stream": stream,
        "messages": outcome.messages,
        "records": outcome.records,
        "headless": outcome.headless,
        "slices": outcome.slices,
        "sequence": outcome.sequence,
        "findings": len(outcome.findings),
        "waiting": [str(partition) for partition, _ in outcome.earlier_halts],
        "quarantined": outcome.quarantined,
        "peak_memory_bytes": outcome.peak_memory_bytes,
    }


def print_findings(stream: str, findings: list[Finding], *, json: bool) -> None:
    """Print findings on stderr: one screen each, or one JSON object per line."""
    for finding in findings:
        text = finding.render(stream) + "\n"
        if json:
            text = msgspec.json.encode(finding.to_dict(stream)).decode()
        typer.echo(text, err=True)


def print_plan(
    stream: Stream,
    ledger: Ledger,
    slice_plan: SlicePlan,
    short: Sequence[ShortRetention] = (),
    *,
    json: bool,
) -> None:
    """Print what the next run would do, and the topics whose retention is short."""
    rows = _plan_rows(slice_plan)
    if json:
        print_json(_plan_values(stream.name, ledger.sequence, slice_plan, rows, short))
        return
    print_table(["topic", "partition", "from", "until", "messages", "new"], rows)
    slice_count = math.ceil(slice_plan.backlog / stream.slice.messages_max)
    plural = "" if slice_count == 1 else "s"
    typer.echo(f"{stream.name}: {slice_plan.backlog} messages in about {slice_count} slice{plural}")
    for partition in slice_plan.waiting_partitions:
        typer.echo(
            f"{partition}: waits since an earlier run; `seriatim status {stream.name}` says why"
        )
    for partition in slice_plan.missing_partitions:
        typer.echo(f"{partition}: gone from Kafka or matched no more; its state is kept")
    for topic in short:
        typer.secho(f"{topic.text}\n  → {topic.next}", fg=typer.colors.YELLOW)
    print_findings(stream.name, slice_plan.findings, json=False)


def _plan_rows(slice_plan: SlicePlan) -> list[dict[str, Any]]:
    return [
        {
            "topic": partition.topic,
            "partition": partition.number,
            "from": offset_range.start,
            "until": offset_range.end,
            "messages": len(offset_range),
            "new": partition in slice_plan.new_accounts,
        }
        for partition, offset_range in sorted(slice_plan.ranges.items())
    ]


def _plan_values(
    stream: str,
    sequence: int,
    slice_plan: SlicePlan,
    rows: list[dict[str, Any]],
    short: Sequence[ShortRetention],
) -> dict[str, Any]:
    return {
        "stream": stream,
        "sequence": sequence,
        "partitions": rows,
        "waiting": [str(partition) for partition in slice_plan.waiting_partitions],
        "gone": [str(partition) for partition in slice_plan.missing_partitions],
        "findings": [finding.to_dict(stream) for finding in slice_plan.findings],
        "short_retention": list(short),
        "messages": slice_plan.backlog,
    }


def print_table(columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Print a table on stdout. Numbers have no separators, since people paste them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
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
    Console(width=width, highlight=False).print(table)


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
