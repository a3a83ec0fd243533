"""Renew: state that is damaged, and that Kafka cannot give back, made of what there is. Part of
`repair --forward`.

Of the output nothing is lost: all records up to the frontier are there, and stay. What is not known
is the state that goes with them, of every session that is in no newer state file than the damaged
one. So

- sessions of newer files stay as they are;
- the rows of the stock machine are what its records make, and the last one has the sequence: folding the records gives
  the state, the next message may prove that nothing came between, and the next snapshot finds the rows it takes back;
- a machine of one's own gets the session as an older file has it, where a sequence can prove it, else none;
- whoever was in quarantine, or had a gap, has it still: the gaps say so.

All but the first are in doubt from the frontier on, and go on by proof or with their next snapshot.

Next room: engine/after_loss.py has the proof; operations/repair/repair.py commits it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.after_loss import is_in_doubt, tier_doubts_after_loss
from seriatim.engine.findings import GapMark
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.engine.task import stem_prefix
from seriatim.ledger.gaps import Gap
from seriatim.ledger.model import Account, Change, File
from seriatim.operations.repair.forward import CLOSED_BY_FORWARD
from seriatim.operations.run import FoldContext
from seriatim.storage.current_rows import SessionTable
from seriatim.stream import Stream


class StateRebuild(Struct, frozen=True):
    """One partition's state, made of what there is."""

    stream: Stream
    runner: Runner
    context: FoldContext
    partition: Partition
    account: Account

    def build_change(
        self, before: Change, records: Sequence[File], gaps: Iterable[Gap], hold: str, reason: str
    ) -> Change:
        """On top of a change that moves nothing: the state files afterwards, and the gap for all
        sessions.
        """
        account, store = self.account, self.context.open_state()
        newer, older = self._intact_state_files()
        sessions = self._rebuild_sessions(records, older)
        for gap in gaps:
            self._apply_gap(sessions, gap)
        exact = {name: self._session_of_intact_file(one) for name, one in store.all_sessions(newer)}
        everyone = sessions | exact
        stem = f"{stem_prefix(account.epoch, account.frontier)}{hold}n"
        files = (store.save(self.partition, stem, everyone, ()),) if everyone else ()
        cause = f"state was lost, and Kafka has not what made it: {reason}. {len(exact)} sessions are as they were"
        at = account.frontier
        return replace(
            before,
            state=files,
            marks=(
                *before.marks,
                GapMark(
                    finding="expired", offset=at, until=at, cause=cause, closed_by=CLOSED_BY_FORWARD
                ),
            ),
            headless_since=at,
            quarantined=sum(one.finding is not None for one in everyone.values()),
        )

    def _session_of_intact_file(self, session: Session) -> Session:
        """A session of a whole file goes on as it was, in doubt if it was in doubt."""
        doubted = is_in_doubt(session, self.account.headless_since)
        return session if doubted else replace(session, snapshot_offset=self.account.frontier)

    def _intact_state_files(self) -> tuple[list[File], list[File]]:
        """State files that are newer than all damaged ones, and those older than that which are
        whole.
        """
        files, damaged = (
            list(self.account.state),
            self.context.joiner.find_damaged_files(self.account.state),
        )
        last = max(number for number, file in enumerate(files) if file.path in damaged)
        return files[last + 1 :], [file for file in files[:last] if file.path not in damaged]

    def _rebuild_sessions(
        self, records: Sequence[File], older: Sequence[File]
    ) -> dict[str, Session]:
        """Sessions whose newest state is lost, as far as they are known."""
        keyed = self.runner.row_key_spec if self.stream.machine == "table" else None
        if keyed is not None:
            made = self.context.joiner.session_tables(
                self.partition, self.account.topic_id, records, keyed
            )
            return {one.session: self._session_from_records(one) for one in made}
        kept = (
            self.context.open_state().all_sessions(older)
            if tier_doubts_after_loss(self.stream.tier)
            else ()
        )
        return {
            name: replace(one, finding=None, finding_offset=-1, damaged_since_offset=-1)
            for name, one in kept
        }

    def _session_from_records(self, table: SessionTable) -> Session:
        """A session of the stock machine, by its records."""
        rows = dict(enumerate(table.rows))
        return Session(
            state_bytes=self.runner.dump(rows),
            state_version=self.runner.state_version,
            sequence=table.sequence if tier_doubts_after_loss(self.stream.tier) else None,
            first_offset=table.offset,
            last_offset=table.offset,
            timestamp=table.timestamp,
        )

    def _apply_gap(self, sessions: dict[str, Session], gap: Gap) -> None:
        """What was wrong with a session still is: its next snapshot, or a person, ends it."""
        mine = (gap.topic_partition, gap.topic_id) == (self.partition, self.account.topic_id)
        if gap.session is None or gap.closed is not None or not mine:
            return
        known = sessions.get(gap.session) or Session()
        known.damaged_since_offset = (
            gap.start
            if known.damaged_since_offset < 0
            else min(known.damaged_since_offset, gap.start)
        )
        if gap.quarantined:
            known.finding, known.finding_offset = gap.finding, gap.start
        sessions[gap.session] = known
