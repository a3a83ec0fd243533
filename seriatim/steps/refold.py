"""Refold: ranges rewound and folded again into one commit. What repair and backfill have in common.

1. read the ledger and its history; choose for each partition where to begin            nothing
2. hold: the partitions are reserved, so that slices of others go on and theirs wait    a hold
3. stage by stage, in tasks: fold what the scope says, compare with what is committed   orphans
4. put record files together: what was made, and what stays of files that leave         orphans
5. commit: records, state and frontier replaced at once, epochs raised, hold released   done
6. sweep; the tables gaps and quarantine                                                they catch up next time

The last column is what a crash after the step leaves. Whoever goes on writes a hold of their own in place of the
dead one's and begins with 3: nothing that was not committed counts.

Next room: core/refold.py has the rules; steps/repair.py and steps/backfill.py say what is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.core.code import refuse_code
from seriatim.core.crash import crash_point
from seriatim.core.errors import IntegrityError, PlatformError, broken, ensure
from seriatim.core.gaps import Gap
from seriatim.core.history import Past
from seriatim.core.integrity import Finding, Mark
from seriatim.core.ledger import Account, Change, Entry, File
from seriatim.core.machine import Runner
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.refold import Progress, Rewind, Stage, mended, same, stages
from seriatim.core.session import Session
from seriatim.core.state import merge_count
from seriatim.core.stream import Stream
from seriatim.ports import Head, SourceFailed, Wish
from seriatim.steps.changes import nothing_came
from seriatim.steps.commit import commit
from seriatim.steps.derive import gaps_now, keep_up
from seriatim.steps.fold import World
from seriatim.steps.joining import Joining, changed
from seriatim.steps.moved import Moved, moved
from seriatim.steps.release import free, is_released
from seriatim.steps.sweep import sweep_dead
from seriatim.steps.task import Result, Work, stem_prefix
from seriatim.steps.tries import Results, Works, fold_works

Told = Callable[[int, int], None]


class Refolded(Struct, kw_only=True):
    """What a refold did."""

    sequence: int = -1
    hold: str = ""
    messages: int = 0
    """Read and folded again."""
    records: int = 0
    """Made again."""
    removed: int = 0
    """Record files that left the table."""
    ranges: dict[Partition, OffsetRange] = field(default_factory=dict)
    """What was made again, widened to where the last session was as committed."""
    findings: list[Finding] = field(default_factory=list)
    """New: what the first fold did not find."""
    still: list[Finding] = field(default_factory=list)
    """What the first fold found as well."""
    behind: str = ""


class Making(Struct, kw_only=True):
    """One partition while it is folded again."""

    progress: Progress
    stages: Iterator[Stage]
    past: Past
    time: int
    stage: Stage | None = None
    records: list[File] = field(default_factory=list)
    others: dict[str, list[File]] = field(default_factory=dict)
    kept: list[File] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    counted: int = 0
    """Messages since the last border."""
    counted_from: int = 0

    def next_stage(self) -> bool:
        """Go on to the next stage. Whether there is one."""
        self.stage = None if self.progress.is_over else next(self.stages, None)
        return self.stage is not None


class Refolding:
    """One refold, of one stream."""

    def __init__(
        self, stream: Stream, runner: Runner, world: World, *, run: str = "", progress: Told | None = None
    ) -> None:
        self.stream, self.runner, self.world, self.run_id = stream, runner, world, run
        self.told = progress or (lambda _done, _total: None)
        self.done = Refolded()
        self.unchanged = False
        """Whether what is made again must be what is there."""

    def hold(self, head: Head, partitions: Iterable[Partition], request: str, resumes: str | None = None) -> Head:
        """Step 2: reserve partitions, or take over the hold of a refold that died."""
        runner = self.runner
        refuse_code(head.ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape)
        hold = self.world.new_attempt()
        entry = Entry(
            kind="hold",
            attempt=hold,
            run=self.run_id,
            product=__version__,
            held=hold,
            resumes=resumes,
            request=request,
            changes=tuple(_unmoved(partition, head.ledger.partitions[str(partition)]) for partition in partitions),
        )
        self.done.hold = hold
        head = commit(self.world.ledger, self.world.clock, head, entry)[0]
        crash_point("held")
        return head

    def release(self) -> None:
        """Give the hold back, where it is still ours: nothing was changed."""
        head = self.world.ledger.head(self.stream.name) or broken("the ledger vanished")
        release(self.world, head, self.done.hold, run=self.run_id)

    def apply(
        self, head: Head, rewinds: Sequence[Rewind], pasts: dict[Partition, Past], messages_max: int
    ) -> Iterator[tuple[Change, list[str]]]:
        """Steps 3 and 4: changes, and the record files that leave the table."""
        makings = {
            rewind.partition: Making(
                progress=Progress.begin(rewind),
                stages=stages(rewind, max(1, messages_max // len(rewinds))),
                past=pasts[rewind.partition],
                time=rewind.base.time,
                counted_from=rewind.base.frontier,
            )
            for rewind in rewinds
        }
        for making in makings.values():
            self._release_reached(making.progress)
        total, number = sum(len(rewind.reads) for rewind in rewinds), 0
        while active := {p: making for p, making in makings.items() if making.next_stage()}:
            self._stage(head, active, number)
            number += 1
            self.told(self.done.messages, max(total, self.done.messages))
            crash_point("stage-folded")
        gaps = gaps_now(self.world.ledger, self.world.derived, head.ledger)
        files = self.world.ledger.active_files(head)
        for making in makings.values():
            yield self._change(making, gaps, files)
        crash_point("refolded")

    def commit(self, head: Head, changes: Sequence[Change], removed: Sequence[str], why: str) -> Refolded:
        """Steps 5 and 6."""
        runner = self.runner
        entry = Entry(
            kind="repair",
            attempt=self.done.hold,
            held=self.done.hold,
            run=self.run_id,
            product=__version__,
            machine=runner.name,
            shape=runner.shape,
            state_version=runner.state_version,
            changes=tuple(changes),
            removed=tuple(sorted(removed)),
            findings=tuple(self.done.findings),
            reason=why,
        )
        head, done = commit(self.world.ledger, self.world.clock, head, entry)
        self.done.sequence = done.sequence
        sweep_dead(self.world.ledger, self.world.records, head)
        crash_point("swept")
        self.done.behind = keep_up(self.world.ledger, self.world.derived, head.ledger)
        return self.done

    def _stage(self, head: Head, makings: dict[Partition, Making], number: int) -> None:
        """One stage of each partition that is not over, in one reading."""
        works = {partition: self._work(making, number) for partition, making in makings.items()}
        ranges = {partition: OffsetRange(work.start, work.end) for partition, work in works.items()}
        source = self.world.reader.exactly(ranges, Wish(headers=True))

        def siblings(works: Works, results: Results) -> Moved:
            state, has_snapshots = self.world.state(), self.runner.has_snapshots
            told = {p: self._moved_then(makings[p].past, result) for p, result in results.items()}
            return moved(head.ledger, works, told, state, has_snapshots=has_snapshots)

        world = self.world
        try:
            results = fold_works(self.stream.name, works, source, world.reader, world.task, siblings)
        except SourceFailed as failure:
            raise PlatformError(
                f"{self.stream.name}: reading from Kafka broke",
                cause=str(failure)[:600],
                next="check the broker and Spark, then give the same command again; nothing was changed",
            ) from failure
        for partition, making in makings.items():
            rewind, whole = making.progress.rewind, ranges[partition]
            result = results.get(partition) or nothing_came(
                partition, rewind.account, whole, world.explain, self.stream.tier
            )
            self._take(making, result)

    def _moved_then(self, past: Past, result: Result) -> Result:
        """Who lives elsewhere by now may have been at home then: only whom the first fold found counts as moved."""
        known = {session for finding, _, session in past.told if finding == "moved session"}
        return replace(result, strangers={name: at for name, at in result.strangers.items() if name in known})

    def _work(self, making: Making, number: int) -> Work:
        progress, stage = making.progress, making.stage or broken("a work has a stage")
        account = progress.rewind.account
        return Work(
            partition=progress.rewind.partition,
            start=stage.whole.start,
            end=stage.whole.end,
            epoch=account.epoch,
            topic_id=account.topic_id,
            state=progress.state,
            attempt=f"{self.done.hold}s{number}",
            time=making.time,
            headless_since=progress.rewind.headless_since(stage.whole.start),
            scope=progress.scope(),
            named=account.frontier,
        )

    def _take(self, making: Making, result: Result) -> None:
        """A stage's result: files, who ended, and at a border who is as committed."""
        progress, stage = making.progress, making.stage or broken("a result has a stage")
        certificate = result.certificate or broken("a result without a certificate")
        if result.halt is not None:
            raise _stopped(self.stream.name, result.halt)
        ensure(certificate.until == stage.whole.end, "a stage accounts for its range", offset=certificate.until)
        making.time = max(making.time, certificate.time)
        making.counted += certificate.counts.messages
        self._refuse_fewer(making, stage.whole.end)
        progress.state = progress.state if result.state is None else result.state
        progress.take(stage, result.met)
        making.records += result.records
        for table, files in result.others.items():
            making.others.setdefault(table, []).extend(files)
        making.kept += result.kept
        making.marks += result.marks
        self._tell(making.past, result.findings)
        self.done.records += certificate.counts.records
        self.done.messages += certificate.counts.messages
        self._release_reached(progress)
        if stage.border:
            self._settle(making)

    def _tell(self, past: Past, findings: Iterable[Finding]) -> None:
        """Findings are told once: those of the first fold that come again are only said to be still so."""
        for finding in findings:
            known = (finding.finding, finding.offset, finding.session) in past.told
            (self.done.still if known else self.done.findings).append(finding)

    def _settle(self, making: Making) -> None:
        """Who is as committed at this border is left alone from here on."""
        progress = making.progress
        committed = next((point.account for point in making.past.borders(progress.at, progress.at)), None)
        if committed is None or self.world.joiner.damaged(committed.state):
            return
        names, state = progress.doubtful(), self.world.state()
        was, now = state.load(committed.state, names), state.load(progress.state, names)
        alike = [name for name in names if same(was.get(name), now.get(name), self.runner)]
        if self.unchanged and len(alike) < len(names):
            other = sorted(set(names) - set(alike))
            what = f"another state of {len(other)} sessions by offset {progress.at}: {', '.join(other[:5])}"
            raise changed(self.stream.name, progress.rewind.partition, what)
        progress.settle(alike)

    def _release_reached(self, progress: Progress) -> None:
        """Whom a person released where the refold is now. At its very beginning that is in the saved state."""
        for at in progress.rewind.reached(progress.at):
            if at > progress.rewind.start and (names := progress.rewind.released.get(at)):
                self._release_again(progress, names, at)

    def _release_again(self, progress: Progress, names: Iterable[str], at: int) -> None:
        """A person released these here: what they said holds for the refold, too."""
        rewind, state = progress.rewind, self.world.state()
        account = replace(rewind.account, headless_since=rewind.headless_since(at))
        found = {name: one for name, one in state.load(progress.state, names).items() if is_released(one, account)}
        if found:
            freed = {name: free(one, account, self.stream.tier) for name, one in found.items()}
            stem = f"{stem_prefix(rewind.account.epoch, rewind.account.frontier)}{self.done.hold}f{at}"
            progress.state = (*progress.state, state.save(rewind.partition, stem, freed, ()))

    def _refuse_fewer(self, making: Making, at: int) -> None:
        """Kafka must still have what it had: a range that lost messages since would be folded to something else."""
        expected = making.past.messages(making.counted_from, at)
        if expected is None:
            return
        if making.counted < expected:
            rewind = making.progress.rewind
            raise lost(
                self.stream.name,
                rewind.partition,
                f"{expected - making.counted} of the {expected} messages of [{making.counted_from}, {at}) are gone"
                " (compacted away, or deleted)",
            )
        making.counted, making.counted_from = 0, at

    def _change(self, making: Making, gaps: Iterable[Gap], active: Iterable[File]) -> tuple[Change, list[str]]:
        progress, rewind = making.progress, making.progress.rewind
        account, partition = rewind.account, rewind.partition
        files = [
            making.past.files[file.path].file
            for file in active
            if file.path in making.past.files and making.past.files[file.path].topic_id == account.topic_id
        ]
        joining = Joining(self.world.joiner, progress, self.done.hold, self.stream.name if self.unchanged else "")
        joined, olds = joining.joined(files, making.records)
        others, removed = joining.beside(making.past.others.values(), making.others)
        state = self._state(progress)
        final = account.state if state is None else state
        closed, opened, again = mended(gaps, partition, account.topic_id, progress, making.marks)
        self.done.ranges[partition] = progress.widened()
        self.done.removed += len(olds)
        return (
            replace(
                _unmoved(partition, account),
                until=rewind.frontier,
                state=state,
                records=tuple(joined),
                others=others,
                kept=() if again else tuple(making.kept),
                halt=None if rewind.frontier < account.frontier else account.halt,
                marks=(*closed, *opened),
                rewound=rewind.start,
                remade=progress.widened().end + bool(progress.open != ()),
                time=making.time,
                removed_rows=sum(old.rows for old in olds),
                quarantined=len(self.world.state().quarantined(final)),
            ),
            [old.path for old in olds] + removed,
        )

    def _state(self, progress: Progress) -> tuple[File, ...] | None:
        """The state files afterwards: those of the refold, or those of now under the sessions that differ."""
        rewind = progress.rewind
        if progress.open is None:
            return progress.state
        if not progress.open:
            return None
        state, files = self.world.state(), rewind.account.state
        made = state.load(progress.state, progress.open)
        sessions = {name: made.get(name) or Session() for name in progress.open}
        merged = merge_count([file.rows for file in files], len(sessions))
        stem = f"{stem_prefix(rewind.account.epoch, rewind.account.frontier)}{self.done.hold}"
        kept, merge = files[: len(files) - merged], files[len(files) - merged :]
        return (*kept, state.save(rewind.partition, stem, sessions, merge))


