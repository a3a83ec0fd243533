"""Stream files: the whole contract with its defaults; every refusal names file, key, found and
allowed.
"""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest

from seriatim.errors import ConfigError
from seriatim.stream import Stream, describe_cron_error, parse_stream

MINIMAL = {
    "topics": "orders-[a-z]+",
    "machine": "table",
    "table": {"key": ["id"], "columns": {"id": "string", "size": "int64"}},
    "output": {"path": "lake/orders"},
}
WHOLE = """
topics   = "prefix-[a-z]+"
tier     = "strict"
window_messages = 100
window_seconds  = 60
decoder  = "json"
machine  = "table"
session  = "key"
sequence = "seq"
isolation = "read_committed"
on_poison = "quarantine"
on_check_failure = "hold-publish"
session_timeout_hours = 0
parallelism = "partition"
topic_drained_hours = 72
snapshot_requests = ""
[table]
key     = ["id"]
columns = { id = "string", price = "float64", size = "int64" }
before  = true
type_field = "type"
rows_field = "rows"
[slice]
messages_max = 2_000_000
[output]
path = "lake/orders"
partition_by = []
compression = "zstd"
file_bytes_target = 134_217_728
keep_versions_days = 30
[schedule]
cron = "*/15 * * * *"
timezone = "UTC"
[alerts]
to = []
timezone = "UTC"
time_left_warning_hours = 24
remind_hours = 12
late_run_minutes = 60
snapshot_distance_max_minutes = 0
"""


def given(**changes: Any) -> dict[str, Any]:
    """The smallest stream file, changed; `section__key` reaches into a section, None takes a key
    out.
    """
    made = copy.deepcopy(MINIMAL)
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        place: Any = made.setdefault(section, {}) if section else made
        if value is None:
            del place[key]
        else:
            place[key] = value
    return made


def refused(**changes: Any) -> ConfigError:
    """The refusal of a changed stream file."""
    with pytest.raises(ConfigError) as error:
        parse_stream("orders", given(**changes), "orders.toml")
    return error.value


def test_the_contract_of_the_design_is_taken_whole() -> None:
    """The file of the design page, with every key at its default, says the same as the defaults."""
    whole = parse_stream("orders", tomllib.loads(WHOLE), "orders.toml")
    short = parse_stream(
        "orders",
        {
            "topics": "prefix-[a-z]+",
            "machine": "table",
            "sequence": "seq",
            "table": {
                "key": ["id"],
                "columns": {"id": "string", "price": "float64", "size": "int64"},
            },
            "output": {"path": "lake/orders"},
        },
        "orders.toml",
    )
    assert whole == short
    assert isinstance(short, Stream)
    assert short.sequence == "seq"
    assert parse_stream("orders", MINIMAL, "orders.toml").sequence is None


@pytest.mark.parametrize("key", ["topics", "machine", "output"])
def test_required_keys(key: str) -> None:
    """Without them there is no stream."""
    assert refused(**{key: None}).message == f"orders.toml: {key}: missing"


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("topic", "topics"),
        ("teir", "tier"),
        ("on_poisn", "on_poison"),
        ("output__pth", "output.path"),
    ],
)
def test_typos_get_a_suggestion(key: str, close: str) -> None:
    """An unknown key is refused with the one that was meant."""
    error = refused(**{key: "x"})
    assert (
        error.message
        == f"orders.toml: {key.replace('__', '.')}: unknown key; did you mean {close}?"
    )
    assert close.rpartition(".")[2] in error.fields["allowed"]


