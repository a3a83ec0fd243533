"""Workers on hosts of their own: no shared folder, output in a bucket, the stream's own machine sent to
them. And what is said if such a host is not set up as it must be.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from seriatim.embedded import s3
from seriatim.embedded.broker import BrokerInfo
from tests.integration import separate_hosts
from tests.integration.lab import Lab
from tests.integration.separate_hosts import SeparateHost, SeparateHosts

pytestmark = pytest.mark.full

PARTITIONS = 12
SESSIONS = 48
WAIT_SECONDS_MAX = 1800
COUNTER = '''
"""A machine that adds amounts up: the records of a session are its running totals."""

from collections.abc import Iterable

from msgspec import Struct

from seriatim import Machine
{imports}

class Total(Struct):
    """State."""

    total: int = 0


class Start(Struct, tag_field="type", tag="start"):
    """A session begins."""

    seq: int


class Add(Struct, tag_field="type", tag="add"):
    """An amount."""

    seq: int
    amount: int


class Sum(Struct):
    """Record."""

    total: int


class Counter(Machine[Total, Start | Add, Sum]):
    """Adds up."""

    def start(self, session: str) -> Total:
        """Nothing yet."""
        return Total()

    def apply(self, total: Total, message: Start | Add) -> Iterable[Sum]:
        """One record per message."""
        total.total = 0 if isinstance(message, Start) else total.total + message.amount
        yield Sum(total.total)

    def is_snapshot(self, message: Start | Add) -> bool:
        """A start needs nothing before it."""
        return isinstance(message, Start)
'''


@pytest.fixture
def hosts(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    broker: BrokerInfo,
    s3_variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SeparateHosts]:
    """A master, and no worker yet."""
    lacking = separate_hosts.missing_tools()
    if lacking:
        pytest.skip(lacking)
    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path_factory.mktemp("hosts")
    copy = folder / "copy"
    separate_hosts.copy_package(copy)
    monkeypatch.setenv("COPY", str(copy))
    ports = [int(broker.bootstrap_servers.rpartition(":")[2])]
    ports.append(int(urlsplit(s3_variables["AWS_ENDPOINT_URL"]).port or 0))
    made = SeparateHosts(folder, [tmp_path], ports)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _stream(lab: Lab, topic: str, imports: str = "") -> None:
    """A stream with a machine of its own and its output in the bucket."""
    lab.stream(
        "sums",
        topic,
        {"machine": "counter:Counter", "sequence": "seq"},
        output={"path": f"s3://{s3.BUCKET}/{topic}"},
    )
    (lab.folder / "streams" / "counter.py").write_text(COUNTER.format(imports=imports))


def _messages(topic: str, count: int) -> tuple[list[tuple[str, int, str, Any]], dict[str, int]]:
    """Messages in order, and the total that each session must end with."""
    messages: list[tuple[str, int, str, Any]] = []
    totals = {}
    for session in range(SESSIONS):
        start = {"type": "start", "seq": 1}
        messages.append((topic, session % PARTITIONS, f"s{session}", start))
        totals[f"s{session}"] = 0
    for number in range(count - SESSIONS):
        session = number % SESSIONS
        sequence = 2 + number // SESSIONS
        amount = number * 7919 % 1000 - 500
        totals[f"s{session}"] += amount
        add = {"type": "add", "seq": sequence, "amount": amount}
        messages.append((topic, session % PARTITIONS, f"s{session}", add))
    return messages, totals


def _run(lab: Lab, hosts: SeparateHosts, **environment: str) -> Any:
    return lab.command(
        "run",
        "sums",
        **{
            "SERIATIM_SPARK_MASTER": hosts.master,
            "SERIATIM_SPARK_EXECUTOR_WAIT_SECONDS": "300",
            **environment,
        },
    )


def _last_totals(lab: Lab) -> dict[str, int]:
    states = {}
    for (_, session), saved in lab.sessions("sums").items():
        states[session] = saved["state"]["total"]
    return states


def _commit_count(lab: Lab) -> int:
    """How many commits the ledger has."""
    keys = lab.store("sums").keys("records/_delta_log/")
    return sum(key.endswith(".json") for key, _ in keys)


def _start_and_wait(
    lab: Lab, hosts: SeparateHosts, messages_max: int = 60_000, **environment: str
) -> subprocess.Popen[str]:
    """Start a run on the hosts, and return after its first slice: the next one is being folded then."""
    run = lab.start(
        "run",
        "sums",
        "--messages-max",
        str(messages_max),
        **{"SERIATIM_SPARK_MASTER": hosts.master, **environment},
    )
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    # The first entry begins the stream.
    while _commit_count(lab) < 2:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return run


def test_two_hosts_without_a_shared_folder(
    lab: Lab, topic: Callable[..., str], hosts: SeparateHosts
) -> None:
    """300,000 messages, the stream's own machine, output in a bucket; the first host is lost in the
    middle. Every total is that of an independent addition, and verify finds nothing.
    """
    name = topic(PARTITIONS)
    _stream(lab, name)
    messages, totals = _messages(name, 300_000)
    lab.send(messages)
    first = hosts.add_worker(separate_hosts.installed_package())
    hosts.add_worker(separate_hosts.installed_package())
    run = _start_and_wait(lab, hosts)
    first.kill()
    _assert_ends_right(lab, hosts, run, totals)


def _assert_ends_right(
    lab: Lab, hosts: SeparateHosts, run: subprocess.Popen[str], totals: dict[str, int]
) -> None:
    """The run goes on and ends, with the totals of an independent addition and a ledger that holds."""
    commits_then = _commit_count(lab)
    _, errors = run.communicate(timeout=3600)
    assert run.returncode == 0, errors + hosts.executor_logs()
    assert _commit_count(lab) > commits_then
    assert _last_totals(lab) == totals
    verified = lab.command("verify", "sums")
    assert verified.returncode == 0, verified.stderr


def test_a_host_behind_a_cut_network(
    lab: Lab, topic: Callable[..., str], hosts: SeparateHosts
) -> None:
    """In the middle of a run one of two hosts is cut off, and nobody is told. The other one does its work,
    and nothing is lost or doubled.
    """
    name = topic(PARTITIONS)
    _stream(lab, name)
    messages, totals = _messages(name, 180_000)
    lab.send(messages)
    first = hosts.add_worker(separate_hosts.installed_package())
    hosts.add_worker(separate_hosts.installed_package())
    run = _start_and_wait(lab, hosts)
    first.cut_cable()
    _assert_ends_right(lab, hosts, run, totals)


def test_a_spark_connect_server_on_another_host(
    lab: Lab, topic: Callable[..., str], hosts: SeparateHosts
) -> None:
    """A warm server folds with the stream's own machine, which is sent to it. A machine that is changed
    between two runs is sent anew.
    """
    name = topic(PARTITIONS)
    _stream(lab, name)
    messages, totals = _messages(name, 4_800)
    lab.send(messages)
    _, remote = hosts.add_connect_server(separate_hosts.installed_package())
    run = lab.command("run", "sums", "--messages-max", "2000", SERIATIM_SPARK_REMOTE=remote)
    assert run.returncode == 0, run.stderr
    assert "slices are cut here" in run.stderr
    assert _last_totals(lab) == totals
    machine = lab.folder / "streams" / "counter.py"
    machine.write_text(machine.read_text().replace("+ message.amount", "+ 2 * message.amount"))
    last_sequence = len(messages) // SESSIONS + 1
    for session in range(SESSIONS):
        add = {"type": "add", "seq": last_sequence, "amount": 5}
        lab.send([(name, session % PARTITIONS, f"s{session}", add)])
    again = lab.command("run", "sums", SERIATIM_SPARK_REMOTE=remote)
    assert again.returncode == 0, again.stderr
    assert _last_totals(lab) == {session: total + 10 for session, total in totals.items()}
    verified = lab.command("verify", "sums")
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (separate_hosts.missing_package, "cannot run our tasks"),
        (separate_hosts.other_version, "other versions than the driver"),
    ],
    ids=["no package", "another version"],
)
def test_a_host_with_wrong_packages_is_named(
    lab: Lab,
    topic: Callable[..., str],
    hosts: SeparateHosts,
    packages: Callable[[], str],
    words: str,
) -> None:
    """Exit code 2, and one screen with the worker and what to install there."""
    _refused(lab, topic, hosts, packages(), words)


def test_a_package_that_a_machine_needs_is_missing(
    lab: Lab, topic: Callable[..., str], hosts: SeparateHosts
) -> None:
    """The machine came to the worker, but a module that it imports is only beside the driver."""
    only_here = lab.folder / "only-here"
    only_here.mkdir()
    (only_here / "seriatim_only_here.py").write_text("")
    _refused(
        lab,
        topic,
        hosts,
        separate_hosts.installed_package(),
        "seriatim_only_here",
        imports="import seriatim_only_here\n",
        PYTHONPATH=str(only_here),
    )


def test_the_file_of_kafka_settings_is_missing(
    lab: Lab, topic: Callable[..., str], hosts: SeparateHosts
) -> None:
    """Each worker reads the file of Kafka's settings by itself; the error names its path there."""
    settings = lab.folder / "kafka.conf"
    settings.write_text("client.id=me\n")
    settings.chmod(0o600)
    _refused(
        lab,
        topic,
        hosts,
        separate_hosts.installed_package(),
        "kafka.conf",
        SERIATIM_KAFKA_CONFIG=str(settings),
    )


