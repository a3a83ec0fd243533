"""`seriatim accept` and `seriatim retire`: decisions of a person. The ledger keeps the reasons.

Next: operations/accept.py does the work.
"""

from __future__ import annotations

from typing import Annotated

import typer

from seriatim import clock, config, context
from seriatim.cli import CommandResult, JsonObject
from seriatim.cli.options import Because, DryRun, Json, StreamName, load_stream, require_reason
from seriatim.cli.output import render_table, sequence_or_none
from seriatim.engine.findings import count_of
from seriatim.errors import ConfigError
from seriatim.ledger.model import describe_failed_range
from seriatim.operations.accept import (
    RestoreDecision,
    RetireDecision,
    TopicDecision,
    accept_restored_ledger,
    accept_topic,
    retire_topic,
)
from seriatim.operations.prove.check import AcceptedFailures, accept_failed_check


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
    _json: Json = False,
) -> CommandResult:
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
    require_reason(because, dry_run=dry_run)
    file = load_stream(stream)
    name = file.stream.name
    if sequence is not None:
        failures = accept_failed_check(
            context.ledger(file, with_schema=True),
            clock.WallClock(),
            name,
            context.new_attempt(),
            sequence,
            because,
            dry_run=dry_run,
        )
        return AcceptedCheck(name, sequence, failures, because, dry_run)
    if restored:
        restore_decision = accept_restored_ledger(
            context.ledger(file, with_schema=True),
            clock.WallClock(),
            name,
            context.new_attempt(),
            because,
            dry_run=dry_run,
        )
        return AcceptedLedger(name, restore_decision)
    open_stream = context.ConnectedStream(file, config.load_settings(), writes_records=True)
    return AcceptedTopic(name, accept_topic(open_stream, topic, because, dry_run=dry_run))


def retire(
    stream: StreamName,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="A topic, or one partition as TOPIC/NUMBER.")
    ],
    because: Because = "",
    dry_run: DryRun = False,
    _json: Json = False,
) -> CommandResult:
    """Retire a topic that is over.

    No run reads or discovers the topic any more. Its state is kept. The topic stays retired, even
    if it is created again, until `seriatim accept` takes it back.

    Example: seriatim retire demo demo-a --because "replaced by demo-b"
    """
    require_reason(because, dry_run=dry_run)
    file = load_stream(stream)
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
    return RetiredTopic(file.stream.name, decision)


class AcceptedTopic(CommandResult):
    """A topic was accepted as it is in Kafka now, or would be."""

    stream: str
    decision: TopicDecision

    def to_json(self) -> JsonObject:
        """The decision, with one object for each partition."""
        decision = self.decision
        return {
            "stream": self.stream,
            "topic": decision.topic,
            "new_life": decision.is_new_life,
            "because": decision.reason or None,
            "sequence": sequence_or_none(decision.sequence),
            "partitions": self._rows(),
        }

    def _rows(self) -> list[JsonObject]:
        return [
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
            for life in self.decision.partitions
        ]

    def render(self) -> str:
        """A table of the partitions, and what the decision means."""
        decision = self.decision
        rows = self._rows()
        effect = f"{decision.topic} goes on from where it was"
        if decision.is_new_life:
            sessions = sum(row["sessions"] for row in rows)
            records = sum(row["records"] for row in rows)
            effect = (
                f"a new life of {decision.topic}: {count_of(sessions, 'session')} ended"
                f" by {count_of(records, 'record')}"
            )
        unread = sum(row["unread"] for row in rows)
        if unread:
            effect += f"; {count_of(unread, 'message')} of the old life never read"
        return (
            f"{render_table(rows)}\n"
            f"{self.stream}: {_describe_entry(decision.sequence)}: {effect}\n"
            + _next_command(self.stream, decision.sequence, decision.topic)
        )


