"""The demo: a broker, Airflow, a producer that keeps writing, and a mail catcher with a page.
`make demo` runs it.

Everything is on 127.0.0.1 and below `SERIATIM_HOME/demo`. Ctrl-C ends all of it, and a second start
goes on where the first one ended. `make demo-break` asks the producer to drop a message and to swap
two.

Next: demo/generator.py makes the messages; demo/catcher.py shows the mails.
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

ROOT = Path(__file__).resolve().parents[2]
"""The repository: the demo uses its folders dags, plugins and streams."""
TOPICS = ("demo-a", "demo-b", "demo-c")
REQUESTS_TOPIC = "asks-of-demo"
PARTITIONS = 4
SESSIONS = 60
RATE = 40.0
AIRFLOW_PORT = 8080
MAIL_PORT = 8025
PAGE_PORT = 8026
STREAM_EXTRA_SETTINGS = f"""
snapshot_requests = "{REQUESTS_TOPIC}"
schedule = {{ cron = "* * * * *" }}
alerts = {{ to = ["on-call@localhost"] }}
"""
BREAK_FILE = "break"
SETTINGS_FILE = "env.sh"
LOCK_FILE = "lock"
KEPT_SETTINGS = ("SERIATIM_HOME", "SERIATIM_IVY_SETTINGS")
"""These settings of the user count in the demo as well. All others concern the user's own brokers,
mail servers and Airflow, which the demo must not touch.
"""


class DemoState:
    """Says to the thread of the producer whether the demo still runs."""

    is_running = True


def main(arguments: list[str]) -> int:
    """`up` runs the demo; `break` makes a running demo drop and swap messages."""
    folder = config.load_settings().home / "demo"
    if arguments == ["break"]:
        return request_break(folder)
    if arguments not in ([], ["up"]):
        raise ConfigError(
            f"{arguments} is no part of the demo", next="make demo, or make demo-break"
        )
    return run_demo(folder, config.load_settings())


def request_break(folder: Path) -> int:
    """Ask the producer of a running demo for faults. It reads the request with its next message."""
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
    """Hold a lock while the demo runs. The operating system releases it, however the demo ends."""
    with (folder / LOCK_FILE).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_demo_running(folder: Path) -> bool:
    """Whether a demo runs in this folder."""
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
    """Run the demo until Ctrl-C.

    1. Check the ports, and write the stream file.
    2. Start the broker, the mail catcher, the producer and Airflow.
    3. Say where to look, and wait.
    4. Stop everything.
    """
    from seriatim.embedded import broker

    # A shell may have started us with SIGINT ignored, so both are set explicitly.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise_interrupt)
    # 1.
    refuse_taken_ports()
    write_stream_file(folder)
    # 2.
    print_line("the broker …")
    program = broker.find_kafka_program(settings, print_line)
    broker_info = broker.start_broker(settings.home, program=program, print_notice=print_line)
    mails = MailCatcher(MAIL_PORT, PAGE_PORT)
    environ = airflow_environment(folder, settings, broker_info.bootstrap_servers)
    write_settings_file(folder, environ)
    demo_state = DemoState()
    airflow = None
    try:
        with demo_lock(folder):
            mails.start()
            producer_arguments = (folder, config.load_settings(environ, folder), demo_state)
            threading.Thread(target=produce_messages, args=producer_arguments, daemon=True).start()
            print_line("Airflow, which takes a minute …")
            airflow = start_airflow(folder, environ)
            # 3.
            print_addresses(folder)
            return wait_for_airflow(airflow)
    except KeyboardInterrupt:
        print_line("ending everything …")
        return 0
    finally:
        # 4.
        demo_state.is_running = False
        if airflow is not None:
            stop_airflow(airflow)
        mails.stop()
        broker.stop_broker(settings.home, print_line)


def refuse_taken_ports() -> None:
    """Refuse to start if a port is taken, and say which one."""
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
    """Write the demo's own stream file: the one of the repository, with a schedule of one minute and
    an address for alerts.
    """
    streams = folder / "streams"
    streams.mkdir(parents=True, exist_ok=True)
    template = (ROOT / "streams" / "demo.toml").read_text()
    # Settings of the stream itself have to stand before the first table of a TOML file.
    top, table_header, tables = template.partition("[table]")
    content = f"{top.rstrip()}\n{STREAM_EXTRA_SETTINGS}\n{table_header}{tables}"
    (streams / "demo.toml").write_text(content)
    (folder / BREAK_FILE).unlink(missing_ok=True)


def airflow_environment(folder: Path, settings: Settings, servers: str) -> dict[str, str]:
    """The environment of Airflow and its tasks. Everybody is an admin there, because it listens on
    127.0.0.1 only.
    """
    environment = config.child_environment()
    inherited = {}
    for name, value in environment.items():
        is_setting = name.startswith(("AIRFLOW", config.ENVIRONMENT_PREFIX))
        if name in KEPT_SETTINGS or not is_setting:
            inherited[name] = value
    program_folder = Path(sys.executable).parent
    return {
        **inherited,
        "PATH": f"{program_folder}{os.pathsep}{environment.get('PATH', '')}",
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        # By default a scheduler ends after waiting 5 seconds for SQLite. On a busy host other
        # processes may write for longer than that.
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
    """Write a file to be sourced by a shell. In that shell `seriatim` works on this demo, so that the
    commands in mails can be typed as they are.
    """
    prefix = config.ENVIRONMENT_PREFIX
    exported = {name: value for name, value in environ.items() if name.startswith(prefix)}
    all_settings = {f"{prefix}{field.upper()}" for field in Settings.__struct_fields__}
    unset_names = " ".join(sorted(all_settings - set(exported)))
    lines = [f"unset {unset_names}"]
    for name, value in {**exported, "PATH": environ["PATH"]}.items():
        lines.append(f"export {name}={shlex.quote(value)}")
    file = folder / SETTINGS_FILE
    file.touch(mode=0o600)
    # `touch` does not change the mode of a file that an earlier demo left.
    file.chmod(0o600)
    file.write_text("\n".join(lines) + "\n")


def start_airflow(folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start Airflow with all its parts, in a process group of its own. Its output goes to a file."""
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
    """End the whole process group: with SIGINT first, with SIGKILL if that does not help."""
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(airflow.pid, number)
            airflow.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def wait_for_airflow(airflow: subprocess.Popen[bytes]) -> int:
    """Wait until Ctrl-C. If Airflow ends by itself, the demo ends as well: returns its exit code."""
    code = airflow.wait()
    print_line(f"Airflow ended by itself with code {code}: its log says why")
    return 4


