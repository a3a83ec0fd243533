"""The schema registry: with which schema a message was written.

A message in Confluent's wire format begins with a zero byte and the id of its schema, four bytes. The
registry says which schema has this id. An id never changes its meaning, so a schema is asked for once:
it is kept in the process, and on this host's disk for the processes after it.

- A registry that cannot be reached, or that fails, is trouble of the platform: nothing is committed,
  and the next run tries again.
- An id that a reachable registry does not know may be new, and not have reached all of its servers.
  It is asked for again for a while. After that its messages are poison, until a later repair.

Settings are variables of the environment, or lines of a file that only its owner can read. A stream
file may name a registry: then they are those of this name. Each process reads its own, also on workers;
they are in no task.

Next: avro.py, protobuf.py and json_schema.py decode by it.
"""

from __future__ import annotations

import base64
import hashlib
import ssl
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib import request as http
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from seriatim import config
from seriatim.errors import ConfigError, PlatformError

URL = "SERIATIM_REGISTRY_URL"
SETTINGS_FILE = "SERIATIM_REGISTRY_CONFIG"
SETTING_NAMES = ("url", "user", "password", "token", "ca_file")
"""Each is a line NAME=VALUE of the settings file, or a variable SERIATIM_REGISTRY_NAME. Those of a
named registry are in its section of the connections file, or have its name before their own.
"""
HEADER_BYTES = 5
"""The zero byte and the id."""
REQUEST_SECONDS = 10
REASON_LENGTH_MAX = 300
"""Characters of what a registry says about a refusal."""
RETRY_PAUSES_SECONDS = (0.0, 1.0, 2.0, 4.0)
"""The pauses before each try of a request."""
UNKNOWN_ID_WAIT_SECONDS = 60
"""How long a process waits for ids that the registry does not know, all of them together: a topic full
of garbage has many of them.
"""
UNKNOWN_ID_PAUSE_SECONDS = 5
ANSWER_BYTES_MAX = 16 << 20
LOST_ANSWER = (OSError, ValueError, HTTPException)
"""Errors of a connection that was lost, or whose other end does not speak as a registry does."""
REFERENCES_MAX = 1000


class UnknownSchemaError(Exception):
    """The registry can be reached, and does not know an id."""


class SchemaReference(Struct, frozen=True):
    """A schema that another one refers to."""

    name: str
    schema: str


class RegisteredSchema(Struct, frozen=True):
    """What the registry says about an id."""

    type: str
    """AVRO, PROTOBUF or JSON."""
    schema: str
    references: tuple[SchemaReference, ...] = ()
    """Every schema that it refers to, also by way of others. One comes before those that need it."""


class SchemaSource(Protocol):
    """Where decoders ask for schemas."""

    def schema(self, schema_id: int) -> RegisteredSchema:
        """The schema of an id. Raises `UnknownSchemaError` if there is none."""
        ...


class _SchemaAnswer(Struct):
    """The answer of the registry to a question for a schema."""

    schema: str
    schemaType: str = "AVRO"  # noqa: N815  # the registry's own name
    references: list[dict[str, Any]] = []


class _Refusal(Struct):
    """What the registry answers in place of a schema."""

    message: str = ""


class RegistrySettings(Struct, frozen=True, kw_only=True):
    """How the registry is reached."""

    url: str
    user: str = ""
    password: str = ""
    token: str = ""
    ca_file: str = ""
    """Certificates that are trusted, in PEM; empty: those of this host."""

    def __repr__(self) -> str:
        return f"RegistrySettings(url={self.url!r})"


def read_registry_settings(environ: Mapping[str, str], name: str = "") -> RegistrySettings:
    """The settings of this process for the registry of this name, checked; without a name, for that
    of the variables.
    """
    if name:
        return _check_settings(_named_settings(environ, name), f"registry {name}: url")
    return _check_settings(_unnamed_settings(environ), URL)


def _named_settings(environ: Mapping[str, str], name: str) -> dict[str, str]:
    values = config.named_connection("registry", name, environ)
    advice = f"fix the section [registry.{name}] or the SERIATIM_REGISTRY_{name.upper()}_* variable"
    for option in values:
        if option not in SETTING_NAMES:
            raise ConfigError(
                f"registry {name}: {option} is no setting of a registry",
                allowed=", ".join(SETTING_NAMES),
                next=advice,
            )
    if "url" not in values:
        raise ConfigError(f"registry {name}: url is missing", next=advice)
    return values


