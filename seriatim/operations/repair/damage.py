"""Damage: what is wrong in a stream, and what a repair would do about it. It only reads.

Damage is one of these: a file that is not as committed, a session in quarantine, a range whose
check failed, a log that was cut. What a person names in a request counts as damage too. All damage
of one partition is repaired by one refold. Where that is refused, each damage is tried by itself.
Damage that cannot be repaired becomes a note, which says what a person can do instead. It becomes
an error only where a person asked for exactly that.

A plan is one list of actions. Showing the plan and applying it go through the same list.

Next: operations/rewind.py chooses where a refold begins; operations/repair/refold.py applies a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.findings import count_of, list_some, printable_session, shell_quote
from seriatim.engine.holes import LOSS_FINDINGS
from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.engine.session import Session, SessionsByName, SwappedRanges
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.ledger.commit import require_head
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account, Change, Halt, Ledger, refuse_changed_machine
from seriatim.operations.locate_session import locate_session
from seriatim.operations.missing_messages import (
    NEVER_CAME,
    MissingMessage,
    MissingMessageSearch,
    missing_message_advice,
)
from seriatim.operations.repair.forward import plan_forward
from seriatim.operations.rewind import (
    DAMAGES_NAMED_MAX,
    END_OFFSET,
    BaseSearch,
    FileOrigin,
    LedgerHistory,
    LossDetector,
    MessageLoss,
    PartitionHistory,
    RefoldRequest,
    Rewind,
    RewindChooser,
    StateFileCheck,
    lost_messages_error,
    recreated_topic_error,
    require_same_topic,
)
from seriatim.ports import OpenStream

SESSIONS_NAMED_MAX = 5
PARTITIONS_NAMED_MAX = 20
RETRYABLE_HALTS = {"poison": "the message is read again"}
"""Halts that are lifted on request, because reading again may help."""


class RepairRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a person asked for. It is stored with the hold, so that the repair can be resumed by
    its id.
    """

    partition: str = ""
    """Only this partition; empty: all."""
    session: str | None = None
    """Only this session; None: all."""
    start: int | None = None
    """From this offset on."""
    forward: bool = False
    """Go on without what is lost."""
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Backfill: the offsets that are folded again, by partition."""
    unchanged: bool = False
    """Backfill: the machine must make the same records as before; other records are refused."""

    def to_json(self) -> str:
        """The request as it is stored with the hold."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @classmethod
    def from_json(cls, text: str) -> RepairRequest:
        """The request that was stored with a hold. An empty text is a request for everything."""
        if not text:
            return cls()
        return msgspec.json.decode(text, type=cls)

    @property
    def is_unrestricted(self) -> bool:
        """Whether nothing is named except a partition: the repair itself looks for damage."""
        return self == RepairRequest(partition=self.partition)

    def to_command(self, stream: str) -> str:
        """What a person would type for this request."""
        if self.ranges:
            command = f"seriatim backfill {stream}"
            if self.unchanged:
                command += " --machine unchanged"
            ranges: list[str] = []
            for partition, (start, until) in sorted(self.ranges.items()):
                ranges.append(f"{partition} [{start}, {until})")
            return f"{command}, of {', '.join(ranges)}"
        command = f"seriatim repair {stream}"
        if self.partition:
            command += f" --partition {self.partition}"
        if self.session is not None:
            command += f" --session {shell_quote(self.session)}"
        if self.start is not None:
            command += f" --from {self.start}"
        if self.forward:
            command += " --forward"
        return command


class Hold(Struct, frozen=True):
    """A repair that holds partitions: it is at work, or it died."""

    id: str
    partitions: tuple[Partition, ...]
    request: RepairRequest

    def describe(self, stream: str) -> dict[str, str]:
        """For people: what the repair was asked to do, and what to do about it if it died."""
        return {
            "held": ", ".join(map(str, self.partitions)),
            "asked": self.request.to_command(stream),
            "go on": f"seriatim repair {stream} --resume {self.id}",
            "give up": f"seriatim repair {stream} --abandon {self.id}",
        }


class WellSession(Struct, frozen=True, kw_only=True):
    """A session that was damaged and is well again, so that no repair is needed."""

    session: str
    partition: Partition
    since: int
    """The first offset whose output is right again."""
    ended_by: str
    """What ended the damage: snapshot, repair, forward or hand."""

    def describe(self) -> str:
        """For people: since when the session is well, and why."""
        ends = {"snapshot": "by its snapshot", "hand": "released by hand"}
        end = ends.get(self.ended_by, f"by {self.ended_by}")
        name = printable_session(self.session)
        return (
            f"session {name} in {self.partition} is already well since offset {self.since}, {end}"
        )


class Damage(Struct, frozen=True, kw_only=True):
    """One thing that is wrong in a partition, and the refold that would repair it alone."""

    request: RefoldRequest
    damaged_until: int = -1
    """Where the damage itself ends, if that is before `request.until`: the refold of a few sessions
    goes on to the frontier, and this is cheap.
    """
    rebuilds_state: bool = False
    """Whether all state is made again."""


