"""`seriatim doctor`: what this host has, what it lacks, and how to fix that.

Next: embedded/doctor.py runs the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import msgspec
import typer

from seriatim import clock, config, context, stream_files
from seriatim.config import Settings
from seriatim.embedded.doctor import DoctorCheck, run_checks
from seriatim.errors import SeriatimError
from seriatim.ledger.model import Ledger
from seriatim.operations.retention import short_retention

NAME_WIDTH = 14


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per check.")] = False,
) -> None:
    """Check what Seriatim needs on this host.

    Each problem is shown with the way to fix it. ✓ means good. ✗ means required and missing. –
    means optional and not set up, or that it could be better. The exit code is 0 if nothing
    required is missing, else 2.

    Example: seriatim doctor
    """
    settings = config.load_settings()
    is_missing = False
    # Each check is printed as soon as it is made, since some of them take seconds.
    for check in chain(run_checks(settings), check_buckets(settings), check_retention(settings)):
        if json:
            typer.echo(msgspec.json.encode(check))
        else:
            typer.echo(_render_check(check))
        if check.is_required and not check.is_good:
            is_missing = True
    if is_missing:
        raise typer.Exit(2)


def check_buckets(settings: Settings) -> Iterator[DoctorCheck]:
    """Try the bucket of every stream that has its output in one: writing, and whether its server
    refuses to overwrite.
    """
    from seriatim import context, stream_files
    from seriatim.embedded.doctor import DoctorCheck

    files, _ = stream_files.load_all_streams(settings.streams)
    for file in files:
        if not stream_files.is_in_bucket(file.stream):
            continue
        try:
            context.refuse_unsafe_bucket(file)
        except SeriatimError as error:
            yield DoctorCheck("bucket", False, True, error.message, error.next)
        else:
            yield DoctorCheck("bucket", True, True, file.stream.output.path)


def check_retention(settings: Settings) -> Iterator[DoctorCheck]:
    """Check whether the topics of every stream keep messages long enough.

    There is one result for each topic that does not, or one good result if all do.
    """
    has_warned = False
    checked_streams = 0
    for name in stream_files.list_streams(settings.streams):
        try:
            file = stream_files.load_stream(name, settings.streams)
        except SeriatimError as error:
            yield _failed_retention_check(name, error)
            continue
        try:
            short_topics = short_retention(
                file.stream, context.log(file, settings), Ledger(stream=name), clock.WallClock()
            )
        except SeriatimError as error:
            yield _failed_retention_check(name, error)
            return  # all streams have the same broker: the next one would wait for it as long
        checked_streams += 1
        for topic in short_topics:
            has_warned = True
            yield DoctorCheck("retention", False, False, f"{name}: {topic.text}", topic.next)
    if checked_streams and not has_warned:
        yield DoctorCheck("retention", True, True, "72 h or more in every topic")


def _failed_retention_check(stream: str, error: SeriatimError) -> DoctorCheck:

    description = f"{stream}: not looked at: {error.message}"
    return DoctorCheck("retention", False, False, description, error.next)


def _render_check(check: DoctorCheck) -> str:
    if check.is_good:
        mark = "✓"
    elif check.is_required:
        mark = "✗"
    else:
        mark = "–"
    text = f"{mark} {check.name:<{NAME_WIDTH}} {check.description}"
    if check.fix:
        text += f"\n  {'':<{NAME_WIDTH}} → {check.fix}"
    return text
