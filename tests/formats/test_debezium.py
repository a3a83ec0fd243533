"""Debezium's messages: what becomes of each kind, each type of value, and each wrong value."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from seriatim import Machine
from seriatim.cli.lookback import step_values
from seriatim.engine.change_table import DELETED_POSITIONS_MAX, ChangedRows, ChangeTable
from seriatim.engine.findings import Tier
from seriatim.engine.fold import Fold
from seriatim.engine.machine import UserMachine
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.fast.choose import choose_machine
from seriatim.fast.column_kinds import can_use_compiled_fold
from seriatim.formats.debezium import DebeziumDecoder, debezium_decoder
from seriatim.stream import parse_stream
from seriatim.stream_files import load_runner, load_stream
from seriatim.testing import CRASH, Folded, MemoryStream, fold, fold_table
from tests.contracts.decoder_cases import import_example, write_example_files
from tests.formats.captured_stream import CapturedStream
from tests.formats.change_events import (
    COLUMNS,
    HEARTBEAT,
    NOTIFICATION,
    ROW,
    SCHEMA_CHANGE,
    TRANSACTION,
    UNAVAILABLE,
    base64_decimal,
    encode,
    event,
    with_schema,
)
from tests.operations.lookback_helper import explain_row, trace_steps
from tests.operations.memory_streams import A0
from tests.operations.repair_helper import repair

KEY = '{"id":1}'


def row(**values: Any) -> dict[str, Any]:
    """The row of the source, changed."""
    return {**ROW, **values}


def fold_orders(messages: Iterable[Any], *, key: str | None = KEY, **settings: Any) -> Folded:
    """Fold messages of one Kafka key."""
    debezium = {"decimals": "precise", **settings.pop("debezium", {})}
    keyed = [message if message is CRASH else (key, message) for message in messages]
    return fold_table(
        keyed, key=["id"], columns=COLUMNS, decoder="debezium", debezium=debezium, **settings
    )


def rows_of(folded: Folded) -> list[dict[str, Any]]:
    """The rows of all sessions."""
    return [plain for state in folded.states.values() for plain in state["rows"]]


def causes(folded: Folded) -> list[tuple[str, int, str]]:
    """The findings."""
    return [(found.finding, found.offset, found.cause) for found in folded.findings]


@pytest.mark.parametrize("wrap", [lambda payload: payload, with_schema], ids=["bare", "schema"])
@pytest.mark.parametrize("session", ["key", "partition"])
def test_a_row_lives_from_its_snapshot_to_its_delete(session: str, wrap: Any) -> None:
    """Read, update with a value that did not change, delete with defaults in `before`, tombstone."""
    before = row(customer="", amount=None, big=None, at="1970-01-01T00:00:00.000000Z", day=None)
    messages = [
        wrap(event("r", row())),
        wrap(event("u", row(amount="Jw8=", big=UNAVAILABLE))),
        CRASH,
        wrap(event("d", None, before)),
        None,
        wrap(event("c", row(customer="again"))),
    ]
    folded = fold_orders(messages, session=session)
    assert causes(folded) == []
    assert [record["op"] for record in folded.records] == ["snapshot", "update", "delete", "insert"]
    assert folded.records[1]["amount"] == Decimal("99.99")
    assert folded.records[1]["big"] == ROW["big"]
    assert folded.records[1]["day"] == date(2026, 1, 2)
    assert folded.records[1]["at"] == datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert [plain["customer"] for plain in rows_of(folded)] == ["again"]


@pytest.mark.parametrize(
    "other", [None, HEARTBEAT, TRANSACTION, SCHEMA_CHANGE, NOTIFICATION, event("m")]
)
@pytest.mark.parametrize("key", [None, KEY])
def test_what_concerns_no_row_is_passed_over(other: Any, key: str | None) -> None:
    """Wherever it arrives, with or without a key, and it begins no session."""
    folded = fold_orders([other, CRASH, other], key=key)
    assert (causes(folded), folded.records, folded.states) == ([], [], {})


def test_a_tombstone_does_not_end_a_quarantine() -> None:
    """And it is not stored with the quarantined messages."""
    folded = fold_orders([event("r", row()), b"{", None, event("u", row(customer="new"))])
    assert [found[:2] for found in causes(folded)] == [("poison", 1)]
    assert rows_of(folded)[0]["customer"] == "new"


@pytest.mark.parametrize(("op", "customer"), [("r", "new"), ("c", "new"), ("u", "new"), ("d", "")])
def test_a_whole_row_begins_a_session_again(op: str, customer: str) -> None:
    """After poison, whatever the settings take as proof: the rows of a quarantined session are none."""
    change = event("d", None, row()) if op == "d" else event(op, row(customer="new"), row(big="x"))
    folded = fold_orders(
        [event("r", row()), b"{", change],
        debezium={"before_images": "full", "history": "whole"},
    )
    assert [found[:2] for found in causes(folded)] == [("poison", 1)]
    assert [plain["customer"] for plain in rows_of(folded)] == ([customer] if customer else [])


def test_an_update_that_lacks_a_value_is_headless_without_its_row() -> None:
    """In both kinds of sessions; an update with the whole row begins it. A session per partition has
    begun already: it lacks a row then, and says so once.
    """
    messages = [
        event("u", row(big=UNAVAILABLE)),
        event("u", row(big=UNAVAILABLE)),
        event("u", row(customer="whole")),
        event("u", row(big=UNAVAILABLE)),
    ]
    by_key = fold_orders(messages)
    assert (causes(by_key), by_key.headless) == ([], 2)
    by_partition = fold_orders(messages, session="partition")
    assert by_partition.headless == 2
    assert causes(by_partition) == [
        ("precondition", 0, "the value of big did not change, but it is not known: id=1")
    ]
    assert by_partition.findings[0].level == "warning"
    for folded in (by_key, by_partition):
        assert rows_of(folded)[0]["big"] == ROW["big"]


def test_a_value_of_a_column_that_the_table_lacks_may_be_unavailable() -> None:
    """Only the columns of the table count."""
    folded = fold_orders([event("c", row(note=UNAVAILABLE))])
    assert (folded.headless, len(rows_of(folded))) == (0, 1)


def test_a_changed_key_takes_the_values_of_its_old_row_along() -> None:
    """In a session per partition, also over a crash. By key the old row is another session, so the new
    one is a finding, whatever the stream file says of the topic.
    """
    changed = [
        event("r", row()),
        event("d", None, row(customer=""), lsn=5),
        CRASH,
        None,
        event("c", row(id=100, big=UNAVAILABLE), lsn=5),
    ]
    folded = fold_orders(changed, session="partition")
    assert causes(folded) == []
    assert [(plain["id"], plain["big"]) for plain in rows_of(folded)] == [(100, ROW["big"])]
    new_key = '{"id":100}'
    for settings in ({}, {"history": "whole"}):
        by_key = fold_table(
            [
                (KEY, changed[0]),
                (new_key, changed[-1]),
                (new_key, event("u", row(id=100, customer="new", big=UNAVAILABLE))),
                CRASH,
                (new_key, event("u", row(id=100, big="whole"))),
            ],
            key=["id"],
            columns=COLUMNS,
            decoder="debezium",
            debezium={"decimals": "precise", **settings},
        )
        ((kind, offset, cause),) = causes(by_key)
        assert (kind, offset) == ("precondition", 1)
        assert cause == (
            "the value of big did not change, but it is not known: id=100;"
            " the row under its old key is another session"
        )
        assert [(plain["id"], plain["big"]) for plain in rows_of(by_key)] == [
            (1, ROW["big"]),
            (100, "whole"),
        ]


TAKEN_KEY = [
    event("r", row(id=7, big="seven")),
    event("r", row(id=5, big="five")),
    event("d", None, row(id=7), lsn=30000000),
    event("d", None, row(id=5), lsn=30000100),
    event("c", row(id=7, big=UNAVAILABLE), lsn=30000100),
]
"""Row 7 is deleted, and row 5 takes its key along with a value that is stored apart."""
TAKEN_AGAIN = [
    *TAKEN_KEY,
    event("c", row(id=5, big="new five"), lsn=30000200),
    event("u", row(id=7, customer="c2", big=UNAVAILABLE), lsn=30000300),
]


@pytest.mark.parametrize("history", [TAKEN_KEY, TAKEN_AGAIN])
@pytest.mark.parametrize("repeated_from", range(2, 6))
@pytest.mark.parametrize("tier", ["none", "once", "strict"])
def test_messages_that_a_connector_sends_again_leave_the_table_as_it_is(
    history: list[dict[str, Any]], repeated_from: int, tier: Tier
) -> None:
    """From any message on, at any of its ends, and over crashes: values that are stored apart are
    those of the right row, and the repeats are counted.
    """
    expected = rows_of(fold_orders(history, session="partition"))
    for sent in range(repeated_from + 1, len(history) + 1):
        repeated = history[repeated_from:sent]
        messages = [*history[:sent], CRASH, *repeated, CRASH, *repeated, *history[sent:]]
        folded = fold_orders(messages, session="partition", tier=tier)
        assert sorted_rows(rows_of(folded)) == sorted_rows(expected), sent
        assert causes(folded) == []
        assert folded.headless == 0
        assert len(folded.records) == len(history)


def test_repeats_are_counted_and_where_the_stream_promises_proof_they_are_found() -> None:
    """Also in the session of one row that was deleted."""
    messages = [event("c", row()), event("u", row(customer="c2"), row()), event("d", None, row())]
    messages[2]["before"]["customer"] = "c2"
    for session in ("key", "partition"):
        world = orders_stream(session=session, debezium={"decimals": "precise"})
        for message in [*messages, *messages]:
            world.kafka.produce("shop.public.orders", KEY, encode(message), partition=0)
        outcome = world.run()
        assert outcome.findings == []
        assert len(world.rows()) == 3
        account = world.accounts()[Partition("shop.public.orders", 0)]
        assert account.counts == {"repeat": 3}
        found = fold_orders([*messages, *messages], session=session, debezium=FULL)
        (position, last) = (messages[0]["source"]["lsn"], messages[2]["source"]["lsn"])
        assert causes(found)[0] == (
            "precondition",
            3,
            f"position {position} in the source's log, after {last} of the same row",
        )
        dropped = fold_orders([*messages, *messages], session=session, debezium=FULL, tier="once")
        assert (causes(dropped), len(dropped.records)) == ([], 3)


def test_a_repeated_truncate_leaves_the_rows_that_came_after_it() -> None:
    """And the connector's other repeats before it."""
    messages = [
        event("r", row()),
        event("t"),
        event("c", row(id=2)),
        event("c", row(id=3)),
        event("u", row(id=3, big=UNAVAILABLE)),
    ]
    folded = fold_orders([*messages, CRASH, *messages[1:4]], session="partition")
    assert causes(folded) == []
    assert [plain["id"] for plain in rows_of(folded)] == [2, 3]
    assert [record["op"] for record in folded.records] == [
        "snapshot",
        "delete",
        "insert",
        "insert",
        "update",
    ]


