"""Doctor: check everything that the product needs, one by one, and say how to fix it.

Each check is a function that takes Settings and returns a description. A check that raises one of
our errors has failed, and the error says what to do.

Next: cli/set_up.py shows the result.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from seriatim import config, stream_files
from seriatim.alerts import channels
from seriatim.config import Settings
from seriatim.embedded import broker, jars, java
from seriatim.errors import ConfigError, PlatformError, SeriatimError
from seriatim.kafka import client

# What every environment needs; requirements.lock says which versions.
PACKAGES = (
    "confluent-kafka",
    "deltalake",
    "kafka-python",
    "msgspec",
    "numpy",
    "obstore",
    "pyarrow",
    "xxhash",
)
# What an environment that schedules needs besides.
AIRFLOW_PACKAGES = (
    "apache-airflow",
    "apache-airflow-providers-apache-spark",
    "apache-airflow-providers-smtp",
    "great-expectations",
)
OLDEST_PYTHON = (3, 11)
REINSTALL_ADVICE = (
    "type `make setup` in a clone of the project; elsewhere install the versions that"
    " requirements.lock names"
)

InstalledVersion = Callable[[str], str | None]
SPARK_SECONDS = 180
ANSWER_SECONDS = 5.0
START_SPARK_PROGRAM = """
import sys
from pyspark.sql import SparkSession
master, jars = sys.argv[1:]
quiet = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.jars": jars}
spark = SparkSession.builder.master(master).config(map=quiet).getOrCreate()
assert spark.range(3).count() == 3
print(spark.version)
spark.stop()
"""


class DoctorCheck(
    msgspec.Struct,
    frozen=True,
    rename={"is_good": "good", "is_required": "required", "description": "found"},
):
    """The result of one check. What is not required may be missing."""

    name: str
    is_good: bool
    is_required: bool
    description: str
    fix: str = ""


class NotConfiguredError(Exception):
    """The checked thing is optional and does not exist. Says what is missing, and how to get it."""

    def __init__(self, description: str, fix: str) -> None:
        super().__init__(description)
        self.description = description
        self.fix = fix


def run_checks(
    settings: Settings, on_begin: Callable[[str], None] = lambda _activity: None
) -> Iterator[DoctorCheck]:
    """All checks, in the order in which a person would fix things. `on_begin` gets what each check
    is about to do, since some of them take seconds.
    """
    for name, check in CHECKS.items():
        on_begin(ACTIVITIES.get(name, f"looking at {name}"))
        yield _run_check(name, check, settings)


def _run_check(name: str, check: Callable[[Settings], str], settings: Settings) -> DoctorCheck:
    try:
        return DoctorCheck(name, is_good=True, is_required=True, description=check(settings))
    except NotConfiguredError as absent:
        return DoctorCheck(
            name, is_good=False, is_required=False, description=absent.description, fix=absent.fix
        )
    except SeriatimError as error:
        description = error.message
        cause = error.fields.get("cause")
        if cause:
            description += f" ({cause})"
        return DoctorCheck(
            name, is_good=False, is_required=True, description=description, fix=error.next
        )


def _check_python(_: Settings) -> str:
    check_python(sys.version_info[:2])
    return platform.python_version()


def _check_java(_: Settings) -> str:
    java_program = java.find_java(config.child_environment())
    return f"{java.major_version(java_program)} at {java_program}"


def _check_packages(_: Settings) -> str:
    _require_packages(PACKAGES)
    check_packages(installed_version)
    return f"{len(PACKAGES)} installed, in versions that fit together"


def _check_airflow(_: Settings) -> str:
    if installed_version("apache-airflow") is None:
        raise NotConfiguredError(
            "not installed: this environment does not schedule", "pip install 'seriatim[airflow]'"
        )
    _require_packages(AIRFLOW_PACKAGES)
    return f"{installed_version('apache-airflow')}"


def _require_packages(packages: Iterable[str]) -> None:
    missing = [name for name in packages if installed_version(name) is None]
    if missing:
        raise ConfigError(f"not installed: {', '.join(missing)}", next=REINSTALL_ADVICE)


def _require_spark() -> None:
    if installed_version("pyspark") is None:
        raise NotConfiguredError(
            "pyspark is not installed: this environment does not fold",
            "pip install 'seriatim[spark]'",
        )


def _jars_check(group: str) -> Callable[[Settings], str]:
    def check(settings: Settings) -> str:
        _require_spark()
        conditions = jars.jar_conditions(jars.locked_jars(group), settings.home / "jars")
        problems = []
        for jar, condition in conditions.items():
            if condition != "good":
                problems.append(f"{jar.file_name} is {condition}")
        if problems:
            more = ""
            if len(problems) > 1:
                more = f"; {len(problems) - 1} more are missing or damaged"
            raise PlatformError(f"{problems[0]}{more}", next=f"seriatim jars fetch --group {group}")
        return f"{len(conditions)} proved by SHA-256"

    return check


def _check_kafka(settings: Settings) -> str:
    """The configured broker must answer; the embedded one need not be running."""
    servers = settings.kafka_bootstrap_servers
    if not servers:
        running = broker.broker_status(settings.home)
        if running is None:
            raise NotConfiguredError(
                "no server configured, the embedded broker is not running", "seriatim kafka start"
            )
        servers = running.bootstrap_servers
    client_settings = client.read_client_settings(settings.kafka_config)
    if broker.cluster_id(servers, ANSWER_SECONDS, client_settings) is None:
        raise PlatformError(
            f"{servers} does not answer",
            next="start it, or correct SERIATIM_KAFKA_BOOTSTRAP_SERVERS and SERIATIM_KAFKA_CONFIG",
        )
    return servers


def _check_spark(settings: Settings) -> str:
    _require_spark()
    refuse_broken_environment(config.child_environment())
    _jars_check("spark")(settings)
    folder = settings.home / "jars"
    paths = [str(folder / jar.file_name) for jar in jars.locked_jars("spark")]
    command = [sys.executable, "-c", START_SPARK_PROGRAM, settings.spark_master, ",".join(paths)]
    environ = config.child_environment() | {"PYSPARK_PYTHON": sys.executable}
    try:
        process = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=SPARK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        advice = "check SERIATIM_SPARK_MASTER"
        if settings.spark_master.startswith("local"):
            # Spark is on this host, so no address can be wrong.
            advice = "look at the load of this host (`uptime`), and try again when it is less"
        raise PlatformError(
            f"no answer from {settings.spark_master} in {SPARK_SECONDS} s", next=advice
        ) from None
    if process.returncode:
        error_lines = process.stderr.strip().splitlines() or ["it ended without a word"]
        raise PlatformError(
            f"{settings.spark_master}: {error_lines[-1][:200]}",
            next="check the memory of this host (`free -h`), and SERIATIM_SPARK_MASTER",
        )
    spark_version = process.stdout.strip().splitlines()[-1]
    return f"{spark_version} on {settings.spark_master}"


def _check_home(settings: Settings) -> str:
    _require_writable(settings.home, "set SERIATIM_HOME to a folder you may write to")
    return str(settings.home)


def _check_outputs(settings: Settings) -> str:
    """Check the output folder of every stream, or the nearest folder above it that exists."""
    names = stream_files.list_streams(settings.streams)
    if not names:
        raise NotConfiguredError(
            f"no streams in {settings.streams}",
            "make one with `seriatim new NAME`, or set SERIATIM_STREAMS",
        )
    fix = "make the folder writable, or change [output] path of the stream"
    local_count = 0
    for name in names:
        output_path = stream_files.load_stream(name, settings.streams).stream.output.path
        if "://" in output_path:
            continue
        local_count += 1
        path = Path(output_path)
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        _require_writable(existing, fix)
    return f"streams that write to this host: {local_count} of {len(names)}"


def _require_writable(folder: Path, fix: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"seriatim")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{folder} is not writable: {error.strerror}", next=fix) from None


def _check_alerts(settings: Settings) -> str:
    """The channel of alerts must let us in the way a mail is sent, as with the same port and login."""
    notifier = channels.notifier(settings)
    if notifier is None:
        raise NotConfiguredError(channels.NOT_SET_TEXT, channels.NOT_SET_ADVICE)
    return notifier.check()


CHECKS: dict[str, Callable[[Settings], str]] = {
    "Python": _check_python,
    "Java": _check_java,
    "packages": _check_packages,
    "Airflow": _check_airflow,
    "home": _check_home,
    "JARs of Spark": _jars_check("spark"),
    "JARs of Kafka": _jars_check("kafka"),
    "Kafka": _check_kafka,
    "Spark": _check_spark,
    "outputs": _check_outputs,
    "mail": _check_alerts,
}


ACTIVITIES = {
    "JARs of Spark": "comparing the JARs of Spark with their digests",
    "JARs of Kafka": "comparing the JARs of Kafka with their digests",
    "Kafka": "asking Kafka for its topics",
    "Spark": "starting Spark, which takes some seconds",
    "outputs": "writing and deleting a file in each output folder",
    "mail": "trying the way in which alerts are sent, without sending one",
}
"""What the checks do that take time."""


def refuse_broken_environment(environ: config.Environment) -> None:
    """Refuse an environment that installs without complaint, and would fail later with errors that
    are hard to understand. Called before Spark is started.
    """
    check_python(sys.version_info[:2])
    check_packages(installed_version)
    java.find_java(environ)


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_python(python_version: tuple[int, ...]) -> None:
    """Refuse a Python that is too old."""
    if python_version < OLDEST_PYTHON:
        version_text = _dotted_version(python_version)
        oldest_text = _dotted_version(OLDEST_PYTHON)
        raise ConfigError(
            f"Python {version_text} is too old: Seriatim needs {oldest_text} or newer",
            next=f"make setup with a Python {oldest_text} on PATH",
        )


def check_packages(installed_version: InstalledVersion) -> None:
    """Refuse two packages of Spark that write the same files in different versions, and pandas 3,
    which changed what Spark relies on.
    """
    spark = installed_version("pyspark")
    client = installed_version("pyspark-client")
    pandas = installed_version("pandas")
    if spark and client and spark != client:
        raise ConfigError(
            f"pyspark {spark} and pyspark-client {client} overwrite each other's files: make them the same",
            next=REINSTALL_ADVICE,
        )
    if pandas and int(pandas.split(".")[0]) >= 3:
        raise ConfigError(
            f"pandas {pandas} does not work with this Spark: it must be below 3",
            next=REINSTALL_ADVICE,
        )


def _dotted_version(version_numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version_numbers[:2])
