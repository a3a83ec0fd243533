"""Report: what a run did, on one page, with certificates, findings, verdicts, rates, memory and a
picture of the partitions.

It is made of the ledger alone, so it can be made again for any entry of the past.

Next: web/templates/report.html makes HTML of it; cli/report.py writes the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, field

from seriatim import __version__
from seriatim.engine.files import Certificate
from seriatim.engine.findings import (
    Finding,
    FindingGroup,
    count_of,
    format_moment,
    group_findings,
    list_some,
    printable_session,
)
from seriatim.errors import ConfigError
from seriatim.ledger.commit import never_run_error, read_head
from seriatim.ledger.entries import Entry, SliceEntry, VerdictEntry
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Change, Ledger, describe_failed_range
from seriatim.operations.status import Tone
from seriatim.ports import LedgerStore

ENTRIES_MAX = 20
"""How many entries a report covers if its first entry is not given."""
PARTITIONS_NAMED_MAX = 5
NO_VALUE = "–"
REPORTS = "reports/"
"""Where reports are, below the stream's output path."""


class Card(Struct, frozen=True):
    """A figure at the top of the page."""

    label: str
    value: str
    tone: Tone = ""


class PageFinding(Struct, frozen=True):
    """A finding as a text for people."""

    text: str
    level: str = "error"


class PartitionBar(Struct, frozen=True, kw_only=True):
    """A partition as a bar: what was folded before, what is new, what waits, and where it halted."""

    label: str
    start: int
    before: int
    frontier: int
    end: int
    halt: int = -1
    note: str = ""


