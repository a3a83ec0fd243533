"""`seriatim cluster`: start, stop and look at the embedded Spark cluster.

Next: embedded/cluster.py does it.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer
from msgspec import Struct

from seriatim import config
from seriatim.cli import print_notice
from seriatim.cli.options import Json
from seriatim.cli.output import RunningServer, require_running
from seriatim.embedded.cluster import (
    CORES_DEFAULT,
    MEMORY_DEFAULT,
    WORKERS_DEFAULT,
    ClusterInfo,
    WorkerSize,
    cluster_status,
    start_cluster,
    stop_cluster,
)
from seriatim.errors import ConfigError

MEMORY = re.compile(r"[1-9][0-9]*[mgt]", re.IGNORECASE | re.ASCII)
"""How Spark writes the memory of a worker. It takes a number without a letter for bytes."""
cluster = typer.Typer(help="Start and stop the embedded Spark cluster.", no_args_is_help=True)


class RunningCluster(RunningServer):
    """A cluster that is running."""

    info: Struct

    def render(self) -> str:
        """The address of its master, and a line for each worker."""
        assert isinstance(self.info, ClusterInfo)
        lines = [f"master {self.info.master}"]
        lines += [f"worker {worker.host} (pid {worker.pid})" for worker in self.info.workers]
        return "\n".join(lines)


@cluster.command()
def start(
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = WORKERS_DEFAULT,
    cores: Annotated[int, typer.Option(min=1, help="The cores of each worker.")] = CORES_DEFAULT,
    memory: Annotated[
        str, typer.Option(help="What each worker has for executors, such as 2g or 1500m.")
    ] = MEMORY_DEFAULT,
    _json: Json = False,
) -> RunningCluster:
    """Start a Spark master and workers, and leave them running.

    They are processes on 127.0.0.1, for trying and for tests; nobody has to log in to them. Workers
    that are missing in a running cluster are started again. Streams are folded there with
    SERIATIM_SPARK_MASTER set to the address that is printed.

    Example: seriatim cluster start --workers 2
    """
    if MEMORY.fullmatch(memory) is None:
        # Before anything is started: a worker that refuses it would leave the master alone.
        raise ConfigError(f"--memory {memory!r} is no size", next="like 2g or 1500m")
    home = config.load_settings().home
    return RunningCluster(start_cluster(home, workers, WorkerSize(cores, memory), print_notice))


@cluster.command()
def stop() -> None:
    """Stop the workers and the master. The files of their executors are deleted.

    Example: seriatim cluster stop
    """
    has_stopped = stop_cluster(config.load_settings().home, print_notice)
    typer.echo("stopped" if has_stopped else "no Spark cluster was running")


@cluster.command()
def status(_json: Json = False) -> RunningCluster:
    """Print the master's address, and the process and host of each worker.

    The exit code is 4 if no cluster is running.

    Example: seriatim cluster status --json
    """
    home = config.load_settings().home
    running = require_running(
        cluster_status(home), ClusterInfo, "Spark cluster", "seriatim cluster start", home
    )
    return RunningCluster(running.info)