def merge_damages(damages: Sequence[Damage]) -> Damage:
    """All damages of one partition as one, from the first to the last of them."""
    if len(damages) == 1:
        return damages[0]
    ends: list[int] = []
    for damage in damages:
        if damage.damaged_until >= 0:
            ends.append(damage.damaged_until)
        else:
            ends.append(damage.request.until)
    swapped_ranges: SwappedRanges = {}
    for damage in damages:
        swapped_ranges |= damage.request.swapped_ranges
    distinct_reasons = dict.fromkeys(damage.request.reason for damage in damages)
    merged_request = RefoldRequest(
        partition=damages[0].request.partition,
        start=min(damage.request.start for damage in damages),
        until=max(ends),
        swapped_ranges=swapped_ranges,
        reason=list_some([*distinct_reasons], DAMAGES_NAMED_MAX, separator="; "),
    )
    rebuilds_state = any(damage.rebuilds_state for damage in damages)
    return Damage(request=merged_request, rebuilds_state=rebuilds_state)


class RefoldAction(Struct, frozen=True):
    """A range is rewound and folded again."""

    rewind: Rewind

    @property
    def partition(self) -> Partition:
        """The partition that is folded again."""
        return self.rewind.partition


class LiftHaltAction(Struct, frozen=True):
    """A halted partition goes on: what it waited for is there now, or is tried again."""

    partition: Partition
    halt: Halt
    reason: str


class ForwardAction(Struct, frozen=True):
    """A halted partition goes on after messages that are lost. The gap is published."""

    halt: Halt
    change: Change

    @property
    def partition(self) -> Partition:
        """The partition that goes on."""
        return self.change.partition

    @property
    def passed_range(self) -> OffsetRange:
        """The offsets that are lost."""
        return OffsetRange(self.change.frontier, self.change.until)


class RebuildStateAction(Struct, frozen=True):
    """A partition goes on with state that is rebuilt from its records, because state files are
    damaged and Kafka no longer has the messages that made them.
    """

    partition: Partition
    frontier: int
    reason: str


RepairAction = RefoldAction | LiftHaltAction | ForwardAction | RebuildStateAction


class RepairPlan(Struct, frozen=True, kw_only=True):
    """What a repair would do."""

    stream: str
    request: RepairRequest
    sequence: int
    """The ledger entry as of which the plan was made."""
    approval: str
    """Changes whenever an epoch or a halt of the partitions does: an older approval is void."""
    actions: tuple[RepairAction, ...] = ()
    notes: tuple[str, ...] = ()
    """What is damaged and cannot be repaired by this plan, and what to do instead."""
    well_sessions: tuple[WellSession, ...] = ()
    """Sessions that the request is about, and that are well again without a repair."""
    deleted_files: tuple[str, ...] = ()
    """Damaged files that are deleted: nothing needs them but a look back."""
    resumed_hold: str | None = None
    """The hold of an earlier attempt that this plan goes on from."""

    held_partitions: tuple[Partition, ...] = ()
    """The partitions that the earlier attempt holds."""

    holds: tuple[Hold, ...] = ()
    """All holds on what was asked for, also that of the earlier attempt."""

    history: LedgerHistory | None = None
    """What was read for the plan. Who applies it reads only what came since."""

    @property
    def partitions(self) -> list[Partition]:
        """The partitions that the plan changes, and those that an earlier attempt holds."""
        changed_partitions = {action.partition for action in self.actions}
        return sorted(changed_partitions.union(self.held_partitions))

    @property
    def blocking_holds(self) -> list[Hold]:
        """Holds of other repairs on the plan's partitions: it replaces none of them."""
        partitions = set(self.partitions)
        return [
            hold
            for hold in self.holds
            if hold.id != self.resumed_hold and partitions.intersection(hold.partitions)
        ]


def compute_approval(ledger: Ledger, request: RepairRequest, partitions: list[Partition]) -> str:
    """What an approval is tied to: the request, and the epochs and halts of the partitions that it
    changes.
    """
    conditions: list[tuple[str, int, Halt | None]] = []
    for partition_name in sorted({str(partition) for partition in partitions}):
        account = ledger.partitions[partition_name]
        conditions.append((partition_name, account.epoch, account.halt))
    content = msgspec.json.encode((request.to_json(), conditions), order="deterministic")
    return sha256(content).hexdigest()[:16]


# Planning


