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
    is_in_bucket = request.config.getoption("--store") == "s3"
    output_root = request.getfixturevalue("s3_url") if is_in_bucket else "lake"
    return Lab(tmp_path, broker, spark, request.config.getoption("--read"), output_root)