def test_a_repeated_truncate_leaves_a_row_that_was_read_after_it() -> None:
    """A read has no position of its own, but that of the truncate is known."""
    messages = [event("c", row()), event("t"), event("r", row(customer="read"))]
    folded = fold_orders([*messages, CRASH, messages[1]], session="partition")
    assert [plain["customer"] for plain in rows_of(folded)] == ["read"]
    found = fold_orders([*messages, messages[1]], session="partition", debezium=FULL)
    assert [(kind, offset) for kind, offset, _ in causes(found)] == [("precondition", 3)]


def test_a_row_that_was_never_here_leaves_its_key_once() -> None:
    """The topic begins after its create, which comes again after its key was changed."""
    moved = event("u", row(id=7), row(), lsn=200)
    messages = [moved, CRASH, event("c", row(), lsn=100), moved]
    folded = fold_orders(messages, session="partition", debezium=FULL, tier="once")
    assert [plain["id"] for plain in rows_of(folded)] == [7]


def test_a_log_that_begins_anew_is_no_repeat() -> None:
    """A source that was restored from a backup counts its positions from an earlier one. The time of
    the commit tells that its changes are new.
    """
    later = event("u", row(customer="restored"), lsn=16)
    later["source"]["ts_ms"] += 60_000
    later["source"]["ts_us"] += 60_000_000
    folded = fold_orders([event("c", row()), later])
    assert rows_of(folded)[0]["customer"] == "restored"


