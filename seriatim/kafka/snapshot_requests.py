"""Snapshot requests on a Kafka topic: as a producer reads them, or as signals to Debezium's connector.

Next: ledger/gaps.py has what is sent; demo/producer.py is a producer that answers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from seriatim.errors import ConfigError, PlatformError
from seriatim.kafka.client import ClientSettings, create_client
from seriatim.ledger.gaps import SnapshotRequest

SEND_TIMEOUT_SECONDS = 20
SIGNALLED_ROWS_MAX = 100
"""For more rows of a table than this, the connector is asked to read all of it."""
PLAIN_COLUMN = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_.:@+/ -]*", re.ASCII)
"""What may be in the condition of a signal. The connector makes SQL of it, for one of many databases:
nothing may stand there that any of them could read as the end of a text.
"""
RESERVED_WORDS = """
accessible add after all allocate alter analyse analyze and any array as asc asensitive
asymmetric at authorization backup before begin between bigint binary blob both break browse
bulk by call cascade case cast change char character check checkpoint close clustered coalesce
collate collation column commit compute concurrently condition connect constraint contains
containstable continue convert create cross cube cume_dist current current_catalog
current_date current_role current_schema current_time current_timestamp current_user cursor
database databases day_hour day_microsecond day_minute day_second dbcc deallocate dec decimal
declare default deferrable delayed delete dense_rank deny desc describe deterministic disk
distinct distinctrow distributed div do double drop dual dump each else elseif empty enclosed
end errlvl escape escaped except exec execute exists exit explain external false fetch file
fillfactor first_value float float4 float8 for force foreign freetext freetexttable freeze
from full fulltext function generated get goto grant group grouping groups having
high_priority holdlock hour_microsecond hour_minute hour_second identity identity_insert
identitycol if ignore ilike in index infile initially inner inout insensitive insert int int1
int2 int3 int4 int8 integer intersect interval into io_after_gtids io_before_gtids is isnull
iterate join json_table key keys kill lag last_value lateral lead leading leave left like
limit linear lineno lines load localtime localtimestamp lock long longblob longtext loop
low_priority manual master_bind match maxvalue mediumblob mediumint mediumtext merge middleint
minute_microsecond minute_second mod modifies national natural no_write_to_binlog nocheck
nonclustered not notnull nth_value ntile null nullif numeric of off on only open
opendatasource openquery openrowset openxml optimize optimizer_costs option optionally or
order out outer outfile over overlaps parallel partition percent percent_rank pivot placing
plan precision primary print proc procedure public purge qualify raiserror range rank read
read_write reads readtext real reconfigure recursive references regexp release rename repeat
replace replication require resignal restore restrict return returning revert revoke right
rlike rollback row row_number rowcount rowguidcol rows rule save schema schemas
second_microsecond securityaudit select sensitive separator session_user set setuser show
shutdown signal similar smallint some spatial specific sql sql_big_result sql_calc_found_rows
sql_small_result sqlexception sqlstate sqlwarning ssl starting statistics stored straight_join
symmetric system system_user table tablesample terminated textsize then tinyblob tinyint
tinytext to top trailing tran transaction trigger true truncate try_convert tsequal undo union
unique unlock unpivot unsigned update updatetext usage use user using utc_date utc_time
utc_timestamp values varbinary varchar varcharacter variadic varying verbose view virtual
waitfor when where while window with within write writetext xor year_month zerofill
"""
"""Words of PostgreSQL, MySQL and SQL Server that are no column without quotes, and each of them has its
own quotes. As the name of a column, `user` is the user of the connector in PostgreSQL: then the
condition is right SQL, and no row fulfils it.
"""
UUID = "io.debezium.data.Uuid"
KeyAndValue = tuple[bytes, bytes]
Encode = Callable[[Sequence[SnapshotRequest]], list[KeyAndValue]]


class KeyField(msgspec.Struct, frozen=True):
    """A column in the schema of a key."""

    field: str = ""
    type: str = ""
    name: str = ""
    """What the value means, if its type does not say it, such as a date."""


class KeySchema(msgspec.Struct, frozen=True):
    """The schema of a key, as a connector writes it in JSON."""

    fields: list[KeyField] = []


def encode_requests(requests: Sequence[SnapshotRequest]) -> list[KeyAndValue]:
    """The messages of these requests for producers: one each."""
    return [(request.key, request.to_json()) for request in requests]


def encode_signals(
    requests: Sequence[SnapshotRequest], columns: Mapping[str, str]
) -> list[KeyAndValue]:
    """The messages of these requests for Debezium's connector: for each table one signal to read those
    rows again by an incremental snapshot, or the whole table if they cannot all be named.

    The name of a topic is `PREFIX.SCHEMA.TABLE`, and the connector listens to signals under the key
    PREFIX. `columns` are those of the stream file, with the names of their types.
    """
    by_topic: dict[str, list[SnapshotRequest]] = {}
    for request in requests:
        by_topic.setdefault(request.topic, []).append(request)
    signals = []
    for topic, topic_requests in by_topic.items():
        prefix, _, table = topic.rpartition(".")
        prefix, _, schema = prefix.rpartition(".")
        if not prefix or not schema or not table:
            raise ConfigError(
                f"topic {topic} is not called PREFIX.SCHEMA.TABLE, so no signal can name its table",
                next="take snapshot_requests out of the stream file, and signal the connector by hand",
            )
        collection = f"{schema}.{table}"
        data: dict[str, Any] = {"data-collections": [collection], "type": "incremental"}
        conditions = [_row_condition(request.session, columns) for request in topic_requests]
        if all(conditions) and len(conditions) <= SIGNALLED_ROWS_MAX:
            condition = {
                "data-collection": collection,
                "filter": f"({' or '.join(dict.fromkeys(conditions))})",
            }
            data["additional-conditions"] = [condition]
        last = topic_requests[-1]
        signal = {
            "id": f"seriatim-{last.stream}-{last.partition}-{last.offset}",
            "type": "execute-snapshot",
            "data": data,
        }
        signals.append((prefix.encode(), msgspec.json.encode(signal)))
    return signals


def _row_condition(session: str, columns: Mapping[str, str]) -> str:
    """The condition in SQL that names the row of a session, whose name is the key of its messages in
    JSON; empty if it cannot be written safely.

    The key has a date as the number of its days, and a decimal as its bytes: in SQL these would be
    other values. So each value must be what it seems, by the schema of the key and by the stream file.
    """
    try:
        key = msgspec.json.decode(session)
    except msgspec.DecodeError:
        return ""
    encoded_columns: set[str] = set()
    if isinstance(key, dict) and key.keys() == {"schema", "payload"}:
        encoded_columns = _encoded_columns(key["schema"])
        key = key["payload"]
    if not isinstance(key, dict) or not key:
        return ""
    parts = []
    for column, value in key.items():
        if not PLAIN_COLUMN.fullmatch(column) or column in RESERVED_WORDS.split():
            return ""
        if column in encoded_columns:
            return ""
        type_name = columns.get(column)
        if isinstance(value, str) and PLAIN_TEXT.fullmatch(value) and type_name in ("string", None):
            parts.append(f"{column} = '{value}'")
        elif type(value) is int and type_name in ("int64", None):
            parts.append(f"{column} = {value}")
        else:
            return ""
    return f"({' and '.join(parts)})" if len(parts) > 1 else parts[0]


def _encoded_columns(key_schema: Any) -> set[str]:
    """The columns whose values in a key are not those of the source, by the schema of the key."""
    try:
        fields = msgspec.convert(key_schema, KeySchema).fields
    except msgspec.ValidationError:
        return set()
    encoded_columns = set()
    for field in fields:
        if field.name not in ("", UUID) or field.type == "bytes":
            encoded_columns.add(field.field)
    return encoded_columns


class KafkaSnapshotRequester:
    """Sends the snapshot requests of one stream."""

    def __init__(
        self,
        client_settings: ClientSettings,
        topic: str,
        timeout_seconds: float = SEND_TIMEOUT_SECONDS,
        encode: Encode = encode_requests,
    ) -> None:
        self.client_settings = client_settings
        self.encode = encode
        self.topic = topic
        self.timeout_seconds = timeout_seconds
        self._delivery_error = ""

    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send all requests, and wait until Kafka has confirmed them. Raises `PlatformError` if one
        did not arrive.
        """
        self._delivery_error = ""
        messages = self.encode(requests)
        deadline = time.monotonic() + self.timeout_seconds
        producer_settings = {
            **self.client_settings,
            "message.timeout.ms": int(1000 * self.timeout_seconds),
            "linger.ms": 5,
            "log_level": 0,
        }
        producer = create_client(Producer, producer_settings)
        try:
            self._require_topic(producer)
            for message in messages:
                # The producer's queue may be full. Polling delivers what is in it.
                while not self._try_produce(producer, message) and time.monotonic() < deadline:
                    producer.poll(0.1)
        except KafkaException as error:
            raise self._send_error(error.args[0].str()) from None
        unsent_count = producer.flush(self.timeout_seconds)
        if self._delivery_error:
            raise self._send_error(self._delivery_error)
        if unsent_count:
            raise self._send_error(f"{unsent_count} of {len(messages)} did not arrive")

    def _require_topic(self, producer: Producer) -> None:
        """Refuse a topic that does not exist, instead of waiting for it."""
        metadata = producer.list_topics(self.topic, timeout=self.timeout_seconds)
        topic_error = metadata.topics[self.topic].error
        if topic_error is not None:
            raise self._send_error(topic_error.str())

    def _try_produce(self, producer: Producer, message: KeyAndValue) -> bool:
        """Put a message into the producer's queue; False if the queue is full."""
        key, value = message
        try:
            producer.produce(self.topic, value, key, on_delivery=self._on_delivery)
        except BufferError:
            return False
        return True

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._delivery_error = error.str()

    def _send_error(self, reason: str) -> PlatformError:
        return PlatformError(
            f"producers could not be asked for snapshots on topic {self.topic}: {reason}",
            next=f"check that topic {self.topic} is there and may be written to; the next run asks again",
        )
