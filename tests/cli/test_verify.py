"""`seriatim verify` as a user types it: summary, the first difference on one screen, exit codes,
lines for scripts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seriatim import cli, context
from seriatim.kafka.log import KafkaLog
from tests.contracts.disk_streams import DiskStream, create_filled_output

STREAM = """
topics = "in-.*"
machine = "table"
sequence = "seq"
[table]
key = ["id"]
columns = { id = "string", v = "int64", at = "timestamp", cost = "decimal(9,2)" }
[output]
path = "lake"
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStream:
    """A stream file, its output, and no broker."""
    (tmp_path / "s.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    return create_filled_output(tmp_path / "lake")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command: exit code, stdout, stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            cli.main(["verify", "s.toml", *arguments])
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def captured(made: DiskStream, path: Path) -> list[dict[str, Any]]:
    """What the broker in memory has, written down."""
    lines = [
        {
            "topic": name,
            "partition": number,
            "offset": offset,
            "key": m.key.decode(),
            "value": m.value.decode(),
        }
        for name, topic in made.kafka.topics.items()
        for number, log in enumerate(topic.messages)
        for offset, m in enumerate(log)
        if m.key is not None and m.value is not None
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return lines


def test_a_clean_stream_ends_with_one_line_and_0(lake: DiskStream, run: Run) -> None:
    """Entries, files, records, sessions; the second pass says since when."""
    code, out, err = run()
    assert (code, out.count("\n")) == (0, 1)
    assert out.startswith("s: good up to entry 8: 9 entries, ")
    assert "folding the records gives the saved state" in out
    assert "bytes" in err
    assert run()[1].startswith("s: good up to entry 8: 0 entries since entry 8, ")
    assert run("--all")[1].startswith("s: good up to entry 8: 9 entries, ")
    assert (lake.root / "verified.json").exists()


def test_damage_ends_with_one_screen_and_3(lake: DiskStream, run: Run) -> None:
    """What, which file, expected, found, what to do next; no stack trace."""
    path = min(lake.root.glob("records/in-a/0/*.parquet"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, out, err = run()
    assert (code, out) == (3, "")
    assert "IntegrityError: s: a file is damaged" in err
    for label in (
        "file",
        "partition  in-a/0",
        "expected",
        "found",
        "cause",
        f"restore records/in-a/0/{path.name}",
    ):
        assert label in err
    assert "Traceback" not in err


def test_scripts_get_json(lake: DiskStream, run: Run) -> None:
    """One object on stdout, good or not; every line of stderr is one too."""
    (lake.root / "records/in-a/0/stranger.parquet").write_bytes(b"?")
    code, out, err = run("--json")
    values = json.loads(out)
    assert (code, values["verdict"], values["sequence"], values["difference"]) == (
        0,
        "good",
        8,
        None,
    )
    assert values["warnings"][0]["file"] == "records/in-a/0/stranger.parquet"
    assert all(json.loads(line)["message"] for line in err.splitlines())
    (lake.root / "head.json").write_text("{}")
    code, out, err = run("--json")
    assert (code, json.loads(out)["verdict"], json.loads(out)["difference"]["file"]) == (
        3,
        "differs",
        "head.json",
    )
    assert json.loads(err.splitlines()[-1])["error"] == "IntegrityError"


def test_a_file_that_nobody_names_is_told_and_ends_with_0(lake: DiskStream, run: Run) -> None:
    """With what to do about it."""
    (lake.root / "state/in-a/0/0-0-crashed.parquet").write_bytes(b"?")
    code, _, err = run()
    assert code == 0
    assert (
        "a file that nobody names: state/in-a/0/0-0-crashed.parquet: left by a run that crashed"
        in err
    )


def test_views_are_judged_and_compared(lake: DiskStream, run: Run, tmp_path: Path) -> None:
    """Raw alone, then against the output: a message that changed is named by offset, with exit code
    3.
    """
    capture = tmp_path / "raw.jsonl"
    lines = captured(lake, capture)
    code, out, err = run("--at", "raw", "--capture", str(capture))
    assert code == 3
    assert "poison at raw, in-a/0, offset 10" in err
    assert "First place where each is wrong" in out
    code, out, _ = run("--at", "raw", "--at", "output", "--capture", str(capture), "--json")
    assert (code, json.loads(out)["partings"]) == (3, [])
    code, out, err = run("--at", "raw", "--at", "output", "--capture", str(capture))
    assert "raw and output agree at every offset of the range that they share" in out
    assert "look at the producer" in err
    assert "second --at" not in err
    lines[2]["value"] = lines[2]["value"].replace('"seq": 3', '"seq": 4')
    capture.write_text("\n".join(map(json.dumps, lines)))
    code, _, err = run("--at", "raw", "--at", "output", "--capture", str(capture))
    assert code == 3
    assert "raw and output differ at in-a/0, offset 2: another sequence" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--at", "raw"),
        ("--capture", "x"),
        ("--at", "output", "--all"),
        ("--at", "output", "--kafka"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    lake: DiskStream, run: Run, arguments: tuple[str, ...]
) -> None:
    """Exit 2, with what to give instead."""
    assert lake.root.exists()
    code, _, err = run(*arguments)
    assert code == 2
    assert "ConfigError" in err


def test_a_broker_that_does_not_answer_is_platform_trouble(
    lake: DiskStream, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 4: nothing is wrong with the data, and nothing is signed off."""
    monkeypatch.setattr(
        context, "log", lambda *_: KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, timeout_seconds=1)
    )
    code, _, err = run("--kafka")
    assert code == 4
    assert "does not answer" in err
    assert not (lake.root / "verified.json").exists()
