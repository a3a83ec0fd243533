"""The kit for users: its own example, and users' machines that are right, wrong, old or hostile."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from seriatim.engine.machine import Machine, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, PlatformError
from seriatim.stream import OutputSettings, Stream
from seriatim.testing import CRASH, MemoryStream, fold, fold_table


class Book(Struct):
    """Sizes by price."""

    levels: dict[int, int] = {}


class Quote(Struct, tag="quote"):
    """Sets a level."""

    price: int
    size: int


class Trade(Struct, tag="trade"):
    """Takes from the best level."""

    size: int


class Level(Struct):
    """A level that changed."""

    price: int
    size: int


class OrderBook(Machine[Book, Quote | Trade, Level]):
    """The machine of the kit's example."""

    def start(self, _session: str) -> Book:
        """Empty."""
        return Book({})

    def apply(self, book: Book, message: Quote | Trade) -> Iterable[Level]:
        """One record per level changed."""
        price = message.price if isinstance(message, Quote) else max(book.levels)
        size = message.size if isinstance(message, Quote) else book.levels[price] - message.size
        book.levels[price] = size
        yield Level(price, size)


def test_a_trade_takes_from_the_best_level() -> None:
    """The example in the kit's docstring, word for word."""
    folded = fold(OrderBook, [Quote(price=10, size=5), CRASH, Trade(size=2)])
    assert folded.records == [Level(price=10, size=5), Level(price=10, size=3)]
    assert folded.state == Book(levels={10: 3})
    assert not folded.findings


def test_the_example_is_the_docstrings() -> None:
    """So that what people copy works."""
    import inspect

    import seriatim.testing

    body = inspect.getsource(test_a_trade_takes_from_the_best_level).splitlines()[2:]
    shown = [line.strip() for line in (seriatim.testing.__doc__ or "").splitlines()]
    assert [line.strip() for line in body if line.strip() not in shown] == []


def test_crashes_change_nothing() -> None:
    """A right machine gives the same records wherever the process ends."""
    messages = [Quote(price=10, size=5), Quote(price=11, size=1), Trade(size=1), Trade(size=2)]
    whole = fold(OrderBook, messages)
    for place in range(len(messages) + 1):
        cut = fold(OrderBook, [*messages[:place], CRASH, *messages[place:]])
        assert (cut.rows, cut.state) == (whole.rows, whole.state)


def test_a_machine_that_hides_state_in_itself_is_found_out() -> None:
    """What is not in the state does not survive a crash, and the kit shows it."""

    class Hiding(Machine[Book, Quote, Level]):
        seen = 0

        def start(self, _session: str) -> Book:
            return Book({})

        def apply(self, _book: Book, message: Quote) -> Iterable[Level]:
            self.seen += 1
            return [Level(message.price, self.seen)]

    quotes = [Quote(price=1, size=1)] * 2
    assert fold(Hiding, quotes).records != fold(Hiding, [quotes[0], CRASH, quotes[1]]).records


def test_messages_are_dicts_structs_or_bytes_of_any_session() -> None:
    """Pairs name the session; `states` has them all, `state` only a single one."""
    done = fold(
        OrderBook,
        [
            ("a", {"type": "quote", "price": 1, "size": 2}),
            ("b", b'{"type":"quote","price":3,"size":4}'),
            ("a", Trade(1)),
        ],
    )
    assert done.states == {"a": Book({1: 1}), "b": Book({3: 4})}
    assert [row["session"] for row in done.rows] == ["a", "b", "a"]
    with pytest.raises(ValueError, match="several sessions"):
        _ = done.state


def test_the_table_machine_by_keywords() -> None:
    """No stream file needed; before-columns on request."""
    messages = [{"type": "snapshot", "rows": [{"id": 1}]}, CRASH, {"type": "delete", "id": 1}]
    done = fold_table(messages, key=["id"], columns={"id": "int64"}, before=True)
    assert done.records == [
        {"op": "snapshot", "id": 1, "before_id": None},
        {"op": "delete", "id": 1, "before_id": 1},
    ]
    assert done.state == {"rows": []}
    with pytest.raises(ConfigError, match=r"table\.columns\.id"):
        fold_table([], key=["id"], columns={"id": "text"})


class Tally(Struct):
    """A sum."""

    total: int = 0


