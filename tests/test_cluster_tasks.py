"""What is sent to workers on other hosts: no secret, each task's own work, the user's files."""

from __future__ import annotations

import os
import pickle
import pickletools
import socket
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.cloudpickle import dumps

from seriatim import config, context, spark_settings, stream_files
from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import RowKeySpec
from seriatim.engine.task import PartitionWork
from seriatim.errors import ConfigError
from seriatim.kafka.spark_reader import _RangeMapper
from seriatim.kafka.task_reader import KafkaRangeReader
from seriatim.operations.compact import FileCopier
from seriatim.operations.prove.check import PartitionCheck
from seriatim.operations.prove.great_expectations_suites import GreatExpectations
from seriatim.operations.prove.partition_rules import PartitionProver
from seriatim.operations.prove.suite import Suite
from seriatim.operations.repair.refold import TableJoiner
from seriatim.ports import DEFAULT_READ_OPTIONS
from seriatim.spark_workers import SparkWorkers, _WorkMapper
from seriatim.storage.audit import FileToRead, read_committed_file
from seriatim.storage.current_table import PartWriter
from seriatim.storage.join import FileToCheck, ParquetJoiner, damage_of_work
from seriatim.storage.record_files import ParquetRewriter, record_schema
from seriatim.storage.record_rows import RowMerger
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import open_store
from seriatim.stream_files import StreamFile
from seriatim.workers import LocalWorkers

PASSWORD = "canary-4711"
STREAM = """
topics = "t-[a-z]+"
machine = "table"
{more}
[table]
key = ["id"]
columns = {{ id = "string" }}
[output]
path = "{path}"
"""


class FakeBroadcast:
    """Sent beside the tasks, so only its number is in them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return FakeBroadcast, (None,)


class FakeSession:
    """A session whose cluster is nowhere."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.archives: list[str] = []

    def broadcast(self, value: Any) -> FakeBroadcast:
        """Spark's way to send a value once to each executor."""
        return FakeBroadcast(value)

    def addArchive(self, path: str) -> None:  # noqa: N802  # Spark's name
        """Spark's way to send files."""
        self.archives.append(path)


def _file(folder: Path, more: str = "", path: str = "lake/s") -> StreamFile:
    streams = folder / "streams"
    streams.mkdir(exist_ok=True)
    (streams / "s.toml").write_text(STREAM.format(more=more, path=path))
    return stream_files.load_stream("s", streams)


def _work(number: int) -> PartitionWork:
    return PartitionWork(
        partition=Partition("t-a", number), start=0, end=10, epoch=0, topic_id="x", attempt="a"
    )


@pytest.fixture
def settings(tmp_path: Path) -> config.Settings:
    """Settings with a file of Kafka settings that has a password."""
    path = tmp_path / "kafka.conf"
    path.write_text(f"security.protocol=SASL_SSL\nsasl.username=me\nsasl.password={PASSWORD}\n")
    path.chmod(0o600)
    return config.load_settings(
        {
            "HOME": str(tmp_path),
            "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": "k:9092",
            "SERIATIM_KAFKA_CONFIG": str(path),
            "SERIATIM_SPARK_MASTER": "spark://m:7077",
        },
        tmp_path,
    )


def test_no_password_is_in_a_task(tmp_path: Path, settings: config.Settings) -> None:
    """The driver knows the password, and what it serializes for a task does not have it."""
    file = _file(tmp_path)
    spark = context.LazySpark(file, settings, print)
    spark.spark = FakeSession()
    spark.spark.master = "spark://m:7077"
    assert context.kafka_client(settings)["sasl.password"] == PASSWORD
    task = spark.make_task({Partition("t-a", 0): _work(0)})
    reader = KafkaRangeReader(context.kafka_access(settings))
    mapper = _RangeMapper(task, reader, [], DEFAULT_READ_OPTIONS)
    content = dumps(mapper)
    texts = texts_of(content)
    assert any("kafka.conf" in text for text in texts)
    assert [text for text in texts if PASSWORD in text] == []


