"""The demo: a broker, Airflow, a producer that keeps writing, and a mail catcher with a page.
`make demo` runs it.

It is a world of its own: a broker, topics, a stream, an outbox and an Airflow that nothing else uses,
all of it on 127.0.0.1 and below `SERIATIM_HOME/demo`. It ends with Ctrl-C, with its terminal, or by
`make demo-stop`; a second start goes on where the first one ended. If it was killed, the next start
ends what was left. `make demo-break` asks the producer to drop a message and to swap two.
With `make demo STORE=s3` output and outbox are in a bucket of an S3 server that belongs to the demo.

Next: demo/processes.py finds and ends what was started; demo/generator.py makes the messages;
demo/catcher.py shows the mails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from seriatim import config, context
from seriatim.config import Settings
from seriatim.demo.catcher import MailCatcher
from seriatim.demo.generator import CollectionPoints, DemoMessage
from seriatim.demo.processes import (
    MARK_VARIABLE,
    DemoPorts,
    DemoRecord,
    demo_lock,
    die_with_parent_process,
    end_leftovers,
    end_marked_processes,
    is_demo_running,
    read_record,
    refuse_taken_ports,
    stop_running_demo,
    write_record,
)
from seriatim.embedded import broker, s3, server_process
from seriatim.errors import PlatformError, SeriatimError

ROOT = Path(__file__).resolve().parents[2]
"""The repository: the demo uses its folders dags, plugins and streams."""
STREAM = "live"
"""The stream of the demo. The quick start's is `demo`: with the same name, a command typed in the
wrong shell would answer for the other one.
"""
TOPICS = ("live-a", "live-b", "live-c")
TOPICS_PATTERN = "live-[a-z]+"
REQUESTS_TOPIC = "asks-of-live"
EARLIER_REQUESTS_TOPIC = "asks-of-demo"
PARTITIONS = 4
SESSIONS = 60
RATE = 40.0
STREAM_EXTRA_SETTINGS = f"""
snapshot_requests = "{REQUESTS_TOPIC}"
schedule = {{ cron = "* * * * *" }}
alerts = {{ to = ["on-call@localhost"] }}
"""
BREAK_FILE = "break"
SETTINGS_FILE = "env.sh"
AIRFLOW_LOG = "airflow.log"
KEPT_SETTINGS = ("SERIATIM_HOME", "SERIATIM_IVY_SETTINGS")
"""These settings of the user count in the demo as well. All others concern the user's own brokers,
mail servers and Airflow, which the demo must not touch.
"""
STRONGER_BUCKET_VARIABLES = (
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL_S3",
    "SERIATIM_STORE_CONFIG",
)
"""Variables of a user's own bucket that would change or win over those of the demo's S3 server."""
HEALTHY_PARTS = ("metadatabase", "scheduler", "dag_processor", "triggerer")
"""The parts of Airflow that must be well before the demo calls itself ready."""
ANSWER_SECONDS = 60.0
"""How long one answer of Airflow may take. On a busy machine it needs more than ten seconds."""
PROGRESS_EVERY_SECONDS = 10.0
LOG_LINES_SHOWN = 15


class DemoState:
    """Says to the thread of the producer whether the demo still runs."""

    is_running = True


def main(arguments: list[str]) -> int:
    """`up` runs the demo, `stop` ends it, `break` makes it drop and swap messages."""
    parser = argparse.ArgumentParser(prog="make demo, make demo-stop, make demo-break")
    parser.add_argument("action", nargs="?", choices=("up", "stop", "break"), default="up")
    parser.add_argument(
        "--port", type=int, help="three ports in a row, instead of 8080, 8025, 8026"
    )
    parser.add_argument(
        "--store", choices=("disk", "s3"), default="disk", help="where output and outbox are"
    )
    options = parser.parse_args(arguments)
    settings = config.load_settings()
    folder = settings.home / "demo"
    if options.action == "break":
        return request_break(folder)
    if options.action == "stop":
        return stop_demo(folder)
    ports = DemoPorts.beginning_at(options.port) if options.port else DemoPorts()
    return run_demo(folder, settings, ports, is_in_bucket=options.store == "s3")


def request_break(folder: Path) -> int:
    """Ask the producer of a running demo for faults. It reads the request with its next message."""
    record = read_record(folder)
    if record is None or not is_demo_running(folder):
        print_line(f"no demo runs in {folder}: `make demo` in another terminal first")
        return 2
    (folder / BREAK_FILE).touch()
    print_line(
        "One message will be dropped and two swapped. After the next run or the one after it, which on a\n"
        f"quiet machine takes about two minutes, the DAG `{STREAM}` is red and a mail is there:\n"
        f"  http://127.0.0.1:{record.ports.page}\n"
        "The two sessions are set aside, everything else goes on. Producers are asked for snapshots, so a later mail\n"
        "says that it is over. To type what the mails say, or to look:\n"
        f"  source {folder / SETTINGS_FILE}\n"
        f"  seriatim status {STREAM}; seriatim gaps {STREAM} --open; seriatim repair {STREAM}"
    )
    return 0


def stop_demo(folder: Path) -> int:
    """End a demo that runs, or what a demo that was killed has left."""
    has_stopped = stop_running_demo(folder, print_line)
    has_left = end_leftovers(folder, print_line)
    if has_stopped or has_left:
        print_line("the demo has ended; the next `make demo` goes on from here")
    else:
        print_line(f"no demo runs in {folder}")
    return 0


def _raise_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def catch_signals() -> None:
    """Let Ctrl-C, `kill`, and the end of the terminal or of `make` end the demo in good order."""
    # A shell may have started us with SIGINT ignored, so it is set explicitly.
    signals = [signal.SIGINT, signal.SIGTERM]
    # `nohup make demo` ignores SIGHUP: then the demo outlives its terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
        die_with_parent_process()
    for number in signals:
        signal.signal(number, _raise_interrupt)


def ignore_signals() -> None:
    """From here on the demo ends: a second Ctrl-C must not leave half of it running."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def run_demo(folder: Path, settings: Settings, ports: DemoPorts, *, is_in_bucket: bool) -> int:
    """Run the demo until Ctrl-C.

    1. End what an earlier demo left, and check the ports.
    2. Start the servers, the mail catcher, the producer and Airflow.
    3. When Airflow answers, say where to look, and wait.
    4. Stop everything.
    """
    catch_signals()
    with demo_lock(folder):
        record = DemoRecord.of_this_process(uuid.uuid4().hex, ports)
        mails = None
        demo_state = DemoState()
        try:
            # 1. End what an earlier demo left.
            end_leftovers(folder, print_line)
            refuse_taken_ports(ports)
            write_record(folder, record)
            # 2. Start everything, Airflow last.
            environ = start_servers(folder, settings, record, is_in_bucket=is_in_bucket)
            mails = MailCatcher(ports.mail, ports.page, folder / "mails")
            mails.start()
            start_producer(folder, environ, demo_state)
            print_line("Airflow, which takes a minute …")
            airflow = start_airflow(folder, environ)
            # 3. Say where to look, and wait.
            wait_until_ready(airflow, folder, ports)
            print_addresses(folder, ports, output_root(folder, is_in_bucket=is_in_bucket))
            wait_for_airflow(airflow, folder)
        except KeyboardInterrupt:
            print_line("ending everything …")
            return 0
        finally:
            # 4. Stop everything.
            ignore_signals()
            demo_state.is_running = False
            end_marked_processes(record.mark)
            if mails is not None:
                mails.stop()
            broker.stop_broker(folder, print_line)
            s3.stop_s3_server(folder, print_line)


