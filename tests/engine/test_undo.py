"""What a raise costs, and that going back by repeating messages gives what saving each state gives."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec import Struct

from seriatim.engine import undo
from seriatim.engine.fold import Fold
from seriatim.engine.machine import Machine, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.stream import parse_stream
from seriatim.testing import MemoryStream, fold

PLACE = Partition("in", 0)


class Shelf(Struct):
    """What lies where; it counts how often it is read back from bytes."""

    things: dict[str, int] = {}
    decoded: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Shelf.decoded += 1


class Put(Struct, kw_only=True):
    """Something is put somewhere; with `whole` it is all that lies there."""

    seq: int = 0
    whole: dict[str, int] | None = None
    place: str = "p"
    thing: int = 0
    trouble: str = ""


class Change(Struct):
    """A place and what lies there."""

    place: str
    thing: int


class Shelves(Machine[Shelf, Put, Change]):
    """Changes its state before it fails, and keeps the dict of a snapshot's message as its own."""

    applied = 0
    odd_raise = 0
    """The number of the call of `apply` that raises, whatever its message is."""

    def start(self, _session: str) -> Shelf:
        """Empty."""
        return Shelf({})

    def is_snapshot(self, message: Put) -> bool:
        """All that lies there."""
        return message.whole is not None

    def apply(self, shelf: Shelf, message: Put) -> Iterable[Change]:
        """One record for each message, after the state was changed."""
        Shelves.applied += 1
        if message.whole is not None:
            shelf.things = message.whole
        before = shelf.things.get(message.place, 0)
        shelf.things[message.place] = (before * 3 + message.thing) % 1_000_003
        if message.trouble == "apply" or Shelves.applied == Shelves.odd_raise:
            raise ValueError("dropped it")
        if message.trouble == "dump":
            shelf.things[message.place] = "not a number"  # type: ignore[assignment]
        yield Change(message.place, "text" if message.trouble == "check" else message.thing)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def counted_from_zero() -> None:
    """Each test counts for itself."""
    Shelf.decoded, Shelves.applied, Shelves.odd_raise = 0, 0, 0


def decoded_states(messages: list[Put]) -> int:
    """How often a state was read back while the messages were folded."""
    before = Shelf.decoded
    fold(Shelves, messages)
    return Shelf.decoded - before


def test_a_raise_at_the_last_message_decodes_a_few_states_and_not_one_per_message() -> None:
    """A state is dumped and read back a fixed number of times more than without the raise."""
    messages = [Put(whole={}), *(Put(thing=number) for number in range(300))]
    clean = decoded_states(messages)
    assert decoded_states([*messages[:-1], Put(trouble="apply")]) <= clean + 6


def test_every_raise_of_a_session_costs_a_few_states() -> None:
    """Fifty raises among 1,000 messages, each followed by a snapshot, cost a few states each."""
    messages = [Put(whole={}, thing=number) for number in range(1_000)]
    clean = decoded_states(messages)
    for number in range(10, 1_000, 20):
        messages[number] = Put(trouble="apply")
    assert decoded_states(messages) <= clean + 50 * 5


def world_of(messages: list[tuple[str, Put]], slice_size: int, tier: str) -> dict[str, Any]:
    """Everything that can be seen of a stream after it folded the messages."""
    fields: dict[str, Any] = {
        "topics": "in",
        "machine": "m:Shelves",
        "tier": tier,
        "sequence": "seq",
        "output": {"path": "memory"},
    }
    if tier == "window":
        fields["window_messages"] = 3
    world = MemoryStream(
        parse_stream("s", fields, "test"), lambda: UserMachine("m:Shelves", Shelves, "seq")
    )
    world.kafka.create("in")
    for session, message in messages:
        world.kafka.produce("in", session, msgspec.json.encode(message))
    outcome = world.run(slice_size)
    sessions = {
        name: {field: getattr(session, field) for field in session.__struct_fields__}
        for name, session in world.sessions(PLACE).items()
    }
    kept = [msgspec.structs.replace(found, level="") for found in outcome.findings]
    return {
        "rows": world.rows(),
        "sessions": sessions,
        "findings": kept,
        "account": world.accounts()[PLACE].counts,
    }


