"""What tests share: one broker for a whole run, one Spark per worker, topics of their own, `--full`
and `--fast`.

The broker is started by the first test that asks for it. With xdist every worker asks; they find
the one that runs, since its home is handed down to them. The process that began the run stops it; if
that process is killed, tests/leftovers.py does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from seriatim import config, context
from seriatim.embedded import broker as embedded
from seriatim.embedded import cluster, s3
from seriatim.embedded.broker import BrokerInfo
from tests import second_servers
from tests.leftovers import RUN_VARIABLE, dismiss_guard, start_guard

GUARD = pytest.StashKey[subprocess.Popen[bytes]]()
BROKER_HOME = "SERIATIM_TESTS_BROKER_HOME"
SEEDS_SAMPLE = 200
SEEDS_FULL = 10_000
SEEDS_FAST = 5
EXAMPLES_FAST = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is run (`--full`, `--fast`), how many worlds are simulated (`--seeds`), who reads
    Kafka (`--read`), where output is (`--store`), and which server has buckets (`--s3-server`).
    """
    parser.addoption(
        "--full", action="store_true", help="run tests marked full, and long suites whole"
    )
    parser.addoption(
        "--fast",
        action="store_true",
        help="of tests marked long, one case of each file; few seeds and examples",
    )
    parser.addoption(
        "--seeds", type=int, default=None, help="how many seeded worlds a simulation runs"
    )
    parser.addoption(
        "--read",
        choices=("task", "spark"),
        default="task",
        help="who reads Kafka in integration tests; the default is that of a stream file",
    )

    parser.addoption(
        "--store",
        choices=("disk", "s3"),
        default="disk",
        help="where integration tests keep their output; tests that look at files of a disk are skipped",
    )
    parser.addoption(
        "--s3-server",
        choices=("embedded", *second_servers.COMMANDS),
        default="embedded",
        help="which S3 server has the buckets; the others are not part of the project",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the broker's home once, before workers are started."""
    if not hasattr(config, "workerinput"):
        home = tempfile.mkdtemp(prefix="seriatim-tests-")
        os.environ[BROKER_HOME] = home
        os.environ[RUN_VARIABLE] = uuid.uuid4().hex
        config.stash[GUARD] = start_guard(os.environ[RUN_VARIABLE], home)
    if config.getoption("--fast"):
        # After the profiles of the folders, which are loaded with their conftest.py, and before the tests are imported.
        hypothesis.settings.register_profile(
            "fast", derandomize=True, deadline=None, database=None, max_examples=EXAMPLES_FAST
        )
        hypothesis.settings.load_profile("fast")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the run started. Kafka clients that still live would complain below pytest's last
    line.
    """
    if not hasattr(config, "workerinput"):
        home = Path(os.environ.pop(BROKER_HOME))
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
        embedded.stop_broker(home, _silent)
        s3.stop_s3_server(home, _silent)
        cluster.stop_cluster(home, _silent)
        shutil.rmtree(home)
        dismiss_guard(config.stash[GUARD])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `full` out, unless they are asked for; with `--fast`, most of those marked
    `long`, too.
    """
    if config.getoption("--fast"):
        left_out = _long_tests_left_out(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="only with --full (make test-full)"))


def _long_tests_left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """All long tests but one case of each file, always the same one.

    A long test without cases needs all its seeds for what it proves, so it is left out as a whole.
    """
    long_tests = [item for item in items if item.get_closest_marker("long")]
    cases_by_file: dict[Path, list[pytest.Item]] = {}
    for item in long_tests:
        if "[" in item.name:
            cases_by_file.setdefault(item.path, []).append(item)
    chosen = set()
    for path, cases in cases_by_file.items():
        chosen.add(cases[zlib.crc32(path.name.encode()) % len(cases)])
    return [item for item in long_tests if item not in chosen]


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether long suites run whole."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest, full: bool) -> range:
    """The seeds of a simulation: a sample, many with --full, a handful with --fast, or as many as
    asked for.
    """
    asked: int | None = request.config.getoption("--seeds")
    if asked is not None:
        return range(asked)
    if request.config.getoption("--fast"):
        return range(SEEDS_FAST)
    return range(SEEDS_FULL if full else SEEDS_SAMPLE)


@pytest.fixture(scope="session")
def broker_program() -> embedded.KafkaProgram:
    """Java and Kafka, from the real cache of JARs."""
    return embedded.find_kafka_program(config.load_settings(), _silent)


@pytest.fixture(scope="session")
def broker(broker_program: embedded.KafkaProgram) -> BrokerInfo:
    """The broker of this test run."""
    return embedded.start_broker(
        Path(os.environ[BROKER_HOME]), program=broker_program, print_notice=_silent
    )


@pytest.fixture(scope="session")
def spark_cluster() -> cluster.ClusterInfo:
    """The Spark cluster of this test run: a master and two workers. The first test that asks for it
    starts it; a worker that a test has killed is started again for the next test file.
    """
    home = Path(os.environ[BROKER_HOME])
    return cluster.start_cluster(home, 2, cluster.WorkerSize(), _silent)


@pytest.fixture(scope="session")
def s3_variables(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The variables with which clients find the S3 server of this test run. The server is started by
    the first test that asks for it, which fetches its JAR if it is not there.
    """
    name = request.config.getoption("--s3-server")
    settings = config.load_settings()
    if name == "embedded":
        home = Path(os.environ[BROKER_HOME])
        s3.start_s3_server(settings, home, None, _silent)
        yield s3.s3_environment(home)
        return
    folder = tmp_path_factory.mktemp(name) / "data"
    try:
        with second_servers.second_server(name, settings.home, folder) as variables:
            yield variables
    except second_servers.MissingServerError as error:
        pytest.skip(str(error))


@pytest.fixture
def s3_url(s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place in the bucket of the S3 server. This process finds the server by its
    environment. Credentials are always set: nothing asks beyond loopback for them.
    """
    for name in [name for name in os.environ if name.startswith(("AWS_", "SERIATIM_STORE_"))]:
        monkeypatch.delenv(name)
    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes names of topics that nobody else uses."""
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[:80]
    return lambda: f"{test}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def topic(broker: BrokerInfo, topic_name: Callable[[], str]) -> Callable[..., str]:
    """Creates a topic with `partitions` and `settings` (Kafka's topic settings) and returns its
    name.
    """
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})

    def create(partitions: int = 1, settings: dict[str, str] | None = None, name: str = "") -> str:
        name = name or topic_name()
        new = NewTopic(name, num_partitions=partitions, replication_factor=1, config=settings or {})
        admin.create_topics([new])[name].result(timeout=120)
        while len(admin.list_topics(name, timeout=120).topics[name].partitions) < partitions:
            time.sleep(0.05)  # created is not yet known
        return name

    return create


@pytest.fixture(scope="session")
def spark() -> Iterator[Callable[[], Any]]:
    """A Spark session for all tests of this worker, started when first asked for."""
    started: list[Any] = []

    def get() -> Any:
        if not started:
            settings = config.load_settings()
            more = {
                "spark.master": "local[2]",
                "spark.shuffle.spill.numElementsForceSpillThreshold": "20000",
            }
            started.append(context.spark_session("tests", settings, _silent, more))
        return started[0]

    yield get
    for session in started:
        session.stop()


def _silent(_: str) -> None:
    """Nobody listens."""
