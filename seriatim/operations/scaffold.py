"""The files of a new stream, as texts: stream file, machine, test and expectations. Pure.

What is written here is meant to be changed. It runs as it is: the test passes, and `seriatim run`
folds the messages that were sampled.

Next: operations/sample.py guesses what is filled in; cli/new.py writes the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

import msgspec
from msgspec import Struct

from seriatim.engine.records import PYTHON_TYPES, RECORD_COLUMN_NAMES, is_list_type
from seriatim.engine.table import output_column_names
from seriatim.operations.sample import GuessedField, StreamSample

EXAMPLE_SAMPLE = StreamSample(
    fields=[
        GuessedField(name="id", type_name="string"),
        GuessedField(name="amount", type_name="float64"),
        GuessedField(name="seq", type_name="int64"),
    ],
    key=("id",),
    sequence="seq",
    examples=[
        {"id": "a", "amount": 1.5, "seq": 1},
        {"id": "a", "amount": 2.0, "seq": 2},
        {"id": "b", "amount": 0.5, "seq": 3},
    ],
)
"""What a stream is like whose topic has no messages yet: an example to be changed."""
COUNT_FIELD = "messages_so_far"


class Scaffold(Struct, frozen=True, kw_only=True):
    """The names of a new stream, and what was learned from its messages."""

    stream: str
    module: str
    """The Python file of the machine, without `.py`."""
    topics: str
    """A regular expression, as in the stream file."""
    sample: StreamSample

    @property
    def class_name(self) -> str:
        """The machine's class: `OrderLines` of the module `order_lines`."""
        words = [word for word in re.split(r"[_\W]+", self.module) if word]
        name = "".join(word[0].upper() + word[1:] for word in words)
        # These classes are in the file as well.
        return f"{name}Machine" if name in ("Message", "Record", "State", "Machine") else name

    @property
    def origin(self) -> str:
        """Where the fields come from, as a sentence."""
        if not self.sample.messages:
            return "Its fields are an example: there were no messages yet."
        return f"Its fields were guessed from {self.sample.messages} messages."

    @property
    def python_fields(self) -> list[_PythonField]:
        """The fields of a message, with names that Python takes. Required ones come first, because a
        Struct asks for that.
        """
        python_fields = []
        # Names are compared without case, as Spark and Delta do.
        taken_names = {COUNT_FIELD, *RECORD_COLUMN_NAMES}
        for column in self.sample.fields:
            python_field = _PythonField(column, _python_name(column.name))
            while python_field.record_name.casefold() in taken_names:
                python_field = _PythonField(column, f"{python_field.name}_")
            taken_names.add(python_field.record_name.casefold())
            python_fields.append(python_field)
        python_fields.sort(key=lambda python_field: python_field.column.is_optional)
        return python_fields


class _PythonField(Struct, frozen=True):
    """A field of the messages in Python."""

    column: GuessedField
    name: str

    @property
    def record_name(self) -> str:
        """The name of the column of records. Some names are taken by columns of every record."""
        if self.name.casefold() in RECORD_COLUMN_NAMES:
            return f"message_{self.name}"
        return self.name

    @property
    def python_type(self) -> str:
        """The type as Python writes it."""
        type_name = self.column.type_name
        if is_list_type(type_name):
            item_type = type_name.removeprefix("list<").removesuffix(">")
            text = f"list[{PYTHON_TYPES[item_type].__name__}]"
        else:
            text = PYTHON_TYPES[type_name].__name__
        return f"{text} | None" if self.column.is_optional else text

    @property
    def message_line(self) -> str:
        """The field of the Struct of messages."""
        line = f"    {self.name}: {self.python_type}"
        is_renamed = self.name != self.column.name
        if is_renamed and self.column.is_optional:
            return f"{line} = field(default=None, name={_python_text(self.column.name)})"
        if is_renamed:
            return f"{line} = field(name={_python_text(self.column.name)})"
        return f"{line} = None" if self.column.is_optional else line


def _python_name(name: str) -> str:
    """A name that Python takes."""
    python_name = re.sub(r"\W", "_", name, flags=re.ASCII)
    # Python gives names with two underscores in front another meaning in classes.
    if not python_name or python_name[0].isdigit() or python_name.startswith("__"):
        python_name = f"field_{python_name}"
    if iskeyword(python_name):
        python_name += "_"
    return python_name


def _python_text(text: str) -> str:
    """A text as Python writes it. JSON's form of it is Python's as well."""
    return json.dumps(text, ensure_ascii=False)


