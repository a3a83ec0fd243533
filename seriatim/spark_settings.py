"""Settings with which the Spark of a stream, or of several, is started, from the command line and by
spark-submit alike.

Next: context.py starts a session; airflow/fold.py submits.
"""

from __future__ import annotations

import socket
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from seriatim.config import Settings
from seriatim.fast.column_kinds import can_use_compiled_fold
from seriatim.stream import Stream

DAEMON_MODULE = "seriatim.spark_daemon"
NETWORK_TIMEOUT_SECONDS = 60
"""How long Spark waits for an executor that is silent, such as one behind a cut cable. Its own default
is twice as long.
"""
SILENCE_CHECK_SECONDS = 10
"""How often Spark looks for executors that have been silent so long. Its own default is a minute, which comes on
top.
"""
CONNECT_SECONDS_MAX = 10
"""How long an executor waits for a connection to the driver, three times before it gives up. Spark's default is its
network timeout: an executor behind a firewall that drops packets would live for minutes, and say nothing.
"""


def java_options(*streams: Stream, class_archive: str = "") -> str:
    """Options of the driver's JVM for the streams that it folds: few log lines, and fast starts where
    no message passes through it. `class_archive` are the options of class_archive.py.

    The JVM's second compiler takes a quarter to a third of the CPU of a start. It pays off only
    where Java works on every message. So do several threads that collect garbage.
    """
    log_settings = Path(str(files("seriatim") / "log4j2.properties")).as_uri()
    options = f"-Dlog4j2.configurationFile={log_settings} -Djava.net.preferIPv4Stack=true"
    if streams and all(stream.slice.read != "spark" for stream in streams):
        options += " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return f"{options} {class_archive}".rstrip()


def is_local_master(master: str) -> bool:
    """Whether Spark's executors are threads of the driver on this host."""
    return master.startswith("local")


def has_cluster(settings: Settings) -> bool:
    """Whether the settings name a cluster whose driver is this process."""
    return not settings.spark_remote and not is_local_master(settings.spark_master)


def cluster_spark_settings(master: str, settings: Settings) -> dict[str, str]:
    """Settings of the driver of a cluster: where executors find it, workers that start with everything
    loaded, and how soon a lost host is noticed.
    """
    all_settings = {
        "spark.python.daemon.module": DAEMON_MODULE,
        "spark.network.timeout": f"{NETWORK_TIMEOUT_SECONDS}s",
        "spark.network.timeoutInterval": f"{SILENCE_CHECK_SECONDS}s",
        "spark.rpc.io.connectionCreationTimeout": f"{CONNECT_SECONDS_MAX}s",
    }
    host = settings.spark_driver_host or _address_towards(master)
    if host:
        all_settings["spark.driver.host"] = host
    bind_address = settings.spark_driver_bind_address or host
    if bind_address:
        all_settings["spark.driver.bindAddress"] = bind_address
    return all_settings


def _address_towards(master: str) -> str:
    """The address of this host on the interface that leads to the master, which is the one that its
    workers can most likely reach; empty if that is not known.

    Spark itself takes what this host's name resolves to: often an address of another network.
    """
    first_master = master.removeprefix("k8s://").partition(",")[0]
    if "://" not in first_master:
        return ""
    parts = urlsplit(first_master)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing: it only asks the routing table.
            probe.connect((parts.hostname or "", parts.port or 443))
            address: str = probe.getsockname()[0]
    except (OSError, ValueError):
        return ""
    return address


def local_spark_settings(*streams: Stream) -> dict[str, str]:
    """Settings of a Spark that runs on this host alone, for the streams that it folds: no open ports,
    and workers that start with everything loaded.
    """
    settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if any(stream.slice.read != "spark" or can_use_compiled_fold(stream) for stream in streams):
        settings["spark.python.daemon.module"] = DAEMON_MODULE
    return settings
