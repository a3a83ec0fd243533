"""Settings with which the Spark of a stream, or of several, is started, from the command line and by
spark-submit alike.

Next: context.py starts a session; airflow/fold.py submits.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from seriatim.fast.column_kinds import can_use_compiled_fold
from seriatim.stream import Stream


def java_options(*streams: Stream) -> str:
    """Options of the driver's JVM for the streams that it folds: few log lines, and fast starts where
    no message passes through it.

    The JVM's second compiler takes a quarter to a third of the CPU of a start. It pays off only
    where Java works on every message.
    """
    log_settings = Path(str(files("seriatim") / "log4j2.properties")).as_uri()
    options = f"-Dlog4j2.configurationFile={log_settings} -Djava.net.preferIPv4Stack=true"
    if streams and all(stream.slice.read != "spark" for stream in streams):
        options += " -XX:TieredStopAtLevel=1"
    return options


def local_spark_settings(*streams: Stream) -> dict[str, str]:
    """Settings of a Spark that runs on this host alone, for the streams that it folds: no open ports,
    and workers that start with everything loaded.
    """
    settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if any(stream.slice.read != "spark" or can_use_compiled_fold(stream) for stream in streams):
        settings["spark.python.daemon.module"] = "seriatim.spark_daemon"
    return settings
