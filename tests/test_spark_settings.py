"""What the Spark of a stream is started with, and workers that are forked ready."""

from __future__ import annotations

import subprocess
import sys

import pytest

from seriatim import spark_settings
from seriatim.stream import parse_stream
from tests.test_stream import given

FORKED = """
import os, sys
from seriatim import spark_daemon
spark_daemon.preload()
loaded = set(sys.modules)
assert {"numba", "pyarrow.parquet", "seriatim.engine.task", "seriatim.kafka.task_reader"} <= loaded
pid = os.fork()
if pid == 0:
    import pyarrow as pa, pyarrow.compute as pc
    from seriatim.fast.__main__ import compile_all
    compile_all()
    more = set(sys.modules) - loaded
    table = pa.table({"n": pa.array(range(200_000))})
    assert pc.sum(table.filter(pc.field("n") > 10)["n"]).as_py() > 0  # by Arrow's threads, which a fork does not copy
    os._exit(bool(more))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_worker_needs_nothing_more() -> None:
    """What was loaded before the fork works after it: the compiled fold, and Arrow with its
    threads.
    """
    ended = subprocess.run(
        [sys.executable, "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd="/",
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("read", "columns", "quick", "forked"),
    [
        (None, {"id": "string"}, True, True),
        (None, {"id": "date"}, True, True),
        ("task", {"id": "string"}, True, True),
        ("spark", {"id": "string"}, False, True),
        ("spark", {"id": "date"}, False, False),
    ],
)
def test_who_needs_what(
    read: str | None, columns: dict[str, str], *, quick: bool, forked: bool
) -> None:
    """A JVM that no message passes through compiles less; workers load compiled code where tasks
    will use it.
    """
    stream = parse_stream(
        "s",
        given(slice={"read": read} if read else {}, table={"key": ["id"], "columns": columns}),
        "s.toml",
    )
    assert ("TieredStopAtLevel=1" in spark_settings.java_options(stream)) is quick
    assert ("spark.python.daemon.module" in spark_settings.local_spark_settings(stream)) is forked
