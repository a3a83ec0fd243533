"""`seriatim repair` and `seriatim backfill`: what was folded is folded again, and replaced by one
commit.

Next room: cli/repair_screen.py shows plans and applies them; operations/repair/plan.py has the
plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.accept import DryRun
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.config import Settings
    from seriatim.context import LazySpark
    from seriatim.operations.repair.repair import RepairContext
    from seriatim.stream_files import StreamFile

MACHINE_CHOICES = ("deployed", "unchanged")
MessagesMax = Annotated[
    int | None, typer.Option(min=1, help="Messages in one stage. Default: those of a slice.")
]


@app.command()
def repair(
    stream: StreamName,
    partition: Annotated[
        str, typer.Option(metavar="TOPIC/NUMBER", help="Only this partition.")
    ] = "",
    session: Annotated[str | None, typer.Option(metavar="NAME", help="Only this session.")] = None,
    start: Annotated[
        int | None, typer.Option("--from", metavar="OFFSET", min=0, help="Fold again from here on.")
    ] = None,
    forward: Annotated[
        bool,
        typer.Option(
            "--forward", help="Go on without messages that are gone; the gap is published."
        ),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it. Without: show the plan, change nothing.")
    ] = False,
    approval: Annotated[
        str, typer.Option(metavar="TOKEN", help="The plan that was approved; void if it changed.")
    ] = "",
    resume: Annotated[str, typer.Option(metavar="ID", help="Go on with a repair that died.")] = "",
    abandon: Annotated[
        str, typer.Option(metavar="ID", help="Give up a repair that died: its hold is released.")
    ] = "",
    messages_max: MessagesMax = None,
    json: Json = False,
) -> None:
    """Find what is hurt, show how it is mended, and with --apply mend it, all in one commit.

    Hurt are: lost or damaged files, sessions in quarantine, partitions that wait, partitions whose
    check failed; or name it yourself. Each is rewound to the last good state before it and folded
    again; other partitions go on. Killed anywhere, the same command goes on.

    Example: seriatim repair demo --partition demo-a/3 --apply
    """
    from seriatim.cli.repair_screen import run_repair
    from seriatim.operations.repair.plan import RepairRequest
    from seriatim.operations.repair.repair import abandon_repair as give_up
    from seriatim.operations.repair.repair import request_of_hold

    file, mending, spark = _open_repair(stream, json=json)
    name = file.stream.name
    if abandon:
        given = give_up(mending, abandon)
        return _print_abandoned(name, abandon, list(map(str, given)), json=json)
    request = RepairRequest(partition=partition, session=session, start=start, forward=forward)
    if session is not None and forward:
        raise ConfigError(
            "--forward is about a partition",
            next="a session goes on by its next snapshot, or a release by hand",
        )
    if approval and not (apply or resume):
        raise ConfigError("--approval is of a plan that is to be applied", next="add --apply")
    if resume:
        if request != RepairRequest():
            raise ConfigError(
                "--resume knows what was asked", next="give --resume ID and nothing else"
            )
        request, apply = request_of_hold(mending, resume), True
    run_repair(
        file,
        mending,
        spark,
        request,
        apply=apply,
        approval=approval,
        messages_max=messages_max,
        json=json,
    )
    return None


@app.command()
def backfill(
    stream: StreamName,
    topics: Annotated[
        list[str] | None, typer.Option("--topics", "--topic", help="Topics; may be given again.")
    ] = None,
    partitions: Annotated[
        list[str] | None,
        typer.Option("--partitions", "--partition", help="TOPIC/NUMBER; may be given again."),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="EDGE", help="An offset, or a time like 2026-11-16T08:00:00Z."
        ),
    ] = "",
    until: Annotated[
        str, typer.Option("--until", metavar="EDGE", help="The same; not included.")
    ] = "",
    machine: Annotated[
        str,
        typer.Option(
            metavar="deployed|unchanged",
            help="unchanged: refuse whatever would come out otherwise.",
        ),
    ] = "deployed",
    dry_run: DryRun = False,
    messages_max: MessagesMax = None,
    json: Json = False,
) -> None:
    """Fold a range again with the code of now, and replace what it gave, in one commit.

    The range is widened: down to the last saved state, and per session up to where it is as
    committed again or to the frontier. --dry-run prints exactly that. Everything outside stays as
    it is. With --machine unchanged the code must be what made it: if a record or a session's state
    comes out otherwise, nothing is changed.

    Example: seriatim backfill demo --partitions demo-a/3 --from 41000 --until 52000 --dry-run
    """
    from seriatim.airflow.run_request import RefusedValueError, parse_run_request
    from seriatim.cli.repair_screen import run_repair
    from seriatim.operations.accept import require_head
    from seriatim.operations.repair.backfill import backfill_ranges
    from seriatim.operations.repair.plan import RepairRequest

    given = {
        "topics": _split_values(topics),
        "partitions": _split_values(partitions),
        "from": start,
        "until": until,
    }
    try:
        asked = parse_run_request(
            {"action": "backfill", **given, "messages_max": messages_max, "dry_run": dry_run}
        )
    except RefusedValueError as error:
        raise ConfigError(
            f"--{error.key.replace('_', '-')}: {error.problem}",
            allowed=error.allowed,
            next="`seriatim backfill --help` shows what can be given",
        ) from None
    if machine not in MACHINE_CHOICES:
        raise ConfigError(
            f"--machine: found {machine!r}",
            allowed=" | ".join(MACHINE_CHOICES),
            next="give one of these",
        )
    file, mending, spark = _open_repair(stream, json=json)
    ledger = require_head(mending.fold_context.ledger, file.stream.name).ledger
    request = RepairRequest(
        ranges=backfill_ranges(asked, ledger, mending.fold_context.log),
        unchanged=machine == "unchanged",
    )
    run_repair(
        file,
        mending,
        spark,
        request,
        apply=not dry_run,
        approval="",
        messages_max=messages_max,
        json=json,
    )


def _split_values(texts: list[str] | None) -> list[str]:
    return [one.strip() for text in texts or [] for one in text.split(",") if one.strip()]


def _open_repair(stream: str, *, json: bool) -> tuple[StreamFile, RepairContext, LazySpark]:
    from seriatim import context, stream_files

    Options.json = json
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    config.arm_crash_point(settings.crash_point)
    spark = context.LazySpark(file, settings, print_notice)
    return file, repair_context(file, settings, spark), spark


def repair_context(file: StreamFile, settings: Settings, spark: LazySpark) -> RepairContext:
    """What a repair is made with, for real."""
    from seriatim import context, stream_files
    from seriatim.kafka.consumer import KafkaPastMessageReader
    from seriatim.operations.repair.repair import RepairContext

    world = context.fold_context(file, settings, spark)
    reread = KafkaPastMessageReader(context.kafka_client(settings), file.stream.isolation)
    return RepairContext(
        stream=file.stream,
        runner=stream_files.load_runner(file),
        fold_context=world,
        past_reader=reread,
    )


def _print_abandoned(name: str, hold: str, partitions: list[str], *, json: bool) -> None:
    if json:
        typer.echo(
            msgspec.json.encode(
                {"stream": name, "abandoned": hold, "partitions": partitions}
            ).decode()
        )
        return
    typer.echo(
        f"{name}: repair {hold} is given up; {', '.join(partitions)} are read again as they are"
    )
