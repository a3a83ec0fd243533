"""Entry: one slice's page: its manifest, certificates, verdicts, files, and its report. Pure.

The tables are those of a report (steps/report.py), of this entry alone.

Next room: read.py finds the entry and who judged it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from seriatim.core.ledger import Entry, File, Manifest
from seriatim.core.page import Table, sections, text
from seriatim.core.verdict import is_silent
from seriatim.page import history
from seriatim.page.address import at
from seriatim.page.draw import element, link, shell
from seriatim.page.read import Slice
from seriatim.steps.report import page as report_page

FILES_SHOWN = 200


def page(base: str, stream: str, found: Slice) -> str:
    """One entry."""
    manifest, number = found.manifest, found.manifest.entry.sequence
    report = report_page(stream, found.before, [manifest])
    tables = [table for table in report.tables if table.title in ("Certificates", "Verdicts") and table.rows]
    tables += [] if is_silent(manifest.entry) else [_verdicts(found.verdicts)]
    tables += [_facts(manifest), *_files(manifest.entry)]
    body = [
        element("p", *_ways(base, stream, found), css="soft"),
        element("div", *sections(replace(report, tables=tables)), css="wide"),
    ]
    crumbs = [("Streams", "/"), (stream, at("stream", stream))]
    when = f"{manifest.entry.kind}, {history.when(manifest.entry.at_seconds)}"
    return shell(base, f"Entry {number}", crumbs, when, body)


def run(base: str, stream: str, name: str, manifests: Sequence[Manifest], said: str, count: int) -> str:
    """What a run of Airflow did: the last of the `count` entries that were made while it lasted."""
    rows = [history.row(one) for one in manifests]
    crumbs = [("Streams", "/"), (stream, at("stream", stream))]
    if not rows:
        words = "No ledger entry was made while it lasted: nothing was folded or judged."
        return shell(base, f"Run {name}", crumbs, said, [element("p", text(words), css="soft")])
    last = rows[-1].sequence
    fewer = f"It made {count} entries; these are the last {len(rows)} of them, and their findings."
    body = [
        *([element("p", text(fewer), css="soft")] if count > len(rows) else []),
        element("p", link(base, at("stream", stream, "reports", last), f"Report of entry {last}")),
        history.chart(rows),
        history.entries(base, stream, rows[::-1]),
        *_findings(stream, manifests),
    ]
    return shell(base, f"Run {name}", crumbs, said, body)


def _findings(stream: str, manifests: Sequence[Manifest]) -> Iterable[str]:
    from seriatim.page.stream import findings

    return findings(stream, manifests)


def _ways(base: str, stream: str, found: Slice) -> Iterable[str]:
    number = found.manifest.entry.sequence
    ways = [(number - 1, "‹ entry before"), (number + 1, "entry after ›")]
    links = [link(base, at("stream", stream, "entry", to), label) for to, label in ways if 0 <= to <= found.last]
    word = "Report" if found.has_report else "Report, made anew"
    yield " · ".join([*links, link(base, at("stream", stream, "reports", number), word)])


def _facts(manifest: Manifest) -> Table:
    """The manifest, as far as people ask."""
    entry, ledger = manifest.entry, manifest.ledger
    facts: dict[str, object] = {
        "manifest": f"manifests/{entry.sequence:010d}-{ledger.sha256}.json.zst",
        "SHA-256": ledger.sha256,
        "entry before": entry.previous,
        "attempt": entry.attempt,
        "Seriatim": entry.product,
        "machine": f"{entry.machine}, state version {entry.state_version}" if entry.machine else "",
        "peak memory of a task": f"{entry.peak_memory_bytes / 1e6:,.0f} MB" if entry.peak_memory_bytes else "",
        "reason": entry.reason,
        "hold": entry.held or "",
        "checked up to": ledger.checked,
        "circuit": ledger.circuit,
    }
    return Table(title="Manifest", columns=("what", "is"), rows=[[k, str(v)] for k, v in facts.items() if v != ""])


def _verdicts(manifests: Sequence[Manifest]) -> Table:
    """Who judged this entry later."""
    rows = [
        [one.entry.sequence, f"{one.entry.since + 1} to {one.entry.judged}", place, result, one.entry.reason]
        for one in manifests
        for place, result in one.entry.verdict.items()
    ]
    columns = ("entry", "judged", "partition", "verdict", "what was looked at")
    empty = "Not judged yet: seriatim check"
    return Table(title="Verdicts of later checks", columns=columns, rows=rows, empty=empty)


def _files(entry: Entry) -> Iterable[Table]:
    """Files that the entry named and took away."""
    named: list[tuple[str, File]] = [
        (kind, file)
        for change in entry.changes
        for kind, files in (("records", change.records), ("state", change.state or ()), ("kept", change.kept))
        for file in files
    ]
    rows = [[kind, file.path, file.rows, file.bytes, file.digest] for kind, file in named[:FILES_SHOWN]]
    if rows:
        yield Table(title=f"Files ({len(named)})", columns=("kind", "path", "rows", "bytes", "XXH3-128"), rows=rows)
    if entry.removed:
        gone = [[path] for path in entry.removed[:FILES_SHOWN]]
        yield Table(title=f"Files that left the table ({len(entry.removed)})", columns=("path",), rows=gone)