@pytest.mark.parametrize("is_silent", [False, True], ids=["refused", "packets lost"])
def test_executors_that_cannot_reach_the_driver(
    lab: Lab, topic: Callable[..., str], hosts: SeparateHosts, is_silent: bool
) -> None:
    """The driver's address is named, and the setting that changes it, also where nobody answers at that
    address. The wait for executors is longer than the test: it is not what ends the run.
    """
    address = f"10.77.{hosts.number}.250" if is_silent else "127.0.0.1"

    def on_host(host: SeparateHost) -> None:
        if is_silent:
            host.lose_packets_to(address)

    _refused(
        lab,
        topic,
        hosts,
        separate_hosts.installed_package(),
        f"cannot reach the driver at {address}:",
        is_worker_named=False,
        on_host=on_host,
        SERIATIM_SPARK_DRIVER_HOST=address,
        SERIATIM_SPARK_DRIVER_BIND_ADDRESS=hosts.gateway,
        SERIATIM_SPARK_EXECUTOR_WAIT_SECONDS="3600",
    )


def _refused(
    lab: Lab,
    topic: Callable[..., str],
    hosts: SeparateHosts,
    packages: str,
    words: str,
    *,
    imports: str = "",
    is_worker_named: bool = True,
    on_host: Callable[[SeparateHost], None] | None = None,
    **environment: str,
) -> None:
    """Run a stream on one host, and see it refused."""
    name = topic(1)
    _stream(lab, name, imports)
    lab.send([(name, 0, "s", {"type": "start", "seq": 1})])
    host = hosts.add_worker(packages)
    if on_host is not None:
        on_host(host)
    run = _run(lab, hosts, **environment)
    assert run.returncode == 2, run.stderr + hosts.executor_logs()
    assert "ConfigError" in run.stderr, run.stderr
    assert words in run.stderr, run.stderr
    # On a busy host Spark's own process that plans slices may have written before.
    screen = run.stderr[run.stderr.index("ConfigError") :]
    assert "Traceback" not in screen, run.stderr
    if is_worker_named:
        worker = re.search(r"^ +worker +(\S+)$", run.stderr, re.MULTILINE)
        assert worker is not None, run.stderr
        assert worker[1].startswith(("host1", "10.77."))
