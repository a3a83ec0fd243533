"""The schema registry: schemas by id, asked for once; what is poison, what is trouble of the platform,
and what somebody must set right.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim.engine.decoding import PlainDecoder
from seriatim.errors import ConfigError, PlatformError
from seriatim.formats.registry import (
    UNKNOWN_ID_WAIT_SECONDS,
    RegisteredSchema,
    Registry,
    RegistrySettings,
    SchemaReference,
    SchemaSource,
    UnknownSchemaError,
    read_registry_settings,
    schema_id_of,
)
from seriatim.memory import MemorySchemas
from seriatim.stream_files import load_decoder, load_stream
from tests.formats.registry_server import RegistryServer

RECORD = {"type": "record", "name": "Quote", "fields": [{"name": "price", "type": "long"}]}
RECORD_TEXT = '{"type":"record","name":"Quote","fields":[{"name":"price","type":"long"}]}'


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    """A registry that runs."""
    with RegistryServer().running() as running:
        yield running


class Sleeper:
    """Waits without waiting, and remembers how long."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, seconds: float) -> None:
        self.seconds += seconds


def open_registry(server: RegistryServer, folder: Path, **settings: str) -> Registry:
    """A client that waits for nothing."""
    return Registry(RegistrySettings(url=server.url, **settings), folder, sleep=Sleeper())


@pytest.fixture(params=["http", "memory"])
def source(request: pytest.FixtureRequest, server: RegistryServer, tmp_path: Path) -> SchemaSource:
    """Both sources of schemas, with the same two schemas."""
    if request.param == "memory":
        schemas = MemorySchemas()
        schemas.register(RECORD_TEXT)
        schemas.register("message A {}", kind="PROTOBUF", references=[("b.proto", "message B {}")])
        return schemas
    server.put(1, RECORD_TEXT)
    reference = {"name": "b.proto", "subject": "b", "version": 1}
    server.put(2, "message A {}", schemaType="PROTOBUF", references=[reference])
    server.put_version("b", 1, "message B {}", schemaType="PROTOBUF")
    return open_registry(server, tmp_path)


def test_a_schema_has_its_type_and_its_references(source: SchemaSource) -> None:
    """Without a type it is Avro, as registries answer."""
    assert source.schema(1) == RegisteredSchema("AVRO", RECORD_TEXT)
    referred = (SchemaReference("b.proto", "message B {}"),)
    assert source.schema(2) == RegisteredSchema("PROTOBUF", "message A {}", referred)


def test_an_unknown_id_is_said(source: SchemaSource) -> None:
    """By an error that decoders make poison of."""
    with pytest.raises(UnknownSchemaError):
        source.schema(3)


def test_a_schema_is_asked_for_once(server: RegistryServer, tmp_path: Path) -> None:
    """Not once per message, and not once per process on the same host."""
    for schema_id in range(1, 4):
        server.put(schema_id, RECORD)
    registry = open_registry(server, tmp_path)
    for _ in range(1000):
        for schema_id in range(1, 4):
            registry.schema(schema_id)
    assert len(server.paths_asked) == 3
    open_registry(server, tmp_path).schema(2)
    assert len(server.paths_asked) == 3


def test_two_registries_do_not_share_their_ids(server: RegistryServer, tmp_path: Path) -> None:
    """The same id is another schema there."""
    server.put(1, RECORD)
    open_registry(server, tmp_path).schema(1)
    with RegistryServer().running() as other:
        other.put(1, "{}", schemaType="JSON")
        assert open_registry(other, tmp_path).schema(1).type == "JSON"


def test_a_damaged_cache_is_no_trouble(server: RegistryServer, tmp_path: Path) -> None:
    """The schema is asked for again."""
    server.put(1, RECORD)
    open_registry(server, tmp_path).schema(1)
    (cached,) = tmp_path.rglob("1.json")
    cached.write_bytes(cached.read_bytes()[:-5])
    assert open_registry(server, tmp_path).schema(1).type == "AVRO"
    assert len(server.paths_asked) == 2


def test_references_come_before_those_that_need_them(
    server: RegistryServer, tmp_path: Path
) -> None:
    """Also those of references, each once."""
    to_c = {"name": "c", "subject": "c", "version": 1}
    server.put(1, '"a"', references=[{"name": "b", "subject": "b", "version": 7}, to_c])
    server.put_version("b", 7, '"b"', references=[to_c])
    server.put_version("c", 1, '"c"')
    names = [reference.name for reference in open_registry(server, tmp_path).schema(1).references]
    assert names == ["c", "b"]


def test_an_id_that_comes_late_is_waited_for(server: RegistryServer, tmp_path: Path) -> None:
    """A registry of several servers may not know it everywhere at once."""
    server.put(1, RECORD)
    server.statuses = [404, 404]
    assert open_registry(server, tmp_path).schema(1).type == "AVRO"


