"""Streams: what a user writes in streams/NAME.toml, as a checked value.

Every error names the file and the key, the value that was found, and what is allowed. A key whose
feature this version does not have is refused by name, never ignored.

Next: stream_files.py reads the files and loads the machines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import msgspec
from msgspec import Meta, Struct, field

from seriatim.engine.change_table import ChangeTable
from seriatim.engine.decoding import Decoder
from seriatim.engine.findings import OnPoison, Tier, tier_action
from seriatim.engine.fold import Limits
from seriatim.engine.offsets import TOPIC_NAME
from seriatim.engine.rules import WindowSize
from seriatim.engine.table import TableMachine, column_type
from seriatim.errors import ConfigError

MESSAGES_MAX = 1_000_000_000
COLUMN_NAME_LENGTH_MAX = 128
DEFAULT_BEFORE_FIELD = "before"
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
MAIL_ADDRESS = re.compile(
    r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?"
)
"""One address and nothing else: no display name, no list, no line break."""
CRON_FIELDS = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day": "1 to 31",
    "month": "1 to 12",
    "weekday": "0 to 7",
}

# The types of the fields below are the schema of the file: msgspec refuses any other value.
Hours = Annotated[int, Meta(ge=1, le=100_000)]

CONNECTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
"""The name of a Kafka cluster, a store or a schema registry: it is a part of environment variables."""
BUCKET_ADDRESS = re.compile(
    r"(?:(?:s3|gs)://|abfss://[a-z0-9-]+@)[a-z0-9][a-z0-9.-]+[a-z0-9](/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*/?"
)
"""An output in a bucket. Other characters would be read differently by the libraries that take it."""
MISTYPED_ADDRESS = re.compile(r"(?:s3[an]?|gs|abfss?)(?::|//)(?!//)")
"""The begin of an address of a bucket whose `://` is not whole. As a folder it would be a new one on
this host.
"""


class TableSettings(Struct, frozen=True, kw_only=True):
    """[table]: the table machine's rows and the names of its message fields."""

    key: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    before: bool = True
    type_field: str = "type"
    rows_field: str = "rows"
    before_field: str | None = None
    """The field with the row before an update or a delete; empty: none. If it is not set, it is
    `before`, unless that is the name of a column or of another field.
    """


class DebeziumSettings(Struct, frozen=True, kw_only=True):
    """[debezium]: what the messages of the connector are, and what they prove."""

    before_images: Literal["partial", "full"] = "partial"
    """full: `before` is the whole row, and is compared with the row that is here."""
    history: Literal["partial", "whole"] = "partial"
    """whole: the topic has every change, so a change of an unknown row is a contradiction."""
    decimals: Literal["", "precise", "string", "double"] = ""
    """How messages without a schema write decimals; empty: not known."""
    timestamps: Literal["", "milliseconds", "microseconds", "nanoseconds"] = ""
    """The unit of timestamps that are numbers, in messages without a schema; empty: not known."""
    metadata: dict[str, str] = {}
    """Columns of the table whose values are not of the row but of its change, and where they are in
    the message, such as `source.lsn`.
    """


class AvroSettings(Struct, frozen=True, kw_only=True):
    """[avro]: how messages in Avro are read."""

    reader_schema: str = ""
    """A file beside the stream file, with the schema to which records of older and newer schemas are
    resolved. Empty: each record is as it was written.
    """


class ProtobufSettings(Struct, frozen=True, kw_only=True):
    """[protobuf]: how messages in Protobuf are read."""

    descriptors: str = ""
    """A file beside the stream file, as protoc writes it with --include_imports and
    --descriptor_set_out.
    """


class SliceSettings(Struct, frozen=True, kw_only=True):
    """[slice]: bounds of one unit of work."""

    messages_max: Annotated[int, Meta(ge=1, le=MESSAGES_MAX)] = 2_000_000
    read: Literal["task", "spark"] | None = None
    """What reads Kafka: each task its own range, or Spark's own source. None: each task, unless Kafka's
    settings need Spark's source.
    """


class OutputSettings(Struct, frozen=True, kw_only=True):
    """[output]: where and how records and state are written."""

    path: str = ""
    partition_by: tuple[str, ...] = ()
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = "zstd"
    file_bytes_target: Annotated[int, Meta(ge=1 << 16, le=1 << 34)] = 134_217_728
    keep_versions_days: Annotated[int, Meta(ge=1, le=100_000)] = 30


