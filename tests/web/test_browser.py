"""Pages in a real browser: many streams at once, phones, colours, refreshing in place. Skipped
where there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from seriatim.engine.findings import Concern
from seriatim.operations.status import (
    HaltStatus,
    PartitionStatus,
    QuarantinedSession,
    StreamStatus,
)
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import LocalStore
from tests import browser
from tests.browser import Browser
from tests.mail_catcher import free_port
from tests.web.streams_on_disk import Lake, create_troubled_stream

pytestmark = pytest.mark.skipif(
    browser.found() is None, reason="no Chromium on PATH: install it to drive the page"
)
STREAMS, PARTITIONS = 200, 50
DARK, LIGHT = "rgb(18, 24, 31)", "rgb(255, 255, 255)"
SIZES = [(1440, 900), (900, 700), (390, 844)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser."""
    made = Browser(tmp_path_factory.mktemp("browser"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A folder of streams."""
    return Lake(tmp_path)


@pytest.fixture
def address(lake: Lake) -> Iterator[str]:
    """Where the lake's pages are served."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(lake.app(), host="127.0.0.1", port=port, log_level="critical")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/seriatim"
    server.should_exit = True
    thread.join(120)


def many(lake: Lake) -> None:
    """200 streams of 50 partitions, some of them in trouble, as runs left them."""
    for number in range(STREAMS):
        name = f"stream_{number:03d}" + "_of_a_rather_long_name" * (number % 40 == 0)
        places = [
            PartitionStatus(
                topic=f"topic-{place % 5}",
                partition=place // 5,
                frontier=10**9 + place,
                log_start=10**8,
                log_end=10**9 + 10 * place,
                lag=9 * place,
                time_left_seconds=3600 * (place + number) if place else None,
                limit_seconds=86_400.0,
                halt=HaltStatus("gap", 41337, "unexplained")
                if number % 50 == 7 and place == 3
                else None,
            )
            for place in range(PARTITIONS)
        ]
        (made := lake.write(name)).mkdir(parents=True)
        status = StreamStatus(
            stream=name, at_seconds=lake.now - number, partitions=places, sequence=7, verdict="good"
        )
        (made / "head.json").write_text('{"sequence": 7, "sha256": "00"}')
        StatusFiles(LocalStore(made)).write_status(status)


def overflow(page: Browser) -> int:
    """By how much the page is wider than its window; tables scroll by themselves."""
    return int(
        page.tell("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    )


def test_200_streams_of_50_partitions_fit_any_window(
    lake: Lake, address: str, page: Browser
) -> None:
    """Loaded and laid out, on a wide window, a narrow one, and a phone; nothing sticks out."""
    many(lake)
    page.size(1440, 900)
    page.open(f"{address}/")
    assert page.tell("document.querySelectorAll('tbody tr td.name').length") == STREAMS
    assert "41337" in page.text()
    for width, height in SIZES:
        page.size(width, height)
        assert overflow(page) == 0
    tall = page.tell(
        "Math.max(...[...document.querySelectorAll('tbody tr')].map(row => row.offsetHeight))"
    )
    assert tall < 500, "a row is as tall as a screen"


def test_a_stream_in_trouble_is_red_in_light_and_dark(
    lake: Lake, address: str, page: Browser
) -> None:
    """By the system's wish, or by Airflow's own; the halted partition in the colour of trouble,
    with its command.
    """
    lake.write_run_status(create_troubled_stream(lake))
    page.size(1440, 900)
    for scheme, back, red in (
        ("light", LIGHT, "rgb(179, 38, 30)"),
        ("dark", DARK, "rgb(255, 138, 128)"),
    ):
        page.colours(scheme)
        page.open(f"{address}/stream/orders")
        assert page.tell("getComputedStyle(document.body).backgroundColor") == back
        name = (
            "[...document.querySelectorAll('td.name span')].find(one => one.innerText === 'in-a/2')"
        )
        assert page.tell(f"getComputedStyle({name}).color") == red
        assert "seriatim repair orders --partition in-a/2" in page.text()
    page.tell("localStorage.setItem('theme', 'light')")
    page.open(f"{address}/")
    assert page.tell("getComputedStyle(document.body).backgroundColor") == LIGHT, (
        "Airflow's theme wins"
    )
    page.tell("localStorage.clear()")
    page.colours("light")


def test_fresh_content_comes_without_losing_the_place(
    lake: Lake, address: str, page: Browser
) -> None:
    """The page scrolls where it was, and says when it cannot be refreshed."""
    made = create_troubled_stream(lake)
    lake.write_run_status(made)
    page.size(900, 500)
    page.open(f"{address}/stream/orders")
    page.tell("window.scrollTo(0, 700)")
    before = page.tell("document.querySelectorAll('tbody tr').length")
    lake.send(made, 0, "x", 1, 2, 3)
    lake.run(made)
    page.tell("document.dispatchEvent(new Event('visibilitychange', {bubbles: true}))")
    page.wait(f"document.querySelectorAll('tbody tr').length > {before}")
    assert page.tell("window.scrollY") == 700
    lake.logged_in = False
    page.tell("document.dispatchEvent(new Event('visibilitychange', {bubbles: true}))")
    assert "you are logged out" in page.wait("document.getElementById('stale').textContent")


def test_hostile_names_run_nothing(lake: Lake, address: str, page: Browser) -> None:
    """A browser shows them as text; its policy had nothing to refuse."""
    word = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
    made = lake.stream("orders", slices=1)
    lake.send(made, 0, word, b"poison")
    lake.run(made)
    status = lake.write_run_status(made)
    concern = Concern(kind="late", location=word, text=word, next=word)
    listed = QuarantinedSession(session=word, topic=word, partition=0)
    StatusFiles(LocalStore(made.root)).write_status(
        StreamStatus(**{**_fields(status), "concerns": [concern], "quarantined": [listed]})
    )
    page.size(1440, 900)
    page.messages.clear()
    for path in (
        "/",
        "/stream/orders",
        "/stream/orders/entry/2",
        "/stream/%3Cscript%3Ewindow.hurt=1%3C%2Fscript%3E",
    ):
        page.open(f"{address}{path}")
        assert page.tell("window.hurt") is None
    page.open(f"{address}/stream/orders")
    assert word in page.text()
    assert not [said for said in page.messages if "Content Security Policy" in said]
    for path in ("/stream/orders", "/stream/orders/entry/2", "/"):
        page.open(f"{address}{path}")
        for width, height in SIZES:
            page.size(width, height)
            assert overflow(page) == 0


def _fields(status: StreamStatus) -> dict[str, object]:
    return {name: getattr(status, name) for name in status.__struct_fields__}
