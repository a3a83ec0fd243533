"""The demo's stage: a broker, Airflow, a producer that keeps writing, and a mail catcher with a page. `make demo`.

Everything is on 127.0.0.1 and below `SERIATIM_HOME/demo`; Ctrl-C ends all of it, and a second start goes on where the
first one ended. `make demo-break` asks the producer to drop a message and to swap two.

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

from seriatim import config, wiring
from seriatim.catcher import MailCatcher
from seriatim.config import Settings
from seriatim.core.errors import ConfigError, SeriatimError
from seriatim.demo import CollectionPoints, Sent

ROOT = Path(__file__).resolve().parent.parent
TOPICS = ("demo-a", "demo-b", "demo-c")
ASKS = "asks-of-demo"
PARTITIONS, SESSIONS, RATE = 4, 60, 40.0
AIRFLOW_PORT, MAIL_PORT, PAGE_PORT = 8080, 8025, 8026
STREAM_MORE = f"""
snapshot_requests = "{ASKS}"
schedule = {{ cron = "* * * * *" }}
alerts = {{ to = ["on-call@localhost"] }}
"""
BREAK, SETTINGS, LOCK = "break", "env.sh", "lock"
KEPT = ("SERIATIM_HOME", "SERIATIM_IVY_SETTINGS")
"""Of settings of yours these count here as well; all others are about your own brokers, mail servers and Airflow."""


class Curtain:
    """Whether the play goes on, for the producer's thread."""

    open = True


def main(words: list[str]) -> int:
    """`up`: raise the curtain. `break`: hurt the messages on their way in."""
    folder = config.load().home / "demo"
    if words == ["break"]:
        return ask_to_break(folder)
    if words not in ([], ["up"]):
        raise ConfigError(f"{words} is no part of the demo", next="make demo, or make demo-break")
    return up(folder, config.load())


def ask_to_break(folder: Path) -> int:
    """Tell the producer of a running demo; it is heard with its next messages."""
    if not is_up(folder):
        sys.stdout.write("no demo runs here: `make demo` in another terminal first\n")
        return 2
    (folder / BREAK).touch()
    sys.stdout.write(
        "One message will be dropped and two swapped. Within two minutes the DAG `demo` is red and a mail is there:\n"
        f"  http://127.0.0.1:{PAGE_PORT}\n"
        "The two sessions are set aside, everything else goes on. Producers are asked for snapshots, so a later mail\n"
        "says that it is over. To type what the mails say, or to look:\n"
        f"  source {folder / SETTINGS}\n"
        "  seriatim status demo; seriatim gaps demo --open; seriatim repair demo\n"
    )
    return 0