def test_unknown_keys_are_refused_even_when_nothing_is_close() -> None:
    """What is ignored is misunderstood."""
    assert refused(zzzzzz=1).message == "orders.toml: zzzzzz: unknown key"
    assert refused(name="x").message.startswith("orders.toml: name: unknown key")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("topics", 7, "a text"),
        ("window_messages", "many", "a whole number"),
        ("window_messages", True, "a whole number"),
        ("window_messages", 1.5, "a whole number"),
        ("table__before", "yes", "true or false"),
        ("table__key", "id", "a list of texts"),
        ("table__key", [1], "a list of texts"),
        ("table__columns", ["id"], "a table of column = text"),
        ("table__columns", {"id": 1}, "a table of column = text"),
        ("output", "lake", "a section [output]"),
        ("slice__messages_max", 0, "1 to 1000000000"),
    ],
)
def test_values_of_the_wrong_type(key: str, value: Any, allowed: str) -> None:
    """Named with what was found and what is allowed."""
    error = refused(**{key: value})
    assert error.message.startswith(f"orders.toml: {key.replace('__', '.')}: found ")
    assert error.fields["allowed"] == allowed
    assert error.next == f"fix {key.replace('__', '.')} in orders.toml"


@pytest.mark.parametrize(
    "key", ["tier", "isolation", "on_poison", "on_check_failure", "parallelism"]
)
def test_choices_are_listed(key: str) -> None:
    """A wrong choice shows all right ones."""
    assert " | " in refused(**{key: "wrong"}).fields["allowed"]
    assert "did you mean 'strict'?" in refused(tier="stric").message
    assert refused(parallelism="none").fields["allowed"] == "partition | session"


def test_protobuf_needs_descriptors() -> None:
    """And the error says what writes them."""
    error = refused(decoder="protobuf")
    assert error.message == "orders.toml: protobuf.descriptors: a file of descriptors is missing"
    assert "protoc" in error.fields["allowed"]


@pytest.mark.parametrize("section", ["avro", "protobuf"])
def test_settings_of_another_format_are_refused(section: str) -> None:
    """They would have no effect, and somebody would rely on them."""
    key = {"avro": "avro__reader_schema", "protobuf": "protobuf__descriptors"}[section]
    error = refused(**{key: "orders.file"})
    assert error.message == f"orders.toml: {section}: decoder is 'json'"


