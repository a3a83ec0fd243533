"""Guesses what a new stream is like, from a sample of its messages: columns and types, the key of a
row, the session, the sequence. Pure.

Everything here is a guess, and it is told to the person as a guess. It is made only if every message
of the sample agrees with it; a sequence may have gaps.

Next: operations/scaffold.py writes the files of a new stream; cli/new.py reads the sample.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from itertools import pairwise, takewhile
from keyword import iskeyword
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from seriatim.engine.records import is_int64, is_list_type
from seriatim.stream import COLUMN_NAME_LENGTH_MAX, DEFAULT_BEFORE_FIELD

SAMPLE_MESSAGES_MAX = 1000
TABLE_TYPES = frozenset({"snapshot", "insert", "update", "delete"})
"""The types of messages that the table machine takes."""
DEBEZIUM_FIELDS = frozenset({"op", "before", "after"})
TYPE_FIELD = "type"
ROWS_FIELD = "rows"
EXAMPLE_ROWS_MAX = 20
EXAMPLES_MAX = 3
"""A snapshot in the test has so many rows at most."""
STEPS_MIN = 3
"""A field is taken for the sequence if it counts by one at least so often. If it is also called like
one, once is enough.
"""
COUNTED_SHARE_MIN = 0.9
SEQUENCE_NAME = re.compile(r"(?i)(?:.*_)?(?:seq|sequence|seqno|sequence_?(?:number|no)|nr)")
KEY_NAME = re.compile(r"(?i)(?:id|key|uuid)|.*[_-](?:id|key|uuid)|.*[a-z](?:Id|Key)")
SESSION_NAME = re.compile(r"(?i)session(?:_?(?:id|name|key))?")
NOT_IN_FIELD_NAMES = re.compile(r"[\x00-\x1f\"\\]")
"""What msgspec refuses in the name of a field."""
FIELD_NAME = re.compile(r"[A-Za-z_]\w*")
"""Names that a stream file can have as `sequence`."""
TIMESTAMP = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)", re.ASCII
)
"""With a zone: without one nobody knows what is meant."""
DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
Content = dict[str, Any]
"""What a message says, decoded from JSON."""


class SampledMessage(Struct, frozen=True):
    """One message of the sample."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None


class GuessedField(Struct, frozen=True, kw_only=True):
    """A field of the messages that becomes a column."""

    name: str
    type_name: str
    """As in stream files: string, int64, …; `list<string>` for lists."""
    is_optional: bool = False
    """Whether some messages leave it out, or have null."""
    is_never_negative: bool = False


class Guess(Struct, frozen=True, kw_only=True):
    """One guess, for people and scripts."""

    about: Literal["machine", "columns", "key", "session", "sequence"]
    value: str
    because: str


