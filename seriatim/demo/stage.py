"""The demo's stage: a broker, Airflow, a producer that keeps writing, and a mail catcher with a
page. `make demo`.

Everything is on 127.0.0.1 and below `SERIATIM_HOME/demo`; Ctrl-C ends all of it, and a second start
goes on where the first one ended. `make demo-break` asks the producer to drop a message and to swap
two.

Next room: demo.py makes the messages; catcher.py shows the mails.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from seriatim import config, context
from seriatim.config import Settings
from seriatim.demo.catcher import MailCatcher
from seriatim.demo.generator import CollectionPoints, DemoMessage
from seriatim.errors import ConfigError, SeriatimError

ROOT = Path(__file__).resolve().parent.parent
TOPICS = ("demo-a", "demo-b", "demo-c")
REQUESTS_TOPIC = "asks-of-demo"
PARTITIONS, SESSIONS, RATE = 4, 60, 40.0
AIRFLOW_PORT, MAIL_PORT, PAGE_PORT = 8080, 8025, 8026
STREAM_EXTRA_SETTINGS = f"""
snapshot_requests = "{REQUESTS_TOPIC}"
schedule = {{ cron = "* * * * *" }}
alerts = {{ to = ["on-call@localhost"] }}
"""
BREAK_FILE, SETTINGS_FILE, LOCK_FILE = "break", "env.sh", "lock"
KEPT_SETTINGS = ("SERIATIM_HOME", "SERIATIM_IVY_SETTINGS")
"""Of settings of yours these count here as well; all others are about your own brokers, mail
servers and Airflow.
"""


class DemoState:
    """Whether the play goes on, for the producer's thread."""

    is_running = True


def main(arguments: list[str]) -> int:
    """`up`: raise the curtain. `break`: hurt the messages on their way in."""
    folder = config.load_settings().home / "demo"
    if arguments == ["break"]:
        return request_break(folder)
    if arguments not in ([], ["up"]):
        raise ConfigError(
            f"{arguments} is no part of the demo", next="make demo, or make demo-break"
        )
    return run_demo(folder, config.load_settings())


def request_break(folder: Path) -> int:
    """Tell the producer of a running demo; it is heard with its next messages."""
    if not is_demo_running(folder):
        sys.stdout.write("no demo runs here: `make demo` in another terminal first\n")
        return 2
    (folder / BREAK_FILE).touch()
    sys.stdout.write(
        "One message will be dropped and two swapped. Within two minutes the DAG `demo` is red and a mail is there:\n"
        f"  http://127.0.0.1:{PAGE_PORT}\n"
        "The two sessions are set aside, everything else goes on. Producers are asked for snapshots, so a later mail\n"
        "says that it is over. To type what the mails say, or to look:\n"
        f"  source {folder / SETTINGS_FILE}\n"
        "  seriatim status demo; seriatim gaps demo --open; seriatim repair demo\n"
    )
    return 0


