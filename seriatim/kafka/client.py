"""Kafka client settings: one file of the user's, in the names of librdkafka, for the dialects we
speak.

`SERIATIM_KAFKA_CONFIG` names a file of KEY=VALUE lines. Only the keys below are taken: nothing that
loads a class, runs a command or fetches an address may come in this way. Secrets stay out of
command lines and logs: the file should be readable by its owner alone.

Next room: kafka/log.py, spark.py and batches.py use what is made here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

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
LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
SETTING_NAME = re.compile(r"[A-Za-z0-9_.-]+")
SECRET_SETTINGS = ("sasl.password", "ssl.key.password")
T = TypeVar("T")


def read_client_settings(path: Path | None) -> dict[str, str]:
    """The user's client settings, checked; none if there is no file."""
    if path is None:
        return {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(
            f"kafka_config: {path}: {error.strerror}", next="fix SERIATIM_KAFKA_CONFIG"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"kafka_config: {path} is not UTF-8", next=f"fix {path}") from None
    settings: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            key, equals, value = (part.strip() for part in text.partition("="))
            if not equals or key not in ALLOWED_SETTINGS:
                raise _refused_line_error(path, number, key if equals else "")
            settings[key] = value
    return settings


def create_client(client_class: Callable[[dict[str, Any]], T], settings: Mapping[str, Any]) -> T:
    """One of librdkafka's clients. It looks at its settings when it is made, and what it refuses a
    person must fix.
    """
    from confluent_kafka import KafkaException

    try:
        return client_class(dict(settings))
    except KafkaException as error:
        why = re.sub(r"^Failed to create [a-z ]+: ", "", error.args[0].str())
        for secret in filter(None, map(settings.get, SECRET_SETTINGS)):
            why = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "…", why)
        raise ConfigError(
            f"kafka_config: {why}",
            next="fix the file that SERIATIM_KAFKA_CONFIG names: Kafka's client does not take it",
        ) from None


def java_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """The same settings as Java clients name them."""
    same = (
        "bootstrap.servers",
        "security.protocol",
        "sasl.mechanism",
        "client.id",
        "isolation.level",
    )
    java = {
        key: settings[key]
        for key in (*same, "ssl.endpoint.identification.algorithm")
        if key in settings
    }
    if "sasl.username" in settings:
        java["sasl.jaas.config"] = _jaas_login(settings)
    if "ssl.ca.location" in settings:
        java |= {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": settings["ssl.ca.location"],
        }
    if "ssl.certificate.location" in settings:
        java["ssl.keystore.type"] = "PEM"
        java["ssl.keystore.certificate.chain"] = _read_pem(settings, "ssl.certificate.location")
        java["ssl.keystore.key"] = _decrypt_key(
            _read_pem(settings, "ssl.key.location"), settings.get("ssl.key.password")
        )
    return java


def python_settings(settings: Mapping[str, str]) -> dict[str, Any]:
    """The same settings as kafka-python names them."""
    python: dict[str, Any] = {
        name: settings[key] for key, name in PYTHON_NAMES.items() if key in settings
    }
    if "security.protocol" in settings:
        python["security_protocol"] = settings["security.protocol"].upper()
    if "sasl.username" in settings:
        python.setdefault("sasl_mechanism", "PLAIN")
    if "ssl.endpoint.identification.algorithm" in settings:
        python["ssl_check_hostname"] = settings["ssl.endpoint.identification.algorithm"] not in (
            "",
            "none",
        )
    return python


def _jaas_login(settings: Mapping[str, str]) -> str:
    mechanism = settings.get("sasl.mechanism", "PLAIN")
    if mechanism not in LOGIN_MODULES:
        raise ConfigError(
            f"sasl.mechanism {mechanism!r} is not supported", allowed=", ".join(LOGIN_MODULES)
        )
    user, password = (
        _quote_java(settings.get(key, "")) for key in ("sasl.username", "sasl.password")
    )
    return f"{LOGIN_MODULES[mechanism]} required username={user} password={password};"


def _read_pem(settings: Mapping[str, str], key: str) -> str:
    try:
        return Path(settings[key]).read_text()
    except KeyError:
        raise ConfigError(
            f"kafka_config: {key} is missing", next="fix SERIATIM_KAFKA_CONFIG"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"kafka_config: {key} = {settings[key]} is not PEM", next="fix SERIATIM_KAFKA_CONFIG"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"kafka_config: {key} = {settings[key]}: {error.strerror}",
            next="fix SERIATIM_KAFKA_CONFIG",
        ) from None


def _decrypt_key(key: str, password: str | None) -> str:
    """A private key without its password: Kafka's Java client cannot open what OpenSSL writes today
    (PBES2).
    """
    if "ENCRYPTED" not in key:
        return key
    try:
        from cryptography.hazmat.primitives import serialization as keys
    except ImportError:
        raise ConfigError(
            "kafka_config: ssl.key.password: a key with a password needs the package cryptography",
            next="install cryptography, or take the password off the key and make it readable by its owner alone",
        ) from None
    try:
        opened = keys.load_pem_private_key(key.encode(), (password or "").encode())
    except (ValueError, TypeError):  # its text may say more than a log should have
        raise ConfigError(
            "kafka_config: ssl.key.password does not open the key of ssl.key.location",
            next="fix SERIATIM_KAFKA_CONFIG",
        ) from None
    return opened.private_bytes(
        keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption()
    ).decode()


def _quote_java(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _refused_line_error(path: Path, number: int, key: str) -> ConfigError:
    """What is wrong with a line. Only what looks like a key is shown: anything else may be a
    password.
    """
    close = difflib.get_close_matches(key, ALLOWED_SETTINGS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    named = (
        f"{key} is not a setting we take{hint}"
        if SETTING_NAME.fullmatch(key)
        else "this line is not KEY=VALUE"
    )
    return ConfigError(
        f"{path.name}:{number}: {named}",
        allowed=", ".join(ALLOWED_SETTINGS),
        next=f"fix {path}",
    )