class StreamSample(Struct, kw_only=True):
    """What was learned from a sample."""

    messages: int = 0
    unreadable: int = 0
    """Messages that are not JSON objects."""
    is_table: bool = False
    """Whether the messages are those of the table machine: snapshot, insert, update and delete."""
    fields: list[GuessedField] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Fields that become no column, with the reason."""
    key: tuple[str, ...] = ()
    session: str = "key"
    sequence: str | None = None
    examples: list[Content] = field(default_factory=list)
    """The first messages of one session, for the test."""
    guesses: list[Guess] = field(default_factory=list)


class _Session(Struct):
    """The messages of one session in a sample, in order."""

    contents: list[Content] = field(default_factory=list)


def study_sample(messages: Sequence[SampledMessage]) -> StreamSample:
    """Guess what a stream of these messages is like. Each partition must be in order.

    Messages of a table without a key are no use to the table machine: a machine of one's own takes
    them.
    """
    sample = _study(messages, may_be_table=True)
    if sample.is_table and not sample.key:
        return _study(messages, may_be_table=False)
    return sample


def _study(messages: Sequence[SampledMessage], *, may_be_table: bool) -> StreamSample:
    decoded: list[tuple[SampledMessage, Content]] = []
    for message in messages:
        content = _decode_object(message.value)
        if content is not None:
            decoded.append((message, content))
    sample = StreamSample(messages=len(messages), unreadable=len(messages) - len(decoded))
    contents = [content for _, content in decoded]
    if not contents:
        return sample
    types = {str(content.get(TYPE_FIELD)) for content in contents}
    sample.is_table = may_be_table and types <= TABLE_TYPES
    sample.guesses.append(_guess_machine(sample, contents))
    _guess_session(sample, decoded)
    sessions = _split_into_sessions(sample.session, decoded)
    _guess_sequence(sample, sessions)
    _guess_columns(sample, contents)
    _guess_key(sample, contents)
    sample.examples = _choose_examples(sample, sessions)
    return sample


def _guess_machine(sample: StreamSample, contents: Sequence[Content]) -> Guess:
    if sample.is_table:
        because = f"every message has {TYPE_FIELD} snapshot, insert, update or delete"
        return Guess(about="machine", value="table", because=because)
    because = "the messages are not those of the table machine"
    changes = [content.get("payload", content) for content in contents]
    if all(isinstance(change, dict) and change.keys() >= DEBEZIUM_FIELDS for change in changes):
        because = (
            'they look like changes by Debezium: machine = "table" with decoder = "debezium" may be'
            " what you want (docs/STREAMS.md, Tables from Debezium)"
        )
    return Guess(about="machine", value="a machine of your own", because=because)


def _decode_object(value: bytes | None) -> Content | None:
    """The JSON object of a message; None if it is anything else."""
    try:
        content = msgspec.json.decode(value or b"")
    except msgspec.DecodeError:
        return None
    return content if isinstance(content, dict) else None


def _guess_session(sample: StreamSample, decoded: Sequence[tuple[SampledMessage, Content]]) -> None:
    if all(_session_name(message.key) for message, _ in decoded):
        sample.session = "key"
        sample.guesses.append(
            Guess(about="session", value="key", because="every message has a Kafka key")
        )
        return
    for name in decoded[0][1]:
        if not SESSION_NAME.fullmatch(name):
            continue
        if all(isinstance(content.get(name), str) for _, content in decoded):
            sample.session = f"field:{name}"
            sample.guesses.append(
                Guess(
                    about="session",
                    value=sample.session,
                    because=f"messages have no Kafka key, but all have the field {name}",
                )
            )
            return
    sample.session = "partition"
    sample.guesses.append(
        Guess(
            about="session",
            value="partition",
            because="messages have no Kafka key that can be read, and no field names a session",
        )
    )


def _session_name(key: bytes | None) -> str:
    """A Kafka key as the name of a session; empty if it cannot be one."""
    if not key:
        return ""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return ""


def _split_into_sessions(
    session: str, decoded: Iterable[tuple[SampledMessage, Content]]
) -> list[_Session]:
    """The messages of each session, in the order of their partition."""
    sessions: dict[tuple[str, int, str], _Session] = {}
    for message, content in decoded:
        name = ""
        if session == "key":
            name = _session_name(message.key)
        elif session.startswith("field:"):
            name = str(content[session.removeprefix("field:")])
        place = (message.topic, message.partition, name)
        sessions.setdefault(place, _Session()).contents.append(content)
    return list(sessions.values())


def _guess_sequence(sample: StreamSample, sessions: Sequence[_Session]) -> None:
    """Take a field for the sequence that counts by one from message to message of each session. A
    snapshot may begin to count again.

    A field that is called like a sequence may have a few gaps: finding them is what it is for.
    """
    for name in sessions[0].contents[0]:
        if not FIELD_NAME.fullmatch(name) or iskeyword(name):
            continue
        steps = 0
        counted_steps = 0
        for session in sessions:
            for is_counted in _steps(session.contents, name, has_snapshots=sample.is_table):
                steps += 1
                counted_steps += is_counted
        if SEQUENCE_NAME.fullmatch(name):
            is_sequence = counted_steps and counted_steps >= steps * COUNTED_SHARE_MIN
        else:
            is_sequence = counted_steps == steps and steps >= STEPS_MIN
        if is_sequence:
            sample.sequence = name
            because = f"it counts by one within sessions, in {counted_steps} of {steps} steps"
            sample.guesses.append(Guess(about="sequence", value=name, because=because))
            return
    because = "no field counts by one within sessions, so lost messages cannot be seen by it"
    sample.guesses.append(Guess(about="sequence", value="none", because=because))


def _steps(contents: Sequence[Content], name: str, *, has_snapshots: bool) -> Iterator[bool]:
    """For each message after the first of a session: whether the field counts by one. Snapshots are
    left out, where there are some.
    """
    for before, after in pairwise(contents):
        if has_snapshots and after.get(TYPE_FIELD) == "snapshot":
            continue
        number: Any = before.get(name)
        next_number: Any = after.get(name)
        yield is_int64(number) and is_int64(next_number) and number + 1 == next_number


def _rows_of(sample: StreamSample, contents: Iterable[Content]) -> Iterator[Content]:
    """The objects whose fields become columns: the messages, and for the table machine their rows."""
    for content in contents:
        rows = content.get(ROWS_FIELD) if sample.is_table else None
        if isinstance(rows, list) and content.get(TYPE_FIELD) == "snapshot":
            yield from (row for row in rows if isinstance(row, dict))
        else:
            yield content


def _guess_columns(sample: StreamSample, contents: Sequence[Content]) -> None:
    """Take each field whose values are of one type for a column."""
    taken = {sample.sequence, sample.session.removeprefix("field:")}
    if sample.is_table:
        taken |= {TYPE_FIELD, ROWS_FIELD}
    values_by_field: dict[str, list[Any]] = {}
    row_count = 0
    for row in _rows_of(sample, contents):
        row_count += 1
        for name, value in row.items():
            values_by_field.setdefault(name, []).append(value)
    for name, values in values_by_field.items():
        # The table machine takes these fields by itself; in a machine of one's own they are fields
        # like all others.
        if sample.is_table and name in taken:
            continue
        type_name = guess_type(values)
        if sample.is_table and name == DEFAULT_BEFORE_FIELD and not type_name:
            continue  # the row before a change
        if sample.is_table:
            problem = _table_column_problem(name, type_name)
        elif NOT_IN_FIELD_NAMES.search(name):
            problem = "not the name of a field"
        else:
            problem = "" if type_name else "no column type"
        if problem:
            sample.left_out[name] = f"{problem}; it is {_describe_values(values)}"
            continue
        present = [value for value in values if value is not None]
        is_number = type_name in ("int64", "float64")
        sample.fields.append(
            GuessedField(
                name=name,
                type_name=type_name,
                is_optional=len(present) < row_count,
                is_never_negative=is_number and min(present) >= 0,
            )
        )
    columns = ", ".join(f"{column.name} {column.type_name}" for column in sample.fields)
    sample.guesses.append(
        Guess(about="columns", value=columns, because="types that fit the values")
    )


def _table_column_problem(name: str, type_name: str) -> str:
    """Why a field cannot be a column of the table machine; empty: it can."""
    if not 0 < len(name) <= COLUMN_NAME_LENGTH_MAX:
        return "not the name of a column"
    if not type_name or is_list_type(type_name):
        return "no column type"
    return ""


def guess_type(values: Iterable[Any]) -> str:
    """The type of a column with these values; empty if none fits all of them. Null fits every type,
    but nulls alone say nothing.
    """
    kinds = {_type_of(value) for value in values if value is not None}
    if kinds == {"int64", "float64"}:
        return "float64"
    if len(kinds) == 1:
        return kinds.pop()
    # A text that only sometimes looks like a time is a text.
    if kinds and kinds <= {"string", "timestamp", "date"}:
        return "string"
    return ""


def _type_of(value: Any) -> str:
    """The type of one value; empty if no column can have it."""
    if isinstance(value, str):
        return _type_of_text(value)
    if isinstance(value, bool):  # true and false are numbers to Python
        return "bool"
    if isinstance(value, float):
        return "float64"
    if is_int64(value):
        return "int64"
    if isinstance(value, list) and None not in value:
        item_type = guess_type(value)
        if item_type and not is_list_type(item_type):
            return f"list<{item_type}>"
    return ""


def _type_of_text(text: str) -> str:
    if TIMESTAMP.fullmatch(text) and _can_be(datetime, text):
        return "timestamp"
    if DATE.fullmatch(text) and _can_be(date, text):
        return "date"
    return "string"


def _can_be(time_type: type, text: str) -> bool:
    """Whether the decoder of messages reads this text as a time."""
    try:
        msgspec.convert(text, time_type)
    except msgspec.ValidationError:
        return False
    return True


def _describe_values(values: Iterable[Any]) -> str:
    names = {
        bool: "true/false",
        dict: "an object",
        float: "a number",
        int: "a number",
        list: "a list",
        str: "text",
    }
    kinds = sorted({names[type(value)] for value in values if value is not None})
    return " or ".join(kinds) or "always null"


def _guess_key(sample: StreamSample, contents: Sequence[Content]) -> None:
    """Take a field for the key that every row has, by its name; in tables also by uniqueness."""
    candidates = [
        column.name
        for column in sample.fields
        if column.type_name in ("string", "int64")
        and not column.is_optional
        and column.name != sample.sequence
    ]
    because = "by its name, and because every message has it"
    if sample.is_table:
        candidates = [name for name in candidates if _is_unique_in_snapshots(name, contents)]
        because = "every row has it, and no snapshot has a value twice"
    by_name = [name for name in candidates if KEY_NAME.fullmatch(name)]
    # `id` is a better guess than `customer_id`.
    by_name.sort(key=len)
    if sample.is_table:
        by_name += candidates
    if by_name:
        sample.key = (by_name[0],)
        sample.guesses.append(Guess(about="key", value=by_name[0], because=because))


def _is_unique_in_snapshots(name: str, contents: Iterable[Content]) -> bool:
    for content in contents:
        rows = content.get(ROWS_FIELD)
        if not isinstance(rows, list):
            continue
        values = [row.get(name) for row in rows if isinstance(row, Mapping)]
        if len(set(values)) != len(values):
            return False
    return True


def _choose_examples(sample: StreamSample, sessions: Sequence[_Session]) -> list[Content]:
    """The first messages of the session with the most. Those of a table begin with a snapshot."""
    longest: list[Content] = []
    for session in sessions:
        contents = session.contents
        if sample.is_table:
            snapshots = [
                i for i, content in enumerate(contents) if content[TYPE_FIELD] == "snapshot"
            ]
            contents = contents[snapshots[0] :] if snapshots else []
        if len(contents) > len(longest):
            longest = contents
    examples = longest[:EXAMPLES_MAX]
    if not sample.is_table:
        names = {column.name for column in sample.fields}
        if sample.sequence is not None:
            steps = _steps(examples, sample.sequence, has_snapshots=False)
            examples = examples[: 1 + sum(takewhile(bool, steps))]
        return [_only(names, content) for content in examples]
    if examples and len(examples[0][ROWS_FIELD]) > EXAMPLE_ROWS_MAX:
        # Later messages may be about rows that are cut off here.
        return [examples[0] | {ROWS_FIELD: examples[0][ROWS_FIELD][:EXAMPLE_ROWS_MAX]}]
    return examples


def _only(names: Collection[str], content: Content) -> Content:
    """A message without the fields that have no column."""
    return {name: value for name, value in content.items() if name in names}
