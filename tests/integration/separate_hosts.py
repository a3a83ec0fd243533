"""Workers of Spark as on hosts of their own: each in its own network and mount namespace, with its own
host name and Python packages, and without the project, the test's folder and the caches.

It needs root and iproute2. The bridge between them leads nowhere else. Kafka and the S3 server listen on
127.0.0.1 of the real host; forwarders lend these two ports to the namespaces.

Next: test_separate_hosts.py.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import psutil

from seriatim.embedded.cluster import (
    MASTER_CLASS,
    WORKER_CLASS,
    daemon_environment,
    spark_class_command,
)

ROOT = Path(__file__).parent.parent.parent
VENV = Path(sys.prefix)
WAIT_SECONDS_MAX = 600
FORWARDER = """
import socket, sys, threading

def copy(source, target):
    try:
        while content := source.recv(65536):
            target.sendall(content)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def serve(here, there, port):
    server = socket.create_server((here, port), backlog=64)
    while True:
        client, _ = server.accept()
        try:
            upstream = socket.create_connection((there, port))
        except OSError:
            client.close()
            continue
        for ends in ((client, upstream), (upstream, client)):
            threading.Thread(target=copy, args=ends, daemon=True).start()

here, there = sys.argv[1:3]
for port in sys.argv[3:]:
    threading.Thread(target=serve, args=(here, there, int(port))).start()
"""
HOST_SETUP = """
set -eu
hostname {name}
mount --make-rprivate /
# A host that cannot find its own name starts no worker.
printf '127.0.0.1 localhost\n{address} {name}\n' > {own}/hosts
mount --bind {own}/hosts /etc/hosts
mkdir -p {own}/venv-below {own}/upper {own}/work {own}/home
mount --bind {venv} {own}/venv-below
for folder in {hidden}; do mount -t tmpfs tmpfs $folder; done
mkdir -p {venv}
mount -t overlay overlay -o lowerdir={own}/venv-below,upperdir={own}/upper,workdir={own}/work {venv}
{packages}
{python} {forwarder} 127.0.0.1 {gateway} {ports} &
exec "$@"
"""
"""What a host does before its worker starts. The packages are an overlay: what is changed there is
changed for this host alone.
"""


def missing_tools() -> str:
    """Why hosts cannot be made here; empty: they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    name = f"seriatim-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class SeparateHost:
    """A host, and what runs on it."""

    def __init__(self, name: str, address: str, link: str, cable_end: str) -> None:
        self.name = name
        self.address = address
        self.link = link
        """The end of its network cable that is on the bridge."""
        self.cable_end = cable_end
        """The other end."""
        self.process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """It loses its power."""
        assert self.process is not None
        kill_tree(self.process)

    def cut_cable(self) -> None:
        """Nothing reaches it any more, and it reaches nobody. Nobody is told."""
        _ip("link", "set", self.link, "down")

    def lose_packets_to(self, address: str) -> None:
        """As behind a firewall that drops them: nobody has this hardware address."""
        nobody = ["lladdr", "02:00:00:00:00:01", "dev", self.cable_end]
        _ip("-n", self.name, "neigh", "replace", address, *nobody)