def random_messages(seed: int, tier: str) -> list[tuple[str, Put]]:
    """Messages of two sessions with some trouble; in tier window some of them change places."""
    chance = random.Random(seed)
    messages: list[tuple[str, Put]] = []
    for number in range(60):
        for session in ("a", "b"):
            trouble = chance.choices(["", "apply", "check"], [12, 2, 1])[0]
            whole = {"p": number} if number == 0 or chance.random() < 0.2 else None
            place = chance.choice("pqr")
            messages.append(
                (session, Put(seq=number, whole=whole, place=place, thing=number, trouble=trouble))
            )
    if tier == "window":
        for at in chance.sample(range(2, len(messages) - 4), 15):
            messages[at], messages[at + 2] = messages[at + 2], messages[at]
    return messages


@pytest.mark.parametrize("tier", ["strict", "window"])
@pytest.mark.parametrize("seed", range(12))
def test_repeating_messages_gives_what_saving_each_state_gives(
    seed: int, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, states, findings and counts are the same as with a state saved before every message."""
    monkeypatch.setattr(undo, "REMEMBERED_BYTES_MIN", 200)
    messages = random_messages(seed, tier)
    by_slice = {size: world_of(messages, size, tier) for size in (7, 31, 1_000)}

    def save_each(fold: Fold, name: str, _offset: int) -> None:
        if not fold.sessions[name].is_undoable:
            fold.half_changed_sessions[name] = undo.EACH_MESSAGE

    monkeypatch.setattr(Fold, "distrust", save_each)
    for size, seen in by_slice.items():
        assert seen == world_of(messages, size, tier)
    assert by_slice[7]["rows"] == by_slice[1_000]["rows"], "slicing changes nothing"
    assert any(finding.finding == "raised" for finding in by_slice[7]["findings"])


def test_a_state_that_cannot_be_saved_is_found_at_its_message_also_after_a_raise() -> None:
    """The session is set aside at the first message that spoils its state, with the state before
    it.
    """
    messages = [
        Put(whole={}, thing=1),
        Put(trouble="apply"),
        Put(whole={}, thing=2),
        Put(place="q", trouble="dump"),
        Put(place="r", thing=4),
    ]
    done = fold(Shelves, messages)
    assert [(finding.finding, finding.offset) for finding in done.findings] == [
        ("raised", 1),
        ("raised", 3),
    ]
    assert done.state == Shelf({"p": 2})


def test_a_state_spoiled_before_a_raise_is_found_at_its_own_message() -> None:
    """Not at the later message that raises: the state before that one could not be saved either."""
    done = fold(
        Shelves, [Put(whole={}, thing=1), Put(place="q", trouble="dump"), Put(trouble="apply")]
    )
    assert [(finding.finding, finding.offset) for finding in done.findings] == [("raised", 1)]
    assert done.state == Shelf({"p": 1})


def test_a_message_that_raises_only_when_it_is_repeated_ends_no_run_and_loops_nowhere() -> None:
    """The next try saves the state before each message, and needs no message twice."""
    messages = [
        Put(whole={}, thing=1),
        Put(trouble="apply"),
        Put(whole={}, thing=2),
        Put(thing=3),
        Put(trouble="apply"),
    ]
    # Calls 1 to 5 are the first try and 6 to 10 the second; 11 repeats the snapshot, for the raise of the last message.
    Shelves.odd_raise = 11
    done = fold(Shelves, messages)
    assert [(finding.finding, finding.offset) for finding in done.findings] == [
        ("raised", 1),
        ("raised", 4),
    ]
    assert done.state == Shelf({"p": 9})
    assert Shelves.applied == 16, "three tries and one message repeated"


def test_a_raise_before_the_known_one_is_undone_in_the_next_try() -> None:
    """A machine that raises at an earlier message when it is folded again is folded a third time,
    with care.
    """
    messages = [Put(whole={}, thing=1), Put(place="q", thing=2), Put(place="q", trouble="apply")]
    Shelves.odd_raise = 5
    done = fold(Shelves, messages)
    assert [(finding.finding, finding.offset) for finding in done.findings] == [("raised", 2)]
    assert done.state == Shelf({"p": 1, "q": 2})
