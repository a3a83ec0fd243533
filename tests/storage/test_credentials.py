"""Where the credentials of a bucket come from: keys, web identity, a container, the role of a machine.

One server plays all sides on 127.0.0.1: it hands out credentials, each time other ones, and it is the
bucket, which notes who asks. What is asked by our store and by Delta's library is compared.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from obstore.store import S3Store

from seriatim.storage.object_store import (
    OPTION_NAMES,
    ObjectStore,
    open_object_store,
    store_options,
)

CANARY = "canary0secret0of0a0role"
LASTING_SECONDS = 3600
SOON_SECONDS = 60
"""A credential that lasts so long is fetched anew with the next request."""
STS_ANSWER = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId>
<SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}</SessionToken>
<Expiration>{expiration}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""
EMPTY_LISTING = b"""<ListBucketResult><Name>bucket</Name><Prefix></Prefix><KeyCount>0</KeyCount>
<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"""


OPTION_VALUES = {"aws_checksum_algorithm": "sha256", "aws_server_side_encryption": "AES256"}


class BucketRequest(NamedTuple):
    """What the bucket saw of a request."""

    key_id: str
    token: str
    sha256: str


class _CloudServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CloudHandler)
        self.lifetime_seconds = LASTING_SECONDS
        self.issued = 0
        self.credential_paths: list[str] = []
        self.identity_proofs: list[str] = []
        self.bucket_requests: list[BucketRequest] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _CloudHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _CloudServer

    def handle_request(self) -> None:
        """A request to the bucket, or one for credentials."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode("latin-1")
        if self.path.startswith("/bucket"):
            self._answer_as_bucket()
            return
        self.server.credential_paths.append(self.path)
        if self.path == "/latest/api/token":
            self._answer(200, b"machine-token")
        elif self.path.endswith("security-credentials/"):
            self._answer(200, b"role")
        else:
            self._issue_credentials(body)

    def _issue_credentials(self, body: str) -> None:
        server = self.server
        server.issued += 1
        header_names = ("Authorization", "X-aws-ec2-metadata-token")
        proofs = [self.headers.get(name) or "" for name in header_names]
        server.identity_proofs.append(" ".join([*proofs, self.path, body]))
        end = datetime.now(UTC) + timedelta(seconds=server.lifetime_seconds)
        expiration = end.strftime("%Y-%m-%dT%H:%M:%SZ")
        key, token = f"key{server.issued}", f"token{server.issued}"
        if "AssumeRoleWithWebIdentity" in self.path + body:
            text = STS_ANSWER.format(key=key, secret=CANARY, token=token, expiration=expiration)
        else:
            values = {"AccessKeyId": key, "SecretAccessKey": CANARY, "Token": token}
            text = json.dumps({"Code": "Success", **values, "Expiration": expiration})
        self._answer(200, text.encode())

    def _answer_as_bucket(self) -> None:
        authorization = self.headers.get("Authorization") or ""
        key_id = authorization.partition("Credential=")[2].partition("/")[0]
        token = self.headers.get("x-amz-security-token") or ""
        sha256 = self.headers.get("x-amz-checksum-sha256") or ""
        self.server.bucket_requests.append(BucketRequest(key_id, token, sha256))
        if "list-type=2" in self.path:
            self._answer(200, EMPTY_LISTING)
        else:
            self._answer(200 if self.command == "PUT" else 404, b"")

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


def _serve(server: _CloudServer) -> Iterator[_CloudServer]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def cloud() -> Iterator[_CloudServer]:
    """A bucket, and who hands out credentials for it."""
    yield from _serve(_CloudServer())


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, cloud: _CloudServer) -> Callable[..., None]:
    """Sets the variables of this process; nothing of its own is left."""

    def use(variables: dict[str, str]) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{cloud.address}")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return use


def _pod_variables(cloud: _CloudServer, folder: Path) -> dict[str, str]:
    (folder / "token").write_text("pod-token")
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{cloud.address}/pod",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(folder / "token"),
    }


def _machine_variables(cloud: _CloudServer, _: Path) -> dict[str, str]:
    return {
        "AWS_METADATA_ENDPOINT": f"http://{cloud.address}",
        "SERIATIM_STORE_CREDENTIALS": "instance",
    }


