"""What is hurt: found by looking, and turned into the parts of a plan.

Files that are not as committed, sessions in quarantine, partitions that wait, partitions whose
check failed; or what a person names. What is wrong in one partition is mended together; where that
cannot be, each by itself. What cannot be mended is a note that says what to do instead, not an
error, unless a person asked for exactly that.

Next room: operations/repair/plan.py has the parts; operations/repair/repair.py applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from seriatim.engine.holes import LOSS_FINDINGS as LOSSES
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.ledger.history import PartitionHistory
from seriatim.ledger.model import Account, File, Halt
from seriatim.operations.repair.forward import plan_forward
from seriatim.operations.repair.lost_messages import LossDetector, MessageLoss
from seriatim.operations.repair.plan import (
    Damage,
    ForwardAction,
    LiftHaltAction,
    RebuildStateAction,
    RefoldAction,
    RepairAction,
    RepairRequest,
    merge_damages,
)
from seriatim.operations.repair.refold import lost_messages_error
from seriatim.operations.repair.refold_rules import END_OFFSET, RefoldRequest, Rewind
from seriatim.operations.repair.rewind import RewindChooser
from seriatim.operations.run import FoldContext
from seriatim.operations.slicing import Bounds
from seriatim.ports import LedgerHead, PastMessageReader
from seriatim.stream import Stream

SESSIONS_NAMED_MAX = 5
RETRYABLE_HALTS = {"poison": "the message is read again"}


class DamageSearch:
    """Looks for what is hurt in one stream."""

    def __init__(
        self,
        stream: Stream,
        head: LedgerHead,
        bounds: Mapping[Partition, Bounds],
        histories: Mapping[Partition, PartitionHistory],
        context: FoldContext,
        past_reader: PastMessageReader,
        suspects: frozenset[str] = frozenset(),
    ) -> None:
        self.stream, self.head, self.bounds, self.histories = stream, head, bounds, histories
        self.ledger, self.context, self.past_reader, self.suspects = (
            head.ledger,
            context,
            past_reader,
            suspects,
        )
        self.notes: list[str] = []

    def plan_actions(
        self, request: RepairRequest, chooser: RewindChooser
    ) -> tuple[list[RepairAction], list[str]]:
        """What is to be done, and what cannot be."""
        found = request.start is None and request.session is None and not request.ranges
        parts: list[RepairAction] = []
        self.notes = self._unrecoverable_damage_notes() if found and not request.partition else []
        over: set[Partition] = set()
        for hurts in filter(None, self._damages_of_request(request)):
            if not found:
                parts.append(self._refold_action(hurts, chooser))
            elif (life := chooser.recreated_topic_error(hurts[0].request.partition)) is not None:
                self.notes.append(life.render())
                over.add(hurts[0].request.partition)
            else:
                parts += self._repair_actions(hurts, chooser, forward=request.forward)
        refolded = {part.partition for part in parts}
        for partition in [] if request.ranges else self._partitions_of_request(request):
            halt = self.ledger.partitions[str(partition)].halt
            if halt is None or request.session is not None or partition in over:
                continue
            try:
                if (
                    part := self._action_for_halt(
                        partition, halt, request, is_refolded=partition in refolded
                    )
                ) is not None:
                    parts.append(part)
            except SeriatimError as error:
                if request.forward and request.partition:
                    raise
                self.notes.append(error.render())
        return parts, self.notes

    def _repair_actions(
        self, damages: Sequence[Damage], chooser: RewindChooser, *, forward: bool
    ) -> list[RepairAction]:
        """All of it by one refold; or those that can be mended, with a note of each that cannot."""
        try:
            return [self._refold_action(damages, chooser, follows_cut_log=True)]
        except IntegrityError as error:
            refused = error
        if len(damages) == 1 and forward and self._can_rebuild_state(damages[0]):
            wanted = damages[0].request
            return [RebuildStateAction(wanted.partition, wanted.until, wanted.reason)]
        able = (
            [one for one in damages if self._repair_actions([one], chooser, forward=forward)]
            if len(damages) > 1
            else damages
        )
        if len(able) < len(damages):
            return self._repair_actions(able, chooser, forward=forward) if able else []
        facts = {"hurt": merge_damages(damages).request.reason, **refused.fields}
        self.notes.append(IntegrityError(refused.message, next=refused.next, **facts).render())
        return []

    def _can_rebuild_state(self, damage: Damage) -> bool:
        """Whether state that cannot be folded again is made of what there is: its topic lives, its
        log was not cut.
        """
        partition = damage.request.partition
        account = self.ledger.partitions[str(partition)]
        if (
            not damage.rebuilds_state
            or partition not in self.bounds
            or self._is_log_cut(partition, account)
        ):
            return False
        return not self.context.joiner.has_records_in(
            self._files_written_by_others(),
            OffsetRange(0, END_OFFSET),
            (partition, account.topic_id),
        )

    def _refold_action(
        self, damages: Sequence[Damage], chooser: RewindChooser, *, follows_cut_log: bool = False
    ) -> RepairAction:
        one = merge_damages(damages)
        rewind = chooser.choose_rewind(
            one.request, rebuilds_state=one.rebuilds_state, follows_cut_log=follows_cut_log
        )
        self._refuse_files_written_by_others(rewind)
        if one.rebuilds_state:
            self._refuse_compacted(rewind)
        return RefoldAction(rewind)

    def _refuse_compacted(self, rewind: Rewind) -> None:
        """Refuse to fold state again from messages that compaction took out of the middle of the
        log.

        The log start does not tell, so the range is read. Only topics that compact can lose
        messages like this.
        """
        partition, losses = rewind.partition, list[MessageLoss]()
        if not self.past_reader.is_compacted(partition.topic):
            return
        reading = LossDetector(
            partition, self.histories[partition].slice_proofs(), self.past_reader
        ).read_and_detect(rewind.read_range, losses.append)
        for _ in reading:
            if losses:
                break
        if losses:
            raise lost_messages_error(self.stream.name, partition, str(losses[0]), is_halted=True)

    def _unrecoverable_damage_notes(self) -> list[str]:
        """Damaged files that Kafka cannot give back: of a topic's earlier life, or of a partition
        that is retired.
        """
        notes = []
        for partition, past in self.histories.items():
            account = self.ledger.partitions[str(partition)]
            gone = [
                past.record_files[path]
                for path in self._active_paths()
                if path in past.record_files
            ]
            gone = [one for one in gone if account.retired or one.topic_id != account.topic_id]
            for path, why in self.context.joiner.find_damaged_files(
                [one.file for one in gone], check_digests=False
            ).items():
                what = f"{self.stream.name}: record file {path}: {why}"
                life = (
                    "its partition is retired"
                    if account.retired
                    else "it is of an earlier life of its topic"
                )
                notes.append(
                    IntegrityError(
                        what, cause=life, next="restore this file from a backup"
                    ).render()
                )
        return notes

    def _refuse_files_written_by_others(self, rewind: Rewind) -> None:
        """Files that somebody else rewrote hold records of several partitions: none of them can be
        replaced.
        """
        strange = self._files_written_by_others()
        whose = (rewind.partition, rewind.account.topic_id)
        if strange and self.context.joiner.has_records_in(
            strange, OffsetRange(rewind.start, END_OFFSET), whose
        ):
            raise rewritten_files_error(self.stream.name, rewind.partition, strange)

    def _files_written_by_others(self) -> list[File]:
        known = {path for past in self.histories.values() for path in past.record_files}
        return [
            file for file in self.context.ledger.active_files(self.head) if file.path not in known
        ]

    def _partitions_of_request(self, request: RepairRequest) -> list[Partition]:
        """The partitions that a request is about."""
        if not request.partition:
            return [
                p
                for p in self.ledger.known_partitions()
                if not self.ledger.partitions[str(p)].retired
            ]
        partition = Partition.parse(request.partition)
        if self.ledger.account(partition) is None:
            known = ", ".join(map(str, self.ledger.known_partitions()[:20]))
            raise ConfigError(
                f"{self.stream.name}: {partition} was never read",
                known=known,
                next="name one of these partitions",
            )
        return [partition]

    def _damages_of_request(self, request: RepairRequest) -> Iterable[list[Damage]]:
        """What is folded again, partition by partition. What a person named is widened by what is
        damaged in it.
        """
        asked: list[RefoldRequest] = []
        for place, (start, until) in sorted(request.ranges.items()):
            asked.append(
                RefoldRequest(
                    partition=Partition.parse(place), start=start, until=until, reason="backfill"
                )
            )
        if request.start is not None or request.session is not None:
            asked.append(self._refold_of_request(request))
        for wanted in asked:
            yield [
                Damage(request=wanted),
                *self._record_file_damages(wanted.partition, self.suspects),
            ]
        for partition in [] if asked else self._partitions_of_request(request):
            yield self._damages_of_partition(partition, check_digests=bool(request.partition))

    def _refold_of_request(self, request: RepairRequest) -> RefoldRequest:
        """What a person named: a session, or a partition from an offset on."""
        partition = self._partition_of_request(request)
        account = self.ledger.partitions[str(partition)]
        start, sessions = request.start, None
        if request.session is not None:
            sessions = (request.session,)
            found = self.context.open_state().load(account.state, sessions).get(request.session)
            if found is None:
                raise ConfigError(
                    f"{self.stream.name}: there is no session {request.session!r} in {partition}",
                    next=f"`seriatim state {self.stream.name} SESSION` looks for sessions",
                )
            if start is None and found is not None:
                start = (
                    found.finding_offset
                    if found.finding is not None
                    else found.damaged_since_offset
                )
                start = None if start < 0 else start
        if start is None:
            raise ConfigError(
                f"{self.stream.name}: nothing is known to be wrong with session {request.session!r}",
                next="say from which offset on it is to be folded again: --from OFFSET",
            )
        if not account.initial_frontier <= start < account.frontier:
            raise ConfigError(
                f"{self.stream.name}: --from {start} is not within what was folded of {partition}",
                allowed=f"{account.initial_frontier} to {account.frontier - 1}",
                next="choose an offset that was folded; `seriatim run` folds what comes after",
            )
        why = f"from offset {start} on, as asked"
        return RefoldRequest(
            partition=partition, start=start, until=account.frontier, sessions=sessions, reason=why
        )

    def _partition_of_request(self, request: RepairRequest) -> Partition:
        """Where the named session lives, or the named partition."""
        if request.partition:
            return self._partitions_of_request(request)[0]
        if request.session is None:
            raise ConfigError(
                f"{self.stream.name}: --from needs to know where",
                next="add --partition TOPIC/NUMBER, or --session NAME",
            )
        state = self.context.open_state()
        homes = [
            partition
            for partition in self.ledger.known_partitions()
            if state.find_names(self.ledger.partitions[str(partition)].state, [request.session])
        ]
        if len(homes) != 1:
            listed = ", ".join(map(str, homes)) or "none"
            raise ConfigError(
                f"{self.stream.name}: session {request.session!r} lives in {len(homes)} partitions: {listed}",
                next="say which with --partition TOPIC/NUMBER; `seriatim state` looks at sessions",
            )
        return homes[0]

    def _damages_of_partition(self, partition: Partition, *, check_digests: bool) -> list[Damage]:
        """What is wrong with a partition's files, checks and sessions."""
        account = self.ledger.partitions[str(partition)]
        damaged = self.context.joiner.find_damaged_files(account.state)
        hurts = [
            *self._record_file_damages(
                partition, self._suspect_paths(), check_all_files=True, check_digests=check_digests
            )
        ]
        hurts += self._failed_check_damages(partition, account)
        if self._is_log_cut(partition, account):
            cut = account.halt.log_end if account.halt is not None else -1
            end = min(self.bounds[partition].log_end, cut if cut >= 0 else account.frontier)
            hurts.append(
                _damage_of_range(
                    partition, end, account.frontier, f"the log was cut at offset {end}"
                )
            )
        if damaged:
            path, why = next(iter(damaged.items()))
            at = account.frontier
            hurts.append(
                _damage_of_range(
                    partition, at, at, f"state file {path}: {why}", rebuilds_state=True
                )
            )
        elif account.quarantined:
            hurts += self._quarantine_damage(partition, account)
        return hurts

    def _quarantine_damage(self, partition: Partition, account: Account) -> Iterable[Damage]:
        """Sessions in quarantine: they alone are folded again."""
        hurt = self.context.open_state().quarantined_sessions(account.state)
        if hurt:
            names = ", ".join(sorted(hurt)[:SESSIONS_NAMED_MAX]) + (
                ", …" if len(hurt) > SESSIONS_NAMED_MAX else ""
            )
            offsets = [session.finding_offset for session in hurt.values()]
            wanted = RefoldRequest(
                partition=partition,
                start=min(offsets),
                until=account.frontier,
                sessions=tuple(sorted(hurt)),
                reason=f"{len(hurt)} sessions in quarantine: {names}",
            )
            yield Damage(request=wanted, damaged_until=max(offsets) + 1)

    def _record_file_damages(
        self,
        partition: Partition,
        suspects: Iterable[str],
        *,
        check_all_files: bool = False,
        check_digests: bool = False,
    ) -> Iterable[Damage]:
        """Record files in the table that are not as committed: the ranges that they were made of.

        Suspects are proved by their digest; so is everything else if that is asked for, or by its
        size.
        """
        past, account, joiner = (
            self.histories[partition],
            self.ledger.partitions[str(partition)],
            self.context.joiner,
        )
        made = [
            *(
                past.record_files[path]
                for path in self._active_paths()
                if path in past.record_files
            ),
            *past.other_record_files.values(),
        ]
        mine = {one.file.path: one for one in made if one.topic_id == account.topic_id}
        damaged = joiner.find_damaged_files([mine[path].file for path in suspects if path in mine])
        if check_all_files:
            damaged |= joiner.find_damaged_files(
                [one.file for one in mine.values()], check_digests=check_digests
            )
        for path, why in sorted(damaged.items()):
            yield _damage_of_range(
                partition, mine[path].start, mine[path].until, f"record file {path}: {why}"
            )

    def _active_paths(self) -> set[str]:
        return self.context.ledger.active_paths(self.head)

    def unneeded_damaged_files(self) -> list[str]:
        """Files that verify found to be damaged, that nothing needs any more, and that are still
        there.
        """
        needed = self._active_paths() | {
            file.path for account in self.ledger.partitions.values() for file in account.state
        }
        known = {
            path: made.file
            for past in self.histories.values()
            for path, made in past.all_record_files.items()
        }
        known |= {
            f.path: f
            for past in self.histories.values()
            for p in past.points
            for f in p.change.state or ()
        }
        unneeded = [path for path in self._suspect_paths() if path in known and path not in needed]
        # A file that is gone also counts as damaged, but there is nothing left of it to delete.
        there = (
            {path for partition in self.histories for path in self.context.records.paths(partition)}
            if unneeded
            else set()
        )
        return sorted(
            self.context.joiner.find_damaged_files(
                [known[path] for path in unneeded if path in there]
            )
        )

    def _suspect_paths(self) -> set[str]:
        """Files that verify found to differ, or that a refold could not read."""
        return {*self.context.ledger.differing_files(), *self.suspects}

    def _failed_check_damages(self, partition: Partition, account: Account) -> Iterable[Damage]:
        """Stretches whose check found them bad, and that were not repaired yet."""
        for one in self.ledger.failed_ranges:
            if (
                one.partition == str(partition)
                and one.replaced_by_sequence < 0
                and one.start < account.frontier
            ):
                why = f"its check failed, told by the verdict up to entry {one.judged_until}"
                yield _damage_of_range(partition, one.start, one.until, why)

    def _is_log_cut(self, partition: Partition, account: Account) -> bool:
        """Whether the log ends before what was folded, or did when the partition halted."""
        seen, halt = self.bounds.get(partition), account.halt
        if halt is not None and halt.finding == "truncated" and seen is not None:
            return seen.topic_id == account.topic_id
        return (
            seen is not None
            and seen.topic_id == account.topic_id
            and seen.log_end < account.frontier
        )

    def _action_for_halt(
        self, partition: Partition, halt: Halt, request: RepairRequest, *, is_refolded: bool
    ) -> RepairAction | None:
        """What becomes of a partition that waits."""
        account, seen = self.ledger.partitions[str(partition)], self.bounds.get(partition)
        if halt.finding == "truncated" and is_refolded:
            return None  # its refold ends where the log does, and lifts the halt
        there = self._first_readable_offset(partition, account, seen)
        if request.forward:
            change = plan_forward(self.stream.name, partition, account, seen, there)
            return ForwardAction(halt, change)
        if halt.finding in RETRYABLE_HALTS and seen is not None:
            return LiftHaltAction(partition, halt, RETRYABLE_HALTS[halt.finding])
        if halt.finding in ("gap", "expired") and seen is not None and there == account.frontier:
            return LiftHaltAction(partition, halt, f"offset {there} can be read now")
        change = plan_forward(self.stream.name, partition, account, seen, there)
        lost = OffsetRange(change.frontier, change.until)
        raise IntegrityError(
            f"{self.stream.name}: {partition} waits at offset {account.frontier}: {halt.finding}",
            cause=halt.cause,
            lost=f"{len(lost)} offsets {lost} are gone from Kafka" if len(lost) else "",
            next="restore them if you have them elsewhere; or go on without them, with the gap published:\n"
            f"seriatim repair {self.stream.name} --partition {partition} --forward",
        )

    def _first_readable_offset(
        self, partition: Partition, account: Account, bounds: Bounds | None
    ) -> int | None:
        """The first offset from the frontier on that can be read, or that is missing for a good
        reason.
        """
        if (
            bounds is None
            or bounds.topic_id != account.topic_id
            or bounds.log_end <= account.frontier
        ):
            return None
        start = max(account.frontier, bounds.log_start)
        whole = OffsetRange(start, bounds.log_end)
        first = next(
            (stretch.start for stretch in self.past_reader.read(partition, whole)), bounds.log_end
        )
        if first == start:
            return start
        pieces = self.context.explain(partition, OffsetRange(start, first))
        gone = [piece.end for piece, cause in pieces if cause in LOSSES]
        return max(gone, default=start)


def rewritten_files_error(
    stream: str, partition: Partition, files: Sequence[File]
) -> IntegrityError:
    """Records that somebody else put together with those of other partitions cannot be replaced."""
    return IntegrityError(
        f"{stream}: {partition} cannot be folded again from there: {len(files)} record files were rewritten by somebody"
        f" else, like {files[0].path}, and hold records of it beside those of others",
        cause="an OPTIMIZE, say; `seriatim compact` is what joins small files here",
        next="nothing was changed. What came after these files can be folded again: choose a later --from.\n"
        "What is in them: put the whole output folder back from a backup of before that, and runs fold again what\n"
        "came since; or give the stream a new output path, and it is folded anew from what Kafka has",
    )


def _damage_of_range(
    partition: Partition, start: int, until: int, reason: str, *, rebuilds_state: bool = False
) -> Damage:
    return Damage(
        request=RefoldRequest(partition=partition, start=start, until=until, reason=reason),
        rebuilds_state=rebuilds_state,
    )
