"""Users' machines: their types become decoders, columns and bytes; what cannot work is refused at
once.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import Annotated, Any, ClassVar, Literal

import pytest
from msgspec import Meta, Struct
from msgspec import field as renamed

from seriatim.engine.machine import Machine, UserMachine
from seriatim.engine.messages import Poison
from seriatim.engine.records import fits_column_type
from seriatim.errors import ConfigError


class State(Struct):
    """A state."""

    total: int = 0


class Said(Struct, tag="said"):
    """A message."""

    n: int
    seq: int | None = None
    who: str | int | None = None


class Other(Struct, tag="other"):
    """Another message."""

    seq: int = 0
    who: str = ""


class Record(Struct):
    """A record with every type there is."""

    text: str
    number: int | None = renamed(name="count", default=None)
    ratio: float = 0.0
    flag: bool = False
    raw: bytes = b""
    at: datetime | None = None
    day: date | None = None
    parts: list[int] = []
    side: Literal["buy", "sell"] = "buy"
    small: Annotated[int, Meta(ge=0)] = 0


class Good(Machine[State, Said | Other, Record]):
    """Adds up."""

    def start(self, _session: str) -> State:
        """Zero."""
        return State()

    def apply(self, state: State, _message: Said | Other) -> Any:
        """A generator is fine."""
        state.total += 1
        yield Record(str(state.total))


def test_columns_come_from_the_record_struct() -> None:
    """By their encoded names, with optional and annotated types seen through."""
    assert UserMachine("m:Good", Good).columns == {
        "text": "string",
        "count": "int64",
        "ratio": "float64",
        "flag": "bool",
        "raw": "binary",
        "at": "timestamp",
        "day": "date",
        "parts": "list<int64>",
        "side": "string",
        "small": "int64",
    }


def test_a_machine_applies_typed_messages() -> None:
    """Bytes in, tuples out, state through bytes and back."""
    made = UserMachine("m:Good", Good)
    state = made.start("s")
    (message,) = made.decode([b'{"type":"said","n":1}'])
    (record,) = made.apply(state, message)
    assert record[:2] == ("1", None)
    made.check_records([record])
    assert made.load(made.dump(state), 1) == state
    assert made.to_plain(state) == {"total": 1}
    assert (made.has_snapshots, made.can_upgrade) == (False, False)


def test_sequence_and_session_must_be_usable() -> None:
    """A message without them is poison, not an exception in the fold."""
    made = UserMachine("m:Good", Good, sequence="seq", session="who")
    good, *bad = made.decode(
        [
            b'{"type":"said","n":1,"seq":4,"who":"me"}',
            b'{"type":"said","n":1,"who":"me"}',
            b'{"type":"said","n":1,"seq":9223372036854775808,"who":"me"}',
            b'{"type":"said","n":1,"seq":4}',
            b"?",
        ]
    )
    assert (made.sequences([good])[0], made.session(good)) == (4, "me")
    assert [type(message) for message in bad] == [Poison] * 4


def test_a_field_the_stream_needs_must_be_in_every_message() -> None:
    """Said before anything is read."""
    with pytest.raises(ConfigError, match="Other has none"):
        UserMachine("m:Good", Good, sequence="n")


def test_what_apply_gives_must_be_its_record() -> None:
    """A dict, or another Struct, is refused by name."""

    class Wrong(Good):
        def apply(self, _state: State, _message: Said | Other) -> Any:
            return [{"text": "x"}]

    kind: Any = type("Wrong", (Wrong,), {"__orig_bases__": (Machine[State, Said, Record],)})
    with pytest.raises(TypeError, match="must yield Record, it gave dict"):
        UserMachine("m:Wrong", kind).apply(State(), Said(1))


def test_state_that_cannot_be_read_again_is_not_saved() -> None:
    """Found when it is written, not in the next run."""
    spoilt: Any = State("text")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="Expected `int`"):
        UserMachine("m:Good", Good).dump(spoilt)


def test_a_class_without_types_is_refused() -> None:
    """Decoder, columns and state cannot be guessed."""

    class Bare(Machine):  # type: ignore[type-arg]
        pass

    with pytest.raises(ConfigError, match="does not say its types"):
        UserMachine("m:Bare", Bare)


@pytest.mark.parametrize("record", [dict, int, "text"])
def test_records_must_be_structs(record: Any) -> None:
    """Their fields are the columns."""
    kind: Any = type("Odd", (Machine,), {"__orig_bases__": (Machine[State, Said, record],)})
    with pytest.raises(ConfigError, match="must be a msgspec Struct"):
        UserMachine("m:Odd", kind)


def test_a_record_field_without_a_column_type_is_refused() -> None:
    """With the field and what is allowed."""

    class Odd(Struct):
        bag: dict[str, int]

    kind: Any = type("Odd", (Machine,), {"__orig_bases__": (Machine[State, Said, Odd],)})
    with pytest.raises(ConfigError, match="'bag'") as refused:
        UserMachine("m:Odd", kind)
    assert "str" in refused.value.fields["allowed"]


@pytest.mark.parametrize(
    ("value", "kind", "good"),
    [
        (None, "int64", True),
        (1, "int64", True),
        (True, "int64", False),
        (2**63, "int64", False),
        (1, "float64", True),
        ("1", "float64", False),
        (2**53 + 1, "float64", False),
        ("\ud800", "string", False),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=12))), "timestamp", False),
        (True, "bool", True),
        (1, "bool", False),
        (datetime(2024, 1, 1), "date", False),  # noqa: DTZ001  # naive on purpose
        (date(2024, 1, 1), "date", True),
        (date(2024, 1, 1), "timestamp", False),
        ([1, None], "list<int64>", True),
        ([1, "x"], "list<int64>", False),
        ("x", "list<int64>", False),
        (b"x", "string", False),
    ],
)
def test_values_fit_their_columns_or_not(value: Any, kind: str, good: bool) -> None:
    """The same rule that the record file would enforce."""
    assert fits_column_type(value, kind) is good


def keyed_machine(key: tuple[str, ...], gone: dict[str, Any]) -> UserMachine:
    """A machine whose records name these columns."""

    class Level(Record):
        row_key: ClassVar[tuple[str, ...]] = key
        row_gone: ClassVar[dict[str, Any]] = gone

    class Book(Machine[State, Said, Level]):
        """Books."""

    return UserMachine("book:Book", Book)


def test_a_struct_says_how_its_records_are_rows() -> None:
    """By field; the columns are known by the names that the table has."""
    assert UserMachine("good:Good", Good).row_key_spec is None
    keyed = keyed_machine(("side", "number"), {"small": 0, "number": None}).row_key_spec
    assert keyed is not None
    assert (keyed.key, keyed.deleted_when) == (("side", "count"), {"small": 0, "count": None})
    assert keyed.columns[:2] == ("text", "count")


@pytest.mark.parametrize(
    ("key", "gone", "told"),
    [
        (("sid",), {}, "row_key names 'sid', which is no field of it"),
        (("side",), {"siz": 0}, "row_gone names 'siz', which is no field of it"),
        (("parts",), {}, "row_key names 'parts', a list"),
        (("side",), {"small": "0"}, "row_gone: small is int64, never '0'"),
        ((), {"small": 0}, "row_gone has no row_key beside it"),
    ],
)
def test_a_key_that_cannot_be_is_refused(
    key: tuple[str, ...], gone: dict[str, Any], told: str
) -> None:
    """Before anything is read, with the fields that there are."""
    with pytest.raises(ConfigError, match="Level") as refused:
        keyed_machine(key, gone)
    assert told in refused.value.message
    assert "count" not in refused.value.next, "fields are named as the Struct has them"
    assert "number" in refused.value.next


class Basket(Struct):
    """A state with lists that grow."""

    parts: list[int]
    pairs: list[list[int]]


class Seen(Struct):
    """A record that shows the state's own lists."""

    parts: list[int]
    pairs: list[list[int]]


