"""A table that equals its source: PostgreSQL under load, Debezium, Kafka, run and publish."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deltalake import DeltaTable

from seriatim import stream_files
from seriatim.cli.publish import publish_stream
from seriatim.embedded import connect
from seriatim.engine.crash_points import CRASH_POINTS
from seriatim.formats import registry
from tests.integration.change_source import COLUMNS, ChangeSource, current_rows, has_source
from tests.integration.lab import Lab
from tests.integration.schema_registry import SchemaRegistryServer

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(has_source()), reason=has_source() or "there is a source"),
]
MARKS = 20
PARTIAL_MARKS = 6
TRANSACTIONS = 60
OpenSource = Callable[..., ChangeSource]
RUN_POINTS = [point for point in CRASH_POINTS if point != "table-created"]


@pytest.fixture(scope="module")
def registry_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRegistryServer]:
    """A registry for the tests of this file, started by the first that asks for it."""
    server = SchemaRegistryServer(tmp_path_factory.mktemp("registry"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def converter(request: pytest.FixtureRequest, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of the connector for the format that the test names, "json" or "avro". For Avro
    this process and the workers of its Spark session know the registry.
    """
    if request.param == "json":
        return {}
    server: SchemaRegistryServer = request.getfixturevalue("registry_server")
    monkeypatch.setenv(registry.URL, server.url)
    monkeypatch.setitem(lab.spark().sparkContext.environment, registry.URL, server.url)
    return connect.avro_converter(server.address)


@pytest.fixture
def open_source(lab: Lab, topic_name: Callable[[], str]) -> Iterator[OpenSource]:
    """Opens the source of a test, and ends it with the test."""
    sources: list[ChangeSource] = []

    def open_one(partitions: int, **settings: Any) -> ChangeSource:
        source = ChangeSource(lab, topic_name(), partitions, **settings)
        sources.append(source)
        return source

    yield open_one
    for source in sources:
        source.close()


def write_stream(lab: Lab, source: ChangeSource, name: str, session: str) -> str:
    """The stream file of the source's table."""
    return lab.stream(
        name,
        source.topic.replace(".", "[.]"),
        {"machine": "table", "decoder": "debezium", "session": session},
        table={"key": ["id"], "columns": COLUMNS},
    )


def published_rows(lab: Lab, stream: str) -> list[Any]:
    """The table `current` after a publish."""
    publish_stream(stream_files.load_stream(stream, lab.settings.streams), unchecked=True)
    table = DeltaTable(str(lab.root(stream) / "current"))
    return current_rows(table.to_pyarrow_dataset().to_table(use_threads=False))


def killed_run(
    lab: Lab, stream: str, topic: str, ends: dict[int, int], dice: random.Random
) -> None:
    """A run to these offsets in slices of a few messages, which is killed at some point of one."""
    point = f"{dice.choice(RUN_POINTS)}:{dice.randint(1, 2)}"
    until = json.dumps({topic: {str(partition): end for partition, end in ends.items()}})
    ended = lab.command(
        "run", stream, "--messages-max", "150", "--until-offsets", until, SERIATIM_CRASH_POINT=point
    )
    # A point that the run does not pass twice leaves it alone.
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr


@pytest.mark.parametrize(
    ("session", "partitions", "has_truncate"), [("partition", 1, True), ("key", 3, False)]
)
@pytest.mark.parametrize("converter", ["json", "avro"], indirect=True)
def test_current_equals_its_source_at_every_mark(
    lab: Lab,
    open_source: OpenSource,
    converter: dict[str, str],
    session: str,
    partitions: int,
    has_truncate: bool,
) -> None:
    """In JSON and in Avro, in one go and with random kills, while the connector is stopped, killed and
    started again in the middle of the load.
    """
    # The row under a new key is another session. It lacks the values that are stored apart and did
    # not change, unless the source sends whole rows.
    source = open_source(
        partitions,
        seed=7,
        has_truncate=has_truncate,
        has_full_images=session == "key",
        converter=converter,
    )
    dice = random.Random(11)
    plain = write_stream(lab, source, "plain", session)
    killed = write_stream(lab, source, "killed", session)
    # A TRUNCATE empties the table for transactions that began before it, also for the connector's
    # snapshot: so the load begins after that.
    source.mark()
    source.offsets_after_mark()

    for number in range(MARKS):
        clients = source.begin_load(TRANSACTIONS)
        if number == MARKS // 3:
            source.restart_connector()
        if number == 2 * MARKS // 3:
            source.kill_connector()
        source.end_load(clients)
        expected = source.mark()
        ends = source.offsets_after_mark()
        until = {f"{source.topic}/{partition}": end for partition, end in ends.items()}

        assert not lab.fold(plain, until=until).findings
        assert published_rows(lab, plain) == expected, f"at mark {source.round}"
        if number % 5 == 4:
            killed_run(lab, killed, source.topic, ends, dice)
            lab.fold(killed, until=until)
            assert published_rows(lab, killed) == expected, f"with kills, at mark {source.round}"

    # Messages that the killed connector sends again may come after the last mark.
    assert not lab.fold(plain).findings
    assert published_rows(lab, plain) == expected
    values = [value for *_, value in lab.read_topic(source.topic, partitions) if value]
    assert {value[:1] for value in values} == {b"\0" if converter else b"{"}


def test_a_changed_key_with_an_unknown_value_is_found_until_the_row_is_sent_whole(
    lab: Lab, open_source: OpenSource
) -> None:
    """A session per row, and a source that does not send whole rows: every row that `current` lacks is
    in quarantine, and all other rows equal the source, also after the connector was killed.
    """
    source = open_source(3, seed=5, has_truncate=False, has_full_images=False)
    stream = write_stream(lab, source, "rows", "key")
    found_rows: set[int] = set()
    for number in range(PARTIAL_MARKS):
        clients = source.begin_load(TRANSACTIONS)
        if number == PARTIAL_MARKS // 2:
            source.kill_connector()
        source.end_load(clients)
        expected = source.mark()
        ends = source.offsets_after_mark()
        until = {f"{source.topic}/{partition}": end for partition, end in ends.items()}
        findings = lab.fold(stream, until=until).findings
        assert all("is another session" in finding.cause for finding in findings)
        found_rows |= {json.loads(finding.session or "")["id"] for finding in findings}
        waiting = quarantined_rows(lab, stream)
        published = published_rows(lab, stream)
        assert without(published, waiting) == without(expected, waiting), f"at mark {number}"
    assert found_rows

    # The value is written again, so that every row is sent whole.
    source.run_sql("update orders set big = big || '';")
    expected = source.mark()
    source.offsets_after_mark()
    assert lab.fold(stream).findings == []
    assert quarantined_rows(lab, stream) == set()
    assert published_rows(lab, stream) == expected


def quarantined_rows(lab: Lab, stream: str) -> set[int]:
    """The ids of rows whose session is in quarantine."""
    sessions = lab.sessions(stream).items()
    return {json.loads(name)["id"] for (_, name), session in sessions if session["finding"]}


def without(rows: list[Any], ids: set[int]) -> list[Any]:
    """The rows that have other ids."""
    return [row for row in rows if row[0] not in ids]
