"""What came of a stream, as digests: records, sessions, gaps, quarantine, current, further tables.

Everything is read as a user would read it: Delta tables with a Delta reader, the rest by the
command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash
from deltalake import DeltaTable

from tests.golden.product import command

Names = Mapping[str, str]
"""Names of topics and topic ids on a broker, to the ones that the golden files have."""
FINDING_KEYS = ("finding", "level", "topic", "partition", "offset", "session")
GAP_KEYS = ("topic", "topic_id", "partition", "session", "from", "until", "finding", "closed_how")
ORDER = (
    "topic",
    "topic_id",
    "partition",
    "offset",
    "index",
    "session",
    "from",
    "id",
    "side",
    "price",
)


def digest(values: Iterable[Any]) -> str:
    """One digest of values, in order. Columns are named in it, so that none can vanish or be
    renamed.
    """
    sums = xxhash.xxh3_128()
    for value in values:
        sums.update(json.dumps(value, default=str, sort_keys=True).encode() + b"\n")
    return sums.hexdigest()


def renamed(rows: Iterable[Mapping[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Rows with the golden names of topics."""
    return [
        {
            key: names.get(value, value) if isinstance(value, str) else value
            for key, value in row.items()
        }
        for row in rows
    ]


def table_rows(path: Path, names: Names) -> list[dict[str, Any]]:
    """All rows of a Delta table, in their order."""
    rows = DeltaTable(path).to_pyarrow_dataset().to_table(use_threads=False).to_pylist()

    def place(row: Mapping[str, Any]) -> str:
        return json.dumps([_sortable(row.get(column)) for column in ORDER])

    return sorted(renamed(rows, names), key=place)


def _sortable(value: Any) -> Any:
    """Numbers as text of one width: JSON compares text."""
    return f"{value:030.6f}" if isinstance(value, int | float) else str(value)


def states(stream: str, sessions: Iterable[tuple[str, str]], names: Names) -> list[Any]:
    """What `seriatim state` says of every session; the exit code where it has no state."""
    broker_names = {golden: name for name, golden in names.items()}
    found: list[Any] = []
    for topic, session in sessions:
        answer = command(
            "state", stream, session, "--topic", broker_names.get(topic, topic), "--json"
        )
        values = answer.objects()[0] if answer.code == 0 else {"exit": answer.code}
        found.append([topic, session, *renamed([values], names)])
    return found


def quarantined(stream: str, names: Names) -> list[Any]:
    """The sessions in quarantine and the partitions that wait, as `seriatim status` has them."""
    values = command("status", stream, "--json").objects()[0]
    rows = [
        {key: row[key] for key in ("session", "topic", "partition", "offset", "finding")}
        for row in values["quarantined"]
    ]
    for row in values["partitions"]:
        halted = row["halted"] and {key: row["halted"][key] for key in ("finding", "offset")}
        rows.append(
            {
                "topic": row["topic"],
                "partition": row["partition"],
                "frontier": row["frontier"],
                "halted": halted,
            }
        )
    return sorted(renamed(rows, names), key=lambda row: json.dumps(row, sort_keys=True))


def gaps(stream: str, names: Names) -> list[Any]:
    """The stretches of output that are not to be trusted, without the texts for people."""
    rows = command("gaps", stream, "--json").objects()[0]["gaps"]
    chosen = renamed([{key: row[key] for key in GAP_KEYS if key in row} for row in rows], names)
    return sorted(chosen, key=lambda row: json.dumps(row, sort_keys=True))


def findings(rows: Iterable[Mapping[str, Any]], names: Names) -> list[Any]:
    """Findings as scripts get them, without the texts for people."""
    chosen = renamed(
        [{key: row[key] for key in FINDING_KEYS} for row in rows if "finding" in row], names
    )
    return sorted(chosen, key=lambda row: json.dumps(row, sort_keys=True))


def outcome(
    stream: str, output: Path, sessions: Iterable[tuple[str, str]], names: Names | None = None
) -> dict[str, Any]:
    """Digests of all that came of a stream, with counts that say at a glance what differs."""
    names = names or {}
    records = table_rows(output / "records", names)
    state = states(stream, sessions, names)
    untrusted = gaps(stream, names)
    waiting = quarantined(stream, names)
    found: dict[str, Any] = {
        "records": digest(records),
        "records_count": len(records),
        "columns": list(records[0]),
        "sessions": digest(state),
        "sessions_count": len(state),
        "gaps": digest(untrusted),
        "gaps_count": len(untrusted),
        "quarantine": digest(waiting),
        "quarantine_count": len(waiting),
    }
    for path in sorted(output.glob("records-*")):
        rows = table_rows(path, names)
        found[path.name] = [len(rows), digest(rows)]
    if (output / "current").exists():
        rows = table_rows(output / "current", names)
        found["current"] = [len(rows), digest(rows)]
    return found