@contextmanager
def curtain_up(folder: Path) -> Iterator[None]:
    """For as long as the demo runs: a lock that the system itself releases, however it ends."""
    with (folder / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_up(folder: Path) -> bool:
    """Whether a demo runs there."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def up(folder: Path, settings: Settings) -> int:
    """Start all, say where to look, wait for Ctrl-C, end all."""
    from seriatim.embedded import broker

    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us with Ctrl-C ignored
        signal.signal(number, _interrupt)
    refuse_taken_ports()
    prepare(folder)
    say("the broker …")
    found = broker.start(settings.home, program=broker.program_of(settings, say), say=say)
    mails = MailCatcher(MAIL_PORT, PAGE_PORT)
    environ = environment(folder, settings, found.bootstrap_servers)
    leave_settings(folder, environ)
    curtain, airflow = Curtain(), None
    try:
        with curtain_up(folder):
            mails.start()
            producer = (folder, config.load(environ, folder), curtain)
            threading.Thread(target=produce, args=producer, daemon=True).start()
            say("Airflow, which takes a minute …")
            airflow = start_airflow(folder, environ)
            say_where(folder)
            return wait_for(airflow)
    except KeyboardInterrupt:
        say("ending everything …")
        return 0
    finally:
        curtain.open = False
        if airflow is not None:
            end(airflow)
        mails.stop()
        broker.stop(settings.home, say)


def refuse_taken_ports() -> None:
    """Say which port is taken, before anything is started."""
    for port in (AIRFLOW_PORT, MAIL_PORT, PAGE_PORT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise ConfigError(
                    f"port {port} of 127.0.0.1 is taken", next="end what listens there (a demo that runs?), then again"
                ) from None


def prepare(folder: Path) -> None:
    """The demo's own stream file: the one of the repository, every minute, with somebody to tell."""
    streams = folder / "streams"
    streams.mkdir(parents=True, exist_ok=True)
    stock = (ROOT / "streams" / "demo.toml").read_text()
    first, table, rest = stock.partition("[table]")
    (streams / "demo.toml").write_text(f"{first.rstrip()}\n{STREAM_MORE}\n{table}{rest}")
    (folder / BREAK).unlink(missing_ok=True)


def environment(folder: Path, settings: Settings, servers: str) -> dict[str, str]:
    """What Airflow and its tasks are started with. Everybody is an admin: it listens on 127.0.0.1 alone."""
    yours = {
        name: value
        for name, value in config.environment().items()
        if name in KEPT or not name.startswith(("AIRFLOW", config.PREFIX))
    }
    return {
        **yours,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{config.environment().get('PATH', '')}",
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


def leave_settings(folder: Path, environ: dict[str, str]) -> None:
    """A file to be sourced: in that shell `seriatim` means this demo, and has what mails say to type."""
    ours = {name: value for name, value in environ.items() if name.startswith(config.PREFIX)}
    known = {f"{config.PREFIX}{field.upper()}" for field in Settings.__struct_fields__}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in {**ours, "PATH": environ["PATH"]}.items()]
    file = folder / SETTINGS
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


def end(airflow: subprocess.Popen[bytes]) -> None:
    """The whole group, kindly at first."""
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(airflow.pid, number)
            airflow.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def wait_for(airflow: subprocess.Popen[bytes]) -> int:
    """Until Ctrl-C; Airflow that ends by itself ends the demo."""
    code = airflow.wait()
    say(f"Airflow ended by itself with code {code}: its log says why")
    return 4


def produce(folder: Path, settings: Settings, curtain: Curtain) -> None:
    """Keep writing, answer who asks for snapshots, and break something when told to."""
    from seriatim.adapters.producer import Asked, make_topics, send

    client = wiring.kafka_client(settings)
    make_topics(client, {ASKS: 1})
    asked = Asked(client, ASKS)
    points = CollectionPoints(list(TOPICS), SESSIONS, seed=int(time.time()))
    messages = breakable(points.messages(asked), lambda: _taken(folder / BREAK))
    live = iter(lambda: next(messages) if curtain.open else None, None)
    send(client, dict.fromkeys(TOPICS, PARTITIONS), live, RATE, None, lambda _: None)
    asked.close()


def _taken(flag: Path) -> bool:
    try:
        flag.unlink()
    except FileNotFoundError:
        return False
    return True


def breakable(messages: Iterator[Sent], told: Callable[[], bool]) -> Iterator[Sent]:
    """The same messages; when told, the next one is dropped, and two neighbours of another session are swapped."""
    dropped, held = "", list[Sent]()
    for message in messages:
        if not dropped and told():
            dropped = message.key
        elif dropped and not held and message.key != dropped and b'"snapshot"' not in message.value:
            held.append(message)
        else:
            yield message
            if held and held[0].key == message.key:
                yield held.pop()
                dropped = ""


def say_where(folder: Path) -> None:
    """What there is to look at."""
    say(
        f"""
  Airflow   http://127.0.0.1:{AIRFLOW_PORT}   the DAG `demo` runs every minute; no password
  streams   http://127.0.0.1:{AIRFLOW_PORT}/plugin/seriatim   how every stream is; the same in a terminal: seriatim top
  mails     http://127.0.0.1:{PAGE_PORT}
  output    {folder / "lake" / "demo"}   Delta tables: records, current, gaps, quarantine
  log       {folder / "airflow.log"}
  commands  source {folder / SETTINGS}   then `seriatim status demo`, and what mails say to type

  make demo-break, in another terminal: messages are hurt on their way in
  Ctrl-C ends everything; the next `make demo` goes on from here
"""
    )


def say(text: str) -> None:
    """To whoever watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SeriatimError as error:
        say(error.render())
        sys.exit(error.exit_code)
