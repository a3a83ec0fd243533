"""`seriatim accept` and `seriatim retire`: a person's decisions, each with its reason in the
ledger.

Next room: operations/accept.py, operations/restore.py and operations/retire.py do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.operations.accept import TopicDecision
    from seriatim.operations.restore import RestoreDecision
    from seriatim.operations.retire import RetireDecision
    from seriatim.stream_files import StreamFile

Because = Annotated[
    str, typer.Option("--because", metavar="TEXT", help="Why. It is kept in the ledger; required.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]


@app.command()
def accept(
    stream: StreamName,
    topic: Annotated[
        str,
        typer.Argument(
            metavar="[TOPIC]", help="A topic that was made again, or one that is retired."
        ),
    ] = "",
    because: Because = "",
    restored: Annotated[
        bool,
        typer.Option(
            "--restored", help="The ledger was put back on purpose: its witness follows it."
        ),
    ] = False,
    sequence: Annotated[
        int | None,
        typer.Option(min=0, help="What a check called bad, up to this entry, is right as it is."),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Accept a topic as it is in Kafka now: one made again begins its new life, a retired one goes
    on.

    The sessions of the old life end: records that take their rows back are part of the decision.
    The next run reads the new life from its first offset. After a deliberate restore of the output
    folder use --restored. After a bad check, --sequence N accepts what was judged up to that entry,
    and closes the circuit.

    Example: seriatim accept demo demo-a --because "moved to the new cluster" --dry-run Example:
    seriatim accept demo --sequence 41 --because "prices below 0 are rebates"
    """
    if bool(topic) + restored + (sequence is not None) != 1:
        way = f"seriatim accept {stream} TOPIC, seriatim accept {stream} --restored, or --sequence N after a bad check"
        raise ConfigError("accept what?", next=way)
    file = _load_stream(stream, because, dry_run=dry_run, json=json)
    if sequence is not None:
        _accept_check(file, sequence, because, dry_run=dry_run, json=json)
    elif restored:
        _accept_restored(file, because, dry_run=dry_run, json=json)
    else:
        _accept_topic(file, topic, because, dry_run=dry_run, json=json)