class Growing(Machine[Basket, Said, Seen]):
    """Hands out what it goes on changing."""

    def start(self, _session: str) -> Basket:
        """Empty."""
        return Basket([], [[]])

    def apply(self, state: Basket, message: Said) -> Any:
        """The same record and the same lists, again and again."""
        seen = Seen(state.parts, state.pairs)
        for _ in range(2):
            state.parts.append(message.n)
            state.pairs[0].append(message.n)
            yield seen

    def end(self, state: Basket) -> Any:
        """The same at the end."""
        return self.apply(state, Said(0))


def test_a_record_is_what_it_was_when_it_was_given() -> None:
    """Lists of the state, or a record used again, may change afterwards: what was given does not."""
    made = UserMachine("m:Growing", Growing)
    state = made.start("s")
    rows = [*made.apply(state, Said(1)), *made.apply(state, Said(2)), *made.end(state)]
    parts = [[1, 1, 2, 2, 0, 0][:count] for count in range(1, 7)]
    assert rows == [(part, [part]) for part in parts]


def test_a_record_that_is_changed_and_given_again_is_two_records() -> None:
    """Also where no column is a list."""

    class Reusing(Machine[State, Said, Other]):
        """One object, twice."""

        def apply(self, _state: State, _message: Said) -> Any:
            """Changed in between."""
            one = Other(seq=1)
            yield one
            one.seq = 2
            yield one

    assert UserMachine("m:Reusing", Reusing).apply(State(), Said(1)) == [(1, ""), (2, "")]


def test_columns_that_differ_by_case_alone_are_refused() -> None:
    """Delta takes them for one."""

    class Twins(Struct):
        v: int
        V: int

    kind: Any = type("Odd", (Machine,), {"__orig_bases__": (Machine[State, Said, Twins],)})
    with pytest.raises(ConfigError, match="'v' and 'V' of Twins would be one column"):
        UserMachine("m:Odd", kind)


@pytest.mark.parametrize("version", [0, -1, 1.5, True, "1", None])
def test_a_state_version_is_a_whole_number_from_1(version: Any) -> None:
    """It is kept beside the state as one."""
    kind: Any = type(
        "Odd",
        (Good,),
        {"__orig_bases__": (Machine[State, Said, Record],), "state_version": version},
    )
    with pytest.raises(ConfigError, match="state_version is"):
        UserMachine("m:Odd", kind)