@pytest.mark.parametrize("later_us", [1, 999])
def test_an_insert_that_waited_for_its_key_is_no_repeat(later_us: int) -> None:
    """PostgreSQL writes a row into its log before it waits for the transaction that has the same key.
    If that one removes its row, the insert is behind it in the log, and commits just after it.
    """
    waited = event("c", row(customer="waited"), lsn=26420900)
    waited["source"]["ts_us"] += later_us
    messages = [
        event("c", row(), lsn=26420890),
        event("d", None, row(), lsn=26420910),
        waited,
    ]
    for session in ("key", "partition"):
        folded = fold_orders(messages, session=session)
        assert [plain["customer"] for plain in rows_of(folded)] == ["waited"]


def test_a_create_takes_no_value_of_the_row_that_it_replaces() -> None:
    """The delete of row 7 is lost on the way: its value is not that of the row that took its key."""
    lost = [event("r", row(id=7, big="seven")), event("c", row(id=7, big=UNAVAILABLE))]
    assert fold_orders(lost, session="partition").headless == 1
    assert [kind for kind, _, _ in causes(fold_orders(lost))] == ["precondition"]


def test_keys_that_change_in_a_chain_are_found_by_before_images() -> None:
    """The create of the new row 2 comes before the delete of the old one. By default the delete then takes
    the new row away, and nothing says so.
    """
    two = row(id=2, customer="two")
    chain = [
        *(event("c", row(id=1)), event("c", two)),
        *(event("d", None, row(id=1), lsn=30000000), event("c", row(id=2), lsn=30000000)),
        *(event("d", None, two, lsn=30000100), event("c", row(id=3, customer="two"), lsn=30000100)),
    ]
    unproven = fold_orders(chain, session="partition")
    assert causes(unproven) == []
    assert [plain["id"] for plain in rows_of(unproven)] == [3]
    proven = fold_orders(chain, session="partition", debezium=FULL)
    assert causes(proven) == [("precondition", 3, "create of a row that is there already: id=2")]


def test_positions_of_deleted_rows_are_remembered_up_to_a_limit() -> None:
    """A session per partition would grow with every row that ever was."""
    rows = ChangedRows()
    for number in range(DELETED_POSITIONS_MAX + 5):
        rows.remove(number, (number, 0))
    assert list(rows.deleted_positions) == list(range(5, DELETED_POSITIONS_MAX + 5))


def sorted_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by their key: a row that moved comes last."""
    return sorted(rows, key=lambda plain: plain["id"])


@pytest.mark.parametrize("repeats", [0, 1, 2])
def test_a_row_may_get_another_kafka_key_and_keep_the_key_of_the_table(repeats: int) -> None:
    """`message.key.columns` names the customer: a delete and a create of the same row come from one
    place in the source's log, and the create is no repeat. What is sent again is one.
    """
    created = event("c", row(), lsn=100)
    deleted = event("d", None, row(), lsn=200)
    moved = event("c", row(customer="c2", big=UNAVAILABLE), lsn=200)
    again = [created, deleted, moved][:repeats]
    messages = [created, deleted, CRASH, *again, moved, CRASH, deleted, moved]
    folded = fold_orders(messages, session="partition")
    assert causes(folded) == []
    assert [record["op"] for record in folded.records] == ["insert", "delete", "insert"]
    assert [(plain["customer"], plain["big"]) for plain in rows_of(folded)] == [("c2", ROW["big"])]


def test_another_create_does_not_take_the_values_of_a_deleted_row() -> None:
    """Only that of the same place in the source's log does."""
    folded = fold_orders(
        [
            event("r", row()),
            event("d", None, row(), lsn=5),
            event("c", row(id=2, big=UNAVAILABLE), lsn=6),
        ],
        session="partition",
    )
    assert (folded.headless, rows_of(folded)) == (1, [])