@pytest.mark.parametrize(
    "decoder",
    ["json", "json-schema", "avro", "debezium", "comma:CommaSeparated", "formats.comma:Comma"],
)
def test_a_decoder_is_json_or_a_class(decoder: str) -> None:
    """The class is looked for when the stream's machine is loaded."""
    assert parse_stream("orders", {**MINIMAL, "decoder": decoder}, "orders.toml").decoder == decoder


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"topics": "("}, "topics", "not a regular expression"),
        ({"topics": ""}, "topics", "empty"),
        ({"snapshot_requests": "no topic"}, "snapshot_requests", "found 'no topic'"),
        ({"decoder": "xml"}, "decoder", "found 'xml'"),
        ({"decoder": "jsn"}, "decoder", "did you mean 'json'?"),
        ({"decoder": "a b:C"}, "decoder", "found 'a b:C'"),
        ({"output__path": ""}, "output.path", "empty"),
        ({"output__path": "hdfs://lake/orders"}, "output.path", "found 'hdfs://lake/orders'"),
        ({"output__path": "s3a://lake/orders"}, "output.path", "found 's3a://lake/orders'"),
        ({"output__path": "s3://"}, "output.path", "found 's3://'"),
        ({"output__path": "s3://Lake"}, "output.path", "found 's3://Lake'"),
        ({"output__path": "s3:/lake/a"}, "output.path", "found 's3:/lake/a'"),
        ({"output__path": "s3:lake/a"}, "output.path", "found 's3:lake/a'"),
        ({"output__path": "s3//lake/a"}, "output.path", "found 's3//lake/a'"),
        ({"output__path": "s3a://lake/a"}, "output.path", "found 's3a://lake/a'"),
        ({"output__path": "s3://lake/a//b"}, "output.path", "found 's3://lake/a//b'"),
        ({"output__path": "s3://lake/a/../b"}, "output.path", "found"),
        ({"output__path": "s3://lake/a%20b"}, "output.path", "found"),
        ({"output__path": "s3://lake/a?b"}, "output.path", "found"),
        ({"session": "value"}, "session", "'value'"),
        ({"debezium": {"history": "whole"}}, "debezium", "decoder is 'json'"),
        ({"decoder": "debezium", "sequence": "lsn"}, "sequence", "do not count"),
        ({"decoder": "debezium", "session": "field:id"}, "session", "'field:id'"),
        ({"decoder": "debezium", "table__type_field": "op"}, "table.type_field", "no such field"),
        ({"decoder": "debezium", "debezium": {"history": "all"}}, "debezium.history", "'all'"),
        ({"session": "field:"}, "session", "'field:'"),
        ({"sequence": ""}, "sequence", "empty"),
        ({"on_poison": "skip"}, "on_poison", "lose messages"),
        ({"output__partition_by": ["session"]}, "output.partition_by", "session"),
        ({"output__partition_by": ["topic", "topic"]}, "output.partition_by", "topic"),
        ({"machine": "orderbook"}, "machine", "'orderbook'"),
        ({"machine": "order book:Book"}, "machine", "order book"),
        ({"table__columns": {}}, "table.columns", "empty"),
        ({"table__key": []}, "table.key", "empty"),
        ({"table__key": ["idd"]}, "table.key", "did you mean 'id'?"),
        ({"table__key": ["id", "id"]}, "table.key", "['id', 'id']"),
        ({"table__columns": {"id": "text"}}, "table.columns.id", "'text'"),
        ({"table__columns": {"id": "string", "": "int64"}}, "table.columns.", "0 characters"),
        (
            {"table__columns": {"id": "string", "x" * 129: "int64"}},
            f"table.columns.{'x' * 129}",
            "129 characters",
        ),
        ({"table__before_field": "id"}, "table.before_field", "also column id"),
        ({"table__before_field": "rows"}, "table.before_field", "also table.rows_field"),
        ({"decoder": "debezium", "table__before_field": "old"}, "table.before_field", "no such"),
        ({"table__type_field": "id"}, "table.type_field", "also column id"),
        ({"table__rows_field": "type"}, "table.rows_field", "also table.type_field"),
        ({"sequence": "id"}, "sequence", "also column id"),
        ({"session": "field:f", "table__columns": {"id": "string", "f": "bool"}}, "session", "f"),
        ({"session": "field:type"}, "session", "also table.type_field"),
        ({"topic_drained_hours": 0}, "topic_drained_hours", "found 0"),
        ({"alerts__time_left_warning_hours": 0}, "alerts.time_left_warning_hours", "found 0"),
        ({"alerts__late_run_minutes": -1}, "alerts.late_run_minutes", "found -1"),
        ({"output__file_bytes_target": 7}, "output.file_bytes_target", "found 7"),
        ({"output__keep_versions_days": 0}, "output.keep_versions_days", "found 0"),
        ({"alerts__remind_hours": 0}, "alerts.remind_hours", "found 0"),
        ({"alerts__to": ["ops@example.org", "me"]}, "alerts.to", "'me'"),
        ({"schedule__cron": "@daily"}, "schedule.cron", "1 fields, not 5"),
        ({"schedule__timezone": "Europe/Berlim"}, "schedule.timezone", "mean 'Europe/Berlin'?"),
        ({"schedule__timezone": ""}, "schedule.timezone", "found ''"),
        ({"schedule__timezone": "../UTC"}, "schedule.timezone", "'../UTC'"),
        ({"schedule__timezone": "Europe"}, "schedule.timezone", "'Europe'"),
        ({"alerts__timezone": "+02:00"}, "alerts.timezone", "'+02:00'"),
    ],
)
def test_values_that_cannot_work(changes: dict[str, Any], key: str, said: str) -> None:
    """What types alone do not say is refused before anything is read."""
    error = refused(**changes)
    assert error.message.startswith(f"orders.toml: {key}: ")
    assert said in error.message
    assert error.fields["allowed"]


