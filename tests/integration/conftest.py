"""What integration tests share: one Spark session per worker, a laboratory per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seriatim import config, wiring
from seriatim.embedded.broker import BrokerInfo
from tests.integration.lab import Lab


@pytest.fixture(scope="session")
def spark() -> Iterator[Callable[[], Any]]:
    """A Spark session for all tests of this worker, started when first asked for."""
    started: list[Any] = []

    def get() -> Any:
        if not started:
            settings = config.load()
            more = {"spark.master": "local[2]", "spark.shuffle.spill.numElementsForceSpillThreshold": "20000"}
            started.append(wiring.spark_session("tests", settings, lambda text: None, more))
        return started[0]

    yield get
    for session in started:
        session.stop()


@pytest.fixture
def lab(tmp_path: Path, broker: BrokerInfo, spark: Callable[[], Any]) -> Lab:
    """A folder of streams on the broker of this test run."""
    return Lab(tmp_path, broker, spark)
