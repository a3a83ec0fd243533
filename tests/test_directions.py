"""Import directions: one list of who may import whom, for every package.

    engine ← ledger ← ports ← operations ← alerts, web ← context ← airflow, cli, demo
                      ports ← storage, kafka, memory

Ruff refuses most wrong imports while one types (the ruff.toml files of the packages). The list here
is complete: an import that no rule allows fails. Imports that still go in a wrong direction are in
`EXCEPTIONS`, which may only become shorter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("seriatim", "dags", "plugins", "spark_apps")

PURE = frozenset({
    "__future__", "abc", "ast", "base64", "bisect", "builtins", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "difflib", "enum", "errno", "fractions", "functools", "hashlib", "heapq", "html",
    "itertools", "json", "keyword", "math", "operator", "re", "string", "struct", "textwrap", "traceback", "types",
    "typing", "urllib.parse", "uuid", "zlib",
})  # fmt: skip
"""The modules of the standard library that touch nothing outside the process: no I/O, no clock, no
environment.
"""
WITH_TIME_ZONES = PURE | {"zoneinfo"}
"""The same, and the database of time zones. It is read from files, but they are the same everywhere."""
PARSED = frozenset({
    "__future__", "collections", "contextlib", "ctypes", "datetime", "importlib.resources", "logging", "pathlib",
    "re", "runpy", "signal", "subprocess", "sys", "tempfile", "textwrap", "time", "typing", "urllib.parse",
})  # fmt: skip
"""Modules of the standard library for files that Airflow parses again and again."""


@dataclass(frozen=True)
class Rule:
    """What the files of one package may import."""

    packages: str = ""
    """Packages and modules of ours, without the prefix `seriatim.`; "*" is all of them."""
    libraries: str = ""
    """Libraries of others."""
    standard: frozenset[str] | None = None
    """Modules of the standard library; None is all of them."""


RULES = {
    # Pure: no I/O, no clock, no environment, no Spark, no Arrow.
    "seriatim/errors.py": Rule(standard=PURE),
    "seriatim/engine": Rule("errors engine", "msgspec", PURE),
    "seriatim/stream.py": Rule("errors engine", "croniter msgspec", WITH_TIME_ZONES),
    "seriatim/formats": Rule("errors engine formats stream", "msgspec", PURE),
    "seriatim/formats/registry.py": Rule("config errors", "msgspec"),
    "seriatim/formats/avro.py": Rule("engine formats", "fastavro msgspec", PURE | {"io"}),
    "seriatim/formats/avro_reader.py": Rule(libraries="fastavro", standard=PURE),
    "seriatim/formats/protobuf.py": Rule("engine formats", "google msgspec", PURE | {"inspect"}),
    "seriatim/ledger": Rule("errors engine ledger ports", "msgspec", PURE),
    "seriatim/ports.py": Rule("errors engine ledger stream workers", "msgspec", PURE),
    "seriatim/ledger/manifests.py": Rule(
        "errors engine ledger storage.store", "msgspec pyarrow", PURE
    ),
    # The outside world, behind ports. Storage and Kafka know neither each other nor the operations.
    "seriatim/ledger/delta_store.py": Rule(
        "errors engine ledger ports storage", "deltalake msgspec pyarrow"
    ),
    "seriatim/workers.py": Rule("engine.failure", standard=PURE),
    "seriatim/storage": Rule(
        "errors engine ledger ports storage workers", "deltalake msgspec numpy pyarrow xxhash"
    ),
    "seriatim/storage/object_store.py": Rule(
        "config errors storage.store", "obstore pyarrow xxhash"
    ),
    "seriatim/kafka": Rule(
        "errors engine ledger ports kafka fast.kafka_records",
        "confluent_kafka cryptography kafka msgspec numpy psutil py4j pyarrow pyspark",
    ),
    "seriatim/kafka/client.py": Rule("config errors", "confluent_kafka cryptography"),
    "seriatim/kafka/worker_setup.py": Rule("config errors", "msgspec"),
    "seriatim/clock.py": Rule(),
    "seriatim/memory": Rule(
        "alerts.incidents engine errors formats.registry ledger memory operations ports storage.store "
        "stream",
        "msgspec pyarrow xxhash",
        PURE,
    ),
    # What the commands do: ports and values, no libraries.
    "seriatim/operations": Rule(
        "engine errors ledger operations ports stream workers", "msgspec", PURE
    ),
    "seriatim/operations/prove/great_expectations_suites.py": Rule(
        "engine errors ledger operations ports storage.parquet storage.store stream",
        "great_expectations msgspec numpy pandas pyarrow",
    ),
    "seriatim/operations/prove/suite.py": Rule("engine errors operations stream", "msgspec"),
    "seriatim/alerts": Rule(
        "alerts config engine errors ledger operations ports stream", "msgspec"
    ),
    "seriatim/alerts/incidents.py": Rule("engine errors", "msgspec", PURE),
    "seriatim/alerts/outbox.py": Rule("alerts.incidents errors ports storage.store", "msgspec"),
    "seriatim/alerts/mail.py": Rule(
        "alerts.incidents engine errors operations.status web.render", "msgspec", WITH_TIME_ZONES
    ),
    # A page asks neither Kafka nor Spark: the status file has what they said.
    "seriatim/web": Rule(
        "engine errors ledger operations ports storage.status_file storage.store stream "
        "stream_files web",
        "fastapi jinja2 markupsafe msgspec",
    ),
    # Airflow parses these files again and again: nothing heavy.
    "seriatim/airflow": Rule(
        "airflow alerts class_archive config context embedded.jars embedded.server_process engine errors "
        "operations.repair_text operations.run_request spark_settings stream stream_files web.address",
        "airflow msgspec psutil",
        PARSED,
    ),
    "dags": Rule("airflow config errors stream_files", "airflow", PARSED),
    "plugins": Rule("config stream_files web", "airflow fastapi sqlalchemy"),
    "spark_apps": Rule("cli config errors"),
    # The edges. context.py is the only one that joins everything.
    "seriatim/config.py": Rule("engine.crash_points errors", "msgspec"),
    "seriatim/stream_files.py": Rule("config engine errors formats stream", "msgspec"),
    "seriatim/context.py": Rule("*", "msgspec pyarrow pyspark"),
    "seriatim/spark_settings.py": Rule("config fast.column_kinds stream"),
    "seriatim/class_archive.py": Rule(
        "config context embedded.java engine errors kafka.spark_reader ports",
        "msgspec pyarrow pyspark",
    ),
    "seriatim/spark_workers.py": Rule(
        "engine.failure errors kafka.spark_reader kafka.worker_setup workers",
        "msgspec pyarrow pyspark",
    ),
    "seriatim/spark_daemon.py": Rule("context engine fast kafka storage", "pyspark"),
    "seriatim/testing.py": Rule(
        "engine formats ledger memory operations ports stream", "msgspec", PURE
    ),
    "seriatim/embedded": Rule(
        "config embedded errors kafka.client stream_files", "confluent_kafka msgspec psutil"
    ),
    "seriatim/embedded/doctor.py": Rule(
        "alerts.channels config embedded errors kafka.client stream_files", "msgspec"
    ),
    "seriatim/demo": Rule(
        "config context demo embedded errors kafka.client kafka.sending ledger.gaps web.render",
        "aiosmtpd confluent_kafka deltalake msgspec psutil",
    ),
    "seriatim/fast": Rule(
        "config context engine errors fast ports storage stream stream_files",
        "llvmlite msgspec numba numpy pyarrow",
    ),
    "seriatim/cli": Rule("*", "msgspec pyarrow rich typer"),
    "seriatim/__main__.py": Rule("cli"),
    "seriatim/__init__.py": Rule("engine.decoding engine.machine engine.messages"),
}
"""The longest path that fits a file is its rule."""

EDGES = ("ledger.delta_store",)
"""Modules with libraries in a package that is pure otherwise. A rule must name them by themselves."""

EXCEPTIONS: dict[str, set[str]] = {
    "seriatim/storage/status_file.py": {"seriatim.operations.status"},
    "seriatim/web/write_status.py": {"seriatim.storage.derived_tables"},
}
"""Imports that go in a wrong direction, by file. Never add one: move the value, or pass it in. An
import that is gone must be removed here.
"""


def _product_files() -> list[str]:
    """Every file of the product, relative to the repository."""
    files = []
    for folder in FOLDERS:
        files += [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).rglob("*.py"))]
    return files


def _rule_of(file: str) -> Rule:
    """The most exact rule for a file; KeyError: a new package has no rule yet."""
    paths = [file, *map(str, Path(file).parents)]
    for path in paths:
        if path in RULES:
            return RULES[path]
    raise KeyError(f"{file} has no rule: add its package to RULES")


def _imported_names(source: str) -> Iterator[str]:
    """Everything imported, as dotted names: `from a.b import c` is a.b.c."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_of(name: str) -> str:
    """The module of ours that a dotted name is, or is in."""
    path = ROOT / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return name
    return name.rpartition(".")[0]