def test_unknown_ids_are_waited_for_together(server: RegistryServer, tmp_path: Path) -> None:
    """A topic full of garbage has many of them: a minute each would be days."""
    sleeper = Sleeper()
    registry = Registry(RegistrySettings(url=server.url), tmp_path, sleep=sleeper)
    for schema_id in range(100):
        for _ in range(2):
            with pytest.raises(UnknownSchemaError):
                registry.schema(schema_id)
    assert sleeper.seconds == UNKNOWN_ID_WAIT_SECONDS
    assert not list(tmp_path.rglob("*.json")), "the next process asks again"


def test_a_registry_that_fails_for_a_moment_is_asked_again(
    server: RegistryServer, tmp_path: Path
) -> None:
    """Status 5xx, or too many requests."""
    server.put(1, RECORD)
    server.statuses = [503, 429]
    assert open_registry(server, tmp_path).schema(1).type == "AVRO"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_registry_that_fails_is_platform_trouble(
    server: RegistryServer, tmp_path: Path, status: int
) -> None:
    """Nothing is committed: the next run reads the same messages again."""
    server.statuses = [status] * 10
    with pytest.raises(PlatformError, match=f"cannot be asked: it answers with status {status}"):
        open_registry(server, tmp_path).schema(1)


@pytest.mark.parametrize("status", [200, 503])
def test_an_answer_that_is_cut_off_is_platform_trouble(
    server: RegistryServer, tmp_path: Path, status: int
) -> None:
    """As a proxy does that loses its registry: no message may become poison by it."""
    server.put(1, RECORD)
    server.statuses = [status] * 10
    server.is_cut_off = True
    with pytest.raises(PlatformError, match="cannot be asked"):
        open_registry(server, tmp_path).schema(1)


