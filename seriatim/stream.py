"""Streams: what a user writes in streams/NAME.toml, as a checked value.

Every error names the file and the key, what was found and what is allowed. A key whose feature this
version does not have is refused by name, never ignored.

Next room: seriatim/stream_files.py reads the files and loads the machines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from msgspec import Struct, field

from seriatim.engine.findings import TIERS, Tier, tier_action
from seriatim.engine.fold import Limits
from seriatim.engine.judge import OnPoison
from seriatim.engine.offsets import TOPIC_NAME
from seriatim.engine.table import TableMachine, column_type
from seriatim.engine.window import WindowSize
from seriatim.errors import ConfigError
from seriatim.schedule import describe_cron_error, is_mail_address

MESSAGES_MAX = 1_000_000_000
COLUMN_NAME = re.compile(r"[^\s,;{}()=\x00-\x1f]{1,128}")
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
RECORD_COLUMNS = (
    "topic",
    "topic_id",
    "partition",
    "offset",
    "index",
    "source_offset",
    "timestamp",
    "session",
    "sequence",
)
"""In every record, before the machine's own."""


class TableSettings(Struct, frozen=True, kw_only=True):
    """[table]: the stock machine's rows and the names of its message fields."""

    key: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    before: bool = True
    type_field: str = "type"
    rows_field: str = "rows"


class SliceSettings(Struct, frozen=True, kw_only=True):
    """[slice]: bounds on one unit of work."""

    messages_max: int = 2_000_000
    read: str = "spark"
    """Who reads Kafka: Spark's own source, or each task its own range."""


class OutputSettings(Struct, frozen=True, kw_only=True):
    """[output]: where and how records and state are written."""

    path: str = ""
    partition_by: tuple[str, ...] = ()
    compression: str = "zstd"
    file_bytes_target: int = 134_217_728
    keep_versions_days: int = 30


class ScheduleSettings(Struct, frozen=True, kw_only=True):
    """[schedule]: when Airflow runs it."""

    cron: str = "*/15 * * * *"


class AlertSettings(Struct, frozen=True, kw_only=True):
    """[alerts]: whom to tell, and when."""

    to: tuple[str, ...] = ()
    time_left_warning_hours: int = 24
    remind_hours: int = 12
    late_run_minutes: int = 60
    snapshot_distance_max_minutes: int = 0


class Stream(Struct, frozen=True, kw_only=True):
    """One stream file."""

    name: str
    topics: str
    machine: str
    tier: Tier = "strict"
    window_messages: int = 100
    window_seconds: int = 60
    decoder: str = "json"
    session: str = "key"
    sequence: str | None = None
    isolation: str = "read_committed"
    on_poison: OnPoison = "quarantine"
    on_check_failure: str = "hold-publish"
    session_timeout_hours: int = 0
    parallelism: str = "partition"
    topic_drained_hours: int = 72
    snapshot_requests: str = ""
    table: TableSettings = TableSettings()
    slice: SliceSettings = SliceSettings()
    output: OutputSettings
    schedule: ScheduleSettings = ScheduleSettings()
    alerts: AlertSettings = AlertSettings()

    @property
    def session_field(self) -> str | None:
        """The message field that names the session, if it is not the Kafka key."""
        return self.session.removeprefix("field:") if self.session.startswith("field:") else None

    @property
    def limits(self) -> Limits:
        """What its sessions are allowed."""
        window = (
            WindowSize(self.window_messages, self.window_seconds) if self.tier == "window" else None
        )
        return Limits(
            window=window,
            timeout_ms=self.session_timeout_hours * 3_600_000,
            distance_ms=self.alerts.snapshot_distance_max_minutes * 60_000,
        )

    def table_machine(self, machine_class: type[TableMachine] = TableMachine) -> TableMachine:
        """The stock machine as this stream wants it."""
        return machine_class(
            key=self.table.key,
            columns=self.table.columns,
            before=self.table.before,
            type_field=self.table.type_field,
            rows_field=self.table.rows_field,
            sequence=self.sequence,
            session=self.session_field,
            lenient=tier_action("precondition", self.tier) == "count",
        )


SECTIONS: dict[str, type[Struct]] = {
    "table": TableSettings,
    "slice": SliceSettings,
    "output": OutputSettings,
    "schedule": ScheduleSettings,
    "alerts": AlertSettings,
}
ALLOWED_VALUES: dict[str, tuple[str, ...]] = {
    "tier": TIERS,
    "decoder": ("json", "debezium", "avro", "protobuf"),
    "isolation": ("read_committed", "read_uncommitted"),
    "on_poison": ("quarantine", "halt", "skip"),
    "on_check_failure": ("hold-publish", "stop"),
    "parallelism": ("partition", "session", "none"),
    "slice.read": ("spark", "task"),
    "output.compression": ("zstd", "snappy", "gzip", "lz4", "none"),
}
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "decoder": ("json",),
    "parallelism": ("partition", "session"),
}
"""Values this version can honour, where it cannot honour all. Later features take their key off
this list.
"""


