"""`seriatim report`: write what a run did as one HTML file under `reports/` of the output.

Next: operations/report.py gathers the facts; operations/report_page.py renders the page.
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
"""How many reports stay on the disk. Older ones can be made again from the ledger."""


@app.command()
def report(
    stream: StreamName,
    sequence: Annotated[
        int | None, typer.Option(min=0, help="Report up to this ledger entry. Default: the last.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    json: Json = False,
) -> None:
    """Write a report of the last entries as one HTML file.

    The file needs no other file. Its path is printed. Each run and each check writes a report by
    itself. A report is made of the ledger alone, so any report of the past can be made again.

    Example: seriatim report demo --open
    """
    from seriatim import stream_files

    Options.json = json
    file = stream_files.load_stream(stream, config.load_settings().streams)
    path, last_entry = write_report(file, sequence)
    if json:
        values = {"stream": file.stream.name, "sequence": last_entry, "path": str(path)}
        typer.echo(msgspec.json.encode(values).decode())
    else:
        typer.echo(path)
    if open_it:
        typer.launch(path.as_uri())


def write_report(
    file: StreamFile, sequence: int | None = None, since: int | None = None
) -> tuple[Path, int]:
    """Write a report of the entries after `since` up to `sequence`.

    Returns the path of the report, and its last entry.
    """
    from seriatim import context
    from seriatim.operations.report import build_report
    from seriatim.operations.report_page import render_page
    from seriatim.storage.files import write_file

    last_entry, page = build_report(context.ledger(file), file.stream.name, sequence, since)
    path = Path(file.stream.output.path) / "reports" / f"{last_entry:010d}.html"
    # Session names may have parts of characters, which UTF-8 cannot encode.
    write_file(path, render_page(page).encode("utf-8", "backslashreplace"))
    return path, last_entry


def write_run_report(file: StreamFile, since: int, sequence: int) -> None:
    """Write the report of a run that committed something, and delete the oldest reports.

    A report that cannot be written is a notice only: the run is committed already.
    """
    if sequence <= since:
        return
    try:
        path, last_entry = write_report(file, sequence, since)
        # Names have the entry with leading zeros, so they sort by age.
        oldest_first = sorted(path.parent.glob("*.html"))
        for old_report in oldest_first[:-REPORTS_KEPT_MAX]:
            old_report.unlink(missing_ok=True)
    except OSError as error:
        print_notice(f"{file.stream.name}: the report could not be written: {error}", report=None)
    else:
        print_notice(f"{file.stream.name}: report {path}", report=str(path), sequence=last_entry)
