"""Stream files: one that cannot be read, whatever is wrong with it, takes no other down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seriatim import streams

DAGS = Path(__file__).parent.parent / "dags"
GOOD = """topics = "t"
machine = "m:M"
[output]
path = "lake/good"
"""
WRONG = {
    "a number without end": f"topics = {'9' * 5000}",
    "brackets without end": f"topics = {'[' * 5000}",
    "a pattern that counts too far": GOOD.replace('"t"', '"a{99999999999999999999}"'),
    "a pattern too deep": GOOD.replace('"t"', f'"{"(" * 3000}{")" * 3000}"'),
    "a path too long": GOOD.replace("good", "x" * 5000),
    "a path that is none": GOOD.replace("good", "\\u0000"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_cannot_be_read_is_named_and_hides_no_other(what: str, tmp_path: Path) -> None:
    """All DAGs come from one file, so nothing may be raised for one stream."""
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "bad.toml").write_text(WRONG[what])
    good, (refused,) = streams.readable(tmp_path)
    assert [file.stream.name for file in good] == ["good"]
    assert "bad.toml" in refused.message
    assert "bad.toml" in refused.next
    assert len(refused.render()) < 2000


def test_a_file_that_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever is not its owner."""

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "bad.toml").write_text(GOOD)
    monkeypatch.setattr(Path, "read_text", refuse)
    _, (refused,) = streams.readable(tmp_path)
    assert "bad.toml: cannot be read: Permission denied" in refused.message


def test_a_stream_does_not_take_the_name_of_a_dag_of_ours(tmp_path: Path) -> None:
    """Airflow would show one or the other by turns, and the alerts would stop."""
    ours = [found for path in DAGS.glob("*.py") for found in re.findall(r'dag_id="(\w+)"', path.read_text())]
    assert len(ours) == 3
    for name in ours:
        (tmp_path / f"{name}.toml").write_text(GOOD)
    good, refused = streams.readable(tmp_path)
    assert (good, len(refused)) == ([], 3)
