"""JARs: exactly those of jars.lock, in a cache under SERIATIM_HOME, each proved by its SHA-256.

A file is hashed when it arrives and whenever its size or change time is not the one remembered, so a
start costs a few `stat` calls, and a truncated or altered file is noticed and fetched again.

Next room: ivy.py fetches; broker.py and the Spark session use what is here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec

from seriatim.config import Settings
from seriatim.core.errors import ConfigError, PlatformError
from seriatim.embedded import ivy
from seriatim.embedded.alone import alone
from seriatim.embedded.ivy import Coordinate

LOCK_FILE = Path(str(files("seriatim.embedded") / "jars.lock"))
CHOICE_FILE = Path(str(files("seriatim.embedded") / "jars.toml"))
HEADER = """\
# Every JAR that Seriatim uses, by group, with its SHA-256. Made from jars.toml by `seriatim jars lock`:
# change that file, not this one.
"""

Say = Callable[[str], None]
Condition = Literal["good", "missing", "damaged"]


class Jar(msgspec.Struct, frozen=True, order=True):
    """One line of the lock."""

    coordinate: Coordinate
    sha256: str

    @property
    def file_name(self) -> str:
        """Its name in the cache."""
        return self.coordinate.file_name


class Choice(msgspec.Struct, frozen=True):
    """One group of jars.toml: what we chose, and whether what it needs comes along."""

    transitive: bool
    jars: list[str]


def ensure(group: str, settings: Settings, say: Say) -> list[Path]:
    """The files of a group, all proved; what is missing or damaged is fetched first, and said."""
    wanted = of_group(group)
    folder = settings.home / "jars"
    if not _remembered_as_good(wanted, folder, group):
        if any(condition != "good" for condition in conditions(wanted, folder).values()):
            _fill(wanted, folder, settings, say)
        _remember(wanted, folder, group)
    return [folder / jar.file_name for jar in wanted]


def groups() -> list[str]:
    """The names of all groups."""
    return sorted(_read_lock())


def of_group(group: str) -> list[Jar]:
    """The JARs of a group, as locked."""
    locked = _read_lock()
    if group not in locked:
        raise ConfigError(f"no group of JARs is called {group!r}", next=f"use one of {', '.join(locked)}")
    return locked[group]


def conditions(wanted: Iterable[Jar], folder: Path) -> dict[Jar, Condition]:
    """Every file hashed: the slow and certain way to look."""
    return {jar: _condition(jar, folder / jar.file_name) for jar in wanted}


def make_lock(settings: Settings, say: Say) -> str:
    """The text of a new jars.lock: what jars.toml names and all that it needs, as fetched now."""
    choices = msgspec.toml.decode(CHOICE_FILE.read_bytes(), type=dict[str, Choice])
    return HEADER + "".join(_locked_group(name, choices[name], settings, say) for name in sorted(choices))


def _read_lock() -> dict[str, list[Jar]]:
    lines: dict[str, dict[str, str]] = tomllib.loads(LOCK_FILE.read_text())
    return {
        group: sorted(Jar(Coordinate.parse(name), sha256) for name, sha256 in entries.items())
        for group, entries in lines.items()
    }


def _locked_group(group: str, choice: Choice, settings: Settings, say: Say) -> str:
    chosen = [Coordinate.parse(text) for text in choice.jars]
    say(f"{group}: {len(chosen)} JARs chosen")
    with tempfile.TemporaryDirectory(prefix="seriatim-jars-") as scratch:
        found = _found(chosen, Path(scratch), choice, settings, say)
        lines = [f'"{coordinate}" = "{_sha256(file)}"\n' for coordinate, file in sorted(found)]
    say(f"{group}: {len(lines)} JARs locked")
    return f"\n[{group}]\n{''.join(lines)}"


def _found(
    chosen: list[Coordinate], scratch: Path, choice: Choice, settings: Settings, say: Say
) -> list[tuple[Coordinate, Path]]:
    if choice.transitive:
        return ivy.closure(chosen, scratch, settings, say)
    ivy.retrieve(chosen, scratch, settings, say)
    return [(coordinate, scratch / "lib" / coordinate.file_name) for coordinate in chosen]


def _fill(wanted: Sequence[Jar], folder: Path, settings: Settings, say: Say) -> None:
    """Fetch what is not good, one process at a time: who waited may find that all is done."""
    with alone(folder / "lock", say, "waiting: another process is fetching JARs into this cache"):
        lacking = {jar: how for jar, how in conditions(wanted, folder).items() if how != "good"}
        for jar in (jar for jar, how in lacking.items() if how == "damaged"):
            say(f"{jar.file_name} is damaged: fetching it again")
        if lacking:
            _fetch(list(lacking), folder, settings, say)


def _fetch(lacking: Sequence[Jar], folder: Path, settings: Settings, say: Say) -> None:
    """Get JARs into a scratch folder, prove them there, then move each into place in one step."""
    for left_by_a_killed_one in folder.glob(".fetch-*"):
        shutil.rmtree(left_by_a_killed_one)
    say(f"fetching {len(lacking)} JARs into {folder}")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        ivy.retrieve([jar.coordinate for jar in lacking], Path(scratch), settings, say)
        for jar in lacking:
            _place(jar, Path(scratch) / "lib" / jar.file_name, folder)
    say(f"{len(lacking)} JARs fetched and proved")


def _place(jar: Jar, fetched: Path, folder: Path) -> None:
    how = _condition(jar, fetched)
    if how != "good":
        found = _sha256(fetched) if how == "damaged" else "nothing"
        raise PlatformError(
            f"{jar.coordinate} is not the file that jars.lock names",
            expected=jar.sha256,
            found=found,
            next="run the same again; if it stays, your repository or mirror serves another file",
        )
    with fetched.open("rb") as file:
        os.fsync(file.fileno())
    fetched.replace(folder / jar.file_name)


def _condition(jar: Jar, file: Path) -> Condition:
    if not file.is_file():
        return "missing"
    return "good" if _sha256(file) == jar.sha256 else "damaged"


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _memory(folder: Path, group: str) -> Path:
    return folder / f"proved-{group}.json"


def _remembered_as_good(wanted: Sequence[Jar], folder: Path, group: str) -> bool:
    """Whether every file still is, to the byte count and change time, the one that was proved."""
    try:
        return _memory(folder, group).read_bytes() == _appearance(wanted, folder)
    except FileNotFoundError:
        return False


def _remember(wanted: Sequence[Jar], folder: Path, group: str) -> None:
    """Write down how the proved files look. A cache that may only be read is hashed each time instead."""
    try:
        scratch = folder / f".{_memory(folder, group).name}.{os.getpid()}"
        scratch.write_bytes(_appearance(wanted, folder))
        scratch.replace(_memory(folder, group))
    except OSError:
        return


def _appearance(wanted: Sequence[Jar], folder: Path) -> bytes:
    looks = [(jar, (folder / jar.file_name).stat()) for jar in wanted]
    return msgspec.json.encode([[jar.file_name, jar.sha256, look.st_size, look.st_ctime_ns] for jar, look in looks])