def test_without_a_source_a_create_takes_no_value_of_a_deleted_row() -> None:
    """Nothing tells then that both are one change."""
    messages = [
        event("r", row()),
        event("d", None, row()),
        event("c", row(id=2)),
        event("c", row(id=3, big=UNAVAILABLE)),
    ]
    without_source = [{**message, "source": None} for message in messages]
    left_out = [{key: message[key] for key in message if key != "source"} for message in messages]
    for sent in (without_source, left_out):
        folded = fold_orders(sent, session="partition")
        assert folded.headless == 1
        assert [plain["id"] for plain in rows_of(folded)] == [2]


@pytest.mark.parametrize("session", ["key", "partition"])
def test_an_update_with_full_images_may_change_the_key_of_the_table(session: str) -> None:
    """It is not the key of the source then. The row moves, with the value that did not change."""
    messages = [
        event("r", row()),
        event("u", row(id=7, customer="c2", big=UNAVAILABLE), row()),
        CRASH,
        event("u", row(id=7, customer="c3"), row(id=7, customer="c2")),
    ]
    folded = fold_orders(messages, session=session, debezium={"before_images": "full"})
    assert causes(folded) == []
    assert [(record["op"], record["id"]) for record in folded.records] == [
        ("snapshot", 1),
        ("delete", 1),
        ("insert", 7),
        ("update", 7),
    ]
    (moved_row,) = rows_of(folded)
    assert (moved_row["id"], moved_row["customer"]) == (7, "c3")
    assert folded.records[2]["big"] == ROW["big"]
    # Without full images `before` may have the defaults of the types, so no key is taken from it.
    folded = fold_orders(messages, session=session)
    assert [plain["id"] for plain in rows_of(folded)] == [1, 7]


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        (
            [event("r", row()), event("u", row(id=2), row(customer="lost"))],
            "before-image differs from the row in customer: id=1",
        ),
        (
            [event("r", row()), event("r", row(id=2)), event("u", row(id=2), row())],
            "change of a key to one that is there already: id=2",
        ),
        ([event("u", row(id=2), row())], "update of a missing row: id=1"),
    ],
)
def test_a_changed_key_that_contradicts_the_rows_is_a_finding(
    messages: list[Any], cause: str
) -> None:
    """At its own offset, with the key that the contradiction is about."""
    settings = {"before_images": "full", "history": "whole"}
    folded = fold_orders(messages, session="partition", debezium=settings)
    assert causes(folded) == [("precondition", len(messages) - 1, cause)]


def test_a_truncate_empties_its_partition() -> None:
    """By key it is refused: a session does not know the other rows."""
    messages = [event("r", row()), event("r", row(id=2)), event("t"), event("c", row(id=3))]
    folded = fold_orders(messages, session="partition", key=None)
    assert causes(folded) == []
    assert [plain["id"] for plain in rows_of(folded)] == [3]
    by_key = fold_table(
        [(KEY, messages[0]), (None, event("t"))],
        key=["id"],
        columns=COLUMNS,
        decoder="debezium",
        debezium={"decimals": "precise"},
    )
    ((kind, offset, cause),) = causes(by_key)
    assert (kind, offset) == ("poison", 1)
    assert cause.startswith("a TRUNCATE empties the whole table")


FULL = {"before_images": "full"}
WHOLE = {"history": "whole"}


@pytest.mark.parametrize(
    ("settings", "messages", "cause"),
    [
        (WHOLE, [event("c", row()), event("c", row())], "create of a row that is there already"),
        (FULL, [event("c", row()), event("c", row())], "create of a row that is there already"),
        ({}, [event("c", row()), event("c", row())], ""),
        (WHOLE, [event("u", row())], "update of a missing row"),
        (FULL, [event("u", row(), row(big="other"))], ""),
        ({}, [event("u", row())], ""),
        (WHOLE, [event("d", None, row())], "delete of a missing row"),
        ({}, [event("d", None, row())], ""),
        (
            FULL,
            [event("r", row()), event("u", row(), row(customer="lost"))],
            "before-image differs from the row in customer",
        ),
        (
            FULL,
            [event("r", row()), event("d", None, row(amount="Jw8="))],
            "before-image differs from the row in amount",
        ),
        (FULL, [event("r", row()), event("u", row(), {"id": 1, "customer": "c1"})], ""),
        ({}, [event("r", row()), event("u", row(), row(customer="lost"))], ""),
        (FULL | WHOLE, [event("r", row()), event("r", row(customer="new"))], ""),
    ],
)
@pytest.mark.parametrize("session", ["key", "partition"])
def test_a_contradiction_is_a_finding_where_the_settings_make_it_a_proof(
    settings: dict[str, str], messages: list[Any], cause: str, session: str
) -> None:
    """At its own offset; under tier none it is only counted, and applied."""
    folded = fold_orders(messages, debezium=settings, session=session)
    expected = [("precondition", len(messages) - 1, f"{cause}: id=1")] if cause else []
    assert causes(folded) == expected
    counted = fold_orders(messages, debezium=settings, session=session, tier="none")
    assert causes(counted) == []
    assert bool(rows_of(counted)) == (messages[-1]["op"] != "d")


