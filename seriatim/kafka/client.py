"""Kafka client settings: one file by the user, in librdkafka's names, translated for the three client
libraries in use.

`SERIATIM_KAFKA_CONFIG` names a file of KEY=VALUE lines. Only the keys below are accepted: no setting
that loads a class, runs a command or fetches an address. Secrets stay out of command lines and
logs; a file that has one is refused if others than its owner may read it.

Next: kafka/log.py, kafka/spark_reader.py and kafka/raw_batches.py use these settings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from seriatim import config
from seriatim.errors import ConfigError

ALLOWED_SETTINGS = (
    "security.protocol",
    "sasl.mechanism",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    "client.id",
)
"""The keys that a settings file may have."""
ClientSettings = Mapping[str, str]
"""The settings of a Kafka client, by the names that librdkafka gives them."""
PYTHON_NAMES = {
    "bootstrap.servers": "bootstrap_servers",
    "client.id": "client_id",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}
"""kafka-python's names of these keys."""
LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
"""Java's login module for each SASL mechanism."""
SETTING_NAME = re.compile(r"[A-Za-z0-9_.-]+")
SETTINGS_FILE = "SERIATIM_KAFKA_CONFIG"
"""The variable that names the file of client settings."""
SECRET_SETTINGS = ("sasl.password", "ssl.key.password")
FIX_ADVICE = (
    f"fix the file that {SETTINGS_FILE} names; for a named cluster fix its section in the file that"
    " SERIATIM_CONNECTIONS names"
)
SAME_IN_JAVA = (
    "bootstrap.servers",
    "security.protocol",
    "sasl.mechanism",
    "client.id",
    "isolation.level",
    "ssl.endpoint.identification.algorithm",
)
"""Keys that Java's clients name as librdkafka does."""
T = TypeVar("T")
SettingsSource = ClientSettings | Callable[[], ClientSettings]
"""Client settings, or what reads them in the process that needs them. The latter has no secrets, so
that it can be sent to workers.
"""


def resolve_settings(settings: SettingsSource) -> dict[str, str]:
    """The client settings themselves."""
    return dict(settings() if callable(settings) else settings)


def read_client_settings(path: Path | None) -> dict[str, str]:
    """The client settings of the user's file, checked; empty without a file."""
    if path is None:
        return {}
    settings: dict[str, str] = {}
    text = config.read_settings_text(path, SETTINGS_FILE)
    for number, line in enumerate(text.splitlines(), 1):
        setting = line.strip()
        if not setting or setting.startswith("#"):
            continue
        key, equals, value = setting.partition("=")
        key = key.strip()
        if not equals or key not in ALLOWED_SETTINGS:
            raise _refused_line_error(path, number, key if equals else "")
        settings[key] = value.strip()
    # Many files have no secret, but addresses and paths alone: these may be readable by all.
    if any(settings.get(key) for key in SECRET_SETTINGS):
        config.refuse_readable_by_others(path, SETTINGS_FILE)
    return settings


def named_client_settings(name: str, options: Mapping[str, str]) -> dict[str, str]:
    """The client settings of a named cluster. In environment variables the names of settings have
    underscores in place of dots. `config` names a file of further settings.
    """
    settings: dict[str, str] = {}
    known_names = ("bootstrap.servers", *ALLOWED_SETTINGS)
    by_variable = {known.replace(".", "_"): known for known in known_names}
    for option, value in options.items():
        setting = by_variable.get(option.replace(".", "_"))
        if setting is not None:
            settings[setting] = value
        elif option == "config":
            settings = {**read_client_settings(Path(value)), **settings}
        else:
            raise ConfigError(
                f"kafka {name}: {option} is no setting of a cluster",
                allowed=", ".join((*known_names, "config")),
                next=f"fix the section [kafka.{name}] or the SERIATIM_KAFKA_{name.upper()}_* variable",
            )
    if "bootstrap.servers" not in settings:
        raise ConfigError(
            f"kafka {name}: it has no bootstrap.servers",
            next=f'write "bootstrap.servers" into [kafka.{name}], or set'
            f" SERIATIM_KAFKA_{name.upper()}_BOOTSTRAP_SERVERS",
        )
    return settings


def create_client(client_class: Callable[[dict[str, Any]], T], settings: Mapping[str, Any]) -> T:
    """A client of librdkafka. It checks its settings when it is created; `ConfigError` says what it
    refuses, without the passwords.
    """
    from confluent_kafka import KafkaException

    try:
        return client_class(dict(settings))
    except KafkaException as error:
        reason = re.sub(r"^Failed to create [a-z ]+: ", "", error.args[0].str())
        for key in SECRET_SETTINGS:
            secret = settings.get(key)
            if secret:
                # Whole words only: a password of one letter must not make the text unreadable.
                reason = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "…", reason)
        raise ConfigError(
            f"Kafka settings: Kafka's client refuses them: {reason}", next=FIX_ADVICE
        ) from None


