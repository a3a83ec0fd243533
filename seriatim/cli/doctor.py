"""`seriatim doctor`: what this machine has and lacks, and what would help.

Next room: seriatim/embedded/checkup.py looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from seriatim import config
from seriatim.cli import app

if TYPE_CHECKING:
    from seriatim.embedded.checkup import Check

NAME_WIDTH = 14


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per check.")] = False,
) -> None:
    """Check everything that Seriatim needs, and say how to fix what is missing.

    ✓ is good, ✗ is required and missing, – is optional and not set up. Exit 0 only if nothing required
    is missing, else 2.

    Example: seriatim doctor
    """
    from seriatim.embedded import checkup

    missing = False
    for check in checkup.checks(config.load()):
        typer.echo(msgspec.json.encode(check) if json else _line(check))
        missing = missing or (check.required and not check.good)
    if missing:
        raise typer.Exit(2)


def _line(check: Check) -> str:
    mark = "✓" if check.good else "✗" if check.required else "–"
    line = f"{mark} {check.name:<{NAME_WIDTH}} {check.found}"
    return f"{line}\n  {'':<{NAME_WIDTH}} → {check.fix}" if check.fix else line