def test_an_update_without_the_full_image_that_was_promised_is_poison() -> None:
    """The stream file says something about the connector that is not so."""
    folded = fold_orders([event("r", row()), event("u", row())], debezium=FULL)
    ((kind, offset, cause),) = causes(folded)
    assert (kind, offset) == ("poison", 1)
    assert "does not send full before-images" in cause


def typed(name: str, type_name: str = "int64", **more: Any) -> dict[str, Any]:
    """The schema of column v."""
    return {"type": type_name, "optional": True, "name": name, "field": "v", **more}


TIME = datetime(2026, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
MILLISECONDS = 1767225601500
PRECISE = "org.apache.kafka.connect.data.Decimal"
VARIABLE = "io.debezium.data.VariableScaleDecimal"


@pytest.mark.parametrize(
    ("type_name", "schema", "sent", "value"),
    [
        ("timestamp", typed("io.debezium.time.Timestamp"), MILLISECONDS, TIME),
        ("timestamp", typed("org.apache.kafka.connect.data.Timestamp"), MILLISECONDS, TIME),
        ("timestamp", typed("io.debezium.time.MicroTimestamp"), MILLISECONDS * 1000, TIME),
        ("timestamp", typed("io.debezium.time.NanoTimestamp"), MILLISECONDS * 10**6 + 400, TIME),
        ("timestamp", typed("io.debezium.time.ZonedTimestamp", "string"), TIME.isoformat(), TIME),
        ("int64", typed("io.debezium.time.MicroTimestamp"), 7, 7),
        ("int64", typed("io.debezium.time.MicroTime"), 7, 7),
        ("date", typed("io.debezium.time.Date", "int32"), -1, date(1969, 12, 31)),
        ("date", typed("io.debezium.time.IsoDate", "string"), "2026-01-02Z", date(2026, 1, 2)),
        ("date", None, 20455, date(2026, 1, 2)),
        (
            "decimal(38,2)",
            typed(PRECISE, "bytes", parameters={"scale": "2"}),
            base64_decimal(-(10**37)),
            Decimal(-(10**35)),
        ),
        (
            "decimal(10,3)",
            typed(VARIABLE, "struct"),
            {"scale": 3, "value": base64_decimal(1001)},
            Decimal("1.001"),
        ),
        ("decimal(10,3)", None, {"scale": 1, "value": "fQ=="}, Decimal("12.5")),
        ("decimal(10,2)", typed("", "string"), "1000", Decimal(1000)),
        ("decimal(10,2)", typed("", "double"), 12.5, Decimal("12.5")),
        ("decimal(10,2)", None, "12.50", Decimal("12.5")),
        ("binary", typed("", "bytes"), "aGk=", b"hi"),
        ("binary", None, "aGk=", b"hi"),
        ("string", typed("io.debezium.data.Uuid", "string"), "0b5a-", "0b5a-"),
        ("float64", typed("", "double"), None, None),
        ("bool", typed("", "boolean"), True, True),
    ],
)
def test_a_value_becomes_what_its_schema_or_column_says(
    type_name: str, schema: dict[str, Any] | None, sent: Any, value: Any
) -> None:
    """The table of docs/STREAMS.md, line by line."""
    payload = event("c", {"id": 1, "v": sent})
    message = payload
    if schema is not None:
        id_schema = {"type": "int32", "optional": False, "field": "id"}
        message = with_schema(payload, [id_schema, schema])
    folded = fold_table(
        [message, CRASH], key=["id"], columns={"id": "int64", "v": type_name}, decoder="debezium"
    )
    assert causes(folded) == []
    assert folded.records[0]["v"] == value


@pytest.mark.parametrize(
    ("type_name", "settings", "sent", "cause"),
    [
        ("timestamp", {}, MILLISECONDS, "set debezium.timestamps"),
        ("timestamp", {"timestamps": "nanoseconds"}, 2**80, "is out of range"),
        ("timestamp", {}, 1.5, "is no time: 1.5"),
        ("timestamp", {}, "+292278994-08-17T07:12:55Z", "wrong schema"),
        ("date", {}, 10**9, "is out of range: 1000000000 days"),
        ("decimal(10,2)", {}, "1000", "set debezium.decimals"),
        ("decimal(10,2)", {}, "fQ==", "set debezium.decimals"),
        ("decimal(10,2)", {"decimals": "precise"}, "12.5", "is no base64: '12.5'"),
        ("decimal(10,2)", {"decimals": "string"}, "fQ==", "is no decimal: 'fQ=='"),
        ("decimal(4,2)", {"decimals": "precise"}, base64_decimal(10**6), "does not fit"),
        ("decimal(4,2)", {"decimals": "precise"}, "A" * 4000, "is a decimal of 3000 bytes"),
        ("binary", {}, "no!", "is no base64: 'no!'"),
        ("int64", {}, "7", "Expected `int | null`, got `str`"),
        ("string", {}, ["x"], "Expected `str | null`, got `array`"),
    ],
)
def test_a_value_that_does_not_fit_is_poison_that_says_why(
    type_name: str, settings: dict[str, str], sent: Any, cause: str
) -> None:
    """With the offset of its message, whatever else is in the batch."""
    folded = fold_table(
        [event("c", {"id": 1}), event("c", {"id": 1, "v": sent}), event("c", {"id": 1})],
        key=["id"],
        columns={"id": "int64", "v": type_name},
        decoder="debezium",
        debezium=settings,
    )
    ((kind, offset, found_cause),) = causes(folded)
    assert (kind, offset) == ("poison", 1)
    assert cause in found_cause


@pytest.mark.parametrize("unit", ["milliseconds", "microseconds", "nanoseconds"])
def test_the_stream_file_says_the_unit_of_numbers_without_a_schema(unit: str) -> None:
    """As the connector's time.precision.mode gives them."""
    factor = {"milliseconds": 1, "microseconds": 1000, "nanoseconds": 10**6}[unit]
    folded = fold_table(
        [event("c", {"id": 1, "at": MILLISECONDS * factor})],
        key=["id"],
        columns={"id": "int64", "at": "timestamp"},
        decoder="debezium",
        debezium={"timestamps": unit},
    )
    assert folded.records[0]["at"] == TIME


def test_bytes_of_the_source_are_no_text() -> None:
    """A precise decimal in a column of text would be base64 that nobody expects."""
    schema = [{"type": "int32", "field": "id"}, {"type": "bytes", "field": "v"}]
    folded = fold_table(
        [with_schema(event("c", {"id": 1, "v": "fQ=="}), schema)],
        key=["id"],
        columns={"id": "int64", "v": "string"},
        decoder="debezium",
    )
    assert "the source has bytes" in causes(folded)[0][2]


def test_a_column_may_have_any_name_and_an_older_source_may_lack_it() -> None:
    """`type`, `op` of the envelope and others do not disturb; a column that is not there is null."""
    folded = fold_table(
        [event("c", {"id": 1, "type": "x"}), event("u", {"id": 1, "type": "y", "extra": 7})],
        key=["id"],
        columns={"id": "int64", "type": "string", "source": "string", "extra": "int64"},
        decoder="debezium",
    )
    assert rows_of(folded) == [{"id": 1, "type": "y", "source": None, "extra": 7}]
    folded = fold_table(
        [
            event("c", {"id": 1, "op": "x", "offset": 5}),
            event("u", {"id": 1, "op": UNAVAILABLE, "offset": 6}),
        ],
        key=["id"],
        columns={"id": "int64", "op": "string", "offset": "int64"},
        decoder="debezium",
    )
    assert rows_of(folded) == [{"id": 1, "row_op": "x", "row_offset": 6}]


def test_schemas_are_remembered_up_to_a_limit() -> None:
    """Whatever producers send, the memory of a decoder is bounded."""
    decoder = DebeziumDecoder({"id": "int64", "v": "date"})
    for number in range(500):
        message = with_schema(event("c", {"id": 1, "v": 0}), [{"field": f"f{number}"}])
        plain = decoder.to_plain(encode(message) or b"")
        assert plain["after"]["v"] == date(1970, 1, 1)
    assert len(decoder._converters_by_schema) <= 200


def row_key(row_id: int) -> str:
    """The Kafka key of a row."""
    return f'{{"id":{row_id}}}'


BEFORE_A_LOSS = [
    (row_key(1), event("r", row(customer="one"))),
    (row_key(2), event("r", row(id=2, customer="two"))),
]
READ_AGAIN = {
    # What is lost, the rows that the source has then, and the rows of the table after the read.
    "insert": ([row(), row(id=2), row(id=3)], [1, 2, 3]),
    "update": ([row(customer="new"), row(id=2)], [1, 2]),
    "delete": ([row(id=2)], [1, 2]),
    "key change": ([row(id=9), row(id=2)], [1, 2, 9]),
}


@pytest.mark.parametrize("lost", list(READ_AGAIN))
@pytest.mark.parametrize("session", ["key", "partition"])
def test_an_incremental_snapshot_brings_every_row_that_exists(lost: str, session: str) -> None:
    """It makes lost inserts and updates right. A row whose delete was lost, or whose old key is gone,
    stays: no message is about it.
    """
    source_rows, expected_ids = READ_AGAIN[lost]
    read = [(row_key(image["id"]), event("r", image)) for image in source_rows]
    folded = fold_table(
        [*BEFORE_A_LOSS, CRASH, *read],
        key=["id"],
        columns=COLUMNS,
        decoder="debezium",
        session=session,
        debezium={"decimals": "precise"},
    )
    assert causes(folded) == []
    rows = {plain["id"]: plain for plain in rows_of(folded)}
    assert sorted(rows) == expected_ids
    for image in source_rows:
        assert rows[image["id"]]["customer"] == image["customer"]


@pytest.mark.parametrize("session", ["key", "partition"])
def test_an_incremental_snapshot_ends_the_quarantine_of_a_row_and_not_of_a_table(
    session: str,
) -> None:
    """A read is the whole of a row. Nothing tells that it was the last row of a table, so a session per
    partition waits for a repair.
    """
    folded = fold_orders(
        [
            event("r", row()),
            event("u", row(customer="new"), row(customer="lost")),
            event("r", row(customer="new")),
        ],
        session=session,
        debezium=FULL,
    )
    assert [(kind, offset) for kind, offset, _ in causes(folded)] == [("precondition", 1)]
    expected = "new" if session == "key" else ROW["customer"]
    assert [plain["customer"] for plain in rows_of(folded)] == [expected]


def test_columns_may_tell_where_a_change_comes_from() -> None:
    """Of the transaction and of the source, as the stream file says; a delete leaves them out, and
    before-images say nothing about them.
    """
    columns = {**COLUMNS, "lsn": "int64", "committed": "timestamp", "transaction": "string"}
    metadata = {"lsn": "source.lsn", "committed": "source.ts_us", "transaction": "transaction.id"}
    settings = {"decimals": "precise", "metadata": metadata, **FULL}
    messages = [
        event("r", row(), lsn=100),
        event("u", row(customer="c2"), row(), lsn=200),
        event("d", None, row(customer="c2"), lsn=300),
    ]
    folded = fold_table(
        [(KEY, message) for message in messages],
        key=["id"],
        columns=columns,
        decoder="debezium",
        debezium=settings,
    )
    assert causes(folded) == []
    values = [(record["lsn"], record["transaction"]) for record in folded.records]
    assert values == [(100, None), (200, "731:200"), (None, None)]
    assert folded.records[0]["committed"] == datetime(2026, 11, 18, 0, 8, 56, 768568, tzinfo=UTC)


@pytest.mark.parametrize("lsn_of_source", ["c1", 5, UNAVAILABLE])
def test_metadata_wins_over_a_column_of_the_source(lsn_of_source: Any) -> None:
    """Of the same name, in both images, whatever its type."""
    columns = {**COLUMNS, "lsn": "int64"}
    settings = {"decimals": "precise", "metadata": {"lsn": "source.lsn"}, **FULL}
    images = [row(customer=name, lsn=lsn_of_source) for name in ("c1", "c2")]
    messages = [
        event("u", images[0], images[0], lsn=100),
        event("u", images[1], images[0], lsn=200),
        event("d", None, images[1], lsn=300),
    ]
    folded = fold_table(
        [(KEY, message) for message in messages],
        key=["id"],
        columns=columns,
        decoder="debezium",
        debezium=settings,
    )
    assert causes(folded) == []
    assert [record["lsn"] for record in folded.records] == [100, 200, None]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"other": "source.lsn"}, "other is no column"),
        ({"id": "source.lsn"}, "id is no column of the table beside its key"),
        ({"customer": "before.customer"}, "customer = 'before.customer'"),
        ({"customer": "OP"}, "customer = 'OP'"),
    ],
)
def test_metadata_that_means_nothing_is_refused(metadata: dict[str, str], problem: str) -> None:
    """By the name of its key in the stream file."""
    with pytest.raises(ConfigError, match=r"debezium\.metadata") as refused:
        orders_stream(debezium={"metadata": metadata})
    assert problem in str(refused.value)


