"""Settings: the only reader of the environment and of seriatim.toml. Environment wins over the
file.

Next room: streams.py reads what users write about their streams; this one is about the machine we
run on.
"""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from seriatim.engine import crash_points
from seriatim.errors import ConfigError

ENVIRONMENT_PREFIX = "SERIATIM_"
OUTCOME = f"{ENVIRONMENT_PREFIX}OUTCOME"
"""Names the file in which a command leaves how it ended, for the process that started it. No
setting of a person's.
"""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where things are on this machine. Each field is `SERIATIM_<FIELD>` or a key of seriatim.toml."""

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
    ivy_settings: Path | None = None
    """Your own Ivy settings file: a mirror, credentials."""
    smtp: str = ""
    """HOST:PORT of the mail server for alerts."""
    smtp_from: str = ""
    """Whom alerts come from; empty: seriatim at this machine."""
    smtp_user: str = ""
    smtp_password: str = ""
    """From the environment alone; or in a file of its own, below."""
    smtp_password_file: Path | None = None
    smtp_tls: Literal["none", "starttls", "tls"] = "none"
    outbox: Path = Path()
    """What runs failed and which mails wait; default: `outbox` in the home. Shared by all who run
    or watch a stream.
    """
    spark_connection: str = ""
    """Airflow's connection whose Spark folds; empty: seriatim_spark if there is one, else
    `spark_master`.
    """
    airflow_url: str = ""
    """Airflow's address, for links in mails."""
    crash_point: str = ""
    """For tests: the named point at which this process kills itself, as NAME or NAME:HIT."""

    def __repr__(self) -> str:
        shown = {
            name: getattr(self, name) for name in self.__struct_fields__ if name != "smtp_password"
        }
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def load_settings(environ: dict[str, str] | None = None, folder: Path | None = None) -> Settings:
    """Settings from the environment over seriatim.toml (in the working folder) over defaults."""
    environ = dict(os.environ) if environ is None else environ
    given = _read_settings_file((folder or Path.cwd()) / "seriatim.toml")
    fields = set(Settings.__struct_fields__)
    given |= {
        field: environ[f"{ENVIRONMENT_PREFIX}{field.upper()}"]
        for field in fields
        if environ.get(f"{ENVIRONMENT_PREFIX}{field.upper()}")
    }
    given.setdefault("home", _default_home(environ))
    given.setdefault("streams", "streams")
    given.setdefault("outbox", f"{given['home']}/outbox")
    if "smtp_password" in given and not environ.get(f"{ENVIRONMENT_PREFIX}SMTP_PASSWORD"):
        raise ConfigError(
            "seriatim.toml: smtp_password: a secret in a file that others may read",
            next="put it into a file of its own (mode 600) and name that as smtp_password_file",
        )
    try:
        settings = msgspec.convert(given, Settings, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"settings: {error}", next="fix the SERIATIM_* variable or seriatim.toml"
        ) from None
    root = (folder or Path.cwd()).absolute()
    return msgspec.structs.replace(
        settings,
        **{
            name: root
            / expand_user(
                getattr(settings, name),
                f"settings: {name}",
                f"fix {ENVIRONMENT_PREFIX}{name.upper()}",
            )
            for name in ("home", "streams", "outbox")
        },
    )


def expand_user(path: Path, source: str, next_step: str) -> Path:
    """A path with `~` as the home that it is; where nobody has one, an error that names who said
    it.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"{source}: {path}: there is no such home", next=next_step) from None


def is_spark_submitted() -> bool:
    """Whether spark-submit started this process: then Spark's settings are those it was submitted
    with.
    """
    return "PYSPARK_GATEWAY_PORT" in os.environ


def child_environment() -> dict[str, str]:
    """The environment for a child process, as a copy."""
    return dict(os.environ)


def take_outcome_path() -> Path | None:
    """Where this command leaves how it ended, if somebody asked; once.

    The variable is taken away, since children inherit the environment: only the command itself may
    write there.
    """
    path = os.environ.pop(OUTCOME, "")
    return Path(path) if path else None


def use_this_python() -> None:
    """Make Spark's workers run the very Python that runs us: any other lacks our packages."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


def _read_settings_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        given = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: {error}", next=f"fix {path}") from None
    unknown = sorted(set(given) - set(Settings.__struct_fields__))
    if unknown:
        allowed = ", ".join(sorted(Settings.__struct_fields__))
        raise ConfigError(
            f"{path.name}: unknown key {unknown[0]!r}", allowed=allowed, next=f"fix {path}"
        )
    return given


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
    left = [int(hit or 1)]

    def pass_by(point: str) -> None:
        left[0] -= point == name
        if left[0] == 0:
            for process in (*victims, os.getpid()):
                os.kill(process, signal.SIGKILL)

    crash_points.arm(pass_by)
