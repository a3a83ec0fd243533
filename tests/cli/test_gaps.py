"""`seriatim gaps`, `rebuild` and `quarantine release` as a user types them, on real files and
without a broker.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from seriatim import cli
from seriatim.cli import run
from seriatim.operations.run import RunOutcome
from tests.contracts.disk_streams import DiskStream

STREAM = """
topics = "in-.*"
machine = "table"
sequence = "seq"
table = {key = ["id"], columns = {id = "string", v = "int64", at = "timestamp", cost = "decimal(9,2)"}}
output = {path = "lake"}
"""


def write_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream file whose output is beside its folder."""
    (folder / "streams").mkdir()
    (folder / "streams" / "s.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(folder / "streams"))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStream:
    """A stream with one session that was in quarantine, and one that still is; no broker answers."""
    write_stream(tmp_path, monkeypatch)
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    stream = DiskStream(tmp_path / "lake")
    stream.kafka.create("in-a", 1)
    stream.send("in-a/0", "x", ["a"], 1, b"poison", 2, ["a"], 3)
    stream.send("in-a/0", "y", ["a"], 1, b"poison", 2)
    stream.run(messages_max=4)
    return stream


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What a command prints with --json."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--json"])
    assert ended.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def rows(made: DiskStream, table: str) -> list[dict[str, Any]]:
    """What any Delta reader sees."""
    return (
        DeltaTable(made.root / table).to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
    )


def test_gaps_are_listed_as_the_table_has_them(
    made: DiskStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """All, or the open ones."""
    told = typed(capsys, "gaps", "s")
    assert told["gaps"] == rows(made, "gaps")
    assert [
        (gap["session"], gap["from"], gap["until"], gap["closed_how"]) for gap in told["gaps"]
    ] == [
        ("x", 2, 4, "snapshot"),
        ("y", 8, None, None),
    ]
    assert [gap["session"] for gap in typed(capsys, "gaps", "s", "--open")["gaps"]] == ["y"]
    with pytest.raises(SystemExit):
        cli.main(["gaps", "s"])
    shown = capsys.readouterr().out
    assert "2 gaps, 1 open" in shown
    assert "poison" in shown


def test_the_documented_query_gives_what_can_be_trusted(tmp_path: Path) -> None:
    """The records outside every gap, and no others: of that session, until its snapshot, or for
    good while open.
    """
    made = DiskStream(tmp_path / "lake", tier="none")
    made.kafka.create("in-a", 1)
    for session, values in (("x", [["a"], 1]), ("y", [["a"], 1])):
        made.send("in-a/0", session, *values)
        made._sequences["in-a/0", session] += 3
    made.send("in-a/0", "x", 2, 3, ["a"], 4)
    made.send("in-a/0", "y", 5)
    made.run()
    page = (Path(__file__).parents[2] / "docs" / "STREAMS.md").read_text()
    section = page.partition("## What not to trust")[2]
    query = section.partition("```sql")[2].partition("```")[0]
    tables = QueryBuilder()
    for table in ("records", "gaps"):
        tables.register(table, DeltaTable(made.root / table))
    trusted = {row["offset"] for row in pa.table(tables.execute(query)).to_pylist()}
    assert {row["offset"] for row in rows(made, "records")} == set(range(9))
    assert trusted == set(range(9)) - {4, 5, 8}


def test_gaps_are_right_without_the_table(
    made: DiskStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are the ledger's; looking changes nothing."""
    before = typed(capsys, "gaps", "s")
    shutil.rmtree(made.root / "gaps")
    assert typed(capsys, "gaps", "s") == before
    assert not (made.root / "gaps").exists()


def test_tables_are_made_again(made: DiskStream, capsys: pytest.CaptureFixture[str]) -> None:
    """As they were, whether they were deleted or written to by somebody else."""
    before = {table: rows(made, table) for table in ("gaps", "quarantine")}
    shutil.rmtree(made.root / "gaps")
    DeltaTable(made.root / "quarantine").delete()
    assert rows(made, "quarantine") == []
    assert typed(capsys, "rebuild", "s")["stream"] == "s"
    assert {table: rows(made, table) for table in ("gaps", "quarantine")} == before
    assert [
        (row["session"], row["offset"], row["released_offset"]) for row in before["quarantine"]
    ] == [
        ("x", 2, 4),
        ("x", 3, 4),
        ("y", 8, None),
        ("y", 9, None),
    ]


def test_a_session_is_released_by_hand(
    made: DiskStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """First to look, then with a reason; the tables know at once, and the next message applies."""
    would = typed(capsys, "quarantine", "release", "s", "y", "--dry-run")
    assert (would["sequence"], would["partition"], would["offset"], would["frontier"]) == (
        None,
        "in-a/0",
        8,
        10,
    )
    done = typed(capsys, "quarantine", "release", "s", "y", "--because", "mended")
    assert typed(capsys, "gaps", "s", "--open")["gaps"] == []
    assert rows(made, "gaps")[-1]["closed_how"] == "hand"
    assert {row["released_by"] for row in rows(made, "quarantine") if row["session"] == "y"} == {
        done["sequence"]
    }
    made.send("in-a/0", "y", 77)
    assert not made.run().findings
    assert 77 in [row["v"] for row in rows(made, "records")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("quarantine", "release", "s", "y"), "--because is missing"),
        (("quarantine", "release", "s", "x", "--because", "b"), "is not in quarantine"),
    ],
)
def test_what_cannot_be_released_is_refused(
    made: DiskStream, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    """With what to type instead, and nothing written."""
    before = made.ledger.head("s")
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert "next" in told
    after = made.ledger.head("s")
    assert before
    assert after
    assert before.ledger == after.ledger


@pytest.mark.parametrize("command", [("gaps", "s"), ("rebuild", "s")])
def test_a_stream_that_was_never_run_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    """Not an empty list, which would read as all is well."""
    write_stream(tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        cli.main([*command])
    assert ended.value.code == 2
    assert "seriatim run s" in capsys.readouterr().err


def test_tables_that_are_behind_are_told_after_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The run is green: the records are complete."""
    run.print_outcome(
        "s",
        RunOutcome(slices=1, derived_error="PlatformError: no room\n  next  make room"),
    )
    told = capsys.readouterr().err
    assert "the next run catches up" in told
    assert "make room" in told