NUMBER_BOUNDS = (
    ("output.file_bytes_target", 1 << 16, 1 << 34),
    ("output.keep_versions_days", 1, 100_000),
    ("window_messages", 1, 10_000),
    ("window_seconds", 1, 7 * 86_400),
    ("session_timeout_hours", 0, 100_000),
    ("alerts.snapshot_distance_max_minutes", 0, 10_000_000),
    ("topic_drained_hours", 1, 100_000),
    ("alerts.time_left_warning_hours", 1, 100_000),
    ("alerts.late_run_minutes", 1, 10_000_000),
    ("alerts.remind_hours", 1, 10_000),
)
"""Bounds of whole numbers."""


RESERVED_NAMES = ("seriatim_compact", "seriatim_repair", "seriatim_watch")
"""Names that Airflow knows already."""


class _CheckedFile:
    """A stream file while it is being checked: errors name it and the key."""

    def __init__(self, name: str, file_name: str) -> None:
        self.name, self.file_name = name, file_name

    def refuse(self, key: str, found: str, allowed: str) -> NoReturn:
        raise ConfigError(
            f"{self.file_name}: {key}: {found}",
            allowed=allowed,
            next=f"fix {key} in {self.file_name}",
        )


def parse_stream(name: str, toml_values: Mapping[str, Any], file_name: str) -> Stream:
    """A stream from what its TOML says. `where` is the file as the user knows it."""
    file = _CheckedFile(name, file_name)
    if not STREAM_NAME.fullmatch(name) or name in RESERVED_NAMES:
        allowed = f"letters, digits, - and _, at most 64; not {', '.join(RESERVED_NAMES)}"
        file.refuse("file name", f"{name!r} cannot name a stream", allowed)
    fields = _parse_section(file, Stream, toml_values, "")
    for key in ("topics", "machine", "output"):
        if key not in fields:
            file.refuse(key, "missing", "it is required")
    stream = Stream(name=name, **fields)
    _check_values(file, stream)
    return stream


