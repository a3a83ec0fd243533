"""`seriatim report`: write what a run did as one HTML file under `reports/` of the output.

Next: operations/report.py gathers the facts; web/views.py renders the page.
"""

from __future__ import annotations

from typing import Annotated

import typer

from seriatim import config, context, stream_files
from seriatim.cli import print_json, print_notice
from seriatim.cli.options import Json, StreamName
from seriatim.errors import SeriatimError
from seriatim.operations.report import REPORTS, build_report, report_key
from seriatim.ports import LedgerStore
from seriatim.storage.store import Store
from seriatim.stream_files import StreamFile
from seriatim.web.views import render_report

REPORTS_KEPT_MAX = 500
"""How many reports stay on the disk. Older ones can be made again from the ledger."""


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
    file = stream_files.load_stream(stream, config.load_settings().streams)
    store = context.output_store(file)
    key, last_entry = write_report(file, store, sequence)
    path = f"{store.url}/{key}"
    if json:
        values = {"stream": file.stream.name, "sequence": last_entry, "path": path}
        print_json(values)
    else:
        typer.echo(path)
    if open_it:
        typer.launch(store.uri(key))


def write_report(
    file: StreamFile,
    store: Store,
    sequence: int | None = None,
    since: int | None = None,
    ledger: LedgerStore | None = None,
) -> tuple[str, int]:
    """Write a report of the entries after `since` up to `sequence`. `ledger` is the stream's, if it is
    open already.

    Returns the key of the report in the store, and its last entry.
    """
    if ledger is None:
        ledger = context.ledger(file)
    last_entry, page = build_report(ledger, file.stream.name, sequence, since)
    key = report_key(last_entry)
    # Session names may have parts of characters, which UTF-8 cannot encode.
    store.replace(key, render_report(page).encode("utf-8", "backslashreplace"))
    return key, last_entry


def write_run_report(
    file: StreamFile, since: int, sequence: int, ledger: LedgerStore | None = None
) -> None:
    """Write the report of a run that committed something, and delete the oldest reports.

    A report that cannot be written is a notice only: the run is committed already.
    """
    if sequence <= since:
        return
    try:
        store = context.output_store(file)
        key, last_entry = write_report(file, store, sequence, since, ledger)
        # Names have the entry with leading zeros, so they sort by age.
        oldest_first = [name for name, _ in store.keys(REPORTS) if name.endswith(".html")]
        store.delete(oldest_first[:-REPORTS_KEPT_MAX])
    except (OSError, SeriatimError) as error:
        print_notice(f"{file.stream.name}: the report could not be written: {error}", report=None)
    else:
        path = f"{store.url}/{key}"
        print_notice(f"{file.stream.name}: report {path}", report=path, sequence=last_entry)