class Order(Struct):
    """A row, as a machine of the user takes it."""

    id: int
    amount: Decimal
    day: date


class Change(Struct):
    """A message."""

    op: str
    after: Order | None = None
    before: dict[str, Any] | None = None


class Total(Struct):
    """State and record."""

    amount: float = 0.0


class Adding(Machine[Total, Change, Total]):
    """Adds up what is created."""

    def start(self, session: str) -> Total:  # noqa: ARG002  # every session begins with nothing
        return Total()

    def apply(self, state: Total, message: Change) -> list[Total]:
        if message.after is not None:
            state.amount += float(message.after.amount)
        return [Total(state.amount)]


def test_a_machine_of_ones_own_takes_the_events_as_structs() -> None:
    """With a schema values have their types; tombstones do not come."""
    messages = [with_schema(event("c", row())), None, with_schema(event("d", None, row()))]
    folded = fold(Adding, messages, decoder=DebeziumDecoder)
    assert folded.records == [Total(1.25), Total(1.25)]
    assert folded.findings == []


def orders_stream(**fields: Any) -> MemoryStream:
    """A stream in memory, with two partitions."""
    toml_values: dict[str, Any] = {
        "topics": "shop.public.orders",
        "machine": "table",
        "decoder": "debezium",
        "table": {"key": ["id"], "columns": COLUMNS},
        "debezium": {"decimals": "precise", "history": "whole"},
        "output": {"path": "memory"},
        **fields,
    }
    stream = parse_stream("orders", toml_values, "orders.toml")
    world = MemoryStream(stream, lambda: stream.table_machine(decoder=debezium_decoder(stream)))
    world.kafka.create("shop.public.orders", 2)
    return world