class ScheduleSettings(Struct, frozen=True, kw_only=True):
    """[schedule]: when Airflow runs the stream."""

    cron: str = "*/15 * * * *"
    timezone: str = "UTC"
    """The time zone of `cron`, by its IANA name."""


class AlertSettings(Struct, frozen=True, kw_only=True):
    """[alerts]: who gets mails, and when."""

    to: tuple[str, ...] = ()
    timezone: str = "UTC"
    """The time zone of times in mails, by its IANA name."""
    time_left_warning_hours: Hours = 24
    remind_hours: Annotated[int, Meta(ge=1, le=10_000)] = 12
    late_run_minutes: Annotated[int, Meta(ge=1, le=10_000_000)] = 60
    snapshot_distance_max_minutes: Annotated[int, Meta(ge=0, le=10_000_000)] = 0


class Stream(Struct, frozen=True, kw_only=True):
    """One stream file."""

    name: str
    topics: str
    machine: str
    tier: Tier = "strict"
    window_messages: Annotated[int, Meta(ge=1, le=10_000)] = 100
    window_seconds: Annotated[int, Meta(ge=1, le=7 * 86_400)] = 60
    decoder: str = "json"
    session: str = "key"
    sequence: str | None = None
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    on_poison: OnPoison = "quarantine"
    on_check_failure: Literal["hold-publish", "stop"] = "hold-publish"
    session_timeout_hours: Annotated[int, Meta(ge=0, le=100_000)] = 0
    parallelism: Literal["partition", "session"] = "partition"
    topic_drained_hours: Hours = 72
    snapshot_requests: str = ""
    table: TableSettings = TableSettings()
    debezium: DebeziumSettings = DebeziumSettings()
    avro: AvroSettings = AvroSettings()
    protobuf: ProtobufSettings = ProtobufSettings()
    slice: SliceSettings = SliceSettings()
    kafka: str = ""
    """The name of the Kafka cluster in the connections file; empty: that of the settings."""
    store: str = ""
    """The name of the store of a bucket in the connections file; empty: that of the environment."""
    registry: str = ""
    """The name of the schema registry in the connections file; empty: that of the environment."""
    output: OutputSettings
    schedule: ScheduleSettings = ScheduleSettings()
    alerts: AlertSettings = AlertSettings()

    @property
    def session_field(self) -> str | None:
        """The message field that names the session, if it is not the Kafka key."""
        if self.session.startswith("field:"):
            return self.session.removeprefix("field:")
        return None

    @property
    def before_field(self) -> str | None:
        """The message field with the row before a change; None: no field is taken as that."""
        if self.table.before_field is not None:
            return self.table.before_field or None
        other_fields = {
            *self.table.columns,
            self.table.type_field,
            self.table.rows_field,
            self.sequence,
            self.session_field,
        }
        return None if DEFAULT_BEFORE_FIELD in other_fields else DEFAULT_BEFORE_FIELD

    @property
    def has_session_per_partition(self) -> bool:
        """Whether all messages of a partition are one session."""
        return self.session == "partition"

    @property
    def limits(self) -> Limits:
        """The limits of the stream's sessions: window, timeout and snapshot distance."""
        window = None
        if self.tier == "window":
            window = WindowSize(self.window_messages, self.window_seconds)
        return Limits(
            window=window,
            timeout_ms=self.session_timeout_hours * 3_600_000,
            distance_ms=self.alerts.snapshot_distance_max_minutes * 60_000,
        )

    def table_machine(
        self,
        machine_class: type[TableMachine] = TableMachine,
        decoder: Decoder | None = None,
    ) -> TableMachine:
        """The table machine with the settings of this stream. `decoder` is the stream's own one,
        loaded; None: JSON.
        """
        is_lenient = tier_action("precondition", self.tier) == "count"
        if self.decoder == "debezium":
            has_full_images = self.debezium.before_images == "full"
            has_whole_history = self.debezium.history == "whole"
            has_proof = has_full_images or has_whole_history
            return ChangeTable(
                key=self.table.key,
                columns=self.table.columns,
                before=self.table.before,
                has_full_before_images=has_full_images,
                has_whole_history=has_whole_history,
                # Connectors send changes again after every restart, so without a promise of the
                # stream file that is nothing to report.
                refuses_repeats=has_proof and tier_action("repeat", self.tier) == "halt",
                has_session_per_partition=self.has_session_per_partition,
                lenient=is_lenient,
                decoder=decoder,
            )
        return machine_class(
            key=self.table.key,
            columns=self.table.columns,
            before=self.table.before,
            type_field=self.table.type_field,
            rows_field=self.table.rows_field,
            before_field=self.before_field,
            sequence=self.sequence,
            session=self.session_field,
            has_session_per_partition=self.has_session_per_partition,
            lenient=is_lenient,
            decoder=decoder,
        )


