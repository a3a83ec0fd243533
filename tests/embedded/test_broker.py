"""The embedded broker: real processes, killed for real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from seriatim.embedded import broker as embedded
from seriatim.embedded import server_process
from seriatim.embedded.broker import BrokerInfo, KafkaProgram
from seriatim.errors import ConfigError, PlatformError

MESSAGES_SAMPLE = 20_000
MESSAGES_FULL = 1_000_000


class Home:
    """A home of its own, and everything said there."""

    def __init__(self, path: Path, program: KafkaProgram) -> None:
        self.path = path
        self.program = program
        self.said: list[str] = []

    def start(self, port: int | None = None, **overrides: str) -> BrokerInfo:
        """Start it; `log_retention_hours` is `log.retention.hours`."""
        settings = {key.replace("_", "."): value for key, value in overrides.items()}
        return embedded.start_broker(
            self.path, port, settings, program=self.program, print_notice=self.said.append
        )

    def stop(self) -> bool:
        """Stop it."""
        return embedded.stop_broker(self.path, self.said.append)


@pytest.fixture
def home(tmp_path: Path, broker_program: KafkaProgram) -> Iterator[Home]:
    """An empty home with a name that Java could misread; what still runs in it at the end is
    stopped.
    """
    made = Home(tmp_path / "ein Heim für 家 🏠", broker_program)
    yield made
    made.stop()


def _produce(servers: str, topic: str, count: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(timeout=120)
    producer = Producer(
        {"bootstrap.servers": servers, "linger.ms": 50, "queue.buffering.max.messages": 2_000_000}
    )
    for number in range(count):
        producer.produce(topic, value=b"%d" % number)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(300) == 0


def _consume(servers: str, topic: str, count: int) -> list[int]:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic})
    consumer.assign([TopicPartition(topic, 0, 0)])
    numbers: list[int] = []
    patience = time.monotonic() + 300
    while len(numbers) < count and time.monotonic() < patience:
        numbers += [int(message.value()) for message in consumer.consume(10_000, timeout=1)]
    consumer.close()
    return numbers


def _kill(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    process.wait(300)


def test_what_is_produced_can_be_consumed(
    broker: BrokerInfo, topic_name: Callable[[], str]
) -> None:
    """The broker of the test run takes messages and gives them back in order."""
    name = topic_name()
    _produce(broker.bootstrap_servers, name, 100)
    assert _consume(broker.bootstrap_servers, name, 100) == list(range(100))


def test_each_test_has_its_own_topics(broker: BrokerInfo, topic: Callable[..., str]) -> None:
    """Two topics of one test have two names, and the partitions and settings asked for."""
    first, second = topic(partitions=3), topic(settings={"cleanup.policy": "compact"})
    found = (
        AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=120).topics
    )
    assert first != second
    assert (len(found[first].partitions), len(found[second].partitions)) == (3, 1)


def test_messages_survive_stop_and_kill(home: Home, full: bool) -> None:
    """Stopped and started, killed and started: everything is still there, at the same address."""
    count = MESSAGES_FULL if full else MESSAGES_SAMPLE
    first = home.start()
    _produce(first.bootstrap_servers, "kept", count)
    assert home.stop()
    again = home.start()
    assert _consume(again.bootstrap_servers, "kept", count) == list(range(count))
    _kill(again.pid)
    last = home.start()
    assert _consume(last.bootstrap_servers, "kept", count) == list(range(count))
    assert first.bootstrap_servers == again.bootstrap_servers == last.bootstrap_servers


def test_a_start_while_one_runs_returns_it(home: Home) -> None:
    """The second start says so and changes nothing; asking for something else is refused."""
    first = home.start(log_retention_hours="1")
    assert home.start() == first
    assert home.start(log_retention_hours="1") == first
    assert f"already running (pid {first.pid})" in home.said
    with pytest.raises(ConfigError, match=r"already running without log\.retention\.hours=2"):
        home.start(log_retention_hours="2")
    with pytest.raises(ConfigError, match="already running without --port=1"):
        home.start(port=1)


def test_starts_at_once_give_one_broker(home: Home) -> None:
    """Starts in one home are let in one after the other: all get the same process."""
    found: list[BrokerInfo] = []
    threads = [threading.Thread(target=lambda: found.append(home.start())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1


def test_two_homes_stand_side_by_side(home: Home, broker: BrokerInfo) -> None:
    """Another home's broker is another cluster; stopping one leaves the other alone."""
    other = home.start()
    mine, yours = (embedded.cluster_id(each.bootstrap_servers, 10) for each in (other, broker))
    assert mine
    assert yours
    assert mine != yours
    home.stop()
    assert embedded.cluster_id(broker.bootstrap_servers, 10) == yours


STARTER = """
import signal
import sys
from pathlib import Path
from seriatim.embedded import broker
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background hands down that it is ignored
home, java, *jars = (Path(argument) for argument in sys.argv[1:])
broker.start_broker(home, program=broker.KafkaProgram(java, jars), print_notice=print)
"""


