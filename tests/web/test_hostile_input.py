"""Hostile input on pages: whatever is in an address, a file or a session's name is refused, or is
shown as text.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from seriatim.engine.findings import Concern
from seriatim.operations.status import HaltStatus, PartitionStatus, QuarantinedSession
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import LocalStore
from seriatim.web.app import CONTENT_POLICY, RunSpan
from tests.web.streams_on_disk import Lake

PATHS = [
    "/stream/<script>alert(1)</script>",
    "/stream/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    "/stream/..%2f..%2f..%2fetc%2fpasswd",
    "/stream/../../../../etc/passwd",
    "/stream/orders%00",
    "/stream/orders.toml",
    "/stream/orders/reports/../../../head.json",
    "/stream/orders/reports/%2e%2e%2f%2e%2e%2fhead.json",
    "/stream/orders/reports/1e3",
    "/stream/orders/reports/-1",
    "/stream/orders/entry/٣",
    "/stream/orders/entry/99999999999999999999",
    "/stream/orders/entry/1;drop table",
    "/stream/{{7*7}}",
    "/static/../../config.py",
    "/static/%2e%2e%2fread.py",
    "/dag/%22%3E%3Cimg%20src=x%20onerror=alert(1)%3E",
    "/dag/orders/run?run_id=%3Cscript%3Ealert(1)%3C/script%3E",
    "/dag/orders/run?run_id=' or 1=1 --",
    f"/stream/{'x' * 5000}",
]
WORDS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</main><script>",
    "javascript:alert(1)",
    "' onmouseover='alert(1)",
    "]]><svg/onload=alert(1)>",
    "\u202egnp.exe",
    "\x00\x1b[31m",
    "{{ 7*7 }}",
    "ünïcödé 漢字 🙂",
]


class Seen(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element."""
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Text."""
        self.words.append(data)


def assert_harmless(page: str) -> Seen:
    """No script but ours, no style, no address but our own, nothing that a browser would run."""
    seen = Seen(page)
    for tag, attributes in seen.elements:
        assert tag not in ("img", "iframe", "object", "embed", "form", "base", "style")
        assert not [
            name for name in attributes if name.startswith("on") or name in ("style", "srcdoc")
        ]
        for name in ("src", "href"):
            address = attributes.get(name) or "/seriatim"
            assert address.startswith("/seriatim") or address == "/dags/seriatim_repair"
    scripts = [attributes.get("src", "") for tag, attributes in seen.elements if tag == "script"]
    assert [str(source).partition("?")[0] for source in scripts] == ["/seriatim/static/refresh.js"]
    return seen


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """One good stream, and a file beside it that is nobody's business."""
    made = Lake(tmp_path_factory.mktemp("lake"))
    made.stream("orders", slices=1)
    return made


@pytest.mark.parametrize("path", PATHS)
def test_hostile_addresses_are_refused_in_words(lake: Lake, path: str) -> None:
    """Not found, as a page that does nothing; no file but a stream's own is ever read."""
    answer = lake.get(path)
    assert answer.status_code == 404
    assert "sha256" not in answer.text
    assert "root:" not in answer.text
    assert "Traceback" not in answer.text
    if answer.headers["content-type"].startswith("text/html"):
        assert_harmless(answer.text)
        assert answer.headers["content-security-policy"] == CONTENT_POLICY


@pytest.mark.parametrize("word", WORDS)
def test_hostile_names_are_shown_as_text(tmp_path: Path, word: str) -> None:
    """Sessions, topics, causes and commands: on the list, and on the stream's own page."""
    lake = Lake(tmp_path)
    made = lake.stream("orders", slices=1)
    lake.send(made, 0, word, b"poison")
    lake.run(made)
    status = lake.write_run_status(made)
    halted = HaltStatus("gap", 7, word)
    place = PartitionStatus(topic=word, partition=0, frontier=1, log_end=9, halt=halted, hold=word)
    more: Any = {
        "partitions": [*status.partitions, place],
        "quarantined": [QuarantinedSession(session=word, topic=word, partition=0, finding=word)],
        "concerns": [Concern(kind=word, location=word, text=word, next=word)],
    }
    StatusFiles(LocalStore(made.root)).write_status(replace(status, **more))
    lake.runs["orders", word] = RunSpan(0.0, 1e12, word)
    for path in ("/", "/stream/orders", "/stream/orders/entry/2"):
        seen = assert_harmless(lake.get(path).text)
        if word.isprintable():
            assert word in "".join(seen.words)
    answer = lake.get(f"/dag/orders/run?run_id={quote(word, safe='')}")
    assert answer.status_code == 200
    seen = assert_harmless(answer.text)
    if word.isprintable():
        assert "".join(seen.words).count(word) >= 2, "the run's name and how it ended"


def test_every_page_forbids_what_it_does_not_need(lake: Lake) -> None:
    """No inline script or style, nothing from elsewhere, in no other site's frame."""
    answer = lake.get("/stream/orders")
    for rule in (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "frame-ancestors 'self'",
    ):
        assert rule in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


def test_a_status_file_that_is_garbage_hides_nothing(tmp_path: Path) -> None:
    """The ledger tells what it knows; the next look writes the file anew."""
    lake = Lake(tmp_path)
    made = lake.stream("orders", slices=1)
    for garbage in (b"", b"{", b"[]", b'{"stream": 7}', b"\xff" * 100):
        (made.root / "status.json").write_bytes(garbage)
        page = lake.get("/").text
        assert 'class="chip good">good' in page
        assert "Kafka was not asked yet" in page
