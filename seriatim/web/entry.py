"""Entry: one slice's page: its manifest, certificates, verdicts, files, and its report. Pure.

The tables are those of a report (operations/report.py), of this entry alone.

Next room: read.py finds the entry and who judged it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from seriatim.ledger.model import Entry, File, Manifest
from seriatim.ledger.verdicts import has_nothing_to_judge
from seriatim.operations.report import build_report_page as report_page
from seriatim.operations.report_page import PageTable, render_sections, safe_text
from seriatim.web import history
from seriatim.web.address import page_path
from seriatim.web.draw import element, link, page_shell
from seriatim.web.read import SliceRow

FILES_SHOWN = 200


def render_entry_page(base: str, stream: str, slice_row: SliceRow) -> str:
    """One entry."""
    manifest, number = slice_row.manifest, slice_row.manifest.entry.sequence
    report = report_page(stream, slice_row.ledger_before, [manifest])
    tables = [
        table
        for table in report.tables
        if table.title in ("Certificates", "Verdicts") and table.rows
    ]
    tables += [] if has_nothing_to_judge(manifest.entry) else [_verdicts_table(slice_row.verdicts)]
    tables += [_manifest_table(manifest), *_files_tables(manifest.entry)]
    body = [
        element("p", *_entry_links(base, stream, slice_row), css="soft"),
        element("div", *render_sections(replace(report, tables=tables)), css="wide"),
    ]
    crumbs = [("Streams", "/"), (stream, page_path("stream", stream))]
    when = f"{manifest.entry.kind}, {history.render_moment(manifest.entry.at_seconds)}"
    return page_shell(base, f"Entry {number}", crumbs, when, body)


def render_run_page(
    base: str, stream: str, run_id: str, manifests: Sequence[Manifest], run_state: str, count: int
) -> str:
    """What a run of Airflow did: the last of the `count` entries that were made while it lasted."""
    rows = [history.entry_row(one) for one in manifests]
    crumbs = [("Streams", "/"), (stream, page_path("stream", stream))]
    if not rows:
        words = "No ledger entry was made while it lasted: nothing was folded or judged."
        return page_shell(
            base, f"Run {run_id}", crumbs, run_state, [element("p", safe_text(words), css="soft")]
        )
    last = rows[-1].sequence
    fewer = f"It made {count} entries; these are the last {len(rows)} of them, and their findings."
    body = [
        *([element("p", safe_text(fewer), css="soft")] if count > len(rows) else []),
        element(
            "p", link(base, page_path("stream", stream, "reports", last), f"Report of entry {last}")
        ),
        history.rate_chart(rows),
        history.entries_table(base, stream, rows[::-1]),
        *_findings_html(stream, manifests),
    ]
    return page_shell(base, f"Run {run_id}", crumbs, run_state, body)


def _findings_html(stream: str, manifests: Sequence[Manifest]) -> Iterable[str]:
    from seriatim.web.stream import findings_section

    return findings_section(stream, manifests)


def _entry_links(base: str, stream: str, slice_row: SliceRow) -> Iterable[str]:
    number = slice_row.manifest.entry.sequence
    ways = [(number - 1, "‹ entry before"), (number + 1, "entry after ›")]
    links = [
        link(base, page_path("stream", stream, "entry", to), label)
        for to, label in ways
        if 0 <= to <= slice_row.last_sequence
    ]
    word = "Report" if slice_row.has_report else "Report, made anew"
    yield " · ".join([*links, link(base, page_path("stream", stream, "reports", number), word)])


def _manifest_table(manifest: Manifest) -> PageTable:
    """The manifest, as far as people ask."""
    entry, ledger = manifest.entry, manifest.ledger
    facts: dict[str, object] = {
        "manifest": f"manifests/{entry.sequence:010d}-{ledger.sha256}.json.zst",
        "SHA-256": ledger.sha256,
        "entry before": entry.previous,
        "attempt": entry.attempt,
        "Seriatim": entry.product_version,
        "machine": f"{entry.machine}, state version {entry.state_version}" if entry.machine else "",
        "peak memory of a task": f"{entry.peak_memory_bytes / 1e6:,.0f} MB"
        if entry.peak_memory_bytes
        else "",
        "reason": entry.reason,
        "hold": entry.hold or "",
        "checked up to": ledger.checked,
        "circuit": ledger.circuit,
    }
    return PageTable(
        title="Manifest",
        columns=("what", "is"),
        rows=[[k, str(v)] for k, v in facts.items() if v != ""],
    )


def _verdicts_table(manifests: Sequence[Manifest]) -> PageTable:
    """Who judged this entry later."""
    rows = [
        [
            one.entry.sequence,
            f"{one.entry.judged_after + 1} to {one.entry.judged_until}",
            place,
            result,
            one.entry.reason,
        ]
        for one in manifests
        for place, result in one.entry.verdict.items()
    ]
    columns = ("entry", "judged", "partition", "verdict", "what was looked at")
    empty = "Not judged yet: seriatim check"
    return PageTable(title="Verdicts of later checks", columns=columns, rows=rows, empty=empty)


def _files_tables(entry: Entry) -> Iterable[PageTable]:
    """Files that the entry named and took away."""
    named: list[tuple[str, File]] = [
        (kind, file)
        for change in entry.changes
        for kind, files in (
            ("records", change.records),
            ("state", change.state or ()),
            ("kept", change.quarantine_files),
        )
        for file in files
    ]
    rows = [
        [kind, file.path, file.rows, file.size_bytes, file.digest]
        for kind, file in named[:FILES_SHOWN]
    ]
    if rows:
        yield PageTable(
            title=f"Files ({len(named)})",
            columns=("kind", "path", "rows", "bytes", "XXH3-128"),
            rows=rows,
        )
    if entry.removed_paths:
        gone = [[path] for path in entry.removed_paths[:FILES_SHOWN]]
        yield PageTable(
            title=f"Files that left the table ({len(entry.removed_paths)})",
            columns=("path",),
            rows=gone,
        )
