"""`seriatim accept` and `seriatim retire`: decisions of a person. The ledger keeps the reasons.

Next: operations/accept.py, operations/restore.py and operations/retire.py do the work.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from seriatim import clock, config, context, stream_files
from seriatim.cli import output, print_json
from seriatim.cli.options import Because, DryRun, Json, StreamName
from seriatim.errors import ConfigError
from seriatim.ledger.model import describe_failed_range
from seriatim.operations.accept import TopicDecision, accept_topic
from seriatim.operations.prove.check import AcceptedFailures, accept_failed_check
from seriatim.operations.restore import RestoreDecision, accept_restored_ledger
from seriatim.operations.retire import RetireDecision, retire_topic
from seriatim.stream_files import StreamFile


def accept(
    stream: StreamName,
    topic: Annotated[
        str,
        typer.Argument(
            metavar="[TOPIC]", help="A topic that was created again, or one that is retired."
        ),
    ] = "",
    because: Because = "",
    restored: Annotated[
        bool,
        typer.Option(
            "--restored",
            help="The output folder was restored on purpose: its witness follows the ledger.",
        ),
    ] = False,
    sequence: Annotated[
        int | None,
        typer.Option(
            min=0, help="Accept the output that a check called bad, up to this ledger entry."
        ),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Accept a changed topic, a restored ledger, or a bad check.

    A topic is accepted as it is in Kafka now. A topic that was created again starts a new life: the
    sessions of its old life end, and records that take their rows back are part of the decision.
    The next run reads the new topic from its first offset. A retired topic is read again from where
    it stopped.

    Use --restored after the output folder was restored on purpose. Use --sequence N after a bad
    check: it accepts everything that was judged up to that entry, and closes the circuit.

    Example: seriatim accept demo demo-a --because "moved to the new cluster" --dry-run

    Example: seriatim accept demo --sequence 41 --because "prices below 0 are rebates"
    """
    subject_count = bool(topic) + restored + (sequence is not None)
    if subject_count != 1:
        raise ConfigError(
            "accept what?",
            next=f"seriatim accept {stream} TOPIC, seriatim accept {stream} --restored,"
            " or --sequence N after a bad check",
        )
    file = _load_stream(stream, because, dry_run=dry_run)
    if sequence is not None:
        _accept_check(file, sequence, because, dry_run=dry_run, json=json)
    elif restored:
        _accept_restored(file, because, dry_run=dry_run, json=json)
    else:
        _accept_topic(file, topic, because, dry_run=dry_run, json=json)


