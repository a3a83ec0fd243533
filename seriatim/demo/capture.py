"""The demo of change capture: a table in PostgreSQL that keeps changing, Debezium's connector, and the
table `current`, which equals it. `make demo-cdc` runs it.

A world of its own, as the other demo: servers on 127.0.0.1, all files below `SERIATIM_HOME/demo-cdc`,
ended by Ctrl-C. In each round the table changes for a while, then a mark row is changed last; as soon
as the mark is in Kafka, the stream is run and published, and both tables are compared row by row.

`make demo-cdc-break` asks for a fault: one change is lost on its way to Kafka. The next change of that
row has a before-image that is not the row, so its session is set aside. Then the run signals the
connector to read the row again, which makes it right.

Next: demo/stage.py is the other demo; embedded/postgres.py and embedded/connect.py start the servers.
"""

# Its statements have numbers and names of its own, and its dice decide nothing of importance.
# ruff: noqa: S311, S608

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from deltalake import DeltaTable

from seriatim import config, context
from seriatim.config import Settings
from seriatim.demo.processes import demo_lock
from seriatim.demo.stage import catch_signals, ignore_signals, print_line
from seriatim.embedded import broker, connect, postgres
from seriatim.errors import PlatformError, SeriatimError
from seriatim.kafka.sending import create_topics

PREFIX = "shop"
TOPIC = f"{PREFIX}.public.orders"
SIGNAL_TOPIC = f"{PREFIX}-signals"
STREAM = "orders"
STREAM_FILE = """\
# The stream of `make demo-cdc`, which writes this file again at each start.
topics  = "shop[.]public[.]orders"
decoder = "debezium"
machine = "table"
tier    = "once"
snapshot_requests = "shop-signals"
[table]
key     = ["id"]
columns = {{ id = "int64", customer = "string", amount = "decimal(10,2)" }}
[debezium]
before_images = "full"
[output]
path = "{path}"
"""
TABLES = """
create table if not exists orders (id int primary key, customer text not null, amount numeric(10,2));
alter table orders replica identity full;
create table if not exists debezium_signal (id text primary key, type text not null, data text);
"""
ROWS = 40
MARK_ID = 0
"""The row that is changed last in each round."""
VICTIM_ID = 1
"""The row whose change is lost on request. Nothing else changes it."""
CHANGES_PER_ROUND = 25
MARK_SECONDS = 300
"""How long a change may take from PostgreSQL to Kafka. A killed connector's slot is free late."""
BREAK_FILE = "break"
SIGNAL_SETTINGS = {
    "signal.data.collection": "public.debezium_signal",
    "signal.enabled.channels": "source,kafka",
    "signal.kafka.topic": SIGNAL_TOPIC,
    "read.only": "false",
}

Rows = dict[int, tuple[str, str]]
"""Customer and amount of each order."""


