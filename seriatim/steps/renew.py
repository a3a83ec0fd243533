"""Renew: state that is damaged, and that Kafka cannot give back, made of what there is. Part of `repair --forward`.

Of the output nothing is lost: all records up to the frontier are there, and stay. What is not known is the state that
goes with them, of every session that is in no newer state file than the damaged one. So

- sessions of newer files stay as they are;
- the rows of the stock machine are what its records make, and the last one has the sequence: folding the records gives
  the state, the next message may prove that nothing came between, and the next snapshot finds the rows it takes back;
- a machine of one's own gets the session as an older file has it, where a sequence can prove it, else none;
- whoever was in quarantine, or had a gap, has it still: the gaps say so.

All but the first are in doubt from the frontier on, and go on by proof or with their next snapshot.

Next room: core/doubt.py has the proof; steps/repair.py commits it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core.current import Tabled
from seriatim.core.doubt import doubts, is_in_doubt
from seriatim.core.gaps import Gap
from seriatim.core.integrity import Mark
from seriatim.core.ledger import Account, Change, File
from seriatim.core.machine import Runner
from seriatim.core.offsets import Partition
from seriatim.core.repair_forward import CLOSED
from seriatim.core.session import Session
from seriatim.core.stream import Stream
from seriatim.steps.fold import World
from seriatim.steps.task import stem_prefix


class Renewing(Struct, frozen=True):
    """One partition's state, made of what there is."""

    stream: Stream
    runner: Runner
    world: World
    partition: Partition
    account: Account

    def change(self, before: Change, records: Sequence[File], gaps: Iterable[Gap], hold: str, why: str) -> Change:
        """On top of a change that moves nothing: the state files afterwards, and the gap for all sessions."""
        account, store = self.account, self.world.state()
        newer, older = self._whole()
        sessions = self._made(records, older)
        for gap in gaps:
            self._mark(sessions, gap)
        exact = {name: self._sure(one) for name, one in store.each(newer)}
        everyone = sessions | exact
        stem = f"{stem_prefix(account.epoch, account.frontier)}{hold}n"
        files = (store.save(self.partition, stem, everyone, ()),) if everyone else ()
        cause = f"state was lost, and Kafka has not what made it: {why}. {len(exact)} sessions are as they were"
        at = account.frontier
        return replace(
            before,
            state=files,
            marks=(*before.marks, Mark(finding="expired", offset=at, until=at, cause=cause, closed=CLOSED)),
            headless_since=at,
            quarantined=sum(one.finding is not None for one in everyone.values()),
        )

    def _sure(self, one: Session) -> Session:
        """A session of a whole file goes on as it was, in doubt if it was in doubt."""
        doubted = is_in_doubt(one, self.account.headless_since)
        return one if doubted else replace(one, snapshot_offset=self.account.frontier)

    def _whole(self) -> tuple[list[File], list[File]]:
        """State files that are newer than all damaged ones, and those older than that which are whole."""
        files, damaged = list(self.account.state), self.world.joiner.damaged(self.account.state)
        last = max(number for number, file in enumerate(files) if file.path in damaged)
        return files[last + 1 :], [file for file in files[:last] if file.path not in damaged]

    def _made(self, records: Sequence[File], older: Sequence[File]) -> dict[str, Session]:
        """Sessions whose newest state is lost, as far as they are known."""
        keyed = self.runner.keyed if self.stream.machine == "table" else None
        if keyed is not None:
            made = self.world.joiner.tables(self.partition, self.account.topic_id, records, keyed)
            return {one.session: self._session(one) for one in made}
        kept = self.world.state().each(older) if doubts(self.stream.tier) else ()
        return {name: replace(one, finding=None, finding_offset=-1, damaged=-1) for name, one in kept}

    def _session(self, one: Tabled) -> Session:
        """A session of the stock machine, by its records."""
        rows = dict(enumerate(one.rows))
        return Session(
            saved=self.runner.dump(rows),
            version=self.runner.state_version,
            sequence=one.sequence if doubts(self.stream.tier) else None,
            first_offset=one.offset,
            last_offset=one.offset,
            timestamp=one.timestamp,
        )

    def _mark(self, sessions: dict[str, Session], gap: Gap) -> None:
        """What was wrong with a session still is: its next snapshot, or a person, ends it."""
        mine = (gap.place, gap.topic_id) == (self.partition, self.account.topic_id)
        if gap.session is None or gap.closed is not None or not mine:
            return
        known = sessions.get(gap.session) or Session()
        known.damaged = gap.start if known.damaged < 0 else min(known.damaged, gap.start)
        if gap.quarantined:
            known.finding, known.finding_offset = gap.finding, gap.start
        sessions[gap.session] = known
