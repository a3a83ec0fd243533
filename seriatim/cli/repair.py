"""`seriatim repair` and `seriatim backfill`: fold a range again, and replace its output in one
commit.

Next: cli/repair_screen.py prints plans and applies them; operations/repair/plan.py makes the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.accept import DryRun
from seriatim.cli.run import Json, StreamName
from seriatim.engine.findings import shell_quote
from seriatim.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.context import ConnectedStream
    from seriatim.operations.run_request import RunRequest

MACHINE_CHOICES = ("deployed", "unchanged")
MessagesMax = Annotated[
    int | None,
    typer.Option(min=1, help="Messages in one stage. Default: as many as in one slice."),
]


@app.command()
def repair(
    stream: StreamName,
    partition: Annotated[
        str, typer.Option(metavar="TOPIC/NUMBER", help="Repair this partition only.")
    ] = "",
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="Repair this session only.")
    ] = None,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="OFFSET",
            min=0,
            help="Fold again from this offset on. Needs --partition or --session.",
        ),
    ] = None,
    forward: Annotated[
        bool,
        typer.Option(
            "--forward",
            help="Go on without messages that Kafka has lost. The gap is published.",
        ),
    ] = False,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Apply the plan. Without it the plan is only shown."),
    ] = False,
    approval: Annotated[
        str,
        typer.Option(
            metavar="TOKEN",
            help="The field `approval` of `repair --json`. If the plan has changed since then,"
            " nothing is applied.",
        ),
    ] = "",
    resume: Annotated[
        str, typer.Option(metavar="ID", help="Continue a repair that was killed.")
    ] = "",
    abandon: Annotated[
        str,
        typer.Option(metavar="ID", help="Give up a repair that was killed: release its hold."),
    ] = "",
    messages_max: MessagesMax = None,
    json: Json = False,
) -> None:
    """Find what is damaged, and show or apply the repair.

    Without --apply the plan is shown. With --apply everything is repaired in one commit. Damaged
    means: files that are lost or damaged, sessions in quarantine, partitions that wait, and
    partitions whose check failed. You can also name a partition or a session yourself. Each is
    rewound to the last good state before the damage, and folded again; other partitions go on. If
    the command is killed, the same command continues.

    Example: seriatim repair demo --partition demo-a/3 --apply
    """
    from seriatim.cli.repair_screen import run_repair
    from seriatim.operations.repair.damage import RepairRequest, request_of_hold
    from seriatim.operations.repair.refold import abandon_repair

    open_stream = _open_stream(stream, json=json)
    if abandon:
        partitions = abandon_repair(open_stream, abandon)
        _print_abandoned(open_stream.stream.name, abandon, list(map(str, partitions)), json=json)
        return
    request = RepairRequest(partition=partition, session=session, start=start, forward=forward)
    # Lost messages concern all sessions of a partition, so going on without them does as well.
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
        request = request_of_hold(open_stream, resume)
    stage_option = "" if messages_max is None else f" --messages-max {messages_max}"
    run_repair(
        open_stream,
        request,
        apply=apply or bool(resume),
        apply_command=f"{request.to_command(shell_quote(stream))} --apply{stage_option}",
        approval=approval,
        messages_max=messages_max,
        json=json,
    )


@app.command()
def backfill(
    stream: StreamName,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topics", "--topic", help="These topics only. It may be repeated."),
    ] = None,
    partitions: Annotated[
        list[str] | None,
        typer.Option(
            "--partitions",
            "--partition",
            help="These partitions only, as TOPIC/NUMBER. It may be repeated.",
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="EDGE",
            help="The begin: an offset, or a time like 2026-11-16T08:00:00Z.",
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            "--until", metavar="EDGE", help="The end, which is not included: an offset or a time."
        ),
    ] = "",
    machine: Annotated[
        str,
        typer.Option(
            metavar="deployed|unchanged",
            help="unchanged: refuse if any record or state comes out differently.",
        ),
    ] = "deployed",
    dry_run: DryRun = False,
    messages_max: MessagesMax = None,
    json: Json = False,
) -> None:
    """Fold a range again, and replace its output in one commit.

    It is folded with the code as it is now. The range is widened: back to the last saved state
    before it, and for each session forward to the point where its state is as committed again, or
    to the frontier. --dry-run prints exactly that range. Everything outside of it stays as it is.
    With --machine unchanged nothing is changed if any record or any session's state comes out
    differently.

    Example: seriatim backfill demo --partitions demo-a/3 --from 41000 --until 52000 --dry-run
    """
    from seriatim.cli.repair_screen import run_repair
    from seriatim.ledger.commit import require_head
    from seriatim.operations.repair.backfill import backfill_ranges
    from seriatim.operations.repair.damage import RepairRequest

    run_request = _parse_backfill_request(
        topics, partitions, start, until, messages_max, dry_run=dry_run
    )
    if machine not in MACHINE_CHOICES:
        raise ConfigError(
            f"--machine: found {machine!r}",
            allowed=" | ".join(MACHINE_CHOICES),
            next="give one of these",
        )
    open_stream = _open_stream(stream, json=json)
    ledger = require_head(open_stream.ledger, open_stream.stream.name).ledger
    request = RepairRequest(
        ranges=backfill_ranges(run_request, ledger, open_stream.log),
        unchanged=machine == "unchanged",
    )
    run_repair(
        open_stream,
        request,
        apply=not dry_run,
        apply_command=_backfill_command(stream, run_request, machine),
        approval="",
        messages_max=messages_max,
        json=json,
    )


def _backfill_command(stream: str, run_request: RunRequest, machine: str) -> str:
    """The command of a backfill as a person typed it, without --dry-run."""
    words = ["seriatim", "backfill", stream]
    for topic in run_request.topics:
        words += ["--topic", topic]
    for partition in run_request.partitions:
        words += ["--partition", str(partition)]
    if run_request.start is not None:
        words += ["--from", run_request.start.text]
    if run_request.until is not None:
        words += ["--until", run_request.until.text]
    if machine != MACHINE_CHOICES[0]:
        words += ["--machine", machine]
    if run_request.messages_max is not None:
        words += ["--messages-max", str(run_request.messages_max)]
    return " ".join(map(shell_quote, words))


def _parse_backfill_request(
    topics: list[str] | None,
    partitions: list[str] | None,
    start: str,
    until: str,
    messages_max: int | None,
    *,
    dry_run: bool,
) -> RunRequest:
    """Parse the options by the rules of the trigger form in Airflow, so that both accept the same.

    A refused value becomes an error that names the option.
    """
    from seriatim.operations.run_request import RefusedValueError, parse_run_request

    values = {
        "action": "backfill",
        "topics": _split_values(topics),
        "partitions": _split_values(partitions),
        "from": start,
        "until": until,
        "messages_max": messages_max,
        "dry_run": dry_run,
    }
    try:
        return parse_run_request(values)
    except RefusedValueError as error:
        raise ConfigError(
            f"--{error.key.replace('_', '-')}: {error.problem}",
            allowed=error.allowed,
            next="`seriatim backfill --help` shows what can be given",
        ) from None


def _split_values(texts: list[str] | None) -> list[str]:
    """The values of an option that may be repeated, and may have several values with commas."""
    values = []
    for text in texts or []:
        values += [value.strip() for value in text.split(",") if value.strip()]
    return values


def _open_stream(stream: str, *, json: bool) -> ConnectedStream:
    from seriatim import context, stream_files

    Options.json = json
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    config.arm_crash_point(settings.crash_point)
    return context.open_for_fold(file, settings, print_notice)


def _print_abandoned(name: str, hold: str, partitions: list[str], *, json: bool) -> None:
    if json:
        values = {"stream": name, "abandoned": hold, "partitions": partitions}
        typer.echo(msgspec.json.encode(values).decode())
        return
    typer.echo(
        f"{name}: repair {hold} is given up; the next run reads {', '.join(partitions)} again,"
        " as before the repair"
    )