def test_a_pattern_that_takes_for_ever_is_not_tried_when_files_are_read() -> None:
    """Airflow reads all streams in one process: one whose regex explodes would hide the others."""
    requests = "a" * 100
    assert (
        parse_stream(
            "orders", given(topics="(a+)+x", snapshot_requests=requests), "orders.toml"
        ).topics
        == "(a+)+x"
    )


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "ü", "x" * 65])
def test_a_stream_needs_a_name_that_can_be_one(name: str) -> None:
    """It becomes part of DAG ids and paths. The file is to be renamed: nothing in it is wrong."""
    with pytest.raises(ConfigError, match="file name") as caught:
        parse_stream(name, MINIMAL, "some.toml")
    assert caught.value.next == "rename some.toml"
    assert caught.value.fields["allowed"].startswith("a letter or a digit, then letters, digits")


def test_a_connection_begins_with_a_letter() -> None:
    """What is allowed says so, because a digit is refused only there."""
    error = refused(kafka="1k")
    assert error.message == "orders.toml: kafka: found '1k'"
    assert error.fields["allowed"] == "a letter, then letters, digits and _, at most 32"
    assert parse_stream("orders", given(kafka="k1"), "orders.toml").kafka == "k1"


@pytest.mark.parametrize("key", ["table.type_field", "table.rows_field"])
def test_a_message_field_without_a_name_is_told_as_empty(key: str) -> None:
    """It is no field that is used twice."""
    error = refused(**{key.replace(".", "__"): ""})
    assert error.message == f"orders.toml: {key}: empty"
    assert error.fields["allowed"] == "the name of a message field"


def test_what_the_clock_uses_can_be_set() -> None:
    """Hours of drained topics and of the warning, minutes of late runs."""
    changes = given(
        topic_drained_hours=7, alerts__time_left_warning_hours=8, alerts__late_run_minutes=9
    )
    made = parse_stream("orders", changes, "orders.toml")
    assert (
        made.topic_drained_hours,
        made.alerts.time_left_warning_hours,
        made.alerts.late_run_minutes,
    ) == (7, 8, 9)


def test_when_a_run_is_due_and_who_is_told_can_be_set() -> None:
    """A cron text, addresses, and hours between reminders."""
    changes = given(
        schedule__cron="0 6 * * MON-FRI", alerts__to=["ops@example.org"], alerts__remind_hours=3
    )
    made = parse_stream("orders", changes, "orders.toml")
    assert (made.schedule.cron, made.alerts.remind_hours) == ("0 6 * * MON-FRI", 3)
    assert made.alerts.to == ("ops@example.org",)


def test_times_of_people_can_be_set() -> None:
    """By the IANA name of a time zone, for the schedule and for mails."""
    changes = given(schedule__timezone="America/New_York", alerts__timezone="Asia/Kathmandu")
    stream = parse_stream("orders", changes, "orders.toml")
    assert stream.schedule.timezone == "America/New_York"
    assert stream.alerts.timezone == "Asia/Kathmandu"


@pytest.mark.parametrize(
    ("settings", "before_field"),
    [
        ({}, "before"),
        ({"table__before_field": "old"}, "old"),
        ({"table__before_field": ""}, None),
        ({"table__columns": {"id": "string", "before": "string"}}, None),
        ({"sequence": "before"}, None),
    ],
)
def test_before_images_are_in_the_field_before_unless_it_is_another(
    settings: dict[str, Any], before_field: str | None
) -> None:
    """So that a table with such a column needs no setting."""
    stream = parse_stream("orders", given(**settings), "orders.toml")
    assert stream.before_field == before_field


def test_a_column_may_be_the_sequence_the_session_or_the_name_of_rows() -> None:
    """A field of a message can be both; a snapshot has its own sequence and session beside its rows."""
    columns = {"id": "string", "version": "int64", "shop": "string", "rows": "int64"}
    changes = given(
        table__columns=columns, sequence="version", session="field:shop", table__before=False
    )
    table = parse_stream("orders", changes, "orders.toml").table_machine()
    snapshot, update, delete, poison = table.decode(
        [
            b'{"type":"snapshot","version":1,"shop":"s","rows":[{"id":"a","version":1,"rows":9}]}',
            b'{"type":"update","id":"a","version":2,"shop":"s","rows":8}',
            b'{"type":"delete","id":"a","version":3,"shop":"s"}',
            b'{"type":"update","id":"a","shop":"s"}',
        ]
    )
    messages = [snapshot, update, delete]
    assert list(table.sequences(messages)) == [1, 2, 3]
    assert {table.session(message) for message in messages} == {"s"}
    rows = table.start("s")
    assert table.apply(rows, snapshot) == [("snapshot", "a", 1, None, 9)]
    assert table.apply(rows, update) == (("update", "a", 2, "s", 8),)
    assert table.apply(rows, delete) == (("delete", "a", None, None, None),)
    assert "version" in poison.cause


