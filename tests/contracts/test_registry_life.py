"""The life of a stream whose messages name their schema in a registry: new versions, an id that is not
known yet, a registry that is away. The same on the registry of tests in this process and on a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from deltalake import DeltaTable

from seriatim.formats import registry
from seriatim.formats.avro import AvroDecoder
from seriatim.formats.registry import Registry, read_registry_settings
from tests.formats.registry_server import RegistryServer
from tests.formats.schema_values import avro_value
from tests.golden.product import FakeCluster, command
from tests.integration.schema_registry import SchemaRegistryServer

TOPIC = "shop.public.orders"
STREAM = f"""
topics = "{TOPIC}"
decoder = "debezium"
machine = "table"
[table]
key = ["id"]
columns = {{ id = "int64", customer = "string", note = "string" }}
[output]
path = "lake"
"""
MANY = 10_000
"""Ids in the real registry; the other one has a tenth of them."""


class AnyRegistry(Protocol):
    """A registry that the tests start, stop and fill."""

    @property
    def url(self) -> str:
        """Its address."""
        ...

    def start(self) -> None:
        """Begin to answer, at the same address as before."""
        ...

    def stop(self) -> None:
        """Answer no more."""
        ...

    def register(self, subject: str, schema: Any) -> int:
        """Register a schema, and return its id."""
        ...

    def looked_up(self) -> list[str]:
        """The paths that were asked for."""
        ...


class RegistryInProcess:
    """The registry of tests in this process."""

    def __init__(self) -> None:
        self._server = RegistryServer()
        self._running = ExitStack()
        self._last_id = 0
        self.url = self._server.url

    def start(self) -> None:
        """Begin to serve."""
        answers = self._server.answers
        paths_asked = self._server.paths_asked
        if self._last_id:
            port = int(self.url.rpartition(":")[2])
            self._server = RegistryServer(port)
            self._server.answers = answers
            self._server.paths_asked = paths_asked
        self._running.enter_context(self._server.running())

    def stop(self) -> None:
        """Close the socket."""
        self._running.close()

    def register(self, subject: str, schema: Any) -> int:  # noqa: ARG002  # ids are all it has
        """Put it under the next id."""
        self._last_id += 1
        self._server.put(self._last_id, schema)
        return self._last_id

    def looked_up(self) -> list[str]:
        """What was asked, since the first start."""
        return self._server.paths_asked


@pytest.fixture(params=["in this process", pytest.param("real", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyRegistry]:
    """A registry that runs."""
    started: AnyRegistry = (
        SchemaRegistryServer(tmp_path / "registry")
        if request.param == "real"
        else RegistryInProcess()
    )
    started.start()
    yield started
    started.stop()


@pytest.fixture
def waited(server: AnyRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Lets every process of the command line ask this registry, and wait without waiting. Gives the
    seconds that they would have waited.
    """
    seconds: list[float] = []

    def open_registry(_: str = "") -> Registry:
        settings = read_registry_settings({registry.URL: server.url})
        return Registry(settings, tmp_path / "cache", sleep=seconds.append)

    monkeypatch.setattr(registry, "open_registry", open_registry)
    return seconds


def envelope(*columns: str) -> dict[str, Any]:
    """The schema of a change of a row with these columns, beside its key."""
    fields = [{"name": "id", "type": "long"}]
    fields += [{"name": name, "type": ["null", "string"], "default": None} for name in columns]
    row = {"type": "record", "name": "Value", "fields": fields}
    return {
        "type": "record",
        "name": f"{TOPIC}.Envelope",
        "fields": [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "op", "type": "string"},
        ],
    }


VERSIONS = [envelope("customer"), envelope("customer", "note"), envelope("note")]
LATE = envelope("customer", "note", "late")
LATER = envelope("customer", "note", "later")


def create(schema: dict[str, Any], schema_id: int, row: dict[str, Any]) -> bytes:
    """A create of a row, as the connector writes it."""
    header = b"\x00" + schema_id.to_bytes(4, "big")
    return avro_value(header, schema, {"op": "c", "before": None, "after": row})


def current(folder: Path) -> list[tuple[Any, ...]]:
    """The rows of `current`."""
    table = DeltaTable(str(folder / "lake" / "current")).to_pyarrow_dataset()
    rows = table.to_table(use_threads=False).to_pylist()
    return sorted((row["id"], row["customer"], row["note"]) for row in rows)


