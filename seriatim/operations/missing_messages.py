"""Missing messages: whether Kafka has the message that a session in quarantine waits for.

A sequence gap has one of two causes. Either the missing message was never sent: then folding the same
messages again cannot help, and only a snapshot or a person's decision does. Or it came later, because
two messages were swapped: then a refold that applies them in the order of their sequences makes the
session right. The messages tell which: those of the session are read from its gap on, up to the end
of the log, or as far as the limits allow.

Next: operations/watch.py and operations/repair/damage.py search; operations/status.py says what
follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import shell_quote, tier_action
from seriatim.engine.messages import MessageBatch, Poison, session_name_of_partition
from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.engine.session import Session, SessionsByName
from seriatim.ports import OpenStream

NEVER_CAME = "a message never came"
MESSAGES_MAX = 1_000_000
SECONDS_MAX = 60.0
"""How much is read for one stream, at most. What comes behind it is left to the next search."""


class MissingMessage(
    Struct,
    frozen=True,
    kw_only=True,
    rename={
        "is_end_reached": "complete",
        "arrived_offset": "arrived",
        "snapshot_offset": "snapshot",
    },
):
    """What Kafka has of the message that a session waits for."""

    sequence: int
    """The first sequence that the session lacks; of a swap, the last one that arrived."""
    searched_until: int
    """The session's messages were read up to this offset."""
    is_end_reached: bool
    """Whether that was the end of the log."""
    arrived_offset: int | None = None
    """The offset of the message with which all missing ones were there: they were swapped. None:
    not all of them came.
    """
    snapshot_offset: int | None = None
    """The offset of a snapshot of the session that no run has folded yet; None: there is none."""

    @property
    def is_swapped(self) -> bool:
        """Whether the missing message came later."""
        return self.arrived_offset is not None

    @property
    def never_came(self) -> bool:
        """Whether Kafka has neither the missing message nor a snapshot of the session."""
        return not self.is_swapped and self.snapshot_offset is None and self.is_end_reached

    def describe(self) -> str:
        """For people: where the missing message is, or how far it was looked for."""
        if self.is_swapped:
            return (
                f"sequence {self.sequence} came later, at offset {self.arrived_offset}:"
                " messages were swapped"
            )
        if self.snapshot_offset is not None:
            return f"a snapshot of the session waits at offset {self.snapshot_offset}"
        if self.never_came:
            return (
                f"sequence {self.sequence} is not in Kafka, up to the end of the log at offset"
                f" {self.searched_until}"
            )
        return (
            f"sequence {self.sequence} was not found yet, and not looked for further than offset"
            f" {self.searched_until}"
        )


def missing_message_advice(
    stream: str, snapshot_requests: str, partition: str, session: str, missing: MissingMessage
) -> str:
    """What a person does about a session that waits for a message. `snapshot_requests` is the topic
    on which runs ask producers for snapshots; empty: they do not.
    """
    if missing.is_swapped:
        return (
            f"{repair_session_command(stream, partition, session)}\n"
            "puts its messages into the order of their sequences, in one commit"
        )
    if missing.snapshot_offset is not None:
        return (
            f"seriatim run {stream}\n"
            "folds the snapshot, and the session is right again. So does the next run by schedule"
        )
    ask = "ask its producer for a snapshot of the session: that makes it right."
    if snapshot_requests:
        ask = f"wait for its snapshot: runs ask the producer for it, on topic {snapshot_requests}."
    return (
        f"{ask}\n"
        "If the session is right without the message:\n"
        f"{release_command(stream, partition, session)}"
    )


def repair_session_command(stream: str, partition: str, session: str) -> str:
    """The command that folds one session again."""
    return (
        f"seriatim repair {stream} --partition {partition} --session {shell_quote(session)} --apply"
    )


def release_command(stream: str, partition: str, session: str) -> str:
    """The command with which a person takes a session out of quarantine."""
    return (
        f"seriatim quarantine release {stream} {shell_quote(session)} --topic {partition}"
        ' --because "…"'
    )


class _SessionSearch(Struct, kw_only=True):
    """The search for one session: which sequence it lacks after the messages so far."""

    start: int
    """The offset from which on its messages count."""
    next_sequence: int
    early_sequences: set[int] = field(default_factory=set)
    """Sequences that came before their turn."""
    arrived_offset: int | None = None
    arrived_sequence: int = -1
    snapshot_offset: int | None = None
    is_over: bool = False
    over_offset: int = -1

    def add_message(self, offset: int, sequence: int | None, *, is_snapshot: bool) -> None:
        """Take the next message of the session."""
        if is_snapshot:
            self.snapshot_offset = offset
            self._end(offset)
        elif sequence is None or sequence < self.next_sequence or sequence in self.early_sequences:
            # A message that cannot be read or comes twice: more than a swap is wrong.
            self._end(offset)
        elif sequence > self.next_sequence:
            self.early_sequences.add(sequence)
        else:
            self.next_sequence += 1
            while self.next_sequence in self.early_sequences:
                self.early_sequences.remove(self.next_sequence)
                self.next_sequence += 1
            if not self.early_sequences:
                self.arrived_offset = offset
                self.arrived_sequence = sequence
                self._end(offset)

    def _end(self, offset: int) -> None:
        self.is_over = True
        self.over_offset = offset

    def result(self, searched_until: int, *, is_end_reached: bool) -> MissingMessage | None:
        """What came of the search; None if the session lacks nothing, by the machine of now."""
        if self.arrived_offset == self.start:
            return None
        missing = MissingMessage(
            sequence=self.next_sequence,
            searched_until=searched_until,
            is_end_reached=is_end_reached and not self.is_over,
            snapshot_offset=self.snapshot_offset,
        )
        if self.arrived_offset is not None:
            return replace(
                missing, sequence=self.arrived_sequence, arrived_offset=self.arrived_offset
            )
        if self.is_over:
            return replace(missing, searched_until=self.over_offset)
        return missing