def test_each_partition_is_a_session_of_its_own() -> None:
    """They are never taken for one session that moved."""
    world = orders_stream(session="partition")
    for number in (0, 1):
        for op in ("r", "u"):
            value = encode(event(op, row(id=number)))
            world.kafka.produce("shop.public.orders", "k", value, partition=number)
        assert world.run().findings == []
    names = [list(world.sessions(partition)) for partition in sorted(world.accounts())]
    assert names == [["partition-0"], ["partition-1"]]


def test_trace_and_explain_show_the_event() -> None:
    """As it was sent, with its row converted; a tombstone is shown as what it is."""
    world = orders_stream()
    read_event = event("r", row())
    for value in (read_event, event("d", None, row()), None):
        world.kafka.produce("shop.public.orders", KEY, encode(value), partition=0)
    world.run()
    partition = Partition("shop.public.orders", 0)
    read, delete, tombstone = trace_steps(world, KEY, partition)
    shown = step_values(world.machine(), read, 3)["message"]
    assert (shown["op"], shown["after"]["day"]) == ("r", "2026-01-02")
    assert shown["source"]["lsn"] == read_event["source"]["lsn"]
    assert (delete.outcome, tombstone.outcome) == ("applied", "skipped")
    assert step_values(world.machine(), tombstone, 3)["message"]["ignored"] == "a tombstone"
    (explanation,) = explain_row(world, "1")
    assert [touch.message["op"] for touch in explanation.touches] == ["r", "d"]


