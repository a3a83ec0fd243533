"""Run requests: the values of Airflow's trigger form, checked, and the command that does them.

Nothing is ever guessed, templated, or handed to a shell. Every field has its type, its bounds and
its alphabet; a value that does not fit is refused with a text that says what is allowed.

Next: airflow/params.py shows the form; operations/plan.py compares a request with what Kafka has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from seriatim.engine.offsets import TOPIC_NAME, Partition
from seriatim.errors import ConfigError
from seriatim.stream import MESSAGES_MAX, STREAM_NAME

RunAction = Literal["run", "backfill", "replay"]
RUN_ACTIONS: tuple[RunAction, ...] = ("run", "backfill", "replay")
NAMES_LISTED_MAX = 1000
"""Topics or partitions that a form names, at most."""
TOPIC_PATTERN = TOPIC_NAME.pattern
PARTITION_PATTERN = rf"{TOPIC_PATTERN}/(0|[1-9][0-9]{{0,5}})"
OFFSET_PATTERN = r"0|[1-9][0-9]{0,17}"
TIME_PATTERN = r"20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9](:[0-5][0-9])?Z"
EDGE_EXAMPLES = "an offset like 41000, or a time in UTC like 2026-11-16T08:00:00Z"
SESSION_NAME_MAX = 1000
TRACED_SESSIONS_MAX = 20
"""Sessions that a run traces, at most."""
FORM_FIELDS = (
    "action",
    "topics",
    "partitions",
    "from",
    "until",
    "messages_max",
    "trace",
    "dry_run",
)
REPAIR_FIELDS = ("stream", "partition", "session", "from", "forward")
# Kafka refuses . and .. as topics, since they would be folders.
_TopicName = Annotated[str, Meta(pattern=rf"^(?!\.{{1,2}}\Z)(?:{TOPIC_PATTERN})\Z")]
_PartitionName = Annotated[str, Meta(pattern=rf"^(?!\.{{1,2}}/)(?:{PARTITION_PATTERN})\Z")]
_SessionName = Annotated[str, Meta(max_length=SESSION_NAME_MAX)]
FIELD_TYPES: dict[str, tuple[Any, str]] = {
    "action": (RunAction, " | ".join(RUN_ACTIONS)),
    "topics": (
        Annotated[tuple[_TopicName, ...], Meta(max_length=NAMES_LISTED_MAX)],
        f"a list of topic names: letters, digits, . _ -; at most {NAMES_LISTED_MAX}",
    ),
    "partitions": (
        Annotated[tuple[_PartitionName, ...], Meta(max_length=NAMES_LISTED_MAX)],
        f"a list of places like prefix-a/3; at most {NAMES_LISTED_MAX}",
    ),
    "messages_max": (
        Annotated[int, Meta(ge=1, le=MESSAGES_MAX)],
        f"a whole number, 1 to {MESSAGES_MAX}",
    ),
    "trace": (
        Annotated[tuple[_SessionName, ...], Meta(max_length=TRACED_SESSIONS_MAX)],
        f"a list of sessions' names; at most {TRACED_SESSIONS_MAX}",
    ),
    "dry_run": (bool, "true or false"),
    "stream": (
        Annotated[str, Meta(pattern=rf"^(?:{STREAM_NAME.pattern})\Z")],
        "the name of a stream",
    ),
    "partition": (_PartitionName, "a place like prefix-a/3"),
    "session": (_SessionName, f"a session's name, at most {SESSION_NAME_MAX} characters"),
    "forward": (bool, "true or false"),
}
"""The type of each field of both forms, and how an error names what is allowed. The edges of a range
are parsed apart, since they are an offset or a time.
"""
SHOWN_VALUE_MAX = 80
"""Characters of a refused value that an error shows."""


class RangeEdge(Struct, frozen=True):
    """Where a range begins or ends: an offset, or a time in milliseconds since 1970."""

    offset: int | None = None
    time_ms: int | None = None
    text: str = ""
    """The edge as it was written in the form."""

    @property
    def value(self) -> int:
        """The number by which two offsets, or two times, are compared."""
        if self.offset is not None:
            return self.offset
        return self.time_ms or 0


class RefusedValueError(ConfigError):
    """A field of a form has a value that is not allowed.

    Its text is about the trigger form. `key`, `problem` and `allowed` are for callers that have
    another form and write another text.
    """

    def __init__(self, key: str, problem: str, allowed: str) -> None:
        super().__init__(
            f"{key}: {problem}", allowed=allowed, next="trigger again with a value that is allowed"
        )
        self.key = key
        self.problem = problem
        self.allowed = allowed


class RunRequest(Struct, frozen=True, kw_only=True):
    """What a run is asked to do. The default is to fold from the frontier to the current log ends."""

    action: RunAction = "run"
    topics: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    start: RangeEdge | None = None
    until: RangeEdge | None = None
    messages_max: int | None = None
    trace: tuple[str, ...] = ()
    """Sessions that the run traces beside the fold."""
    dry_run: bool = False

    def includes(self, partition: Partition) -> bool:
        """Whether the request is about a partition. If it names none, it is about all."""
        if not self.topics and not self.partitions:
            return True
        return partition.topic in self.topics or partition in self.partitions


def is_default_form(form_values: Mapping[str, Any]) -> bool:
    """Whether a form has only its default values."""
    changed_values = {key: value for key, value in form_values.items() if value}
    return changed_values in ({}, {"action": "run"})


def parse_run_request(form_values: Mapping[str, Any]) -> RunRequest:
    """The request of a form; a RefusedValueError says which value is not allowed.

    Fields with None or with an empty text, list or table count as not filled in.
    """
    _check_field_names(form_values, FORM_FIELDS)
    filled = _filled_fields(form_values)
    request = RunRequest(
        action=_parse_field(filled, "action", "run"),
        topics=_parse_names(filled, "topics"),
        partitions=tuple(map(Partition.parse, _parse_names(filled, "partitions"))),
        start=_parse_edge("from", filled.get("from")),
        until=_parse_edge("until", filled.get("until")),
        messages_max=_parse_field(filled, "messages_max"),
        trace=_parse_traced_sessions(filled),
        dry_run=_parse_field(filled, "dry_run", default=False),
    )
    _check_range(request)
    _check_action(request)
    return request


def command_arguments(request: RunRequest, stream: str, scratch: str = "") -> list[str]:
    """The arguments of the command that does a request. A replay writes to the folder `scratch`."""
    arguments = [request.action, stream]
    if request.action == "run":
        arguments += _until_arguments(request)
        arguments += [f"--trace={name}" for name in request.trace]
    else:
        arguments += _range_arguments(request)
        if request.action == "replay":
            arguments += ["--to", scratch]
        if request.dry_run:
            arguments.append("--dry-run")
    if request.messages_max is not None:
        arguments += ["--messages-max", str(request.messages_max)]
    return arguments


def plan_arguments(request: RunRequest, stream: str) -> list[str]:
    """The arguments of the command that shows what a request would do.

    It also refuses topics and partitions that the stream does not have.
    """
    if request.action == "backfill":
        return command_arguments(replace(request, dry_run=True), stream)
    if request.action == "run":
        return ["plan", stream, *_until_arguments(request)]
    return ["plan", stream, *_selection_arguments(request)]


def _until_arguments(request: RunRequest) -> list[str]:
    if request.until is None:
        return []
    # `_check_range` has made sure that a run until an offset names one partition.
    (partition,) = request.partitions
    until_offsets = f'{{"{partition.topic}": {{"{partition.number}": {request.until.offset}}}}}'
    return ["--until-offsets", until_offsets]


def _selection_arguments(request: RunRequest) -> list[str]:
    arguments = []
    for topic in request.topics:
        arguments += ["--topic", topic]
    for partition in request.partitions:
        arguments += ["--partition", str(partition)]
    return arguments


def _range_arguments(request: RunRequest) -> list[str]:
    arguments = _selection_arguments(request)
    if request.start is not None:
        arguments += ["--from", request.start.text]
    if request.until is not None:
        arguments += ["--until", request.until.text]
    return arguments


def repair_arguments(form_values: Mapping[str, Any]) -> list[str]:
    """The arguments of the command that plans the repair which the repair form asks for.

    A RefusedValueError says which value is not allowed.
    """
    filled = _filled_fields(form_values)
    _check_field_names(filled, REPAIR_FIELDS)
    arguments = ["repair", _parse_field({"stream": None, **filled}, "stream")]
    partition = _parse_field(filled, "partition")
    if partition is not None:
        arguments.append(f"--partition={partition}")
    session = _parse_field(filled, "session")
    if session is not None:
        _refuse_unprintable("session", session)
        arguments.append(f"--session={session}")
    start = _parse_edge("from", filled.get("from"))
    if start is not None:
        if start.offset is None or partition is None:
            _refuse("from", "an offset is of one partition", "an offset, and that partition")
        arguments.append(f"--from={start.offset}")
    if _parse_field(filled, "forward", default=False):
        arguments.append("--forward")
    return arguments


def _filled_fields(form_values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a form that have a value. False is one."""
    return {key: value for key, value in form_values.items() if value not in (None, "", [], {})}


