"""Quix Streams, in an environment of its own: `python -m bench.quix` runs there, and imports
nothing of ours.

Its way to use several cores is several processes of one group; it has no end of its own, so it
stops when nothing has come for a while. State is a row to a key, in RocksDB with a changelog;
records go to a topic as JSON.

    python quix.py SERVERS TOPIC OUTPUT FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

QUIET_SECONDS = 5.0


def change(
    message: dict[str, Any], row_id: str, now: Any, before: Any, place: tuple[int, int]
) -> dict[str, Any]:
    """One record."""
    partition, offset = place
    record = {
        "partition": partition,
        "offset": offset,
        "session": message["session"],
        "sequence": message["seq"],
    }
    record |= {"op": message["type"], "id": row_id}
    if now is not None:
        record |= {"price": now[0], "size": now[1]}
    if before is not None:
        record |= {"old_price": before[0], "old_size": before[1]}
    return record


def apply(message: dict[str, Any], state: Any, place: tuple[int, int]) -> list[dict[str, Any]]:
    """One message to rows and records."""
    if message["type"] == "snapshot":
        records = []  # a session's rows cannot be listed, and so not be cleared; the data has one snapshot each
        for row in message["rows"]:
            now = [row["price"], row["size"]]
            state.set(row["id"], now)
            records.append(change(message, row["id"], now, None, place))
        return records
    row_id = message["id"]
    before = state.get(row_id)
    if (before is None) != (message["type"] == "insert"):
        raise ValueError(f"{message['type']} of {row_id}")
    if message["type"] == "delete":
        state.delete(row_id)
        return [change(message, row_id, None, before, place)]
    now = [message["price"], message["size"]]
    state.set(row_id, now)
    return [change(message, row_id, now, before, place)]


def main(servers: str, topic: str, output: str, folder: str) -> None:
    """Fold until nothing comes any more."""
    from quixstreams import Application, message_context

    tuned = {"linger.ms": 50, "compression.type": "lz4", "batch.num.messages": 10_000}
    app = Application(
        broker_address=servers,
        consumer_group=output,
        auto_offset_reset="earliest",
        state_dir=folder,
        producer_extra_config=tuned,
        consumer_extra_config={"fetch.min.bytes": 1, "queued.max.messages.kbytes": 65536},
        loglevel="WARNING",
    )

    def applied(message: dict[str, Any], state: Any) -> list[dict[str, Any]]:
        context = message_context()
        return apply(message, state, (context.partition, context.offset))

    source = app.topic(topic, value_deserializer="json", key_deserializer="bytes")
    frame = app.dataframe(source).apply(applied, stateful=True, expand=True)
    frame.to_topic(app.topic(output, value_serializer="json", key_serializer="bytes"))
    app.run(timeout=QUIET_SECONDS, collect=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