def produce_messages(folder: Path, settings: Settings, demo_state: DemoState) -> None:
    """Keep writing messages, answer snapshot requests, and inject faults on request."""
    from seriatim.demo.producer import SnapshotRequestListener, create_topics, send_messages

    client = context.kafka_client(settings)
    create_topics(client, {REQUESTS_TOPIC: 1})
    listener = SnapshotRequestListener(client, REQUESTS_TOPIC)
    points = CollectionPoints(list(TOPICS), SESSIONS, seed=int(time.time()))
    messages = break_messages_on_request(
        points.messages(listener), lambda: _remove_flag(folder / BREAK_FILE)
    )
    topics = dict.fromkeys(TOPICS, PARTITIONS)
    live_messages = _until_demo_ends(messages, demo_state)
    send_messages(client, topics, live_messages, RATE, None, lambda _: None)
    listener.close()


def _until_demo_ends(
    messages: Iterator[DemoMessage], demo_state: DemoState
) -> Iterator[DemoMessage]:
    while demo_state.is_running:
        yield next(messages)


def _remove_flag(flag: Path) -> bool:
    """Remove the file. Returns whether it existed."""
    try:
        flag.unlink()
    except FileNotFoundError:
        return False
    return True


def break_messages_on_request(
    messages: Iterator[DemoMessage], is_break_requested: Callable[[], bool]
) -> Iterator[DemoMessage]:
    """The same messages. On request the next one is dropped, and two neighbours of another session
    are swapped.
    """
    dropped_key = ""
    swapped: DemoMessage | None = None
    for message in messages:
        if not dropped_key and is_break_requested():
            dropped_key = message.key
            continue
        is_other_session = bool(dropped_key) and message.key != dropped_key
        if swapped is None and is_other_session and b'"snapshot"' not in message.value:
            swapped = message
            continue
        yield message
        if swapped is not None and swapped.key == message.key:
            yield swapped
            swapped = None
            dropped_key = ""


def print_addresses(folder: Path) -> None:
    """Say where to look."""
    print_line(
        f"""
  Airflow   http://127.0.0.1:{AIRFLOW_PORT}   the DAG `demo` runs every minute; no password
  streams   http://127.0.0.1:{AIRFLOW_PORT}/plugin/seriatim   how every stream is; the same in a terminal: seriatim top
  mails     http://127.0.0.1:{PAGE_PORT}
  output    {folder / "lake" / "demo"}   Delta tables: records, current, gaps, quarantine
  log       {folder / "airflow.log"}
  commands  source {folder / SETTINGS_FILE}   then `seriatim status demo`, and what mails say to type

  make demo-break, in another terminal: messages are damaged on their way in
  Ctrl-C ends everything; the next `make demo` goes on from here
"""
    )


def print_line(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SeriatimError as error:
        print_line(error.render())
        sys.exit(error.exit_code)
