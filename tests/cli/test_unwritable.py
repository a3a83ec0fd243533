"""An output path where this user may not write: told before anything is read, as a setting that
must be fixed.
"""

from __future__ import annotations

import errno
import getpass
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from seriatim.cli import main
from seriatim.errors import ConfigError
from seriatim.stream_files import StreamFile, load_stream, refuse_unwritable_output

STREAM = """
topics = "in-.*"
machine = "table"
table = {{key = ["id"], columns = {{id = "string"}}}}
output = {{path = "{path}"}}
"""


def stream_at(tmp_path: Path, path: str) -> StreamFile:
    """A stream whose output goes there."""
    (tmp_path / "streams").mkdir(exist_ok=True)
    (tmp_path / "streams" / "s.toml").write_text(STREAM.format(path=path))
    return load_stream("s", tmp_path / "streams")


@pytest.mark.parametrize("path", ["/proc/nobody-may-write-here", "a-file", "a-file/below"])
def test_a_run_is_refused_with_exit_code_2(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The screen names the path, and, where it is a matter of rights, the user."""
    (tmp_path / "a-file").write_text("x")
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "s.toml").write_text(STREAM.format(path=path))
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path / "streams"))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        main(["run", "s"])
    told = capsys.readouterr().err
    assert ended.value.code == 2, told
    assert path.removesuffix("/below") in told
    assert path.startswith("a-file") or f"user {getpass.getuser()}" in told


def test_a_folder_of_another_user_below_the_output_is_told_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody ran the stream as root once: the output folder is ours, its log is not."""
    file = stream_at(tmp_path, "lake")
    log = tmp_path / "lake" / "records" / "_delta_log"
    log.mkdir(parents=True)
    refuse_unwritable_output(file)
    real = tempfile.TemporaryFile

    def refused(*, dir: Path) -> Any:  # as the library has it
        if dir == log:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(ConfigError) as told:
        refuse_unwritable_output(file)
    assert str(log) in told.value.message
    assert getpass.getuser() in told.value.message


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    """No folder can be made under its name."""
    (tmp_path / "lake").symlink_to(tmp_path / "not-there" / "either")
    file = stream_at(tmp_path, "lake")
    with pytest.raises(ConfigError, match="lake"):
        refuse_unwritable_output(file, create=True)


def test_a_full_disk_is_no_matter_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays what it is, trouble of the platform, and a retry may help."""

    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = stream_at(tmp_path, "lake")
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match="No space left"):
        refuse_unwritable_output(file, create=True)


def test_a_look_at_a_good_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    """But the folder itself, for a run that is about to fill it."""
    file = stream_at(tmp_path, "lake/deep")
    refuse_unwritable_output(file)
    assert not (tmp_path / "lake").exists()
    refuse_unwritable_output(file, create=True)
    assert list((tmp_path / "lake" / "deep").iterdir()) == []