def _python_value(value: Any) -> str:
    """A value of a message as Python writes it."""
    if isinstance(value, str):
        return _python_text(value)
    if isinstance(value, dict):
        items = [f"{_python_text(name)}: {_python_value(item)}" for name, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python_value, value))}]"
    return repr(value)


def render_stream_file(scaffold: Scaffold) -> str:
    """The text of the stream file."""
    sample = scaffold.sample
    remarks = [f"guess: {guess.about} = {guess.value}: {guess.because}" for guess in sample.guesses]
    remarks += [f"left out: {name} ({reason})" for name, reason in sample.left_out.items()]
    machine = "table" if sample.is_table else f"{scaffold.module}:{scaffold.class_name}"
    lines = [
        f"# Stream {scaffold.stream}. {scaffold.origin}",
        "# Every key that is not named here has its default: docs/STREAMS.md.",
        *[f"# {_one_line(remark)}" for remark in remarks],
        f"topics   = {_toml_text(scaffold.topics)}",
        f"machine  = {_toml_text(machine)}",
        f"session  = {_toml_text(sample.session)}",
    ]
    if sample.sequence is not None:
        lines.append(f"sequence = {_toml_text(sample.sequence)}")
    if sample.is_table:
        lines += ["", "[table]", f"key = {_toml_list(sample.key)}", "", "[table.columns]"]
        for column in sample.fields:
            lines.append(f'{_toml_text(column.name)} = "{column.type_name}"')
    lines += ["", "[output]", f'path = "lake/{scaffold.stream}"']
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """A text for a comment. The names of fields are not ours: they may have line breaks."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _toml_text(text: str) -> str:
    """A text as TOML writes it. JSON's form of it is TOML's as well."""
    return json.dumps(text, ensure_ascii=False)


def _toml_list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_toml_text, texts))}]"


MACHINE_TEMPLATE = '''"""The machine of stream {stream}: one record for each message.

{origin} Check them, then change `apply` to what the stream is for.
docs/STREAMS.md says what a machine may do, under "A machine of your own".
"""

from __future__ import annotations

from collections.abc import Iterable
{time_import}{typing_import}
from msgspec import {struct_names}

from seriatim import Machine


class Message(Struct):
    """One message. Fields of a message that are not named here are ignored."""

{message_fields}


class Record(Struct):
    """One row of the table `records`."""

{record_fields}


class State(Struct):
    """What is known of a session between two messages. It is saved with every commit."""

    {count}: int = 0


class {class_name}(Machine[State, Message, Record]):
    """Counts the messages of each session, and writes a record for each."""

    state_version = 1

    def start(self, session: str) -> State:  # noqa: ARG002  # every session begins alike
        """The state of a session before its first message."""
        return State()

    def apply(self, state: State, message: Message) -> Iterable[Record]:
        """The records of one message. It depends on `state` and `message` alone."""
        state.{count} += 1
        yield Record(
{record_values}
        )
'''


def render_machine(scaffold: Scaffold) -> str:
    """The text of the machine's module."""
    sample = scaffold.sample
    python_fields = scaffold.python_fields
    record_fields = []
    if sample.key:
        key_names = [
            python_field.record_name
            for python_field in python_fields
            if python_field.column.name in sample.key
        ]
        key_text = ", ".join(f'"{name}"' for name in key_names)
        record_fields.append(f"    row_key: ClassVar[tuple[str, ...]] = ({key_text},)")
        record_fields.append("")
    else:
        record_fields.append(
            "    # No field names a row, as far as the sample tells. With a row_key"
        )
        record_fields.append("    # there would be a table `current`, too: docs/STREAMS.md.")
    record_values = []
    for python_field in python_fields:
        record_fields.append(f"    {python_field.record_name}: {python_field.python_type}")
        value = f"message.{python_field.name}"
        record_values.append(f"            {python_field.record_name}={value},")
    record_fields.append(f"    {COUNT_FIELD}: int")
    record_values.append(f"            {COUNT_FIELD}=state.{COUNT_FIELD},")
    message_lines = [python_field.message_line for python_field in python_fields]
    if not message_lines:
        message_lines.append("    # The sample has no field that can become a column.")
    types = " ".join(python_field.python_type for python_field in python_fields)
    time_names = [name for name in ("date", "datetime") if re.search(rf"\b{name}\b", types)]
    is_renamed = any("field(" in line for line in message_lines)
    return MACHINE_TEMPLATE.format(
        stream=scaffold.stream,
        origin=scaffold.origin,
        time_import=f"from datetime import {', '.join(time_names)}\n" if time_names else "",
        typing_import="from typing import ClassVar\n" if sample.key else "",
        struct_names="Struct, field" if is_renamed else "Struct",
        message_fields="\n".join(message_lines),
        record_fields="\n".join(record_fields),
        record_values="\n".join(record_values),
        class_name=scaffold.class_name,
        count=COUNT_FIELD,
    )