def texts_of(content: bytes) -> list[str]:
    """Every text in something serialized, also in what was serialized within it."""
    texts: list[str] = []
    for _, argument, _ in pickletools.genops(content):
        if isinstance(argument, str):
            texts.append(argument)
        elif isinstance(argument, bytes) and argument[:1] == pickle.PROTO:
            texts += texts_of(argument)
        elif isinstance(argument, bytes):
            texts.append(argument.decode("latin-1"))
    return texts


def test_no_secret_of_a_store_is_in_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions and works of check, verify, publish, compact, repair and fold name the store by its
    address, however its secrets are given.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"id-{PASSWORD}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PASSWORD)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    address = "s3://bucket/out"
    store = open_store(address)
    assert PASSWORD in repr(vars(store))
    schema = pa.schema([("id", pa.string())])
    key = RowKeySpec(key=("id",), columns=("id",))
    file = File(path="records/t-a/0/x.parquet", size_bytes=1, rows=1, digest="0")
    partition = Partition("t-a", 0)
    row_merger = RowMerger(store, "s", record_schema({"id": "string"}), key)
    prover = PartitionProver(RecordScan(store), StateFiles(store, "s"))
    pieces: list[tuple[Any, Any]] = [
        (PartitionCheck(prover, GreatExpectations(store), Suite("s")), _work(0)),
        (read_committed_file, FileToRead(store.address, file)),
        (damage_of_work, FileToCheck(store.address, file, check_digest=True)),
        (PartWriter(row_merger, "zstd", 10), partition),
        (FileCopier(ParquetRewriter(store, "s"), StateFiles(store, "s")), file),
        (TableJoiner(ParquetJoiner(store, "s")), file),
        (context.SparkFoldTask(_file(tmp_path), context.WorkTable({})), schema),
    ]
    for function, work in pieces:
        for content in (dumps(_WorkMapper(function, "files")), dumps(work)):
            texts = texts_of(content)
            assert texts
            assert [text for text in texts if PASSWORD in text] == []


