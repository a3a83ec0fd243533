"""What commands print: tables and progress for people, plain lines in a log, JSON for scripts.

Findings and progress go to stderr; what was asked for goes to stdout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import typer

from seriatim.cli import Options, print_notice
from seriatim.engine.findings import Finding, new_findings_error
from seriatim.errors import ConfigError
from seriatim.ledger.model import Ledger
from seriatim.operations.retention import ShortRetention
from seriatim.operations.run import RunOutcome
from seriatim.operations.slicing import SlicePlan
from seriatim.stream import Stream

LINE_EVERY_SECONDS = 10.0
BAR_WIDTH = 24


class RunProgress:
    """What is done of all, rate and time to go: one living line on a terminal, plain lines in a
    log.
    """

    def __init__(self, stream: str, unit: str = "messages") -> None:
        self.stream, self.unit = stream, unit
        self.is_live = sys.stderr.isatty() and not Options.json
        self.began_seconds = time.monotonic()
        self.printed_seconds = self.began_seconds
        self.has_open_line = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self.is_live and now - self.printed_seconds < LINE_EVERY_SECONDS and done < total:
            return
        self.printed_seconds = now
        rate = done / max(now - self.began_seconds, 1e-9)
        left = (total - done) / rate if rate else 0
        share = done / total if total else 1
        text = f"{self.stream}: {done:,} of {total:,} {self.unit} · {rate:,.0f}/s · {_render_duration(left)} to go"
        if self.is_live:
            bar = "━" * round(share * BAR_WIDTH) + "╌" * (BAR_WIDTH - round(share * BAR_WIDTH))
            typer.echo(f"\r\033[K{bar} {share:4.0%} {text}", err=True, nl=False)
            self.has_open_line = True
        else:
            print_notice(text, done=done, total=total)

    def close(self) -> None:
        """Leave the living line."""
        if self.has_open_line:
            typer.echo("", err=True)
            self.has_open_line = False


def print_outcome(stream: str, outcome: RunOutcome, *, json: bool) -> None:
    """What a run did; new findings raise, so that the run fails."""
    print_findings(stream, outcome.findings, json=json)
    for partition, halt in outcome.earlier_halts:
        since = f"waits at offset {halt.offset} since entry {halt.sequence}"
        print_notice(
            f"{stream} {partition}: {since}: {halt.finding}, {halt.cause}",
            waiting=str(partition),
            offset=halt.offset,
        )
    for partition in outcome.missing_partitions:
        text = f"{stream} {partition}: gone from Kafka, or matched no more; its state is kept"
        print_notice(text, gone=str(partition))
    if outcome.quarantined:
        text = (
            f"{stream}: {outcome.quarantined} in quarantine; `seriatim status {stream}` lists them"
        )
        print_notice(text, quarantined=outcome.quarantined)
    if outcome.foreign_sequence >= 0:
        text = f"{stream}: others wrote to the records table (told by entry {outcome.foreign_sequence}); `seriatim verify {stream}`"
        print_notice(f"{text} says what differs", foreign=outcome.foreign_sequence)
    if outcome.derived_error:
        what = f"{stream}: the tables gaps and quarantine are behind; the next run catches up. Records are complete."
        print_notice(
            what if json else f"{what}\n{outcome.derived_error}", behind=outcome.derived_error
        )
    if outcome.snapshot_request_error:
        what = f"{stream}: producers were not asked for the snapshots that sessions need; the next run asks again."
        print_notice(
            what if json else f"{what}\n{outcome.snapshot_request_error}",
            unasked=outcome.snapshot_request_error,
        )
    if json:
        _print_json(_outcome_values(stream, outcome))
    else:
        _print_summary(stream, outcome)
    errors = [finding for finding in outcome.findings if finding.level == "error"]
    if errors:
        raise new_findings_error(stream, errors)
    if outcome.missing_partitions and not outcome.matched_partitions:
        raise ConfigError(
            f"{stream}: none of its topics is there any more",
            next="check `topics` in the stream file (it must match whole names) and the broker's address",
        )


def _print_summary(stream: str, outcome: RunOutcome) -> None:
    if not outcome.slices:
        typer.echo(f"{stream}: nothing new")
        return
    headless = f", {outcome.headless} headless" if outcome.headless else ""
    typer.echo(
        f"{stream}: {outcome.messages} messages{headless} → {outcome.records} records in {outcome.slices} "
        f"slice{'s' * (outcome.slices > 1)}, ledger at entry {outcome.sequence}"
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
    """Findings on stderr: one screen each, or one JSON object per line."""
    for finding in findings:
        text = (
            msgspec.json.encode(finding.to_dict(stream)).decode()
            if json
            else finding.render(stream) + "\n"
        )
        typer.echo(text, err=True)


def print_plan(
    stream: Stream,
    ledger: Ledger,
    slice_plan: SlicePlan,
    short: Sequence[ShortRetention] = (),
    *,
    json: bool,
) -> None:
    """What the next run would do."""
    rows = [
        {
            "topic": partition.topic,
            "partition": partition.number,
            "from": whole.start,
            "until": whole.end,
            "messages": len(whole),
            "new": partition in slice_plan.new_accounts,
        }
        for partition, whole in sorted(slice_plan.ranges.items())
    ]
    waiting = [str(partition) for partition in slice_plan.waiting_partitions]
    if json:
        found = [finding.to_dict(stream.name) for finding in slice_plan.findings]
        _print_json(
            {
                "stream": stream.name,
                "sequence": ledger.sequence,
                "partitions": rows,
                "waiting": waiting,
                "gone": [str(p) for p in slice_plan.missing_partitions],
                "findings": found,
                "short_retention": list(short),
                "messages": slice_plan.backlog,
            }
        )
        return
    print_table(["topic", "partition", "from", "until", "messages", "new"], rows)
    slices = -(-slice_plan.backlog // stream.slice.messages_max)
    typer.echo(
        f"{stream.name}: {slice_plan.backlog} messages in about {slices} slice{'s' * (slices != 1)}"
    )
    for place in waiting:
        typer.echo(f"{place}: waits since an earlier run; `seriatim status {stream.name}` says why")
    for partition in slice_plan.missing_partitions:
        typer.echo(f"{partition}: gone from Kafka or matched no more; its state is kept")
    for topic in short:
        typer.secho(f"{topic.text}\n  → {topic.next}", fg=typer.colors.YELLOW)
    print_findings(stream.name, slice_plan.findings, json=False)


def print_table(columns: list[str], rows: list[dict[str, Any]]) -> None:
    """A table on stdout; numbers without separators, since people paste them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        numbers = all(isinstance(row.get(column), int | float) for row in rows)
        drawn.add_column(column, justify="right" if numbers and rows else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(_render_cell(row.get(column))) for column in columns))
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(drawn)


def _render_cell(value: Any) -> str:
    if value is None or value is False:
        return ""
    return "yes" if value is True else str(value)


def _print_json(value: Any) -> None:
    typer.echo(msgspec.json.encode(value).decode())


def _render_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