class CaptureDemo:
    """The running demo."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.dice = random.Random()
        self.mark = int(time.time())
        self.environment: dict[str, str] = {}
        self.next_offset = 0
        """Messages of the topic from here on were not looked at."""

    def start(self) -> None:
        """Start the servers, and write the stream file. What runs already is left as it is."""
        print_line("PostgreSQL …")
        self.source = postgres.start_postgres(self.folder, print_line)
        self.run_sql(TABLES)
        print_line("the broker …")
        program = broker.find_kafka_program(self.settings, print_line)
        info = broker.start_broker(self.folder, program=program, print_notice=print_line)
        self.servers = info.bootstrap_servers
        streams = self.folder / "streams"
        streams.mkdir(exist_ok=True)
        path = self.folder / "lake" / STREAM
        (streams / f"{STREAM}.toml").write_text(STREAM_FILE.format(path=path))
        self.environment = {
            **config.child_environment(),
            "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": self.servers,
            "SERIATIM_STREAMS": str(streams),
            "SERIATIM_OUTBOX": str(self.folder / "outbox"),
            "SERIATIM_SPARK_DRIVER_MEMORY": "1g",
        }
        client = context.kafka_client(config.load_settings(self.environment, self.folder))
        create_topics(client, {TOPIC: 1, SIGNAL_TOPIC: 1})
        print_line("Kafka Connect with Debezium's connector …")
        tables = "public.orders,public.debezium_signal"
        connector = connect.debezium_settings(self.source, PREFIX, tables) | SIGNAL_SETTINGS
        connector["signal.kafka.bootstrap.servers"] = self.servers
        connect.start_connect(self.folder, connector, self.servers, self.settings, print_line)

    def stop(self) -> None:
        """Stop the servers; their data stay."""
        connect.stop_connect(self.folder, print_line)
        broker.stop_broker(self.folder, print_line)
        postgres.stop_postgres(self.folder, print_line)

    def follow(self) -> None:
        """Change, fold and compare, round after round, until Ctrl-C."""
        (self.folder / BREAK_FILE).unlink(missing_ok=True)
        while True:
            is_asked_to_break = (self.folder / BREAK_FILE).exists()
            self.change_rows()
            if is_asked_to_break:
                (self.folder / BREAK_FILE).unlink()
                self.lose_change()
            self.compare()
            if is_asked_to_break:
                self.heal()

    def change_rows(self) -> None:
        """Inserts, updates, changed keys and deletes, each in a transaction of its own."""
        statements = [
            f"insert into orders values ({VICTIM_ID}, 'Ada', 1.00) on conflict do nothing;"
        ]
        for _ in range(CHANGES_PER_ROUND):
            row = self.dice.randint(VICTIM_ID + 1, ROWS)
            other = self.dice.randint(VICTIM_ID + 1, ROWS)
            amount = self.dice.randint(1, 99_999) / 100
            insert = (
                f"insert into orders values ({row}, 'c{other}', {amount}) on conflict do nothing;"
            )
            update = f"update orders set amount = {amount} where id = {row};"
            change_key = (
                f"update orders set id = {other} where id = {row}"
                f" and not exists (select 1 from orders where id = {other});"
            )
            delete = f"delete from orders where id = {row};"
            kinds = [insert, update, change_key, delete]
            statements += self.dice.choices(kinds, [4, 4, 1, 1])
        self.run_sql("\n".join(statements))
        print_line(f"{CHANGES_PER_ROUND} changes in PostgreSQL")

    def lose_change(self) -> None:
        """Change a row while PostgreSQL does not publish the table, then once more while it does."""
        name = self.dice.choice(["Grace", "Edsger", "Barbara"]) + f" {self.mark}"
        (publication,) = self.run_sql("select pubname from pg_publication;")
        self.run_sql(
            f"alter publication {publication} drop table orders;\n"
            f"update orders set customer = '{name}' where id = {VICTIM_ID};\n"
            f"alter publication {publication} add table orders;\n"
            f"update orders set amount = amount + 1 where id = {VICTIM_ID};"
        )
        print_line(
            f"row {VICTIM_ID}: a change was lost between PostgreSQL and Kafka; another followed it"
        )

    def heal(self) -> None:
        """Wait until the connector has read the row again, as the run signalled, and compare."""
        print_line(f"the run has signalled the connector to read row {VICTIM_ID} again")
        self.wait_in_topic(f'"id":{VICTIM_ID},'.encode(), b'"op":"r"')
        self.compare()

    def compare(self) -> None:
        """Change the mark row, bring `current` up to it, and compare it with the source."""
        self.mark += 1
        self.run_sql(
            f"insert into orders values ({MARK_ID}, 'mark {self.mark}', 0)"
            " on conflict (id) do update set customer = excluded.customer;"
        )
        source_rows = self.source_rows()
        self.wait_in_topic(f'"mark {self.mark}"'.encode())
        # A finding ends the run with code 3, after its screen: here that is a part of the show.
        self.run_command("run", STREAM)
        self.run_command("publish", STREAM, "--unchecked")
        current_rows = self.current_rows()
        if current_rows == source_rows:
            print_line(f"current equals the source, row by row: {len(source_rows)}\n")
            return
        for row_id in sorted(source_rows.keys() | current_rows.keys()):
            in_source = source_rows.get(row_id)
            in_current = current_rows.get(row_id)
            if in_source != in_current:
                print_line(f"row {row_id}: {in_source} in the source, {in_current} in current")
        print_line("")

    def run_sql(self, text: str) -> list[str]:
        """Run statements, and return the lines that they give."""
        return postgres.run_sql(self.source, text)

    def run_command(self, *arguments: str) -> None:
        """Run the command line; its output goes to the terminal."""
        print_line(f"$ seriatim {' '.join(arguments)}")
        command = [sys.executable, "-m", "seriatim", *arguments]
        subprocess.run(command, env=self.environment, cwd=self.folder, check=False)

    def source_rows(self) -> Rows:
        """The table in PostgreSQL."""
        lines = self.run_sql("select id, customer, amount from orders;")
        rows = (line.split("|") for line in lines)
        return {int(row_id): (customer, amount) for row_id, customer, amount in rows}

    def current_rows(self) -> Rows:
        """The table `current`."""
        table = DeltaTable(str(self.folder / "lake" / STREAM / "current"))
        rows = table.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
        return {row["id"]: (row["customer"], str(row["amount"])) for row in rows}

    def wait_in_topic(self, *texts: bytes) -> None:
        """Wait until a message with all these texts is in the topic, after the one found before."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "demo", "log_level": 0})
        consumer.assign([TopicPartition(TOPIC, 0, self.next_offset)])
        deadline = time.monotonic() + MARK_SECONDS
        while time.monotonic() < deadline:
            for message in consumer.consume(1000, 0.5):
                value = message.value() or b""
                if all(text in value for text in texts):
                    self.next_offset = (message.offset() or 0) + 1
                    consumer.close()
                    return
        consumer.close()
        raise PlatformError(
            f"a change did not come to Kafka within {MARK_SECONDS} seconds",
            next=f"read {self.folder / 'connect' / 'connect.log'}",
        )


def main(arguments: list[str]) -> int:
    """`up` runs the demo, `break` lets a running one lose a change."""
    settings = config.load_settings()
    folder = settings.home / "demo-cdc"
    if arguments == ["break"]:
        (folder / BREAK_FILE).touch()
        print_line("one change will be lost in the next round: watch the terminal of make demo-cdc")
        return 0
    postgres.require_programs()
    catch_signals()
    with demo_lock(folder, next="end the one that runs with Ctrl-C"):
        demo = CaptureDemo(folder, settings)
        try:
            demo.start()
            demo.follow()
        except KeyboardInterrupt:
            print_line("ending everything …")
        finally:
            ignore_signals()
            demo.stop()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SeriatimError as error:
        print_line(error.render())
        sys.exit(error.exit_code)
