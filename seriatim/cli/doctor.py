"""`seriatim doctor`: what this machine has and lacks, and what would help.

Next room: seriatim/embedded/doctor.py looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from seriatim import config
from seriatim.cli import app
from seriatim.errors import SeriatimError

if TYPE_CHECKING:
    from seriatim.config import Settings
    from seriatim.embedded.doctor import DoctorCheck

NAME_WIDTH = 14


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per check.")] = False,
) -> None:
    """Check everything that Seriatim needs, and say how to fix what is missing.

    ✓ is good, ✗ is required and missing, – is optional and not set up, or could be better. Exit 0
    only if nothing required is missing, else 2.

    Example: seriatim doctor
    """
    from seriatim.embedded import doctor as checkup

    missing, settings = False, config.load_settings()
    for check in chain(checkup.run_checks(settings), check_retention(settings)):
        typer.echo(msgspec.json.encode(check) if json else _render_check(check))
        missing = missing or (check.is_required and not check.is_good)
    if missing:
        raise typer.Exit(2)


def check_retention(settings: Settings) -> Iterator[DoctorCheck]:
    """Whether every stream's topics keep messages for long enough. A line for each that does not."""
    from seriatim import context, stream_files
    from seriatim.clock import WallClock
    from seriatim.embedded.doctor import DoctorCheck
    from seriatim.ledger.model import Ledger
    from seriatim.operations.plan import short_retention

    warned, looked = False, 0
    for name in stream_files.list_streams(settings.streams):
        try:
            file = stream_files.load_stream(name, settings.streams)
        except SeriatimError as error:
            yield DoctorCheck(
                "retention", False, False, f"{name}: not looked at: {error.message}", error.next
            )
            continue
        try:
            found = short_retention(
                file.stream, context.log(file, settings), Ledger(stream=name), WallClock()
            )
        except SeriatimError as error:
            yield DoctorCheck(
                "retention", False, False, f"{name}: not looked at: {error.message}", error.next
            )
            return  # the broker is the same for all: the next stream would wait for it as long
        looked += 1
        for topic in found:
            warned = True
            yield DoctorCheck("retention", False, False, f"{name}: {topic.text}", topic.next)
    if looked and not warned:
        yield DoctorCheck("retention", True, True, "72 h or more in every topic")


def _render_check(check: DoctorCheck) -> str:
    mark = "✓" if check.is_good else "✗" if check.is_required else "–"
    line = f"{mark} {check.name:<{NAME_WIDTH}} {check.description}"
    return f"{line}\n  {'':<{NAME_WIDTH}} → {check.fix}" if check.fix else line
