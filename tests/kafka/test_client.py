"""Kafka client settings: only what is allowed comes in, and both dialects say the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from seriatim.demo.producer import SnapshotRequestListener
from seriatim.embedded.broker import cluster_id
from seriatim.errors import ConfigError
from seriatim.kafka import client
from seriatim.kafka.log import KafkaLog
from seriatim.kafka.past_messages import KafkaPastMessageReader
from seriatim.kafka.sending import MessageSender, create_topics
from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of client settings that only its owner may read."""
    path = tmp_path / "client.properties"
    path.touch(mode=0o600)
    return path


def test_without_a_file_there_are_no_settings() -> None:
    """The servers alone come from elsewhere."""
    assert client.read_client_settings(None) == {}


def test_settings_are_lines_of_key_and_value(file: Path) -> None:
    """Comments and empty lines are passed over, blanks trimmed, and a value may contain =."""
    file.write_text("# ours\n\nsecurity.protocol = SASL_SSL\n  sasl.password=a=b =\n")
    assert client.read_client_settings(file) == {
        "security.protocol": "SASL_SSL",
        "sasl.password": "a=b =",
    }


@pytest.mark.parametrize("key", client.ALLOWED_SETTINGS)
def test_every_allowed_key_is_taken(file: Path, key: str) -> None:
    """The list that an error shows is the list that is taken."""
    file.write_text(f"{key}=x")
    assert client.read_client_settings(file) == {key: "x"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sasl.jaas.config=org.example.Evil required;", "sasl.jaas.config is not a setting"),
        ("plugin.library.paths=/tmp/evil.so", "plugin.library.paths"),
        ("sasl.oauthbearer.token.endpoint.url=http://evil", "sasl.oauthbearer.token.endpoint.url"),
        ("bootstrap.servers=elsewhere:9092", "bootstrap.servers"),
        ("interceptor.classes=org.example.Evil", "interceptor.classes"),
        ("sasl.mechanisms=PLAIN", "did you mean sasl.mechanism?"),
        ("security.protocol", "not KEY=VALUE"),
        ("=x", "not KEY=VALUE"),
    ],
)
def test_anything_else_is_refused_by_line(file: Path, line: str, told: str) -> None:
    """Nothing that loads a class, runs a command or fetches an address comes in; the line is named."""
    file.write_text(f"client.id=me\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        client.read_client_settings(file)
    assert caught.value.message.startswith("client.properties:2: ")
    assert told in caught.value.message
    assert str(file) in caught.value.next


def test_a_value_is_never_shown(file: Path) -> None:
    """A refused line may hold a secret: only its key is told."""
    file.write_text("sasl.pasword=hunter2")
    with pytest.raises(ConfigError) as caught:
        client.read_client_settings(file)
    assert "hunter2" not in caught.value.render()


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644])
@pytest.mark.parametrize("key", client.SECRET_SETTINGS)
def test_a_file_with_a_secret_is_for_its_owner_alone(file: Path, key: str, mode: int) -> None:
    """It is refused, with the command that helps; without a secret it may be readable by all."""
    file.chmod(mode)
    file.write_text("security.protocol=SSL\n")
    assert client.read_client_settings(file) == {"security.protocol": "SSL"}
    file.write_text(f"security.protocol=SSL\n{key}=canary\n")
    with pytest.raises(ConfigError, match=r"SERIATIM_KAFKA_CONFIG: .* read by others") as caught:
        client.read_client_settings(file)
    assert caught.value.next == f"chmod 600 {file}"
    assert "canary" not in caught.value.render()
    file.chmod(0o600)
    assert client.read_client_settings(file)[key] == "canary"


def test_a_missing_file_is_a_configuration_error(file: Path) -> None:
    """The variable that names it is what to fix."""
    file.unlink()
    with pytest.raises(ConfigError, match="No such file") as caught:
        client.read_client_settings(file)
    assert "SERIATIM_KAFKA_CONFIG" in caught.value.next