def test_versions_an_unknown_id_and_an_outage(
    server: AnyRegistry, waited: list[float], tmp_path: Path
) -> None:
    """Three versions in one partition, each looked up once. An id that is not known is poison after a
    minute, and is healed by a repair once it is known. Without the registry a run ends with code 4
    and commits nothing, and the next run goes on.
    """
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "orders.toml").write_text(STREAM)
    cluster = FakeCluster()
    cluster.kafka.create(TOPIC, 1)

    def produce(schema: dict[str, Any], schema_id: int, row: dict[str, Any]) -> None:
        value = create(schema, schema_id, row)
        cluster.kafka.produce(TOPIC, str(row["id"]), value, partition=0)

    ids = [server.register("orders", schema) for schema in VERSIONS]
    assert len(set(ids)) == 3
    late_id = max(ids) + 1
    for number in range(6):
        row = {"id": number, "customer": "c", "note": "n"}
        produce(VERSIONS[number % 3], ids[number % 3], row)
    produce(LATE, late_id, {"id": 6, "customer": "c", "note": "late", "late": "x"})
    produce(VERSIONS[1], ids[1], {"id": 7, "customer": "c", "note": "after"})
    with cluster.installed(tmp_path):
        answer = command("run", "orders")
        assert answer.code == 3, answer.err
        assert f"unknown schema id {late_id}" in answer.out + answer.err
        # A slice with new poison is folded once more, for the headers of what is quarantined.
        assert sum(waited) == 2 * registry.UNKNOWN_ID_WAIT_SECONDS
        assert command("publish", "orders", "--unchecked").code == 0
        rows = [(0, "c", None), (1, "c", "n"), (2, None, "n")]
        rows += [(3, "c", None), (4, "c", "n"), (5, None, "n"), (7, "c", "after")]
        assert current(tmp_path) == rows
        looked_up = server.looked_up()
        for known_id in ids:
            assert looked_up.count(f"/schemas/ids/{known_id}") == 1

        # The same id is known now.
        assert server.register("orders", LATE) == late_id
        answer = command("repair", "orders", "--apply")
        assert answer.code == 0, answer.err
        assert command("publish", "orders", "--unchecked").code == 0
        rows.insert(6, (6, "c", "late"))
        assert current(tmp_path) == rows
        for known_id in ids:
            # The repair was another process, which has the schemas on disk.
            assert server.looked_up().count(f"/schemas/ids/{known_id}") == 1

        later_id = server.register("orders", LATER)
        server.stop()
        produce(VERSIONS[0], ids[0], {"id": 8, "customer": "known"})
        produce(LATER, later_id, {"id": 9, "customer": "c", "note": "later", "later": "x"})
        answer = command("run", "orders")
        assert answer.code == 4, answer.err
        assert "the schema registry" in answer.err
        assert command("publish", "orders", "--unchecked").code == 0
        assert current(tmp_path) == rows, "something of the slice was committed"

        server.start()
        answer = command("run", "orders")
        assert answer.code == 0, answer.err
        assert command("publish", "orders", "--unchecked").code == 0
        assert current(tmp_path) == [*rows, (8, "known", None), (9, "c", "later")]


def test_many_ids_are_looked_up_once_each(server: AnyRegistry, tmp_path: Path) -> None:
    """By one process, and by none that comes after it on the same host."""
    count = MANY if isinstance(server, SchemaRegistryServer) else MANY // 10
    values = {}
    for number in range(count):
        schema = {
            "type": "record",
            "name": f"Quote{number}",
            "fields": [{"name": "price", "type": "long"}],
        }
        schema_id = server.register(f"quotes-{number}", schema)
        header = b"\x00" + schema_id.to_bytes(4, "big")
        values[schema_id] = (avro_value(header, schema, {"price": number}), number)

    def new_client() -> Registry:
        settings = read_registry_settings({registry.URL: server.url})
        return Registry(settings, tmp_path / "cache")

    first = new_client()
    decoder = AvroDecoder(first)
    for value, number in values.values():
        expected = {"price": number, "type": f"Quote{number}"}
        assert decoder.to_plain(value) == decoder.to_plain(value) == expected
    assert first.requests_sent == count
    assert sorted(server.looked_up()) == sorted(f"/schemas/ids/{number}" for number in values)

    second = new_client()
    decoder = AvroDecoder(second)
    for value, number in values.values():
        assert decoder.to_plain(value) == {"price": number, "type": f"Quote{number}"}
    assert second.requests_sent == 0
