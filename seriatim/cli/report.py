"""`seriatim report`: what a run did, as one HTML file under `reports/` of the output.

Next room: operations/report.py gathers; operations/report_page.py draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.run import Json, StreamName

if TYPE_CHECKING:
    from seriatim.stream_files import StreamFile


REPORTS_KEPT_MAX = 500
"""Reports; older ones can be made again."""


@app.command()
def report(
    stream: StreamName,
    sequence: Annotated[
        int | None, typer.Option(min=0, help="Up to this ledger entry. Default: the last.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    json: Json = False,
) -> None:
    """Write a report of the last entries: one HTML file that needs nothing else. Prints its path.

    Each run and each check writes one by itself. It is made of the ledger alone: any of the past
    can be made again.

    Example: seriatim report demo --open
    """
    from seriatim import stream_files

    Options.json = json
    file = stream_files.load_stream(stream, config.load_settings().streams)
    path, entry = write_report(file, sequence)
    if json:
        typer.echo(
            msgspec.json.encode(
                {"stream": file.stream.name, "sequence": entry, "path": str(path)}
            ).decode()
        )
    else:
        typer.echo(path)
    if open_it:
        typer.launch(path.as_uri())


def write_report(
    file: StreamFile, sequence: int | None = None, since: int | None = None
) -> tuple[Path, int]:
    """Write a report of the entries after `since` up to `sequence`; its path, and the last entry."""
    from seriatim import context
    from seriatim.operations.report import build_report as make
    from seriatim.operations.report_page import render_page
    from seriatim.storage.files import write_file

    last, page = make(context.ledger(file), file.stream.name, sequence, since)
    path = Path(file.stream.output.path) / "reports" / f"{last:010d}.html"
    write_file(path, render_page(page).encode("utf-8", "backslashreplace"))
    return path, last


def write_run_report(file: StreamFile, since: int, sequence: int) -> None:
    """Write the report of a run, if it did something. That it cannot be written does not undo the
    run: it is said.
    """
    if sequence <= since:
        return
    try:
        path, entry = write_report(file, sequence, since)
        for old in sorted(path.parent.glob("*.html"))[:-REPORTS_KEPT_MAX]:
            old.unlink(missing_ok=True)
    except OSError as error:
        print_notice(f"{file.stream.name}: the report could not be written: {error}", report=None)
    else:
        print_notice(f"{file.stream.name}: report {path}", report=str(path), sequence=entry)