def _unnamed_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that belong to no name. The environment wins over the file."""
    values: dict[str, str] = {}
    settings_file = environ.get(SETTINGS_FILE, "")
    if settings_file:
        values = config.read_private_settings(Path(settings_file), SETTINGS_FILE, SETTING_NAMES)
    for name in SETTING_NAMES:
        value = environ.get(f"SERIATIM_REGISTRY_{name.upper()}", "")
        if value:
            values[name] = value
    if not values.get("url"):
        raise ConfigError(
            "the messages name their schema by an id, and no schema registry is set",
            next=f"set {URL}, for example to http://127.0.0.1:8081",
        )
    return values


def _check_settings(values: Mapping[str, str], source: str) -> RegistrySettings:
    """The settings as a value. `source` is where people find the address."""
    settings = msgspec.convert(values, RegistrySettings)
    address = urlsplit(settings.url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(
            f"{source} is no address of a registry",
            allowed="http://… or https://…",
            next=f"fix {source}",
        )
    if address.username is not None or address.password is not None:
        raise ConfigError(
            f"{source} has a user or a password in it, which would be in logs",
            next="take them out, and set user and password of the registry"
            " (SERIATIM_REGISTRY_USER and SERIATIM_REGISTRY_PASSWORD, if it has no name)",
        )
    return settings


def open_registry(name: str = "") -> Registry:
    """The registry of this name, or the one that this process's environment names without one; with
    a cache in the home of this host.
    """
    settings = read_registry_settings(config.registry_environment(), name)
    return Registry(settings, config.load_settings().home / "registry")


class LazyRegistry:
    """The registry of a stream. It is opened for the first schema: a stream can be looked at without
    one.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._registry: Registry | None = None

    def schema(self, schema_id: int) -> RegisteredSchema:
        """The schema of an id."""
        if self._registry is None:
            self._registry = open_registry(self.name)
        return self._registry.schema(schema_id)


