"""The pages: all streams, one stream, one ledger entry, one Airflow run, an error. Pure: values in,
HTML out.

A view chooses what its template shows (web/templates). Texts, colours and pictures are made by the
filters of web/render.py.

Next: web/read.py reads what is shown; web/app.py serves the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.findings import FindingGroup, count_of, group_findings, noun_of
from seriatim.ledger.entries import (
    Entry,
    HoldEntry,
    MachineEntry,
    ReleaseEntry,
    RepairEntry,
    VerdictEntry,
)
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Ledger
from seriatim.operations.report import (
    Card,
    PageTable,
    ReportPage,
    build_report_page,
    verdicts_table,
)
from seriatim.operations.status import (
    PartitionStatus,
    StreamStatus,
    Tone,
    group_quarantined,
    time_tone,
    urgent_first,
)
from seriatim.web.address import page_path
from seriatim.web.read import SliceRow, StreamHistory
from seriatim.web.render import (
    STALE_SECONDS,
    render_age,
    render_moment,
    render_number,
    render_template,
    render_time_left,
)
from seriatim.web.runbook import parse_runbook

PARTITIONS_SHOWN = 500
FINDINGS_SHOWN = 20
SESSIONS_SHOWN = 100
FILES_SHOWN = 200
"""Files that the page of an entry lists, at most."""
REPORT_TABLES = ("Certificates", "Verdicts")
"""The tables of a report that the page of an entry has as well."""
NUMBER = "number"
"""The CSS class of columns with numbers."""
STREAM_COLUMNS = [
    ("stream", ""),
    ("verdict", ""),
    ("partitions", ""),
    ("lag", NUMBER),
    ("time left", NUMBER),
    ("last run", NUMBER),
    ("messages/s", NUMBER),
    ("quarantined", NUMBER),
    ("open gaps", NUMBER),
    ("circuit", ""),
]
PARTITION_COLUMNS = [
    ("partition", ""),
    ("log", ""),
    ("frontier", NUMBER),
    ("log start", NUMBER),
    ("log end", NUMBER),
    ("lag", NUMBER),
    ("time left", NUMBER),
    ("snapshot distance", NUMBER),
    ("state", ""),
]
SESSION_COLUMNS = [("session", ""), ("partition", ""), ("since offset", NUMBER), ("in Kafka", "")]
ENTRY_COLUMNS = [
    ("entry", NUMBER),
    ("kind", ""),
    ("when", ""),
    ("messages", NUMBER),
    ("records", NUMBER),
    ("took", NUMBER),
    ("a second", NUMBER),
    ("lag after", NUMBER),
    ("missing offsets", NUMBER),
    ("findings", NUMBER),
    ("certificate", ""),
]
CHART_WIDTH = 960
CHART_HEIGHT = 190
CHART_TOP = 24
CHART_LEFT = 8
CHART_BOTTOM = 4
CHART_SLICES_MIN = 12
"""The chart has space for at least so many slices: two of them should not fill it."""


def render_streams_page(
    base: str, stream_statuses: Sequence[StreamStatus], now_seconds: float
) -> str:
    """The page of all streams that the visitor may see. `base` is where the app is mounted."""
    subtitle = ""
    if stream_statuses:
        subtitle = _describe_kafka_ages(stream_statuses, now_seconds)
    return render_template(
        "streams.html",
        base=base,
        title="Streams",
        crumbs=(),
        subtitle=subtitle,
        statuses=urgent_first(stream_statuses),
        cards=_streams_cards(stream_statuses),
        columns=STREAM_COLUMNS,
        now_seconds=now_seconds,
    )


def _describe_kafka_ages(stream_statuses: Sequence[StreamStatus], now_seconds: float) -> str:
    """When Kafka was last asked, and also the oldest time if that is much older."""
    times = [status.at_seconds for status in stream_statuses if status.at_seconds]
    if not times:
        return "Kafka was not asked yet"
    oldest = min(times)
    newest = max(times)
    text = f"Kafka as of {render_age(newest, now_seconds)}"
    if newest - oldest > STALE_SECONDS:
        text += f", the oldest look {render_age(oldest, now_seconds)}"
    return text


def _streams_cards(stream_statuses: Sequence[StreamStatus]) -> list[Card]:
    """All streams in a few numbers."""
    tones = [status.tone for status in stream_statuses]
    bad = tones.count("bad")
    warn = tones.count("warn")
    partitions = 0
    halted = 0
    quarantined = 0
    lag = 0
    for status in stream_statuses:
        partitions += len(status.partitions)
        halted += sum(partition.halt is not None for partition in status.partitions)
        quarantined += status.quarantined_count
        lag += status.lag or 0
    return [
        Card(noun_of(len(stream_statuses), "stream"), f"{len(stream_statuses):,}"),
        Card("needs a person" if bad == 1 else "need a person", f"{bad:,}", _tone_of_count(bad)),
        Card("to look at", f"{warn:,}", "warn" if warn else ""),
        Card(noun_of(partitions, "partition"), f"{partitions:,}"),
        Card(noun_of(halted, "halted partition"), f"{halted:,}", _tone_of_count(halted)),
        Card(
            f"{noun_of(quarantined, 'session')} in quarantine",
            f"{quarantined:,}",
            _tone_of_count(quarantined),
        ),
        Card(noun_of(lag, "waiting message"), f"{lag:,}"),
    ]


def _tone_of_count(count: int) -> Tone:
    """The tone of a number that should be 0."""
    return "bad" if count else "good"


def render_stream_page(base: str, stream_history: StreamHistory, now_seconds: float) -> str:
    """The page of one stream."""
    status = stream_history.stream_status
    ledger = stream_history.ledger
    rows = [entry_row(manifest) for manifest in stream_history.manifests]
    worst_first = sorted(
        status.partitions,
        key=lambda partition: (partition.tone != "bad", partition.tone != "warn"),
    )
    partitions: list[tuple[PartitionStatus, Account | None]] = []
    for partition in worst_first[:PARTITIONS_SHOWN]:
        account = ledger.partitions.get(partition.partition_name) if ledger else None
        partitions.append((partition, account))
    findings = _findings_of(stream_history.manifests)
    return render_template(
        "stream.html",
        base=base,
        title=status.stream,
        crumbs=[("Streams", "/")],
        subtitle=_describe_kafka_age(status.at_seconds, now_seconds),
        status=status,
        stream=stream_history.file.stream,
        cards=_stream_cards(status, ledger, now_seconds),
        partitions=partitions,
        partition_columns=PARTITION_COLUMNS,
        partitions_not_shown=len(worst_first) - len(partitions),
        rows=rows,
        entry_columns=ENTRY_COLUMNS,
        chart=rate_chart(rows[::-1]),
        trouble=stream_history.trouble,
        findings=findings[:FINDINGS_SHOWN],
        findings_not_shown=len(findings) - FINDINGS_SHOWN,
        session_groups=group_quarantined(status.quarantined),
        session_columns=SESSION_COLUMNS,
        sessions_max=SESSIONS_SHOWN,
    )


def _describe_kafka_age(then_seconds: float | None, now_seconds: float) -> str:
    """When Kafka was last asked."""
    if then_seconds is None:
        return "Kafka was not asked yet: run or watch the stream"
    return f"Kafka as of {render_age(then_seconds, now_seconds)}"


def _stream_cards(status: StreamStatus, ledger: Ledger | None, now_seconds: float) -> list[Card]:
    """The stream in a few numbers."""
    quarantined = status.quarantined_count
    last_entry = "–"
    checked = "–"
    if ledger:
        last_entry = str(status.sequence)
        checked = str(status.checked)
    nearest = status.nearest
    time_left = Card("time left", render_time_left(None))
    if nearest is not None:
        seconds = nearest.time_left_seconds
        time_left = Card("time left", render_time_left(seconds), time_tone(nearest))
    return [
        Card("verdict", status.verdict_text, status.tone),
        Card("circuit", status.circuit, "bad" if status.circuit == "open" else "good"),
        Card("tier", status.tier),
        Card("waiting messages", render_number(status.lag)),
        time_left,
        Card("messages a second", render_number(status.rate)),
        Card("last run", render_age(status.last_run_seconds, now_seconds)),
        Card("in quarantine", f"{quarantined:,}", "bad" if quarantined else ""),
        Card("open gaps", render_number(status.gaps_open), "bad" if status.gaps_open else ""),
        Card("last entry", last_entry),
        Card("checked up to", checked),
    ]


class EntryFindings(Struct, frozen=True):
    """The findings of one entry that have the same kind and cause."""

    sequence: int
    group: FindingGroup


def _findings_of(manifests: Sequence[Manifest]) -> list[EntryFindings]:
    """The findings of entries in groups, each with the number of its entry."""
    findings: list[EntryFindings] = []
    for manifest in manifests:
        sequence = manifest.entry.sequence
        groups = group_findings(manifest.entry.findings)
        findings += [EntryFindings(sequence, group) for group in groups]
    return findings


class EntryRow(Struct, frozen=True, kw_only=True):
    """One ledger entry, in numbers."""

    sequence: int
    kind: str
    at_seconds: float
    messages: int
    records: int
    took_seconds: float
    lag: int
    holes: int
    errors: int
    warnings: int
    partitions: int
    reason: str
    bad_partitions: int | None
    """How many partitions are bad by a verdict; None: it is not one."""

    @property
    def rate(self) -> float | None:
        """Messages a second; None: it folded none."""
        if self.messages and self.took_seconds > 0:
            return self.messages / self.took_seconds
        return None

    @property
    def findings_tone(self) -> str:
        """The CSS class of the number of findings."""
        if self.errors:
            return "bad"
        if self.warnings:
            return "warn"
        return "soft"


def entry_row(manifest: Manifest) -> EntryRow:
    """A ledger entry in numbers."""
    entry = manifest.entry
    certificates = [change.certificate for change in entry.changes if change.certificate]
    lag = 0
    for account in manifest.ledger.partitions.values():
        if not account.retired:
            lag += max(0, account.log_end - account.frontier)
    finding_levels = [finding.level for finding in entry.findings]
    verdict = entry.verdict if isinstance(entry, VerdictEntry) else None
    return EntryRow(
        sequence=entry.sequence,
        kind=entry.kind,
        at_seconds=entry.at_seconds,
        messages=sum(certificate.counts.messages for certificate in certificates),
        records=sum(certificate.counts.records for certificate in certificates),
        took_seconds=entry.took_seconds,
        lag=lag,
        holes=sum(sum(certificate.holes.values()) for certificate in certificates),
        errors=finding_levels.count("error"),
        warnings=finding_levels.count("warning"),
        partitions=len(certificates) or len(entry.changes) or len(verdict or ()),
        reason=entry.reason,
        bad_partitions=None if verdict is None else list(verdict.values()).count("bad"),
    )


class ChartColumn(Struct, frozen=True):
    """A slice in the chart: a column, as high as its messages a second."""

    title: str
    x: str
    y: str
    width: str
    height: str


class RateChart(Struct, frozen=True, kw_only=True):
    """Messages a second as columns and lag as a line over slices."""

    description: str
    columns: list[ChartColumn]
    lag_points: list[tuple[str, str]]
    highest_rate: float
    highest_lag: int
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT

    @property
    def lag_path(self) -> str:
        """The line through the points."""
        return "M" + " L".join(f"{x} {y}" for x, y in self.lag_points)


def rate_chart(rows: Sequence[EntryRow]) -> RateChart | None:
    """The chart of the slices among these entries, oldest first; None for fewer than two slices."""
    slices = [row for row in rows if row.rate is not None]
    if len(slices) < 2:
        return None
    highest_rate = max(row.rate or 0.0 for row in slices)
    highest_lag = max(row.lag for row in slices)
    step = (CHART_WIDTH - 2 * CHART_LEFT) / max(len(slices), CHART_SLICES_MIN)
    plot_height = CHART_HEIGHT - CHART_TOP - CHART_BOTTOM
    columns = []
    lag_points = []
    for i, row in enumerate(slices):
        rate = row.rate or 0.0
        height = plot_height * rate / highest_rate
        # Columns grow from the bottom, each with a space to its neighbours.
        column = ChartColumn(
            title=f"entry {row.sequence}: {rate:,.0f} messages a second, {row.lag:,} wait after it",
            x=f"{CHART_LEFT + (i + 0.14) * step:.1f}",
            y=f"{CHART_HEIGHT - CHART_BOTTOM - height:.1f}",
            width=f"{step * 0.72:.1f}",
            height=f"{height:.1f}",
        )
        columns.append(column)
        lag_share = row.lag / max(highest_lag, 1)
        lag_x = CHART_LEFT + (i + 0.5) * step
        lag_y = CHART_TOP + plot_height * (1 - lag_share)
        lag_points.append((f"{lag_x:.1f}", f"{lag_y:.1f}"))
    return RateChart(
        description=f"the last {count_of(len(slices), 'slice')}: messages a second and lag",
        columns=columns,
        lag_points=lag_points,
        highest_rate=highest_rate,
        highest_lag=highest_lag,
    )


def render_entry_page(base: str, stream: str, slice_row: SliceRow) -> str:
    """The page of one entry: its manifest, certificates, verdicts and files, and a link to its report.

    Its tables are those of a report about this entry alone.
    """
    manifest = slice_row.manifest
    entry = manifest.entry
    report = build_report_page(stream, slice_row.ledger_before, [manifest])
    tables = [table for table in report.tables if table.title in REPORT_TABLES and table.rows]
    if not entry.has_nothing_to_judge:
        later_entries = [verdict.entry for verdict in slice_row.verdicts]
        title = "Verdicts of later checks"
        tables.append(verdicts_table(later_entries, title, empty="Not judged yet: seriatim check"))
    tables.append(_manifest_table(manifest))
    tables += _files_tables(entry)
    return render_template(
        "entry.html",
        base=base,
        title=f"Entry {entry.sequence}",
        crumbs=_crumbs(stream),
        subtitle=f"{entry.kind}, {render_moment(entry.at_seconds)}",
        links=_entry_links(stream, slice_row),
        report=replace(report, tables=tables),
    )


def render_run_page(
    base: str, stream: str, run_id: str, manifests: Sequence[Manifest], run_state: str, count: int
) -> str:
    """The page of an Airflow run: the last of the `count` entries that were made while it lasted."""
    rows = [entry_row(manifest) for manifest in manifests]
    findings = _findings_of(manifests)
    return render_template(
        "run.html",
        base=base,
        title=f"Run {run_id}",
        crumbs=_crumbs(stream),
        subtitle=run_state,
        stream=stream,
        count=count,
        rows=rows,
        entry_columns=ENTRY_COLUMNS,
        chart=rate_chart(rows),
        findings=findings[:FINDINGS_SHOWN],
        findings_not_shown=len(findings) - FINDINGS_SHOWN,
    )


def render_runbook_page(base: str, text: str) -> str:
    """The runbook, whose rows mails link to."""
    return render_template(
        "runbook.html",
        base=base,
        title="Runbook",
        crumbs=[("Streams", "/")],
        subtitle="",
        blocks=parse_runbook(text),
    )


def render_error_page(base: str, title: str, message: str) -> str:
    """A page that says why another one cannot be shown."""
    return render_template(
        "error.html",
        base=base,
        title=title,
        crumbs=[("Streams", "/")],
        subtitle="",
        message=message,
    )


def render_report(page: ReportPage) -> str:
    """A report as the text of one HTML file that needs nothing else."""
    return render_template("report.html", page=page)


def _crumbs(stream: str) -> list[tuple[str, str]]:
    return [("Streams", "/"), (stream, page_path("stream", stream))]


def _entry_links(stream: str, slice_row: SliceRow) -> list[tuple[str, str]]:
    """Labels and paths of the entry before, the entry after, and the report."""
    sequence = slice_row.manifest.entry.sequence
    links = []
    if sequence > 0:
        links.append(("‹ entry before", page_path("stream", stream, "entry", sequence - 1)))
    if sequence < slice_row.last_sequence:
        links.append(("entry after ›", page_path("stream", stream, "entry", sequence + 1)))
    label = "Report" if slice_row.has_report else "Report, made anew"
    links.append((label, page_path("stream", stream, "reports", sequence)))
    return links


def _manifest_table(manifest: Manifest) -> PageTable:
    """The facts of a manifest that people ask for."""
    entry = manifest.entry
    ledger = manifest.ledger
    machine = ""
    if isinstance(entry, MachineEntry) and entry.machine:
        machine = f"{entry.machine}, state version {entry.state_version}"
    peak_memory = ""
    if entry.peak_memory_bytes:
        peak_memory = f"{entry.peak_memory_bytes / 1e6:,.0f} MB"
    hold: str | None = None
    if isinstance(entry, HoldEntry | ReleaseEntry | RepairEntry):
        hold = entry.hold
    facts: dict[str, object] = {
        "manifest": f"manifests/{entry.sequence:010d}-{ledger.sha256}.json.zst",
        "SHA-256": ledger.sha256,
        "entry before": entry.previous,
        "attempt": entry.attempt,
        "Seriatim": entry.product_version,
        "machine": machine,
        "peak memory of a task": peak_memory,
        "reason": entry.reason,
        "hold": hold or "",
        "checked up to": ledger.checked,
        "circuit": ledger.circuit,
    }
    rows = [[name, str(value)] for name, value in facts.items() if value != ""]
    return PageTable(title="Manifest", columns=("what", "is"), rows=rows)


def _files_tables(entry: Entry) -> Iterator[PageTable]:
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
