"""Repair: what was asked for, and what is to be done about it. Values: the rules are elsewhere.

A plan is one list of parts. Showing it and applying it walk the same list.

Next room: refold.py and repair_forward.py have the rules; operations/repair/repair.py finds what is
hurt and makes the plan.
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
    """What a person asked for. It is kept with the hold, so that the repair can be resumed by its
    id.
    """

    partition: str = ""
    """Only this one."""
    session: str | None = None
    start: int | None = None
    """From this offset on."""
    forward: bool = False
    """Go on without what is gone."""
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Backfill: what is folded again, by partition."""
    unchanged: bool = False
    """Backfill: the code is the one that made it; what it makes otherwise is refused."""

    def to_json(self) -> str:
        """As the hold keeps it."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @classmethod
    def from_json(cls, text: str) -> RepairRequest:
        """As it was asked."""
        return msgspec.json.decode(text, type=cls) if text else cls()

    @property
    def is_unrestricted(self) -> bool:
        """Whether it names nothing: repair is to find what is hurt, everywhere or in one partition."""
        return self == RepairRequest(partition=self.partition)

    def to_command(self, stream: str) -> str:
        """What a person would type for it."""
        if self.ranges:
            places = ", ".join(
                f"{place} [{start}, {until})"
                for place, (start, until) in sorted(self.ranges.items())
            )
            return (
                f"seriatim backfill {stream}{' --machine unchanged' * self.unchanged}, of {places}"
            )
        words = [f"seriatim repair {stream}"]
        words += [f"--partition {self.partition}"] if self.partition else []
        words += [f"--session {shell_quote(self.session)}"] if self.session is not None else []
        words += [f"--from {self.start}"] if self.start is not None else []
        return " ".join([*words, *(["--forward"] if self.forward else [])])


class Hold(Struct, frozen=True):
    """A repair that holds partitions: it is at work, or it died."""

    id: str
    partitions: tuple[Partition, ...]
    request: RepairRequest

    def describe(self, stream: str) -> dict[str, str]:
        """For people: what it was asked, and what to do about it if it died."""
        return {
            "held": ", ".join(map(str, self.partitions)),
            "asked": self.request.to_command(stream),
            "go on": f"seriatim repair {stream} --resume {self.id}",
            "give up": f"seriatim repair {stream} --abandon {self.id}",
        }


class Damage(Struct, frozen=True, kw_only=True):
    """One thing that is wrong in a partition, and what would be folded again for it alone."""

    request: RefoldRequest
    damaged_until: int = -1
    """Where the hurt itself ends, if that is before the end of what is wanted: sessions alone are
    folded on cheaply.
    """
    rebuilds_state: bool = False
    """State is made anew."""


def merge_damages(damages: Sequence[Damage]) -> Damage:
    """Things that are wrong in one partition as one: from the first to the last of them."""
    if len(damages) == 1:
        return damages[0]
    wanted = [one.request for one in damages]
    return Damage(
        request=RefoldRequest(
            partition=wanted[0].partition,
            start=min(one.start for one in wanted),
            until=max(
                one.damaged_until if one.damaged_until >= 0 else one.request.until
                for one in damages
            ),
            reason="; ".join(dict.fromkeys(one.reason for one in wanted)),
        ),
        rebuilds_state=any(one.rebuilds_state for one in damages),
    )


class RefoldAction(Struct, frozen=True):
    """A range is rewound and folded again."""

    rewind: Rewind

    @property
    def partition(self) -> Partition:
        """Where it is."""
        return self.rewind.partition


class LiftHaltAction(Struct, frozen=True):
    """A partition that waits goes on: what it waited for is there now, or is to be tried again."""

    partition: Partition
    halt: Halt
    reason: str


class ForwardAction(Struct, frozen=True):
    """A partition goes on after messages that are gone. The gap is published."""

    halt: Halt
    change: Change

    @property
    def partition(self) -> Partition:
        """Where it is."""
        return self.change.partition

    @property
    def passed_range(self) -> OffsetRange:
        """What is gone."""
        return OffsetRange(self.change.frontier, self.change.until)


class RebuildStateAction(Struct, frozen=True):
    """A partition goes on though state files are damaged and Kafka has not what made them: with
    what else is known.
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
    """The entry as of which it was made."""
    approval: str
    """Changes when an epoch or a halt of its partitions does: an approval of then is void."""
    actions: tuple[RepairAction, ...] = ()
    notes: tuple[str, ...] = ()
    """What is hurt and cannot be mended like this, and what to do instead."""
    deleted_files: tuple[str, ...] = ()
    """Damaged files that nothing needs any more but a look back: they are deleted."""
    resumed_hold: str | None = None
    """The hold of an earlier try that it goes on from."""

    held_partitions: tuple[Partition, ...] = ()
    """What that try holds."""

    holds: tuple[Hold, ...] = ()
    """All holds on what was asked for, that one among them."""

    @property
    def partitions(self) -> list[Partition]:
        """Those that it changes, and those that an earlier try holds."""
        return sorted({*(part.partition for part in self.actions), *self.held_partitions})

    @property
    def blocking_holds(self) -> list[Hold]:
        """Holds of other repairs on what it would change: it replaces none of them."""
        mine = set(self.partitions)
        return [
            hold
            for hold in self.holds
            if hold.id != self.resumed_hold and mine.intersection(hold.partitions)
        ]


def compute_approval(ledger: Ledger, request: RepairRequest, partitions: list[Partition]) -> str:
    """What an approval is tied to: the request, and the epochs and halts of the partitions it
    changes.
    """
    accounts = {str(partition): ledger.partitions[str(partition)] for partition in partitions}
    seen = [(place, account.epoch, account.halt) for place, account in sorted(accounts.items())]
    return sha256(
        msgspec.json.encode((request.to_json(), seen), order="deterministic")
    ).hexdigest()[:16]
