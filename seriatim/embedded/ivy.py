"""Ivy: fetch JARs by name. Ivy ships inside the pyspark package, so nothing has to be installed for
it.

No repository is named here: Ivy's own default is used, or the settings file of the user (a mirror,
credentials). What arrives is not trusted: jars.py compares every file with the lock.

Next: embedded/jars.py decides what is fetched, and keeps it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

import msgspec

from seriatim import config
from seriatim.embedded import java
from seriatim.errors import ConfigError, PlatformError

STALL_SECONDS = 120
NOTICE_EVERY_SECONDS = 2.0
POLL_SECONDS = 0.2

# Without descriptors one request per JAR is enough: 46 JARs in 6 s instead of 60.
RESOLVER_BY_NAME = '<ibiblio name="parts" m2compatible="true" usepoms="false" checksums=""/>'
# With descriptors, to find out what a JAR needs.
RESOLVER_BY_DESCRIPTOR = '<ibiblio name="parts" m2compatible="true"/>'

PrintNotice = Callable[[str], None]


class Coordinate(msgspec.Struct, frozen=True, order=True):
    """The name of a JAR in a repository."""

    organisation: str
    name: str
    revision: str
    classifier: str = ""

    @classmethod
    def parse(cls, text: str) -> Coordinate:
        """Parse "organisation:name:revision" or "organisation:name:revision:classifier"."""
        fields = text.split(":")
        if len(fields) not in (3, 4) or not all(fields):
            raise ConfigError(
                f"not a JAR's name: {text!r}", next="write organisation:name:revision"
            )
        return cls(*fields)

    def __str__(self) -> str:
        text = f"{self.organisation}:{self.name}:{self.revision}"
        if self.classifier:
            text += f":{self.classifier}"
        return text

    @property
    def file_name(self) -> str:
        """A file name that is unique among all JARs, and readable."""
        tail = f"-{self.classifier}" if self.classifier else ""
        return f"{self.organisation}_{self.name}-{self.revision}{tail}.jar"


def fetch_jars(
    coordinates: Sequence[Coordinate],
    scratch: Path,
    settings: config.Settings,
    print_notice: PrintNotice,
) -> None:
    """Put exactly these JARs into `scratch`, under their file names."""
    pattern = "[organisation]_[artifact]-[revision](-[classifier]).[ext]"
    _run_ivy(coordinates, pattern, scratch, settings, print_notice, transitive=False)


def fetch_jars_with_dependencies(
    coordinates: Sequence[Coordinate],
    scratch: Path,
    settings: config.Settings,
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
    settings: config.Settings,
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


def _ivy_command(scratch: Path, pattern: str, settings: config.Settings) -> list[str]:
    java_program = java.find_java(config.child_environment())
    settings_file = _user_settings_file(settings) or scratch / "ivysettings.xml"
    command = [str(java_program), "-cp", str(_spark_jars() / "*"), "org.apache.ivy.Main"]
    command += ["-settings", str(settings_file)]
    command += ["-ivy", str(scratch / "ivy.xml")]
    command += ["-cache", str(scratch / "cache")]
    command += ["-retrieve", str(scratch / "lib" / pattern)]
    command += ["-types", "jar", "bundle"]
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


def _user_settings_file(settings: config.Settings) -> Path | None:
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
        artifact = f'<artifact name={name} type="jar" ext="jar"{classifier}/>'
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
    byte_count = sum(_file_size(file) for file in cache.rglob("*.jar*"))
    jar_count = sum(1 for _ in cache.rglob("*.jar"))
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