def plan_repair(
    open_stream: OpenStream,
    request: RepairRequest,
    head: LedgerHead | None = None,
    suspects: frozenset[str] = frozenset(),
    history: LedgerHistory | None = None,
) -> RepairPlan:
    """What a repair would do, as of now. It changes nothing.

    1. Read the history, or what came since it was read. Then look for holds: if a repair died, a
       request that names nothing takes over its request.
    2. Find the damage and choose the actions.
    3. Put the plan together.

    With `head`, the plan is made under a hold, and other holds are not looked for. `suspects` are
    files that an earlier attempt at this repair found to be damaged.
    """
    stream_name = open_stream.stream.name
    # 1. The history and the holds.
    history = history or LedgerHistory(open_stream.ledger, stream_name)
    holds: list[Hold] = []
    if head is None:
        # The history comes before the head, whose manifest then need not be read again.
        history.read_on()
        head = require_head(open_stream.ledger, stream_name)
        history.read_on(head.ledger.sequence)
        holds = _holds_of_request(history, head.ledger, request)
    else:
        history.read_on(head.ledger.sequence)
    unfinished_hold = _unfinished_hold(holds, request)
    if unfinished_hold is not None:
        request = unfinished_hold.request
    if request.unchanged:
        refuse_changed_machine(head.ledger, open_stream.runner.state_version)
    # 2. The damage, and what to do about it.
    planner = RepairPlanner(open_stream, head, history, suspects)
    try:
        planner.plan_actions(request)
    except SeriatimError as error:
        if unfinished_hold is not None:
            give_up = unfinished_hold.describe(stream_name)["give up"]
            error.next += (
                f"\nor give up repair {unfinished_hold.id}, which asked for this: {give_up}"
            )
        raise
    # 3. The plan.
    actions = planner.actions
    deleted_files: list[str] = []
    if request.is_unrestricted:
        deleted_files = planner.unneeded_damaged_files(request.partition)
    partitions = sorted({action.partition for action in actions})
    plan = RepairPlan(
        stream=stream_name,
        request=request,
        sequence=head.ledger.sequence,
        approval=compute_approval(head.ledger, request, partitions),
        actions=tuple(actions),
        notes=tuple(planner.notes),
        well_sessions=tuple(planner.well_sessions),
        deleted_files=tuple(deleted_files),
        holds=tuple(holds),
        history=history,
    )
    for hold in holds:
        if hold.request == request:
            return replace(plan, resumed_hold=hold.id, held_partitions=hold.partitions)
    return plan


def require_known_partition(ledger: Ledger, name: str) -> Partition:
    """The partition of this name. A partition that was never read is refused."""
    partition = Partition.parse(name)
    if ledger.account(partition) is None:
        known_partitions = [str(known) for known in ledger.known_partitions()]
        raise ConfigError(
            f"{ledger.stream}: {partition} was never read",
            known=list_some(known_partitions, PARTITIONS_NAMED_MAX),
            next="name one of these partitions",
        )
    return partition


def _holds_of_request(history: LedgerHistory, ledger: Ledger, request: RepairRequest) -> list[Hold]:
    """The holds on partitions that a request may change, oldest first."""
    holds: list[Hold] = []
    for hold_id, stored_request in history.requests_by_hold.items():
        partitions = held_partitions(ledger, hold_id)
        if not partitions:
            continue
        hold = Hold(hold_id, tuple(partitions), RepairRequest.from_json(stored_request))
        concerns_partition = not request.partition or request.partition in map(str, partitions)
        if concerns_partition or hold.request == request:
            holds.append(hold)
    return holds


def _unfinished_hold(holds: Sequence[Hold], request: RepairRequest) -> Hold | None:
    """The hold of a repair that died, if the request names nothing of its own."""
    if not request.is_unrestricted:
        return None
    return next((hold for hold in holds if hold.request != request), None)


def held_partitions(ledger: Ledger, hold: str) -> list[Partition]:
    """The partitions that a repair holds."""
    return [
        partition
        for partition in ledger.known_partitions()
        if ledger.partitions[str(partition)].hold == hold
    ]


def request_of_hold(open_stream: OpenStream, hold: str) -> RepairRequest:
    """What the repair of this id was asked to do. An id that holds nothing is refused."""
    stream_name = open_stream.stream.name
    history = LedgerHistory(open_stream.ledger, stream_name)
    history.read_on()
    ledger = require_head(open_stream.ledger, stream_name).ledger
    if held_partitions(ledger, hold):
        return RepairRequest.from_json(history.requests_by_hold[hold])
    hold_ids = {account.hold for account in ledger.partitions.values() if account.hold}
    raise ConfigError(
        f"{stream_name}: no partition is held by {hold!r}: it is done, given up, or was taken over",
        held=", ".join(sorted(hold_ids)) or "nobody holds anything",
        next=f"`seriatim status {stream_name}` shows holds",
    )


