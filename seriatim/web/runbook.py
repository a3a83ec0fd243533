"""The runbook as a page: docs/RUNBOOK.md cut into headings, paragraphs, commands and rows. Each row of
its tables has an address, to which mails and pages link.

Only what the runbook uses of Markdown is understood; everything else is shown as text.

Next: web/views.py renders it; engine/findings.py names the rows.
"""

from __future__ import annotations

import re
from collections import Counter

from msgspec import Struct, field

from seriatim.engine.findings import runbook_row

LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
PLACEHOLDER = re.compile(r" T(/P)?$")
"""In the runbook's names of alerts: the place, which is another one in each mail."""


class TextSegment(Struct, frozen=True):
    """A piece of a line: plain text, code, or a link to a heading of this page."""

    text: str
    is_code: bool = False
    heading_id: str = ""
    """The id of the heading that a link leads to; empty if it is no link."""


class RunbookRow(Struct, kw_only=True):
    """One row of a table: what happened, what it means, and what to type."""

    id: str
    cells: list[list[TextSegment]]


class RunbookBlock(Struct, kw_only=True):
    """A heading, a paragraph, a block of commands, or a table."""

    kind: str
    """heading, paragraph, code or table."""
    id: str = ""
    """Of a heading: what links call it."""
    segments: list[TextSegment] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[RunbookRow] = field(default_factory=list)


def parse_runbook(text: str) -> list[RunbookBlock]:
    """The runbook in blocks."""
    blocks: list[RunbookBlock] = []
    # An odd number of fences came before a piece that is code.
    for number, piece in enumerate(re.split(r"^```.*\n", text, flags=re.MULTILINE)):
        if number % 2:
            blocks.append(RunbookBlock(kind="code", segments=[TextSegment(piece.rstrip())]))
            continue
        for paragraph in re.split(r"\n\s*\n", piece):
            is_title = paragraph.strip().startswith("# ")
            if paragraph.strip() and not is_title:
                blocks.append(_parse_paragraph(paragraph.strip()))
    _make_ids_unique(blocks)
    return blocks


def _make_ids_unique(blocks: list[RunbookBlock]) -> None:
    """Number the ids that are there already: `time left` is a finding and an alert."""
    counts: Counter[str] = Counter()
    for block in blocks:
        parts: list[RunbookBlock | RunbookRow] = [block, *block.rows]
        for part in parts:
            if part.id:
                counts[part.id] += 1
                part.id += f"-{counts[part.id]}" if counts[part.id] > 1 else ""


def _parse_paragraph(text: str) -> RunbookBlock:
    if text.startswith("#"):
        title = text.lstrip("# ")
        return RunbookBlock(
            kind="heading", id=_id_of_heading(title), segments=_parse_segments(title)
        )
    if not text.startswith("|"):
        return RunbookBlock(kind="paragraph", segments=_parse_segments(" ".join(text.splitlines())))
    header, _, *lines = text.splitlines()
    rows = []
    for line in lines:
        cells = [_parse_segments(cell) for cell in _split_cells(line)]
        rows.append(RunbookRow(id=_id_of_row(cells), cells=cells))
    return RunbookBlock(kind="table", columns=_split_cells(header), rows=rows)


def _split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def _parse_segments(text: str) -> list[TextSegment]:
    """A text with its code and its links apart. Of a link to another document only its words are
    shown, because the page has no other document.
    """
    segments: list[TextSegment] = []
    # Between two links stand plain text, the words of a link, and where it leads.
    plain, *rest = LINK.split(text)
    segments += _parse_code(plain)
    for words, target, plain in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if target.startswith("#"):
            segments.append(TextSegment(words, heading_id=target.removeprefix("#")))
        else:
            segments += _parse_code(words)
        segments += _parse_code(plain)
    return segments


def _parse_code(text: str) -> list[TextSegment]:
    """A text without links, with its code apart."""
    plain = re.sub(r"\*+([^*]+)\*+", r"\1", text)
    segments = [
        TextSegment(piece, is_code=number % 2 == 1) for number, piece in enumerate(plain.split("`"))
    ]
    return [segment for segment in segments if segment.text]


def _id_of_heading(title: str) -> str:
    """What a link to a heading calls it, as GitHub does."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _id_of_row(cells: list[list[TextSegment]]) -> str:
    """The id of a row: that of its finding, which is in the second column, or of its alert."""
    codes = [cell[0].text for cell in cells[:2] if cell and cell[0].is_code]
    name = codes[-1] if codes else "".join(segment.text for segment in cells[0])
    return runbook_row(PLACEHOLDER.sub("", name))
