"""JARs: exactly those of jars.lock, in a cache under SERIATIM_HOME, each verified by its SHA-256.

A file is hashed when it arrives, and whenever its size or change time differs from the remembered
one. So a start costs a few `stat` calls, and a truncated or altered file is noticed and fetched
again.

Next: embedded/ivy.py fetches; embedded/broker.py and the Spark session use the files.
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
    """One line of jars.lock."""

    coordinate: Coordinate
    sha256: str

    @property
    def file_name(self) -> str:
        """Its name in the cache."""
        return self.coordinate.file_name


class JarGroupChoice(msgspec.Struct, frozen=True):
    """One group of jars.toml: the JARs chosen, and whether their dependencies are added."""

    transitive: bool
    jars: list[str]


def ensure_jars(group: str, settings: Settings, print_notice: PrintNotice) -> list[Path]:
    """The files of a group, all verified. What is missing or damaged is fetched first, with a notice."""
    jars = locked_jars(group)
    folder = settings.home / "jars"
    if not _is_remembered_good(jars, folder, group):
        if _bad_jars(jars, folder):
            _fetch_bad_jars(jars, folder, settings, print_notice)
        _write_proof_file(jars, folder, group)
    return [folder / jar.file_name for jar in jars]


def jar_groups() -> list[str]:
    """The names of all groups."""
    return sorted(_read_lock())


def locked_jars(group: str) -> list[Jar]:
    """The JARs of a group as jars.lock has them. An unknown group is refused."""
    locked = _read_lock()
    if group not in locked:
        raise ConfigError(
            f"no group of JARs is called {group!r}", next=f"use one of {', '.join(locked)}"
        )
    return locked[group]


def jar_conditions(jars: Iterable[Jar], folder: Path) -> dict[Jar, JarCondition]:
    """The condition of every file, by hashing it: slow, but certain."""
    return {jar: _condition(jar, folder / jar.file_name) for jar in jars}


def _bad_jars(jars: Iterable[Jar], folder: Path) -> dict[Jar, JarCondition]:
    """The JARs that are missing or damaged."""
    conditions = jar_conditions(jars, folder)
    return {jar: condition for jar, condition in conditions.items() if condition != "good"}


def make_lock(settings: Settings, print_notice: PrintNotice) -> str:
    """The text of a new jars.lock: what jars.toml names, with all dependencies, as fetched now."""
    choices = msgspec.toml.decode(CHOICE_FILE.read_bytes(), type=dict[str, JarGroupChoice])
    text = HEADER
    for group, choice in sorted(choices.items()):
        text += _locked_group(group, choice, settings, print_notice)
    return text


def _read_lock() -> dict[str, list[Jar]]:
    content: dict[str, dict[str, str]] = tomllib.loads(LOCK_FILE.read_text())
    locked = {}
    for group, entries in content.items():
        jars = [Jar(Coordinate.parse(name), sha256) for name, sha256 in entries.items()]
        locked[group] = sorted(jars)
    return locked


def _locked_group(
    group: str, choice: JarGroupChoice, settings: Settings, print_notice: PrintNotice
) -> str:
    chosen = [Coordinate.parse(text) for text in choice.jars]
    print_notice(f"{group}: {len(chosen)} JARs chosen")
    with tempfile.TemporaryDirectory(prefix="seriatim-jars-") as scratch:
        fetched = _fetch_chosen(chosen, Path(scratch), choice, settings, print_notice)
        lines = [f'"{coordinate}" = "{_sha256(file)}"\n' for coordinate, file in sorted(fetched)]
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


def _fetch_bad_jars(
    jars: Sequence[Jar], folder: Path, settings: Settings, print_notice: PrintNotice
) -> None:
    """Fetch what is missing or damaged, one process at a time."""
    waiting_notice = "waiting: another process is fetching JARs into this cache"
    with file_lock(folder / "lock", print_notice, waiting_notice):
        # Looked at again under the lock: the process that had it may have fetched everything.
        bad_jars = _bad_jars(jars, folder)
        for jar, condition in bad_jars.items():
            if condition == "damaged":
                print_notice(f"{jar.file_name} is damaged: fetching it again")
        if bad_jars:
            _fetch_into_cache(list(bad_jars), folder, settings, print_notice)


def _fetch_into_cache(
    jars: Sequence[Jar], folder: Path, settings: Settings, print_notice: PrintNotice
) -> None:
    """Fetch JARs into a scratch folder, verify them there, then move each one into the cache."""
    # Scratch folders of killed processes; no other process is at work, since we hold the lock.
    for abandoned in folder.glob(".fetch-*"):
        shutil.rmtree(abandoned)
    print_notice(f"fetching {len(jars)} JARs into {folder}")
    coordinates = [jar.coordinate for jar in jars]
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        ivy.fetch_jars(coordinates, Path(scratch), settings, print_notice)
        for jar in jars:
            _move_into_cache(jar, Path(scratch) / "lib" / jar.file_name, folder)
    print_notice(f"{len(jars)} JARs fetched and proved")


def _move_into_cache(jar: Jar, fetched: Path, folder: Path) -> None:
    condition = _condition(jar, fetched)
    if condition != "good":
        actual = _sha256(fetched) if condition == "damaged" else "nothing"
        raise PlatformError(
            f"{jar.coordinate} is not the file that jars.lock names",
            expected=jar.sha256,
            found=actual,
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
    """Whether every file has the size and change time that it had when it was verified."""
    try:
        return _proof_file(folder, group).read_bytes() == _file_attributes(jars, folder)
    except FileNotFoundError:
        return False


def _write_proof_file(jars: Sequence[Jar], folder: Path, group: str) -> None:
    """Remember size and change time of the verified files. In a cache that is read-only nothing is
    remembered, and its files are hashed each time.
    """
    try:
        scratch = folder / f".{_proof_file(folder, group).name}.{os.getpid()}"
        scratch.write_bytes(_file_attributes(jars, folder))
        scratch.replace(_proof_file(folder, group))
    except OSError:
        return


def _file_attributes(jars: Sequence[Jar], folder: Path) -> bytes:
    rows = []
    for jar in jars:
        stat = (folder / jar.file_name).stat()
        rows.append([jar.file_name, jar.sha256, stat.st_size, stat.st_ctime_ns])
    return msgspec.json.encode(rows)