def java_settings(settings: ClientSettings) -> dict[str, str]:
    """The same settings in the names of Java's clients."""
    java = {key: settings[key] for key in SAME_IN_JAVA if key in settings}
    if "sasl.username" in settings:
        java["sasl.jaas.config"] = _jaas_login(settings)
    if "ssl.ca.location" in settings:
        java["ssl.truststore.type"] = "PEM"
        java["ssl.truststore.location"] = settings["ssl.ca.location"]
    if "ssl.certificate.location" in settings:
        java["ssl.keystore.type"] = "PEM"
        java["ssl.keystore.certificate.chain"] = _read_pem(settings, "ssl.certificate.location")
        private_key = _read_pem(settings, "ssl.key.location")
        java["ssl.keystore.key"] = _decrypt_key(private_key, settings.get("ssl.key.password"))
    return java


def python_settings(settings: ClientSettings) -> dict[str, Any]:
    """The same settings in the names of kafka-python."""
    python: dict[str, Any] = {}
    for key, name in PYTHON_NAMES.items():
        if key in settings:
            python[name] = settings[key]
    if "security.protocol" in settings:
        python["security_protocol"] = settings["security.protocol"].upper()
    if "sasl.username" in settings:
        python.setdefault("sasl_mechanism", "PLAIN")
    if "ssl.endpoint.identification.algorithm" in settings:
        algorithm = settings["ssl.endpoint.identification.algorithm"]
        python["ssl_check_hostname"] = algorithm not in ("", "none")
    return python


def _jaas_login(settings: ClientSettings) -> str:
    """User and password in the form that Java's clients take."""
    mechanism = settings.get("sasl.mechanism", "PLAIN")
    if mechanism not in LOGIN_MODULES:
        raise ConfigError(
            f"sasl.mechanism {mechanism!r} is not supported",
            allowed=", ".join(LOGIN_MODULES),
            next=FIX_ADVICE,
        )
    user = _quote_java(settings.get("sasl.username", ""))
    password = _quote_java(settings.get("sasl.password", ""))
    return f"{LOGIN_MODULES[mechanism]} required username={user} password={password};"


def _read_pem(settings: ClientSettings, key: str) -> str:
    """The content of the PEM file that a setting names."""
    try:
        return Path(settings[key]).read_text()
    except KeyError:
        raise ConfigError(f"Kafka settings: {key} is missing", next=FIX_ADVICE) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"Kafka settings: {key} = {settings[key]} is not PEM", next=FIX_ADVICE
        ) from None
    except OSError as error:
        raise ConfigError(
            f"Kafka settings: {key} = {settings[key]}: {error.strerror}",
            next=FIX_ADVICE,
        ) from None


def _decrypt_key(key: str, password: str | None) -> str:
    """A private key without its password. Kafka's Java client cannot open the encryption that
    OpenSSL writes today (PBES2).
    """
    if "ENCRYPTED" not in key:
        return key
    try:
        from cryptography.hazmat.primitives import serialization as keys
    except ImportError:
        raise ConfigError(
            "Kafka settings: ssl.key.password: a key with a password needs the package cryptography",
            next="pip install cryptography; or write the key without its password,"
            " `openssl pkey -in KEY -out NEWKEY`, and make it readable by its owner alone,"
            " `chmod 600 NEWKEY`",
        ) from None
    try:
        private_key = keys.load_pem_private_key(key.encode(), (password or "").encode())
    except (ValueError, TypeError):  # its text may have secrets that must not be in a log
        raise ConfigError(
            "Kafka settings: ssl.key.password does not open the key of ssl.key.location",
            next=FIX_ADVICE,
        ) from None
    plain_key = private_key.private_bytes(
        keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption()
    )
    return plain_key.decode()


def _quote_java(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _refused_line_error(path: Path, number: int, key: str) -> ConfigError:
    """The error of a line. It shows only text that looks like a key: anything else may be a
    password.
    """
    problem = "this line is not KEY=VALUE"
    if SETTING_NAME.fullmatch(key):
        problem = f"{key} is not a setting that Seriatim takes"
        close_matches = difflib.get_close_matches(key, ALLOWED_SETTINGS, n=1)
        if close_matches:
            problem += f"; did you mean {close_matches[0]}?"
    return ConfigError(
        f"{path.name}:{number}: {problem}",
        allowed=", ".join(ALLOWED_SETTINGS),
        next=f"fix {path}",
    )