def retire(
    stream: StreamName,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="A topic, or one partition as TOPIC/NUMBER.")
    ],
    because: Because = "",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Retire a topic that is over.

    No run reads or discovers the topic any more. Its state is kept. The topic stays retired, even
    if it is created again, until `seriatim accept` takes it back.

    Example: seriatim retire demo demo-a --because "replaced by demo-b"
    """
    file = _load_stream(stream, because, dry_run=dry_run)
    decision = retire_topic(
        context.ledger(file, with_schema=True),
        context.log(file, config.load_settings()),
        clock.WallClock(),
        file.stream.name,
        file.stream.topics,
        topic,
        context.new_attempt(),
        because,
        dry_run=dry_run,
    )
    _print_retired(file.stream.name, decision, json=json)


def _load_stream(stream: str, because: str, *, dry_run: bool) -> StreamFile:
    """Prepare a decision: read the settings and the stream file, and refuse a missing reason."""
    settings = config.load_settings()
    config.arm_crash_point(settings.crash_point)
    require_reason(because, dry_run=dry_run)
    return stream_files.load_stream(stream, settings.streams)


def require_reason(because: str, *, dry_run: bool) -> None:
    """Refuse a decision without a reason. A dry run decides nothing, so it needs none."""
    if dry_run or because.strip():
        return
    raise ConfigError(
        "a decision needs its reason: --because is missing",
        next='add --because "…"; --dry-run needs none',
    )


def _accept_topic(file: StreamFile, topic: str, because: str, *, dry_run: bool, json: bool) -> None:

    open_stream = context.ConnectedStream(file, config.load_settings(), writes_records=True)
    decision = accept_topic(open_stream, topic, because, dry_run=dry_run)
    _print_accepted(file.stream.name, decision, json=json)


def _accept_check(
    file: StreamFile, sequence: int, because: str, *, dry_run: bool, json: bool
) -> None:

    decision = accept_failed_check(
        context.ledger(file, with_schema=True),
        clock.WallClock(),
        file.stream.name,
        context.new_attempt(),
        sequence,
        because,
        dry_run=dry_run,
    )
    if json:
        print_json(_accepted_check_values(file.stream.name, decision, because, dry_run=dry_run))
    else:
        _print_accepted_check(file.stream.name, decision, sequence, dry_run=dry_run)


def _accepted_check_values(
    stream: str, decision: AcceptedFailures, because: str, *, dry_run: bool
) -> dict[str, Any]:
    accepted_ranges = [
        {"partition": failed.partition, "from": failed.start, "until": failed.until}
        for failed in decision.failures
    ]
    return {
        "stream": stream,
        "accepted": accepted_ranges,
        "because": because or None,
        "sequence": None if dry_run else decision.ledger.sequence,
        "circuit": decision.ledger.circuit,
        "checked": decision.ledger.checked,
    }


def _print_accepted_check(
    stream: str, decision: AcceptedFailures, sequence: int, *, dry_run: bool
) -> None:

    ledger = decision.ledger
    entry = _describe_entry(-1 if dry_run else ledger.sequence)
    for failed in decision.failures:
        typer.echo(f"{stream}: {entry}: right as it is: {describe_failed_range(failed)}")
    if dry_run:
        typer.echo(f'next: seriatim accept {stream} --sequence {sequence} --because "…"')
    else:
        typer.echo(
            f"{stream}: the circuit is {ledger.circuit}, checked up to entry {ledger.checked}"
        )


def _accept_restored(file: StreamFile, because: str, *, dry_run: bool, json: bool) -> None:

    decision = accept_restored_ledger(
        context.ledger(file, with_schema=True),
        clock.WallClock(),
        file.stream.name,
        context.new_attempt(),
        because,
        dry_run=dry_run,
    )
    _print_restored(file.stream.name, decision, json=json)


def _print_accepted(stream: str, decision: TopicDecision, *, json: bool) -> None:

    rows = [
        {
            "partition": str(life.partition),
            "old_id": life.old_topic_id or None,
            "new_id": life.new_topic_id,
            "frontier": life.frontier,
            "starts": life.resumes_at,
            "sessions": life.ended_sessions,
            "records": life.end_records,
            "unread": life.unread_messages,
        }
        for life in decision.partitions
    ]
    if json:
        print_json(
            {
                "stream": stream,
                "topic": decision.topic,
                "new_life": decision.is_new_life,
                "because": decision.reason or None,
                "sequence": _sequence_or_none(decision.sequence),
                "partitions": rows,
            }
        )
        return
    output.print_table(list(rows[0]), rows)
    typer.echo(f"{stream}: {_describe_entry(decision.sequence)}: {_describe_accepted(decision)}")
    _print_next_command(stream, decision.sequence, f"accept {stream} {decision.topic}")


def _describe_accepted(decision: TopicDecision) -> str:
    effect = f"{decision.topic} goes on from where it was"
    if decision.is_new_life:
        sessions = sum(life.ended_sessions for life in decision.partitions)
        records = sum(life.end_records for life in decision.partitions)
        effect = f"a new life of {decision.topic}: {sessions} sessions end by {records} records"
    unread = sum(life.unread_messages for life in decision.partitions)
    if unread:
        effect += f"; {unread} messages of the old life were never read"
    return effect


def _print_retired(stream: str, decision: RetireDecision, *, json: bool) -> None:

    rows = [
        {
            "partition": str(retired.partition),
            "topic_id": retired.topic_id,
            "frontier": retired.frontier,
            "unread": retired.unread_messages,
            "waits": retired.halt_finding or None,
        }
        for retired in decision.partitions
    ]
    if json:
        print_json(
            {
                "stream": stream,
                "topic": decision.topic,
                "because": decision.reason or None,
                "sequence": _sequence_or_none(decision.sequence),
                "partitions": rows,
            }
        )
        return
    output.print_table(list(rows[0]), rows)
    effect = f"{len(rows)} of {decision.topic} retired, state kept"
    unread = sum(retired.unread_messages for retired in decision.partitions)
    if unread:
        effect += f"; {unread} messages stay unread"
    typer.echo(f"{stream}: {_describe_entry(decision.sequence)}: {effect}")


def _print_restored(stream: str, decision: RestoreDecision, *, json: bool) -> None:
    if json:
        print_json(
            {
                "stream": stream,
                "witness": decision.witness_sequence,
                "ledger": _sequence_or_none(decision.ledger_sequence),
                "because": decision.reason or None,
                "sequence": _sequence_or_none(decision.sequence),
                "aside": decision.archived_witness_path or None,
            }
        )
        return
    typer.echo(decision.contradiction)
    command = f"accept {stream} --restored"
    if decision.ledger_sequence >= 0:
        typer.echo(f"{stream}: {_describe_restored_entry(decision)}")
        _print_next_command(stream, decision.sequence, command)
        return
    # Without any ledger no entry is written: the decision consists of moving the witness away.
    if decision.archived_witness_path:
        witness_move = f"moved to {decision.archived_witness_path}"
        sequence = 0
    else:
        witness_move = "would be moved aside"
        sequence = decision.sequence
    typer.echo(
        f"{stream}: the witness {witness_move}:"
        " the next run begins at the first offsets that Kafka has"
    )
    _print_next_command(stream, sequence, command)


def _describe_restored_entry(decision: RestoreDecision) -> str:
    text = (
        f"{_describe_entry(decision.sequence)}: the witness follows the ledger"
        f" from entry {decision.witness_sequence} to {decision.ledger_sequence}"
    )
    lost_entries = decision.witness_sequence - decision.ledger_sequence
    if lost_entries > 0:
        text += f"; {lost_entries} entries are given up"
    return text


def _sequence_or_none(sequence: int) -> int | None:
    """Decisions say -1 where there is no entry; JSON says null."""
    return sequence if sequence >= 0 else None


def _describe_entry(sequence: int) -> str:
    return f"entry {sequence}" if sequence >= 0 else "nothing changed, this would be"


def _print_next_command(stream: str, sequence: int, command: str) -> None:
    if sequence >= 0:
        typer.echo(f"next: seriatim run {stream}")
    else:
        typer.echo(f'next: seriatim {command} --because "…"')
