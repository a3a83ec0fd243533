"""Repair: what was asked for, and what is to be done about it. Values: the rules are elsewhere.

A plan is one list of parts. Showing it and applying it walk the same list.

Next room: refold.py and repair_forward.py have the rules; steps/repair.py finds what is hurt and makes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import msgspec
from msgspec import Struct, field

from seriatim.core.integrity import typed
from seriatim.core.ledger import Change, Halt, Ledger
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.refold import Rewind, Wanted


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a person asked for. It is kept with the hold, so that the repair can be resumed by its id."""

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

    def encoded(self) -> str:
        """As the hold keeps it."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @classmethod
    def decoded(cls, text: str) -> Request:
        """As it was asked."""
        return msgspec.json.decode(text, type=cls) if text else cls()

    @property
    def is_plain(self) -> bool:
        """Whether it names nothing: repair is to find what is hurt, everywhere or in one partition."""
        return self == Request(partition=self.partition)

    def command(self, stream: str) -> str:
        """What a person would type for it."""
        if self.ranges:
            places = ", ".join(f"{place} [{start}, {until})" for place, (start, until) in sorted(self.ranges.items()))
            return f"seriatim backfill {stream}{' --machine unchanged' * self.unchanged}, of {places}"
        words = [f"seriatim repair {stream}"]
        words += [f"--partition {self.partition}"] if self.partition else []
        words += [f"--session {typed(self.session)}"] if self.session is not None else []
        words += [f"--from {self.start}"] if self.start is not None else []
        return " ".join([*words, *(["--forward"] if self.forward else [])])


class Hold(Struct, frozen=True):
    """A repair that holds partitions: it is at work, or it died."""

    id: str
    partitions: tuple[Partition, ...]
    request: Request

    def says(self, stream: str) -> dict[str, str]:
        """For people: what it was asked, and what to do about it if it died."""
        return {
            "held": ", ".join(map(str, self.partitions)),
            "asked": self.request.command(stream),
            "go on": f"seriatim repair {stream} --resume {self.id}",
            "give up": f"seriatim repair {stream} --abandon {self.id}",
        }


class Hurt(Struct, frozen=True, kw_only=True):
    """One thing that is wrong in a partition, and what would be folded again for it alone."""

    wanted: Wanted
    reaches: int = -1
    """Where the hurt itself ends, if that is before the end of what is wanted: sessions alone are folded on cheaply."""
    rebuild: bool = False
    """State is made anew."""


def together(hurts: Sequence[Hurt]) -> Hurt:
    """Things that are wrong in one partition as one: from the first to the last of them."""
    if len(hurts) == 1:
        return hurts[0]
    wanted = [one.wanted for one in hurts]
    return Hurt(
        wanted=Wanted(
            partition=wanted[0].partition,
            start=min(one.start for one in wanted),
            until=max(one.reaches if one.reaches >= 0 else one.wanted.until for one in hurts),
            why="; ".join(dict.fromkeys(one.why for one in wanted)),
        ),
        rebuild=any(one.rebuild for one in hurts),
    )


class Refold(Struct, frozen=True):
    """A range is rewound and folded again."""

    rewind: Rewind

    @property
    def partition(self) -> Partition:
        """Where it is."""
        return self.rewind.partition


class Lift(Struct, frozen=True):
    """A partition that waits goes on: what it waited for is there now, or is to be tried again."""

    partition: Partition
    halt: Halt
    why: str


class Forward(Struct, frozen=True):
    """A partition goes on after messages that are gone. The gap is published."""

    halt: Halt
    change: Change

    @property
    def partition(self) -> Partition:
        """Where it is."""
        return self.change.partition

    @property
    def passed(self) -> OffsetRange:
        """What is gone."""
        return OffsetRange(self.change.frontier, self.change.until)


class Renew(Struct, frozen=True):
    """A partition goes on though state files are damaged and Kafka has not what made them: with what else is known."""

    partition: Partition
    frontier: int
    why: str


Part = Refold | Lift | Forward | Renew


class Plan(Struct, frozen=True, kw_only=True):
    """What a repair would do."""

    stream: str
    request: Request
    sequence: int
    """The entry as of which it was made."""
    approval: str
    """Changes when an epoch or a halt of its partitions does: an approval of then is void."""
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    """What is hurt and cannot be mended like this, and what to do instead."""
    drops: tuple[str, ...] = ()
    """Damaged files that nothing needs any more but a look back: they are deleted."""
    resumes: str | None = None
    """The hold of an earlier try that it goes on from."""

    held: tuple[Partition, ...] = ()
    """What that try holds."""

    holds: tuple[Hold, ...] = ()
    """All holds on what was asked for, that one among them."""

    @property
    def partitions(self) -> list[Partition]:
        """Those that it changes, and those that an earlier try holds."""
        return sorted({*(part.partition for part in self.parts), *self.held})

    @property
    def in_the_way(self) -> list[Hold]:
        """Holds of other repairs on what it would change: it replaces none of them."""
        mine = set(self.partitions)
        return [hold for hold in self.holds if hold.id != self.resumes and mine.intersection(hold.partitions)]


def approval(ledger: Ledger, request: Request, partitions: list[Partition]) -> str:
    """What an approval is tied to: the request, and the epochs and halts of the partitions it changes."""
    accounts = {str(partition): ledger.partitions[str(partition)] for partition in partitions}
    seen = [(place, account.epoch, account.halt) for place, account in sorted(accounts.items())]
    return sha256(msgspec.json.encode((request.encoded(), seen), order="deterministic")).hexdigest()[:16]
