"""A broker that wants TLS with a client's certificate and a login; beside it a plain port for the
tests' own producers.

The secrets that clients need (a password, the password of a key) are canaries: one of them in a log,
on a command line or in a database is a leak.

Next: test_airflow_trouble.py runs streams against it.
"""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from seriatim.embedded import broker as embedded
from tests.mail_catcher import free_port

START_SECONDS = 300
PLAIN_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"


class Pair:
    """A key and its certificate, which another pair or the pair itself signed."""

    def __init__(self, name: str, signer: Pair | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        issuer = signer or self
        builder = (
            x509.CertificateBuilder(
                issuer.name, self.name, self.key.public_key(), x509.random_serial_number()
            )
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(
                x509.BasicConstraints(ca=signer is None, path_length=None), critical=True
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]),
                critical=False,
            )
        )
        self.certificate = builder.sign(issuer.key, SHA256())

    @property
    def public(self) -> str:
        """The certificate as text."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def secret(self, password: str = "") -> str:
        """The key as text, under a password if one is given."""
        lock: KeySerializationEncryption = NoEncryption()
        if password:
            lock = BestAvailableEncryption(password.encode())
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock).decode()


class GuardedBroker:
    """Kafka with two ports: `plain` for tests, `guarded` for streams. It can be stopped and started."""

    def __init__(
        self, folder: Path, program: embedded.KafkaProgram, password: str, key_password: str
    ) -> None:
        self.folder, self.program = folder, program
        folder.mkdir(parents=True)
        self.plain, self.guarded = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        authority = Pair("authority")
        server, client = Pair("broker", authority), Pair("client", authority)
        self.client_config = self._client_settings(authority, client, password, key_password)
        settings = embedded.broker_settings(
            folder / "data", int(self.plain.rpartition(":")[2]), free_port(), {}
        )
        settings["listeners"] += f",GUARDED://{self.guarded}"
        settings["advertised.listeners"] += f",GUARDED://{self.guarded}"
        settings["listener.security.protocol.map"] += ",GUARDED:SASL_SSL"
        settings |= {
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.guarded.plain.sasl.jaas.config": f'{PLAIN_LOGIN} user_client="{password}";',
            "listener.name.guarded.ssl.client.auth": "required",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": _one_line(authority.public),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _one_line(server.public),
            "ssl.keystore.key": _one_line(server.secret()),
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        (folder / "server.properties").write_text("\n".join(lines) + "\n")
        embedded._format_once(folder, program)

    def _client_settings(
        self, authority: Pair, client: Pair, password: str, key_password: str
    ) -> Path:
        """The file that SERIATIM_KAFKA_CONFIG names."""
        secrets = self.folder / "secrets"
        secrets.mkdir()
        for name, text in (("ca.pem", authority.public), ("client.pem", client.public)):
            (secrets / name).write_text(text)
        (secrets / "client.key").write_text(client.secret(key_password))
        path = secrets / "client.properties"
        path.write_text(
            "security.protocol=SASL_SSL\nsasl.mechanism=PLAIN\nsasl.username=client\n"
            f"sasl.password={password}\nssl.key.password={key_password}\n"
            f"ssl.ca.location={secrets / 'ca.pem'}\nssl.certificate.location={secrets / 'client.pem'}\n"
            f"ssl.key.location={secrets / 'client.key'}\n"
        )
        path.chmod(0o600)
        return path

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = self.program.command(
            self.folder, "kafka.Kafka", str(self.folder / "server.properties")
        )
        with (self.folder / "broker.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        until = time.monotonic() + START_SECONDS
        while embedded.cluster_id(self.plain) is None:
            assert self.process.poll() is None, (self.folder / "broker.log").read_text()[-3000:]
            assert time.monotonic() < until, "the broker does not answer"

    def stop(self) -> None:
        """End it; its data stays."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(300)
            self.process = None


def _one_line(text: str) -> str:
    r"""A text of many lines as a value of a properties file."""
    return text.strip().replace("\n", "\\n")