def _is_within(name: str, prefixes: frozenset[str] | list[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _is_allowed(name: str, rule: Rule) -> bool:
    package, _, module = name.partition(".")
    if package == "seriatim":
        packages = rule.packages.split()
        # The package itself has only the version and what users subclass.
        if not module or "*" in packages:
            return True
        return module in packages if module in EDGES else _is_within(module, packages)
    if package in sys.stdlib_module_names:
        return rule.standard is None or _is_within(name, rule.standard)
    return package in rule.libraries.split()


def _forbidden_imports(file: str, source: str) -> set[str]:
    """The modules that a file imports and its rule does not allow."""
    rule = _rule_of(file)
    names = set()
    for name in _imported_names(source):
        names.add(_module_of(name) if name.startswith("seriatim") else name)
    return {name for name in names if not _is_allowed(name, rule)}


@pytest.mark.parametrize("file", _product_files())
def test_a_file_imports_only_what_its_package_may(file: str) -> None:
    """Nothing but what its rule allows, and the known exceptions, each of which is still needed."""
    forbidden = _forbidden_imports(file, (ROOT / file).read_text())
    known = EXCEPTIONS.get(file, set())
    assert forbidden - known == set(), (
        "not allowed here: move the import, or extend the rule in RULES of this file and say why"
    )
    assert known - forbidden == set(), "not needed any more: remove it from EXCEPTIONS"


def test_exceptions_are_of_files_that_exist() -> None:
    """A file that was moved or deleted takes its exceptions along."""
    assert set(EXCEPTIONS) - set(_product_files()) == set()


def test_rules_are_of_packages_that_exist() -> None:
    """A package that was moved or deleted takes its rule along."""
    assert [path for path in RULES if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("seriatim/engine/fold.py", "import time"),
        ("seriatim/engine/fold.py", "from pathlib import Path"),
        ("seriatim/engine/fold.py", "import numpy"),
        ("seriatim/engine/fold.py", "from seriatim.storage.store import LocalStore"),
        ("seriatim/formats/debezium.py", "import time"),
        ("seriatim/formats/debezium.py", "from seriatim.storage import store"),
        ("seriatim/ledger/model.py", "import deltalake"),
        ("seriatim/ledger/model.py", "from seriatim.storage import store"),
        ("seriatim/workers.py", "from seriatim.storage.store import open_store"),
        ("seriatim/storage/parquet.py", "from seriatim.operations.run import FoldRun"),
        ("seriatim/storage/parquet.py", "from seriatim.kafka import log"),
        ("seriatim/storage/parquet.py", "import pyspark"),
        ("seriatim/kafka/log.py", "from seriatim.storage.record_files import ParquetRecords"),
        ("seriatim/kafka/log.py", "import deltalake"),
        ("seriatim/engine/retention.py", "import time"),
        ("seriatim/operations/run.py", "from seriatim.storage.store import LocalStore"),
        ("seriatim/operations/run.py", "from seriatim.ledger.delta_store import DeltaLedger"),
        ("seriatim/operations/run.py", "from seriatim import config"),
        ("seriatim/operations/run.py", "import time"),
        ("seriatim/operations/prove/suite_files.py", "import pyspark"),
        ("seriatim/alerts/incidents.py", "import time"),
        ("seriatim/alerts/alert.py", "from seriatim.storage import store"),
        ("seriatim/web/app.py", "from seriatim.kafka.log import KafkaLog"),
        ("seriatim/memory/kafka.py", "import time"),
        ("seriatim/airflow/fold.py", "import pyarrow"),
        ("seriatim/airflow/fold.py", "from seriatim.operations import run"),
        ("seriatim/embedded/jars.py", "from seriatim.cli import run"),
        ("seriatim/demo/producer.py", "import pyspark"),
        ("seriatim/fast/fold.py", "from seriatim.operations import run"),
        ("dags/streams.py", "from seriatim.context import log"),
        ("plugins/seriatim_page.py", "from seriatim.context import log"),
    ],
)
def test_the_list_refuses_a_wrong_import(file: str, code: str) -> None:
    """The list bites, for each package that has a rule of its own."""
    assert _forbidden_imports(file, code)


def test_a_file_of_a_new_package_needs_a_rule() -> None:
    """Nobody forgets a package: without a rule its files fail."""
    with pytest.raises(KeyError):
        _rule_of("seriatim/new_package/module.py")


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("engine", "import pyspark"),
        ("engine", "import pyarrow as pa"),
        ("engine", "import time"),
        ("engine", "from datetime import datetime\n\nNOW = datetime.now()"),
        ("engine", "import os\n\nHOME = os.environ"),
        ("engine", "from seriatim.ports import Log"),
        ("engine", "from seriatim.ledger.model import Ledger"),
        ("engine", "from seriatim import config"),
        ("operations", "from seriatim.kafka.log import KafkaLog"),
        ("operations", "from seriatim.ledger.delta_store import DeltaLedger"),
        ("operations", "from seriatim.storage.store import LocalStore"),
        ("operations", "from seriatim import context"),
        ("operations", "import deltalake"),
        ("operations", "import time\n\nNOW = time.time()"),
        ("storage", "import os\n\nHOME = os.environ"),
        ("kafka", "import os\n\nHOME = os.environ"),
        ("web", "import pyspark"),
        ("airflow", "import pyspark"),
        ("airflow", "from seriatim.storage.store import LocalStore"),
        ("airflow", "from seriatim.cli import run"),
        ("airflow", "import os\n\nHOME = os.environ"),
        ("cli", "import os\n\nHOME = os.environ"),
        ("cli", "from unittest.mock import Mock"),
        ("cli", "import pickle"),
    ],
)
def test_ruff_refuses_a_wrong_import(package: str, code: str) -> None:
    """The guards bite: each of these is seen in the editor."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache", "-"]
    name = f"seriatim/{package}/example.py"
    run = subprocess.run(
        [*command, "--stdin-filename", name],
        cwd=ROOT,
        input=code,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TID251" in run.stdout


@pytest.mark.parametrize("package", ["engine", "operations"])
def test_ruff_spares_only_files_with_exceptions(package: str) -> None:
    """A file for which ruff's guard is off has an exception, or a rule of its own, in this list."""
    settings = tomllib.loads((ROOT / "seriatim" / package / "ruff.toml").read_text())
    spared = settings["lint"]["extend-per-file-ignores"]
    files = [f"seriatim/{package}/{name}" for name in spared]
    assert [file for file in files if file not in EXCEPTIONS and file not in RULES] == []