def test_the_plain_fold_takes_debezium_and_the_compiled_one_json(tmp_path: Path) -> None:
    """Both through the stream file, and for any number of messages."""
    write_example_files(tmp_path)
    file = load_stream(str(tmp_path / "orders_cdc.toml"), tmp_path)
    assert not can_use_compiled_fold(file.stream)
    runner, fold_class = choose_machine(file.stream, lambda: load_runner(file), 10**9)
    assert isinstance(runner, ChangeTable)
    assert isinstance(runner.decoder, DebeziumDecoder)
    assert fold_class is Fold
    json_stream = {
        "topics": "a",
        "machine": "table",
        "table": {"key": ["id"], "columns": {"id": "string"}},
        "output": {"path": "memory"},
    }
    assert can_use_compiled_fold(parse_stream("a", json_stream, "a.toml"))
    json_stream["session"] = "partition"
    assert not can_use_compiled_fold(parse_stream("a", json_stream, "a.toml"))


def test_the_example_of_the_page_passes_its_own_test(tmp_path: Path) -> None:
    """A reader who copies the two files has a stream of ten lines, and a test of it."""
    write_example_files(tmp_path)
    module: Any = import_example(tmp_path, "test_orders_cdc")
    module.test_an_order_changes_and_a_lost_change_is_found()
    content = (tmp_path / "orders_cdc.toml").read_text()
    stream = parse_stream("orders_cdc", tomllib.loads(content), "orders_cdc.toml")
    assert stream.debezium.before_images == "full"
    lines = [line for line in content.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10


def test_a_machine_of_ones_own_may_have_a_session_per_partition() -> None:
    """Its shape says so: saved state of sessions by key is not mixed with it."""
    machine = UserMachine("m:Adding", Adding, has_session_per_partition=True)
    assert machine.shape == "session by partition, sequence none"


def test_a_table_in_quarantine_gets_right_as_the_page_says() -> None:
    """With a session per partition: fold again without the promise, read the table again, and promise
    again. The page says which row stays.
    """
    world = CapturedStream("partition")
    rows = {number: {"id": number, "v": 0} for number in range(1, 5)}
    for new in rows.values():
        world.send("c", new)
    # The change of row 1 to 1 was lost; other rows change after it.
    world.send("u", {"id": 1, "v": 2}, {"id": 1, "v": 1})
    world.send("u", {"id": 2, "v": 5}, rows[2])
    world.send("d", None, rows[3])
    (finding,) = world.run().findings
    assert finding.finding == "precondition"
    assert "Reading the table" in finding.advice("s")
    assert world.rows_by_id()[2] == rows[2]

    world.set_before_images("partial")
    repair(world, partition=str(A0))
    assert world.sessions(A0)["partition-0"].finding is None
    source = {1: {"id": 1, "v": 2}, 2: {"id": 2, "v": 5}, 4: rows[4]}
    for read in source.values():
        world.send("r", read)
    assert world.run().findings == []
    world.set_before_images("full")
    world.send("u", {"id": 4, "v": 7}, rows[4])
    assert world.run().findings == []
    assert world.rows_by_id() == {**source, 4: {"id": 4, "v": 7}}


@pytest.mark.parametrize("before_images", ["partial", "full"])
@pytest.mark.parametrize("session", ["key", "partition"])
@pytest.mark.parametrize("lost", ["insert", "update", "delete", "change of a key"])
def test_a_lost_change_is_healed_as_the_page_says(
    lost: str, session: str, before_images: str
) -> None:
    """The table is read again. A row that no message has touched since then is not in the source: it is
    inserted and deleted there.
    """
    world = CapturedStream(session, before_images)
    rows = {number: {"id": number, "v": 0} for number in range(1, 5)}
    for new in rows.values():
        if (lost, new["id"]) != ("insert", 3):
            world.send("c", new)
    source = dict(rows)
    if lost == "update":
        source[3] = {"id": 3, "v": 1}
    elif lost != "insert":
        del source[3]
    if lost == "change of a key":
        source[30] = {"id": 30, "v": 0}
    assert world.run().findings == []

    signal_offset = len(world.kafka.topics["in-a"].messages[0])
    for read in source.values():
        world.send("r", read)
    assert world.run().findings == []
    last_offsets = {record["id"]: record["offset"] for record in world.rows()}
    untouched = {row_id for row_id, offset in last_offsets.items() if offset < signal_offset}
    assert untouched == rows.keys() - source.keys()
    for row_id in untouched:
        world.send("c", rows[row_id])
        world.send("d", None, rows[row_id])
    outcome = world.run()
    if before_images == "full" and session == "partition" and untouched:
        # One more reason to take the promise out before a table is read again.
        assert [finding.finding for finding in outcome.findings] == ["precondition"]
        world.set_before_images("partial")
        repair(world, partition=str(A0))
    assert world.rows_by_id() == source
