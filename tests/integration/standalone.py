"""A real Airflow for tests: scheduler, DAG processor, API server and triggerer on SQLite, below one
folder.

Started once for a module, as a process group of its own, and ended by it, also when a test fails.

Next: test_airflow.py and test_airflow_trouble.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller

from tests.dags.bag import ROOT, environment
from tests.mail_catcher import Catcher, free_port

WAIT_SECONDS_MAX = 4 * 3600
"""Only so that a test which can never succeed ends some day. On a machine with forty busy processes a
single run takes longer than a quarter of an hour, and that is no fault of ours.
"""
API_TRIES = 10
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Spark folds a handful of messages here: a compiler that thinks longer costs more than it gives."""


class Standalone:
    """Airflow in a folder, with a mail server beside it."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder, self.port, self.post = folder, free_port(), Catcher()
        self.mail_port = free_port()
        self.mail: Controller | None = None
        self.guard: dict[str, Any] = {}
        """Further settings of the mail server, such as who may log in."""
        self.dags = folder / "dags"
        for path in (self.dags, folder / "streams", folder / "airflow"):
            path.mkdir(exist_ok=True)
        for file in (ROOT / "dags").glob("*.py"):
            (self.dags / file.name).symlink_to(file)
        self.environment = {
            **environment(folder),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder / 'airflow' / 'airflow.db'}?timeout=20",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "True",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__PARALLELISM": "8",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{self.port}",
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "60",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
            "SERIATIM_SMTP": f"127.0.0.1:{self.mail_port}",
            "SERIATIM_SPARK_MASTER": "local[2]",
            "SERIATIM_SPARK_DRIVER_MEMORY": "1g",
            "JDK_JAVA_OPTIONS": SHORT_LIVED,
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.token = ""

    def start(self) -> None:
        """Start everything, and wait until it answers."""
        self.mail_up()
        with (self.folder / "standalone.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "airflow", "standalone"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait("Airflow is up", self._is_up)
        self.token = json.loads(self._open("/auth/token"))["access_token"]

    def stop(self) -> None:
        """End the whole group, kindly at first."""
        if self.process is not None:
            for number, seconds in ((signal.SIGINT, 2), (signal.SIGKILL, 10)):
                try:
                    os.killpg(self.process.pid, number)
                    self.process.wait(seconds)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
            self._end_left_over()
        self.mail_down()

    def mail_up(self) -> None:
        """A mail server, always on the same port."""
        self.mail = Controller(self.post, hostname="127.0.0.1", port=self.mail_port, **self.guard)
        self.mail.start()

    def mail_down(self) -> None:
        """Nobody takes mails."""
        if self.mail is not None:
            self.mail.stop()
            self.mail = None

    def _end_left_over(self) -> None:
        """What left the group: tasks and drivers, known by their environment."""
        import psutil

        mark = f"AIRFLOW_HOME={self.environment['AIRFLOW_HOME']}".encode()
        for process in psutil.process_iter():
            try:
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    process.kill()
            except (OSError, psutil.Error):
                continue

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "standalone.log").read_text()[-3000:]
        try:
            health = json.loads(self._open("/api/v2/monitor/health"))
        except (OSError, ValueError):
            return False
        parts = ("metadatabase", "scheduler", "dag_processor", "triggerer")
        return all(health[part]["status"] == "healthy" for part in parts)

    def _open(self, path: str, body: Any = None, method: str = "") -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method or ("GET" if body is None else "POST"),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=180) as answer:
            return bytes(answer.read())

    def api(self, path: str, body: Any = None, method: str = "") -> Any:
        """Airflow's REST API. Refusals are raised as HTTPError, with the text in `.reason`."""
        for left in reversed(range(API_TRIES)):
            try:
                return json.loads(self._open(f"/api/v2/{path}", body, method))
            except urllib.error.HTTPError as error:
                error.msg = error.read().decode()
                if not (
                    left and "Database error" in error.msg
                ):  # SQLite's, where two write; nothing was done
                    raise
                time.sleep(2)
        return None

    def wait(self, what: str, ready: Callable[[], Any]) -> Any:
        """Until something is so."""
        until = time.monotonic() + WAIT_SECONDS_MAX
        while time.monotonic() < until:
            with suppress(OSError):  # a busy server that does not answer in time is asked again
                if found := ready():
                    return found
            time.sleep(2)
        raise AssertionError(f"in vain for {WAIT_SECONDS_MAX} s: {what}")

    def begin(self, dag: str) -> None:
        """Wait until a DAG is there, and let it run."""
        self.wait(
            f"{dag} is there",
            lambda: dag in {one["dag_id"] for one in self.api("dags?limit=100")["dags"]},
        )
        self.api(f"dags/{dag}", {"is_paused": False}, "PATCH")

    def trigger(self, dag: str, **conf: Any) -> str:
        """Start a run by hand; its id."""
        return str(
            self.api(f"dags/{dag}/dagRuns", {"logical_date": None, "conf": conf})["dag_run_id"]
        )

    def run(self, dag: str, run: str) -> str:
        """The state in which a run ended."""

        def ended() -> str:
            state = self.api(f"dags/{dag}/dagRuns/{run}")["state"]
            return state if state in ("success", "failed") else ""

        return str(self.wait(f"{dag} {run} ends", ended))

    def tasks(self, dag: str, run: str) -> dict[str, str]:
        """The state of each task of a run."""
        found = self.api(f"dags/{dag}/dagRuns/{run}/taskInstances")["task_instances"]
        return {one["task_id"]: one["state"] for one in found}

    def log(self, dag: str, run: str, task: str, attempt: int = 1) -> str:
        """What a task said."""
        path = f"dags/{dag}/dagRuns/{run}/taskInstances/{task}/logs/{attempt}?full_content=true"
        return "\n".join(str(line.get("event", line)) for line in self.api(path)["content"])

    def runs(self, dag: str) -> list[dict[str, Any]]:
        """All runs of a DAG, oldest first."""
        return list(self.api(f"dags/{dag}/dagRuns?order_by=run_after&limit=100")["dag_runs"])

    def mails(self, stream: str) -> list[str]:
        """The subjects of mails about a stream."""
        return [mail["Subject"] for mail in self.mails_about(stream)]

    def mails_about(self, stream: str) -> list[EmailMessage]:
        """The mails about a stream, the oldest first. A mail whose sending was not confirmed is sent
        again with the same id: it counts once.
        """
        mails = {}
        for mail in self.post.mails:
            if f"] {stream}: " in mail["Subject"]:
                mails.setdefault(str(mail["Message-ID"]), mail)
        return list(mails.values())

    def text(self, stream: str) -> str:
        """The text of the last mail about a stream."""
        return self.text_of(self.mails_about(stream)[-1])

    def text_of(self, mail: EmailMessage) -> str:
        """The text of a mail."""
        part = mail.get_body(("plain",))
        assert part is not None
        return str(part.get_content())