def test_a_named_cluster_is_sent_by_its_name(
    tmp_path: Path, settings: config.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings are read by each process from its own environment."""
    monkeypatch.setenv("SERIATIM_KAFKA_EAST_BOOTSTRAP_SERVERS", "east:9092")
    monkeypatch.setenv("SERIATIM_KAFKA_EAST_SASL_PASSWORD", PASSWORD)
    file = _file(tmp_path, 'kafka = "east"')
    access = context.kafka_access(settings, "east")
    assert access()["sasl.password"] == PASSWORD
    assert PASSWORD.encode() not in dumps(
        context.SparkFoldTask(file, context.WorkTable({}), access)
    )


def test_no_secret_of_a_named_store_or_registry_is_in_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from variables nor from the file of connections: a task has the names, and its worker
    looks them up.
    """
    connections = tmp_path / "connections.toml"
    connections.write_text(
        f'[registry.west]\nurl = "http://127.0.0.1:9"\nuser = "me"\npassword = "{PASSWORD}"\n'
    )
    connections.chmod(0o600)
    monkeypatch.setenv("SERIATIM_CONNECTIONS", str(connections))
    monkeypatch.setenv("SERIATIM_STORE_LAKE_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("SERIATIM_STORE_LAKE_SECRET_ACCESS_KEY", PASSWORD)
    monkeypatch.setenv("SERIATIM_STORE_LAKE_REGION", "here")
    more = 'decoder = "avro"\nregistry = "west"\nstore = "lake"'
    file = _file(tmp_path, more, path="s3://bucket/out")
    assert config.named_connection("registry", "west")["password"] == PASSWORD
    store = open_store(file.stream.output.path)
    assert PASSWORD in repr(vars(store))
    prover = PartitionProver(RecordScan(store), StateFiles(store, "s"))
    functions: list[Any] = [
        context.SparkFoldTask(file, context.WorkTable({})),
        PartitionCheck(prover, GreatExpectations(store), Suite("s")),
        FileCopier(ParquetRewriter(store, "s"), StateFiles(store, "s")),
    ]
    for function in functions:
        texts = texts_of(dumps(_WorkMapper(function, "files")))
        assert any("lake+s3" in text for text in texts)
        assert [text for text in texts if PASSWORD in text] == []


def test_a_worker_reads_the_file_that_its_own_environment_names(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host the file may be elsewhere. If it is nowhere, that is configuration."""
    access = context.KafkaAccess(
        bootstrap_servers="k:9092", config_path="/nowhere/kafka.conf", is_read_elsewhere=True
    )
    with pytest.raises(ConfigError, match=r"/nowhere/kafka\.conf"):
        access()
    monkeypatch.setenv("SERIATIM_KAFKA_CONFIG", str(settings.kafka_config))
    assert access()["sasl.username"] == "me"


def test_a_task_does_not_grow_with_the_partitions(tmp_path: Path) -> None:
    """The works are sent beside the tasks, and a task decodes its own alone."""
    file = _file(tmp_path)
    sizes = []
    for count in (1, 1000):
        works = {Partition("t-a", number): _work(number) for number in range(count)}
        table = context.WorkTable.of_works(works, FakeSession())
        assert list(table.of(Partition("t-a", count - 1)).values()) == [_work(count - 1)]
        assert table.of(Partition("t-b", 0)) == {}
        sizes.append(len(dumps(context.SparkFoldTask(file, table))))
    assert sizes[0] == sizes[1]


def test_the_folder_of_the_stream_is_sent(tmp_path: Path) -> None:
    """Modules, packages and schemas; no caches, no data and no settings. The same files have the same
    name.
    """
    file = _file(tmp_path, 'decoder = "avro"\n[avro]\nreader_schema = "order.schema"')
    folder = Path(file.folder)
    (folder / "lib" / "__pycache__").mkdir(parents=True)
    (folder / "lib" / "__pycache__" / "x.pyc").write_bytes(b"")
    (folder / "lib" / "__init__.py").write_text("")
    (folder / "lib" / ".env").write_text(PASSWORD)
    (folder / "machine.py").write_text("")
    (folder / "order.schema").write_text("{}")
    (folder / "connections.toml").write_text(PASSWORD)
    (folder / "lake").mkdir()
    (folder / "lake" / "data.py").write_text("")
    session = FakeSession()
    name = context.ship_stream_folder(session, file, is_connect=False)
    assert context.ship_stream_folder(session, file, is_connect=False) == name
    path, _, known_as = session.archives[0].partition("#")
    assert known_as == name
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["lib/__init__.py", "machine.py", "order.schema"]


def test_a_schema_elsewhere_is_not_sent(tmp_path: Path) -> None:
    """Another folder may have anything, and an archive has only paths within itself."""
    (tmp_path / "order.schema").write_text("{}")
    for name in ("../order.schema", str(tmp_path / "order.schema")):
        file = _file(tmp_path, f'decoder = "avro"\n[avro]\nreader_schema = "{name}"')
        assert context._shipped_files(file) == []


def test_the_embedded_broker_may_end_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Kafka is was found out at the start: later slices do not look for it again."""
    settings = config.load_settings({"HOME": str(tmp_path)}, tmp_path)
    servers = iter(["127.0.0.1:9092"])
    monkeypatch.setattr(context, "_embedded_servers", lambda _: next(servers))
    spark = context.LazySpark(_file(tmp_path), settings, print)
    tasks = [spark.make_task({Partition("t-a", 0): _work(0)}) for _ in range(2)]
    assert tasks[0].kafka == tasks[1].kafka


@pytest.mark.parametrize("variable", ["SERIATIM_SPARK_REMOTE", ""])
def test_only_a_cluster_reads_for_check_and_verify(
    tmp_path: Path, settings: config.Settings, variable: str
) -> None:
    """A local Spark and a Spark Connect server do not, however many records there are."""
    lines: list[str] = []
    others = config.load_settings(
        {"HOME": str(tmp_path), variable: "sc://127.0.0.1:15002"}, tmp_path
    )
    with context.choose_workers(_file(tmp_path), others, lines.append) as choose:
        assert isinstance(choose(10**9), LocalWorkers)
    assert lines == []
    with context.choose_workers(_file(tmp_path), settings, lines.append) as choose:
        assert isinstance(choose(10**9), SparkWorkers)
        assert isinstance(choose(10), LocalWorkers)
    assert len(lines) == 2


def test_a_crash_point_kills_the_driver_only_on_its_own_host() -> None:
    """On another host the same number is somebody else's process."""
    here = context.DriverProcess(socket.gethostname(), os.getpid())
    assert here.pids_on_this_host() == (os.getpid(),)
    assert context.DriverProcess("elsewhere", os.getpid()).pids_on_this_host() == ()


@pytest.mark.parametrize(
    ("variables", "host", "bind"),
    [
        ({}, "127.0.0.1", "127.0.0.1"),
        ({"SERIATIM_SPARK_DRIVER_HOST": "10.0.0.9"}, "10.0.0.9", "10.0.0.9"),
        (
            {
                "SERIATIM_SPARK_DRIVER_HOST": "10.0.0.9",
                "SERIATIM_SPARK_DRIVER_BIND_ADDRESS": "0.0.0.0",
            },
            "10.0.0.9",
            "0.0.0.0",
        ),
    ],
)
def test_the_address_of_the_driver(
    tmp_path: Path, variables: dict[str, str], host: str, bind: str
) -> None:
    """By default that of the interface which leads to the master; a setting wins."""
    settings = config.load_settings({"HOME": str(tmp_path), **variables}, tmp_path)
    for master in ("spark://127.0.0.1:7077", "k8s://https://127.0.0.1:6443"):
        chosen = spark_settings.cluster_spark_settings(master, settings)
        assert chosen["spark.driver.host"] == host
        assert chosen["spark.driver.bindAddress"] == bind


def test_a_silent_host_is_noticed_soon(tmp_path: Path) -> None:
    """Spark's own defaults let a slice wait for a host behind a cut cable for up to three minutes."""
    settings = config.load_settings({"HOME": str(tmp_path)}, tmp_path)
    chosen = spark_settings.cluster_spark_settings("spark://127.0.0.1:7077", settings)
    seconds = [
        int(chosen[f"spark.network.{name}"].removesuffix("s"))
        for name in ("timeout", "timeoutInterval")
    ]
    assert sum(seconds) <= 70
    # Three times, before an executor gives up.
    connecting = chosen["spark.rpc.io.connectionCreationTimeout"]
    assert 3 * int(connecting.removesuffix("s")) <= 30


def test_a_master_without_an_address_leaves_the_driver_to_spark(tmp_path: Path) -> None:
    """YARN's address is in Hadoop's files."""
    settings = config.load_settings({"HOME": str(tmp_path)}, tmp_path)
    assert "spark.driver.host" not in spark_settings.cluster_spark_settings("yarn", settings)


def test_numbers_of_the_environment(tmp_path: Path) -> None:
    """A variable is a text, and the setting a number; anything else is refused by its name."""
    variables = {"HOME": str(tmp_path), "SERIATIM_SPARK_EXECUTOR_WAIT_SECONDS": "30"}
    assert config.load_settings(variables, tmp_path).spark_executor_wait_seconds == 30
    variables["SERIATIM_SPARK_EXECUTOR_WAIT_SECONDS"] = "soon"
    with pytest.raises(ConfigError, match="spark_executor_wait_seconds"):
        config.load_settings(variables, tmp_path)