class Add(Struct):
    """Adds; `how` says how the machine misbehaves."""

    n: int
    how: str = ""
    start: bool = False


class Sum(Struct):
    """The sum so far."""

    total: int


class Hostile(Machine[Tally, Add, Sum]):
    """A machine that misbehaves when asked to, always after it has changed its state."""

    def start(self, session: str) -> Tally:
        """Zero; for one session something that is no state."""
        return {"total": "none"} if session == "unfit start" else Tally()  # type: ignore[return-value]

    def apply(self, state: Tally, message: Add) -> Iterable[Sum]:
        """Add, then misbehave."""
        state.total = message.n if message.start else state.total + message.n
        if message.how == "raise":
            raise ValueError("no such thing")
        if message.how == "exit":
            sys.exit(3)
        if message.how == "recurse":
            return self.apply(state, message)
        if message.how == "spoil":
            state.total = "text"  # type: ignore[assignment]
        if message.how == "other":
            return ["no record"]  # type: ignore[list-item]
        if message.how == "memory":
            raise MemoryError
        return [
            Sum(2**63 if message.how == "unfit" else state.total if message.how != "spoil" else 0)
        ]

    def is_snapshot(self, message: Add) -> bool:
        """Where the sum is set."""
        if message.how == "snapshot raises":
            raise KeyError("how")
        if message.how == "snapshot exits":
            sys.exit(3)
        return message.start