def _check_field_names(form_values: Mapping[str, Any], field_names: Sequence[str]) -> None:
    for name in sorted(form_values):
        if name not in field_names:
            _refuse(name, "there is no such field", ", ".join(field_names))


def _parse_field(filled: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a field, as its type asks for; `default` if it is not filled in."""
    if key not in filled:
        return default
    field_type, allowed = FIELD_TYPES[key]
    try:
        return msgspec.convert(filled[key], field_type)
    except msgspec.ValidationError:
        return _refuse(key, f"found {_describe_value(filled[key])}", allowed)


def _parse_names(filled: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of topics or partitions, each named once."""
    names: tuple[str, ...] = _parse_field(filled, key, ())
    if len(set(names)) != len(names):
        _refuse(key, f"{len(names)} are named", "each once")
    return names


def _parse_traced_sessions(filled: Mapping[str, Any]) -> tuple[str, ...]:
    names: tuple[str, ...] = _parse_field(filled, "trace", ())
    for name in names:
        _refuse_unprintable("trace", name)
    return tuple(dict.fromkeys(names))


def _refuse_unprintable(key: str, session: str) -> None:
    """Refuse a session's name that a log or a terminal could not show."""
    if not session.isprintable():
        _refuse(key, f"found {_describe_value(session)}", FIELD_TYPES[key][1])


def _parse_edge(key: str, value: Any) -> RangeEdge | None:
    """An offset or a time, as it is written; None: the field is empty."""
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(OFFSET_PATTERN, value):
        return RangeEdge(offset=int(value), text=value)
    if isinstance(value, str) and re.fullmatch(TIME_PATTERN, value):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            _refuse(key, f"{value!r} is not a day and time that there is", EDGE_EXAMPLES)
        return RangeEdge(time_ms=round(moment.timestamp() * 1000), text=value)
    return _refuse(key, f"found {_describe_value(value)}", EDGE_EXAMPLES)


def _check_range(request: RunRequest) -> None:
    """Refuse partitions and edges that do not fit together."""
    start = request.start
    until = request.until
    if request.topics and request.partitions:
        _refuse("partitions", "topics are named as well", "topics or partitions, not both")
    has_offset = any(edge is not None and edge.offset is not None for edge in (start, until))
    if has_offset and len(request.partitions) != 1:
        key = "from" if start else "until"
        _refuse(key, "an offset is of one partition", "name that one in partitions, or a time")
    if start is None or until is None:
        return
    if (start.offset is None) != (until.offset is None):
        _refuse("until", "from is of another kind", "two offsets, or two times")
    if start.value >= until.value:
        _refuse("until", f"{until.text} is not after from ({start.text})", "from before until")


def _check_action(request: RunRequest) -> None:
    """Refuse what the request's action does not take."""
    if request.action == "run":
        _check_plain_run(request)
        return
    selected = request.topics or request.partitions
    if request.action == "replay":
        if len(selected) > 1:
            allowed = "for a replay one partition, or one topic, or times alone"
            _refuse("partitions", f"{len(selected)} are named", allowed)
        if request.messages_max is not None:
            _refuse("messages_max", "a replay has no slices", "nothing")
    if request.trace:
        allowed = "nothing; `seriatim trace` looks at what was folded"
        _refuse("trace", f"a {request.action} is not traced", allowed)
    if request.start is None and not selected:
        problem = f"a {request.action} of everything is not meant"
        _refuse("from", problem, "from, or topics, or partitions")


def _check_plain_run(request: RunRequest) -> None:
    """A run folds everything from the frontier on. It may end at an offset of one partition."""
    until = request.until
    if request.start is not None:
        allowed = 'action = "backfill" to fold a range again'
        _refuse("from", "a run goes on from the frontier", allowed)
    if until is not None and until.offset is not None:
        return
    if until is not None or request.topics or request.partitions:
        key = "partitions" if until is None else "until"
        allowed = (
            "until as an offset of one partition, or nothing; a backfill takes topics and times"
        )
        _refuse(key, "a run folds all that waits", allowed)


def _describe_value(value: Any) -> str:
    text = repr(value)
    if len(text) <= SHOWN_VALUE_MAX:
        return text
    return f"{text[:SHOWN_VALUE_MAX]}…"


def _refuse(key: str, problem: str, allowed: str) -> NoReturn:
    raise RefusedValueError(key, problem, allowed)
