"""Compiled once, then only loaded; and what is not compiled is not waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim.engine.fold import Fold
from seriatim.fast import __main__ as main
from seriatim.fast import choose, columns, fold, packed_state, parse, ready, rows
from seriatim.fast.fold import CompiledFold
from seriatim.stream import OutputSettings, Stream, TableSettings
from tests.fast.test_plain_and_compiled import _world

TABLE = TableSettings(key=("id",), columns={"id": "string", "v": "int64"})


def _stream(**fields: object) -> Stream:
    given = {
        "name": "s",
        "topics": "t",
        "machine": "table",
        "table": TABLE,
        "output": OutputSettings(path="memory"),
    }
    return Stream(**{**given, **fields})  # type: ignore[arg-type]


def test_everything_is_compiled_before_tasks_need_it() -> None:
    """After `python -m seriatim.fast` no fold compiles anything: each function has one signature,
    and keeps it.
    """
    main.compile_all()
    _world(3, 0.3, eager=True, tier="none", on_poison="skip")
    entries = [
        value
        for module in (columns, fold, packed_state, parse, rows)
        for value in vars(module).values()
        if hasattr(value, "signatures") and not value.targetoptions.get("no_cpython_wrapper")
    ]
    assert len(entries) >= 12
    assert {
        entry.__name__: len(entry.signatures) for entry in entries if len(entry.signatures) != 1
    } == {}


def test_what_is_not_compiled_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is ready, and for few messages, the plain machine folds."""
    stream = _stream()
    for is_ready, messages, kind in (
        (False, 10**6, Fold),
        (True, 10, Fold),
        (True, 10**6, CompiledFold),
    ):
        monkeypatch.setattr(choose, "is_ready", lambda ready=is_ready: ready)
        assert choose.choose_machine(stream, stream.table_machine, messages)[1] is kind


@pytest.mark.parametrize(
    "stream",
    [
        _stream(machine="m:M"),
        _stream(table=TableSettings(key=("id",), columns={"id": "string", "d": "decimal(9,2)"})),
        _stream(table=TableSettings(key=("x",), columns={"x": "float64"})),
        _stream(session="field:who"),
        _stream(tier="window", sequence="seq"),
    ],
)
def test_what_the_bulk_fold_cannot_take_is_folded_the_plain_way(stream: Stream) -> None:
    """Other machines, columns, keys, sessions and tiers."""
    assert choose.choose_machine(stream, stream.table_machine, 10**6)[1] is Fold


def test_another_cpu_has_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Code compiled for one processor is never run on another."""
    ready.compiled_folder.cache_clear()
    here = ready.compiled_folder()
    (tmp_path / "cpuinfo").write_text("model name : other\nflags : few\n")
    monkeypatch.setattr(ready, "CPU_INFO", tmp_path / "cpuinfo")
    ready.compiled_folder.cache_clear()
    there = ready.compiled_folder()
    ready.compiled_folder.cache_clear()
    assert here is not None
    assert there is not None
    assert here != there
    there.rmdir()


def test_who_has_no_home_keeps_it_beside_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a user that nobody knows: that is no reason to fold nothing."""

    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert ready.compiled_folder.__wrapped__() in (None, ready.compiled_folder())