def _open_fresh_store() -> ObjectStore:
    """A store as a new process opens it."""
    store = open_object_store(f"s3://bucket/{time.monotonic_ns()}")
    assert isinstance(store, ObjectStore)
    return store


@pytest.mark.parametrize(
    ("variables", "proof"),
    [(_pod_variables, "pod-token"), (_machine_variables, "machine-token")],
)
def test_a_role_opens_the_bucket(
    variables: Callable[[_CloudServer, Path], dict[str, str]],
    proof: str,
    cloud: _CloudServer,
    environment: Callable[..., None],
    tmp_path: Path,
) -> None:
    """Of a pod or a machine, for our own requests and for those of Delta's library."""
    environment(variables(cloud, tmp_path))
    store = _open_fresh_store()
    store.create("x", b"1")
    assert cloud.bucket_requests[-1][:2] == ("key1", "token1")
    with pytest.raises(TableNotFoundError):
        DeltaTable(f"{store.url}/records", storage_options=store.delta_options())
    assert cloud.bucket_requests[-1][:2] == (f"key{cloud.issued}", f"token{cloud.issued}")
    assert all(proof in shown for shown in cloud.identity_proofs)


def test_credentials_are_renewed_before_they_expire(
    cloud: _CloudServer, environment: Callable[..., None], tmp_path: Path
) -> None:
    """A store that lives long does not go on with what it began with."""
    cloud.lifetime_seconds = SOON_SECONDS
    environment(_pod_variables(cloud, tmp_path))
    store = _open_fresh_store()
    store.create("x", b"1")
    # A credential that was fetched a moment ago is not fetched again at once.
    while cloud.issued == 1:
        time.sleep(0.05)
        store.replace("y", b"1")
    assert cloud.bucket_requests[0].key_id == "key1"
    assert cloud.bucket_requests[-1].key_id == f"key{cloud.issued}"


def test_web_identity_opens_the_bucket(
    cloud: _CloudServer, tmp_path: Path, tls_files: tuple[Path, Path]
) -> None:
    """The token of a service account is shown to STS, which is asked through TLS alone."""
    certificate, key = tls_files
    server = _CloudServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    (tmp_path / "token").write_text("service-account-token")
    variables = {
        "AWS_ENDPOINT_URL": f"http://{cloud.address}",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/seriatim",
        "AWS_ENDPOINT_URL_STS": f"https://{server.address}",
    }
    for sts in _serve(server):
        options = {**store_options(variables), "allow_invalid_certificates": "true"}
        store = ObjectStore("s3://bucket/web", options)
        store.create("x", b"1")
        assert cloud.bucket_requests[-1][:2] == ("key1", "token1")
        assert "service-account-token" in sts.identity_proofs[0]
        assert "role%2Fseriatim" in sts.identity_proofs[0]


@pytest.fixture
def tls_files(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that nobody signed but itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(now).not_valid_after(now + timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (tmp_path / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    key_format = serialization.PrivateFormat.PKCS8
    key_bytes = key.private_bytes(pem, key_format, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(key_bytes)
    return tmp_path / "certificate.pem", tmp_path / "key.pem"


def test_every_put_has_its_sha256(
    cloud: _CloudServer, environment: Callable[..., None], tmp_path: Path
) -> None:
    """The server proves with it what arrived. The file of options can switch it off for a server that
    does not take it.
    """
    environment({"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": CANARY})
    content = b"some content"
    expected = base64.b64encode(hashlib.sha256(content).digest()).decode()
    store = _open_fresh_store()
    store.create("x", content)
    assert cloud.bucket_requests[-1].sha256 == expected
    (tmp_path / "options").write_text("checksum_algorithm=none")
    (tmp_path / "options").chmod(0o600)
    environment({"SERIATIM_STORE_CONFIG": str(tmp_path / "options")})
    _open_fresh_store().create("x", content)
    assert cloud.bucket_requests[-1].sha256 == ""


@pytest.mark.parametrize("name", sorted(OPTION_NAMES))
def test_the_library_knows_every_option(name: str) -> None:
    """An option that we let through and that it does not know would end every command."""
    value = OPTION_VALUES.get(name, "true")
    keys = {"aws_access_key_id": "me", "aws_secret_access_key": CANARY}
    S3Store("bucket", config={**keys, name: value})  # type: ignore[misc]
