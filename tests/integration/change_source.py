"""A real source of changes: PostgreSQL under load, Kafka Connect and Debezium's connector into the
broker of the test run.

The load comes in rounds. In each round several clients work at the same time, so their transactions
interleave. At the end of a round, while nobody else writes, one transaction changes the mark rows and
reads the whole table: what the table machine must have made of the messages up to the marks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from seriatim import config
from seriatim.embedded import connect, postgres
from tests.integration.lab import Lab, silent

TABLE = "orders"
COLUMNS = {
    "id": "int64",
    "customer": "string",
    "amount": "decimal(10,2)",
    "big": "string",
    "at": "timestamp",
    "day": "date",
}
CREATE = f"""
create table {TABLE} (id bigint primary key, customer text not null, amount numeric(10,2), big text,
  at timestamptz, day date);
alter table {TABLE} alter column big set storage external;
insert into {TABLE} select i, 'c' || i, i * 1.25, null, '2026-01-01', '2026-01-02'
  from generate_series(1, 60) i;
"""
BIG = "(select string_agg(md5(random()::text), '') from generate_series(1, 100))"
"""More than fits into a row, so that PostgreSQL stores it apart (TOAST)."""
ROWS = (
    "select json_build_object('id', id, 'customer', customer, 'amount', amount::text,"
    " 'big', md5(big), 'at', (extract(epoch from at) * 1000000)::bigint, 'day', day)"
    f" from {TABLE} order by id;"
)
IDS = 120
MARK_IDS = range(9_000_000, 9_000_016)
"""The mark rows. Their keys spread over all partitions of a topic with few of them."""
WAIT_SECONDS = 300
Row = tuple[Any, ...]


class ChangeSource:
    """A table in PostgreSQL, whose changes go to a topic."""

    def __init__(
        self,
        lab: Lab,
        prefix: str,
        partitions: int,
        seed: int,
        *,
        has_truncate: bool,
        has_full_images: bool,
        converter: Mapping[str, str] | None = None,
    ) -> None:
        self.lab = lab
        self.home = lab.folder / "source"
        self.partitions = partitions
        self.dice = random.Random(seed)
        self.has_truncate = has_truncate
        self.converter = converter or {}
        self.topic = f"{prefix}.public.{TABLE}"
        self.server = postgres.start_postgres(self.home, silent)
        self.run_sql(CREATE)
        if has_full_images:
            self.run_sql(f"alter table {TABLE} replica identity full;")
        self.connector = connect.debezium_settings(
            self.server, prefix, f"public.{TABLE}", partitions=partitions
        )
        self.round = 0
        self.start_connector()

    def start_connector(self) -> None:
        """Start the connector, or start it again."""
        info = connect.start_connect(
            self.home,
            self.connector,
            self.lab.servers,
            config.load_settings(),
            silent,
            converter=self.converter,
        )
        self.connector_pid = info.pid

    def restart_connector(self) -> None:
        """Stop the connector as an operator does, and start it again."""
        connect.stop_connect(self.home, silent)
        self.start_connector()

    def kill_connector(self) -> None:
        """Kill the connector while it works, and start it again: it sends messages twice."""
        os.kill(self.connector_pid, signal.SIGKILL)
        self.start_connector()

    def close(self) -> None:
        """End everything, and delete the data."""
        connect.stop_connect(self.home, silent)
        postgres.remove_postgres(self.home, silent)

    def run_sql(self, text: str) -> list[str]:
        """Run statements as one client, and return the lines that they give."""
        return postgres.run_sql(self.server, text)

    def _start_client(self, text: str) -> subprocess.Popen[str]:
        script = self.home / f"{self.dice.getrandbits(64):x}.sql"
        script.write_text(text)
        return subprocess.Popen(
            [str(postgres.require_programs() / "psql"), "-qAtX", "-f", str(script)],
            env={**os.environ, **self.server.client_environment()},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def begin_load(self, transactions: int, clients: int = 3) -> list[subprocess.Popen[str]]:
        """Begin one round of load, with several clients at once. Some of their transactions fail, by
        deadlocks and by keys that are taken: that is a part of the load.
        """
        scripts = []
        for _ in range(clients):
            statements = ["set deadlock_timeout = '20ms';"]
            statements += [self._transaction() for _ in range(transactions // clients)]
            scripts.append("\n".join(statements))
        return [self._start_client(script) for script in scripts]

    def end_load(self, clients: list[subprocess.Popen[str]]) -> None:
        """Wait until the round is over."""
        for client in clients:
            client.communicate()
            assert client.returncode == 0

    def _transaction(self) -> str:
        """A few changes, which are committed, rolled back, or rolled back in part."""
        changes = [self._change() for _ in range(self.dice.randint(1, 5))]
        end = self.dice.choices(["commit;", "rollback;"], [8, 2])[0]
        if self.dice.random() < 0.2:
            changes += ["savepoint s;", self._change(), "rollback to savepoint s;", self._change()]
        return "\n".join(["begin;", *changes, end])

    def _change(self) -> str:
        row = self.dice.randint(1, IDS)
        other = self.dice.randint(1, IDS)
        number = self.dice.randint(1, 99_999_999)
        kinds = {
            f"insert into {TABLE} values ({row}, 'new', {number / 100}, {BIG}, now(), '2026-03-0{row % 9 + 1}')"
            " on conflict do nothing;": 20,
            f"update {TABLE} set amount = {number / 100}, at = clock_timestamp() where id = {row};": 30,
            f"update {TABLE} set big = {BIG}, customer = 'c{number}' where id = {row};": 15,
            f"update {TABLE} set amount = null, day = null where id = {row};": 5,
            f"delete from {TABLE} where id = {row};": 12,
            f"update {TABLE} set id = {other} where id = {row};": 12,
            f"update {TABLE} set amount = amount + 1 where id between {row} and {row + 3};": 5,
        }
        if self.has_truncate:
            kinds[f"truncate {TABLE};"] = 1
        return self.dice.choices(list(kinds), list(kinds.values()))[0]

    def mark(self) -> list[Row]:
        """Change the mark rows, and return the whole table in the same transaction."""
        self.round += 1
        values = ", ".join(f"({row}, 'mark-{self.round}')" for row in MARK_IDS)
        lines = self.run_sql(
            f"begin; lock table {TABLE}; insert into {TABLE} (id, customer) values {values}"
            f" on conflict (id) do update set customer = excluded.customer;\n{ROWS}\ncommit;\n"
        )
        return [_source_row(json.loads(line)) for line in lines]

    def offsets_after_mark(self) -> dict[int, int]:
        """For each partition the offset after its last mark row of this round, at its first
        occurrence. Waits until the connector has sent them all.
        """
        text = f"mark-{self.round}".encode()
        mark_keys = {f'{{"id":{row}}}'.encode() for row in MARK_IDS}
        ends: dict[int, int] = {}
        consumer = Consumer(
            {"bootstrap.servers": self.lab.servers, "group.id": "marks", "log_level": 0}
        )
        consumer.assign([TopicPartition(self.topic, p, 0) for p in range(self.partitions)])
        deadline = time.monotonic() + WAIT_SECONDS
        while mark_keys:
            assert time.monotonic() < deadline, f"{len(mark_keys)} marks did not come"
            for message in consumer.consume(10_000, 0.5):
                value = message.value() or b""
                # The text is followed by a quote in JSON, and by the next field in Avro.
                is_mark = text + b'"' in value or (value[:1] == b"\0" and text in value)
                if message.error() is None and is_mark and message.key() in mark_keys:
                    mark_keys.remove(message.key())
                    end = message.offset() + 1
                    ends[message.partition()] = max(end, ends.get(message.partition(), 0))
        consumer.close()
        assert len(ends) == self.partitions
        return ends


def _source_row(row: Mapping[str, Any]) -> Row:
    amount = None if row["amount"] is None else Decimal(row["amount"])
    return (row["id"], row["customer"], amount, row["big"], row["at"], row["day"])


def current_rows(table: Any) -> list[Row]:
    """The rows of a table `current`, as `ChangeSource.mark` gives those of the source."""
    rows = []
    for row in table.to_pylist():
        big = None if row["big"] is None else hashlib.md5(row["big"].encode()).hexdigest()
        microseconds = None if row["at"] is None else round(row["at"].timestamp() * 1_000_000)
        day = None if row["day"] is None else row["day"].isoformat()
        rows.append((row["id"], row["customer"], row["amount"], big, microseconds, day))
    return sorted(rows)


def has_source() -> str:
    """Why there is no source on this host; empty if there is one."""
    if postgres.find_programs() is None:
        return f"no PostgreSQL: {postgres.INSTALL_ADVICE}"
    if os.geteuid() == 0 and not Path("/usr/bin/setpriv").exists():
        return "PostgreSQL refuses to run as root, and there is no setpriv"
    return ""
