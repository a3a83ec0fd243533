"""Settings of the host that we run on: the only reader of the environment and of seriatim.toml. The
environment wins over the file.

Next: stream_files.py reads what users write about their streams.
"""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from collections.abc import Collection, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from seriatim.engine import crash_points
from seriatim.errors import ConfigError

ENVIRONMENT_PREFIX = "SERIATIM_"
OUTCOME = f"{ENVIRONMENT_PREFIX}OUTCOME"
"""The variable with the path of the file in which a command leaves its outcome for the process that
started it. It is not a setting for people.
"""
WORKER_PYTHON = f"{ENVIRONMENT_PREFIX}WORKER_PYTHON"
"""The variable with the Python that embedded/worker_python.sh runs. It is not a setting for people."""
CONNECTIONS = f"{ENVIRONMENT_PREFIX}CONNECTIONS"
"""The variable with the path of a file of named Kafka clusters, stores and schema registries. It has secrets, and each
process reads it by itself, also on workers; so it is no setting of seriatim.toml.
"""
CONNECT_SCHEME = "sc://"
MASTERS_WITHOUT_ADDRESS = ("local", "yarn")
Environment = Mapping[str, str]
"""Environment variables by name."""
SECRET_SETTINGS = ("smtp_password",)
"""Settings that are in no text for people, and not in seriatim.toml, which others may read."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where things are on this host. Each field is `SERIATIM_<FIELD>` or a key of seriatim.toml."""

    home: Path
    """Caches and embedded services: JARs, the broker's data."""
    streams: Path
    """The folder of stream files."""
    kafka_bootstrap_servers: str = ""
    """Empty: the embedded broker of this home, if it runs."""
    kafka_config: Path | None = None
    """A file of Kafka client settings (TLS, SASL), one KEY=VALUE per line."""
    spark_master: str = "local[*]"
    spark_driver_memory: str = "2g"
    spark_driver_host: str = ""
    """The address at which executors find the driver. Empty: that of the interface which leads to the
    master.
    """
    spark_driver_bind_address: str = ""
    """The address at which the driver listens, if it is another one: in a container, behind NAT."""
    spark_executor_wait_seconds: Annotated[int, msgspec.Meta(ge=0)] = 300
    """How long is waited for the first executor of a cluster."""
    spark_records_min: Annotated[int, msgspec.Meta(ge=0)] = 5_000_000
    """From how many records on check, verify, publish, compact and the joining of repair work on the
    executors of a cluster.
    """
    spark_remote: str = ""
    """The address of a Spark Connect server (sc://HOST:PORT) that folds in place of `spark_master`."""
    ivy_settings: Path | None = None
    """Your own Ivy settings file: a mirror, credentials."""
    smtp: str = ""
    """HOST:PORT of the mail server for alerts. Empty: Airflow's connection smtp_default, or none."""
    smtp_from: str = ""
    """The sender of alerts; empty: seriatim at this host."""
    smtp_user: str = ""
    smtp_password: str = ""
    """It is taken from the environment only. A file that has it is named by `smtp_password_file`."""
    smtp_password_file: Path | None = None
    smtp_tls: Literal["none", "starttls", "tls"] = "none"
    outbox: str = ""
    """The folder of failed runs and waiting mails, or an address like s3://bucket/outbox; default:
    `outbox` in the home. Everybody who runs or watches a stream shares it.
    """
    spark_connection: str = ""
    """The Airflow connection of the Spark that folds; empty: seriatim_spark if it exists, else
    `spark_master`.
    """
    airflow_url: str = ""
    """Airflow's address, for links in mails."""
    where_to_type: str = ""
    """Where people type commands on this host, for mails: another host, a container, a file to source."""
    crash_point: str = ""
    """For tests: the named point at which this process kills itself, as NAME or NAME:HIT."""

    def __repr__(self) -> str:
        names = [name for name in self.__struct_fields__ if name not in SECRET_SETTINGS]
        fields = [f"{name}={getattr(self, name)!r}" for name in names]
        return f"Settings({', '.join(fields)})"


