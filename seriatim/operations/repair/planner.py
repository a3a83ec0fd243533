"""Decide what a repair does about the damage: the actions of its plan, and the notes.

All damage of one partition is repaired by one refold. Where that is refused, each damage is tried
by itself. Damage that cannot be repaired becomes a note, which says what a person can do instead.
It becomes an error only where a person asked for exactly that.

Next: operations/repair/plan.py has the actions as values; operations/repair/repair.py applies them.
"""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.engine.files import File
from seriatim.engine.holes import LOSS_FINDINGS
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import IntegrityError, SeriatimError
from seriatim.ledger.model import Change, Halt
from seriatim.operations.repair.damage import DamageSearch
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
from seriatim.operations.repair.refold_rules import END_OFFSET, Rewind
from seriatim.operations.repair.rewind import RewindChooser
from seriatim.ports import PastMessageReader

RETRYABLE_HALTS = {"poison": "the message is read again"}
"""Halts that are lifted on request, because reading again may help."""


class RepairPlanner:
    """Turns the damage of one stream into actions and notes. It changes nothing."""

    def __init__(
        self, search: DamageSearch, chooser: RewindChooser, past_reader: PastMessageReader
    ) -> None:
        self.search = search
        self.chooser = chooser
        self.past_reader = past_reader
        self.stream_name = search.stream.name
        self.joiner = search.open_stream.joiner
        self.actions: list[RepairAction] = []
        self.notes: list[str] = []
        """What cannot be repaired, and what to do instead, as texts for people."""
        self._recreated: set[Partition] = set()
        """Partitions whose topic was created again: nothing of them can be folded."""

    def plan_actions(self, request: RepairRequest) -> tuple[list[RepairAction], list[str]]:
        """The actions for a request, and the notes about what cannot be repaired.

        1. Note the damaged files that no refold can bring back.
        2. Plan the refolds: of what the request names, or of the damage that was found.
        3. Decide about the partitions that wait.

        A refusal of something that the request names is raised.
        """
        names_refold = request.start is not None or request.session is not None
        # 1. The files that no refold can bring back.
        if not names_refold and not request.ranges and not request.partition:
            self.notes += self.search.unrecoverable_file_notes()
        # 2. The refolds.
        for damages in self.search.damages_by_partition(request):
            if names_refold or request.ranges:
                self.actions.append(self._refold(damages))
            else:
                self._repair_partition(damages, forward=request.forward)
        # 3. The partitions that wait.
        if not request.ranges and request.session is None:
            self._plan_halts(request)
        return self.actions, self.notes

    # Damage

    def _repair_partition(self, damages: Sequence[Damage], *, forward: bool) -> None:
        """Plan the actions for the damage that was found in one partition."""
        partition = damages[0].request.partition
        recreated = self.chooser.recreated_topic_error(partition)
        if recreated is not None:
            self.notes.append(recreated.render())
            self._recreated.add(partition)
            return
        self.actions += self._actions_for_damages(damages, forward=forward)

    def _actions_for_damages(
        self, damages: Sequence[Damage], *, forward: bool
    ) -> list[RepairAction]:
        """One action for all damages, or for those that can be repaired together.

        Every damage that cannot be repaired is noted. Nothing comes back if none can.
        """
        try:
            return [self._refold(damages, follows_cut_log=True)]
        except IntegrityError as error:
            refusal = error
        if len(damages) == 1:
            if forward and self._can_rebuild_state(damages[0]):
                refold = damages[0].request
                return [RebuildStateAction(refold.partition, refold.until, refold.reason)]
            self._note_refusal(damages, refusal)
            return []
        # All together they are refused. Each is tried by itself: this notes those that fail.
        repairable = [
            damage for damage in damages if self._actions_for_damages([damage], forward=forward)
        ]
        if not repairable:
            return []
        if len(repairable) < len(damages):
            return self._actions_for_damages(repairable, forward=forward)
        # Each can be repaired alone, but they cannot be repaired together.
        self._note_refusal(damages, refusal)
        return []

    def _note_refusal(self, damages: Sequence[Damage], refusal: IntegrityError) -> None:
        facts = {"damage": merge_damages(damages).request.reason, **refusal.fields}
        note = IntegrityError(refusal.message, next=refusal.next, **facts)
        self.notes.append(note.render())

    def _refold(self, damages: Sequence[Damage], *, follows_cut_log: bool = False) -> RefoldAction:
        """One refold for all damages of a partition. Raises `IntegrityError` if it is refused."""
        damage = merge_damages(damages)
        rewind = self.chooser.choose_rewind(
            damage.request, rebuilds_state=damage.rebuilds_state, follows_cut_log=follows_cut_log
        )
        self._refuse_files_written_by_others(rewind)
        if damage.rebuilds_state:
            self._refuse_compacted(rewind)
        return RefoldAction(rewind)

    def _refuse_files_written_by_others(self, rewind: Rewind) -> None:
        """Refuse a refold of records that another program moved into files of its own.

        Such a file holds records of several partitions, so it cannot be replaced for one of them.
        """
        files = self.search.files_written_by_others()
        if not files:
            return
        partition_life = (rewind.partition, rewind.account.topic_id)
        refolded = OffsetRange(rewind.start, END_OFFSET)
        if self.joiner.has_records_in(files, refolded, partition_life):
            raise rewritten_files_error(self.stream_name, rewind.partition, files)

    def _refuse_compacted(self, rewind: Rewind) -> None:
        """Refuse to fold state again from a log out of whose middle compaction took messages.

        The log start does not show this, so the range is read. Only a topic that is compacted can
        lose messages in this way.
        """
        partition = rewind.partition
        if not self.past_reader.is_compacted(partition.topic):
            return
        losses: list[MessageLoss] = []
        proofs = self.search.histories[partition].slice_proofs()
        detector = LossDetector(partition, proofs, self.past_reader)
        for _ in detector.read_and_detect(rewind.read_range, losses.append):
            if losses:
                break
        if losses:
            raise lost_messages_error(self.stream_name, partition, str(losses[0]), is_halted=True)

    def _can_rebuild_state(self, damage: Damage) -> bool:
        """Whether lost state can be rebuilt from the records.

        The topic must still exist, its log must not have been cut, and no other program may have
        rewritten the records of the partition.
        """
        partition = damage.request.partition
        if not damage.rebuilds_state or partition not in self.search.bounds:
            return False
        if self.search.is_log_cut(partition):
            return False
        partition_life = (partition, self.search.account(partition).topic_id)
        files = self.search.files_written_by_others()
        return not self.joiner.has_records_in(files, OffsetRange(0, END_OFFSET), partition_life)

    # Partitions that wait

    def _plan_halts(self, request: RepairRequest) -> None:
        """Decide about every partition of the request that is halted."""
        refolded_partitions = {action.partition for action in self.actions}
        for partition in self.search.partitions_of_request(request):
            halt = self.search.account(partition).halt
            if halt is None or partition in self._recreated:
                continue
            if halt.finding == "truncated" and partition in refolded_partitions:
                continue  # The refold ends where the log ends, and this lifts the halt.
            try:
                self.actions.append(self._action_for_halt(partition, halt, request))
            except SeriatimError as error:
                if request.forward and request.partition:
                    raise
                self.notes.append(error.render())

    def _action_for_halt(
        self, partition: Partition, halt: Halt, request: RepairRequest
    ) -> LiftHaltAction | ForwardAction:
        """How a halted partition goes on. Raises `IntegrityError` if a person must decide first."""
        account = self.search.account(partition)
        bounds = self.search.bounds.get(partition)
        first_readable = self._first_readable_offset(partition)
        if not request.forward and bounds is not None:
            if halt.finding in RETRYABLE_HALTS:
                return LiftHaltAction(partition, halt, RETRYABLE_HALTS[halt.finding])
            if halt.finding in ("gap", "expired") and first_readable == account.frontier:
                return LiftHaltAction(partition, halt, f"offset {first_readable} can be read now")
        change = plan_forward(self.stream_name, partition, account, bounds, first_readable)
        if request.forward:
            return ForwardAction(halt, change)
        raise self._decision_needed_error(halt, change)

    def _decision_needed_error(self, halt: Halt, change: Change) -> IntegrityError:
        """A person must decide whether a halted partition goes on without what is lost."""
        partition = change.partition
        lost = OffsetRange(change.frontier, change.until)
        lost_text = ""
        if len(lost):
            count_text = "1 offset" if len(lost) == 1 else f"{len(lost)} offsets"
            lost_text = f"no longer in Kafka: {count_text} {lost}"
        return IntegrityError(
            f"{self.stream_name}: {partition} waits at offset {change.frontier}: {halt.finding}",
            cause=halt.cause,
            lost=lost_text,
            next="restore them if you have them elsewhere; or go on without them, with the gap"
            " published:\n"
            f"seriatim repair {self.stream_name} --partition {partition} --forward",
        )

    def _first_readable_offset(self, partition: Partition) -> int | None:
        """The first offset from the frontier on that can be read, or is missing for a good reason.

        None if the topic is gone or created again, or if nothing lies behind the frontier.
        """
        account = self.search.account(partition)
        bounds = self.search.bounds.get(partition)
        if bounds is None or bounds.topic_id != account.topic_id:
            return None
        if bounds.log_end <= account.frontier:
            return None
        start = max(account.frontier, bounds.log_start)
        batches = self.past_reader.read(partition, OffsetRange(start, bounds.log_end))
        first_batch = next(iter(batches), None)
        first_message = bounds.log_end if first_batch is None else first_batch.start
        if first_message == start:
            return start
        # Transaction markers and compacted messages leave holes that are no loss.
        hole = OffsetRange(start, first_message)
        lost_ends: list[int] = []
        for piece, cause in self.search.open_stream.explain(partition, hole):
            if cause in LOSS_FINDINGS:
                lost_ends.append(piece.end)
        return max(lost_ends, default=start)


def rewritten_files_error(
    stream: str, partition: Partition, files: Sequence[File]
) -> IntegrityError:
    """Another program joined the partition's records with those of others: they cannot be replaced."""
    return IntegrityError(
        f"{stream}: {partition} cannot be folded again from there: {len(files)} record files were"
        f" rewritten by somebody else, like {files[0].path}, and hold records of it beside those"
        " of others",
        cause="an OPTIMIZE, say; `seriatim compact` is what joins small files here",
        next="nothing was changed. What came after these files can be folded again: choose a later"
        " --from.\n"
        "What is in them: put the whole output folder back from a backup of before that, and runs"
        " fold again what\n"
        "came since; or give the stream a new output path, and it is folded anew from what Kafka"
        " has",
    )
