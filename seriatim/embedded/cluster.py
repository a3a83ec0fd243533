"""An embedded Spark cluster: a standalone master and workers from the pyspark package, each a process of
its own on 127.0.0.1, with their folders under SERIATIM_HOME. It is for trying and for tests.

Nobody has to log in to it: whoever can connect to 127.0.0.1 can run code in it as the user who
started it. Do not start it on a host that you share with people whom you do not trust.

Next: embedded/server_process.py starts and finds the processes; kafka/spark_reader.py is the driver.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from importlib.resources import files
from pathlib import Path

import msgspec
import psutil

from seriatim import config
from seriatim.embedded import java, server_process
from seriatim.embedded.jars import PrintNotice
from seriatim.embedded.server_process import HOST, EmbeddedServer
from seriatim.errors import ConfigError, PlatformError

MASTER_CLASS = "org.apache.spark.deploy.master.Master"
WORKER_CLASS = "org.apache.spark.deploy.worker.Worker"
START_COMMAND = "seriatim cluster"
DAEMON_MEMORY = "256m"
DAEMON_JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.net.preferIPv4Stack=true"
    " -Dspark.master.rest.enabled=false"
)
"""Master and workers pass on a few messages: a quick start is worth more than fast code. The second way
to submit applications is off: it has a fixed port, so a host could have only one master.
"""
ANSWER_SECONDS_MAX = 5.0
PORT_KEY = "spark.seriatim.port"
PAGE_PORT_KEY = "spark.seriatim.page.port"
WORK_FOLDER = "work"
"""Where a worker keeps the files of its executors."""
WORKERS_DEFAULT = 2
CORES_DEFAULT = 1
MEMORY_DEFAULT = "2g"


class ClusterWorker(msgspec.Struct, frozen=True):
    """One worker of a running cluster."""

    pid: int
    host: str


class ClusterInfo(msgspec.Struct, frozen=True):
    """What people and scripts need to know about a running cluster."""

    master: str
    workers: list[ClusterWorker]


class WorkerSize(msgspec.Struct, frozen=True):
    """What each worker offers to executors."""

    cores: int = CORES_DEFAULT
    memory: str = MEMORY_DEFAULT


def start_cluster(
    home: Path, worker_count: int, size: WorkerSize, print_notice: PrintNotice
) -> ClusterInfo:
    """Start the cluster of this home, and return when all workers have found their master. Workers
    that are missing in a running cluster are started; more of them than `worker_count` are refused.
    """
    java.find_java(config.child_environment())
    master = _master(home)
    with master.lock(print_notice):
        process = master.find_process()
        if process is None:
            # Workers of a master that was killed would find the new one only at the same port.
            _stop_workers(home, print_notice)
            _launch_master(master, print_notice)
        else:
            print_notice(f"already running (pid {process.pid})")
            _refuse_more_workers(_cluster_info(home, master), worker_count)
        for number in range(worker_count):
            worker = _worker(home, number)
            if worker.find_process() is None:
                _launch_worker(worker, master, size, print_notice)
        return _cluster_info(home, master)


def stop_cluster(home: Path, print_notice: PrintNotice) -> bool:
    """Stop the workers and the master of this home; False if none was running. Folders of executors
    are deleted.
    """
    master = _master(home)
    with master.lock(print_notice):
        has_stopped = _stop_workers(home, print_notice)
        process = master.find_process()
        if process is not None:
            master.terminate(process, print_notice)
            has_stopped = True
        for folder in master.folder.glob(f"worker-*/{WORK_FOLDER}"):
            shutil.rmtree(folder, ignore_errors=True)
    return has_stopped


def cluster_status(home: Path) -> ClusterInfo | None:
    """The cluster of this home, if its master runs."""
    master = _master(home)
    if master.find_process() is None:
        return None
    return _cluster_info(home, master)


def spark_class_command(main_class: str, *arguments: str) -> list[str]:
    """The command line that starts a class of Spark from the pyspark package."""
    program = _spark_home() / "bin" / "spark-class"
    return [str(program), main_class, *arguments]


def daemon_environment(host: str) -> dict[str, str]:
    """The variables of a master or worker that listens at this host's address, and nowhere else."""
    return {
        "SPARK_HOME": str(_spark_home()),
        "SPARK_LOCAL_IP": host,
        "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
        "SPARK_DAEMON_JAVA_OPTS": DAEMON_JAVA_OPTIONS,
    }


def _spark_home() -> Path:
    return Path(str(files("pyspark")))


def _master(home: Path) -> EmbeddedServer:
    return _server(home, "master", MASTER_CLASS)


def _worker(home: Path, number: int) -> EmbeddedServer:
    return _server(home, f"worker-{number}", WORKER_CLASS)


def _workers(home: Path) -> list[EmbeddedServer]:
    """The workers that were ever started in this home."""
    folders = (home / "cluster").resolve().glob("worker-*")
    return [_server(home, name, WORKER_CLASS) for name in sorted(path.name for path in folders)]