class Registry:
    """A schema registry with the interface of Confluent's."""

    def __init__(
        self,
        settings: RegistrySettings,
        cache_folder: Path,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = settings.url.rstrip("/")
        self._sleep = sleep
        self._headers = {
            "Accept": "application/vnd.schemaregistry.v1+json, application/json",
            **_authorization(settings),
        }
        # Two registries have different schemas for the same id.
        self._cache_folder = cache_folder / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._opener = http.build_opener(
            _RefuseRedirects(), http.HTTPSHandler(context=_tls_context(settings))
        )
        self._schemas: dict[int, RegisteredSchema] = {}
        self._unknown_ids: set[int] = set()
        self._wait_left_seconds: float = UNKNOWN_ID_WAIT_SECONDS
        self.requests_sent = 0

    def schema(self, schema_id: int) -> RegisteredSchema:
        """The schema of an id: from this process, from the disk, or from the registry."""
        known = self._schemas.get(schema_id)
        if known is not None:
            return known
        if schema_id in self._unknown_ids:
            raise UnknownSchemaError(schema_id)
        schema = self._read_cached(schema_id)
        if schema is None:
            schema = self._ask_for_schema(schema_id)
            self._write_cached(schema_id, schema)
        self._schemas[schema_id] = schema
        return schema

    def _ask_for_schema(self, schema_id: int) -> RegisteredSchema:
        """Ask the registry, and ask again for an id that it does not know."""
        while True:
            answer = self._get(f"/schemas/ids/{schema_id}")
            if answer is not None:
                return RegisteredSchema(
                    answer.schemaType, answer.schema, tuple(self._references_of(answer))
                )
            if self._wait_left_seconds <= 0:
                # Remembered in this process alone: the next run asks again.
                self._unknown_ids.add(schema_id)
                raise UnknownSchemaError(schema_id)
            self._sleep(UNKNOWN_ID_PAUSE_SECONDS)
            self._wait_left_seconds -= UNKNOWN_ID_PAUSE_SECONDS

    def _references_of(self, answer: _SchemaAnswer) -> list[SchemaReference]:
        """Every schema that one refers to. Those that others need come first."""
        # Depth first, with a stack instead of recursion: a schema comes out of the stack twice. The
        # first time those that it refers to are put above it, the second time they are all listed.
        references: dict[str, SchemaReference] = {}
        pending: list[tuple[dict[str, Any], bool]] = [
            (reference, False) for reference in reversed(answer.references)
        ]
        texts: dict[str, str] = {}
        while pending:
            reference, has_its_own = pending.pop()
            name = str(reference.get("name", ""))
            if has_its_own:
                references.setdefault(name, SchemaReference(name, texts[name]))
                continue
            if name in texts:
                continue
            if len(texts) >= REFERENCES_MAX:
                raise ConfigError(
                    f"{self.url}: a schema refers to more than {REFERENCES_MAX} others",
                    next="look at the schema in the registry",
                )
            subject = quote(str(reference.get("subject", "")), safe="")
            referred = self._get(f"/subjects/{subject}/versions/{reference.get('version')}")
            if referred is None:
                raise PlatformError(
                    f"the schema registry has no {reference.get('subject')} version"
                    f" {reference.get('version')}, to which a schema refers",
                    next="register it, then run again",
                )
            texts[name] = referred.schema
            pending.append((reference, True))
            pending += [(other, False) for other in reversed(referred.references)]
        return list(references.values())

    def _get(self, path: str) -> _SchemaAnswer | None:
        """The answer to a question; None if the registry knows nothing about it."""
        problem = ""
        for pause in RETRY_PAUSES_SECONDS:
            if pause:
                self._sleep(pause)
            try:
                return self._get_once(path)
            except HTTPError as error:
                reason = _reason_of(error)
                error.close()
                if error.code < 500 and error.code not in (408, 429):
                    raise self._refused_error(error.code, reason) from None
                problem = f"it answers with status {error.code}"
            except URLError as error:
                if isinstance(error.reason, ssl.SSLCertVerificationError):
                    raise ConfigError(
                        f"{self.url}: the registry's certificate is not trusted:"
                        f" {error.reason.verify_message}",
                        next="name the authority's certificate in ca_file of the registry",
                    ) from None
                problem = str(error.reason)
            except LOST_ANSWER as error:
                problem = str(error) or type(error).__name__
        raise PlatformError(
            f"the schema registry {self.url} cannot be asked: {problem}",
            next="look whether it runs and can be reached from here; the next run goes on",
        )

    def _get_once(self, path: str) -> _SchemaAnswer | None:
        self.requests_sent += 1
        question = http.Request(self.url + path, headers=self._headers)  # noqa: S310  # http, checked
        try:
            with self._opener.open(question, timeout=REQUEST_SECONDS) as answer:
                content = answer.read(ANSWER_BYTES_MAX + 1)
        except HTTPError as error:
            if error.code == 404:
                error.close()
                return None
            raise
        if len(content) > ANSWER_BYTES_MAX:
            raise ValueError(f"its answer has more than {ANSWER_BYTES_MAX} bytes")
        return msgspec.json.decode(content, type=_SchemaAnswer)

    def _refused_error(self, status: int, reason: str) -> ConfigError:
        if status in (401, 403):
            return ConfigError(
                f"the schema registry {self.url} refuses us with status {status}",
                next="fix user and password, or token, of the registry (SERIATIM_REGISTRY_USER,"
                " SERIATIM_REGISTRY_PASSWORD, SERIATIM_REGISTRY_TOKEN, if it has no name);"
                " it needs the right to read schemas",
            )
        return ConfigError(
            f"the schema registry {self.url} answers with status {status}{reason}",
            next="fix url of the registry: it is the address below which /schemas/ids/1 is found;"
            " or fix the schema, if the registry says that it cannot give it",
        )

    def _cache_file(self, schema_id: int) -> Path:
        return self._cache_folder / f"{schema_id}.json"

    def _read_cached(self, schema_id: int) -> RegisteredSchema | None:
        """A schema that an earlier process has kept. A damaged file is as good as none."""
        try:
            content = self._cache_file(schema_id).read_bytes()
            return msgspec.json.decode(content, type=RegisteredSchema)
        except (OSError, msgspec.MsgspecError):
            return None

    def _write_cached(self, schema_id: int, schema: RegisteredSchema) -> None:
        """Keep a schema for later processes. A disk that does not take it costs requests only."""
        path = self._cache_file(schema_id)
        # Several tasks may write the same schema at once: each has a draft of its own.
        draft = path.with_suffix(f".{time.time_ns()}.draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(schema))
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)


class _RefuseRedirects(http.HTTPRedirectHandler):
    """A redirect would send the password to another address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _reason_of(error: HTTPError) -> str:
    """What the registry says about its refusal, after a colon; empty if that is nothing readable."""
    try:
        answer = msgspec.json.decode(error.read(ANSWER_BYTES_MAX), type=_Refusal)
    except LOST_ANSWER:
        return ""
    return f": {answer.message[:REASON_LENGTH_MAX]}" if answer.message else ""


def _authorization(settings: RegistrySettings) -> dict[str, str]:
    if settings.token:
        return {"Authorization": f"Bearer {settings.token}"}
    if settings.user:
        credentials = base64.b64encode(f"{settings.user}:{settings.password}".encode())
        return {"Authorization": f"Basic {credentials.decode()}"}
    return {}


def _tls_context(settings: RegistrySettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ca_file of the registry: {settings.ca_file}: {error.strerror or 'no certificate'}",
            next="fix ca_file of the registry: it names a file of certificates in PEM",
        ) from None


def describe_schema_id(value: bytes) -> str:
    """The id of the schema of a value, as the end of a cause: versions of a schema differ by it. Empty
    if the value names none.
    """
    try:
        return f" (schema id {schema_id_of(value)})"
    except ValueError:
        return ""


def schema_id_of(value: bytes) -> int:
    """The id at the beginning of a value. Raises `ValueError` if there is none."""
    if len(value) < HEADER_BYTES:
        raise ValueError(f"the value has {len(value)} bytes, too few for the id of a schema")
    if value[0] != 0:
        raise ValueError(f"the value begins with 0x{value[0]:02x}, not with 0x00 and a schema id")
    return int.from_bytes(value[1:HEADER_BYTES], "big")