def test_only_config_reads_the_environment() -> None:
    """One reader: everything that can be set is in one place."""
    readers = [file for file in _product_files() if "os.environ" in (ROOT / file).read_text()]
    assert readers == ["seriatim/config.py"]


FILE_SYSTEM = frozenset({"fcntl", "glob", "pathlib", "shutil", "tempfile"})
FILE_SYSTEM_CALLS = frozenset({
    "access", "fdatasync", "fsync", "link", "listdir", "lstat", "makedirs", "mkdir", "open", "path", "remove",
    "rename", "replace", "rmdir", "scandir", "stat", "symlink", "truncate", "unlink", "utime", "walk",
})  # fmt: skip
"""Members of `os` that touch files."""
FILE_SYSTEM_USERS = {
    "seriatim/storage/store.py": "the only module that knows how an output is on a disk",
    "seriatim/storage/object_store.py": "a file with the credentials",
    "seriatim/config.py": "settings",
    "seriatim/context.py": "a stream file that is named by its path",
    "seriatim/stream_files.py": "stream files",
    "seriatim/formats/registry.py": "schemas that were asked for, in the home",
    "seriatim/web/read.py": "stream files",
    "seriatim/operations/prove/suite.py": "suites of the user, beside stream files",
    "seriatim/kafka/client.py": "a file of client settings",
    "seriatim/kafka/past_messages.py": "raw captures of the user",
    "seriatim/kafka/spark_reader.py": "temporary folders of Spark, JARs",
    "seriatim/spark_settings.py": "files of Spark",
    "seriatim/class_archive.py": "an archive for the JVM, in the home",
    "seriatim/fast/ready.py": "compiled code in the home",
    "seriatim/fast/helpers/__main__.py": "the null device in place of a pipe",
    "seriatim/alerts/smtp.py": "a file with the password",
    "seriatim/web/render.py": "templates of the pages",
}
"""Modules with paths, locks or synced files, each with what for. Objects of an output go through a
`Store`. A new module belongs here only if it opens files that are no part of an output, such as one with
a password or a certificate.
"""
FILE_SYSTEM_PACKAGES = ("airflow", "cli", "demo", "embedded")
"""The edges: arguments of commands, processes, what we bring along."""