def test_java_takes_what_it_names_alike_as_it_is() -> None:
    """And nothing that only librdkafka knows."""
    same = {
        "bootstrap.servers": "a:1",
        "security.protocol": "SSL",
        "client.id": "me",
        "isolation.level": "read_committed",
        "ssl.endpoint.identification.algorithm": "https",
    }
    assert client.java_settings(same) == same
    assert client.java_settings({**same, "log_level": "0"}) == same


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ("PLAIN", "plain.PlainLoginModule"),
        ("SCRAM-SHA-256", "scram.ScramLoginModule"),
        ("SCRAM-SHA-512", "scram.ScramLoginModule"),
    ],
)
def test_a_login_becomes_a_java_login_module(mechanism: str, module: str) -> None:
    """User and password are quoted, so that neither can end the text they stand in."""
    java = client.java_settings(
        {"sasl.mechanism": mechanism, "sasl.username": "me", "sasl.password": 'a"; evil\\'}
    )
    assert java == {
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f"org.apache.kafka.common.security.{module} required "
        'username="me" password="a\\"; evil\\\\";',
    }


def test_another_login_is_refused() -> None:
    """Which ones there are is told."""
    with pytest.raises(ConfigError, match="GSSAPI") as caught:
        client.java_settings({"sasl.mechanism": "GSSAPI", "sasl.username": "me"})
    assert caught.value.fields["allowed"] == "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"


def test_certificates_become_java_stores_of_pem(tmp_path: Path) -> None:
    """The authority by its place; our own certificate and key by their text, as Java wants them."""
    (tmp_path / "cert.pem").write_text("CERT")
    (tmp_path / "key.pem").write_text("KEY")
    settings = {
        "ssl.ca.location": "/etc/ca.pem",
        "ssl.certificate.location": str(tmp_path / "cert.pem"),
        "ssl.key.location": str(tmp_path / "key.pem"),
    }
    assert client.java_settings(settings) == {
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/etc/ca.pem",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": "CERT",
        "ssl.keystore.key": "KEY",
    }