def _refuse_more_workers(info: ClusterInfo, worker_count: int) -> None:
    if len(info.workers) > worker_count:
        raise ConfigError(
            f"the cluster is already running with {len(info.workers)} workers",
            next=f"{START_COMMAND} stop, then start it again",
        )


def _server(home: Path, name: str, main_class: str) -> EmbeddedServer:
    """A process of the cluster. Its settings file is named on its command line, and on no other."""
    root = (home / "cluster").resolve()
    folder = root if main_class == MASTER_CLASS else root / name
    marker = str(folder / f"{name}.properties")
    return EmbeddedServer(
        f"Spark {name}", START_COMMAND, folder, marker, main_class, folder / f"{name}.log"
    )


def _write_ports(server: EmbeddedServer) -> tuple[int, int]:
    """Choose the ports of a process and of its status page, and keep them in its settings file. They
    are those of the start before, if they are free, so that drivers find the master again.
    """
    path = Path(server.marker)
    server.folder.mkdir(parents=True, exist_ok=True)
    kept = server_process.read_properties(path)
    ports = []
    for key in (PORT_KEY, PAGE_PORT_KEY):
        port = int(kept.get(key, 0))
        if not port or not server_process.wait_until_free(port):
            port = server_process.free_port()
        ports.append(port)
    properties = dict(zip((PORT_KEY, PAGE_PORT_KEY), map(str, ports), strict=True))
    # At a port that is taken Spark would take the next one, and nobody would find it.
    properties["spark.port.maxRetries"] = "0"
    server_process.write_properties(path, properties)
    return ports[0], ports[1]


def _ports(server: EmbeddedServer) -> tuple[int, int]:
    """The ports that were chosen for a process and for its status page."""
    kept = server_process.read_properties(Path(server.marker))
    return int(kept[PORT_KEY]), int(kept[PAGE_PORT_KEY])


def _launch(
    server: EmbeddedServer,
    make_arguments: Callable[[], list[str]],
    is_ready: Callable[[psutil.Process], bool],
    print_notice: PrintNotice,
) -> psutil.Process:
    """Start a master or a worker. Another process may take a port that was free; then others are
    tried.
    """
    for _ in range(server_process.PORT_TRIES):
        port, page_port = _write_ports(server)
        places = ["--host", HOST, "--port", str(port), "--webui-port", str(page_port)]
        settings = ["--properties-file", server.marker]
        process = server.launch(
            spark_class_command(server.main_class, *places, *settings, *make_arguments()),
            lambda: None,
            is_ready,
            print_notice,
            has_fixed_port=True,
            environment=daemon_environment(HOST),
        )
        if process is not None:
            return process
        Path(server.marker).unlink()
    raise PlatformError(f"the {server.name} ended while starting", next=f"read {server.log}")


def _launch_master(master: EmbeddedServer, print_notice: PrintNotice) -> None:
    _launch(master, list, lambda _: _alive_worker_ports(master) is not None, print_notice)


def _launch_worker(
    worker: EmbeddedServer, master: EmbeddedServer, size: WorkerSize, print_notice: PrintNotice
) -> None:
    """Start a worker, and wait until the master knows it."""

    def make_arguments() -> list[str]:
        room = ["--cores", str(size.cores), "--memory", size.memory]
        return [*room, "--work-dir", str(worker.folder / WORK_FOLDER), _master_url(master)]

    def is_registered(_: psutil.Process) -> bool:
        return _ports(worker)[0] in (_alive_worker_ports(master) or ())

    _launch(worker, make_arguments, is_registered, print_notice)


def _alive_worker_ports(master: EmbeddedServer) -> set[int] | None:
    """The ports of the workers that are alive in the eyes of the master; None if it does not answer."""
    connection = HTTPConnection(HOST, _ports(master)[1], timeout=ANSWER_SECONDS_MAX)
    try:
        connection.request("GET", "/json/")
        workers = json.load(connection.getresponse())["workers"]
    except (OSError, HTTPException, ValueError, KeyError):
        return None
    finally:
        connection.close()
    return {worker["port"] for worker in workers if worker["state"] == "ALIVE"}


def _master_url(master: EmbeddedServer) -> str:
    return f"spark://{HOST}:{_ports(master)[0]}"


def _stop_workers(home: Path, print_notice: PrintNotice) -> bool:
    """Stop all workers of this home; False if none was running."""
    has_stopped = False
    for worker in _workers(home):
        process = worker.find_process()
        if process is not None:
            worker.terminate(process, print_notice)
            has_stopped = True
    return has_stopped


def _cluster_info(home: Path, master: EmbeddedServer) -> ClusterInfo:
    """The running cluster, with the workers that are alive."""
    workers = []
    for worker in _workers(home):
        process = worker.find_process()
        if process is not None:
            workers.append(ClusterWorker(process.pid, HOST))
    return ClusterInfo(_master_url(master), workers)