class PageTable(Struct, frozen=True, kw_only=True):
    """A table under a headline."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    empty: str = "None."


class ReportPage(Struct, frozen=True, kw_only=True):
    """The content of a report."""

    title: str
    subtitle: str
    cards: Sequence[Card] = ()
    findings: Sequence[PageFinding] = ()
    bars: Sequence[PartitionBar] = ()
    tables: Sequence[PageTable] = field(default_factory=list)
    footer: str = ""


def build_report(
    store: LedgerStore, stream: str, sequence: int | None = None, since: int | None = None
) -> tuple[int, ReportPage]:
    """The entries after `since` up to `sequence` as a page; by default the newest ones. Returns the
    sequence of the last entry, and the page.
    """
    head = read_head(store, stream)
    if head is None:
        raise never_run_error(stream, "there is nothing to report")
    newest = head.ledger.sequence
    until = newest if sequence is None else sequence
    if not 0 <= until <= newest:
        raise ConfigError(
            f"{stream}: there is no entry {until}", next=f"give one from 0 to {newest}"
        )
    # Of a long history only the newest entries, unless a person says since when.
    after = max(-1, until - ENTRIES_MAX)
    if since is not None:
        after = min(since, until - 1)
    sequences = range(after + 1, until + 1)
    manifests = [store.manifest_at(stream, number) for number in sequences]
    ledger_before = Ledger(stream=stream)
    if after >= 0:
        ledger_before = store.ledger_at(stream, after)
    return until, build_report_page(stream, ledger_before, manifests)


def build_report_page(stream: str, before: Ledger, manifests: Sequence[Manifest]) -> ReportPage:
    """What these entries did, as a page for people. `before` is the ledger before the first one."""
    after = manifests[-1].ledger
    entries = [manifest.entry for manifest in manifests]
    entry_findings: list[Finding] = []
    for entry in entries:
        entry_findings += entry.findings
    groups = group_findings(entry_findings)
    findings = [PageFinding(group.render(stream), group.example.level) for group in groups]
    period = f"{_format_time(entries[0])} to {_format_time(entries[-1])}"
    return ReportPage(
        title=f"{stream}: entry {after.sequence}",
        subtitle=f"{period}, entries {entries[0].sequence} to {after.sequence}",
        cards=_cards(after, entries),
        findings=findings,
        bars=[_bar(name, before, after) for name in after.partitions],
        tables=[
            _waiting(after),
            _certificates(entries),
            verdicts_table(entries, "Verdicts", empty="No check in these entries."),
            _failed_ranges(after),
            *_all_findings(entries, groups),
            _log(entries),
        ],
        footer=f"Made by Seriatim {__version__} of the ledger alone: `seriatim report {stream} --sequence "
        f"{after.sequence}` makes it again. Ledger entry {after.sequence}, manifest {after.sha256[:16]}….",
    )


def _cards(after: Ledger, entries: Sequence[Entry]) -> list[Card]:
    """The figures at the top of the page."""
    messages = 0
    records = 0
    slice_seconds = 0.0
    peak_memory_bytes = 0
    errors = 0
    for entry in entries:
        peak_memory_bytes = max(peak_memory_bytes, entry.peak_memory_bytes)
        errors += sum(finding.level == "error" for finding in entry.findings)
        if isinstance(entry, SliceEntry):
            slice_seconds += entry.took_seconds
        for change in entry.changes:
            if change.certificate is not None:
                messages += change.certificate.counts.messages
                records += change.certificate.counts.records
    quarantined = sum(account.quarantined for account in after.partitions.values())
    rate = f"{messages / slice_seconds:,.0f}" if slice_seconds > 0 else NO_VALUE
    memory = f"{peak_memory_bytes / 1e6:,.0f} MB" if peak_memory_bytes else NO_VALUE
    return [
        Card("messages", f"{messages:,}"),
        Card("records", f"{records:,}"),
        Card("messages a second", rate),
        Card("peak memory of a task", memory),
        Card("findings", str(errors), "bad" if errors else "good"),
        Card("in quarantine", str(quarantined), "bad" if quarantined else ""),
        Card("circuit", after.circuit, "bad" if after.circuit == "open" else "good"),
        Card("checked up to entry", str(after.checked)),
    ]


def _bar(partition_name: str, before: Ledger, after: Ledger) -> PartitionBar:
    account = after.partitions[partition_name]
    old_account = before.partitions.get(partition_name)
    log_end = max(account.log_end, account.frontier)
    frontier_before = account.initial_frontier
    if old_account is not None and old_account.topic_id == account.topic_id:
        frontier_before = old_account.frontier
    return PartitionBar(
        label=partition_name,
        start=account.initial_frontier,
        before=frontier_before,
        frontier=account.frontier,
        end=log_end,
        halt=account.halt.offset if account.halt else -1,
        note=_partition_note(account, log_end - account.frontier),
    )


def _partition_note(account: Account, waiting_messages: int) -> str:
    notes = []
    if account.epoch:
        notes.append(f"epoch {account.epoch}")
    if waiting_messages:
        notes.append(f"{waiting_messages:,} wait")
    if account.hold:
        notes.append(f"held by {account.hold}")
    if account.halt:
        notes.append(f"{account.halt.finding} at {account.halt.offset}")
    if account.retired:
        notes.append("retired")
    return ", ".join(notes)


def _all_findings(entries: Sequence[Entry], groups: Sequence[FindingGroup]) -> list[PageTable]:
    """Every finding by itself, if some were put into groups."""
    if all(len(group.findings) == 1 for group in groups):
        return []
    rows = []
    for entry in entries:
        for finding in entry.findings:
            session = ""
            if finding.session is not None:
                session = printable_session(finding.session)
            row = [entry.sequence, finding.finding, finding.location, session]
            rows.append([*row, finding.expected, finding.found])
    columns = ("entry", "finding", "where", "session", "expected", "found")
    return [PageTable(title=f"All {len(rows)} findings", columns=columns, rows=rows)]


def _certificates(entries: Iterable[Entry]) -> PageTable:
    rows = []
    for entry in entries:
        rows += [
            _certificate_row(entry.sequence, change.certificate)
            for change in entry.changes
            if change.certificate is not None
        ]
    columns = (
        "entry",
        "partition",
        "from",
        "until",
        "messages",
        "records",
        "headless",
        "sessions",
        "missing offsets",
        "digest of values",
    )
    return PageTable(title="Certificates", columns=columns, rows=rows)


def _certificate_row(sequence: int, certificate: Certificate) -> list[Any]:
    counts = certificate.counts
    holes = [f"{count} {cause}" for cause, count in sorted(certificate.holes.items())]
    return [
        sequence,
        str(certificate.partition),
        certificate.start,
        certificate.until,
        counts.messages,
        counts.records,
        counts.headless,
        certificate.sessions,
        ", ".join(holes) or "none",
        certificate.digests.get("values", "")[:12],
    ]


def verdicts_table(entries: Iterable[Entry], title: str, empty: str) -> PageTable:
    """What the checks among these entries judged."""
    rows: list[list[Any]] = []
    for entry in entries:
        if not isinstance(entry, VerdictEntry):
            continue
        judged = f"{entry.judged_after + 1} to {entry.judged_until}"
        rows += [
            [entry.sequence, judged, partition, verdict, entry.reason]
            for partition, verdict in entry.verdict.items()
        ]
    columns = ("entry", "judged", "partition", "verdict", "what was looked at")
    return PageTable(title=title, columns=columns, rows=rows, empty=empty)


def _failed_ranges(after: Ledger) -> PageTable:
    rows = []
    for failed_range in after.failed_ranges:
        text = describe_failed_range(failed_range)
        rows.append([failed_range.partition, failed_range.start, failed_range.until, text])
    columns = ("partition", "from", "until", "what")
    return PageTable(
        title="What keeps the circuit open", columns=columns, rows=rows, empty="Nothing."
    )


def _waiting(after: Ledger) -> PageTable:
    """Everything that waits for a person as of the last entry: halts, holds, sessions in
    quarantine, failed checks, and a write of another program.
    """
    rows: list[list[Any]] = []
    for partition, account in after.partitions.items():
        if account.retired:
            continue
        halt = account.halt
        if halt is not None:
            rows.append(
                [partition, halt.finding, halt.offset, halt.cause, _repair(after, partition)]
            )
        if account.hold:
            command = f"seriatim repair {after.stream} --resume {account.hold}"
            rows.append([partition, "held", NO_VALUE, f"by repair {account.hold}", command])
        if account.quarantined:
            sessions = count_of(account.quarantined, "session")
            command = f"seriatim status {after.stream} --all"
            text = f"{sessions} until the next snapshot, a repair or a release"
            rows.append([partition, "quarantine", NO_VALUE, text, command])
    for failed_range in after.failed_ranges:
        text = describe_failed_range(failed_range)
        command = f"{_repair(after, failed_range.partition)}, then seriatim check {after.stream}"
        rows.append([failed_range.partition, "check", failed_range.start, text, command])
    if after.foreign_sequence >= 0:
        command = f"seriatim verify {after.stream}"
        rows.append(
            ["the records table", "foreign", NO_VALUE, "another program wrote to it", command]
        )
    columns = ("where", "what", "offset", "cause", "type")
    return PageTable(title="What waits for a person", columns=columns, rows=rows, empty="Nothing.")


def _repair(ledger: Ledger, partition: str) -> str:
    return f"seriatim repair {ledger.stream} --partition {partition}"


def _log(entries: Iterable[Entry]) -> PageTable:
    rows = []
    for entry in entries:
        row = [
            entry.sequence,
            entry.kind,
            _format_time(entry),
            f"{entry.took_seconds:.1f} s",
            _describe_partitions(entry.changes),
            entry.reason,
        ]
        rows.append(row)
    return PageTable(
        title="Entries",
        columns=("entry", "kind", "when", "took", "partitions", "reason"),
        rows=rows,
    )


def _describe_partitions(changes: Sequence[Change]) -> str:
    names = [str(change.partition) for change in changes]
    return list_some(names, PARTITIONS_NAMED_MAX)


def _format_time(entry: Entry) -> str:
    if entry.at_seconds <= 0:
        return NO_VALUE
    return format_moment(entry.at_seconds)


def report_key(sequence: int) -> str:
    """The name of the report up to an entry, below the stream's output path."""
    return f"{REPORTS}{sequence:010d}.html"


def report_sequence(key: str) -> int | None:
    """The entry in the name of a report; None if it is another file."""
    stem = key.removeprefix(REPORTS).removesuffix(".html")
    return int(stem) if stem.isdecimal() and key == report_key(int(stem)) else None
