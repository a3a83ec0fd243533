"""What a repair was asked to do, and what it would do about it. These are values only.

A plan is one list of actions. Showing the plan and applying it go through the same list.

Next: operations/repair/planner.py makes the actions of a plan; operations/repair/repair.py makes
the plan and applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import msgspec
from msgspec import Struct, field

from seriatim.engine.findings import shell_quote
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.model import Change, Halt, Ledger
from seriatim.operations.repair.refold_rules import RefoldRequest, Rewind


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
            machine_option = " --machine unchanged" if self.unchanged else ""
            ranges = ", ".join(
                f"{partition} [{start}, {until})"
                for partition, (start, until) in sorted(self.ranges.items())
            )
            return f"seriatim backfill {stream}{machine_option}, of {ranges}"
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
    distinct_reasons = dict.fromkeys(damage.request.reason for damage in damages)
    merged_request = RefoldRequest(
        partition=damages[0].request.partition,
        start=min(damage.request.start for damage in damages),
        until=max(ends),
        reason="; ".join(distinct_reasons),
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
    deleted_files: tuple[str, ...] = ()
    """Damaged files that are deleted: nothing needs them but a look back."""
    resumed_hold: str | None = None
    """The hold of an earlier attempt that this plan goes on from."""

    held_partitions: tuple[Partition, ...] = ()
    """The partitions that the earlier attempt holds."""

    holds: tuple[Hold, ...] = ()
    """All holds on what was asked for, also that of the earlier attempt."""

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