class AcceptedCheck(CommandResult):
    """Output that a check called bad was accepted, or would be."""

    stream: str
    requested_sequence: int
    decision: AcceptedFailures
    because: str
    dry_run: bool

    def to_json(self) -> JsonObject:
        """The accepted ranges, and the circuit after the decision."""
        ledger = self.decision.ledger
        accepted_ranges = [
            {"partition": failed.partition, "from": failed.start, "until": failed.until}
            for failed in self.decision.failures
        ]
        return {
            "stream": self.stream,
            "accepted": accepted_ranges,
            "because": self.because or None,
            "sequence": None if self.dry_run else ledger.sequence,
            "circuit": ledger.circuit,
            "checked": ledger.checked,
        }

    def render(self) -> str:
        """A line for each accepted range, and what follows."""
        stream = self.stream
        ledger = self.decision.ledger
        entry = _describe_entry(-1 if self.dry_run else ledger.sequence)
        lines = [
            f"{stream}: {entry}: right as it is: {describe_failed_range(failed)}"
            for failed in self.decision.failures
        ]
        if self.dry_run:
            lines.append(_next_command(stream, -1, f"--sequence {self.requested_sequence}"))
        else:
            lines.append(
                f"{stream}: the circuit is {ledger.circuit}, checked up to entry {ledger.checked}"
            )
        return "\n".join(lines)


class AcceptedLedger(CommandResult):
    """A ledger that was restored on purpose was accepted, or would be."""

    stream: str
    decision: RestoreDecision

    def to_json(self) -> JsonObject:
        """Where the witness and the ledger were, and what was written."""
        decision = self.decision
        return {
            "stream": self.stream,
            "witness": decision.witness_sequence,
            "ledger": sequence_or_none(decision.ledger_sequence),
            "because": decision.reason or None,
            "sequence": sequence_or_none(decision.sequence),
            "aside": decision.archived_witness_path or None,
        }

    def render(self) -> str:
        """What was contradictory, what was done about it, and what follows."""
        decision = self.decision
        sequence = decision.sequence
        if decision.ledger_sequence >= 0:
            effect = (
                f"{_describe_entry(sequence)}: the witness follows the ledger"
                f" from entry {decision.witness_sequence} to {decision.ledger_sequence}"
            )
            lost_entries = decision.witness_sequence - decision.ledger_sequence
            if lost_entries > 0:
                effect += f"; {count_of(lost_entries, 'entry')} given up"
        else:
            # Without any ledger no entry is written: the decision consists of moving the witness.
            witness_move = "would be moved aside"
            if decision.archived_witness_path:
                witness_move = f"moved to {decision.archived_witness_path}"
                sequence = 0
            effect = (
                f"the witness {witness_move}:"
                " the next run begins at the first offsets that Kafka has"
            )
        next_command = _next_command(self.stream, sequence, "--restored")
        return f"{decision.contradiction}\n{self.stream}: {effect}\n{next_command}"


class RetiredTopic(CommandResult):
    """A topic was retired, or would be."""

    stream: str
    decision: RetireDecision

    def to_json(self) -> JsonObject:
        """The decision, with one object for each partition."""
        return {
            "stream": self.stream,
            "topic": self.decision.topic,
            "because": self.decision.reason or None,
            "sequence": sequence_or_none(self.decision.sequence),
            "partitions": self._rows(),
        }

    def _rows(self) -> list[JsonObject]:
        return [
            {
                "partition": str(retired.partition),
                "topic_id": retired.topic_id,
                "frontier": retired.frontier,
                "unread": retired.unread_messages,
                "waits": retired.halt_finding or None,
            }
            for retired in self.decision.partitions
        ]

    def render(self) -> str:
        """A table of the partitions, and what stays unread."""
        rows = self._rows()
        partitions = count_of(len(rows), "partition")
        effect = f"{partitions} of {self.decision.topic} retired, state kept"
        unread = sum(row["unread"] for row in rows)
        if unread:
            effect += f"; {count_of(unread, 'message')} left unread"
        entry = _describe_entry(self.decision.sequence)
        return f"{render_table(rows)}\n{self.stream}: {entry}: {effect}"


def _describe_entry(sequence: int) -> str:
    return f"entry {sequence}" if sequence >= 0 else "nothing changed, this would be"


def _next_command(stream: str, sequence: int, accepted: str) -> str:
    """What to type next: a run, or after a dry run the decision itself."""
    if sequence >= 0:
        return f"next: seriatim run {stream}"
    return f'next: seriatim accept {stream} {accepted} --because "…"'