@contextmanager
def demo_lock(folder: Path) -> Iterator[None]:
    """For as long as the demo runs: a lock that the system itself releases, however it ends."""
    with (folder / LOCK_FILE).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_demo_running(folder: Path) -> bool:
    """Whether a demo runs there."""
    try:
        with (folder / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _raise_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def run_demo(folder: Path, settings: Settings) -> int:
    """Start all, say where to look, wait for Ctrl-C, end all."""
    from seriatim.embedded import broker

    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # also where a shell started us with Ctrl-C ignored
        signal.signal(number, _raise_interrupt)
    refuse_taken_ports()
    write_stream_file(folder)
    print_line("the broker …")
    found = broker.start_broker(
        settings.home,
        program=broker.find_kafka_program(settings, print_line),
        print_notice=print_line,
    )
    mails = MailCatcher(MAIL_PORT, PAGE_PORT)
    environ = airflow_environment(folder, settings, found.bootstrap_servers)
    write_settings_file(folder, environ)
    curtain, airflow = DemoState(), None
    try:
        with demo_lock(folder):
            mails.start()
            producer = (folder, config.load_settings(environ, folder), curtain)
            threading.Thread(target=produce_messages, args=producer, daemon=True).start()
            print_line("Airflow, which takes a minute …")
            airflow = start_airflow(folder, environ)
            print_addresses(folder)
            return wait_for_airflow(airflow)
    except KeyboardInterrupt:
        print_line("ending everything …")
        return 0
    finally:
        curtain.is_running = False
        if airflow is not None:
            stop_airflow(airflow)
        mails.stop()
        broker.stop_broker(settings.home, print_line)


def refuse_taken_ports() -> None:
    """Say which port is taken, before anything is started."""
    for port in (AIRFLOW_PORT, MAIL_PORT, PAGE_PORT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise ConfigError(
                    f"port {port} of 127.0.0.1 is taken",
                    next="end what listens there (a demo that runs?), then again",
                ) from None


def write_stream_file(folder: Path) -> None:
    """The demo's own stream file: the one of the repository, every minute, with somebody to tell."""
    streams = folder / "streams"
    streams.mkdir(parents=True, exist_ok=True)
    stock = (ROOT / "streams" / "demo.toml").read_text()
    first, table, rest = stock.partition("[table]")
    (streams / "demo.toml").write_text(f"{first.rstrip()}\n{STREAM_EXTRA_SETTINGS}\n{table}{rest}")
    (folder / BREAK_FILE).unlink(missing_ok=True)


def airflow_environment(folder: Path, settings: Settings, servers: str) -> dict[str, str]:
    """What Airflow and its tasks are started with. Everybody is an admin: it listens on 127.0.0.1
    alone.
    """
    yours = {
        name: value
        for name, value in config.child_environment().items()
        if name in KEPT_SETTINGS or not name.startswith(("AIRFLOW", config.ENVIRONMENT_PREFIX))
    }
    return {
        **yours,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{config.child_environment().get('PATH', '')}",
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        # A scheduler that waits 5 seconds in vain for SQLite ends; on a busy machine others may write for longer.
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder / 'airflow' / 'airflow.db'}?timeout=20",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "8",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(AIRFLOW_PORT),
        "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{AIRFLOW_PORT}",
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
        "SERIATIM_HOME": str(settings.home),
        "SERIATIM_STREAMS": str(folder / "streams"),
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
        "SERIATIM_SMTP": f"127.0.0.1:{MAIL_PORT}",
        "SERIATIM_SPARK_DRIVER_MEMORY": "1g",
        "SERIATIM_AIRFLOW_URL": f"http://127.0.0.1:{AIRFLOW_PORT}",
    }


def write_settings_file(folder: Path, environ: dict[str, str]) -> None:
    """A file to be sourced: in that shell `seriatim` means this demo, and has what mails say to
    type.
    """
    ours = {
        name: value for name, value in environ.items() if name.startswith(config.ENVIRONMENT_PREFIX)
    }
    known = {f"{config.ENVIRONMENT_PREFIX}{field.upper()}" for field in Settings.__struct_fields__}
    lines = [
        f"export {name}={shlex.quote(value)}"
        for name, value in {**ours, "PATH": environ["PATH"]}.items()
    ]
    file = folder / SETTINGS_FILE
    file.touch(mode=0o600)
    file.chmod(0o600)  # one of an earlier demo, too
    file.write_text("\n".join([f"unset {' '.join(sorted(known - set(ours)))}", *lines]) + "\n")


def start_airflow(folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Airflow with all its parts, in a process group of its own; what it says is in a file."""
    (folder / "airflow").mkdir(exist_ok=True)
    with (folder / "airflow.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "airflow", "standalone"],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_airflow(airflow: subprocess.Popen[bytes]) -> None:
    """The whole group, kindly at first."""
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(airflow.pid, number)
            airflow.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def wait_for_airflow(airflow: subprocess.Popen[bytes]) -> int:
    """Until Ctrl-C; Airflow that ends by itself ends the demo."""
    code = airflow.wait()
    print_line(f"Airflow ended by itself with code {code}: its log says why")
    return 4


def produce_messages(folder: Path, settings: Settings, demo_state: DemoState) -> None:
    """Keep writing, answer who asks for snapshots, and break something when told to."""
    from seriatim.demo.producer import SnapshotRequestListener, create_topics, send_messages

    client = context.kafka_client(settings)
    create_topics(client, {REQUESTS_TOPIC: 1})
    asked = SnapshotRequestListener(client, REQUESTS_TOPIC)
    points = CollectionPoints(list(TOPICS), SESSIONS, seed=int(time.time()))
    messages = break_messages_on_request(
        points.messages(asked), lambda: _remove_flag(folder / BREAK_FILE)
    )
    live = iter(lambda: next(messages) if demo_state.is_running else None, None)
    send_messages(client, dict.fromkeys(TOPICS, PARTITIONS), live, RATE, None, lambda _: None)
    asked.close()


def _remove_flag(flag: Path) -> bool:
    try:
        flag.unlink()
    except FileNotFoundError:
        return False
    return True


def break_messages_on_request(
    messages: Iterator[DemoMessage], is_break_requested: Callable[[], bool]
) -> Iterator[DemoMessage]:
    """The same messages; when told, the next one is dropped, and two neighbours of another session
    are swapped.
    """
    dropped, held = "", list[DemoMessage]()
    for message in messages:
        if not dropped and is_break_requested():
            dropped = message.key
        elif dropped and not held and message.key != dropped and b'"snapshot"' not in message.value:
            held.append(message)
        else:
            yield message
            if held and held[0].key == message.key:
                yield held.pop()
                dropped = ""


def print_addresses(folder: Path) -> None:
    """What there is to look at."""
    print_line(
        f"""
  Airflow   http://127.0.0.1:{AIRFLOW_PORT}   the DAG `demo` runs every minute; no password
  streams   http://127.0.0.1:{AIRFLOW_PORT}/plugin/seriatim   how every stream is; the same in a terminal: seriatim top
  mails     http://127.0.0.1:{PAGE_PORT}
  output    {folder / "lake" / "demo"}   Delta tables: records, current, gaps, quarantine
  log       {folder / "airflow.log"}
  commands  source {folder / SETTINGS_FILE}   then `seriatim status demo`, and what mails say to type

  make demo-break, in another terminal: messages are hurt on their way in
  Ctrl-C ends everything; the next `make demo` goes on from here
"""
    )


def print_line(text: str) -> None:
    """To whoever watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SeriatimError as error:
        print_line(error.render())
        sys.exit(error.exit_code)