class RepairPlanner:
    """Finds the damage of one stream as of one ledger entry, and turns it into actions and notes.

    Its methods come in this order: what is planned; what a person named; the damage of a partition;
    the refold of a damage; partitions that wait; files that no refold can replace.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        head: LedgerHead,
        history: LedgerHistory,
        suspects: frozenset[str] = frozenset(),
    ) -> None:
        self.open_stream = open_stream
        self.stream_name = open_stream.stream.name
        self.joiner = open_stream.joiner
        self.head = head
        self.ledger = head.ledger
        self.history = history
        self.bounds = open_stream.log.bounds(open_stream.stream.topics)
        self.suspects = suspects
        """Paths of files that an earlier attempt at this repair could not read."""
        self.active_paths = open_stream.ledger.active_paths(head)
        self.actions: list[RepairAction] = []
        self.notes: list[str] = []
        """What cannot be repaired, and what to do instead, as texts for people."""
        self.well_sessions: list[WellSession] = []
        """Sessions that the request is about, and that are well again without a repair."""
        self._recreated: set[Partition] = set()
        """Partitions whose topic was created again: nothing of them can be folded."""
        self._state_check = StateFileCheck(self.joiner)

    def plan_actions(self, request: RepairRequest) -> None:
        """Decide about a request: the actions, and the notes about what cannot be repaired.

        1. Note the damaged files that no refold can bring back.
        2. Plan the refolds: of what the request names, or of the damage that was found.
        3. Decide about the partitions that wait.

        A refusal of something that the request names is raised.
        """
        named_refolds = self._refolds_of_request(request)
        if self.well_sessions:
            return
        # 1. The files that no refold can bring back.
        if not named_refolds and not request.partition:
            self._note_unrecoverable_files()
        # 2. The refolds.
        for refold in named_refolds:
            # A range that a person named is widened by the suspect files in its partition.
            damages = [Damage(request=refold)]
            damages += self._damaged_record_files(refold.partition, self.suspects)
            self.actions.append(self._refold(damages))
        if not named_refolds:
            # A digest means reading the whole file: that is done only where a person named the
            # partition. Otherwise the size of a file has to do, except for suspect files.
            check_digests = bool(request.partition)
            for partition in self._partitions_of_request(request):
                damages = self._damages_of_partition(partition, check_digests=check_digests)
                if damages:
                    self._repair_partition(damages, forward=request.forward)
        # 3. The partitions that wait.
        if not request.ranges and request.session is None:
            self._plan_halts(request)
        if request.partition and not self.actions and not self.notes and not self.well_sessions:
            self.well_sessions = self._well_sessions(Partition.parse(request.partition))

    def account(self, partition: Partition) -> Account:
        """The account of a partition that the ledger knows."""
        return self.ledger.partitions[str(partition)]

    # What a person named

    def _partitions_of_request(self, request: RepairRequest) -> list[Partition]:
        """The partitions that a request is about. A partition that was never read is refused."""
        if request.partition:
            return [require_known_partition(self.ledger, request.partition)]
        known_partitions = self.ledger.known_partitions()
        return [p for p in known_partitions if not self.account(p).retired]

    def _refolds_of_request(self, request: RepairRequest) -> list[RefoldRequest]:
        """The ranges that a person named: of a backfill, of a session, or from an offset on."""
        refolds: list[RefoldRequest] = []
        for partition_name, (start, until) in sorted(request.ranges.items()):
            partition = Partition.parse(partition_name)
            refolds.append(
                RefoldRequest(partition=partition, start=start, until=until, reason="backfill")
            )
        if request.start is not None or request.session is not None:
            refold = self._refold_of_session_or_offset(request)
            if refold is not None:
                refolds.append(refold)
        return refolds

    def _refold_of_session_or_offset(self, request: RepairRequest) -> RefoldRequest | None:
        """The refold of a session, or of a partition from an offset on, up to the frontier.

        None if the session is well again: then it is one of `well_sessions`.
        """
        partition = self._partition_of_session_or_offset(request)
        account = self.account(partition)
        start = request.start
        sessions = None
        swapped_ranges: SwappedRanges = {}
        if request.session is not None:
            sessions = (request.session,)
            session = self._load_session(partition, request.session)
            if start is None:
                start = _damage_offset_of_session(session)
                swapped_ranges = self._swapped_ranges_of(partition, request.session, session)
            if start is None:
                # A mail about it may be hours old, and its next snapshot came meanwhile.
                self.well_sessions = self._well_sessions(partition, request.session)[-1:]
                if self.well_sessions:
                    return None
        if start is None:
            raise ConfigError(
                f"{self.stream_name}: nothing is known to be wrong with session {request.session!r}",
                next="say from which offset on it is to be folded again: --from OFFSET",
            )
        if not account.initial_frontier <= start < account.frontier:
            raise ConfigError(
                f"{self.stream_name}: --from {start} is not within what was folded of {partition}",
                allowed=f"{account.initial_frontier} to {account.frontier - 1}",
                next="choose an offset that was folded; `seriatim run` folds what comes after",
            )
        reason = f"from offset {start} on, as asked"
        if swapped_ranges:
            reason += "; swapped messages are put into order"
        return RefoldRequest(
            partition=partition,
            start=start,
            until=account.frontier,
            sessions=sessions,
            swapped_ranges=swapped_ranges,
            reason=reason,
        )

    def _swapped_ranges_of(
        self, partition: Partition, name: str, session: Session
    ) -> SwappedRanges:
        """Where the messages of a session that a person named were swapped. Raises `IntegrityError`
        if it waits for a message that is not there.
        """
        missing = self._missing_messages(partition, {name: session}).get(name)
        if missing is None:
            return {}
        refusal = self._missing_message_refusal(partition, name, missing)
        if refusal is not None:
            raise refusal
        return {name: _swapped_range(session, missing)}

    def _well_sessions(self, partition: Partition, name: str | None = None) -> list[WellSession]:
        """The last sessions of a partition whose damage is over; only the one of this name, if
        one is given.
        """
        topic_id = self.account(partition).topic_id
        well_sessions: dict[str, WellSession] = {}
        for gap in self.history.gaps:
            if gap.topic_partition != partition or gap.topic_id != topic_id:
                continue
            if gap.session is None or (name is not None and gap.session != name):
                continue
            # The order is that of the last damage of each session.
            well_sessions.pop(gap.session, None)
            if gap.until is not None:
                well_sessions[gap.session] = WellSession(
                    session=gap.session,
                    partition=partition,
                    since=gap.until,
                    ended_by=gap.closed_how or "",
                )
        return list(well_sessions.values())[-SESSIONS_NAMED_MAX:]

    def _load_session(self, partition: Partition, name: str) -> Session:
        """The state of a session in a partition. A session that is not there is refused."""
        state_files = self.account(partition).state
        session = self.open_stream.open_state().load(state_files, (name,)).get(name)
        if session is None:
            raise ConfigError(
                f"{self.stream_name}: there is no session {name!r} in {partition}",
                next=f"`seriatim state {self.stream_name} SESSION` looks for sessions",
            )
        return session

    def _partition_of_session_or_offset(self, request: RepairRequest) -> Partition:
        """The partition that was named, or the one in which the named session lives."""
        if request.partition:
            return require_known_partition(self.ledger, request.partition)
        if request.session is None:
            raise ConfigError(
                f"{self.stream_name}: --from needs to know where",
                next="add --partition TOPIC/NUMBER, or --session NAME",
            )
        state = self.open_stream.open_state()
        homes = locate_session(state, self.ledger, request.session)
        if len(homes) > 1:
            raise ConfigError(
                f"{self.stream_name}: session {request.session!r} lives in {len(homes)} partitions:"
                f" {', '.join(map(str, homes))}",
                next="say which with --partition TOPIC/NUMBER; `seriatim state` looks at sessions",
            )
        return homes[0]

    # The damage of a partition

    def _damages_of_partition(self, partition: Partition, *, check_digests: bool) -> list[Damage]:
        """All damage of a partition: its record files, its checks, its log, its state."""
        account = self.account(partition)
        state_damage = self._state_check.describe_damage(account)
        damages = self._damaged_record_files(
            partition, self._suspect_paths(), check_all_files=True, check_digests=check_digests
        )
        damages += self._failed_checks(partition)
        if self._is_log_cut(partition):
            frontier = self._frontier_after_refold(account, self.bounds[partition])
            reason = f"the log was cut at offset {frontier}"
            damages.append(_damage_of_range(partition, frontier, account.frontier, reason))
        if state_damage:
            damage = _damage_of_range(
                partition, account.frontier, account.frontier, f"state file {state_damage}"
            )
            damages.append(replace(damage, rebuilds_state=True))
        elif account.quarantined:
            # Only where the state is intact: which sessions are in quarantine stands in it.
            damages += self._quarantined_sessions(partition)
        return damages

    def _is_log_cut(self, partition: Partition) -> bool:
        """Whether the log ends before what was folded, or did when the partition halted."""
        account = self.account(partition)
        bounds = self.bounds.get(partition)
        if bounds is None or bounds.topic_id != account.topic_id:
            return False
        halted_by_cut = account.halt is not None and account.halt.finding == "truncated"
        return halted_by_cut or bounds.log_end < account.frontier

    def _frontier_after_refold(self, account: Account, bounds: Bounds) -> int:
        """The frontier of a partition; if its log was cut, the end of what was not cut."""
        frontier = min(account.frontier, bounds.log_end)
        halt = account.halt
        if halt is not None and halt.finding == "truncated" and halt.log_end >= 0:
            # Producers may have written again since the halt. What counts is where the cut was.
            frontier = min(frontier, halt.log_end)
        return frontier

    def _quarantined_sessions(self, partition: Partition) -> list[Damage]:
        """The sessions in quarantine, as one damage: only they are folded again."""
        account = self.account(partition)
        sessions = self.open_stream.open_state().quarantined_sessions(account.state)
        swapped_ranges: SwappedRanges = {}
        for name, missing in self._missing_messages(partition, sessions).items():
            refusal = self._missing_message_refusal(partition, name, missing)
            if refusal is None:
                swapped_ranges[name] = _swapped_range(sessions[name], missing)
            else:
                # Folding again what is there brings no message back.
                del sessions[name]
                self.notes.append(refusal.render(with_title=False))
        if not sessions:
            return []
        names = sorted(sessions)
        reason = f"{count_of(len(names), 'session')} in quarantine: "
        reason += list_some(
            [_describe_quarantine(name, sessions[name]) for name in names], SESSIONS_NAMED_MAX
        )
        if swapped_ranges:
            reason += f"; swapped messages of {len(swapped_ranges)} are put into order"
        if len(swapped_ranges) < len(names):
            others = "the others only" if swapped_ranges else "only"
            reason += f"; it helps {others} if the machine or the stream file was changed since"
        finding_offsets = [session.finding_offset for session in sessions.values()]
        refold = RefoldRequest(
            partition=partition,
            start=min(finding_offsets),
            until=account.frontier,
            sessions=tuple(names),
            swapped_ranges=swapped_ranges,
            reason=reason,
        )
        return [Damage(request=refold, damaged_until=max(finding_offsets) + 1)]

    def _missing_messages(
        self, partition: Partition, sessions: SessionsByName
    ) -> dict[str, MissingMessage]:
        """What Kafka has of the messages that sessions in quarantine wait for."""
        bounds = self.bounds.get(partition)
        if bounds is None or bounds.topic_id != self.account(partition).topic_id:
            return {}
        return MissingMessageSearch(self.open_stream).search(partition, sessions, bounds)

    def _missing_message_refusal(
        self, partition: Partition, name: str, missing: MissingMessage
    ) -> IntegrityError | None:
        """Why folding a session again cannot help; None if it can: its messages were swapped, and
        all of them were folded before.
        """
        stream = self.open_stream.stream
        advice = missing_message_advice(
            stream.name, stream.snapshot_requests, str(partition), name, missing
        )
        if missing.arrived_offset is not None:
            if missing.arrived_offset < self.account(partition).frontier:
                return None
            advice = f"seriatim run {self.stream_name}\nthen {advice}"
        reason = f": {missing.describe()}"
        if missing.never_came:
            reason = f", because {NEVER_CAME}{reason}"
        return IntegrityError(
            f"{self.stream_name}: session {printable_session(name)} in {partition} is not made"
            f" right by folding again{reason}",
            next=advice,
        )

    def _failed_checks(self, partition: Partition) -> list[Damage]:
        """The ranges whose check failed and that were not repaired yet."""
        account = self.account(partition)
        damages: list[Damage] = []
        for failed in self.ledger.failed_ranges:
            if failed.partition != str(partition):
                continue
            is_repaired = failed.replaced_by_sequence >= 0
            if is_repaired or failed.start >= account.frontier:
                continue
            reason = f"its check failed (verdict up to entry {failed.judged_until})"
            damages.append(_damage_of_range(partition, failed.start, failed.until, reason))
        return damages

    def _damaged_record_files(
        self,
        partition: Partition,
        suspects: Iterable[str],
        *,
        check_all_files: bool = False,
        check_digests: bool = False,
    ) -> list[Damage]:
        """The ranges of record files that are in a table and not as committed.

        Suspect files are always checked by their digest. All other files are checked only with
        `check_all_files`: by their digest with `check_digests`, else by their size.
        """
        history = self.history.of_partition(partition)
        topic_id = self.account(partition).topic_id
        origins: dict[str, FileOrigin] = {}
        for origin in (*self._active_files(history), *history.other_record_files.values()):
            # Files of a topic that was deleted cannot be made again.
            if origin.topic_id == topic_id:
                origins[origin.file.path] = origin
        suspect_files = [origins[path].file for path in suspects if path in origins]
        damaged = self.joiner.find_damaged_files(suspect_files)
        if check_all_files:
            all_files = [origin.file for origin in origins.values()]
            damaged |= self.joiner.find_damaged_files(all_files, check_digests=check_digests)
        damages: list[Damage] = []
        for path, defect in sorted(damaged.items()):
            origin = origins[path]
            reason = f"record file {path}: {defect}"
            damages.append(_damage_of_range(partition, origin.start, origin.until, reason))
        return damages

    def _active_files(self, history: PartitionHistory) -> list[FileOrigin]:
        """The record files of a partition that are in the table of records now."""
        origins = history.record_files
        return [origins[path] for path in self.active_paths if path in origins]

    def _suspect_paths(self) -> set[str]:
        """Files that verify found to differ, or that a refold could not read."""
        return {*self.open_stream.ledger.differing_files(), *self.suspects}

    # The refold of a damage

    def _repair_partition(self, damages: Sequence[Damage], *, forward: bool) -> None:
        """Plan the actions for the damage that was found in one partition."""
        partition = damages[0].request.partition
        recreated = self._recreated_topic_error(partition)
        if recreated is not None:
            self.notes.append(recreated.render(with_title=False))
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
        self.notes.append(note.render(with_title=False))

    def _refold(self, damages: Sequence[Damage], *, follows_cut_log: bool = False) -> RefoldAction:
        """One refold for all damages of a partition. Raises `IntegrityError` if it is refused.

        `follows_cut_log`: if the log was cut, the partition goes back to its end; without this a
        cut log is refused.
        """
        damage = merge_damages(damages)
        rewind = self._choose_rewind(damage, follows_cut_log=follows_cut_log)
        self._refuse_files_written_by_others(rewind)
        if damage.rebuilds_state:
            self._refuse_compacted(rewind)
        return RefoldAction(rewind)

    def _choose_rewind(self, damage: Damage, *, follows_cut_log: bool) -> Rewind:
        """Where the refold begins and ends. Raises `IntegrityError` if what it needs is gone."""
        request = damage.request
        partition = request.partition
        account = self.account(partition)
        bounds = require_same_topic(
            self.stream_name, partition, account, self.bounds.get(partition)
        )
        frontier = self._frontier_after_refold(account, bounds)
        is_log_cut = frontier < account.frontier
        if is_log_cut and not follows_cut_log:
            raise self._cut_log_error(partition, account, frontier)
        start = min(request.start, frontier)
        until = min(max(request.until, start), frontier)
        is_state_damaged = bool(self._state_check.describe_damage(account))
        rebuilds_state = damage.rebuilds_state or is_log_cut or is_state_damaged
        request = replace(
            request,
            start=start,
            until=until,
            sessions=None if rebuilds_state else request.sessions,
        )
        history = self.history.of_partition(partition)
        chooser = RewindChooser(
            account, bounds.log_start, history, self._state_check.describe_damage
        )
        base = chooser.find_base(start)
        if base.point is None:
            is_halted = account.halt is not None or is_state_damaged
            raise self._no_base_error(request, base, bounds.log_start, is_halted=is_halted)
        rewind = chooser.rewind(request, base.point.account, base.point.sequence, frontier)
        commit_points = history.commit_points(until, frontier)
        return replace(
            rewind,
            commit_offsets=tuple(point.account.frontier for point in commit_points),
            rebuilds_state=rebuilds_state,
        )

    def _recreated_topic_error(self, partition: Partition) -> ConfigError | None:
        """The error that says that a topic was created again; None if it was not."""
        bounds = self.bounds.get(partition)
        if bounds is None or bounds.topic_id == self.account(partition).topic_id:
            return None
        return recreated_topic_error(self.stream_name, partition)

    def _cut_log_error(self, partition: Partition, account: Account, end: int) -> IntegrityError:
        return IntegrityError(
            f"{self.stream_name}: {partition} cannot be folded again: its log was cut at offset"
            f" {end}, and it was folded up to {account.frontier}",
            next="first follow the log back to where it ends:"
            f" seriatim repair {self.stream_name} --partition {partition}",
        )

    def _no_base_error(
        self, request: RefoldRequest, base: BaseSearch, log_start: int, *, is_halted: bool
    ) -> IntegrityError:
        """No saved state leads to the damage: Kafka has lost messages, or the states are damaged."""
        expired_offset = base.expired_offset
        if expired_offset >= 0:
            loss = (
                f"it would begin at offset {expired_offset}, and Kafka has nothing before offset"
                f" {log_start}: [{expired_offset}, {log_start}) is gone"
            )
            return lost_messages_error(
                self.stream_name, request.partition, loss, is_halted=is_halted
            )
        return IntegrityError(
            f"{self.stream_name}: {request.partition} cannot be folded again: no state at or before"
            f" offset {request.start} is as committed",
            cause=base.damage[:600],
            next="restore one of these files from a backup, then repair again",
        )

    def _refuse_files_written_by_others(self, rewind: Rewind) -> None:
        """Refuse a refold of records that another program moved into files of its own.

        Such a file holds records of several partitions, so it cannot be replaced for one of them.
        """
        files = self._files_written_by_others()
        if self._have_records_of(files, rewind.partition, rewind.start):
            raise _rewritten_files_error(self.stream_name, rewind.partition, files)

    def _files_written_by_others(self) -> list[File]:
        """Files in the table that no entry of the ledger made."""
        known_paths: set[str] = set()
        for history in self.history.partitions.values():
            known_paths.update(history.record_files)
        if self.active_paths <= known_paths:
            return []
        active_files = self.open_stream.ledger.active_files(self.head)
        return [file for file in active_files if file.path not in known_paths]

    def _have_records_of(self, files: list[File], partition: Partition, start: int) -> bool:
        """Whether files of other programs have records of a partition from an offset on."""
        if not files:
            return False
        partition_life = (partition, self.account(partition).topic_id)
        return self.joiner.has_records_in(files, OffsetRange(start, END_OFFSET), partition_life)

    def _refuse_compacted(self, rewind: Rewind) -> None:
        """Refuse to fold state again from a log out of whose middle compaction took messages.

        The log start does not show this, so the range is read. Only a topic that is compacted can
        lose messages in this way.
        """
        partition = rewind.partition
        past_reader = self.open_stream.past_reader
        if not past_reader.is_compacted(partition.topic):
            return
        losses: list[MessageLoss] = []
        proofs = self.history.of_partition(partition).slice_proofs()
        detector = LossDetector(partition, proofs, past_reader)
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
        if not damage.rebuilds_state or partition not in self.bounds:
            return False
        if self._is_log_cut(partition):
            return False
        return not self._have_records_of(self._files_written_by_others(), partition, 0)

    # Partitions that wait

    def _plan_halts(self, request: RepairRequest) -> None:
        """Decide about every partition of the request that is halted."""
        refolded_partitions = {action.partition for action in self.actions}
        for partition in self._partitions_of_request(request):
            halt = self.account(partition).halt
            if halt is None or partition in self._recreated:
                continue
            if halt.finding == "truncated" and partition in refolded_partitions:
                continue  # The refold ends where the log ends, and this lifts the halt.
            try:
                self.actions.append(self._action_for_halt(partition, halt, request))
            except SeriatimError as error:
                if request.forward and request.partition:
                    raise
                self.notes.append(error.render(with_title=False))

    def _action_for_halt(
        self, partition: Partition, halt: Halt, request: RepairRequest
    ) -> LiftHaltAction | ForwardAction:
        """How a halted partition goes on. Raises `IntegrityError` if a person must decide first."""
        account = self.account(partition)
        bounds = self.bounds.get(partition)
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
        account = self.account(partition)
        bounds = self.bounds.get(partition)
        if bounds is None or bounds.topic_id != account.topic_id:
            return None
        if bounds.log_end <= account.frontier:
            return None
        start = max(account.frontier, bounds.log_start)
        batches = self.open_stream.past_reader.read(partition, OffsetRange(start, bounds.log_end))
        first_batch = next(iter(batches), None)
        first_message = bounds.log_end if first_batch is None else first_batch.start
        if first_message == start:
            return start
        # Transaction markers and compacted messages leave holes that are no loss.
        hole = OffsetRange(start, first_message)
        lost_ends: list[int] = []
        for piece, cause in self.open_stream.explain(partition, hole):
            if cause in LOSS_FINDINGS:
                lost_ends.append(piece.end)
        return max(lost_ends, default=start)

    # Files that no refold can replace, and files that nothing needs

    def _note_unrecoverable_files(self) -> None:
        """Note what to do about damaged files that Kafka cannot give back.

        Those are files of a partition that is retired, and of a topic that was deleted and
        created again.
        """
        for partition, history in self.history.partitions.items():
            account = self.account(partition)
            files = [
                origin.file
                for origin in self._active_files(history)
                if account.retired or origin.topic_id != account.topic_id
            ]
            cause = "it is of an earlier life of its topic"
            if account.retired:
                cause = "its partition is retired"
            damaged = self.joiner.find_damaged_files(files, check_digests=False)
            for path, defect in damaged.items():
                error = IntegrityError(
                    f"{self.stream_name}: record file {path}: {defect}",
                    cause=cause,
                    next="restore this file from a backup",
                )
                self.notes.append(error.render(with_title=False))

    def unneeded_damaged_files(self, partition_name: str = "") -> list[str]:
        """Damaged files that verify found, that nothing needs any more, and that still exist; only
        those of one partition, if one is named.
        """
        needed_paths = set(self.active_paths)
        for account in self.ledger.partitions.values():
            needed_paths |= {file.path for file in account.state}
        for history in self.history.partitions.values():
            needed_paths.update(history.other_record_files)
        committed_files = self._all_committed_files(partition_name)
        candidates = [
            committed_files[path]
            for path in self._suspect_paths()
            if path in committed_files and path not in needed_paths
        ]
        if not candidates:
            return []
        # A file that is gone counts as damaged too, but there is nothing of it to delete.
        existing_paths: set[str] = set()
        for partition in self.history.partitions:
            existing_paths.update(self.open_stream.records.paths(partition))
        existing_files = [file for file in candidates if file.path in existing_paths]
        return sorted(self.joiner.find_damaged_files(existing_files))

    def _all_committed_files(self, partition_name: str) -> dict[str, File]:
        """Every record file and state file that an entry of the ledger ever made, by path; only those
        of one partition, if one is named.
        """
        files: dict[str, File] = {}
        for partition, history in self.history.partitions.items():
            if partition_name not in ("", str(partition)):
                continue
            for path, origin in history.all_record_files.items():
                files[path] = origin.file
            for point in history.points:
                for file in point.change.state or ():
                    files[file.path] = file
        return files


def _damage_offset_of_session(session: Session) -> int | None:
    """The offset at which a session went wrong; None if nothing is known to be wrong with it."""
    offset = session.damaged_since_offset
    if session.finding is not None:
        offset = session.finding_offset
    if offset < 0:
        return None
    return offset


def _swapped_range(session: Session, missing: MissingMessage) -> tuple[tuple[int, int], ...]:
    """From the message with which the gap was found to the one with which all were there."""
    arrived_offset = missing.arrived_offset or session.finding_offset
    return ((session.finding_offset, arrived_offset + 1),)


def _damage_of_range(partition: Partition, start: int, until: int, reason: str) -> Damage:
    request = RefoldRequest(partition=partition, start=start, until=until, reason=reason)
    return Damage(request=request)


def _rewritten_files_error(
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


def _describe_quarantine(name: str, session: Session) -> str:
    """A session in quarantine, with what it is there for."""
    return f"{printable_session(name)} ({session.finding} at offset {session.finding_offset})"