METADATA_PATH = re.compile(r"(source|transaction)\.[A-Za-z_]\w*|op|ts_[mun]s")
DECODERS = ("json", "json-schema", "avro", "protobuf", "debezium")
"""Message formats that have a name. Any other is a class of the user."""
REGISTRY_DECODERS = ("json-schema", "avro", "protobuf", "debezium")
"""Message formats that ask a schema registry. Debezium's does if its messages are in Avro."""
CLASS_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:Class`, a class in a Python file beside the stream file, or in a package."""

COLUMN_TYPES_OF_FIELD: dict[str, Collection[str]] = {
    "table.type_field": (),
    "table.before_field": (),
    "sequence": ("int64",),
    "session": ("string", "int64"),
}
"""The types of columns that may be such a field of a message, too. `rows_field` may be any column:
only snapshots have that field, and they have their columns within the rows.
"""

TYPE_NAMES: dict[type, str] = {
    msgspec.inspect.IntType: "a whole number",
    msgspec.inspect.BoolType: "true or false",
    msgspec.inspect.VarTupleType: "a list of texts",
    msgspec.inspect.DictType: "a table of column = text",
}
"""How errors name the type of a field. All other fields are texts."""
RESERVED_NAMES = ("seriatim_compact", "seriatim_repair", "seriatim_watch")
"""Names of DAGs that exist already."""


class _CheckedFile:
    """A stream file while it is being checked. Errors name the file and the key."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name

    def refuse(self, key: str, found: str, allowed: str) -> NoReturn:
        raise ConfigError(
            f"{self.file_name}: {key}: {found}",
            allowed=allowed,
            next=f"fix {key} in {self.file_name}",
        )


def parse_stream(name: str, toml_values: Mapping[str, Any], file_name: str) -> Stream:
    """The stream of a TOML file, checked. `file_name` is the name that errors show."""
    file = _CheckedFile(file_name)
    if not STREAM_NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise ConfigError(
            f"{file_name}: file name: {name!r} cannot name a stream",
            allowed="a letter or a digit, then letters, digits, - and _, together at most 64;"
            f" not {', '.join(RESERVED_NAMES)}",
            next=f"rename {file_name}",
        )
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
    """The fields of one section, each as its type asks for. Unknown keys are refused with a
    suggestion.
    """
    field_types = {info.name: info.type for info in msgspec.structs.fields(section_type)}
    field_types.pop("name", None)  # a stream's name is that of its file
    fields: dict[str, Any] = {}
    for name, value in toml_values.items():
        key = f"{prefix}{name}"
        if name not in field_types:
            problem = "unknown key"
            close_matches = difflib.get_close_matches(name, field_types, n=1)
            if close_matches:
                problem += f"; did you mean {prefix}{close_matches[0]}?"
            file.refuse(key, problem, ", ".join(field_types))
        field_type = field_types[name]
        if isinstance(field_type, type) and issubclass(field_type, Struct):
            if not isinstance(value, dict):
                file.refuse(key, f"found {_describe_value(value)}", f"a section [{key}]")
            fields[name] = field_type(**_parse_section(file, field_type, value, f"{key}."))
        else:
            fields[name] = _parse_value(file, key, value, field_type)
    return fields


def _parse_value(file: _CheckedFile, key: str, value: Any, field_type: Any) -> Any:
    try:
        return msgspec.convert(value, field_type)
    except msgspec.ValidationError:
        info = msgspec.inspect.type_info(field_type)
    found = _describe_value(value)
    allowed = TYPE_NAMES.get(type(info), "a text")
    if isinstance(info, msgspec.inspect.LiteralType):
        choices = [str(choice) for choice in info.values]
        found = f"{value!r}{_suggestion(str(value), choices)}"
        allowed = " | ".join(choices)
    # Not isinstance: true and false are numbers to Python.
    elif isinstance(info, msgspec.inspect.IntType) and type(value) is int:
        found = str(value)
        allowed = f"{info.ge} to {info.le}"
    return file.refuse(key, f"found {found}", allowed)


def _describe_value(value: Any) -> str:
    names: dict[type, str] = {
        bool: "true/false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    value_type = type(value)
    name = names.get(value_type, value_type.__name__)
    return f"{name} {str(value)[:60]!r}"


def _check_values(file: _CheckedFile, stream: Stream) -> None:
    """Refuse values of the right type that are not supported or do not fit together."""
    _check_names(file, stream)
    _check_session_and_sequence(file, stream)
    _check_schedule_and_alerts(file, stream)
    _check_machine(file, stream)
    _check_decoder(file, stream)
    _check_debezium(file, stream)


def _suggestion(text: str, allowed: Iterable[str]) -> str:
    """The end of an error text, with the allowed value that is most similar; empty if none is."""
    close_matches = difflib.get_close_matches(text, list(allowed), n=1)
    return f"; did you mean {close_matches[0]!r}?" if close_matches else ""


def _check_machine(file: _CheckedFile, stream: Stream) -> None:
    if stream.machine == "table":
        _check_table(file, stream)
    elif not CLASS_REFERENCE.fullmatch(stream.machine):
        allowed = '"table" or "module:Class", a Python file beside this one'
        file.refuse("machine", f"found {stream.machine!r}", allowed)
    elif stream.table != TableSettings():
        problem = f"machine is {stream.machine!r}, which takes no [table]"
        file.refuse("table", problem, 'machine = "table", or no [table]')


def _check_decoder(file: _CheckedFile, stream: Stream) -> None:
    """Refuse a format that is not known, and settings of formats that are not this one."""
    decoder = stream.decoder
    if decoder not in DECODERS and not CLASS_REFERENCE.fullmatch(decoder):
        names = ", ".join(f'"{name}"' for name in DECODERS)
        allowed = f'{names} or "module:Class", a Python file beside this one'
        file.refuse("decoder", f"found {decoder!r}{_suggestion(decoder, DECODERS)}", allowed)
    if stream.registry and decoder not in REGISTRY_DECODERS:
        allowed = "nothing, because messages of this decoder name no schema"
        file.refuse("registry", f"found {stream.registry!r}", allowed)
    if stream.avro != AvroSettings() and decoder != "avro":
        file.refuse("avro", f"decoder is {decoder!r}", 'decoder = "avro", or no [avro]')
    if decoder == "protobuf":
        if not stream.protobuf.descriptors:
            problem = "a file of descriptors is missing"
            allowed = (
                "the path of a file that protoc --include_imports --descriptor_set_out=FILE writes"
            )
            file.refuse("protobuf.descriptors", problem, allowed)
    elif stream.protobuf != ProtobufSettings():
        allowed = 'decoder = "protobuf", or no [protobuf]'
        file.refuse("protobuf", f"decoder is {decoder!r}", allowed)


def _check_debezium(file: _CheckedFile, stream: Stream) -> None:
    """Refuse settings that mean nothing for Debezium's messages, or for any others."""
    is_table = stream.machine == "table"
    if stream.decoder != "debezium" or not is_table:
        if stream.debezium != DebeziumSettings():
            problem = f"decoder is {stream.decoder!r}, machine is {stream.machine!r}"
            allowed = 'decoder = "debezium" and machine = "table", or no [debezium]'
            file.refuse("debezium", problem, allowed)
        return
    if stream.sequence is not None:
        problem = (
            "positions in the source's log rise, but they do not count messages one by one:"
            " a gap cannot be seen"
        )
        file.refuse("sequence", problem, "no sequence with decoder debezium")
    if stream.session_field is not None:
        file.refuse("session", f"found {stream.session!r}", '"key" or "partition"')
    for name, path in stream.debezium.metadata.items():
        if name not in stream.table.columns or name in stream.table.key:
            problem = f"{name} is no column of the table beside its key"
            file.refuse("debezium.metadata", problem, "columns of [table] that are not in its key")
        if not METADATA_PATH.fullmatch(path):
            allowed = "source.NAME, transaction.NAME, op, ts_ms, ts_us or ts_ns"
            file.refuse("debezium.metadata", f"{name} = {path!r}", allowed)
    defaults = TableSettings()
    for key in ("type_field", "rows_field", "before_field"):
        if getattr(stream.table, key) != getattr(defaults, key):
            file.refuse(f"table.{key}", "Debezium's messages have no such field", "leave it out")


def _check_names(file: _CheckedFile, stream: Stream) -> None:
    topics_allowed = "a regex that matches whole topic names"
    try:
        re.compile(stream.topics)
    except re.error as error:
        file.refuse("topics", f"not a regular expression: {error}", topics_allowed)
    if not stream.topics:
        file.refuse("topics", "empty", topics_allowed)
    _check_output_path(file, stream)
    names = (("kafka", stream.kafka), ("store", stream.store), ("registry", stream.registry))
    for key, name in names:
        if name and not CONNECTION_NAME.fullmatch(name):
            file.refuse(key, f"found {name!r}", "a letter, then letters, digits and _, at most 32")
    _check_requests(file, stream)
    partition_by = stream.output.partition_by
    is_known = set(partition_by) <= {"topic", "partition"}
    is_unique = len(set(partition_by)) == len(partition_by)
    if not is_known or not is_unique:
        allowed = '[], or a list of "topic" and "partition", each at most once'
        file.refuse("output.partition_by", f"found {list(partition_by)}", allowed)


def _check_output_path(file: _CheckedFile, stream: Stream) -> None:
    output_path = stream.output.path
    if not output_path:
        file.refuse("output.path", "missing or empty", "a folder")
    if not output_path.isprintable():
        file.refuse("output.path", f"found {output_path!r}", "a folder")
    is_address = "://" in output_path and not output_path.startswith("file://")
    if is_address or MISTYPED_ADDRESS.match(output_path):
        allowed = "a folder, or s3://BUCKET/PREFIX (gs://, abfss://) of letters, digits and . _ = -"
        if not BUCKET_ADDRESS.fullmatch(output_path):
            file.refuse("output.path", f"found {output_path!r}", allowed)
    elif stream.store:
        file.refuse("store", f"found {stream.store!r}", "nothing, because output.path is a folder")


def _check_session_and_sequence(file: _CheckedFile, stream: Stream) -> None:
    """Refuse a session, sequence or tier whose settings do not fit together."""
    is_field = re.fullmatch(r"field:[A-Za-z_]\w*", stream.session)
    if stream.session not in ("key", "partition") and not is_field:
        file.refuse("session", f"found {stream.session!r}", '"key", "partition" or "field:NAME"')
    if stream.sequence == "":
        file.refuse(
            "sequence", "empty", "a field of the message; if there is none, leave `sequence` out"
        )
    # Debezium's positions show what is a repeat, but not what is missing or swapped.
    has_positions = stream.decoder == "debezium" and stream.machine == "table"
    needs_sequence = ("order", "window") if has_positions else ("once", "order", "window")
    if stream.tier in needs_sequence and stream.sequence is None:
        problem = f"missing; tier {stream.tier} needs it"
        file.refuse("sequence", problem, "the field with the producer's counter")
    if stream.tier == "strict" and stream.on_poison == "skip":
        problem = "'skip' under tier strict would lose messages"
        file.refuse("on_poison", problem, "quarantine | halt, or another tier")


def _check_requests(file: _CheckedFile, stream: Stream) -> None:
    """Refuse a wrong topic for snapshot requests. Whether the stream reads that topic itself is
    checked by plan, because matching a regex may take very long.
    """
    topic = stream.snapshot_requests
    is_debezium = stream.decoder == "debezium" and stream.machine == "table"
    if topic and is_debezium and stream.has_session_per_partition:
        problem = "no message tells where a snapshot of Debezium's connector ends"
        file.refuse("snapshot_requests", problem, 'session = "key", or no snapshot_requests')
    if topic and not TOPIC_NAME.fullmatch(topic):
        allowed = "the name of a topic that `topics` does not match, or empty"
        file.refuse("snapshot_requests", f"found {topic!r}", allowed)


def _check_schedule_and_alerts(file: _CheckedFile, stream: Stream) -> None:
    """Refuse a wrong cron text or mail address."""
    cron = stream.schedule.cron
    cron_error = describe_cron_error(cron)
    if cron_error:
        problem = f"found {cron!r}: {cron_error}"
        file.refuse("schedule.cron", problem, 'five fields, like "*/15 * * * *"')
    _check_timezone(file, "schedule.timezone", stream.schedule.timezone)
    _check_timezone(file, "alerts.timezone", stream.alerts.timezone)
    for address in stream.alerts.to:
        if not MAIL_ADDRESS.fullmatch(address):
            file.refuse("alerts.to", f"found {address!r}", "mail addresses, like ops@example.org")


def _check_timezone(file: _CheckedFile, key: str, name: str) -> None:
    """Refuse a name that is no time zone. UTC needs no database of zones, so it is always right."""
    if name == "UTC":
        return
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        hint = _suggestion(name, available_timezones())
        allowed = 'an IANA name of a time zone, like "UTC" or "Europe/Berlin"'
        file.refuse(key, f"found {name!r}{hint}", allowed)


def describe_cron_error(cron: str) -> str:
    """What is wrong with a cron text of five fields; empty: nothing. An empty text is right: it means
    that runs are started by hand only.

    Airflow decides by croniter, and so do we. It takes six fields and names like @daily as well, but
    not everything that reads a schedule agrees about them.
    """
    # Loaded here: commands and Spark's workers that read no stream file do without it.
    from croniter import CroniterError, croniter

    if not cron:
        return ""
    texts = cron.split(" ")
    if len(texts) != len(CRON_FIELDS):
        return f"{len(texts)} fields, not {len(CRON_FIELDS)}"
    for i, (name, bounds) in enumerate(CRON_FIELDS.items()):
        # Croniter does not say which field is wrong, so each is tried with stars around it.
        fields = ["*"] * len(CRON_FIELDS)
        fields[i] = texts[i]
        if not croniter.is_valid(" ".join(fields)):
            return f"{name} is {texts[i]!r}, not in {bounds}"
    try:
        # From 1970 on, so that the answer does not depend on the day on which it is asked.
        croniter(cron, 0).get_next()
    except CroniterError:
        return f"there is no day {texts[2]} in month {texts[3]}"
    return ""


def _check_table(file: _CheckedFile, stream: Stream) -> None:
    table = stream.table
    if not table.columns:
        file.refuse("table.columns", "missing or empty", 'at least one, like { id = "string" }')
    if not table.key:
        file.refuse("table.key", "missing or empty", "one or more of the columns")
    for name in table.key:
        if name not in table.columns:
            hint = _suggestion(name, table.columns)
            file.refuse("table.key", f"{name!r} is not a column{hint}", ", ".join(table.columns))
    if len(set(table.key)) != len(table.key):
        file.refuse("table.key", f"found {list(table.key)}", "each column once")
    _check_columns(file, table.columns)
    if stream.decoder != "debezium":  # its columns are in an object of their own
        _check_message_fields(file, stream)


def _check_columns(file: _CheckedFile, columns: Mapping[str, str]) -> None:
    """Refuse columns without a name, and unknown types. Any name will do: `output_column_names` says
    what a column is called if its name is taken.
    """
    for column, type_name in columns.items():
        key = f"table.columns.{column}"
        if not column or len(column) > COLUMN_NAME_LENGTH_MAX:
            allowed = f"1 to {COLUMN_NAME_LENGTH_MAX} characters"
            file.refuse(key, f"a name of {len(column)} characters", allowed)
        if column_type(type_name) is None:
            types = "string int64 float64 bool timestamp date binary decimal(p,s)"
            file.refuse(key, f"found type {type_name!r}", types)


def _check_message_fields(file: _CheckedFile, stream: Stream) -> None:
    """Refuse two settings that mean the same field of a message, unless the field can be both."""
    fields = {
        "table.type_field": stream.table.type_field,
        "table.rows_field": stream.table.rows_field,
        "table.before_field": stream.before_field,
        "sequence": stream.sequence,
        "session": stream.session_field,
    }
    columns = stream.table.columns
    uses: dict[str, str] = {}
    for key, name in fields.items():
        if name is None:
            continue
        if not name:
            file.refuse(key, "empty", "the name of a message field")
        if name in uses:
            file.refuse(
                key, f"the message field {name!r} is also {uses[name]}", "a field of its own"
            )
        uses[name] = key
        column_types = COLUMN_TYPES_OF_FIELD.get(key)
        if column_types is None or name not in columns:
            continue
        if columns[name] not in column_types:
            allowed = "a field of its own"
            if column_types:
                allowed += f", or a column of type {' or '.join(column_types)}"
            file.refuse(key, f"the message field {name!r} is also column {name}", allowed)
