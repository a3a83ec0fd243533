"""A machine that raises far into a session, in the middle of a message: its records still fold to
its state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from seriatim.engine.machine import Machine, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.stream import OutputSettings, Stream
from seriatim.testing import MemoryStream

FATAL = 1_000
AFTER = 40
P = Partition("in", 0)


class Shelf(Struct):
    """What lies where."""

    things: dict[str, int] = {}


class Whole(Struct, tag="whole"):
    """All that lies there."""

    things: dict[str, int]


class Put(Struct, tag="put"):
    """Something is put where something else may have been taken away."""

    place: str
    thing: int
    instead_of: str | None = None


class Change(Struct):
    """A place that changed; without a thing it is empty now."""

    place: str
    thing: int | None = None


class Clumsy(Machine[Shelf, Whole | Put, Change]):
    """Takes away before it puts, and raises in between at its 1,000th message."""

    def start(self, _session: str) -> Shelf:
        """Empty."""
        return Shelf({})

    def is_snapshot(self, message: Whole | Put) -> bool:
        """All of it."""
        return isinstance(message, Whole)

    def apply(self, shelf: Shelf, message: Whole | Put) -> Iterable[Change]:
        """A record for each place that changed, the emptied first."""
        if isinstance(message, Whole):
            gone = [place for place in shelf.things if place not in message.things]
            news = message.things
        else:
            gone = [place for place in (message.instead_of,) if place in shelf.things]
            news = {message.place: message.thing}
        for place in gone:
            del shelf.things[place]
            yield Change(place)
        if FATAL in news.values():
            raise RuntimeError("dropped it")
        for place, thing in news.items():
            shelf.things[place] = thing
            yield Change(place, thing)


def put(number: int) -> Put:
    """Every third one takes something away; the fatal one does, too."""
    old = f"p{(number * 5) % 12}" if number % 3 == 0 or number == FATAL else None
    return Put(f"p{number % 12}", number, old)


def folded(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What lies where by the records alone; an empty place must have held something."""
    shelves: dict[str, dict[str, int]] = {}
    for row in rows:
        shelf = shelves.setdefault(row["session"], {})
        if row["thing"] is None:
            del shelf[row["place"]]
        else:
            shelf[row["place"]] = row["thing"]
    return shelves


def things(world: MemoryStream) -> dict[str, dict[str, int]]:
    """What lies where by the saved state."""
    saved = {name: session.state_bytes or b"" for name, session in world.sessions(P).items()}
    return {
        name: msgspec.msgpack.decode(content, type=Shelf).things for name, content in saved.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("slice_size", [97, FATAL, 1_000_000])
def test_records_fold_to_the_state_after_the_next_snapshot(slice_size: int) -> None:
    """Deletes included: what the fatal message had taken away is there again, until the snapshot
    says otherwise.
    """
    stream = Stream(
        name="s",
        topics="in",
        machine="m:Clumsy",
        tier="strict",
        output=OutputSettings(path="memory"),
    )
    world = MemoryStream(stream, lambda: UserMachine("m:Clumsy", Clumsy))
    world.kafka.create("in")
    sent = [
        Whole({f"p{i}": -i for i in range(12)}),
        *(put(number) for number in range(2, FATAL + AFTER)),
    ]
    for message in sent:
        for session in ("hurt", "too"):
            world.kafka.produce("in", session, msgspec.json.encode(message))

    findings = world.run(slice_size).findings
    raised = {(found.finding, found.session, found.offset) for found in findings}
    assert raised == {("raised", "hurt", 2 * FATAL - 2), ("raised", "too", 2 * FATAL - 1)}
    assert put(FATAL).instead_of in folded(world.rows())["hurt"], "it was taken away in vain"
    assert folded(world.rows()) == things(world)

    world.kafka.produce("in", "hurt", msgspec.json.encode(Whole({"p1": 7, "new": 8})))
    world.kafka.produce("in", "hurt", msgspec.json.encode(Put("last", 9, "p1")))
    assert not world.run(slice_size).findings
    assert folded(world.rows()) == things(world)
    assert things(world)["hurt"] == {"new": 8, "last": 9}
    assert sum(row["thing"] is None for row in world.rows()) > FATAL // 5
    assert world.accounts()[P].quarantined == 1