def test_a_killed_starter_leaves_nothing_that_blocks(home: Home) -> None:
    """Its starter is killed while it comes up: the next start finds the broker and waits for it."""
    program = home.program
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(home.path), str(program.java), *map(str, program.jars)]
    )
    while not (home.path / "kafka" / "broker.log").exists():
        time.sleep(0.05)
    starter.kill()
    starter.wait()
    info = home.start()
    assert f"already running (pid {info.pid})" in home.said
    assert embedded.cluster_id(info.bootstrap_servers, 120)


def test_a_starter_killed_while_formatting_leaves_nothing_that_blocks(home: Home) -> None:
    """A half-made data folder is made anew."""
    half = home.path / "kafka" / "data.new"
    half.mkdir(parents=True)
    (half / "bootstrap.checkpoint").write_bytes(b"half")
    assert home.start().data == home.path / "kafka" / "data"


def test_a_stranger_with_a_familiar_pid_is_left_alone(home: Home) -> None:
    """Nothing but our own marker makes a process ours: a stranger is neither found nor stopped."""
    info = home.start()
    home.stop()
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)", str(info.data)]
    )
    try:
        assert embedded.broker_status(home.path) is None
        assert not home.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_taken_port_is_named(home: Home) -> None:
    """A port given by hand is used or refused, never replaced."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            home.start(port=port)
    assert home.start(port=port).bootstrap_servers == f"127.0.0.1:{port}"


def test_it_is_not_reachable_from_outside(broker: BrokerInfo) -> None:
    """Every listening socket of the broker is on 127.0.0.1."""
    sockets = psutil.Process(broker.pid).net_connections(kind="tcp")
    listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert listening


def test_an_override_holds(home: Home) -> None:
    """A setting given at the start is the broker's setting: here, how large a message may be."""
    info = home.start(message_max_bytes="2000")
    admin = AdminClient({"bootstrap.servers": info.bootstrap_servers})
    admin.create_topics([NewTopic("small", 1, 1)])["small"].result(timeout=120)
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": info.bootstrap_servers})
    producer.produce("small", b"x" * 3000, on_delivery=lambda error, _: failures.append(error))
    producer.flush(30)
    assert "MSG_SIZE_TOO_LARGE" in str(failures)


def test_a_mistyped_setting_is_refused(home: Home) -> None:
    """Kafka would ignore it; we name it and the one that was meant, and leave nothing running."""
    with pytest.raises(ConfigError, match="no such setting") as caught:
        home.start(log_retention_hour="1")
    assert caught.value.next == "did you mean log.retention.hours?"
    assert embedded.broker_status(home.path) is None


def test_a_wrong_value_is_a_configuration_error(home: Home) -> None:
    """Kafka's own words are the cause."""
    with pytest.raises(ConfigError, match="ended while starting") as caught:
        home.start(log_retention_hours="soon")
    assert "Invalid value soon" in str(caught.value.fields["cause"])


def test_topics_are_not_created_by_themselves(
    broker: BrokerInfo, topic_name: Callable[[], str]
) -> None:
    """A message to a mistyped topic does not make that topic."""
    name = topic_name()
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "message.timeout.ms": 2000})
    producer.produce(name, b"x")
    producer.flush(30)
    assert (
        name
        not in AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        .list_topics(timeout=120)
        .topics
    )


def test_a_data_folder_that_cannot_be_made_is_told(home: Home) -> None:
    """A broken Java or JAR ends in one sentence with the cause."""
    broken = KafkaProgram(home.program.java, home.program.jars[:1])
    with pytest.raises(PlatformError, match="data folder could not be made") as caught:
        embedded.start_broker(home.path, program=broken, print_notice=home.said.append)
    assert "ClassNotFound" in str(caught.value.fields["cause"])


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_a_home_that_kafka_would_misread_is_refused(tmp_path: Path, name: str) -> None:
    """Kafka divides a list of folders at commas, and Java a list of JARs at colons."""
    with pytest.raises(ConfigError, match="a comma or colon"):
        embedded.broker_status(tmp_path / name)


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, broker_program: KafkaProgram
) -> None:
    """A file stands where the home should be: one sentence, no stack trace."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not writable"):
        embedded.start_broker(tmp_path / "file", program=broker_program, print_notice=print)


def test_ctrl_c_while_it_starts_leaves_nothing_running(home: Home) -> None:
    """Whoever interrupts a start does not want the broker."""
    program = home.program
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(home.path), str(program.java), *map(str, program.jars)],
        stderr=subprocess.DEVNULL,
    )
    while not (home.path / "kafka" / "broker.log").exists():
        time.sleep(0.05)
    time.sleep(0.3)
    starter.send_signal(signal.SIGINT)
    assert starter.wait(300) != 0
    assert embedded.broker_status(home.path) is None


def test_nothing_answers_at_a_dead_address() -> None:
    """A ready-check on a closed port is a plain no."""
    assert embedded.cluster_id("127.0.0.1:1", 0.2) is None


def test_a_stopped_process_is_asked_then_killed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that does not react to being asked is killed, and starts again."""
    monkeypatch.setattr(server_process, "STOP_SECONDS", 1)
    info = home.start()
    os.kill(info.pid, signal.SIGSTOP)
    assert home.stop()
    assert any("did not stop" in text for text in home.said)
    assert home.start().pid != info.pid
