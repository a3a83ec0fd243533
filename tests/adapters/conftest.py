"""What contract tests share: a ledger of either kind, and a stream's output to be hurt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.adapters.ledgers import MemorySide, RealSide, Side
from tests.adapters.on_disk import filled


@pytest.fixture(params=["memory", "real"])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Side:
    """A ledger of either kind."""
    return MemorySide() if request.param == "memory" else RealSide(tmp_path)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream's output, never touched."""
    root = tmp_path_factory.mktemp("original") / "lake"
    filled(root)
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be hurt."""
    shutil.copytree(original, tmp_path / "lake")
    return tmp_path / "lake"