def load_settings(environ: dict[str, str] | None = None, folder: Path | None = None) -> Settings:
    """Settings from the environment over seriatim.toml (in the working folder) over defaults."""
    if environ is None:
        environ = dict(os.environ)
    root = (folder or Path.cwd()).absolute()
    values = _read_settings_file(root / "seriatim.toml")
    for field in Settings.__struct_fields__:
        text = environ.get(_variable_name(field))
        if text:
            values[field] = text
    values.setdefault("home", _default_home(environ))
    values.setdefault("streams", "streams")
    values.setdefault("outbox", f"{values['home']}/outbox")
    _refuse_secrets_of_file(values, environ)
    try:
        # Not strict: in the environment a number is a text.
        settings = msgspec.convert(values, Settings, strict=False, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"settings: {error}", next="fix the SERIATIM_* variable or seriatim.toml"
        ) from None
    _refuse_wrong_spark_addresses(settings)
    paths = {}
    for name in ("home", "streams", "outbox"):
        advice = f"fix {_variable_name(name)}"
        path = Path(getattr(settings, name))
        paths[name] = root / expand_user(path, f"settings: {name}", advice)
    for name in ("kafka_config", "ivy_settings", "smtp_password_file"):
        path = getattr(settings, name)
        if path is not None:
            advice = f"fix {_variable_name(name)}"
            paths[name] = expand_user(path, f"settings: {name}", advice)
    outbox = settings.outbox
    if "://" not in outbox:
        outbox = str(paths["outbox"])
    del paths["outbox"]
    return msgspec.structs.replace(settings, outbox=outbox, **paths)


def _refuse_wrong_spark_addresses(settings: Settings) -> None:
    """Spark itself would say this late, by a stack trace, or after many tries to connect."""
    master = settings.spark_master
    if master.startswith(CONNECT_SCHEME):
        raise ConfigError(
            f"settings: spark_master: {master} is a Spark Connect server, and no master",
            next=f"set {_variable_name('spark_remote')} to it instead",
        )
    if "://" not in master and not master.startswith(MASTERS_WITHOUT_ADDRESS):
        raise ConfigError(
            f"settings: spark_master: {master} is no address of a master",
            next="such as spark://HOST:PORT, k8s://https://HOST:PORT, yarn or local[2]",
        )
    remote = settings.spark_remote
    if remote and not remote.startswith(CONNECT_SCHEME):
        raise ConfigError(
            f"settings: spark_remote: {remote} is no address of a Spark Connect server",
            next=f"such as {CONNECT_SCHEME}HOST:PORT",
        )


def _refuse_secrets_of_file(values: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuse a secret that comes from seriatim.toml."""
    for name in SECRET_SETTINGS:
        if name not in values or environ.get(_variable_name(name)):
            continue
        advice = f"set {_variable_name(name)} in the environment"
        file_setting = f"{name}_file"
        if file_setting in Settings.__struct_fields__:
            advice = f"put it into a file of its own (mode 600) and name that as {file_setting}"
        raise ConfigError(
            f"seriatim.toml: {name}: a secret in a file that others may read", next=advice
        )


def _variable_name(field: str) -> str:
    """The environment variable of a setting."""
    return f"{ENVIRONMENT_PREFIX}{field.upper()}"


def expand_user(path: Path, source: str, next_step: str) -> Path:
    """A path with `~` replaced by the home folder. If there is no such home, the error names the
    `source` of the path.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"{source}: {path}: there is no such home", next=next_step) from None


def is_spark_submitted() -> bool:
    """Whether spark-submit started this process. Then Spark has the settings that it was submitted
    with.
    """
    return "PYSPARK_GATEWAY_PORT" in os.environ


def child_environment() -> dict[str, str]:
    """The environment for a child process, as a copy."""
    return dict(os.environ)