@app.command()
def retire(
    stream: StreamName,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="A topic, or one partition as TOPIC/NUMBER.")
    ],
    because: Because = "",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Retire a topic that is over: it is read no more and found no more; its state is kept.

    It stays retired, also if it is made again, until `seriatim accept` takes it back.

    Example: seriatim retire demo demo-a --because "replaced by demo-b"
    """
    from seriatim import context
    from seriatim.clock import WallClock
    from seriatim.operations.retire import retire_topic as decide

    file = _load_stream(stream, because, dry_run=dry_run, json=json)
    store, log = context.ledger(file, with_schema=True), context.log(file, config.load_settings())
    decision = decide(
        store,
        log,
        WallClock(),
        file.stream.name,
        file.stream.topics,
        topic,
        context.new_attempt(),
        because,
        dry_run=dry_run,
    )
    _print_retired(file.stream.name, decision, json=json)


def _load_stream(stream: str, because: str, *, dry_run: bool, json: bool) -> StreamFile:
    from seriatim import stream_files

    Options.json = json
    settings = config.load_settings()
    config.arm_crash_point(settings.crash_point)
    if not because.strip() and not dry_run:
        raise ConfigError(
            "a decision needs its reason: --because is missing",
            next='add --because "…"; --dry-run needs none',
        )
    return stream_files.load_stream(stream, settings.streams)


def _accept_topic(file: StreamFile, topic: str, because: str, *, dry_run: bool, json: bool) -> None:
    from seriatim import context
    from seriatim.operations.accept import accept_topic as decide

    decision = decide(
        context.decision_context(file, config.load_settings()), topic, because, dry_run=dry_run
    )
    _print_accepted(file.stream.name, decision, json=json)


def _accept_check(
    file: StreamFile, sequence: int, because: str, *, dry_run: bool, json: bool
) -> None:
    from seriatim import context
    from seriatim.clock import WallClock
    from seriatim.ledger.verdicts import describe_failed_range
    from seriatim.operations.prove.check import accept_failed_check

    name, store = file.stream.name, context.ledger(file, with_schema=True)
    decided = accept_failed_check(
        store, WallClock(), name, context.new_attempt(), sequence, because, dry_run=dry_run
    )
    after = decided.ledger
    values = {
        "stream": name,
        "accepted": [
            {"partition": one.partition, "from": one.start, "until": one.until}
            for one in decided.failures
        ],
        "because": because or None,
        "sequence": None if dry_run else after.sequence,
        "circuit": after.circuit,
        "checked": after.checked,
    }
    if json:
        return _print_json(values)
    for one in decided.failures:
        typer.echo(
            f"{name}: {_describe_entry(-1 if dry_run else after.sequence)}: right as it is: {describe_failed_range(one)}"
        )
    if dry_run:
        typer.echo(f'next: seriatim accept {name} --sequence {sequence} --because "…"')
    else:
        typer.echo(f"{name}: the circuit is {after.circuit}, checked up to entry {after.checked}")
    return None


def _accept_restored(file: StreamFile, because: str, *, dry_run: bool, json: bool) -> None:
    from seriatim import context
    from seriatim.clock import WallClock
    from seriatim.operations.restore import accept_restored_ledger as decide

    store = context.ledger(file, with_schema=True)
    decision = decide(
        store, WallClock(), file.stream.name, context.new_attempt(), because, dry_run=dry_run
    )
    _print_restored(file.stream.name, decision, json=json)


def _print_accepted(stream: str, decision: TopicDecision, *, json: bool) -> None:
    from seriatim.cli import output

    rows = [
        {
            "partition": str(one.partition),
            "old_id": one.old_topic_id or None,
            "new_id": one.new_topic_id,
            "frontier": one.frontier,
            "starts": one.resumes_at,
            "sessions": one.ended_sessions,
            "records": one.end_records,
            "unread": one.unread_messages,
        }
        for one in decision.partitions
    ]
    if json:
        return _print_json(
            {
                "stream": stream,
                "topic": decision.topic,
                "new_life": decision.is_new_life,
                "because": decision.reason or None,
                "sequence": decision.sequence if decision.sequence >= 0 else None,
                "partitions": rows,
            }
        )
    output.print_table(list(rows[0]), rows)
    sessions, records = (
        sum(one.ended_sessions for one in decision.partitions),
        sum(one.end_records for one in decision.partitions),
    )
    unread = sum(one.unread_messages for one in decision.partitions)
    what = (
        f"a new life of {decision.topic}: {sessions} sessions end by {records} records"
        if decision.is_new_life
        else f"{decision.topic} goes on from where it was"
    )
    lost = f"; {unread} messages of the old life were never read" if unread else ""
    typer.echo(f"{stream}: {_describe_entry(decision.sequence)}: {what}{lost}")
    return _print_next_command(stream, decision.sequence, f"accept {stream} {decision.topic}")


def _print_retired(stream: str, decision: RetireDecision, *, json: bool) -> None:
    from seriatim.cli import output

    rows = [
        {
            "partition": str(one.partition),
            "topic_id": one.topic_id,
            "frontier": one.frontier,
            "unread": one.unread_messages,
            "waits": one.halt_finding or None,
        }
        for one in decision.partitions
    ]
    if json:
        return _print_json(
            {
                "stream": stream,
                "topic": decision.topic,
                "because": decision.reason or None,
                "sequence": decision.sequence if decision.sequence >= 0 else None,
                "partitions": rows,
            }
        )
    output.print_table(list(rows[0]), rows)
    unread = sum(one.unread_messages for one in decision.partitions)
    lost = f"; {unread} messages stay unread" if unread else ""
    typer.echo(
        f"{stream}: {_describe_entry(decision.sequence)}: {len(rows)} of {decision.topic} retired, state kept{lost}"
    )
    return None


def _print_restored(stream: str, decision: RestoreDecision, *, json: bool) -> None:

    values = {
        "stream": stream,
        "witness": decision.witness_sequence,
        "ledger": decision.ledger_sequence if decision.ledger_sequence >= 0 else None,
        "because": decision.reason or None,
        "sequence": decision.sequence if decision.sequence >= 0 else None,
        "aside": decision.archived_witness_path or None,
    }
    if json:
        return _print_json(values)
    typer.echo(decision.contradiction)
    if decision.ledger_sequence < 0:
        done = (
            f"moved to {decision.archived_witness_path}"
            if decision.archived_witness_path
            else "would be moved aside"
        )
        typer.echo(
            f"{stream}: the witness {done}: the next run begins at the first offsets that Kafka has"
        )
    else:
        lost = decision.witness_sequence - decision.ledger_sequence
        typer.echo(
            f"{stream}: {_describe_entry(decision.sequence)}: the witness follows the ledger from entry {decision.witness_sequence} "
            f"to {decision.ledger_sequence}"
            + (f"; {lost} entries are given up" if lost > 0 else "")
        )
    return _print_next_command(
        stream,
        0 if decision.archived_witness_path else decision.sequence,
        f"accept {stream} --restored",
    )


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(msgspec.json.encode(value).decode())


def _describe_entry(sequence: int) -> str:
    return f"entry {sequence}" if sequence >= 0 else "nothing changed, this would be"


def _print_next_command(stream: str, sequence: int, command: str) -> None:
    done = sequence >= 0
    typer.echo(
        f"next: seriatim run {stream}" if done else f'next: seriatim {command} --because "…"'
    )
