"""Tuned: what the Spark of one stream is started with, from the command line and by spark-submit
alike.

Next room: wiring.py starts a session; airflow/fold.py submits.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from seriatim.fast.column_kinds import can_fold_in_bulk
from seriatim.stream import Stream


def java_options(stream: Stream | None = None) -> str:
    """Of the driver's JVM: a quiet log, and, where no message passes through it, code compiled
    quickly and not well.

    The JVM's second compiler takes a quarter to a third of the CPU of a start, and pays only for
    work on every message.
    """
    quiet = Path(str(files("seriatim") / "log4j2.properties")).as_uri()
    usual = f"-Dlog4j2.configurationFile={quiet} -Djava.net.preferIPv4Stack=true"
    return f"{usual} -XX:TieredStopAtLevel=1" if stream and stream.slice.read == "task" else usual


def local_spark_settings(stream: Stream | None = None) -> dict[str, str]:
    """Settings of a Spark that is here alone: no open port, and workers that need load nothing."""
    settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    compiled = stream is not None and (stream.slice.read == "task" or can_fold_in_bulk(stream))
    return settings | ({"spark.python.daemon.module": "seriatim.spark_daemon"} if compiled else {})