def test_a_registry_that_is_not_there_is_platform_trouble(tmp_path: Path) -> None:
    """It names the address and the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        registry = Registry(RegistrySettings(url=url), tmp_path, sleep=Sleeper())
        with pytest.raises(PlatformError, match=f"{url} cannot be asked: .*refused"):
            registry.schema(1)


def test_an_answer_that_is_no_schema_is_platform_trouble(
    server: RegistryServer, tmp_path: Path
) -> None:
    """Such as the page of a proxy."""
    server.put(1, RECORD)
    server.content = b"<html>please log in</html>"
    with pytest.raises(PlatformError, match="malformed"):
        open_registry(server, tmp_path).schema(1)


@pytest.mark.parametrize("status", [401, 403])
def test_wrong_credentials_are_said(server: RegistryServer, tmp_path: Path, status: int) -> None:
    """A retry does not help: somebody must set them right."""
    server.statuses = [status]
    with pytest.raises(ConfigError, match="refuses us") as caught:
        open_registry(server, tmp_path, user="me", password="se-cret").schema(1)
    assert "SERIATIM_REGISTRY_PASSWORD" in caught.value.next
    assert "se-cret" not in str(caught.value)


def test_a_refusal_says_what_the_registry_says(server: RegistryServer, tmp_path: Path) -> None:
    """Such as a schema that it has, and cannot give."""
    server.statuses = [400]
    with pytest.raises(ConfigError, match="answers with status 400: Schema not found"):
        open_registry(server, tmp_path).schema(7)


def test_a_redirect_is_not_followed(server: RegistryServer, tmp_path: Path) -> None:
    """It would take the password to another address."""
    server.statuses = [302]
    with pytest.raises(ConfigError, match="answers with status 302"):
        open_registry(server, tmp_path, token="canary").schema(1)
    assert server.paths_asked == ["/schemas/ids/1"]


@pytest.mark.parametrize(
    ("settings", "header"),
    [
        ({"user": "me", "password": "pass"}, "Basic bWU6cGFzcw=="),
        ({"token": "abc"}, "Bearer abc"),
        ({}, None),
    ],
)
def test_credentials_are_sent(
    server: RegistryServer, tmp_path: Path, settings: dict[str, str], header: str | None
) -> None:
    """In the way that registries take them."""
    server.put(1, RECORD)
    open_registry(server, tmp_path, **settings).schema(1)
    assert server.authorizations == [header]


def test_settings_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    """The environment wins; secrets are not shown."""
    file = tmp_path / "registry"
    file.write_text("# ours\nurl = http://a:1\nuser=me\npassword=canary\n")
    file.chmod(0o600)
    environ = {"SERIATIM_REGISTRY_CONFIG": str(file), "SERIATIM_REGISTRY_URL": "http://b:2"}
    settings = read_registry_settings(environ)
    assert (settings.url, settings.user, settings.password) == ("http://b:2", "me", "canary")
    assert "canary" not in repr(settings)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "no schema registry is set"),
        ({"SERIATIM_REGISTRY_URL": "registry:8081"}, "no address of a registry"),
        ({"SERIATIM_REGISTRY_URL": "file:///etc"}, "no address of a registry"),
        ({"SERIATIM_REGISTRY_URL": "http://me:canary@host"}, "has a user or a password in it"),
    ],
)
def test_wrong_settings_are_refused(environ: dict[str, str], said: str) -> None:
    """With what to do; a secret is not repeated."""
    with pytest.raises(ConfigError, match=said) as caught:
        read_registry_settings(environ)
    assert "SERIATIM_REGISTRY_" in caught.value.next
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("url=http://a\n", 0o644, "can be read by others"),
        ("url=http://a\nsecret canary\n", 0o600, "line 2 is no setting"),
        ("pasword=canary\n", 0o600, "line 1 is no setting"),
    ],
)
def test_a_settings_file_is_checked(tmp_path: Path, content: str, mode: int, said: str) -> None:
    """It has secrets: nobody else may read it, and no line of it is shown."""
    file = tmp_path / "registry"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        read_registry_settings({"SERIATIM_REGISTRY_CONFIG": str(file)})
    assert "canary" not in str(caught.value)


def connections(tmp_path: Path, sections: str) -> dict[str, str]:
    """An environment with a connections file."""
    file = tmp_path / "connections.toml"
    file.write_text(sections)
    file.chmod(0o600)
    return {"SERIATIM_CONNECTIONS": str(file)}


def test_a_named_registry_takes_nothing_from_the_unnamed_one(tmp_path: Path) -> None:
    """Otherwise the password of one registry would be sent to another."""
    environ = connections(tmp_path, '[registry.west]\nurl = "http://west:1"\nuser = "w"\n') | {
        "SERIATIM_REGISTRY_URL": "http://east:1",
        "SERIATIM_REGISTRY_PASSWORD": "of-east",
        "SERIATIM_REGISTRY_WEST_PASSWORD": "of-west",
    }
    assert read_registry_settings(environ, "west") == RegistrySettings(
        url="http://west:1", user="w", password="of-west"
    )
    assert read_registry_settings(environ) == RegistrySettings(
        url="http://east:1", password="of-east"
    )


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("", "there is no registry named 'west'"),
        ('[registry.west]\nuser = "w"\n', "registry west: url is missing"),
        ('[registry.west]\nadress = "http://w"\n', "registry west: adress is no setting"),
        ('[registry.west]\nurl = "west"\n', "registry west: url is no address"),
    ],
)
def test_wrong_settings_of_a_named_registry_are_refused(
    tmp_path: Path, section: str, said: str
) -> None:
    """The error names the registry, so that people know which section to fix."""
    with pytest.raises(ConfigError, match=said):
        read_registry_settings(connections(tmp_path, section), "west")


def test_a_stream_is_decoded_by_the_registry_that_it_names(
    server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment names another one, which is not asked."""
    server.put(1, RECORD)
    environ = connections(tmp_path, f'[registry.west]\nurl = "{server.url}"\n')
    monkeypatch.setenv("SERIATIM_CONNECTIONS", environ["SERIATIM_CONNECTIONS"])
    monkeypatch.setenv("SERIATIM_REGISTRY_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("SERIATIM_HOME", str(tmp_path / "home"))
    (tmp_path / "s.toml").write_text(
        'topics = "t"\nmachine = "table"\ndecoder = "avro"\nregistry = "west"\n'
        'output.path = "lake"\n[table]\nkey = ["price"]\ncolumns = { price = "int64" }\n'
    )
    decoder = load_decoder(load_stream("s", tmp_path))
    assert isinstance(decoder, PlainDecoder)
    assert decoder.to_plain(b"\x00\x00\x00\x00\x01\x04") == {"type": "Quote", "price": 2}


def test_the_certificates_of_a_wrong_file_are_refused(tmp_path: Path) -> None:
    """When the registry is opened."""
    settings = RegistrySettings(url="https://host", ca_file=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="No such file"):
        Registry(settings, tmp_path)


@pytest.mark.parametrize(
    ("value", "said"),
    [(b"", "has 0 bytes"), (b"\0\0\0\1", "has 4 bytes"), (b'{"a":1}', "begins with 0x7b")],
)
def test_a_value_without_an_id_is_told(value: bytes, said: str) -> None:
    """So that somebody sees that it was not written with a registry."""
    with pytest.raises(ValueError, match=said):
        schema_id_of(value)


def test_an_id_has_four_bytes() -> None:
    """The greatest one, too."""
    assert schema_id_of(b"\0\xff\xff\xff\xff") == 0xFFFFFFFF
    assert schema_id_of(b"\0\0\0\1\2rest") == 258
