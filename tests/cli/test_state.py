"""`seriatim state`: what it says where a state file is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim.cli import main
from tests.contracts.disk_streams import create_filled_output

STREAM = """
topics = "in-.*"
machine = "table"
sequence = "seq"
output = {path = "OUTPUT"}
[table]
key = ["id"]
columns = {id = "string", v = "int64", at = "timestamp", cost = "decimal(9,2)"}
before = true
"""


def test_the_advice_on_a_damaged_state_file_names_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that it gives can be pasted as it stands."""
    create_filled_output(tmp_path / "lake")
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "s.toml").write_text(STREAM.replace("OUTPUT", str(tmp_path / "lake")))
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path / "streams"))
    for path in (tmp_path / "lake" / "state").rglob("*.parquet"):
        path.write_bytes(b"damaged")
    with pytest.raises(SystemExit) as ended:
        main(["state", "s", "x", "--topic", "in-a"])
    advice = capsys.readouterr().err
    assert ended.value.code == 3
    assert "seriatim repair s: it makes the file again" in advice