MACHINE_TEST_TEMPLATE = '''"""The machine of stream {stream}, tested without Kafka and without Spark:

    pytest {test_path}
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from {module} import {class_name}

from seriatim.testing import CRASH, fold

MESSAGES: list[Any] = [
{messages}
]


def test_every_message_gives_a_record() -> None:
    """No message is refused."""
    folded = fold({class_name}, MESSAGES{options})
    assert folded.findings == []
    assert len(folded.records) == len(MESSAGES)


def test_a_crash_between_two_messages_changes_nothing() -> None:
    """The state is saved as bytes, and another process goes on with it."""
    folded = fold({class_name}, MESSAGES{options})
    crashed = fold({class_name}, [MESSAGES[0], CRASH, *MESSAGES[1:]]{options})
    assert crashed.records == folded.records
'''
TABLE_TEST_TEMPLATE = '''"""The table of stream {stream}, tested without Kafka and without Spark:

    pytest {test_path}
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from seriatim.testing import CRASH, fold_table

SETTINGS = tomllib.loads(Path(__file__).with_name("{stream}.toml").read_text())
OPTIONS: dict[str, Any] = {{
    "key": SETTINGS["table"]["key"],
    "columns": SETTINGS["table"]["columns"],
    "sequence": SETTINGS.get("sequence"),
}}
MESSAGES: list[Any] = [
{messages}
]


def test_every_message_is_applied() -> None:
    """No message is refused, and none comes before the first snapshot."""
    folded = fold_table(MESSAGES, **OPTIONS)
    assert folded.findings == []
    assert folded.headless == 0


def test_a_crash_between_two_messages_changes_nothing() -> None:
    """The state is saved as bytes, and another process goes on with it."""
    folded = fold_table(MESSAGES, **OPTIONS)
    crashed = fold_table([MESSAGES[0], CRASH, *MESSAGES[1:]], **OPTIONS)
    assert crashed.records == folded.records
'''
TABLE_EXAMPLE: dict[str, Any] = {"type": "snapshot", "rows": []}
"""For a test of a table of which no snapshot was sampled."""


def render_test(scaffold: Scaffold, test_path: str) -> str:
    """The text of the test."""
    sample = scaffold.sample
    examples = sample.examples
    if not examples:
        examples = [TABLE_EXAMPLE | ({sample.sequence: 1} if sample.sequence else {})]
    messages = "\n".join(_message_lines(message) for message in examples)
    if sample.is_table:
        return TABLE_TEST_TEMPLATE.format(
            stream=scaffold.stream, test_path=test_path, messages=messages
        )
    options = f", sequence={_python_text(sample.sequence)}" if sample.sequence else ""
    return MACHINE_TEST_TEMPLATE.format(
        stream=scaffold.stream,
        test_path=test_path,
        module=scaffold.module,
        class_name=scaffold.class_name,
        messages=messages,
        options=options,
    )


def _message_lines(message: dict[str, Any]) -> str:
    """A message of the test, one field on a line."""
    lines = ["    {"]
    for name, value in message.items():
        lines.append(f"        {_python_text(name)}: {_python_value(value)},")
    lines.append("    },")
    return "\n".join(lines)


def render_expectations(scaffold: Scaffold) -> str:
    """The text of the suite of expectations about the stream's records."""
    sample = scaffold.sample
    names = {
        python_field.column.name: python_field.record_name
        for python_field in scaffold.python_fields
    }
    if sample.is_table:
        names = output_column_names(column.name for column in sample.fields)
    expectations = []
    for key in sample.key:
        expectations.append(
            {
                "type": "expect_column_values_to_not_be_null",
                "kwargs": {"column": names[key]},
                "severity": "critical",
                "description": f"every record has its {names[key]}",
                "meta": {"name": f"{names[key]} is there"},
            }
        )
    for column in sample.fields:
        if column.is_never_negative:
            name = names[column.name]
            expectations.append(
                {
                    "type": "expect_column_values_to_be_between",
                    "kwargs": {"column": name, "min_value": 0},
                    "severity": "warning",
                    "description": f"{name} is 0 or more: a guess, as no message has less",
                    "meta": {"name": f"{name} is not negative"},
                }
            )
    suite = {"name": scaffold.stream, "expectations": expectations}
    return msgspec.json.format(msgspec.json.encode(suite), indent=2).decode() + "\n"
