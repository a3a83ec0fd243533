"""What tests share: one broker for a whole run, one Spark per worker, topics of their own, and `--full`.

The broker is started by the first test that asks for it. With xdist every worker asks; they find the
one that runs, since its home is handed down to them. The process that began the run stops it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seriatim import config, wiring
from seriatim.embedded import broker as embedded
from seriatim.embedded.broker import BrokerInfo

BROKER_HOME = "SERIATIM_TESTS_BROKER_HOME"
SEEDS_SAMPLE = 200
SEEDS_FULL = 10_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full` runs the long suites whole; `--seeds` says how many worlds are simulated; `--read` who reads Kafka."""
    parser.addoption("--full", action="store_true", help="run tests marked full, and long suites whole")
    parser.addoption("--seeds", type=int, default=None, help="how many seeded worlds a simulation runs")
    parser.addoption("--read", choices=("spark", "task"), default="spark", help="who reads Kafka in integration tests")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the broker's home once, before workers are started."""
    if not hasattr(config, "workerinput"):
        os.environ[BROKER_HOME] = tempfile.mkdtemp(prefix="seriatim-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the run started. Kafka clients that still live would complain below pytest's last line."""
    if not hasattr(config, "workerinput"):
        home = Path(os.environ.pop(BROKER_HOME))
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())
        embedded.stop(home, _silent)
        shutil.rmtree(home)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `full` out, unless they are asked for."""
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="only with --full (make test-full)"))


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether long suites run whole."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest, full: bool) -> range:
    """The seeds of a simulation: a sample, or many with --full, or as many as asked for."""
    asked: int | None = request.config.getoption("--seeds")
    return range(asked if asked is not None else SEEDS_FULL if full else SEEDS_SAMPLE)


@pytest.fixture(scope="session")
def broker_program() -> embedded.Program:
    """Java and Kafka, from the real cache of JARs."""
    return embedded.program_of(config.load(), _silent)


@pytest.fixture(scope="session")
def broker(broker_program: embedded.Program) -> BrokerInfo:
    """The broker of this test run."""
    return embedded.start(Path(os.environ[BROKER_HOME]), program=broker_program, say=_silent)


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes names of topics that nobody else uses."""
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[:80]
    return lambda: f"{test}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def topic(broker: BrokerInfo, topic_name: Callable[[], str]) -> Callable[..., str]:
    """Creates a topic with `partitions` and `settings` (Kafka's topic settings) and returns its name."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})

    def create(partitions: int = 1, settings: dict[str, str] | None = None, name: str = "") -> str:
        name = name or topic_name()
        new = NewTopic(name, num_partitions=partitions, replication_factor=1, config=settings or {})
        admin.create_topics([new])[name].result(timeout=30)
        while len(admin.list_topics(name, timeout=30).topics[name].partitions) < partitions:
            time.sleep(0.05)  # created is not yet known
        return name

    return create


@pytest.fixture(scope="session")
def spark() -> Iterator[Callable[[], Any]]:
    """A Spark session for all tests of this worker, started when first asked for."""
    started: list[Any] = []

    def get() -> Any:
        if not started:
            settings = config.load()
            more = {"spark.master": "local[2]", "spark.shuffle.spill.numElementsForceSpillThreshold": "20000"}
            started.append(wiring.spark_session("tests", settings, _silent, more))
        return started[0]

    yield get
    for session in started:
        session.stop()


def _silent(_: str) -> None:
    """Nobody listens."""
