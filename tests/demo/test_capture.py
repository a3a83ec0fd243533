"""The demo of change capture: its stream file, what it says without PostgreSQL, and all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim import config, stream_files
from seriatim.demo import capture
from seriatim.embedded import postgres
from seriatim.errors import ConfigError


def test_its_stream_file_is_complete(tmp_path: Path) -> None:
    """Repeats of the connector are dropped, contradictions are found."""
    text = capture.STREAM_FILE.format(path=tmp_path)
    (tmp_path / "orders.toml").write_text(text)
    stream = stream_files.load_stream("orders", tmp_path).stream
    assert (stream.tier, stream.debezium.before_images) == ("once", "full")
    assert stream.snapshot_requests == capture.SIGNAL_TOPIC


def test_without_postgres_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts anything."""
    monkeypatch.setattr(postgres, "find_programs", lambda: None)
    with pytest.raises(ConfigError) as refused:
        capture.main(["up"])
    assert refused.value.next == postgres.INSTALL_ADVICE


@pytest.mark.full
@pytest.mark.skipif(
    postgres.find_programs() is None, reason=f"no PostgreSQL: {postgres.INSTALL_ADVICE}"
)
def test_a_lost_change_is_found_and_the_signal_heals_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Round by round, as `make demo-cdc` and `make demo-cdc-break` show it."""
    demo = capture.CaptureDemo(tmp_path, config.load_settings())
    try:
        demo.start()
        demo.change_rows()
        demo.compare()
        assert "current equals the source" in capfd.readouterr().out
        demo.lose_change()
        demo.compare()
        shown = capfd.readouterr()
        assert "before-image differs from the row in customer: id=1" in shown.err
        assert "current equals the source" not in shown.out
        demo.heal()
        assert "current equals the source" in capfd.readouterr().out
    finally:
        demo.stop()
        postgres.remove_postgres(tmp_path, capture.print_line)