class SeparateHosts:
    """A master on this host and workers on hosts of their own, until `close`."""

    def __init__(self, folder: Path, hidden: Sequence[Path], ports: Sequence[int]) -> None:
        self.folder = folder
        self.hidden = [ROOT, *hidden]
        self.ports = ports
        self.number = os.getpid() % 200 + 20
        self.gateway = f"10.77.{self.number}.1"
        self.master = f"spark://{self.gateway}:{MASTER_PORT}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.names: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.forwarder = folder / "forwarder.py"
        self.forwarder.write_text(FORWARDER)

    @property
    def bridge(self) -> str:
        """The name of the bridge."""
        return f"srt{self.number}"

    def open(self) -> None:
        """Make the bridge, lend the ports to it, and start the master."""
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        lend = [sys.executable, str(self.forwarder), self.gateway, "127.0.0.1"]
        self._start("forwarder", [*lend, *map(str, self.ports)], {})
        arguments = ["--host", self.gateway, "--port", str(MASTER_PORT), "--webui-port", "0"]
        command = spark_class_command(MASTER_CLASS, *arguments)
        self._start("master", command, daemon_environment(self.gateway))
        _wait_for_port(self.gateway, MASTER_PORT)

    def add_worker(
        self, packages: str, environment: Mapping[str, str] | None = None
    ) -> SeparateHost:
        """Start a worker on a new host. `packages`: shell lines that change its Python packages."""
        host = self._new_host()
        worker = spark_class_command(
            WORKER_CLASS,
            *["--host", host.address, "--cores", "1", "--memory", "2g", "--webui-port", "0"],
            *["--work-dir", str(self.folder / host.name / "executors"), self.master],
        )
        variables = {**daemon_environment(host.address), **(environment or {})}
        return self._run_on_host(host, packages, worker, variables)

    def add_connect_server(self, packages: str) -> tuple[SeparateHost, str]:
        """Start a Spark Connect server on a new host, which is all of its cluster. Returns the host, and the
        server's address.
        """
        host = self._new_host()
        settings = {
            "spark.connect.grpc.binding.address": host.address,
            "spark.connect.grpc.binding.port": str(CONNECT_PORT),
            "spark.driver.host": host.address,
            "spark.ui.enabled": "false",
            "spark.python.daemon.module": "seriatim.spark_daemon",
        }
        confs = [part for item in settings.items() for part in ("--conf", "=".join(item))]
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]", *confs]
        command += ["--driver-memory", "1g", "--class", CONNECT_CLASS, "spark-internal"]
        variables = {"SPARK_HOME": str(SPARK_HOME), "PYSPARK_PYTHON": sys.executable}
        self._run_on_host(host, packages, command, variables)
        _wait_for_port(host.address, CONNECT_PORT)
        return host, f"sc://{host.address}:{CONNECT_PORT}"

    def _new_host(self) -> SeparateHost:
        """A network namespace on the bridge."""
        number = len(self.names) + 1
        name = f"host{number}-{self.number}"
        address = f"10.77.{self.number}.{10 + number}"
        self.names.append(name)
        (self.folder / name).mkdir()
        near, far = self._cable(number)
        _ip("netns", "add", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("link", "set", near, "master", self.bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", far)
        _ip("-n", name, "link", "set", far, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return SeparateHost(name, address, near, far)

    def _cable(self, number: int) -> tuple[str, str]:
        """The two ends of a host's network cable: on the bridge, and in the host."""
        return f"v{number}x{self.number}", f"w{number}x{self.number}"

    def _run_on_host(
        self,
        host: SeparateHost,
        packages: str,
        program: Sequence[str],
        environment: Mapping[str, str],
    ) -> SeparateHost:
        own = self.folder / host.name
        setup = HOST_SETUP.format(
            name=host.name,
            address=host.address,
            own=own,
            venv=VENV,
            hidden=" ".join(map(str, self.hidden)),
            packages=packages,
            python=sys.executable,
            forwarder=self.forwarder,
            gateway=self.gateway,
            ports=" ".join(map(str, self.ports)),
        )
        command = ["ip", "netns", "exec", host.name, "unshare", "--mount", "--uts"]
        variables = {"HOME": str(own / "home"), **environment}
        host.process = self._start(
            host.name, [*command, "bash", "-c", setup, "setup", *program], variables
        )
        return host

    def executor_logs(self) -> str:
        """What all executors wrote, for a test that failed."""
        logs = sorted(self.folder.glob("*/executors/*/*/stderr"))
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in logs[-3:])

    def close(self) -> None:
        """End everything, and take the namespaces and the bridge away."""
        for process in reversed(self.processes):
            kill_tree(process)
        for number, name in enumerate(self.names, 1):
            # A namespace lives on while the kernel tries to close its connections, and the cable with it.
            cable = self._cable(number)[0]
            subprocess.run(["ip", "link", "del", cable], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)

    def _start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process


MASTER_PORT = 7077
CONNECT_PORT = 15002
CONNECT_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
SPARK_HOME = Path(str(files("pyspark")))
SITE_PACKAGES = SPARK_HOME.parent


def installed_package() -> str:
    """Shell lines that install this package on a host, from a copy that is made before the project is
    hidden.
    """
    return f"{missing_package()}\ncp -r $COPY/seriatim {SITE_PACKAGES}/\ncp -r $COPY/*.dist-info {SITE_PACKAGES}/"


def missing_package() -> str:
    """Shell lines after which a host has everything but this package."""
    return f"rm -rf {SITE_PACKAGES}/__editable__*seriatim* {SITE_PACKAGES}/seriatim-*.dist-info"


def other_version() -> str:
    """Shell lines that install this package as if it were of another version."""
    rename = (
        f"sed -i 's/^Version: .*/Version: 0.0.1/' {SITE_PACKAGES}/seriatim-*.dist-info/METADATA"
    )
    return f"{installed_package()}\n{rename}"


def copy_package(folder: Path) -> None:
    """Copy this package with its metadata, as a host would get it from a wheel."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "seriatim", folder / "seriatim", ignore=ignored)
    for metadata in SITE_PACKAGES.glob("seriatim-*.dist-info"):
        shutil.copytree(metadata, folder / metadata.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _wait_for_port(host: str, port: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    for child in children:
        if child.is_running():
            child.kill()
    process.kill()
    process.wait()
