"""The page: one file that needs nothing else, whatever names and texts come from outside."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from seriatim.operations.report import (
    Card,
    PageFinding,
    PageTable,
    PartitionBar,
    ReportPage,
)
from seriatim.web.views import render_report

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><script>",
    "&lt;b&gt;",
    "javascript:alert(1)",
    "' onmouseover='alert(1)",
    "]]><svg/onload=alert(1)>",
    "\u202egnp.exe",
    "\x00\x1b[31m",
    "ünïcödé 漢字 🙂",
    "{{ 7*7 }}",
    "x" * 100_000,
]
ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "div",
        "b",
        "span",
        "pre",
        "table",
        "tr",
    ),
    *("th", "td", "svg", "rect"),
}


class Reader(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element."""
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}

    def handle_data(self, data: str) -> None:
        """Text."""
        self.words.append(data)


def page_of(word: str) -> str:
    """A page with one word everywhere."""
    return render_report(
        ReportPage(
            title=word,
            subtitle=word,
            cards=[Card(word, word)],
            findings=[PageFinding(f"{word}\n{word}", word)],
            bars=[
                PartitionBar(label=word, start=0, before=1, frontier=2, end=3, halt=2, note=word)
            ],
            tables=[PageTable(title=word, columns=(word, "n"), rows=[[word, 1]], empty=word)],
            footer=word,
        )
    )


def assert_harmless(page: str) -> None:
    """Only our own elements and attributes; nothing is loaded, nothing runs."""
    seen = Reader(page)
    assert seen.tags <= ALLOWED
    names = {name for name, _ in seen.attributes}
    assert not {
        name
        for name in names
        if name.startswith("on") or name in ("src", "href", "style", "srcdoc")
    }
    assert {value for name, value in seen.attributes if name == "class"} <= {
        *(
            "soft",
            "cards",
            "card",
            "error",
            "warning",
            "number",
            "back",
            "bar",
            "done",
            "new",
            "wait",
            "halt",
            "good",
            "bad",
        ),
        "",
    }
    assert "default-src 'none'" in page


def test_hostile_names_stay_text() -> None:
    """Topics, sessions and values that look like HTML are shown as they are and do nothing."""
    for word in HOSTILE:
        page = page_of(word)
        assert_harmless(page)
        if len(word) < 100 and word.isprintable():
            assert word in "".join(Reader(page).words)


@given(st.text(max_size=60))
def test_any_text_stays_text(word: str) -> None:
    """The same for whatever a session may be called."""
    assert_harmless(page_of(word))


def test_a_page_needs_nothing_else() -> None:
    """No script, no font, no picture, no address; light and dark."""
    page = page_of("x")
    assert "http:" not in page.replace("http-equiv", "")
    assert "https:" not in page
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page


def test_a_page_stays_small() -> None:
    """Long texts and many rows are cut, and it is said how many there are."""
    rows = [["x" * 10_000, number] for number in range(5_000)]
    findings = [PageFinding("y" * 10_000)] * 1_000
    page = render_report(
        ReportPage(
            title="t",
            subtitle="s",
            findings=findings,
            tables=[PageTable(title="t", columns=("a", "b"), rows=rows)],
        )
    )
    assert len(page) < 1_500_000
    assert "… and 4500 more rows" in page
    assert "… and 500 more" in page


def test_a_partitions_picture_is_to_scale() -> None:
    """Folded before, new, waiting; an empty partition and one far along are drawn, too."""
    bar = PartitionBar(label="t/0", start=100, before=200, frontier=300, end=500, halt=300)
    page = render_report(
        ReportPage(
            title="t",
            subtitle="s",
            bars=[bar, PartitionBar(label="t/1", start=0, before=0, frontier=0, end=0)],
        )
    )
    for part in (
        '<rect class="done" x="0.0" y="0" width="105.0"',
        '<rect class="new" x="105.0" y="0" width="105.0"',
        '<rect class="wait" x="210.0" y="0" width="210.0"',
        '<rect class="halt" x="210.0"',
    ):
        assert part in page