def start_servers(
    folder: Path, settings: Settings, record: DemoRecord, *, is_in_bucket: bool
) -> dict[str, str]:
    """Start the demo's own broker, and its S3 server if the output is in a bucket. Write its stream
    file and the file with its settings. Returns the environment of everything that works on the demo.
    """
    bucket_variables: dict[str, str] = {}
    if is_in_bucket:
        print_line("the S3 server …")
        s3.start_s3_server(settings, folder, None, print_line)
        bucket_variables = s3.s3_environment(folder)
    print_line("the broker …")
    write_stream_file(folder, output_root(folder, is_in_bucket=is_in_bucket))
    program = broker.find_kafka_program(settings, print_line)
    broker_info = broker.start_broker(folder, program=program, print_notice=print_line)
    servers = broker_info.bootstrap_servers
    environ = airflow_environment(folder, settings, servers, record, bucket_variables)
    write_settings_file(folder, environ)
    return environ


def output_root(folder: Path, *, is_in_bucket: bool) -> str:
    """What the addresses of the demo's output and outbox begin with."""
    return f"s3://{s3.BUCKET}" if is_in_bucket else str(folder)


def write_stream_file(folder: Path, root: str) -> None:
    """Write the demo's own stream file: the one of the repository, with other topics, a schedule of
    one minute, an address for alerts, and its output below `root`.
    """
    streams = folder / "streams"
    streams.mkdir(parents=True, exist_ok=True)
    template = (ROOT / "streams" / "demo.toml").read_text()
    # Settings of the stream itself have to stand before the first table of a TOML file.
    top, table_header, tables = template.partition("[table]")
    setting_lines = [line for line in top.splitlines() if not line.startswith(("#", "topics"))]
    settings = "\n".join(setting_lines).strip()
    content = (
        "# The stream of `make demo`, which writes this file again at each start.\n"
        f'topics   = "{TOPICS_PATTERN}"\n{settings}\n{STREAM_EXTRA_SETTINGS}\n'
        f"{table_header}{tables.replace('lake/demo', f'{root}/lake/{STREAM}')}"
    )
    (streams / f"{STREAM}.toml").write_text(content)
    # A demo of an earlier version had its stream here, on another broker. A person's own file stays.
    earlier_file = streams / "demo.toml"
    if earlier_file.is_file() and EARLIER_REQUESTS_TOPIC in earlier_file.read_text():
        earlier_file.unlink()
    (folder / BREAK_FILE).unlink(missing_ok=True)


