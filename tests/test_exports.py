"""The names we promise: what is exported exists, and what users import does not vanish unnoticed."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import seriatim

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(seriatim.__path__, "seriatim.")
    if not module.name.endswith("__main__")
)
PROMISED = {
    "seriatim": {"Machine", "PlainDecoder", "Poison", "__version__"},
    "seriatim.errors": {
        "BrokenPromiseError",
        "ConfigError",
        "FencedError",
        "IntegrityError",
        "PlatformError",
        "SeriatimError",
    },
    "seriatim.testing": {"CRASH", "fold", "fold_table"},
}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    """Each by itself, and all that it exports is there."""
    module = importlib.import_module(name)
    assert [
        export for export in getattr(module, "__all__", []) if not hasattr(module, export)
    ] == []


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_there(name: str) -> None:
    """What users' machines, tests and scripts import; taking one away is a breaking change."""
    module = importlib.import_module(name)
    assert {export for export in PROMISED[name] if not hasattr(module, export)} == set()


def test_the_package_carries_its_files() -> None:
    """Types marker, JAR lock and its source are found from an installed package."""
    folder = Path(str(seriatim.__file__)).parent
    for name in ("py.typed", "embedded/jars.lock", "embedded/jars.toml"):
        assert (folder / name).is_file()