class MissingMessageSearch:
    """The searches of one stream, which share their limits."""

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        messages_max: int = MESSAGES_MAX,
        seconds_max: float = SECONDS_MAX,
    ) -> None:
        self.open_stream = open_stream
        """Its machine and its reader are opened when the first session waits for a message."""
        self.stream = open_stream.stream
        self._messages_left = messages_max
        self._deadline_seconds = open_stream.clock.now_seconds() + seconds_max

    def waits_for_message(self, session: Session) -> bool:
        """Whether a session is in quarantine because of a sequence gap, and would be again."""
        is_gap = session.finding == "sequence gap" and session.sequence is not None
        return is_gap and tier_action("sequence gap", self.stream.tier) == "halt"

    def search(
        self,
        partition: Partition,
        sessions: SessionsByName,
        bounds: Bounds,
        earlier_results: Mapping[str, MissingMessage] | None = None,
    ) -> dict[str, MissingMessage]:
        """What Kafka has of the messages that sessions of one partition wait for, by session.

        `earlier_results` are the results of an earlier search. Only what came since is read for these, and
        the rest only if the missing message is among it.

        Sessions that wait for no message, or lack none by the machine of now, are left out.
        """
        results: dict[str, MissingMessage] = {}
        searches: dict[str, _SessionSearch] = {}
        for name, session in sessions.items():
            # Without the message at the gap, nothing can be said about those after it.
            is_readable = bounds.log_start <= session.finding_offset < bounds.log_end
            if not self.waits_for_message(session) or not is_readable:
                continue
            earlier = (earlier_results or {}).get(name)
            if earlier is None or earlier.searched_until <= session.finding_offset:
                searches[name] = _new_search(session)
            else:
                results[name] = earlier
        for name in self._search_on(partition, results, bounds.log_end):
            searches[name] = _new_search(sessions[name])
        searched_until = self._read(partition, searches, bounds.log_end)
        is_end_reached = searched_until >= bounds.log_end
        for name, search in searches.items():
            results.pop(name, None)
            result = search.result(searched_until, is_end_reached=is_end_reached)
            if result is not None:
                results[name] = result
        return results

    def _search_on(
        self, partition: Partition, results: dict[str, MissingMessage], log_end: int
    ) -> list[str]:
        """Look at what came since earlier searches, and bring their results up to date. The
        sessions whose missing message or snapshot has come since.
        """
        searches = {
            name: _SessionSearch(start=earlier.searched_until, next_sequence=earlier.sequence)
            for name, earlier in results.items()
            if not earlier.is_swapped and earlier.snapshot_offset is None
        }
        searched_until = self._read(partition, searches, log_end)
        arrived = []
        for name, search in searches.items():
            earlier = results[name]
            if search.next_sequence > earlier.sequence or search.snapshot_offset is not None:
                arrived.append(name)
            elif not search.is_over and searched_until > earlier.searched_until:
                results[name] = replace(
                    earlier,
                    searched_until=searched_until,
                    is_end_reached=searched_until >= log_end,
                )
        return arrived

    def _read(
        self, partition: Partition, searches: Mapping[str, _SessionSearch], log_end: int
    ) -> int:
        """Read the messages of these sessions, until all searches are over or a limit is reached.
        The offset up to which they were read.
        """
        offset = min((search.start for search in searches.values()), default=log_end)
        if offset >= log_end:
            return log_end
        end = min(log_end, offset + self._messages_left)
        for batch in self.open_stream.past_reader.read(partition, OffsetRange(offset, end)):
            self._add_batch(partition, batch, searches)
            offset = batch.start + len(batch)
            self._messages_left -= len(batch)
            is_late = self.open_stream.clock.now_seconds() >= self._deadline_seconds
            if is_late or all(search.is_over for search in searches.values()):
                return offset
        # Transaction markers at the end of a log are no messages.
        return end

    def _add_batch(
        self, partition: Partition, batch: MessageBatch, searches: Mapping[str, _SessionSearch]
    ) -> None:
        runner = self.open_stream.runner
        by_key = self.stream.session_field is None and not runner.has_session_per_partition
        positions = list(range(len(batch)))
        names: list[str | None] = []
        if by_key:
            names = batch.session_names()
            # Decoding is the expensive part: it is done only for sessions that are searched for.
            positions = [i for i in positions if names[i] in searches]
        messages = runner.decode([batch.values[i] for i in positions])
        sequences = runner.sequences(messages)
        for i, message, sequence in zip(positions, messages, sequences, strict=True):
            name = names[i] if by_key else self._session_name(partition, message)
            search = searches.get(name or "")
            offset = batch.start + i
            if search is None or search.is_over or offset < search.start:
                continue
            is_poison = message.__class__ is Poison
            is_snapshot = not is_poison and runner.has_snapshots and runner.is_snapshot(message)
            search.add_message(offset, None if is_poison else sequence, is_snapshot=is_snapshot)

    def _session_name(self, partition: Partition, message: Any) -> str | None:
        runner = self.open_stream.runner
        if runner.has_session_per_partition:
            return session_name_of_partition(partition)
        return None if message.__class__ is Poison else runner.session(message)


def _new_search(session: Session) -> _SessionSearch:
    """A search from the message with which the gap was found."""
    return _SessionSearch(start=session.finding_offset, next_sequence=(session.sequence or 0) + 1)
