"""The pages of one ledger entry and of one Airflow run. Pure: values in, HTML out.

The page of an entry has its manifest, certificates, verdicts and files, and a link to its report.
Its tables are those of a report (operations/report.py) about this entry alone.

Next: web/read.py finds the entry and the verdicts about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from seriatim.ledger.model import Entry, File, Manifest
from seriatim.ledger.verdicts import has_nothing_to_judge
from seriatim.operations.report import build_report_page
from seriatim.operations.report_page import PageTable, render_sections
from seriatim.web import history
from seriatim.web.address import page_path
from seriatim.web.draw import element, link, page_shell, text_element
from seriatim.web.read import SliceRow
from seriatim.web.stream import findings_section

FILES_SHOWN = 200
"""Files that a page lists, at most."""
REPORT_TABLES = ("Certificates", "Verdicts")
"""The tables of a report that the page of an entry has as well."""


def render_entry_page(base: str, stream: str, slice_row: SliceRow) -> str:
    """The page of one entry."""
    manifest = slice_row.manifest
    entry = manifest.entry
    report = build_report_page(stream, slice_row.ledger_before, [manifest])
    tables = [table for table in report.tables if table.title in REPORT_TABLES and table.rows]
    if not has_nothing_to_judge(entry):
        tables.append(_verdicts_table(slice_row.verdicts))
    tables.append(_manifest_table(manifest))
    tables += _files_tables(entry)
    body = [
        element("p", _entry_links(base, stream, slice_row), css="soft"),
        element("div", *render_sections(replace(report, tables=tables)), css="wide"),
    ]
    subtitle = f"{entry.kind}, {history.render_moment(entry.at_seconds)}"
    return page_shell(base, f"Entry {entry.sequence}", _crumbs(stream), subtitle, body)


def render_run_page(
    base: str, stream: str, run_id: str, manifests: Sequence[Manifest], run_state: str, count: int
) -> str:
    """The page of an Airflow run: the last of the `count` entries that were made while it lasted."""
    title = f"Run {run_id}"
    rows = [history.entry_row(manifest) for manifest in manifests]
    if not rows:
        text = "No ledger entry was made while it lasted: nothing was folded or judged."
        body = [text_element("p", text, css="soft")]
        return page_shell(base, title, _crumbs(stream), run_state, body)
    body = []
    if count > len(rows):
        text = (
            f"It made {count} entries; these are the last {len(rows)} of them, and their findings."
        )
        body.append(text_element("p", text, css="soft"))
    last_sequence = rows[-1].sequence
    report_path = page_path("stream", stream, "reports", last_sequence)
    body.append(element("p", link(base, report_path, f"Report of entry {last_sequence}")))
    body.append(history.rate_chart(rows))
    body.append(history.entries_table(base, stream, rows[::-1]))
    body += findings_section(stream, manifests)
    return page_shell(base, title, _crumbs(stream), run_state, body)


def _crumbs(stream: str) -> list[tuple[str, str]]:
    return [("Streams", "/"), (stream, page_path("stream", stream))]


def _entry_links(base: str, stream: str, slice_row: SliceRow) -> str:
    """Links to the entry before, to the entry after, and to the report."""
    sequence = slice_row.manifest.entry.sequence
    links = []
    if sequence > 0:
        path = page_path("stream", stream, "entry", sequence - 1)
        links.append(link(base, path, "‹ entry before"))
    if sequence < slice_row.last_sequence:
        path = page_path("stream", stream, "entry", sequence + 1)
        links.append(link(base, path, "entry after ›"))
    label = "Report" if slice_row.has_report else "Report, made anew"
    links.append(link(base, page_path("stream", stream, "reports", sequence), label))
    return " · ".join(links)


def _manifest_table(manifest: Manifest) -> PageTable:
    """The facts of a manifest that people ask for."""
    entry = manifest.entry
    ledger = manifest.ledger
    machine = ""
    if entry.machine:
        machine = f"{entry.machine}, state version {entry.state_version}"
    peak_memory = ""
    if entry.peak_memory_bytes:
        peak_memory = f"{entry.peak_memory_bytes / 1e6:,.0f} MB"
    facts: dict[str, object] = {
        "manifest": f"manifests/{entry.sequence:010d}-{ledger.sha256}.json.zst",
        "SHA-256": ledger.sha256,
        "entry before": entry.previous,
        "attempt": entry.attempt,
        "Seriatim": entry.product_version,
        "machine": machine,
        "peak memory of a task": peak_memory,
        "reason": entry.reason,
        "hold": entry.hold or "",
        "checked up to": ledger.checked,
        "circuit": ledger.circuit,
    }
    rows = [[name, str(value)] for name, value in facts.items() if value != ""]
    return PageTable(title="Manifest", columns=("what", "is"), rows=rows)


def _verdicts_table(manifests: Sequence[Manifest]) -> PageTable:
    """The verdicts of later entries about this one."""
    rows: list[Sequence[object]] = []
    for manifest in manifests:
        entry = manifest.entry
        judged = f"{entry.judged_after + 1} to {entry.judged_until}"
        rows += [
            [entry.sequence, judged, partition_name, result, entry.reason]
            for partition_name, result in entry.verdict.items()
        ]
    return PageTable(
        title="Verdicts of later checks",
        columns=("entry", "judged", "partition", "verdict", "what was looked at"),
        rows=rows,
        empty="Not judged yet: seriatim check",
    )


def _files_tables(entry: Entry) -> Iterable[PageTable]:
    """The files that the entry added to the output, and those that it removed."""
    files: list[tuple[str, File]] = []
    for change in entry.changes:
        files += [("records", file) for file in change.records]
        files += [("state", file) for file in change.state or ()]
        files += [("quarantine", file) for file in change.quarantine_files]
    if files:
        rows = [
            [kind, file.path, file.rows, file.size_bytes, file.digest]
            for kind, file in files[:FILES_SHOWN]
        ]
        yield PageTable(
            title=f"Files ({len(files)})",
            columns=("kind", "path", "rows", "bytes", "XXH3-128"),
            rows=rows,
        )
    if entry.removed_paths:
        yield PageTable(
            title=f"Files that left the table ({len(entry.removed_paths)})",
            columns=("path",),
            rows=[[path] for path in entry.removed_paths[:FILES_SHOWN]],
        )
