"""Ivy: gets JARs by name. It ships inside the pyspark package, so nothing has to be installed for
it.

No repository is named here: Ivy's own default is used, or the settings file a user gives (a mirror,
credentials). What arrives is not trusted: jars.py compares every file with the lock.

Next room: jars.py decides what is fetched and keeps it.
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
        """From "organisation:name:revision" or "organisation:name:revision:classifier"."""
        parts = text.split(":")
        if len(parts) not in (3, 4) or not all(parts):
            raise ConfigError(
                f"not a JAR's name: {text!r}", next="write organisation:name:revision"
            )
        return cls(*parts)

    def __str__(self) -> str:
        return ":".join(
            filter(None, (self.organisation, self.name, self.revision, self.classifier))
        )

    @property
    def file_name(self) -> str:
        """Unique among all JARs, and readable."""
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
    """These JARs and all that they need, with the files."""
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
    """Start Ivy on a list made for it, report progress, and turn its failures into one sentence."""
    (scratch / "ivy.xml").write_text(_ivy_module_xml(coordinates, transitive=transitive))
    (scratch / "ivysettings.xml").write_text(
        _ivy_settings_xml(RESOLVER_BY_DESCRIPTOR if transitive else RESOLVER_BY_NAME)
    )
    log = scratch / "ivy.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            _ivy_command(scratch, pattern, settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            _wait_for_ivy(
                process,
                scratch / "cache",
                "" if transitive else f"/{len(coordinates)}",
                print_notice,
            )
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _ivy_error(log.read_text(errors="replace"))


def _ivy_command(scratch: Path, pattern: str, settings: config.Settings) -> list[str]:
    program = [
        str(java.find_java(config.child_environment())),
        "-cp",
        str(_spark_jars() / "*"),
        "org.apache.ivy.Main",
    ]
    rules = _user_settings_file(settings) or scratch / "ivysettings.xml"
    given = [
        "-settings",
        str(rules),
        "-ivy",
        str(scratch / "ivy.xml"),
        "-cache",
        str(scratch / "cache"),
    ]
    return [
        *program,
        *given,
        "-retrieve",
        str(scratch / "lib" / pattern),
        "-types",
        "jar",
        "bundle",
        "-warn",
    ]


def _spark_jars() -> Path:
    """Where the pyspark package keeps its JARs, Ivy among them; found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    folder = Path(spec.origin).parent / "jars" if spec and spec.origin else None
    if folder is None or not any(folder.glob("ivy-*.jar")):
        raise ConfigError(
            "JARs are fetched through the Ivy that ships with pyspark, and pyspark is not installed here",
            next="pip install 'seriatim[spark]', or make setup in a clone",
        )
    return folder


def _user_settings_file(settings: config.Settings) -> Path | None:
    rules = settings.ivy_settings
    if rules and not rules.is_file():
        raise ConfigError(
            f"the Ivy settings file {rules} does not exist",
            next="fix or unset SERIATIM_IVY_SETTINGS",
        )
    return rules


def _ivy_module_xml(coordinates: Iterable[Coordinate], *, transitive: bool) -> str:
    """Our shopping list in Ivy's language."""
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
    """One JAR; the artifact is spelled out only where nothing else is wanted, or it would be the
    only one.
    """
    name, classifier = quoteattr(coordinate.name), quoteattr(coordinate.classifier)
    artifact = f'<artifact name={name} type="jar" ext="jar"'
    artifact += f" m:classifier={classifier}/>" if coordinate.classifier else "/>"
    return (
        f"<dependency org={quoteattr(coordinate.organisation)} name={name} rev={quoteattr(coordinate.revision)} "
        f'conf="default->default" transitive="{str(transitive).lower()}">'
        f"{'' if transitive else artifact}</dependency>"
    )


def _ivy_settings_xml(resolver: str) -> str:
    return f'<ivysettings><settings defaultResolver="parts"/>\n<resolvers>{resolver}</resolvers></ivysettings>\n'


def _wait_for_ivy(
    process: subprocess.Popen[bytes], cache: Path, of_total: str, print_notice: PrintNotice
) -> None:
    """Wait for Ivy; tell how many JARs have arrived; give up when nothing has moved for long."""
    seen, moved_at, told_at = (0, 0), time.monotonic(), time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        now, progress = time.monotonic(), _download_progress(cache)
        if progress != seen:
            seen, moved_at = progress, now
        if now - moved_at > STALL_SECONDS:
            raise PlatformError(
                f"fetching JARs stalled: nothing arrived for {STALL_SECONDS} s",
                next="check the network, or give a mirror by SERIATIM_IVY_SETTINGS; then run the same again",
            )
        if now - told_at >= NOTICE_EVERY_SECONDS:
            told_at = now
            print_notice(f"fetching JARs: {seen[0]}{of_total}, {seen[1] / 1e6:.1f} MB")


def _download_progress(cache: Path) -> tuple[int, int]:
    """How many JARs and how many bytes, also of those still on their way."""
    sizes = [_file_size(file) for file in cache.rglob("*.jar*")]
    whole = sum(1 for _ in cache.rglob("*.jar"))
    return whole, sum(sizes)


def _file_size(file: Path) -> int:
    """Ivy renames files under us: one that has just gone counts nothing."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _ivy_error(log: str) -> PlatformError:
    """Ivy says much; what matters is which JARs it did not get, and its first own error."""
    lines = [line.strip() for line in log.splitlines()]
    missing = sorted(set(re.findall(r"^\s*:: (\S+#\S+;[^\s:!]+)", log, re.MULTILINE)))
    errors = [
        line for line in lines if line.startswith(("Server access error", "ERROR", "Exception"))
    ]
    return PlatformError(
        f"JARs could not be fetched: {', '.join(missing[:3]) or 'Ivy failed'}"
        + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
        cause=(errors or [""])[0][:300],
        next="check the network, or give a mirror by SERIATIM_IVY_SETTINGS; then run the same again",
    )
