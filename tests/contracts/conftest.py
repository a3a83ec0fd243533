"""What contract tests share: ledgers and brokers of both kinds, and a stream's output to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.brokers import Broker, MemoryBroker, RealBroker
from tests.contracts.disk_streams import create_filled_output
from tests.contracts.ledger_sides import BucketSide, MemorySide, RealSide, Side


@pytest.fixture(params=["memory", "real", "s3"])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Side:
    """A ledger of each kind."""
    if request.param == "s3":
        return BucketSide(request.getfixturevalue("s3_url"))
    return MemorySide() if request.param == "memory" else RealSide(tmp_path)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream's output, never touched."""
    root = tmp_path_factory.mktemp("original") / "lake"
    create_filled_output(root)
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy of a stream's output, to damage."""
    shutil.copytree(original, tmp_path / "lake")
    return tmp_path / "lake"


@pytest.fixture(params=["memory", "real"])
def kafka(request: pytest.FixtureRequest) -> Broker:
    """A broker of either kind."""
    if request.param == "memory":
        return MemoryBroker()
    return RealBroker(request.getfixturevalue("broker").bootstrap_servers)


@pytest.fixture
def name(topic_name: Callable[[], str]) -> str:
    """A name that no other topic begins with."""
    return topic_name()
