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

from seriatim.cli import Options, say
from seriatim.core.errors import ConfigError
from seriatim.core.integrity import Finding, failure
from seriatim.core.ledger import Ledger
from seriatim.core.slice import Plan
from seriatim.core.stream import Stream
from seriatim.steps.fold import Outcome
from seriatim.steps.retention import Short

LINE_EVERY_SECONDS = 10.0
BAR_WIDTH = 24


class Progress:
    """What is done of all, rate and time to go: one living line on a terminal, plain lines in a log."""

    def __init__(self, stream: str, unit: str = "messages") -> None:
        self.stream, self.unit = stream, unit
        self.living = sys.stderr.isatty() and not Options.json
        self.began = time.monotonic()
        self.said = self.began
        self.open = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self.living and now - self.said < LINE_EVERY_SECONDS and done < total:
            return
        self.said = now
        rate = done / max(now - self.began, 1e-9)
        left = (total - done) / rate if rate else 0
        share = done / total if total else 1
        text = f"{self.stream}: {done:,} of {total:,} {self.unit} · {rate:,.0f}/s · {_duration(left)} to go"
        if self.living:
            bar = "━" * round(share * BAR_WIDTH) + "╌" * (BAR_WIDTH - round(share * BAR_WIDTH))
            typer.echo(f"\r\033[K{bar} {share:4.0%} {text}", err=True, nl=False)
            self.open = True
        else:
            say(text, done=done, total=total)

    def close(self) -> None:
        """Leave the living line."""
        if self.open:
            typer.echo("", err=True)
            self.open = False


def outcome(stream: str, outcome: Outcome, *, json: bool) -> None:
    """What a run did; new findings raise, so that the run fails."""
    findings(stream, outcome.findings, json=json)
    for partition, halt in outcome.waiting:
        since = f"waits at offset {halt.offset} since entry {halt.sequence}"
        say(f"{stream} {partition}: {since}: {halt.finding}, {halt.cause}", waiting=str(partition), offset=halt.offset)
    for partition in outcome.gone:
        text = f"{stream} {partition}: gone from Kafka, or matched no more; its state is kept"
        say(text, gone=str(partition))
    if outcome.quarantined:
        text = f"{stream}: {outcome.quarantined} in quarantine; `seriatim status {stream}` lists them"
        say(text, quarantined=outcome.quarantined)
    if outcome.foreign >= 0:
        text = (
            f"{stream}: others wrote to the records table (told by entry {outcome.foreign}); `seriatim verify {stream}`"
        )
        say(f"{text} says what differs", foreign=outcome.foreign)
    if outcome.behind:
        what = f"{stream}: the tables gaps and quarantine are behind; the next run catches up. Records are complete."
        say(what if json else f"{what}\n{outcome.behind}", behind=outcome.behind)
    if outcome.unasked:
        what = f"{stream}: producers were not asked for the snapshots that sessions need; the next run asks again."
        say(what if json else f"{what}\n{outcome.unasked}", unasked=outcome.unasked)
    if json:
        _print_json(_outcome_values(stream, outcome))
    else:
        _tell(stream, outcome)
    errors = [finding for finding in outcome.findings if finding.level == "error"]
    if errors:
        raise failure(stream, errors)
    if outcome.gone and not outcome.matched:
        raise ConfigError(
            f"{stream}: none of its topics is there any more",
            next="check `topics` in the stream file (it must match whole names) and the broker's address",
        )


def _tell(stream: str, outcome: Outcome) -> None:
    if not outcome.slices:
        typer.echo(f"{stream}: nothing new")
        return
    headless = f", {outcome.headless} headless" if outcome.headless else ""
    typer.echo(
        f"{stream}: {outcome.messages} messages{headless} → {outcome.records} records in {outcome.slices} "
        f"slice{'s' * (outcome.slices > 1)}, ledger at entry {outcome.sequence}"
    )


def _outcome_values(stream: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "stream": stream,
        "messages": outcome.messages,
        "records": outcome.records,
        "headless": outcome.headless,
        "slices": outcome.slices,
        "sequence": outcome.sequence,
        "findings": len(outcome.findings),
        "waiting": [str(partition) for partition, _ in outcome.waiting],
        "quarantined": outcome.quarantined,
        "peak_memory_bytes": outcome.peak_memory_bytes,
    }


def findings(stream: str, found: list[Finding], *, json: bool) -> None:
    """Findings on stderr: one screen each, or one JSON object per line."""
    for finding in found:
        text = msgspec.json.encode(finding.told(stream)).decode() if json else finding.render(stream) + "\n"
        typer.echo(text, err=True)


def plan(stream: Stream, ledger: Ledger, made: Plan, short: Sequence[Short] = (), *, json: bool) -> None:
    """What the next run would do."""
    rows = [
        {
            "topic": partition.topic,
            "partition": partition.number,
            "from": whole.start,
            "until": whole.end,
            "messages": len(whole),
            "new": partition in made.born,
        }
        for partition, whole in sorted(made.ranges.items())
    ]
    waiting = [str(partition) for partition in made.waiting]
    if json:
        found = [finding.told(stream.name) for finding in made.findings]
        _print_json(
            {
                "stream": stream.name,
                "sequence": ledger.sequence,
                "partitions": rows,
                "waiting": waiting,
                "gone": [str(p) for p in made.gone],
                "findings": found,
                "short_retention": list(short),
                "messages": made.backlog,
            }
        )
        return
    table(["topic", "partition", "from", "until", "messages", "new"], rows)
    slices = -(-made.backlog // stream.slice.messages_max)
    typer.echo(f"{stream.name}: {made.backlog} messages in about {slices} slice{'s' * (slices != 1)}")
    for place in waiting:
        typer.echo(f"{place}: waits since an earlier run; `seriatim status {stream.name}` says why")
    for partition in made.gone:
        typer.echo(f"{partition}: gone from Kafka or matched no more; its state is kept")
    for topic in short:
        typer.secho(f"{topic.text}\n  → {topic.next}", fg=typer.colors.YELLOW)
    findings(stream.name, made.findings, json=False)


def table(columns: list[str], rows: list[dict[str, Any]]) -> None:
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
        drawn.add_row(*(Text(_cell(row.get(column))) for column in columns))
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(drawn)


def _cell(value: Any) -> str:
    if value is None or value is False:
        return ""
    return "yes" if value is True else str(value)


def _print_json(value: Any) -> None:
    typer.echo(msgspec.json.encode(value).decode())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
