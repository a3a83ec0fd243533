"""Requests: what a person asks of a run in Airflow's trigger form, as a checked value.

Nothing of it is ever guessed at, templated, or handed to a shell: every field has its type, its
bounds and its alphabet, and what does not fit is refused with a text that says what is allowed.

Next room: airflow/params.py shows the form; operations/plan.py compares a request with what Kafka
has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError

RunAction = Literal["run", "backfill", "replay"]
RUN_ACTIONS: tuple[RunAction, ...] = ("run", "backfill", "replay")
MESSAGES_MAX = 1_000_000_000
NAMES_LISTED_MAX = 1000
TOPIC_PATTERN = r"[A-Za-z0-9._-]{1,249}"
PARTITION_PATTERN = rf"{TOPIC_PATTERN}/(0|[1-9][0-9]{{0,5}})"
OFFSET_PATTERN = r"0|[1-9][0-9]{0,17}"
TIME_PATTERN = r"20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9](:[0-5][0-9])?Z"
EDGE_EXAMPLES = "an offset like 41000, or a time in UTC like 2026-11-16T08:00:00Z"
STREAM_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
SESSION_NAME_MAX = 1000
TRACED_SESSIONS_MAX = 20
"""Sessions that a run traces at most."""
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


class RangeEdge(Struct, frozen=True):
    """Where a range begins or ends: an offset, or a time in milliseconds since 1970."""

    offset: int | None = None
    time_ms: int | None = None
    text: str = ""
    """As it was written."""

    @property
    def value(self) -> int:
        """What edges of one kind are compared by."""
        return self.time_ms or 0 if self.offset is None else self.offset


class RefusedValueError(ConfigError):
    """A field of a form has a value that is not allowed. Its screen is about the form; its parts
    serve other edges.
    """

    def __init__(self, key: str, problem: str, allowed: str) -> None:
        super().__init__(
            f"{key}: {problem}", allowed=allowed, next="trigger again with a value that is allowed"
        )
        self.key, self.problem, self.allowed = key, problem, allowed


class RunRequest(Struct, frozen=True, kw_only=True):
    """What a run is asked to do. The default: fold from the frontier to the log ends of now."""

    action: RunAction = "run"
    topics: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    start: RangeEdge | None = None
    until: RangeEdge | None = None
    messages_max: int | None = None
    trace: tuple[str, ...] = ()
    """Sessions that a run traces beside the fold."""
    dry_run: bool = False

    def includes(self, partition: Partition) -> bool:
        """Whether a partition is among those asked for; all are, if none is named."""
        named = bool(self.topics or self.partitions)
        return not named or partition.topic in self.topics or partition in self.partitions


def is_default_form(form_values: Mapping[str, Any]) -> bool:
    """Whether a form was left as it is."""
    return {key: value for key, value in form_values.items() if value} in ({}, {"action": "run"})


def parse_run_request(form_values: Mapping[str, Any]) -> RunRequest:
    """A request from the values of the form. None, empty texts, lists and tables mean: not given."""
    unknown = sorted(set(form_values) - set(FORM_FIELDS))
    if unknown:
        _refuse(unknown[0], "there is no such field", ", ".join(FORM_FIELDS))
    filled = {key: value for key, value in form_values.items() if value not in (None, "", [], {})}
    request = RunRequest(
        action=_parse_action(filled.get("action", "run")),
        topics=tuple(_parse_names("topics", filled.get("topics", []), TOPIC_PATTERN)),
        partitions=tuple(
            map(
                Partition.parse,
                _parse_names("partitions", filled.get("partitions", []), PARTITION_PATTERN),
            )
        ),
        start=_parse_edge("from", filled.get("from")),
        until=_parse_edge("until", filled.get("until")),
        messages_max=_parse_messages_max(filled.get("messages_max")),
        trace=_parse_traced_sessions(filled.get("trace", [])),
        dry_run=_parse_flag(filled.get("dry_run", False), "dry_run"),
    )
    _check_range(request)
    _check_action(request)
    return request


def command_arguments(request: RunRequest, stream: str, scratch: str = "") -> list[str]:
    """The command that does it, word by word; a replay goes into a folder of its own."""
    words = [request.action, stream]
    if request.action == "run":
        words += [*_until_arguments(request), *(f"--trace={name}" for name in request.trace)]
    else:
        words += _selection_arguments(request)
        for option, edge in (("--from", request.start), ("--until", request.until)):
            words += [option, edge.text] if edge else []
        words += ["--to", scratch] if request.action == "replay" else []
        words += ["--dry-run"] if request.dry_run else []
    if request.messages_max is not None:
        words += ["--messages-max", str(request.messages_max)]
    return words


def plan_arguments(request: RunRequest, stream: str) -> list[str]:
    """The command that says what would be done, and refuses places that the stream does not have,
    word by word.
    """
    if request.action == "backfill":
        return command_arguments(replace(request, dry_run=True), stream)
    return [
        "plan",
        stream,
        *(_until_arguments(request) if request.action == "run" else _selection_arguments(request)),
    ]


def _until_arguments(request: RunRequest) -> list[str]:
    if request.until is None:
        return []
    (place,) = request.partitions
    return ["--until-offsets", f'{{"{place.topic}": {{"{place.number}": {request.until.offset}}}}}']


def _selection_arguments(request: RunRequest) -> list[str]:
    topics = [word for topic in request.topics for word in ("--topic", topic)]
    return [
        *topics,
        *(word for partition in request.partitions for word in ("--partition", str(partition))),
    ]


def repair_arguments(form_values: Mapping[str, Any]) -> list[str]:
    """The command that plans the repair which the form of its DAG asks for, word by word."""
    filled = {key: value for key, value in form_values.items() if value not in (None, "", [], {})}
    if unknown := sorted(set(filled) - {"stream", "partition", "session", "from", "forward"}):
        _refuse(unknown[0], "there is no such field", "stream, partition, session, from, forward")
    stream, session = filled.get("stream"), filled.get("session")
    if not isinstance(stream, str) or not re.fullmatch(STREAM_PATTERN, stream):
        _refuse("stream", f"found {_describe_value(stream)}", "the name of a stream")
    words = ["repair", stream]
    places = _parse_names(
        "partition", [filled["partition"]] if "partition" in filled else [], PARTITION_PATTERN
    )
    words += [f"--partition={place}" for place in places]
    if session is not None:
        if not _is_session_name(session):
            _refuse(
                "session",
                f"found {_describe_value(session)}",
                f"a session's name, at most {SESSION_NAME_MAX} characters",
            )
        words.append(f"--session={session}")
    if (start := _parse_edge("from", filled.get("from"))) is not None:
        if start.offset is None or not places:
            _refuse("from", "an offset is of one partition", "an offset, and that partition")
        words.append(f"--from={start.offset}")
    return [*words, "--forward"] if _parse_flag(filled.get("forward", False)) else words


def _parse_action(value: Any) -> RunAction:
    if not isinstance(value, str) or value not in RUN_ACTIONS:
        _refuse("action", f"found {_describe_value(value)}", " | ".join(RUN_ACTIONS))
    return value


def _parse_names(key: str, value: Any, pattern: str) -> list[str]:
    like = "topic names: letters, digits, . _ -" if key == "topics" else "places like prefix-a/3"
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        _refuse(key, f"found {_describe_value(value)}", f"a list of {like}")
    texts: Sequence[str] = value
    for text in texts:
        if not re.fullmatch(pattern, text) or text.partition("/")[0] in (".", ".."):
            _refuse(key, f"found {_describe_value(text)}", f"a list of {like}")
    if len(texts) > NAMES_LISTED_MAX or len(set(texts)) != len(texts):
        _refuse(key, f"{len(texts)} are named", f"each once, at most {NAMES_LISTED_MAX}")
    return list(texts)


def _parse_edge(key: str, value: Any) -> RangeEdge | None:
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


def _is_session_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= SESSION_NAME_MAX and value.isprintable()


def _parse_traced_sessions(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(map(_is_session_name, value)):
        _refuse("trace", f"found {_describe_value(value)}", "a list of sessions' names")
    if len(value) > TRACED_SESSIONS_MAX:
        _refuse("trace", f"{len(value)} are named", f"at most {TRACED_SESSIONS_MAX}")
    return tuple(dict.fromkeys(value))


def _parse_messages_max(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= MESSAGES_MAX):
        _refuse(
            "messages_max",
            f"found {_describe_value(value)}",
            f"a whole number, 1 to {MESSAGES_MAX}",
        )
    return value


def _parse_flag(value: Any, key: str = "forward") -> bool:
    if not isinstance(value, bool):
        _refuse(key, f"found {_describe_value(value)}", "true or false")
    return value


def _check_range(request: RunRequest) -> None:
    start, until = request.start, request.until
    if request.topics and request.partitions:
        _refuse("partitions", "topics are named as well", "topics or partitions, not both")
    edges = [edge for edge in (start, until) if edge is not None]
    if any(edge.offset is not None for edge in edges) and len(request.partitions) != 1:
        _refuse(
            "from" if start else "until",
            "an offset is of one partition",
            "name that one in partitions, or a time",
        )
    if start is not None and until is not None:
        if (start.offset is None) != (until.offset is None):
            _refuse("until", "from is of another kind", "two offsets, or two times")
        if start.value >= until.value:
            _refuse("until", f"{until.text} is not after from ({start.text})", "from before until")


def _check_action(request: RunRequest) -> None:
    named = request.topics or request.partitions
    if request.action == "replay":
        if len(named) > 1:
            _refuse(
                "partitions",
                f"{len(named)} are named",
                "for a replay one partition, or one topic, or times alone",
            )
        if request.messages_max is not None:
            _refuse("messages_max", "a replay has no slices", "nothing")
    if request.action != "run":
        if request.trace:
            _refuse(
                "trace",
                f"a {request.action} is not traced",
                "nothing; `seriatim trace` looks at what was folded",
            )
        if request.start is None and not named:
            _refuse(
                "from",
                f"a {request.action} of everything is not meant",
                "from, or topics, or partitions",
            )
        return
    if request.start is not None:
        _refuse(
            "from", "a run goes on from the frontier", 'action = "backfill" to fold a range again'
        )
    at_offset = request.until is not None and request.until.offset is not None
    if (named or request.until is not None) and not at_offset:
        allowed = (
            "until as an offset of one partition, or nothing; a backfill takes topics and times"
        )
        _refuse("until" if request.until else "partitions", "a run folds all that waits", allowed)


def _describe_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _refuse(key: str, found: str, allowed: str) -> NoReturn:
    raise RefusedValueError(key, found, allowed)
