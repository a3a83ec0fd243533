"""A stream whose output is in a bucket."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from aiosmtpd.controller import Controller

from seriatim.storage.store import open_store
from tests.conftest import BROKER_HOME
from tests.integration.lab import Lab, fold_messages, fold_records
from tests.integration.test_kills import killed_at
from tests.integration.test_slices import tables
from tests.mail_catcher import Catcher, free_port
from tests.s3_proxy import proxy_process

KILL_POINTS = ("mid-fold", "manifest-written", "committed")
KILLED_MESSAGES = 6_000
ZOMBIE_MESSAGES = 3_000
RANDOM_KILLS = 4
KILLED_BEFORE_SECONDS = 30
LOSSY_MESSAGES = 1_000_000
LOSSY_RUNS_MAX = 20
TROUBLE_SHARE = 0.2


def _expect(lab: Lab, exit_code: int, *arguments: str, **environment: str) -> str:
    """Run a command; what it printed."""
    run = lab.command(*arguments, **environment)
    assert run.returncode == exit_code, run.stdout + run.stderr
    return run.stdout + run.stderr


def _assert_straight_fold(lab: Lab, stream: str, topics: Mapping[str, int]) -> None:
    """The records are those of a fold in the simplest way over what the broker has, by names of topics
    and numbers of partitions: each message has its records, none is there twice, and folded they are
    the tables.
    """
    tables_of_topics = {}
    offsets = set()
    for name, partitions in topics.items():
        messages = lab.read_topic(name, partitions)
        offsets |= {(name, message[0], message[1]) for message in messages}
        for session, rows in fold_messages(messages).items():
            tables_of_topics[name, session] = rows
    records = lab.records(stream)
    places = [(row["topic"], row["partition"], row["offset"]) for row in records]
    assert set(places) == offsets
    indexes = [(*place, row["index"]) for place, row in zip(places, records, strict=True)]
    assert len(set(indexes)) == len(indexes)
    assert fold_records(records) == tables_of_topics


class _ProcessWatch:
    """Looks at the command lines of all processes meanwhile, for a text that must be in none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.seen = 0
        self.leaks: list[list[str]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._is_over.wait(0.5):
            for process in psutil.process_iter(["cmdline"]):
                command = process.info["cmdline"] or []
                self.seen += 1
                if self.text in " ".join(command):
                    self.leaks.append(command)

    def __enter__(self) -> _ProcessWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def test_a_stream_in_a_bucket_is_a_straight_fold(
    lab: Lab, topic: Callable[..., str], s3_url: str, s3_variables: dict[str, str]
) -> None:
    """Run in slices, checked, published, compacted and verified. The secret of the bucket is in no
    output, object, log or command line.
    """
    secret = s3_variables["AWS_SECRET_ACCESS_KEY"]
    names = {topic(2): 2, topic(1): 1}
    lab.send(tables(names, 20, 2000))
    stream = lab.stream("inbucket", "|".join(names), output={"path": s3_url})
    with _ProcessWatch(secret) as watch:
        printed = _expect(lab, 0, "run", stream, "--messages-max", "1200", "--check")
    _assert_straight_fold(lab, stream, names)
    printed += _expect(lab, 0, "compact", stream)
    printed += _expect(lab, 0, "verify", stream)
    _assert_straight_fold(lab, stream, names)
    assert list(lab.store(stream).keys("probes/")) == []

    assert watch.seen > 0
    assert watch.leaks == []
    assert secret not in printed
    assert _files_with(Path(os.environ[BROKER_HOME]) / "s3", secret) == ["server.properties"]


@pytest.mark.full
def test_what_goes_wrong_in_a_bucket_is_mailed_without_its_secret(
    lab: Lab, topic: Callable[..., str], s3_url: str, s3_variables: dict[str, str]
) -> None:
    """A run finds a lost message. The outbox is in the bucket, too: two watches that share nothing else
    send one mail. The secret is in no mail, object, event log of Spark, output or command line.
    """
    secret = s3_variables["AWS_SECRET_ACCESS_KEY"]
    name = topic(1)
    messages = tables({name: 1}, 5, 200)
    lost = next(number for number, sent in enumerate(messages) if json.loads(sent[3])["seq"] == 3)
    lab.send(messages[:lost] + messages[lost + 1 :])
    alerts = {"to": ["ops@localhost"]}
    stream = lab.stream("inbucket", name, output={"path": f"{s3_url}/lake"}, alerts=alerts)
    events = lab.folder / "events"
    (events / "log").mkdir(parents=True)
    spark_settings = {"enabled": "true", "compress": "false", "dir": str(events / "log")}
    lines = [f"spark.eventLog.{name} {value}\n" for name, value in spark_settings.items()]
    (events / "spark-defaults.conf").write_text("".join(lines))
    caught, port = Catcher(), free_port()
    controller = Controller(caught, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        with _ProcessWatch(secret) as watch:
            printed = _expect(lab, 3, "run", stream, SPARK_CONF_DIR=str(events))
            for _ in range(2):
                looked = lab.command(
                    "watch",
                    "--once",
                    SERIATIM_SMTP=f"127.0.0.1:{port}",
                    SERIATIM_OUTBOX=f"{s3_url}/outbox",
                )
                printed += looked.stdout + looked.stderr
    finally:
        controller.stop()
    assert len(caught.mails) == 1, printed
    assert name in caught.mails[0]["Subject"]
    assert list(open_store(f"{s3_url}/outbox").keys(""))
    assert watch.leaks == []
    assert secret not in printed
    assert secret not in caught.mails[0].as_string()
    assert _files_with(events / "log", "SparkListenerTaskEnd")
    assert _files_with(lab.folder, secret) == []
    assert _files_with(Path(os.environ[BROKER_HOME]) / "s3", secret) == ["server.properties"]


@pytest.mark.full
def test_a_bucket_has_the_digests_of_a_disk(
    lab: Lab, topic: Callable[..., str], s3_url: str
) -> None:
    """Records and state of a stream are the same wherever it writes, also after compaction."""
    names = {topic(2): 2, topic(1): 1}
    lab.send(tables(names, 20, 3000))
    pattern = "|".join(names)
    on_disk = lab.stream("ondisk", pattern)
    lab.fold(on_disk, messages_max=1200)
    in_bucket = lab.stream("inbucket", pattern, output={"path": s3_url})
    _expect(lab, 0, "run", in_bucket, "--messages-max", "1200", "--check")
    assert lab.digest(in_bucket) == lab.digest(on_disk)
    _expect(lab, 0, "compact", in_bucket)
    _expect(lab, 0, "verify", in_bucket)
    assert lab.digest(in_bucket) == lab.digest(on_disk)


def _files_with(folder: Path, text: str) -> list[str]:
    """The files below a folder that have a text in them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if text.encode() in path.read_bytes()]


@pytest.mark.full
def test_kills_and_two_runs_at_once_in_a_bucket(
    lab: Lab, topic: Callable[..., str], s3_url: str
) -> None:
    """Real processes, killed at named points and at random moments, racing, and one that was stopped and
    goes on when another has done its work: a straight fold, with records and state as on a disk in
    one go. Then damaged and deleted objects, repair, backfill, and the commands that look.
    """
    name = topic(2)
    messages = tables({name: 2}, 20, KILLED_MESSAGES)
    portion = len(messages) // (len(KILL_POINTS) + 1)
    on_disk = lab.stream("ondisk", name)
    stream = lab.stream("inbucket", name, output={"path": s3_url})
    for number, point in enumerate(KILL_POINTS):
        lab.send(messages[number * portion : (number + 1) * portion])
        killed_at(lab, stream, point, "--messages-max", "1000")
    lab.send(messages[len(KILL_POINTS) * portion :])
    chance = random.Random(19)
    for _ in range(RANDOM_KILLS):
        run = lab.start("run", stream, "--messages-max", "200")
        time.sleep(chance.uniform(1, KILLED_BEFORE_SECONDS))
        run.kill()
        run.communicate()
    runs = [lab.start("run", stream, "--messages-max", "500") for _ in range(2)]
    errors = [run.communicate(timeout=900)[1] for run in runs]
    assert {run.returncode for run in runs} <= {0, 5}, errors
    lab.send(tables({name: 2}, 20, ZOMBIE_MESSAGES, seed=2))
    assert _let_a_zombie_go_on(lab, stream) in (0, 5)
    _expect(lab, 0, "run", stream, "--check")
    lab.fold(on_disk)
    assert lab.digest(stream) == lab.digest(on_disk)
    _assert_straight_fold(lab, stream, {name: 2})

    record_files = lab.table(stream, "records").get_add_actions(flatten=True)["path"].to_pylist()
    flipped = min(path for path in record_files if path.startswith(f"{name}/0/"))
    deleted = min(path for path in record_files if path.startswith(f"{name}/1/"))
    lab.flip_bit(stream, f"records/{flipped}")
    lab.delete(stream, f"records/{deleted}")
    lab.delete(stream, lab.ledger(stream).partitions[f"{name}/1"].state[-1].path)
    _expect(lab, 3, "verify", stream)
    for partition in range(2):
        _expect(lab, 0, "repair", stream, "--apply", "--partition", f"{name}/{partition}")
    of_a_range = ("--partition", f"{name}/0", "--from", "5", "--until", "50")
    _expect(lab, 0, "backfill", stream, *of_a_range, "--machine", "unchanged")
    _expect(lab, 0, "verify", stream)
    assert lab.digest(stream) == lab.digest(on_disk)

    _expect(lab, 0, "report", stream)
    _expect(lab, 0, "watch", "--once")
    _expect(lab, 0, "compact", stream)
    _expect(lab, 0, "verify", stream)
    assert lab.digest(stream) == lab.digest(on_disk)


def _let_a_zombie_go_on(lab: Lab, stream: str) -> int:
    """Stop a run when it has written its first record file, let another do all the work, and let the
    first go on; its exit code.
    """
    store = lab.store(stream)
    files_before = set(store.keys("records/"))
    zombie = lab.start("run", stream, "--messages-max", "500")
    while zombie.poll() is None and set(store.keys("records/")) == files_before:
        time.sleep(0.005)
    family = [psutil.Process(zombie.pid), *psutil.Process(zombie.pid).children(recursive=True)]
    for process in family:
        process.suspend()
    _expect(lab, 0, "run", stream)
    for process in family:
        process.resume()
    _, errors = zombie.communicate(timeout=900)
    assert "Traceback" not in errors
    return zombie.returncode


@pytest.mark.full
def test_a_lossy_way_to_the_bucket_loses_and_doubles_nothing(
    lab: Lab,
    topic: Callable[..., str],
    s3_url: str,
    s3_variables: dict[str, str],
) -> None:
    """A fifth of all requests is refused, cut off or stalls, or its answer gets lost. A run ends by
    itself or says platform trouble, and the next one goes on.
    """
    names = {topic(3): 3}
    lab.send(tables(names, 200, LOSSY_MESSAGES))
    on_disk = lab.stream("ondisk", "|".join(names))
    stream = lab.stream("inbucket", "|".join(names), output={"path": s3_url})
    endpoint = s3_variables["AWS_ENDPOINT_URL"]
    with proxy_process(endpoint, TROUBLE_SHARE, seed=1, stalls=True) as proxy:
        for _ in range(LOSSY_RUNS_MAX):
            run = lab.command(
                "run", stream, "--messages-max", "100000", AWS_ENDPOINT_URL=proxy.endpoint
            )
            assert run.returncode in (0, 4), run.stderr
            if run.returncode == 0:
                break
    assert run.returncode == 0
    lab.fold(on_disk)
    assert lab.digest(stream) == lab.digest(on_disk)
    _assert_straight_fold(lab, stream, names)
    accounts = lab.ledger(stream).partitions.values()
    assert sum(account.messages for account in accounts) == LOSSY_MESSAGES
    _expect(lab, 0, "verify", stream)
    # No commit of the table without an entry, and no entry without its commit.
    versions = [
        commit["seriatim"]["sequence"]
        for commit in lab.table(stream, "records").history()
        if "seriatim" in commit
    ]
    assert sorted(versions) == list(range(lab.ledger(stream).sequence + 1))