def test_skip_is_for_other_tiers() -> None:
    """Where nothing is promised, poison may be passed over."""
    assert (
        parse_stream("orders", given(tier="none", on_poison="skip"), "orders.toml").on_poison
        == "skip"
    )


def test_the_machine_is_made_as_the_file_says() -> None:
    """Leniency by tier, session field, names of fields."""
    changes = given(
        tier="none", session="field:who", sequence="n", table__type_field="op", table__before=False
    )
    made = parse_stream("orders", changes, "orders.toml").table_machine()
    assert made.lenient
    assert list(made.columns) == ["op", "id", "size"]
    (message,) = made.decode([b'{"op":"insert","n":3,"who":"me","id":"a"}'])
    assert (made.sequences([message])[0], made.session(message)) == (3, "me")
    assert not parse_stream("orders", MINIMAL, "orders.toml").table_machine().lenient


RIGHT_SCHEDULES = [
    "",
    "* * * * *",
    "*/15 * * * *",
    "0 6 * * MON-FRI",
    "5,35 0-6/2 1 JAN 7",
    "59 23 31 12 0",
    "0 0 * * sun",
    "0 0 29 2 *",
    "0 0 31 */2 *",
    "0 0 31 FEB,MAR *",
    "0 0 30-31/1 4 *",
    "0 0 1/29 2 *",
    "9-5 * * * *",
    "0 0 * * FRI-SUN",
    "0 0 L * *",
    "0 0 * * MON#1",
]


@pytest.mark.parametrize("cron", RIGHT_SCHEDULES)
def test_what_cron_takes_is_taken(cron: str) -> None:
    """Stars, steps, ranges, lists, names, and what else Airflow takes; empty is only by hand."""
    assert describe_cron_error(cron) == ""


@pytest.mark.parametrize(
    ("cron", "named"),
    [
        ("@daily", "fields"),
        ("* * * *", "fields"),
        ("* * * * * *", "fields"),
        ("60 * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day"),
        ("* * * 13 *", "month"),
        ("* * * * 8", "weekday"),
        ("*/0 * * * *", "minute"),
        ("*-5 * * * *", "minute"),
        ("* * * FOO *", "month"),
        ("MON * * * *", "minute"),
        ("$(id) * * * *", "minute"),
        ("*  * * * *", "fields"),
        ("0 0 31 2 *", "no day 31 in month 2"),
        ("0 0 30 FEB *", "no day 30 in month FEB"),
        ("0 0 31 4,6 *", "no day 31"),
        ("0 0 31 2,4 1", "no day 31"),
        ("24/12 */21 31 9/55 *", "no day 31"),
    ],
)
def test_what_cron_would_refuse_is_named(cron: str, named: str) -> None:
    """The field that is wrong, before Airflow sees it."""
    assert named in describe_cron_error(cron)


@pytest.mark.parametrize(
    "address", ["ops@example.org", "a.b+c@sub.example-1.org", "root@localhost"]
)
def test_an_address_is_an_address(address: str) -> None:
    """One mailbox at one host."""
    made = parse_stream("orders", given(alerts__to=[address]), "orders.toml")
    assert made.alerts.to == (address,)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ops",
        "@x.org",
        "a@",
        "a b@x.org",
        "a@x.org\nBcc: b@y.org",
        "A <a@x.org>",
        "a@x.org,b@y.org",
        "a@-x",
    ],
)
def test_nothing_else_is(address: str) -> None:
    """No names, lists, or lines that would become headers."""
    assert repr(address) in refused(alerts__to=[address]).message
