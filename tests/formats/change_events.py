"""Debezium's messages for tests, in the form that a real connector for PostgreSQL gave them.

Payloads, heartbeats and transactions follow recorded ones (Kafka Connect 4.3.1, connector
3.6.1.Final, PostgreSQL 15, without schemas). The schema, the schema change of MySQL and the
notification are written after Debezium's documentation: none of them was recorded.
"""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

COLUMNS = {
    "id": "int64",
    "customer": "string",
    "amount": "decimal(10,2)",
    "big": "string",
    "at": "timestamp",
    "day": "date",
}
UNAVAILABLE = "__debezium_unavailable_value"
ROW = {
    "id": 1,
    "customer": "c1",
    "amount": "fQ==",
    "note": None,
    "big": "c4ca4238a0b923820dcc",
    "at": "2026-01-01T00:00:01.000000Z",
    "tags": ["x", "y"],
    "day": 20455,
}
ROW_SCHEMA: list[dict[str, Any]] = [
    {"type": "int32", "optional": False, "field": "id"},
    {"type": "string", "optional": False, "field": "customer"},
    {
        "type": "bytes",
        "optional": True,
        "name": "org.apache.kafka.connect.data.Decimal",
        "version": 1,
        "parameters": {"scale": "2", "connect.decimal.precision": "10"},
        "field": "amount",
    },
    {"type": "string", "optional": True, "field": "note"},
    {"type": "string", "optional": True, "field": "big"},
    {
        "type": "string",
        "optional": False,
        "name": "io.debezium.time.ZonedTimestamp",
        "version": 1,
        "field": "at",
    },
    {
        "type": "array",
        "items": {"type": "string", "optional": True},
        "optional": True,
        "field": "tags",
    },
    {
        "type": "int32",
        "optional": True,
        "name": "io.debezium.time.Date",
        "version": 1,
        "field": "day",
    },
]
HEARTBEAT = {"ts_ms": 1794960514685}
TRANSACTION = {
    "status": "END",
    "id": "731:26421248",
    "event_count": 1,
    "data_collections": [{"data_collection": "public.orders", "event_count": 1}],
    "ts_ms": 1794960536768,
}
SCHEMA_CHANGE = {
    "source": {"connector": "mysql", "name": "shop", "db": "shop", "table": "orders"},
    "ts_ms": 1794960536768,
    "databaseName": "shop",
    "schemaName": None,
    "ddl": "ALTER TABLE orders ADD COLUMN extra int",
    "tableChanges": [{"type": "ALTER", "id": '"shop"."orders"', "table": {}}],
}
NOTIFICATION = {
    "id": "a",
    "aggregate_type": "Incremental Snapshot",
    "type": "COMPLETED",
    "additional_data": {},
    "timestamp": 1,
}


def source(lsn: int, *, snapshot: str = "false") -> dict[str, Any]:
    """Where a change is in the log of the source."""
    return {
        "version": "3.6.1.Final",
        "connector": "postgresql",
        "name": "shop",
        "ts_ms": 1794960536768,
        "snapshot": snapshot,
        "db": "shop",
        "sequence": f'[null,"{lsn}"]',
        "ts_us": 1794960536768568,
        "ts_ns": 1794960536768568000,
        "schema": "public",
        "table": "orders",
        "txId": 731,
        "lsn": lsn,
        "xmin": None,
        "origin": None,
        "origin_lsn": None,
    }


NEXT_LSN = itertools.count(26420888, 8)


def event(
    op: str,
    after: dict[str, Any] | None = None,
    before: dict[str, Any] | None = None,
    *,
    lsn: int | None = None,
) -> dict[str, Any]:
    """The payload of a change. Without an `lsn` it is after all events before it."""
    if lsn is None:
        lsn = next(NEXT_LSN)
    transaction = None
    if op != "r":
        transaction = {"id": f"731:{lsn}", "total_order": 1, "data_collection_order": 1}
    return {
        "before": before,
        "after": after,
        "source": source(lsn, snapshot="true" if op == "r" else "false"),
        "transaction": transaction,
        "op": op,
        "ts_ms": 1794960537206,
        "ts_us": 1794960537206792,
        "ts_ns": 1794960537206792918,
    }


def with_schema(
    payload: dict[str, Any], row_schema: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """A message with `schemas.enable`: the schema, then the payload."""
    fields = ROW_SCHEMA if row_schema is None else row_schema
    images = [
        {"type": "struct", "fields": fields, "optional": True, "name": "V", "field": side}
        for side in ("before", "after")
    ]
    schema = {
        "type": "struct",
        "fields": [*images, {"type": "string", "optional": False, "field": "op"}],
        "optional": False,
        "name": "shop.public.orders.Envelope",
        "version": 2,
    }
    return {"schema": schema, "payload": payload}


def encode(message: dict[str, Any] | None) -> bytes | None:
    """A message as JSON, as compact as the converter writes it; None is a tombstone."""
    if message is None:
        return None
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def base64_decimal(unscaled: int) -> str:
    """An unscaled number as a precise decimal has it: the shortest bytes with a sign."""
    size = (unscaled + (unscaled < 0)).bit_length() // 8 + 1
    return base64.b64encode(unscaled.to_bytes(size, signed=True)).decode()
