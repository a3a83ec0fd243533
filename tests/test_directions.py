"""Import directions: who may know whom. Ruff says it while one types; here it is a list of what is
allowed.

dags, plugins, spark_apps, cli → steps → ports → core      adapters → ports → core
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The standard library's parts that touch nothing outside the process.
PURE = {
    "__future__", "abc", "ast", "base64", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "html", "itertools", "json",
    "math", "operator", "re", "string", "struct", "textwrap", "traceback", "types", "typing", "urllib.parse",
    "uuid", "zlib",
}  # fmt: skip
# What Airflow parses again and again: nothing heavy, and no adapter.
PARSED = {
    "__future__", "airflow", "collections", "contextlib", "ctypes", "datetime", "importlib.resources", "logging",
    "msgspec", "pathlib", "psutil", "re", "runpy", "seriatim.airflow", "seriatim.config", "seriatim.core",
    "seriatim.stream_files", "signal", "subprocess", "sys", "tempfile", "time", "typing", "urllib.parse",
}  # fmt: skip
ALLOWED = {
    "dags": PARSED,
    "seriatim/airflow": PARSED
    | {
        "seriatim.embedded.jars",
        "seriatim.web.address",
        "seriatim.alerts.alert",
        "seriatim.spark_settings",
        "seriatim.context",
    },
    "seriatim/core": PURE | {"msgspec", "seriatim.core"},
    "seriatim/ports.py": PURE | {"msgspec", "seriatim.core"},
    "seriatim/steps": PURE
    | {"msgspec", "seriatim.__version__", "seriatim.core", "seriatim.ports", "seriatim.steps"},
}


def _files(room: str) -> list[Path]:
    path = ROOT / room
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _imports(source: str) -> Iterator[str]:
    """Everything imported, as dotted names: `from a.b import c` is a.b.c."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_allowed(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


@pytest.mark.parametrize(
    ("room", "path"),
    [
        pytest.param(room, path, id=str(path.relative_to(ROOT)))
        for room in ALLOWED
        for path in _files(room)
    ],
)
def test_a_room_knows_only_what_it_may(room: str, path: Path) -> None:
    """Whatever is not on the list of its room is not imported, today's libraries and tomorrow's."""
    assert [
        name for name in _imports(path.read_text()) if not _is_allowed(name, ALLOWED[room])
    ] == []


@pytest.mark.parametrize(
    ("room", "code"),
    [
        ("core", "import pyspark"),
        ("core", "import pyarrow as pa"),
        ("core", "import time"),
        ("core", "from datetime import datetime\n\nNOW = datetime.now()"),
        ("core", "import os\n\nHOME = os.environ"),
        ("core", "from seriatim.ports import Log"),
        ("core", "from seriatim import config"),
        ("steps", "from seriatim.kafka.log import KafkaLog"),
        ("steps", "import deltalake"),
        ("steps", "import time\n\nNOW = time.time()"),
        ("adapters", "from seriatim.steps import fold"),
        ("adapters", "from seriatim.ledger.delta_store import DeltaLedger"),
        ("adapters", "import os\n\nHOME = os.environ"),
        ("airflow", "import pyspark"),
        ("airflow", "from seriatim.kafka.log import KafkaLog"),
        ("airflow", "from seriatim.cli import run"),
        ("airflow", "import os\n\nHOME = os.environ"),
        ("cli", "import os\n\nHOME = os.environ"),
        ("cli", "from unittest.mock import Mock"),
        ("cli", "import pickle"),
    ],
)
def test_ruff_refuses_a_wrong_import(room: str, code: str) -> None:
    """The guards bite: each of these would be seen in the editor."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache", "-"]
    name = f"seriatim/{room}/example.py"
    run = subprocess.run(
        [*command, "--stdin-filename", name],
        cwd=ROOT,
        input=code,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TID251" in run.stdout


def test_only_config_reads_the_environment() -> None:
    """One reader: everything that can be set is in one place."""
    readers = [path for path in _files("seriatim") if "os.environ" in path.read_text()]
    assert [path.name for path in readers] == ["config.py"]
