"""Quix Streams. This file runs in an environment of its own, and imports nothing of ours.

Quix uses several cores by several processes of one consumer group. It never ends by itself, so it
stops when no message has come for a while. State is one row per key, in RocksDB with a changelog;
records go to a topic as JSON.

    python quix.py SERVERS TOPIC OUTPUT FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

QUIET_SECONDS = 5.0


Values = list[Any]
"""A row's price and size."""


def make_record(
    message: dict[str, Any],
    row_id: str,
    values: Values | None,
    old_values: Values | None,
    source: tuple[int, int],
) -> dict[str, Any]:
    """One record; `source` is the partition and offset of the message."""
    partition, offset = source
    record = {
        "partition": partition,
        "offset": offset,
        "session": message["session"],
        "sequence": message["seq"],
        "op": message["type"],
        "id": row_id,
    }
    if values is not None:
        record["price"], record["size"] = values
    if old_values is not None:
        record["old_price"], record["old_size"] = old_values
    return record


def apply(message: dict[str, Any], state: Any, source: tuple[int, int]) -> list[dict[str, Any]]:
    """Change the rows by one message; its records."""
    if message["type"] == "snapshot":
        # The rows of a session cannot be listed, and so not be cleared. The data has one snapshot
        # for each session, so there is nothing to clear.
        records = []
        for row in message["rows"]:
            values = [row["price"], row["size"]]
            state.set(row["id"], values)
            records.append(make_record(message, row["id"], values, None, source))
        return records
    row_id = message["id"]
    old_values = state.get(row_id)
    if (old_values is None) != (message["type"] == "insert"):
        raise ValueError(f"{message['type']} of {row_id}")
    if message["type"] == "delete":
        state.delete(row_id)
        return [make_record(message, row_id, None, old_values, source)]
    values = [message["price"], message["size"]]
    state.set(row_id, values)
    return [make_record(message, row_id, values, old_values, source)]


def main(servers: str, topic: str, output: str, folder: str) -> None:
    """Fold until no more messages come."""
    from quixstreams import Application, message_context

    producer_settings = {"linger.ms": 50, "compression.type": "lz4", "batch.num.messages": 10_000}
    app = Application(
        broker_address=servers,
        consumer_group=output,
        auto_offset_reset="earliest",
        state_dir=folder,
        producer_extra_config=producer_settings,
        consumer_extra_config={"fetch.min.bytes": 1, "queued.max.messages.kbytes": 65536},
        loglevel="WARNING",
    )

    def apply_in_context(message: dict[str, Any], state: Any) -> list[dict[str, Any]]:
        context = message_context()
        return apply(message, state, (context.partition, context.offset))

    source = app.topic(topic, value_deserializer="json", key_deserializer="bytes")
    frame = app.dataframe(source).apply(apply_in_context, stateful=True, expand=True)
    frame.to_topic(app.topic(output, value_serializer="json", key_serializer="bytes"))
    app.run(timeout=QUIET_SECONDS, collect=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
