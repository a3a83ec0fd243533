"""JARs: exactly those of jars.lock, in a cache under SERIATIM_HOME, each proved by its SHA-256.

A file is hashed when it arrives and whenever its size or change time is not the one remembered, so
a start costs a few `stat` calls, and a truncated or altered file is noticed and fetched again.

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
from seriatim.embedded import ivy
from seriatim.embedded.file_lock import file_lock
from seriatim.embedded.ivy import Coordinate
from seriatim.errors import ConfigError, PlatformError

LOCK_FILE = Path(str(files("seriatim.embedded") / "jars.lock"))
CHOICE_FILE = Path(str(files("seriatim.embedded") / "jars.toml"))
HEADER = """\
# Every JAR that Seriatim uses, by group, with its SHA-256. Made from jars.toml by `seriatim jars lock`:
# change that file, not this one.
"""

PrintNotice = Callable[[str], None]
JarCondition = Literal["good", "missing", "damaged"]


class Jar(msgspec.Struct, frozen=True, order=True):
    """One line of the lock."""

    coordinate: Coordinate
    sha256: str

    @property
    def file_name(self) -> str:
        """Its name in the cache."""
        return self.coordinate.file_name


class JarGroupChoice(msgspec.Struct, frozen=True):
    """One group of jars.toml: what we chose, and whether what it needs comes along."""

    transitive: bool
    jars: list[str]


def ensure_jars(group: str, settings: Settings, print_notice: PrintNotice) -> list[Path]:
    """The files of a group, all proved; what is missing or damaged is fetched first, and said."""
    wanted = locked_jars(group)
    folder = settings.home / "jars"
    if not _is_remembered_good(wanted, folder, group):
        if any(condition != "good" for condition in jar_conditions(wanted, folder).values()):
            _fetch_lacking(wanted, folder, settings, print_notice)
        _write_proof_file(wanted, folder, group)
    return [folder / jar.file_name for jar in wanted]


def jar_groups() -> list[str]:
    """The names of all groups."""
    return sorted(_read_lock())


def locked_jars(group: str) -> list[Jar]:
    """The JARs of a group, as locked."""
    locked = _read_lock()
    if group not in locked:
        raise ConfigError(
            f"no group of JARs is called {group!r}", next=f"use one of {', '.join(locked)}"
        )
    return locked[group]


def jar_conditions(jars: Iterable[Jar], folder: Path) -> dict[Jar, JarCondition]:
    """Every file hashed: the slow and certain way to look."""
    return {jar: _condition(jar, folder / jar.file_name) for jar in jars}


def make_lock(settings: Settings, print_notice: PrintNotice) -> str:
    """The text of a new jars.lock: what jars.toml names and all that it needs, as fetched now."""
    choices = msgspec.toml.decode(CHOICE_FILE.read_bytes(), type=dict[str, JarGroupChoice])
    return HEADER + "".join(
        _locked_group(name, choices[name], settings, print_notice) for name in sorted(choices)
    )


def _read_lock() -> dict[str, list[Jar]]:
    lines: dict[str, dict[str, str]] = tomllib.loads(LOCK_FILE.read_text())
    return {
        group: sorted(Jar(Coordinate.parse(name), sha256) for name, sha256 in entries.items())
        for group, entries in lines.items()
    }


def _locked_group(
    group: str, choice: JarGroupChoice, settings: Settings, print_notice: PrintNotice
) -> str:
    chosen = [Coordinate.parse(text) for text in choice.jars]
    print_notice(f"{group}: {len(chosen)} JARs chosen")
    with tempfile.TemporaryDirectory(prefix="seriatim-jars-") as scratch:
        found = _fetch_chosen(chosen, Path(scratch), choice, settings, print_notice)
        lines = [f'"{coordinate}" = "{_sha256(file)}"\n' for coordinate, file in sorted(found)]
    print_notice(f"{group}: {len(lines)} JARs locked")
    return f"\n[{group}]\n{''.join(lines)}"


def _fetch_chosen(
    chosen: list[Coordinate],
    scratch: Path,
    choice: JarGroupChoice,
    settings: Settings,
    print_notice: PrintNotice,
) -> list[tuple[Coordinate, Path]]:
    if choice.transitive:
        return ivy.fetch_jars_with_dependencies(chosen, scratch, settings, print_notice)
    ivy.fetch_jars(chosen, scratch, settings, print_notice)
    return [(coordinate, scratch / "lib" / coordinate.file_name) for coordinate in chosen]


def _fetch_lacking(
    jars: Sequence[Jar], folder: Path, settings: Settings, print_notice: PrintNotice
) -> None:
    """Fetch what is not good, one process at a time: who waited may find that all is done."""
    with file_lock(
        folder / "lock", print_notice, "waiting: another process is fetching JARs into this cache"
    ):
        lacking = {jar: how for jar, how in jar_conditions(jars, folder).items() if how != "good"}
        for jar in (jar for jar, how in lacking.items() if how == "damaged"):
            print_notice(f"{jar.file_name} is damaged: fetching it again")
        if lacking:
            _fetch_into_cache(list(lacking), folder, settings, print_notice)


def _fetch_into_cache(
    lacking: Sequence[Jar], folder: Path, settings: Settings, print_notice: PrintNotice
) -> None:
    """Get JARs into a scratch folder, prove them there, then move each into place in one step."""
    for left_by_a_killed_one in folder.glob(".fetch-*"):
        shutil.rmtree(left_by_a_killed_one)
    print_notice(f"fetching {len(lacking)} JARs into {folder}")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        ivy.fetch_jars([jar.coordinate for jar in lacking], Path(scratch), settings, print_notice)
        for jar in lacking:
            _move_into_cache(jar, Path(scratch) / "lib" / jar.file_name, folder)
    print_notice(f"{len(lacking)} JARs fetched and proved")


def _move_into_cache(jar: Jar, fetched: Path, folder: Path) -> None:
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


def _condition(jar: Jar, file: Path) -> JarCondition:
    if not file.is_file():
        return "missing"
    return "good" if _sha256(file) == jar.sha256 else "damaged"


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _proof_file(folder: Path, group: str) -> Path:
    return folder / f"proved-{group}.json"


def _is_remembered_good(jars: Sequence[Jar], folder: Path, group: str) -> bool:
    """Whether every file still is, to the byte count and change time, the one that was proved."""
    try:
        return _proof_file(folder, group).read_bytes() == _file_attributes(jars, folder)
    except FileNotFoundError:
        return False


def _write_proof_file(jars: Sequence[Jar], folder: Path, group: str) -> None:
    """Write down how the proved files look. A cache that may only be read is hashed each time
    instead.
    """
    try:
        scratch = folder / f".{_proof_file(folder, group).name}.{os.getpid()}"
        scratch.write_bytes(_file_attributes(jars, folder))
        scratch.replace(_proof_file(folder, group))
    except OSError:
        return


def _file_attributes(jars: Sequence[Jar], folder: Path) -> bytes:
    looks = [(jar, (folder / jar.file_name).stat()) for jar in jars]
    return msgspec.json.encode(
        [[jar.file_name, jar.sha256, look.st_size, look.st_ctime_ns] for jar, look in looks]
    )
