"""Report: what a run did, on one page: certificates, findings, verdicts, rates, memory, a picture
of the partitions.

Made of the ledger alone, so it can be made again for any entry of the past.

Next room: operations/report_page.py makes HTML of it; cli/report.py writes the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from seriatim import __version__
from seriatim.errors import ConfigError
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import Change, Entry, Ledger, Manifest
from seriatim.ledger.verdicts import describe_failed_range
from seriatim.operations.report_page import Card, PageFinding, PageTable, PartitionBar, ReportPage
from seriatim.ports import LedgerStore

ENTRIES_MAX = 20
"""How far a report goes back that was asked for by its last entry alone."""


def build_report(
    store: LedgerStore, stream: str, sequence: int | None = None, since: int | None = None
) -> tuple[int, ReportPage]:
    """The entries after `since` up to `sequence` as a page; by default the last few. The last
    entry, and the page.
    """
    head = read_head(store, stream)
    if head is None:
        raise ConfigError(
            f"{stream}: it was never run, so there is nothing to report",
            next=f"seriatim run {stream}",
        )
    last = head.ledger.sequence if sequence is None else sequence
    if not 0 <= last <= head.ledger.sequence:
        raise ConfigError(
            f"{stream}: there is no entry {last}", next=f"give one from 0 to {head.ledger.sequence}"
        )
    first = max(-1, last - ENTRIES_MAX) if since is None else min(since, last - 1)
    manifests = [store.manifest_at(stream, number) for number in range(first + 1, last + 1)]
    before = store.ledger_at(stream, first) if first >= 0 else Ledger(stream=stream)
    return last, build_report_page(stream, before, manifests)


def build_report_page(stream: str, before: Ledger, manifests: Sequence[Manifest]) -> ReportPage:
    """What entries did, for people."""
    after, entries = manifests[-1].ledger, [manifest.entry for manifest in manifests]
    return ReportPage(
        title=f"{stream}: entry {after.sequence}",
        subtitle=f"{_format_time(entries[0])} to {_format_time(entries[-1])}, entries {entries[0].sequence} to {after.sequence}",
        cards=_cards(after, entries),
        findings=[
            PageFinding(one.render(stream), one.level)
            for entry in entries
            for one in entry.findings
        ],
        bars=[_bar(place, before, after) for place in after.partitions],
        tables=[
            _certificates(entries),
            _verdicts(entries),
            _failed(after),
            _halts(after),
            _log(entries),
        ],
        footer=f"Made by Seriatim {__version__} of the ledger alone: `seriatim report {stream} --sequence "
        f"{after.sequence}` makes it again. Ledger entry {after.sequence}, manifest {after.sha256[:16]}….",
    )


def _cards(after: Ledger, entries: Sequence[Entry]) -> list[Card]:
    changes = [change for entry in entries for change in entry.changes if change.certificate]
    counts = [change.certificate.counts for change in changes if change.certificate]
    messages, records = sum(one.messages for one in counts), sum(one.records for one in counts)
    took = sum(entry.took_seconds for entry in entries if entry.kind == "slice")
    peak = max((entry.peak_memory_bytes for entry in entries), default=0)
    errors = sum(one.level == "error" for entry in entries for one in entry.findings)
    quarantined = sum(account.quarantined for account in after.partitions.values())
    return [
        Card("messages", f"{messages:,}"),
        Card("records", f"{records:,}"),
        Card("messages a second", f"{messages / took:,.0f}" if took > 0 else "–"),
        Card("peak memory of a task", f"{peak / 1e6:,.0f} MB" if peak else "–"),
        Card("findings", str(errors), "bad" if errors else "good"),
        Card("in quarantine", str(quarantined), "bad" if quarantined else ""),
        Card("circuit", after.circuit, "bad" if after.circuit == "open" else "good"),
        Card("checked up to entry", str(after.checked)),
    ]


def _bar(partition_name: str, before: Ledger, after: Ledger) -> PartitionBar:
    account, was = after.partitions[partition_name], before.partitions.get(partition_name)
    end, halt = max(account.log_end, account.frontier), account.halt
    waits = end - account.frontier
    notes = [
        f"epoch {account.epoch}" if account.epoch else "",
        f"{waits:,} wait" if waits else "",
        f"held by {account.hold}" if account.hold else "",
        f"{halt.finding} at {halt.offset}" if halt else "",
        "retired" if account.retired else "",
    ]
    known = was is not None and was.topic_id == account.topic_id
    return PartitionBar(
        label=partition_name,
        start=account.initial_frontier,
        before=was.frontier if known and was else account.initial_frontier,
        frontier=account.frontier,
        end=end,
        halt=halt.offset if halt else -1,
        note=", ".join(filter(None, notes)),
    )


def _certificates(entries: Iterable[Entry]) -> PageTable:
    rows = []
    for entry in entries:
        for change in entry.changes:
            if (made := change.certificate) is not None:
                counts = made.counts
                holes = (
                    ", ".join(f"{count} {cause}" for cause, count in sorted(made.holes.items()))
                    or "none"
                )
                rows.append(
                    [
                        *(
                            entry.sequence,
                            str(made.partition),
                            made.start,
                            made.until,
                            counts.messages,
                        ),
                        *(
                            counts.records,
                            counts.headless,
                            made.sessions,
                            holes,
                            made.digests.get("values", "")[:12],
                        ),
                    ]
                )
    columns = ("entry", "partition", "from", "until", "messages", "records", "headless", "sessions")
    return PageTable(
        title="Certificates", columns=(*columns, "missing offsets", "digest of values"), rows=rows
    )


def _verdicts(entries: Iterable[Entry]) -> PageTable:
    rows = [
        [
            entry.sequence,
            f"{entry.judged_after + 1} to {entry.judged_until}",
            place,
            result,
            entry.reason,
        ]
        for entry in entries
        if entry.kind == "verdict"
        for place, result in entry.verdict.items()
    ]
    columns = ("entry", "judged", "partition", "verdict", "what was looked at")
    return PageTable(
        title="Verdicts", columns=columns, rows=rows, empty="No check in these entries."
    )


def _failed(after: Ledger) -> PageTable:
    rows = [
        [one.partition, one.start, one.until, describe_failed_range(one)]
        for one in after.failed_ranges
    ]
    columns = ("partition", "from", "until", "what")
    return PageTable(
        title="What keeps the circuit open", columns=columns, rows=rows, empty="Nothing."
    )


def _halts(after: Ledger) -> PageTable:
    rows = [
        [place, account.halt.finding, account.halt.offset, account.halt.cause]
        for place, account in after.partitions.items()
        if account.halt is not None
    ]
    columns = ("partition", "finding", "offset", "cause")
    return PageTable(title="What waits for a person", columns=columns, rows=rows, empty="Nothing.")


def _log(entries: Iterable[Entry]) -> PageTable:
    rows = [
        [
            entry.sequence,
            entry.kind,
            _format_time(entry),
            f"{entry.took_seconds:.1f} s",
            _describe_partitions(entry.changes),
            entry.reason,
        ]
        for entry in entries
    ]
    return PageTable(
        title="Entries",
        columns=("entry", "kind", "when", "took", "partitions", "reason"),
        rows=rows,
    )


def _describe_partitions(changes: Sequence[Change]) -> str:
    places = [str(change.partition) for change in changes]
    return ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")


def _format_time(entry: Entry) -> str:
    if entry.at_seconds <= 0:
        return "–"
    return datetime.fromtimestamp(entry.at_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