def store_environment() -> dict[str, str]:
    """The variables with the options of an object store. They are no settings of seriatim.toml: each
    process that opens the store has its own, also on workers.
    """
    return _variables_with("AWS_", "GOOGLE_", "AZURE_", f"{ENVIRONMENT_PREFIX}STORE_", CONNECTIONS)


def cache_folder() -> Path:
    """The folder of what this host may keep to save work, in the home. Workers have it, too, each its
    own. Users' data may be in it, so only its owner can read it.
    """
    folder = load_settings().home / "cache"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def registry_environment() -> dict[str, str]:
    """The variables with the settings of schema registries. As those of an object store, they are
    each process's own.
    """
    return _variables_with(f"{ENVIRONMENT_PREFIX}REGISTRY_", CONNECTIONS)


def _variables_with(*prefixes: str) -> dict[str, str]:
    """The environment variables whose names begin with one of these prefixes."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def read_private_text(path: Path, variable: str) -> str:
    """The text of a file of settings with secrets. `variable` names the file."""
    text = read_settings_text(path, variable)
    refuse_readable_by_others(path, variable)
    return text


def read_settings_text(path: Path, variable: str) -> str:
    """The text of a file of settings. `variable` names the file."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{variable}: {path}: {reason}", next=f"fix {variable}") from None


def refuse_readable_by_others(path: Path, variable: str) -> None:
    """Refuse a file with secrets that others than its owner may read.

    A file of root may be readable by its group, if we are not root: Kubernetes mounts secrets so, and
    a process without root's rights could not read them otherwise.
    """
    status = path.stat()
    forbidden = 0o077
    advice = f"chmod 600 {path}"
    if status.st_uid == 0 and os.geteuid() != 0:
        forbidden = 0o037
        advice = f"chmod 640 {path}"
    if status.st_mode & forbidden:
        raise ConfigError(f"{variable}: {path} can be read by others", next=advice)


