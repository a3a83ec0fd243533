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

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File, Files
from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import Partition
from seriatim.engine.records import SessionTable
from seriatim.engine.rules import is_in_doubt, tier_doubts_after_loss
from seriatim.engine.session import Session, SessionsByName
from seriatim.engine.task import stem_prefix
from seriatim.ledger.gaps import Gap
from seriatim.ledger.model import Account, Change
from seriatim.operations.repair.forward import CLOSED_BY_FORWARD
from seriatim.ports import OpenStream


class StateRebuild(Struct, frozen=True):
    """Rebuilds the state of one partition."""

    open_stream: OpenStream
    partition: Partition
    account: Account

    def build_change(
        self, before: Change, records: Sequence[File], gaps: Iterable[Gap], hold: str, reason: str
    ) -> Change:
        """The change `before`, with the rebuilt state and a gap of all sessions.

        1. Rebuild the sessions of damaged files.
        2. Take the sessions of newer files as they are.
        3. Save all of them as one state file.
        """
        account = self.account
        state = self.open_stream.open_state()
        newer_files, older_files = self._intact_state_files()
        # 1. Sessions that are lost.
        sessions = self._rebuild_sessions(records, older_files)
        for gap in gaps:
            self._apply_gap(sessions, gap)
        # 2. Sessions that are not lost. They win over what was rebuilt.
        intact_sessions: SessionsByName = {}
        for name, session in state.all_sessions(newer_files):
            intact_sessions[name] = self._session_of_intact_file(session)
        sessions |= intact_sessions
        # 3. The state file.
        state_files: Files = ()
        if sessions:
            stem = f"{stem_prefix(account.epoch, account.frontier)}{hold}n"
            state_files = state.save(self.partition, stem, sessions, ())
        mark = GapMark(
            finding="expired",
            offset=account.frontier,
            until=account.frontier,
            cause=f"state was lost, and Kafka has not what made it: {reason}."
            f" {len(intact_sessions)} sessions are as they were",
            closed_by=CLOSED_BY_FORWARD,
        )
        return replace(
            before,
            state=state_files,
            marks=(*before.marks, mark),
            headless_since=account.frontier,
            quarantined=sum(session.finding is not None for session in sessions.values()),
        )

    def _session_of_intact_file(self, session: Session) -> Session:
        """A session of an intact file: it goes on as it was, and in doubt only if it was in doubt."""
        if is_in_doubt(session, self.account.headless_since):
            return session
        # A session is in doubt if its snapshot is before `headless_since`, which becomes the
        # frontier now.
        return replace(session, snapshot_offset=self.account.frontier)

    def _intact_state_files(self) -> tuple[list[File], list[File]]:
        """The state files that are newer than all damaged ones, and the intact ones among the older
        files.
        """
        files = list(self.account.state)
        damaged = self.open_stream.joiner.find_damaged_files(files)
        damaged_indexes = [i for i, file in enumerate(files) if file.path in damaged]
        newest_damaged = max(damaged_indexes)
        newer_files = files[newest_damaged + 1 :]
        older_files = [file for file in files[:newest_damaged] if file.path not in damaged]
        return newer_files, older_files

    def _rebuild_sessions(self, records: Sequence[File], older: Sequence[File]) -> SessionsByName:
        """The sessions whose newest state is lost, as far as they are known."""
        row_key_spec = None
        if self.open_stream.stream.machine == "table":
            row_key_spec = self.open_stream.runner.row_key_spec
        if row_key_spec is not None:
            tables = self.open_stream.joiner.session_tables(
                self.partition, self.account.topic_id, records, row_key_spec
            )
            return {table.session: self._session_from_records(table) for table in tables}
        if not tier_doubts_after_loss(self.open_stream.stream.tier):
            return {}  # No sequence could prove that an older state is still the right one.
        sessions: SessionsByName = {}
        for name, session in self.open_stream.open_state().all_sessions(older):
            sessions[name] = session.without_finding()
        return sessions

    def _session_from_records(self, table: SessionTable) -> Session:
        """A session of the table machine, as its records show it."""
        rows = dict(enumerate(table.rows))
        sequence = None
        if tier_doubts_after_loss(self.open_stream.stream.tier):
            sequence = table.sequence
        return Session(
            state_bytes=self.open_stream.runner.dump(rows),
            state_version=self.open_stream.runner.state_version,
            sequence=sequence,
            first_offset=table.offset,
            last_offset=table.offset,
            timestamp=table.timestamp,
        )

    def _apply_gap(self, sessions: SessionsByName, gap: Gap) -> None:
        """Put an open gap back into its session: its next snapshot, or a person, ends it."""
        if gap.session is None or gap.closed is not None:
            return
        if gap.topic_partition != self.partition or gap.topic_id != self.account.topic_id:
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
