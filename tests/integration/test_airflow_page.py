"""The page inside a real Airflow: its API server with our plugin, its login, its tabs, driven by a
real browser.

No scheduler and no broker: the page asks neither. Where there is no browser, what it would click is
asked for by HTTP alone, and tests that need one are skipped by name. With SERIATIM_TESTS_PICTURES
the pictures of docs/ are made anew.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import browser
from tests.browser import Browser
from tests.dags.bag import ROOT, environment
from tests.mail_catcher import free_port
from tests.web.streams_on_disk import Lake, create_troubled_stream

START_SECONDS = 300
USER, PASSWORD = "operator", "a password of this test alone"
IN_FRAME = "document.querySelector('iframe')?.contentDocument?.body?.innerText || ''"
PICTURES = os.environ.get("SERIATIM_TESTS_PICTURES", "")
needs_browser = pytest.mark.skipif(
    browser.found() is None, reason="no Chromium on PATH: install it to drive the page"
)


class Served:
    """Airflow's API server over a lake."""

    def __init__(self, folder: Path) -> None:
        self.lake, self.folder, self.port = Lake(folder), folder, free_port()
        self.lake.now = time.time()
        self.made = create_troubled_stream(self.lake)
        self.lake.write_run_status(self.made)
        self.lake.write_run_status(self.lake.stream("payments", partitions=6, slices=5))
        self.lake.write_run_status(self.lake.stream("quotes", partitions=24, slices=4, tier="once"))
        (self.lake.streams / "broken.toml").write_text("topics = 7")
        (folder / "airflow").mkdir()
        (folder / "passwords.json").write_text(json.dumps({USER: PASSWORD}))
        self.address = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **environment(folder),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(folder / "passwords.json"),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__BASE_URL": self.address,
            "AIRFLOW__API__WORKERS": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.token = ""

    def start(self) -> None:
        """The database, the DAGs in it, the server."""
        for words in (("db", "migrate"), ("dags", "reserialize")):
            command = [sys.executable, "-m", "airflow", *words]
            done = subprocess.run(
                command, env=self.environment, cwd=self.folder, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr[-3000:]
        with (self.folder / "server.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "airflow", "api-server"],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + START_SECONDS
        while self.ask("/api/v2/version")[0] != 200:
            assert time.monotonic() < until, (self.folder / "server.log").read_text()[-3000:]
            assert self.process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        answer = self.ask("/auth/token", {"username": USER, "password": PASSWORD})[1]
        self.token = json.loads(answer)["access_token"]

    def stop(self) -> None:
        """End it, with its children."""
        if self.process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(self.process.pid, number)
                    self.process.wait(60)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue

    def ask(self, path: str, body: Any = None, *, known: bool = True) -> tuple[int, str]:
        """A status and what came with it; `known`: as somebody who is logged in."""
        request = urllib.request.Request(
            f"{self.address}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if known and self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One API server for the module."""
    made = Served(tmp_path_factory.mktemp("airflow"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that nobody has logged in with."""
    made = Browser(tmp_path_factory.mktemp("browser"))
    try:
        yield made
    finally:
        made.close()


def test_without_a_session_nothing_is_told(airflow: Served) -> None:
    """Every page is refused; only what pages look like is anybody's."""
    for path in (
        "",
        "stream/orders",
        "stream/orders/reports/3",
        "dag/orders",
        "dag/orders/run?run_id=x",
        "nothing",
    ):
        status, said = airflow.ask(f"/seriatim/{path}", known=False)
        assert status == 401
        assert "in-a" not in said
    assert airflow.ask("/seriatim/static/look.css", known=False)[0] == 200
    old = urllib.request.Request(f"{airflow.address}/seriatim/stream/orders")
    old.add_header("Cookie", "_token=of-another-time")
    old.add_header("Accept", "text/html")
    with urllib.request.urlopen(old, timeout=180) as answer:
        assert answer.url.startswith(f"{airflow.address}/auth/login")


def test_pages_answer_without_kafka(airflow: Served) -> None:
    """Each page is made of files alone, there being no broker at the address; what is no stream is
    not found.
    """
    for path in (
        "",
        "stream/orders",
        "stream/orders/entry/3",
        "stream/orders/reports/3",
        "dag/orders",
    ):
        assert airflow.ask(f"/seriatim/{path}")[0] == 200, path
    status, said = airflow.ask("/seriatim/dag/seriatim_watch")
    assert status == 404
    assert "is no stream" in said


def test_a_broken_stream_file_is_on_the_page(airflow: Served) -> None:
    """It has no DAG, so Airflow itself lists it nowhere but among its import errors."""
    assert airflow.ask("/api/v2/dags/broken")[0] == 404
    status, said = airflow.ask("/seriatim/")
    assert status == 200
    assert "broken.toml: " in said
    assert "payments" in said


def test_a_refused_form_is_answered_with_a_sentence(airflow: Served) -> None:
    """In place of the schema of the field, for both forms; a form that is accepted is as ever."""
    for dag, conf, sentence in (
        ("orders", {"from": "-1"}, "from: found '-1'. Allowed: an offset like 41000, or a time"),
        ("orders", {"action": "rm"}, "action: found 'rm'. Allowed: run | backfill | replay."),
        ("seriatim_repair", {"stream": "order"}, "stream: there is no stream 'order'. Allowed: "),
        (
            "seriatim_repair",
            {"stream": "orders", "partition": "3"},
            "partition: found '3'. Allowed: a place like prefix-a/3.",
        ),
    ):
        body = {"logical_date": None, "conf": conf}
        status, said = airflow.ask(f"/api/v2/dags/{dag}/dagRuns", body)
        detail = json.loads(said)["detail"]
        assert (status, detail[: len(sentence)]) == (400, sentence)
        assert "schema" not in detail
    accepted = {"logical_date": None, "conf": {"messages_max": 5}}
    assert airflow.ask("/api/v2/dags/orders/dagRuns", accepted)[0] == 200


def test_airflow_knows_the_entry_and_the_tabs(airflow: Served) -> None:
    """In the navigation, on a DAG, on a run; the plugin loads without an error."""
    plugins = json.loads(airflow.ask("/api/v2/plugins")[1])["plugins"]
    (ours,) = [one for one in plugins if one["name"] == "seriatim"]
    assert {one["destination"] for one in ours["external_views"]} == {"nav", "dag", "dag_run"}
    assert json.loads(airflow.ask("/api/v2/plugins/importErrors")[1])["total_entries"] == 0


def test_the_plugin_is_light(airflow: Served) -> None:
    """Airflow loads it in all its processes: nothing heavy is imported before the first page is
    asked for.
    """
    code = (
        "import sys\nfrom airflow import plugins_manager\n"
        "found = plugins_manager._get_plugins()[0]\nassert 'seriatim' in [one.name for one in found]\n"
        "heavy = ('pyspark', 'pyarrow', 'great_expectations', 'deltalake', 'confluent_kafka', 'seriatim.web.app')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, env=airflow.environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.splitlines()[-1:] == ["[]"], run.stderr[-2000:]


@needs_browser
def test_a_person_logs_in_and_finds_what_is_wrong(airflow: Served, page: Browser) -> None:
    """From a link in a mail by the login to the stream; then the list, the tab on the DAG and the
    tab on the run.
    """
    page.size(1440, 900)
    page.open(f"{airflow.address}/seriatim/stream/orders")
    page.wait("location.pathname === '/auth/login'")
    assert "in-a/2" not in page.text()
    page.type("input[name=username]", USER)
    page.type("input[name=password]", PASSWORD)
    page.click("button[type=submit]")
    page.wait(
        "location.pathname === '/seriatim/stream/orders' && document.readyState === 'complete'"
    )
    assert "seriatim repair orders --partition in-a/2" in page.text()

    page.open(f"{airflow.address}/")
    page.click("a[href='/plugin/seriatim']")
    listed = page.wait(f"({IN_FRAME}).includes('payments') && ({IN_FRAME})")
    assert "quotes" in listed
    assert "at offset" in listed

    page.open(f"{airflow.address}/dags/orders")
    page.click("a[href='/dags/orders/plugin/seriatim-stream']")
    page.wait(f"({IN_FRAME}).includes('seriatim repair orders --partition in-a/2')")

    run = json.loads(airflow.ask("/api/v2/dags/orders/dagRuns", {"logical_date": None})[1])[
        "dag_run_id"
    ]
    airflow.made.clock.now = time.time()
    airflow.lake.send(airflow.made, 0, "x", 1, 2, 3)
    airflow.lake.run(airflow.made)
    last = airflow.made.ledger.witness().sequence
    page.open(f"{airflow.address}/dags/orders/runs/{run}")
    page.wait(
        "[...document.querySelectorAll('a')].some(one => one.href.endsWith('/plugin/seriatim-run'))"
    )
    page.tell(
        "[...document.querySelectorAll('a')].find(one => one.href.endsWith('/plugin/seriatim-run')).click()"
    )
    page.wait(f"({IN_FRAME}).includes('Report of entry {last}')")


@needs_browser
def test_the_page_wears_airflows_colours(airflow: Served, page: Browser, tmp_path: Path) -> None:
    """Light and dark, as the person chose in Airflow; the pictures in docs/ are from here."""
    folder = Path(PICTURES) if PICTURES else tmp_path
    for theme, back in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 24, 31)")):
        page.open(f"{airflow.address}/")
        page.tell(f"localStorage.setItem('theme', '{theme}')")
        page.size(1440, 900)
        page.open(f"{airflow.address}/plugin/seriatim")
        page.wait(f"({IN_FRAME}).includes('payments')")
        frame = "document.querySelector('iframe').contentDocument.body"
        assert page.tell(f"getComputedStyle({frame}).backgroundColor") == back
        page.picture(folder / f"page_streams_{theme}.png")
        page.size(1440, 1500)
        page.open(f"{airflow.address}/dags/orders/plugin/seriatim-stream")
        page.wait(f"({IN_FRAME}).includes('in-a/2')")
        page.picture(folder / f"page_stream_{theme}.png")
    page.size(390, 1200, 2.0)
    page.tell("localStorage.setItem('theme', 'light')")
    page.open(f"{airflow.address}/seriatim/")
    page.picture(folder / "page_phone.png")
    assert (folder / "page_stream_dark.png").stat().st_size > 20_000