def test_a_key_under_a_password_is_opened_for_java(tmp_path: Path) -> None:
    """Its client cannot open what OpenSSL writes; a password that is wrong is said, and not
    repeated.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open"))
    (tmp_path / "cert.pem").write_text("CERT")
    (tmp_path / "key.pem").write_bytes(locked)
    places = {
        "ssl.certificate.location": str(tmp_path / "cert.pem"),
        "ssl.key.location": str(tmp_path / "key.pem"),
    }
    java = client.java_settings({**places, "ssl.key.password": "open"})
    assert java["ssl.keystore.key"].startswith("-----BEGIN PRIVATE KEY-----")
    assert "ssl.key.password" not in java
    for wrong in ({"ssl.key.password": "hunter2"}, {}):
        with pytest.raises(ConfigError, match=r"ssl\.key\.password does not open") as caught:
            client.java_settings({**places, **wrong})
        assert "hunter2" not in caught.value.render()


@pytest.mark.parametrize(
    "given", [{}, {"ssl.key.location": "/nowhere/key.pem"}], ids=["unsaid", "nowhere"]
)
def test_a_certificate_without_its_key_is_a_configuration_error(
    tmp_path: Path, given: dict[str, str]
) -> None:
    """The setting is named, whether it is left out or names no file."""
    (tmp_path / "cert.pem").write_text("CERT")
    with pytest.raises(ConfigError, match=r"ssl\.key\.location"):
        client.java_settings({"ssl.certificate.location": str(tmp_path / "cert.pem"), **given})


def test_kafka_python_takes_the_same_settings_under_its_names() -> None:
    """Each that is allowed arrives, and the library knows every name it is given."""
    from kafka.net import KafkaConnectionManager

    given = {key: key for key in (*client.ALLOWED_SETTINGS, "bootstrap.servers")} | {
        "security.protocol": "sasl_ssl"
    }
    assert client.python_settings(given) == {
        "bootstrap_servers": "bootstrap.servers",
        "client_id": "client.id",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "sasl.mechanism",
        "sasl_plain_username": "sasl.username",
        "sasl_plain_password": "sasl.password",
        "ssl_cafile": "ssl.ca.location",
        "ssl_certfile": "ssl.certificate.location",
        "ssl_keyfile": "ssl.key.location",
        "ssl_password": "ssl.key.password",
        "ssl_check_hostname": True,
    }
    assert set(client.python_settings(given)) <= set(KafkaConnectionManager.DEFAULT_CONFIG)
    assert client.python_settings({"ssl.endpoint.identification.algorithm": "none"}) == {
        "ssl_check_hostname": False
    }
    assert client.python_settings({"sasl.username": "me"})["sasl_mechanism"] == "PLAIN"


@pytest.mark.parametrize(
    "line",
    [
        "sasl.password: canary",
        "sasl.password canary",
        "canary",
        "sasl.password canary = x",
        'sasl.password:"canary="',
        "\ufeffsasl.password canary",
    ],
)
def test_a_slip_in_a_line_shows_nothing_of_a_secret(file: Path, line: str) -> None:
    """A colon for the equals sign, a password alone: the error goes into logs and mails."""
    file.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"client\.properties:1") as caught:
        client.read_client_settings(file)
    assert "canary" not in caught.value.render()


def test_a_file_that_is_no_text_is_a_configuration_error(file: Path) -> None:
    """Said by its name, with nothing of what is in it."""
    file.write_bytes(b"sasl.password=canary\xff\n")
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        client.read_client_settings(file)
    assert "canary" not in caught.value.render()


REFUSED = [
    ({"security.protocol": "SASL_SLL"}, "SASL_SLL"),
    ({"security.protocol": "SSL", "ssl.ca.location": "/nope.pem"}, "ssl.ca.location"),
    (
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "FOO",
            "sasl.username": "a",
            "sasl.password": "b",
        },
        "FOO",
    ),
    ({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}, "sasl.username"),
]
NOBODY = {"bootstrap.servers": "127.0.0.1:9"}
USERS: dict[str, Callable[[dict[str, str], Path], Any]] = {
    "log": lambda settings, _: KafkaLog(settings),
    "reread": lambda settings, _: KafkaPastMessageReader(settings),
    "requests": lambda settings, _: KafkaSnapshotRequester(settings, "asks").send([]),
    "answers": lambda settings, _: SnapshotRequestListener(settings, "asks"),
    "topics": lambda settings, _: create_topics(settings, {}),
    "send": lambda settings, _: MessageSender(settings),
    "doctor": lambda settings, _: cluster_id("127.0.0.1:9", 0.1, settings),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(("settings", "told"), REFUSED)
def test_settings_that_the_client_refuses_are_a_configuration_error(
    user: str, settings: dict[str, str], told: str, tmp_path: Path
) -> None:
    """Whoever makes the client: the file is what to fix, and nobody is told to report a bug."""
    with pytest.raises(ConfigError, match=told) as caught:
        USERS[user]({**NOBODY, **settings}, tmp_path)
    assert "SERIATIM_KAFKA_CONFIG" in caught.value.next


@pytest.mark.parametrize("kind", [AdminClient, Consumer, Producer])
def test_a_refusal_shows_no_password(kind: Callable[[dict[str, Any]], Any]) -> None:
    """Not even where somebody gave it to the wrong key."""
    with pytest.raises(ConfigError) as caught:
        client.create_client(
            kind,
            {**NOBODY, "group.id": "g", "security.protocol": "hunter2", "sasl.password": "hunter2"},
        )
    assert "hunter2" not in caught.value.render()
    assert "security.protocol" in caught.value.message


def test_a_certificate_that_is_no_text_is_a_configuration_error(tmp_path: Path) -> None:
    """Java wants PEM; a DER file is named."""
    (tmp_path / "c.der").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not PEM"):
        client.java_settings({"ssl.certificate.location": str(tmp_path / "c.der")})


def test_a_named_cluster_has_its_own_settings(tmp_path: Path) -> None:
    """From a section, from variables with underscores, or from a file that is named there."""
    file = tmp_path / "kafka.properties"
    file.write_text("security.protocol=SSL\nclient.id=of-the-file\n")
    options = {"bootstrap_servers": "west:9092", "client.id": "west", "config": str(file)}
    assert client.named_client_settings("west", options) == {
        "bootstrap.servers": "west:9092",
        "client.id": "west",
        "security.protocol": "SSL",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client.id": "x"}, "it has no bootstrap.servers"),
        ({"bootstrap.servers": "x", "plugin.library.paths": "/x"}, "is no setting of a cluster"),
    ],
)
def test_a_wrong_section_of_a_cluster_is_refused(options: dict[str, str], message: str) -> None:
    """The error names the section."""
    with pytest.raises(ConfigError, match=message) as raised:
        client.named_client_settings("west", options)
    assert "[kafka.west]" in raised.value.next