def _uses_file_system(source: str) -> bool:
    imported = {name.partition(".")[0] for name in _imported_names(source)}
    return bool(imported & FILE_SYSTEM) or any(map(_touches_files, ast.walk(ast.parse(source))))


def _touches_files(node: ast.AST) -> bool:
    """`open(…)`, a member of `os` that touches files, or a change time."""
    match node:
        case ast.Call(func=ast.Name(id="open")):
            return True
        case ast.Attribute(value=ast.Name(id="os"), attr=name):
            return name in FILE_SYSTEM_CALLS
        case ast.ImportFrom(module="os", names=names):
            return any(alias.name in FILE_SYSTEM_CALLS for alias in names)
        case ast.Attribute(attr=name):
            return name.startswith("st_mtime")
    return False


@pytest.mark.parametrize(
    "code",
    [
        "from pathlib import Path",
        "import fcntl",
        "import shutil",
        "import tempfile",
        "open('state').read()",
        "import os\n\nos.rename('a', 'b')",
        "import os\n\nos.replace('a', 'b')",
        "import os\n\nos.fsync(3)",
        "import os\n\nos.path.getsize('a')",
        "from os import unlink",
        "status.st_mtime_ns",
    ],
)
def test_each_way_to_touch_a_file_is_noticed(code: str) -> None:
    """Not only the imports: also what needs none."""
    assert _uses_file_system(code)


@pytest.mark.parametrize(
    "code", ["store.open('key')", "import os\n\nos.getpid()", "'a'.replace('a', 'b')"]
)
def test_what_touches_no_file_is_left_alone(code: str) -> None:
    """A store opens objects, and texts are replaced."""
    assert not _uses_file_system(code)


def test_only_the_store_and_the_edges_know_the_file_system() -> None:
    """No paths, locks, syncs or change times elsewhere: an output may be on an object store."""
    users = set()
    for file in _product_files():
        is_edge = file.startswith(tuple(f"seriatim/{name}/" for name in FILE_SYSTEM_PACKAGES))
        is_product = file.startswith("seriatim/") and not is_edge
        if is_product and _uses_file_system((ROOT / file).read_text()):
            users.add(file)
    assert users - FILE_SYSTEM_USERS.keys() == set(), "not allowed here: take a Store"
    assert FILE_SYSTEM_USERS.keys() - users == set(), "not needed any more: remove it"