def read_private_settings(
    path: Path, variable: str, allowed: Collection[str], prefix: str = ""
) -> dict[str, str]:
    """The settings of a file of NAME=VALUE lines that only its owner can read. `variable` names the
    file. Names may be written with or without `prefix`. A line is never shown: it may have a secret.
    """
    settings: dict[str, str] = {}
    for number, line in enumerate(read_private_text(path, variable).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, _, value = text.partition("=")
        name = prefix + name.strip().lower().removeprefix(prefix)
        if name not in allowed or not value.strip():
            raise ConfigError(
                f"{variable}: {path}: line {number} is no setting",
                allowed=", ".join(sorted(allowed)),
                next="write NAME=VALUE",
            )
        settings[name] = value.strip()
    return settings


def named_connection(
    kind: Literal["kafka", "store", "registry"],
    name: str,
    environ: Environment | None = None,
) -> dict[str, str]:
    """The options of a named Kafka cluster, store or schema registry, by their names in small letters.

    1. The section `[kafka.NAME]`, `[store.NAME]` or `[registry.NAME]` of the file that
       SERIATIM_CONNECTIONS names.
    2. Variables like SERIATIM_KAFKA_NAME_BOOTSTRAP_SERVERS, which win.

    A name that has neither is refused.
    """
    if environ is None:
        environ = os.environ
    # 1. The file.
    path = environ.get(CONNECTIONS, "")
    options: dict[str, str] = {}
    if path:
        options.update(_read_connections_file(Path(path), kind).get(name, {}))
    # 2. The environment.
    prefix = f"{ENVIRONMENT_PREFIX}{kind.upper()}_{name.upper()}_"
    for variable, value in environ.items():
        if variable.startswith(prefix) and value:
            options[variable.removeprefix(prefix).lower()] = value
    if not options:
        raise ConfigError(
            f"there is no {kind} named {name!r}",
            next=f"write a section [{kind}.{name}] into the file that {CONNECTIONS} names,"
            f" or set {prefix}…",
        )
    return options


def _read_connections_file(path: Path, kind: str) -> dict[str, dict[str, str]]:
    """The sections of one kind, by name. Only the owner may read the file: it has secrets."""
    text = read_private_text(path, CONNECTIONS)
    try:
        sections = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # The error itself may quote a line that has a secret.
        raise ConfigError(f"{CONNECTIONS}: {path} is not TOML", next=f"fix {path}") from None
    try:
        return msgspec.convert(sections, dict[str, dict[str, dict[str, str]]]).get(kind, {})
    except msgspec.ValidationError:
        raise ConfigError(
            f"{CONNECTIONS}: {path}: values other than texts in sections like [{kind}.NAME]",
            next=f"fix {path}",
        ) from None


def take_outcome_path() -> Path | None:
    """The file for this command's outcome, if the process that started it wants one; at most once.

    The variable is removed from the environment, because child processes would inherit it, and only
    this command may write there.
    """
    path = os.environ.pop(OUTCOME, "")
    return Path(path) if path else None


def worker_python_variables(*, is_local: bool) -> dict[str, str]:
    """Variables that let Spark's workers run the same Python as this process: any other lacks our
    packages. On this host they start by a script that makes them start sooner.
    """
    program = sys.executable
    script = _worker_script()
    # A package that was unpacked by other means than an installer may have lost the mode.
    if is_local and os.access(script, os.X_OK):
        program = script
    return {
        WORKER_PYTHON: sys.executable,
        "PYSPARK_PYTHON": program,
        "PYSPARK_DRIVER_PYTHON": program,
    }


def _worker_script() -> str:
    return str(files("seriatim.embedded") / "worker_python.sh")


def without_worker_script(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a Spark whose workers are on other hosts, which do not have our script. A local
    Spark of this process, or of the one that started it, may have left it in the environment.
    """
    script = _worker_script()
    return {name: value for name, value in variables.items() if value != script}


def use_this_python(*, is_local: bool) -> None:
    """Set these variables for the Spark that this process starts. On the hosts of a cluster Python may
    be elsewhere: there PYSPARK_PYTHON of the environment is kept.
    """
    variables = worker_python_variables(is_local=is_local)
    named = os.environ.get("PYSPARK_PYTHON")
    # Our own script is no choice of a person: a local Spark of this process, or of the one that started
    # it, has left it there. It works on this host alone.
    if not is_local and named and named != _worker_script():
        del variables["PYSPARK_PYTHON"]
    os.environ.update(variables)


def spark_jar_names() -> list[str]:
    """The JARs of the Spark that started this process; none if it was not Spark."""
    home = os.environ.get("SPARK_HOME")
    return sorted(path.name for path in Path(home, "jars").glob("*.jar")) if home else []


def kafka_config_of_this_host(default: str) -> str:
    """The path of Kafka's client settings on this host: that of its own environment, else `default`."""
    return os.environ.get(_variable_name("kafka_config")) or default


def _read_settings_file(path: Path) -> dict[str, Any]:
    """The values of seriatim.toml; empty without the file. Unknown keys are refused."""
    if not path.exists():
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: {error}", next=f"fix {path}") from None
    unknown = sorted(set(values) - set(Settings.__struct_fields__))
    if unknown:
        allowed = ", ".join(sorted(Settings.__struct_fields__))
        raise ConfigError(
            f"{path.name}: unknown key {unknown[0]!r}", allowed=allowed, next=f"fix {path}"
        )
    return values


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)


def _default_home(environ: dict[str, str]) -> str:
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return f"{cache}/seriatim"


def arm_crash_point(crash_point: str, *victims: int) -> None:
    """For tests: kill `victims` and this process at a named crash point, given as NAME or NAME:HIT."""
    if not crash_point:
        return
    name, _, hit = crash_point.partition(":")
    passes_until_crash = int(hit or 1)

    def on_crash_point(point: str) -> None:
        nonlocal passes_until_crash
        if point != name:
            return
        passes_until_crash -= 1
        if passes_until_crash == 0:
            for process in (*victims, os.getpid()):
                os.kill(process, signal.SIGKILL)

    crash_points.arm(on_crash_point)
