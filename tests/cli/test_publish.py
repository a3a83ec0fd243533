"""`seriatim publish` as a user types it, on real files, without a broker; killed, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from seriatim import cli
from seriatim.engine.crash_points import PUBLISH_POINTS
from tests.contracts.disk_streams import DiskStream, create_filled_output

STREAM = """
topics = "in-.*"
machine = "table"
sequence = "seq"
table = {key = ["id"], columns = {id = "string", v = "int64", at = "timestamp", cost = "decimal(9,2)"}}
output = {path = "lake"}
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStream:
    """A stream that was run; no broker answers."""
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "s.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path / "streams"))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    return create_filled_output(tmp_path / "lake")


def typed(*arguments: str) -> int:
    """A command's exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def rows(made: DiskStream) -> list[dict[str, Any]]:
    """What any Delta reader sees, in order."""
    found = (
        DeltaTable(made.root / "current")
        .to_pyarrow_dataset()
        .to_table(use_threads=False)
        .to_pylist()
    )
    return sorted(
        found, key=lambda row: (row["topic"], row["partition"], row["session"], row["id"])
    )


@pytest.mark.usefixtures("made")
def test_publish_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    """As of which entry the table is, from where, and what was read."""
    assert typed("publish", "s", "--sequence", "4") == 0
    assert "current is as of entry 4: 2 partitions, 2 anew" in capsys.readouterr().out
    assert typed("publish", "s", "--unchecked", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "would bring current to entry 8 (was 4)" in shown
    assert "in-b" in shown
    assert typed("publish", "s", "--unchecked", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["sequence"], told["before"], told["changed"]) == (8, 4, True)
    facts = ("topic", "partition", "from", "until", "epoch")
    assert [tuple(part[fact] for fact in facts) for part in told["partitions"]] == [
        ("in-a", 0, 10, 14, 0),
        ("in-b", 0, 0, 12, 0),
    ]
    assert typed("publish", "s", "--unchecked") == 0
    assert "as of entry 8 already" in capsys.readouterr().out


@pytest.mark.usefixtures("made")
def test_what_is_new_since_an_entry_can_be_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever was not told of a commit, because the task died after it, names the entry that was
    the last told.
    """
    assert typed("publish", "s", "--sequence", "4") == 0
    assert typed("publish", "s", "--unchecked") == 0
    capsys.readouterr()
    for _ in range(2):
        assert typed("publish", "s", "--unchecked", "--since", "4", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["sequence"], told["before"], told["changed"]) == (8, 4, True)
        facts = ("topic", "from", "until")
        assert [tuple(part[fact] for fact in facts) for part in told["partitions"]] == [
            ("in-a", 10, 14),
            ("in-b", 0, 12),
        ]
    assert typed("publish", "s", "--unchecked", "--since", "8", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["before"], told["changed"], told["partitions"]) == (8, False, [])
    assert typed("publish", "s", "--unchecked", "--since", "99") == 2
    assert "there is no entry 99 up to which" in capsys.readouterr().err


def test_an_earlier_entry_is_refused_with_the_way(
    made: DiskStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a rebuild goes back."""
    assert typed("publish", "s", "--unchecked") == 0
    assert typed("publish", "s", "--sequence", "4") == 2
    assert "--rebuild --sequence 4" in capsys.readouterr().err
    assert typed("publish", "s", "--sequence", "4", "--rebuild") == 0
    assert {row["topic"] for row in rows(made)} == {"in-a"}
    assert typed("publish", "s", "--sequence", "99") == 2
    assert "there is no entry 99" in capsys.readouterr().err


def test_a_machine_whose_records_name_no_key(
    made: DiskStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told what to write."""
    folder = made.root.parent / "streams"
    (folder / "keyless.py").write_text(
        "from msgspec import Struct\nfrom seriatim import Machine\n"
        "class Record(Struct):\n    v: int\n"
        "class Keyless(Machine[Record, Record, Record]):\n    pass\n"
    )
    (folder / "k.toml").write_text(
        'topics = "in-.*"\nmachine = "keyless:Keyless"\noutput = {path = "other"}\n'
    )
    assert typed("publish", "k") == 2
    told = capsys.readouterr().err
    assert "name no key" in told
    assert "row_key" in told


@pytest.mark.parametrize(
    ("point", "first"),
    [
        *((point, False) for point in (*PUBLISH_POINTS, "record-file-half")),
        ("current-written", True),
    ],
)
def test_killed_anywhere_the_next_publish_ends_right(
    made: DiskStream, point: str, first: bool
) -> None:
    """A kill -9 leaves the table as of one entry; the same command again finishes."""
    if not first:
        assert typed("publish", "s", "--sequence", "4") == 0
    before = rows(made) if not first else None
    run = subprocess.run(
        [sys.executable, "-m", "seriatim", "publish", "s", "--unchecked"],
        env={**os.environ, "SERIATIM_CRASH_POINT": point},
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == -signal.SIGKILL
    if point != "current-published" and first:
        assert not DeltaTable.is_deltatable(str(made.root / "current"))
    elif point != "current-published":
        assert rows(made) == before
    assert typed("publish", "s", "--unchecked") == 0
    after = rows(made)
    assert typed("publish", "s", "--unchecked", "--rebuild") == 0
    assert rows(made) == after
    assert {(row["topic"], row["partition"]) for row in after} == {
        ("in-a", 0),
        ("in-a", 1),
        ("in-b", 0),
    }


PLAIN = """
from msgspec import Struct
from seriatim import Machine

class Plain(Machine[Struct, Struct, Struct]):
    def start(self, session):
        return Struct()
    def apply(self, state, message):
        return []
"""


def test_records_without_a_key_have_no_table_and_a_scheduler_may_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error for whoever types it; nothing to do for a DAG that publishes all streams."""
    (tmp_path / "plain_machine.py").write_text(PLAIN)
    (tmp_path / "p.toml").write_text(
        'topics = "x"\nmachine = "plain_machine:Plain"\noutput = {path = "lake"}\n'
    )
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path))
    assert typed("publish", "p", "--if-keyed", "--json") == 0
    shown = capsys.readouterr()
    assert "name no key" in shown.err
    assert shown.out == ""