def release(world: World, head: Head, hold: str, *, run: str = "", reason: str = "") -> None:
    """Give a hold back. Partitions that it does not hold any more are left alone.

    `reason`: why the repair is not needed any more; none where it failed, and may be tried again.
    """
    held = [p for p in head.ledger.known() if head.ledger.partitions[str(p)].hold == hold]
    if not held:
        return
    changes = tuple(_unmoved(partition, head.ledger.partitions[str(partition)]) for partition in held)
    entry = Entry(
        kind="release",
        attempt=world.new_attempt(),
        held=hold,
        run=run,
        product=__version__,
        changes=changes,
        reason=reason,
    )
    commit(world.ledger, world.clock, head, entry)


def lost(stream: str, partition: Partition, what: str, *, waits: bool = False) -> IntegrityError:
    """Kafka no longer has what a refold needs."""
    forward = f"\nTo go on without them: seriatim repair {stream} --partition {partition} --forward" if waits else ""
    return IntegrityError(
        f"{stream}: {partition} cannot be folded again: {what}",
        next="nothing was changed. Restore the messages to Kafka if you have them, or what is damaged from a backup;"
        " or choose a later --from." + forward,
    )


def _stopped(stream: str, halt: Finding) -> IntegrityError:
    return IntegrityError(
        f"{stream}: folding {halt.place} again stops at offset {halt.offset}: {halt.finding}",
        cause=halt.cause,
        next="nothing was changed. Fix what the cause names, or go on without these messages:\n"
        f"seriatim repair {stream} --partition {halt.place} --forward",
    )


def _unmoved(partition: Partition, account: Account) -> Change:
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        born=account.born,
    )
