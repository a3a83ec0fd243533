"""What is particular to a store in a bucket: its options, its errors, and answers that get lost."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from obstore.exceptions import BaseError

from seriatim.engine.files import File, finish_files
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.session import FoldOutput, QuarantinedMessage
from seriatim.errors import ConfigError, PlatformError, SeriatimError
from seriatim.storage import object_store, parquet
from seriatim.storage.delta_table import MarkedTable
from seriatim.storage.object_store import ObjectStore, store_options
from seriatim.storage.record_files import ParquetRecords
from seriatim.storage.store import AlreadyThereError, open_store
from tests.memory_use import peak_memory
from tests.s3_proxy import S3Proxy

CANARY = "canary0secret0of0nobody"
KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": CANARY}
SHORT_SECONDS = 1


@pytest.fixture
def bucket(s3_url: str) -> ObjectStore:
    """A store in a bucket of the real server."""
    store = open_store(s3_url)
    assert isinstance(store, ObjectStore)
    return store


def _impatient_store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store with short time limits."""
    monkeypatch.setattr(object_store, "RETRY_SECONDS", SHORT_SECONDS)
    options = store_options({**KEYS, "AWS_ENDPOINT_URL": endpoint})
    options["timeout"] = f"{SHORT_SECONDS}s"
    object_store._open_client.cache_clear()
    return ObjectStore("s3://bucket/prefix", options)


def _find_table(store: ObjectStore) -> object:
    return MarkedTable(store, "records").load()


def _load_table(store: ObjectStore) -> object:
    return MarkedTable(store, "records").load_with_library()


CALLS: list[Callable[[ObjectStore], object]] = [
    lambda store: store.read("x"),
    lambda store: store.create("x", b"1"),
    lambda store: store.replace("x", b"1"),
    lambda store: list(store.keys("")),
    lambda store: store.folders(""),
    lambda store: store.open("x"),
    lambda store: list(store.blocks("x")),
    _find_table,
    _load_table,
]
"""Each kind of request, and one of Delta's library."""


def _raised(store: ObjectStore, call: Callable[[ObjectStore], object]) -> SeriatimError:
    with pytest.raises(SeriatimError) as raised:
        call(store)
    error = raised.value
    assert error.next
    assert CANARY not in error.render()
    return error


def test_options_are_those_of_the_environment() -> None:
    """Conditional puts are always on; plain HTTP is allowed where the endpoint has it."""
    options = store_options(
        {**KEYS, "AWS_ENDPOINT_URL": "http://localhost:1", "AWS_CONDITIONAL_PUT": "disabled"}
    )
    assert options["aws_secret_access_key"] == CANARY
    assert options["aws_conditional_put"] == "etag"
    assert options["aws_region"] == "us-east-1"
    assert options["allow_http"] == "true"
    secure = store_options({**KEYS, "AWS_DEFAULT_REGION": "eu-west-1", "AWS_CA_BUNDLE": "/x"})
    assert secure["aws_region"] == "eu-west-1"
    assert "allow_http" not in secure


def test_a_file_of_options_wins(tmp_path: Path) -> None:
    """It has object_store's names, with or without aws_."""
    file = tmp_path / "store"
    file.write_text(f"# ours\nsecret_access_key = {CANARY}\nAWS_REGION=eu-west-3\n")
    file.chmod(0o600)
    environ = {**KEYS, "AWS_SECRET_ACCESS_KEY": "other", "SERIATIM_STORE_CONFIG": str(file)}
    options = store_options(environ)
    assert options["aws_secret_access_key"] == CANARY
    assert options["aws_region"] == "eu-west-3"


@pytest.mark.parametrize(
    ("mode", "text", "expected"),
    [
        (0o640, "", "can be read by others"),
        (0o600, f"secret={CANARY}", "line 1 is no setting"),
        (0o600, f"\n{CANARY}", "line 2 is no setting"),
    ],
)
def test_a_bad_file_of_options_is_refused(
    tmp_path: Path, mode: int, text: str, expected: str
) -> None:
    """The error says what is wrong, and never shows a line."""
    file = tmp_path / "store"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=expected) as raised:
        store_options({**KEYS, "SERIATIM_STORE_CONFIG": str(file)})
    assert CANARY not in raised.value.render()