def airflow_environment(
    folder: Path,
    settings: Settings,
    servers: str,
    record: DemoRecord,
    bucket_variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of Airflow and its tasks. Everybody is an admin there, because it listens on
    127.0.0.1 only. With `bucket_variables`, those of its S3 server, the outbox is in its bucket.
    """
    ports = record.ports
    environment = config.child_environment()
    inherited = {}
    for name, value in environment.items():
        is_setting = name.startswith(("AIRFLOW", config.ENVIRONMENT_PREFIX))
        # Your own buckets are not the demo's.
        is_setting = is_setting or (bool(bucket_variables) and name.startswith("AWS_"))
        if name in KEPT_SETTINGS or not is_setting:
            inherited[name] = value
    root = output_root(folder, is_in_bucket=bool(bucket_variables))
    program_folder = Path(sys.executable).parent
    return {
        **inherited,
        **(bucket_variables or {}),
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
        "AIRFLOW__API__PORT": str(ports.airflow),
        "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{ports.airflow}",
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
        # Another Airflow on this host may have the default ports of these.
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(server_process.free_port()),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(server_process.free_port()),
        MARK_VARIABLE: record.mark,
        # Airflow's processes change their titles. Without this that overwrites their environment,
        # and with it the mark.
        "SPT_NOENV": "1",
        "SERIATIM_HOME": str(settings.home),
        "SERIATIM_STREAMS": str(folder / "streams"),
        "SERIATIM_OUTBOX": f"{root}/outbox",
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
        "SERIATIM_SMTP": f"127.0.0.1:{ports.mail}",
        "SERIATIM_SPARK_DRIVER_MEMORY": "1g",
        "SERIATIM_AIRFLOW_URL": f"http://127.0.0.1:{ports.airflow}",
        "SERIATIM_WHERE_TO_TYPE": f"in any shell, after: source {folder / SETTINGS_FILE}",
    }


def write_settings_file(folder: Path, environ: dict[str, str]) -> None:
    """Write a file to be sourced by a shell. In that shell `seriatim` works on this demo, so that the
    commands in mails can be typed as they are.
    """
    prefixes = [config.ENVIRONMENT_PREFIX]
    all_settings = {f"{prefixes[0]}{field.upper()}" for field in Settings.__struct_fields__}
    if "://" in environ["SERIATIM_OUTBOX"]:
        prefixes.append("AWS_")
        all_settings.update(STRONGER_BUCKET_VARIABLES)
    exported = {name: value for name, value in environ.items() if name.startswith(tuple(prefixes))}
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
    with (folder / AIRFLOW_LOG).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "airflow", "standalone"],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # If the demo is killed, Airflow ends as with Ctrl-C.
            preexec_fn=_interrupt_with_demo,  # noqa: PLW1509  # nothing is locked in the child
        )


def _interrupt_with_demo() -> None:
    server_process.signal_when_parent_ends(signal.SIGINT)


def wait_until_ready(airflow: subprocess.Popen[bytes], folder: Path, ports: DemoPorts) -> None:
    """Wait until all parts of Airflow are well and it knows the demo's DAG."""
    start_seconds = time.monotonic()
    notice_seconds = start_seconds
    while not is_airflow_ready(ports):
        if airflow.poll() is not None:
            raise _airflow_ended_error(airflow, folder)
        now_seconds = time.monotonic()
        if now_seconds - notice_seconds >= PROGRESS_EVERY_SECONDS:
            notice_seconds = now_seconds
            print_line(f"  Airflow starts: {now_seconds - start_seconds:.0f} s")
        time.sleep(1)
    print_line(f"ready after {time.monotonic() - start_seconds:.0f} s")


def is_airflow_ready(ports: DemoPorts) -> bool:
    """Whether all parts of Airflow are well, and its page can show the demo's DAG."""
    base_url = f"http://127.0.0.1:{ports.airflow}"
    try:
        health = _read_json(f"{base_url}/api/v2/monitor/health")
        if any(health[part]["status"] != "healthy" for part in HEALTHY_PARTS):
            return False
        token = _read_json(f"{base_url}/auth/token")["access_token"]
        dag = _read_json(f"{base_url}/api/v2/dags/{STREAM}", token)
    # It does not listen yet, is not set up yet, or answers something else meanwhile.
    except (OSError, KeyError, TypeError, msgspec.MsgspecError):
        return False
    return bool(dag.get("dag_id") == STREAM)


def _read_json(url: str, token: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  # http on 127.0.0.1
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
        content: dict[str, Any] = msgspec.json.decode(answer.read())
    return content


def wait_for_airflow(airflow: subprocess.Popen[bytes], folder: Path) -> NoReturn:
    """Wait until Ctrl-C. If Airflow ends by itself, that is an error, and the demo ends as well."""
    airflow.wait()
    raise _airflow_ended_error(airflow, folder)


def _airflow_ended_error(airflow: subprocess.Popen[bytes], folder: Path) -> PlatformError:
    log = folder / AIRFLOW_LOG
    last_lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return PlatformError(
        f"Airflow ended by itself with code {airflow.returncode}",
        log="\n".join(last_lines),
        next=f"read {log}, then make demo again",
    )


def start_producer(folder: Path, environ: dict[str, str], demo_state: DemoState) -> None:
    """Create the topics, and let a thread write to them. Airflow is started afterwards, so that its
    first run finds them.
    """
    from seriatim.kafka.sending import create_topics

    settings = config.load_settings(environ, folder)
    client = context.kafka_client(settings)
    create_topics(client, {**dict.fromkeys(TOPICS, PARTITIONS), REQUESTS_TOPIC: 1})
    arguments = (folder, settings, demo_state)
    threading.Thread(target=produce_or_report, args=arguments, daemon=True).start()


def produce_or_report(folder: Path, settings: Settings, demo_state: DemoState) -> None:
    """Keep writing messages. If that ends while the demo runs, say so: the rest of it goes on."""
    try:
        produce_messages(folder, settings, demo_state)
    except SeriatimError as error:
        if demo_state.is_running:
            print_line(f"the producer has ended, so no new messages come:\n{error.render()}")


def produce_messages(folder: Path, settings: Settings, demo_state: DemoState) -> None:
    """Keep writing messages, answer snapshot requests, and inject faults on request."""
    from seriatim.demo.producer import SnapshotRequestListener, send_messages

    client = context.kafka_client(settings)
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


def print_addresses(folder: Path, ports: DemoPorts, root: str) -> None:
    """Say where to look. The output is below `root`."""
    airflow_url = f"http://127.0.0.1:{ports.airflow}"
    print_line(
        f"""
  Airflow   {airflow_url}   the DAG `{STREAM}` runs every minute; no password
  page      {airflow_url}/plugin/seriatim   how every stream is; the same in a terminal: seriatim top
  mails     http://127.0.0.1:{ports.page}
  streams   {folder / "streams"}   the stream files that this Airflow reads: add yours there
  output    {root}/lake/{STREAM}   Delta tables: records, current, gaps, quarantine
  log       {folder / AIRFLOW_LOG}
  commands  source {folder / SETTINGS_FILE}   then `seriatim status {STREAM}`, and what mails say to type

  make demo-break, in another terminal: messages are damaged on their way in
  Ctrl-C here, or make demo-stop, ends everything; the next `make demo` goes on from here
"""
    )


def print_line(text: str) -> None:
    """Print a line at once. If the terminal is closed, nobody reads it, and the demo still has to end
    in good order.
    """
    with suppress(OSError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SeriatimError as error:
        print_line(error.render())
        sys.exit(error.exit_code)
