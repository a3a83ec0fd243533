"""What integration tests share: a laboratory per test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seriatim.embedded.broker import BrokerInfo
from tests.integration.lab import Lab


@pytest.fixture
def lab(
    request: pytest.FixtureRequest, tmp_path: Path, broker: BrokerInfo, spark: Callable[[], Any]
) -> Lab:
    """A folder of streams on the broker of this test run."""
    return Lab(tmp_path, broker, spark, request.config.getoption("--read"))