def test_a_missing_file_of_options_is_refused() -> None:
    """The variable that names it is named."""
    with pytest.raises(ConfigError, match="SERIATIM_STORE_CONFIG: /none: No such file"):
        store_options({"SERIATIM_STORE_CONFIG": "/none"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "there are no credentials"),
        ({"AWS_ACCESS_KEY_ID": "me"}, "incomplete"),
        ({"AWS_SECRET_ACCESS_KEY": CANARY}, "incomplete"),
        ({"SERIATIM_STORE_CREDENTIALS": "magic"}, "is not known"),
    ],
)
def test_missing_credentials_are_refused(environ: dict[str, str], expected: str) -> None:
    """Nothing asks the metadata address of AWS for them by itself."""
    with pytest.raises(ConfigError, match=expected):
        store_options(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"SERIATIM_STORE_CREDENTIALS": "instance"},
        {"AWS_EXECUTION_ENV": "AWS_ECS_FARGATE"},
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn:aws:iam::1:role/r"},
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/credentials"},
    ],
)
def test_other_sources_of_credentials_are_taken(environ: dict[str, str]) -> None:
    """The role of a machine only if somebody says so."""
    assert "aws_access_key_id" not in store_options(environ)


def test_a_store_crosses_processes_without_its_secret(
    bucket: ObjectStore, s3_variables: dict[str, str]
) -> None:
    """A pickle has the address alone; the other process has credentials of its own."""
    bucket.create("x", b"1")
    content = pickle.dumps(bucket)
    assert s3_variables["AWS_SECRET_ACCESS_KEY"].encode() not in content
    assert s3_variables["AWS_SECRET_ACCESS_KEY"] not in repr(bucket)
    assert pickle.loads(content).read("x") == b"1"


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_secret_is_refused(
    call: Callable[[ObjectStore], object], s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a matter of configuration, whoever meets it."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    store = open_store(s3_url)
    assert isinstance(store, ObjectStore)
    error = _raised(store, call)
    assert isinstance(error, ConfigError)
    assert "does not accept the credentials" in error.message


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_bucket_is_named(call: Callable[[ObjectStore], object], s3_url: str) -> None:
    """No bucket is not an empty one."""
    store = open_store(s3_url.replace("s3://seriatim/", "s3://no-such-bucket/"))
    assert isinstance(store, ObjectStore)
    error = _raised(store, call)
    assert isinstance(error, ConfigError)
    assert "s3://no-such-bucket" in error.message
    assert "there is no such bucket" in error.message


@pytest.mark.parametrize("call", CALLS)
def test_a_dead_endpoint_is_platform_trouble(
    call: Callable[[ObjectStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens there."""
    error = _raised(_impatient_store("http://127.0.0.1:1", monkeypatch), call)
    assert isinstance(error, PlatformError)
    assert "cannot be reached" in error.message
    assert error.fields["endpoint"] == "http://127.0.0.1:1"


@pytest.mark.parametrize("call", [CALLS[0], CALLS[3], _load_table])
def test_a_silent_endpoint_is_given_up(
    call: Callable[[ObjectStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections are accepted, and nothing is ever said."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(20)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        error = _raised(_impatient_store(endpoint, monkeypatch), call)
    assert isinstance(error, PlatformError)
    assert error.fields["cause"] == "no answer in time"


class _Overwriting(BaseHTTPRequestHandler):
    """A server that takes every put, whatever its condition."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_HEAD = do_POST = do_PUT  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


def test_a_store_that_overwrites_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are servers that ignore the condition: two runs at once would lose commits on them."""
    server = HTTPServer(("127.0.0.1", 0), _Overwriting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        store = _impatient_store(f"http://127.0.0.1:{server.server_address[1]}", monkeypatch)
        monkeypatch.setattr(store, "delete", list)
        with pytest.raises(ConfigError, match="overwrites an object"):
            store.refuse_if_unsafe()
    finally:
        server.shutdown()
        server.server_close()


def test_a_good_store_passes_the_probe_and_stays_clean(bucket: ObjectStore) -> None:
    """The probe leaves nothing."""
    bucket.refuse_if_unsafe()
    assert list(bucket.keys("")) == []


def test_a_lost_answer_is_no_loss(
    s3_url: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put is repeated and meets its own object; another one's object is still refused."""
    left = {"a": 1, "b": 1, "c": 1}

    def lose_first_answer(method: str, path: str) -> str:
        key = path.rpartition("/")[2]
        if method == "PUT" and left.get(key):
            left[key] -= 1
            return "lost"
        return ""

    with S3Proxy(s3_variables["AWS_ENDPOINT_URL"], lose_first_answer) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(s3_url)
        store.create("a", b"ours")
        sink = store.writer("b")
        sink.write(b"ours, large")
        sink.finish()
        with pytest.raises(AlreadyThereError):
            store.create("a", b"theirs")
        store.replace("c", b"note")
        assert [store.read(key) for key in "abc"] == [b"ours", b"ours, large", b"note"]
        assert left == {"a": 0, "b": 0, "c": 0}


def test_trouble_of_the_server_is_waited_out(
    s3_url: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some answers of 503 and some connections that end cost time alone."""
    seen = {"count": 0}

    def every_second(_: str, __: str) -> str:
        seen["count"] += 1
        return ("503", "", "reset", "")[seen["count"] % 4]

    with S3Proxy(s3_variables["AWS_ENDPOINT_URL"], every_second) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(s3_url)
        for number in range(10):
            store.create(f"n/{number}", b"%d" % number)
        assert [store.read(key) for key, _ in store.keys("n/")] == [b"%d" % n for n in range(10)]
        assert store.delete([f"n/{number}" for number in range(10)])


def test_a_small_parquet_file_is_one_request(
    s3_url: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size, footer and pages come together; of a large file only what is asked for."""
    with S3Proxy(s3_variables["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(s3_url)
        columns = {name: pa.array(os.urandom(400_000)[:400_000]) for name in "ab"}
        for name, rows in (("small", 1_000), ("large", 400_000)):
            sink = store.writer(name)
            pq.write_table(pa.table(columns).slice(0, rows), sink, compression="none")
            sink.finish()
        proxy.requests.clear()
        with store.open("small") as file:
            assert pq.ParquetFile(file).read().num_rows == 1_000
        assert proxy.count() == 1
        with store.open("large") as file:
            assert pq.ParquetFile(file).read(columns=["a"]).num_rows == 400_000
        assert proxy.count() == 3


def _write_records(records: ParquetRecords, values: list[bytes]) -> list[File]:
    writer = records.record_writer(Partition("in-a", 0), "id", "0-0-a")
    for offset, value in enumerate(values):
        output = FoldOutput([0], [0], [None], ["s"], [(value,)])
        writer.write(MessageBatch(offset, [0], [b"s"], [value]), output)
    return list(finish_files(writer))


def _write_quarantine(records: ParquetRecords, values: list[bytes]) -> list[File]:
    writer = records.quarantine_writer(Partition("in-a", 0), "id", "0-0-a")
    for offset, value in enumerate(values):
        batch = MessageBatch(offset, [0], [b"s"], [value])
        writer.write(batch, [QuarantinedMessage(0, "s", "poison", "")])
    return list(finish_files(writer))


@pytest.mark.parametrize("write", [_write_records, _write_quarantine])
def test_a_task_has_one_file_in_memory(
    write: Callable[[ParquetRecords, list[bytes]], list[File]],
    bucket: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file is one put, so it is gathered in memory. Twenty files that follow each other take as much
    as one: the first of them is published before the second grows.
    """
    file_bytes = 4 << 20
    monkeypatch.setattr(parquet, "BUFFERED_BYTES_MAX", file_bytes // 4)

    def open_records(url: str) -> ParquetRecords:
        store = open_store(url)
        return ParquetRecords(store, {"raw": "binary"}, "none", (), file_bytes=file_bytes)

    values = [os.urandom(100_000) for _ in range(20 * file_bytes // 100_000)]
    # What a process takes once, for its libraries, is no part of it.
    write(open_records(f"{bucket.url}/first"), values[: len(values) // 10])
    records = open_records(bucket.url)
    files: list[File] = []
    used = peak_memory(lambda: files.extend(write(records, values)))
    assert used < 8 * file_bytes
    assert sum(file.size_bytes for file in files) > 18 * file_bytes


def test_the_embedded_server_takes_several_files_of_the_usual_size_at_once(
    bucket: ObjectStore,
) -> None:
    """It has each of them in memory twice, and died of two that came at the same time."""
    content = bytes(parquet.DEFAULT_FILE_BYTES)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda key: bucket.create(key, content), "abcd"))
    assert bucket.sizes(list("abcd")) == [len(content)] * 4
    bucket.delete("abcd")


def test_a_large_object_is_transferred_once(
    s3_url: str,
    s3_variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Then the server only says that it is the same. A copy on this host that is damaged does not
    count, and others are deleted when there are too many.
    """
    monkeypatch.setenv("SERIATIM_HOME", str(tmp_path))
    contents = [bytes([number]) * object_store.CACHED_BYTES_MIN for number in range(3)]
    digests = [xxhash.xxh3_128_hexdigest(content) for content in contents]
    with S3Proxy(s3_variables["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(s3_url)
        for digest, content in zip(digests, contents, strict=True):
            store.create(digest, content)
        proxy.statuses.clear()
        for _ in range(2):
            assert store.read_again(digests[0], digests[0]) == contents[0]
        assert proxy.statuses == [200, 304]
        assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
        copy = tmp_path / "cache" / "state" / digests[0]
        copy.write_bytes(copy.read_bytes()[:-1] + b"x")
        assert store.read_again(digests[0], digests[0]) == contents[0]
        assert proxy.statuses == [200, 304, 200]
        monkeypatch.setattr(object_store, "CACHE_BYTES_MAX", 2 * len(contents[0]))
        for digest in digests[1:]:
            store.read_again(digest, digest)
        assert [path.name for path in copy.parent.iterdir()] == [digests[2]]


def test_a_damaged_tag_is_no_object_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The digest is that of the content alone, and no request can have such a tag."""
    monkeypatch.setenv("SERIATIM_HOME", str(tmp_path))
    content = b"content"
    digest = xxhash.xxh3_128_hexdigest(content)
    object_store._cache_object(digest, '"tag"', content)
    assert object_store._cached_object(digest) == ('"tag"', content)
    kept = tmp_path / "cache" / "state" / digest
    for damage in (b"\xff", b"\x00"):
        kept.write_bytes(damage + kept.read_bytes()[1:])
        assert object_store._cached_object(digest) == ("", b"")


def test_trouble_while_parquet_is_read_is_not_damage(
    s3_url: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow passes the error on as it is, so that nobody repairs a file because a network was down."""
    with S3Proxy(s3_variables["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setattr(object_store, "RETRY_SECONDS", SHORT_SECONDS)
        store = open_store(s3_url)
        sink = store.writer("large")
        table = pa.table({"a": pa.array(os.urandom(600_000)), "b": pa.array(os.urandom(600_000))})
        pq.write_table(table, sink, compression="none")
        sink.finish()
        with store.open("large") as file:
            parquet = pq.ParquetFile(file)
            proxy.trouble = lambda _, __: "503"
            with pytest.raises(PlatformError, match="the store answers 503"):
                parquet.read()


def test_a_named_store_has_its_own_options(tmp_path: Path) -> None:
    """From its section of the connections file, and from variables of its name, which win. Those of
    the other store would be mixed in by the library, which reads them by itself.
    """
    connections = tmp_path / "connections.toml"
    connections.write_text(
        f'[store.lake]\naccess_key_id = "me"\nsecret_access_key = "{CANARY}"\nregion = "here"\n'
    )
    connections.chmod(0o600)
    environ = {
        "SERIATIM_CONNECTIONS": str(connections),
        "SERIATIM_STORE_LAKE_REGION": "there",
        "AWS_REGION": "elsewhere",
        "AWS_ACCESS_KEY_ID": "other",
    }
    options = store_options(environ, "s3", "lake")
    assert options["aws_access_key_id"] == "me"
    assert options["aws_secret_access_key"] == CANARY
    assert options["aws_region"] == "there"
    for name in ("AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        with pytest.raises(ConfigError, match=f"would change it: {name}") as raised:
            store_options({**environ, name: CANARY}, "s3", "lake")
        assert CANARY not in raised.value.render()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("[store.other]\nregion = 'x'", 0o600, "there is no store named 'lake'"),
        (f"[store.lake]\nsecret = '{CANARY}'", 0o600, "secret is no option of a store"),
        (f"[store.lake]\naccess_key_id = '{CANARY}'", 0o600, "incomplete"),
        (f"[store.lake]\nregion = '{CANARY}'", 0o600, "no credentials"),
        (f"[store.lake]\nsecret_access_key = '{CANARY}'", 0o644, "can be read by others"),
        (f"[store.lake]\nsecret_access_key = {CANARY}", 0o600, "is not TOML"),
        ("[store.lake]\nregion = 5", 0o600, "values other than texts"),
    ],
)
def test_a_section_that_is_wrong_is_refused(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    """The error says what to do, and has no value of the file."""
    connections = tmp_path / "connections.toml"
    connections.write_text(text)
    connections.chmod(mode)
    with pytest.raises(ConfigError, match=message) as raised:
        store_options({"SERIATIM_CONNECTIONS": str(connections)}, "s3", "lake")
    assert raised.value.next
    assert CANARY not in raised.value.render()


def test_advice_names_the_settings_of_the_store(tmp_path: Path) -> None:
    """Variables for a store without a name, and where the named one has its credentials. Keys that are
    in another place where people have them are spoken of.
    """
    with pytest.raises(ConfigError) as unnamed:
        store_options({})
    for text in ("AWS_SECRET_ACCESS_KEY", "~/.aws", "seriatim s3 env"):
        assert text in unnamed.value.next
    connections = tmp_path / "connections.toml"
    connections.write_text('[store.lake]\nregion = "eu-west-1"\n')
    connections.chmod(0o600)
    with pytest.raises(ConfigError) as named:
        store_options({"SERIATIM_CONNECTIONS": str(connections)}, store="lake")
    for text in ("[store.lake]", "SERIATIM_STORE_LAKE_", 'credentials = "instance"'):
        assert text in named.value.next
    assert "AWS_" not in named.value.next
    wrong = ObjectStore("lake+s3://bucket/x", store_options(KEYS)).explain_error(
        BaseError("status code: 403 <Code>InvalidAccessKeyId</Code>")
    )
    assert wrong is not None
    assert "[store.lake]" in wrong.next


def test_a_named_store_goes_to_other_processes_by_its_name(
    s3_url: str, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address has the name, so that a worker takes the same section; a pickle has no secret."""
    for name, value in s3_variables.items():
        monkeypatch.delenv(name, raising=False)
        option = name.removeprefix("AWS_")
        if option != "ALLOW_HTTP":
            monkeypatch.setenv(f"SERIATIM_STORE_LAKE_{option}", value)
    store = open_store(f"lake+{s3_url}")
    assert store.url == s3_url
    assert store.address == f"lake+{s3_url}"
    pickled = pickle.dumps(store)
    assert s3_variables["AWS_SECRET_ACCESS_KEY"].encode() not in pickled
    pickle.loads(pickled).create("x", b"1")
    assert store.read("x") == b"1"
    with pytest.raises(ConfigError, match="no credentials"):
        open_store(s3_url)


@pytest.mark.parametrize(
    ("address", "variable"),
    [
        ("gs://bucket/prefix", ("GOOGLE_SKIP_SIGNATURE", "true")),
        (
            "abfss://box@account.dfs.core.windows.net/prefix",
            ("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0"),
        ),
    ],
)
def test_other_object_stores_are_opened_by_the_same_library(
    address: str, variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked when a store is opened. Without options it is refused."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="there are no credentials for"):
        open_store(address)
    monkeypatch.setenv(*variable)
    assert open_store(address).url == address