def _parse_section(
    file: _CheckedFile, section_type: type[Struct], toml_values: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """The fields of one section, each of the right type; unknown keys refused with a suggestion."""
    known = [name for name in section_type.__struct_fields__ if name != "name"]
    fields: dict[str, Any] = {}
    for key, value in toml_values.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"unknown key; did you mean {prefix}{close[0]}?" if close else "unknown key"
            file.refuse(f"{prefix}{key}", hint, ", ".join(known))
        if key in SECTIONS and not prefix:
            if not isinstance(value, dict):
                file.refuse(key, f"found {_describe_value(value)}", f"a section [{key}]")
            fields[key] = SECTIONS[key](**_parse_section(file, SECTIONS[key], value, f"{key}."))
        else:
            fields[key] = _parse_value(file, section_type, key, value, prefix)
    return fields


def _parse_value(
    file: _CheckedFile, section_type: type[Struct], key: str, value: Any, prefix: str
) -> Any:
    annotation = str(section_type.__annotations__[key])
    full = f"{prefix}{key}"
    if annotation.startswith("tuple"):
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            file.refuse(full, f"found {_describe_value(value)}", "a list of texts")
        return tuple(value)
    if annotation.startswith("dict"):
        if not isinstance(value, dict) or not all(isinstance(part, str) for part in value.values()):
            file.refuse(full, f"found {_describe_value(value)}", "a table of column = type")
        return value
    wanted = {"int": int, "bool": bool}.get(annotation, str)
    if type(value) is not wanted:
        names = {int: "a whole number", bool: "true or false", str: "a text"}
        file.refuse(full, f"found {_describe_value(value)}", names[wanted])
    return value


def _describe_value(value: Any) -> str:
    names: dict[type, str] = {
        bool: "true/false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    return f"{names.get(type(value), type(value).__name__)} {str(value)[:60]!r}"


def _check_values(file: _CheckedFile, stream: Stream) -> None:
    """What types alone do not say."""
    for key, allowed in ALLOWED_VALUES.items():
        if (found := _get_value(stream, key)) not in allowed:
            close = difflib.get_close_matches(str(found), allowed, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            file.refuse(key, f"found {found!r}{hint}", " | ".join(allowed))
    for key, built in SUPPORTED_VALUES.items():
        if (found := _get_value(stream, key)) not in built:
            shown = " | ".join(map(repr, built))
            file.refuse(key, f"{found!r} is not built yet in this version", shown)
    _check_names(file, stream)
    _check_numbers(file, stream)
    _check_schedule_and_alerts(file, stream)
    if stream.machine == "table":
        _check_table(file, stream)
    elif not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", stream.machine):
        file.refuse(
            "machine",
            f"found {stream.machine!r}",
            '"table" or "module:Class", a Python file beside this one',
        )
    elif stream.table != TableSettings():
        file.refuse(
            "table",
            f"machine is {stream.machine!r}, which takes no [table]",
            'machine = "table", or no [table]',
        )


def _check_names(file: _CheckedFile, stream: Stream) -> None:
    try:
        re.compile(stream.topics)
    except re.error as error:
        file.refuse(
            "topics", f"not a regular expression: {error}", "a regex that matches whole topic names"
        )
    if not stream.topics:
        file.refuse("topics", "empty", "a regex that matches whole topic names")
    if not stream.output.path or not stream.output.path.isprintable():
        found = f"found {stream.output.path!r}" if stream.output.path else "missing or empty"
        file.refuse("output.path", found, "a folder")
    if "://" in stream.output.path and not stream.output.path.startswith("file://"):
        file.refuse("output.path", "object stores are not built yet in this version", "a folder")
    _check_requests(file, stream.snapshot_requests)
    if stream.session != "key" and not re.fullmatch(r"field:[A-Za-z_]\w*", stream.session):
        file.refuse("session", f"found {stream.session!r}", '"key" or "field:NAME"')
    if stream.sequence == "":
        file.refuse("sequence", "empty", "a field of the message; leave the key out for none")
    if stream.tier in ("once", "order", "window") and stream.sequence is None:
        file.refuse(
            "sequence",
            f"missing; tier {stream.tier} needs it",
            "the field with the producer's counter",
        )
    if stream.tier == "strict" and stream.on_poison == "skip":
        file.refuse(
            "on_poison",
            "'skip' under tier strict would lose messages",
            "quarantine | halt, or another tier",
        )
    extra = [name for name in stream.output.partition_by if name not in ("topic", "partition")]
    if extra or len(set(stream.output.partition_by)) != len(stream.output.partition_by):
        file.refuse(
            "output.partition_by",
            f"found {list(stream.output.partition_by)}",
            "[], topic and partition, each once",
        )


def _check_requests(file: _CheckedFile, topic: str) -> None:
    """Requests go to a topic. That the stream does not read it itself is for plan to say: a regex
    may take for ever.
    """
    if topic and not TOPIC_NAME.fullmatch(topic):
        allowed = "the name of a topic that `topics` does not match, or empty"
        file.refuse("snapshot_requests", f"found {topic!r}", allowed)


def _check_numbers(file: _CheckedFile, stream: Stream) -> None:
    if not 1 <= stream.slice.messages_max <= MESSAGES_MAX:
        file.refuse(
            "slice.messages_max", f"found {stream.slice.messages_max}", f"1 to {MESSAGES_MAX}"
        )

    for key, least, most in NUMBER_BOUNDS:
        if not least <= (found := _get_value(stream, key)) <= most:
            file.refuse(key, f"found {found}", f"{least} to {most}")


def _check_schedule_and_alerts(file: _CheckedFile, stream: Stream) -> None:
    """When a run is due, and who is told."""
    if refusal := describe_cron_error(stream.schedule.cron):
        file.refuse(
            "schedule.cron",
            f"found {stream.schedule.cron!r}: {refusal}",
            'five fields, like "*/15 * * * *"',
        )
    for address in stream.alerts.to:
        if not is_mail_address(address):
            file.refuse("alerts.to", f"found {address!r}", "mail addresses, like ops@example.org")


def _check_table(file: _CheckedFile, stream: Stream) -> None:
    table = stream.table
    if not table.columns:
        file.refuse("table.columns", "missing or empty", 'at least one, like { id = "string" }')
    if not table.key:
        file.refuse("table.key", "missing or empty", "one or more of the columns")
    for name in table.key:
        if name not in table.columns:
            close = difflib.get_close_matches(name, table.columns, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            file.refuse("table.key", f"{name!r} is not a column{hint}", ", ".join(table.columns))
    if len(set(table.key)) != len(table.key):
        file.refuse("table.key", f"found {list(table.key)}", "each column once")
    taken = {*RECORD_COLUMNS, "op"} | {f"before_{name}".casefold() for name in table.columns}
    folded = [name.casefold() for name in table.columns]
    for name, type_name in table.columns.items():
        if not COLUMN_NAME.fullmatch(name) or folded.count(name.casefold()) > 1:
            file.refuse(
                f"table.columns.{name}",
                "not a name of its own",
                "no spaces or ,;{}()=, each once whatever its case",
            )
        if name.casefold() in taken:
            file.refuse(
                f"table.columns.{name}",
                "the name is taken by the record's own column",
                "another name",
            )
        if column_type(type_name) is None:
            types = "string int64 float64 bool timestamp date binary decimal(p,s)"
            file.refuse(f"table.columns.{name}", f"found type {type_name!r}", types)
    _check_message_fields(file, stream)


def _check_message_fields(file: _CheckedFile, stream: Stream) -> None:
    named = {
        "table.type_field": stream.table.type_field,
        "table.rows_field": stream.table.rows_field,
        "sequence": stream.sequence,
        "session": stream.session_field,
    }
    used: dict[str, str] = {column: f"column {column}" for column in stream.table.columns}
    for key, name in named.items():
        if name is None:
            continue
        if not name or name in used:
            file.refuse(
                key,
                f"the message field {name!r} is also {used.get(name, 'empty')}",
                "a field of its own",
            )
        used[name] = key


def _get_value(stream: Stream, key: str) -> Any:
    value: Any = stream
    for part in key.split("."):
        value = getattr(value, part)
    return value
