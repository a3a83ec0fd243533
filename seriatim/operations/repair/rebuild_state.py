"""Rebuild state from records: state files are damaged, and Kafka no longer has the messages that
made them. Part of `repair --forward`.

No output is lost: all records up to the frontier are there, and they stay. What is not known is the
state that goes with them, for every session that is in no newer state file than the damaged ones.
So

- Sessions of newer files stay as they are.
- The table machine: the records of a session give its rows, and the last record has its sequence.
  So the next message can prove that nothing came between, and the next snapshot finds the rows that
  it takes back.
- A machine of the user: the session becomes what an older file has, if a sequence can prove it.
  Otherwise it has no state.
- A session that was in quarantine, or had a gap, still has it: the gaps say so.

All sessions but those of newer files are in doubt from the frontier on. They go on by proof, or
with their next snapshot.

Next: engine/rules.py has the proof; operations/repair/refold.py commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File, Files, StateStore
from seriatim.engine.findings import GapMark, Tier
from seriatim.engine.offsets import Partition
from seriatim.engine.records import SessionTable
from seriatim.engine.rules import is_in_doubt, tier_doubts_after_loss
from seriatim.engine.session import Session, SessionsByName
from seriatim.ledger.gaps import Gap
from seriatim.ledger.model import Account, Change
from seriatim.operations.prove.partition_rules import StateRowReader
from seriatim.operations.repair.forward import CLOSED_BY_FORWARD
from seriatim.ports import Joiner


class StateToRebuild(Struct, frozen=True, kw_only=True):
    """A piece of work: one partition whose state is lost."""

    partition: Partition
    account: Account
    records: Files
    """All its records up to the frontier."""
    open_gaps: tuple[Gap, ...] = ()
    """The gaps of its sessions that nothing has closed yet."""
    stem: str
    """The name of the new state files, without their suffix."""

    def __str__(self) -> str:
        return str(self.partition)


class RebuiltState(Struct, frozen=True, kw_only=True):
    """The answer to a `StateToRebuild`."""

    state_files: Files = ()
    intact_sessions: int = 0
    """Sessions that were in newer files than the damaged ones."""
    quarantined: int = 0


def open_gaps_of(partition: Partition, topic_id: str, gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """The open gaps of the sessions of one partition."""
    open_gaps = []
    for gap in gaps:
        is_open = gap.session is not None and gap.closed is None
        if is_open and gap.topic_partition == partition and gap.topic_id == topic_id:
            open_gaps.append(gap)
    return tuple(open_gaps)


def change_with_rebuilt_state(
    before: Change, account: Account, rebuilt: RebuiltState, reason: str
) -> Change:
    """The change `before`, with the rebuilt state and a gap of all sessions."""
    mark = GapMark(
        finding="expired",
        offset=account.frontier,
        until=account.frontier,
        cause=f"state was lost, and Kafka has not what made it: {reason}."
        f" {rebuilt.intact_sessions} sessions are as they were",
        closed_by=CLOSED_BY_FORWARD,
    )
    return replace(
        before,
        state=rebuilt.state_files,
        marks=(*before.marks, mark),
        headless_since=account.frontier,
        quarantined=rebuilt.quarantined,
    )


class StateRebuilder(Struct, frozen=True):
    """Rebuilds the state of one partition after the other. It can be sent to other processes; whoever
    rebuilds the same state a second time writes the same bytes.

    1. Rebuild the sessions of damaged files.
    2. Take the sessions of newer files as they are.
    3. Save all of them.
    """

    joiner: Joiner
    state: StateStore
    tier: Tier
    row_reader: StateRowReader | None = None
    """Of the table machine; None: the machine is the user's."""

    def __call__(self, work: StateToRebuild) -> RebuiltState:
        """The new state files."""
        newer_files, older_files = self._intact_state_files(work.account.state)
        # 1. Sessions that are lost.
        sessions = self._rebuild_sessions(work, older_files)
        for gap in work.open_gaps:
            _apply_gap(sessions, gap)
        # 2. Sessions that are not lost. They win over what was rebuilt.
        intact_sessions: SessionsByName = {}
        for name, session in self._intact_sessions(newer_files):
            intact_sessions[name] = _session_of_intact_file(session, work.account)
        sessions |= intact_sessions
        # 3. The state files.
        state_files: Files = ()
        if sessions:
            state_files = self.state.save(work.partition, work.stem, sessions, ())
        return RebuiltState(
            state_files=state_files,
            intact_sessions=len(intact_sessions),
            quarantined=sum(session.finding is not None for session in sessions.values()),
        )

    def _intact_state_files(self, files: Sequence[File]) -> tuple[list[File], list[File]]:
        """The state files that are newer than all damaged ones, and the intact ones among the older
        files.
        """
        damaged = self.joiner.find_damaged_files(files)
        damaged_indexes = [i for i, file in enumerate(files) if file.path in damaged]
        newest_damaged = max(damaged_indexes)
        newer_files = list(files[newest_damaged + 1 :])
        older_files = [file for file in files[:newest_damaged] if file.path not in damaged]
        return newer_files, older_files

    def _intact_sessions(self, newer_files: Sequence[File]) -> Iterator[tuple[str, Session]]:
        """The sessions of intact files. One that is stored row by row is lost if some of its rows are in
        older files.
        """
        for name, head in self.state.all_sessions(newer_files, with_rows=False):
            if head.stored_rows is None:
                yield name, head
            elif head.stored_rows.source.is_complete:
                yield name, self.state.load(newer_files, [name])[name]

    def _rebuild_sessions(self, work: StateToRebuild, older: Sequence[File]) -> SessionsByName:
        """The sessions whose newest state is lost, as far as they are known."""
        row_reader = self.row_reader
        if row_reader is not None:
            tables = self.joiner.session_tables(
                work.partition, work.account.topic_id, work.records, row_reader.row_key_spec
            )
            return {
                table.session: self._session_from_records(row_reader, table) for table in tables
            }
        if not tier_doubts_after_loss(self.tier):
            return {}  # No sequence could prove that an older state is still the right one.
        sessions: SessionsByName = {}
        for name, session in self.state.all_sessions(older):
            sessions[name] = session.without_finding()
        return sessions

    def _session_from_records(self, row_reader: StateRowReader, table: SessionTable) -> Session:
        """A session of the table machine, as its records show it."""
        rows = dict(enumerate(table.rows))
        sequence = None
        if tier_doubts_after_loss(self.tier):
            sequence = table.sequence
        return Session(
            state_bytes=row_reader.runner.dump(rows),
            state_version=row_reader.runner.state_version,
            sequence=sequence,
            first_offset=table.offset,
            last_offset=table.offset,
            timestamp=table.timestamp,
        )


def _session_of_intact_file(session: Session, account: Account) -> Session:
    """A session of an intact file: it goes on as it was, and in doubt only if it was in doubt."""
    if is_in_doubt(session, account.headless_since):
        return session
    # A session is in doubt if its snapshot is before `headless_since`, which becomes the frontier
    # now.
    return replace(session, snapshot_offset=account.frontier)


def _apply_gap(sessions: SessionsByName, gap: Gap) -> None:
    """Put an open gap back into its session: its next snapshot, or a person, ends it."""
    if gap.session is None:
        return
    session = sessions.get(gap.session) or Session()
    if session.damaged_since_offset < 0:
        session.damaged_since_offset = gap.start
    else:
        session.damaged_since_offset = min(session.damaged_since_offset, gap.start)
    if gap.quarantined:
        session.finding = gap.finding
        session.finding_offset = gap.start
    sessions[gap.session] = session
