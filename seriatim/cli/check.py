"""`seriatim check`: gate 2. What was committed and not judged yet is judged by suites of expectations.

Next room: steps/check.py does it; seriatim/suites.py finds the suites.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, say
from seriatim.cli.run import Json, StreamName

if TYPE_CHECKING:
    from seriatim.core.integrity import Finding
    from seriatim.core.ledger import Ledger
    from seriatim.core.stream import Stream
    from seriatim.steps.check import Checked, Means
    from seriatim.steps.gather import Table
    from seriatim.streams import StreamFile


@app.command()
def check(stream: StreamName, json: Json = False) -> None:
    """Judge every ledger entry that was not judged yet, by the suites in expectations/.

    The verdict is an entry of its own: good or bad per partition. A bad one (exit code 3) opens the circuit: nothing
    newer is published until the partition is repaired and checked again, or a person accepts it. A check that is
    itself broken (exit code 2) is no verdict at all.

    Example: seriatim check demo --json
    """
    from seriatim import streams

    Options.json = json
    settings = config.load()
    config.arm_crash_point(settings.crash_point)
    judge(streams.load(stream, settings.streams), json=json)


def judge(file: StreamFile, *, json: bool) -> Checked:
    """Check a stream and tell what came of it; what is bad raises, after it was told."""
    from seriatim import streams
    from seriatim.cli import report, show
    from seriatim.steps.check import check as run
    from seriatim.steps.tell import mark_told, untold

    streams.refuse_unwritable_output(file)
    name, progress = file.stream.name, show.Progress(file.stream.name, "records")
    made = means(file, progress)
    try:
        done = run(made)
    finally:
        progress.close()
    found = untold(made.ledger, name)
    report.leave(file, done.since, done.sequence)
    show.findings(name, found, json=json)
    mark_told(made.ledger, done.ledger.sequence)
    _tell(name, done, found, json=json)
    return done


def means(file: StreamFile, progress: Any = None) -> Means:
    """What a check is made with, for real."""
    from seriatim import streams, suites, wiring
    from seriatim.adapters.clock import WallClock
    from seriatim.adapters.gx import GreatExpectations
    from seriatim.adapters.parquet import ParquetRecords
    from seriatim.adapters.sight import FileSight
    from seriatim.steps.check import Means

    stream, root = file.stream, Path(file.stream.output.path)
    columns = streams.runner(file).columns
    return Means(
        stream=stream.name,
        suites=suites.load(stream, Path(file.folder)),
        ledger=wiring.ledger(file, with_schema=True),
        state=lambda: wiring.state(file),
        records=ParquetRecords(root, columns, stream.output.compression, stream.output.partition_by),
        sight=FileSight(root),
        checker=GreatExpectations(root),
        table=table(stream),
        clock=WallClock(),
        new_attempt=wiring.new_attempt,
        peak_memory_bytes=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        progress=progress or (lambda _done, _total: None),
    )


def table(stream: Stream) -> Table | None:
    """The stock machine, whose records say how they fold; None for any other."""
    from seriatim.steps.gather import Table

    if stream.machine != "table":
        return None
    given = stream.table
    return Table(given.key, tuple(given.columns), given.before, stream.table_machine().load)


def open_circuit(ledger: Ledger) -> None:
    """A banner while the circuit is open."""
    from seriatim.core.verdict import shown, way_out

    if ledger.circuit == "open":
        failed = "; ".join(shown(one) for one in ledger.failed[:5])
        text = f"{ledger.stream}: the circuit is open, current stays at entry {ledger.checked} or before: {failed}"
        say(f"{text}\n  next: {way_out(ledger)}", circuit="open", checked=ledger.checked, next=way_out(ledger))


def _tell(stream: str, done: Checked, found: list[Finding], *, json: bool) -> None:
    from seriatim.core.integrity import FindingsError, failure
    from seriatim.core.verdict import way_out

    for note in done.notes:
        say(f"{stream}: {note}", note=note)
    if json:
        typer.echo(msgspec.json.encode(_values(stream, done, found)).decode())
    bad = sorted(place for place, result in done.verdict.items() if result != "good")
    if bad:
        raise FindingsError(
            f"{stream}: {len(bad)} of {len(done.verdict)} partitions are bad: {', '.join(bad[:10])}",
            judged=f"entries {done.since + 1} to {done.to}",
            checked=f"up to entry {done.ledger.checked}; nothing newer is published",
            findings=[finding for finding in found if finding.level == "error"],
            next=way_out(done.ledger),
        )
    open_circuit(done.ledger)
    if errors := [finding for finding in found if finding.level == "error"]:
        raise failure(stream, errors)
    if not json:
        typer.echo(_summary(stream, done))


def _summary(stream: str, done: Checked) -> str:
    checked = f"checked up to entry {done.ledger.checked}"
    if done.sequence < 0:
        return f"{stream}: nothing new to judge, {checked}"
    parts = f"{done.records} records in {len(done.verdict)} partition{'s' * (len(done.verdict) != 1)}"
    rules = f"{len(done.evidence)} promises, {done.expectations} expectations"
    return f"{stream}: good: entries {done.since + 1} to {done.to}: {parts}, {rules}; {checked}"


def _values(stream: str, done: Checked, found: list[Finding]) -> dict[str, Any]:
    return {
        "stream": stream,
        "from": done.since,
        "to": done.to,
        "verdict": done.verdict,
        "records": done.records,
        "promises": [
            {"partition": str(one.partition), "promise": one.promise, "holds": one.holds, "broken": one.broken}
            for one in done.evidence
        ],
        "expectations": done.expectations,
        "findings": len(found),
        "sequence": done.sequence if done.sequence >= 0 else None,
        "checked": done.ledger.checked,
        "circuit": done.ledger.circuit,
        "notes": done.notes,
    }