HOWS = ["raise", "exit", "recurse", "spoil", "other", "unfit", "snapshot raises", "snapshot exits"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("crash", [False, True])
def test_what_a_machine_does_wrong_is_undone_and_sets_its_session_aside(
    how: str, crash: bool
) -> None:
    """The state stays as before the message, others go on, and the next snapshot releases it."""
    middle = [CRASH] if crash else []
    bad, later = ("s", Add(5, how)), ("s", Add(7))
    messages = [
        ("s", Add(1, start=True)),
        ("t", Add(1, start=True)),
        *middle,
        bad,
        later,
        ("t", Add(2)),
    ]
    done = fold(Hostile, messages)
    assert [(f.finding, f.offset, f.session) for f in done.findings] == [("raised", 2, "s")]
    assert done.states == {"s": Tally(1), "t": Tally(3)}
    assert [(row["offset"], row["session"], row["total"]) for row in done.rows] == [
        (0, "s", 1),
        (1, "t", 1),
        (4, "t", 3),
    ]
    again = fold(Hostile, [*messages, ("s", Add(9, start=True)), ("s", Add(1))])
    assert again.states["s"] == Tally(10)
    assert len(again.findings) == 1


def test_the_finding_says_what_was_raised() -> None:
    """The user's own words, on one line."""
    (finding,) = fold(Hostile, [Add(1, start=True), Add(1, "raise")]).findings
    assert finding.cause == "ValueError: no such thing"
    (finding,) = fold(Hostile, [Add(1, start=True), Add(1, "unfit")]).findings
    assert "record field total takes int64" in finding.cause


def test_a_start_that_gives_no_state() -> None:
    """The session is set aside; it is not our bug."""
    done = fold(Hostile, [("unfit start", Add(1, start=True)), ("s", Add(1, start=True))])
    assert [(f.finding, f.session) for f in done.findings] == [("raised", "unfit start")]
    assert done.states == {"s": Tally(1)}


def test_out_of_memory_is_the_platforms_trouble() -> None:
    """It says nothing about the message: nothing is set aside, the run fails and may be tried
    again.
    """
    with pytest.raises(PlatformError, match="MemoryError"):
        fold(Hostile, [Add(1, start=True), Add(1, "memory")])


def test_a_machine_without_snapshots_begins_with_any_message_and_waits_when_hurt() -> None:
    """There is no headless message, and nothing but a repair releases it."""
    done = fold(OrderBook, [Trade(size=1), Quote(price=1, size=1)])
    assert [(f.finding, f.offset) for f in done.findings] == [("raised", 0)]
    assert (done.headless, done.records) == (0, [])


class OldState(Struct):
    """Version 1."""

    n: int


class NewState(Struct):
    """Version 2."""

    n: int
    doubled: bool


def versioned(version: int, state: Any, **more: Any) -> type[Machine[Any, Any, Any]]:
    """The same machine in some version."""

    def apply(_self: Any, held: Any, message: Add) -> list[Sum]:
        held.n += message.n
        return [Sum(held.n)]

    body = {
        "state_version": version,
        "start": lambda _self, _session: (
            OldState(0) if version == 1 else NewState(0, doubled=False)
        ),
        "apply": apply,
        "is_snapshot": lambda _self, message: message.start,
        "__orig_bases__": (Machine[state, Add, Sum],),
        **more,
    }
    return type("Versioned", (Machine,), body)


def upgrade(_self: Any, old: bytes, version: int) -> NewState:
    """Version 1 as version 2."""
    assert version == 1
    n = msgspec.msgpack.decode(old, type=OldState).n
    if n == 13:
        raise ValueError("unlucky")
    return NewState(2 * n, doubled=True)


def stream_of(kind: type[Machine[Any, Any, Any]]) -> MemoryStream:
    """A stream in memory with this machine."""
    stream = Stream(
        name="v", topics="in", machine="m:Versioned", output=OutputSettings(path="memory")
    )
    return MemoryStream(stream, lambda: UserMachine("m:Versioned", kind))


def two_versions(second: type[Machine[Any, Any, Any]]) -> MemoryStream:
    """Version 1 folds two sessions; then the second machine takes over."""
    world = stream_of(versioned(1, OldState))
    world.kafka.create("in")
    for session, n in (("s", 5), ("unlucky", 13), ("silent", 1)):
        world.kafka.produce("in", session, msgspec.json.encode(Add(n, start=True)))
    world.run()
    world.machine = lambda: UserMachine("m:Versioned", second)
    for session in ("s", "unlucky"):
        world.kafka.produce("in", session, msgspec.json.encode(Add(1)))
    return world


def test_older_state_is_upgraded_when_it_is_touched() -> None:
    """What upgrades goes on; what cannot is set aside with its old bytes; what is not touched stays
    old.
    """
    world = two_versions(versioned(2, NewState, upgrade=upgrade))
    outcome = world.run()
    assert [(f.finding, f.session, f.cause) for f in outcome.findings] == [
        ("raised", "unlucky", "ValueError: unlucky")
    ]
    sessions = world.sessions(Partition("in", 0))
    assert {name: session.state_version for name, session in sessions.items()} == {
        "s": 2,
        "unlucky": 1,
        "silent": 1,
    }
    assert world.machine().load(sessions["s"].state_bytes or b"", 2) == NewState(11, doubled=True)
    assert sessions["unlucky"].state_bytes == msgspec.msgpack.encode(OldState(13))


def test_newer_code_without_an_upgrade_is_refused() -> None:
    """Before anything is read."""
    world = two_versions(versioned(2, NewState))
    with pytest.raises(ConfigError, match="no `upgrade`"):
        world.run()


def test_older_code_is_refused() -> None:
    """Once version 2 has written, version 1 would misread it."""
    world = two_versions(versioned(2, NewState, upgrade=upgrade))
    world.run()
    world.machine = lambda: UserMachine("m:Versioned", versioned(1, OldState))
    with pytest.raises(ConfigError, match="knows only 1"):
        world.run()


def test_another_machine_is_refused() -> None:
    """Its state would be misread."""
    world = two_versions(versioned(1, OldState))
    world.machine = lambda: UserMachine("m:Other", versioned(1, OldState))
    with pytest.raises(ConfigError, match="m:Other"):
        world.run()


class Loose(Struct):
    """A state whose type says less than it holds."""

    last: Any = None


def test_a_crash_shows_state_that_bytes_change() -> None:
    """A tuple comes back as a list, so the records depend on where a slice ends: docs/STREAMS.md
    says how to see it.
    """

    class Forgetful(Machine[Loose, Trade, Level]):
        """Tells a tuple from a list."""

        def start(self, _session: str) -> Loose:
            """Nothing yet."""
            return Loose()

        def apply(self, state: Loose, message: Trade) -> Iterable[Level]:
            """Depends on what the state is made of."""
            yield Level(int(isinstance(state.last, list)), message.size)
            state.last = (message.size,)

    trades = [Trade(1), Trade(2)]
    assert fold(Forgetful, trades).records != fold(Forgetful, [trades[0], CRASH, trades[1]]).records
    assert (
        fold(OrderBook, [Quote(1, 2), *trades]).records
        == fold(OrderBook, [Quote(1, 2), CRASH, *trades]).records
    )
