"""The check-up: everything the product needs, looked at one by one, with what would help.

Each check is a function from Settings to what it found; a check that raises one of our errors has
failed, and the error already says what to do.

Next room: cli/doctor.py shows it.
"""

from __future__ import annotations

import os
import platform
import smtplib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from seriatim import client, config, streams
from seriatim.config import Settings
from seriatim.core.errors import ConfigError, PlatformError, SeriatimError
from seriatim.embedded import broker, jars, java, traps

# What every environment has; the lock says which versions.
PACKAGES = ("confluent-kafka", "deltalake", "kafka-python", "msgspec", "numpy", "pyarrow", "xxhash")
# What one that schedules has besides.
AIRFLOW_PACKAGES = (
    "apache-airflow",
    "apache-airflow-providers-apache-spark",
    "apache-airflow-providers-smtp",
    "great-expectations",
)
SPARK_SECONDS = 180
ANSWER_SECONDS = 5.0
START_SPARK = """
import sys
from pyspark.sql import SparkSession
master, jars = sys.argv[1:]
quiet = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.jars": jars}
spark = SparkSession.builder.master(master).config(map=quiet).getOrCreate()
assert spark.range(3).count() == 3
print(spark.version)
spark.stop()
"""


class Check(msgspec.Struct, frozen=True):
    """One line of the table. What is not required may be missing."""

    name: str
    good: bool
    required: bool
    found: str
    fix: str = ""


class NotUsed(Exception):  # noqa: N818 - no failure: the thing is optional and not set up
    """The checked thing is optional and not there; says what it was found to be, and how to have it."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found)
        self.found = found
        self.fix = fix


def checks(settings: Settings) -> Iterator[Check]:
    """All checks, in the order in which a person would fix things."""
    for name, look in LOOKS.items():
        yield _check(name, look, settings)


def _check(name: str, look: Callable[[Settings], str], settings: Settings) -> Check:
    try:
        return Check(name, good=True, required=True, found=look(settings))
    except NotUsed as absent:
        return Check(name, good=False, required=False, found=absent.found, fix=absent.fix)
    except SeriatimError as error:
        cause = error.fields.get("cause")
        found = f"{error.message} ({cause})" if cause else error.message
        return Check(name, good=False, required=True, found=found, fix=error.next)


def _python(_: Settings) -> str:
    traps.check_python(sys.version_info[:2])
    return platform.python_version()


def _java(_: Settings) -> str:
    found = java.find(config.environment())
    return f"{java.major_version(found)} at {found}"


def _packages(_: Settings) -> str:
    _require(PACKAGES)
    traps.check_packages(traps.installed)
    return f"all {len(PACKAGES)}"


def _airflow(_: Settings) -> str:
    if traps.installed("apache-airflow") is None:
        raise NotUsed("not installed: this environment does not schedule", "pip install 'seriatim[airflow]'")
    _require(AIRFLOW_PACKAGES)
    return f"{traps.installed('apache-airflow')}"


def _require(packages: Iterable[str]) -> None:
    missing = [name for name in packages if traps.installed(name) is None]
    if missing:
        raise ConfigError(f"not installed: {', '.join(missing)}", next=traps.REPAIR)


def _require_spark() -> None:
    if traps.installed("pyspark") is None:
        raise NotUsed("pyspark is not installed: this environment does not fold", "pip install 'seriatim[spark]'")


def _jars(group: str) -> Callable[[Settings], str]:
    def look(settings: Settings) -> str:
        _require_spark()
        conditions = jars.conditions(jars.of_group(group), settings.home / "jars")
        bad = {jar.file_name: how for jar, how in conditions.items() if how != "good"}
        if bad:
            name, how = next(iter(bad.items()))
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise PlatformError(f"{name} is {how}{more}", next=f"seriatim jars fetch --group {group}")
        return f"{len(conditions)} proved by SHA-256"

    return look


def _kafka(settings: Settings) -> str:
    """The configured broker must answer; the embedded one need not be running."""
    servers = settings.kafka_bootstrap_servers
    if not servers:
        running = broker.status(settings.home)
        if running is None:
            raise NotUsed("no server configured, the embedded broker is not running", "seriatim kafka start")
        servers = running.bootstrap_servers
    if broker.cluster_id(servers, ANSWER_SECONDS, client.read(settings.kafka_config)) is None:
        raise PlatformError(
            f"{servers} does not answer",
            next="start it, or correct SERIATIM_KAFKA_BOOTSTRAP_SERVERS and SERIATIM_KAFKA_CONFIG",
        )
    return servers


def _spark(settings: Settings) -> str:
    _require_spark()
    traps.refuse(config.environment())
    _jars("spark")(settings)
    files = ",".join(str(settings.home / "jars" / jar.file_name) for jar in jars.of_group("spark"))
    command = [sys.executable, "-c", START_SPARK, settings.spark_master, files]
    environ = config.environment() | {"PYSPARK_PYTHON": sys.executable}
    try:
        run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SPARK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise PlatformError(
            f"no answer from {settings.spark_master} in {SPARK_SECONDS} s", next="check SERIATIM_SPARK_MASTER"
        ) from None
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise PlatformError(f"{settings.spark_master}: {last[:200]}", next="check memory and the master")
    return f"{run.stdout.strip().splitlines()[-1]} on {settings.spark_master}"


def _home(settings: Settings) -> str:
    _write_in(settings.home, "set SERIATIM_HOME to a folder you may write to")
    return str(settings.home)


def _outputs(settings: Settings) -> str:
    """Every stream's output folder, or the nearest one above it that exists."""
    names = streams.names(settings.streams)
    if not names:
        raise NotUsed(f"no streams in {settings.streams}", "write streams/NAME.toml")
    paths = [streams.load(name, settings.streams).stream.output.path for name in names]
    local = [Path(path) for path in paths if "://" not in path]
    for path in local:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        _write_in(existing, "make the folder writable, or change [output] path of the stream")
    return f"{len(local)} of {len(names)} streams write to this machine"


def _write_in(folder: Path, fix: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"seriatim")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{folder} is not writable: {error.strerror}", next=fix) from None


def _smtp(settings: Settings) -> str:
    if not settings.smtp:
        raise NotUsed("no mail server configured: alerts are not mailed", "set SERIATIM_SMTP=HOST:PORT")
    host, _, port = settings.smtp.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{settings.smtp!r} is not HOST:PORT", next="correct SERIATIM_SMTP")
    try:
        with smtplib.SMTP(host, int(port), timeout=ANSWER_SECONDS) as server:
            server.noop()
    except (OSError, smtplib.SMTPException) as error:
        raise PlatformError(
            f"{settings.smtp} does not answer: {error}", next="start it, or correct SERIATIM_SMTP"
        ) from None
    return settings.smtp


LOOKS: dict[str, Callable[[Settings], str]] = {
    "Python": _python,
    "Java": _java,
    "packages": _packages,
    "Airflow": _airflow,
    "home": _home,
    "JARs of Spark": _jars("spark"),
    "JARs of Kafka": _jars("kafka"),
    "Kafka": _kafka,
    "Spark": _spark,
    "outputs": _outputs,
    "mail": _smtp,
}
