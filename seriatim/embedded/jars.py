"""JARs: exactly those of jars.lock, in a cache under SERIATIM_HOME, each verified by its SHA-256.

A file is hashed when it arrives, and whenever its size or change time differs from the remembered
one. So a start costs a few `stat` calls, and a truncated or altered file is noticed and fetched
again.

JARs are fetched by Ivy, which ships inside the pyspark package, so nothing has to be installed for it.
No repository is named here: Ivy's own default is used, or the settings file of the user (a mirror,
credentials). What arrives is not trusted: every file is compared with the lock.

Next: embedded/broker.py and the Spark session use the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import IO, Literal
from xml.sax.saxutils import quoteattr

import msgspec

from seriatim import config
from seriatim.config import Settings
from seriatim.embedded import java
from seriatim.errors import ConfigError, PlatformError

LOCK_FILE = Path(str(files("seriatim.embedded") / "jars.lock"))
CHOICE_FILE = Path(str(files("seriatim.embedded") / "jars.toml"))
HEADER = """\
# Every JAR that Seriatim uses, by group, with its SHA-256. Made from jars.toml by `seriatim jars lock`:
# change that file, not this one.
"""

JAR = "jar"
EXTENSIONS = (JAR, "tar.gz")

STALL_SECONDS = 120
NOTICE_EVERY_SECONDS = 2.0
POLL_SECONDS = 0.2

# Without descriptors one request per JAR is enough: 46 JARs in 6 s instead of 60.
RESOLVER_BY_NAME = '<ibiblio name="parts" m2compatible="true" usepoms="false" checksums=""/>'
# With descriptors, to find out what a JAR needs.
RESOLVER_BY_DESCRIPTOR = '<ibiblio name="parts" m2compatible="true"/>'

PrintNotice = Callable[[str], None]
JarCondition = Literal["good", "missing", "damaged"]


class Coordinate(msgspec.Struct, frozen=True, order=True):
    """The name of a JAR in a repository, or of an archive of JARs."""

    organisation: str
    name: str
    revision: str
    classifier: str = ""
    extension: str = JAR

    @classmethod
    def parse(cls, text: str) -> Coordinate:
        """Parse "organisation:name:revision" or "organisation:name:revision:classifier". An archive
        that is no JAR has its extension behind it: "…@tar.gz".
        """
        coordinate, _, extension = text.partition("@")
        fields = coordinate.split(":")
        is_known = extension in ("", *EXTENSIONS)
        if len(fields) not in (3, 4) or not all(fields) or not is_known:
            raise ConfigError(
                f"not a JAR's name: {text!r}", next="write organisation:name:revision"
            )
        organisation, name, revision, *classifier = fields
        return cls(organisation, name, revision, "".join(classifier), extension or JAR)

    def __str__(self) -> str:
        text = f"{self.organisation}:{self.name}:{self.revision}"
        if self.classifier:
            text += f":{self.classifier}"
        if self.extension != JAR:
            text += f"@{self.extension}"
        return text

    @property
    def file_name(self) -> str:
        """A file name that is unique among all JARs, and readable."""
        tail = f"-{self.classifier}" if self.classifier else ""
        return f"{self.organisation}_{self.name}-{self.revision}{tail}.{self.extension}"


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
            f"no group of JARs is called {group!r}", next=f"use one of {', '.join(jar_groups())}"
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
        return fetch_jars_with_dependencies(chosen, scratch, settings, print_notice)
    fetch_jars(chosen, scratch, settings, print_notice)
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
        fetch_jars(coordinates, Path(scratch), settings, print_notice)
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


def fetch_jars(
    coordinates: Sequence[Coordinate],
    scratch: Path,
    settings: Settings,
    print_notice: PrintNotice,
) -> None:
    """Put exactly these JARs into `scratch`, under their file names."""
    pattern = "[organisation]_[artifact]-[revision](-[classifier]).[ext]"
    _run_ivy(coordinates, pattern, scratch, settings, print_notice, transitive=False)


def fetch_jars_with_dependencies(
    coordinates: Sequence[Coordinate],
    scratch: Path,
    settings: Settings,
    print_notice: PrintNotice,
) -> list[tuple[Coordinate, Path]]:
    """Fetch these JARs with all their dependencies. Returns every JAR with its file."""
    pattern = "[organisation]/[artifact]/[revision](/[classifier])/[artifact].[ext]"
    _run_ivy(coordinates, pattern, scratch, settings, print_notice, transitive=True)
    files = sorted((scratch / "lib").rglob("*.jar"))
    return [(_coordinate_from_path(file.relative_to(scratch / "lib")), file) for file in files]


def _coordinate_from_path(path: Path) -> Coordinate:
    *coordinate, _ = path.parts
    return Coordinate(*coordinate)


def _run_ivy(
    coordinates: Sequence[Coordinate],
    pattern: str,
    scratch: Path,
    settings: Settings,
    print_notice: PrintNotice,
    *,
    transitive: bool,
) -> None:
    """Write the list of JARs for Ivy, run it, report progress, and turn its failure into one error."""
    (scratch / "ivy.xml").write_text(_ivy_module_xml(coordinates, transitive=transitive))
    if transitive:
        resolver = RESOLVER_BY_DESCRIPTOR
        of_total = ""
    else:
        resolver = RESOLVER_BY_NAME
        of_total = f"/{len(coordinates)}"
    (scratch / "ivysettings.xml").write_text(_ivy_settings_xml(resolver))
    log = scratch / "ivy.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            _ivy_command(scratch, pattern, settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            _wait_for_ivy(process, scratch / "cache", of_total, print_notice)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _ivy_error(log.read_text(errors="replace"))


def _ivy_command(scratch: Path, pattern: str, settings: Settings) -> list[str]:
    java_program = java.find_java(config.child_environment())
    settings_file = _user_settings_file(settings) or scratch / "ivysettings.xml"
    command = [str(java_program), "-cp", str(_spark_jars() / "*"), "org.apache.ivy.Main"]
    command += ["-settings", str(settings_file)]
    command += ["-ivy", str(scratch / "ivy.xml")]
    command += ["-cache", str(scratch / "cache")]
    command += ["-retrieve", str(scratch / "lib" / pattern)]
    command += ["-types", *EXTENSIONS, "bundle"]
    command += ["-warn"]
    return command


def _spark_jars() -> Path:
    """The folder in which the pyspark package keeps its JARs, Ivy among them. Pyspark is not imported."""
    spec = importlib.util.find_spec("pyspark")
    folder = Path(spec.origin).parent / "jars" if spec and spec.origin else None
    if folder is None or not any(folder.glob("ivy-*.jar")):
        raise ConfigError(
            "JARs are fetched through the Ivy that ships with pyspark, and pyspark is not installed here",
            next="pip install 'seriatim[spark]', or make setup in a clone",
        )
    return folder


def _user_settings_file(settings: Settings) -> Path | None:
    file = settings.ivy_settings
    if file and not file.is_file():
        raise ConfigError(
            f"the Ivy settings file {file} does not exist",
            next="fix or unset SERIATIM_IVY_SETTINGS",
        )
    return file


def _ivy_module_xml(coordinates: Iterable[Coordinate], *, transitive: bool) -> str:
    """The list of JARs as an Ivy module file."""
    lines = "\n".join(
        _dependency_xml(coordinate, transitive=transitive) for coordinate in coordinates
    )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">\n'
        '<info organisation="seriatim" module="parts"/>\n'
        '<configurations><conf name="default"/></configurations>\n'
        f"<dependencies>\n{lines}\n</dependencies>\n</ivy-module>\n"
    )


def _dependency_xml(coordinate: Coordinate, *, transitive: bool) -> str:
    """One JAR of the list."""
    organisation = quoteattr(coordinate.organisation)
    name = quoteattr(coordinate.name)
    revision = quoteattr(coordinate.revision)
    artifact = ""
    if not transitive:
        # Ivy fetches nothing but a named artifact, so it must not be named where the
        # dependencies are to come along.
        classifier = ""
        if coordinate.classifier:
            classifier = f" m:classifier={quoteattr(coordinate.classifier)}"
        extension = quoteattr(coordinate.extension)
        artifact = f"<artifact name={name} type={extension} ext={extension}{classifier}/>"
    return (
        f"<dependency org={organisation} name={name} rev={revision} "
        f'conf="default->default" transitive="{str(transitive).lower()}">'
        f"{artifact}</dependency>"
    )


def _ivy_settings_xml(resolver: str) -> str:
    return f'<ivysettings><settings defaultResolver="parts"/>\n<resolvers>{resolver}</resolvers></ivysettings>\n'


def _wait_for_ivy(
    process: subprocess.Popen[bytes], cache: Path, of_total: str, print_notice: PrintNotice
) -> None:
    """Wait for Ivy, and print how many JARs have arrived. Gives up when nothing arrives for long."""
    progress = (0, 0)
    progress_seconds = time.monotonic()
    notice_seconds = progress_seconds
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        now_seconds = time.monotonic()
        new_progress = _download_progress(cache)
        if new_progress != progress:
            progress = new_progress
            progress_seconds = now_seconds
        if now_seconds - progress_seconds > STALL_SECONDS:
            raise PlatformError(
                f"fetching JARs stalled: nothing arrived for {STALL_SECONDS} s",
                next="check the network, or give a mirror by SERIATIM_IVY_SETTINGS; then run the same again",
            )
        if now_seconds - notice_seconds >= NOTICE_EVERY_SECONDS:
            notice_seconds = now_seconds
            jar_count, byte_count = progress
            print_notice(f"fetching JARs: {jar_count}{of_total}, {byte_count / 1e6:.1f} MB")


def _download_progress(cache: Path) -> tuple[int, int]:
    """How many JARs have arrived, and how many bytes, those of unfinished files included."""
    byte_count = 0
    jar_count = 0
    for extension in EXTENSIONS:
        byte_count += sum(_file_size(file) for file in cache.rglob(f"*.{extension}*"))
        jar_count += sum(1 for _ in cache.rglob(f"*.{extension}"))
    return jar_count, byte_count


def _file_size(file: Path) -> int:
    """The size of a file; 0 if it is gone, because Ivy renames files while we look."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _ivy_error(log: str) -> PlatformError:
    """The error for a failed run: the JARs that Ivy did not get, and the first error in its log."""
    lines = [line.strip() for line in log.splitlines()]
    missing = sorted(set(re.findall(r"^\s*:: (\S+#\S+;[^\s:!]+)", log, re.MULTILINE)))
    errors = [
        line for line in lines if line.startswith(("Server access error", "ERROR", "Exception"))
    ]
    reason = ", ".join(missing[:3]) or "Ivy failed"
    if len(missing) > 3:
        reason += f" and {len(missing) - 3} more"
    return PlatformError(
        f"JARs could not be fetched: {reason}",
        cause=(errors or [""])[0][:300],
        next="check the network, or give a mirror by SERIATIM_IVY_SETTINGS; then run the same again",
    )


@contextmanager
def file_lock(
    path: Path, print_notice: Callable[[str], None], waiting_notice: str
) -> Iterator[None]:
    """Let one process at a time do slow work: hold the lock at `path`, which the system releases when
    its holder dies. Prints `waiting_notice` once if another process has it. The file itself is not
    deleted.
    """
    with _open_lock_file(path) as file:
        if not _try_lock(file):
            print_notice(waiting_notice)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_lock_file(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")
    except OSError as error:
        raise ConfigError(
            f"{path.parent} is not writable: {error.strerror}",
            next="set SERIATIM_HOME to a folder you may write to",
        ) from None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
