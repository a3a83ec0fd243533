"""One seed's mix of slices, repairs, compactions, recreated topics and crashes, with publishes in
between.

Next: test_current.py; rewriting.py has the repairs and compactions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from seriatim.engine.crash_points import arm
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, IntegrityError
from seriatim.operations.accept import accept_topic
from seriatim.operations.publish import publish_current
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import ParquetRewriter
from seriatim.storage.store import LocalStore
from seriatim.testing import MemoryStream
from tests.operations.compact_helper import run_compaction
from tests.sim.rewriting import Rewriter

PLACES = [Partition("in-a", 0), Partition("in-a", 1), Partition("in-b", 0)]


class Crashed(BaseException):
    """The process ends here."""


class Mix:
    """A stream of rows, and a table `current` that must follow whatever is done to it."""

    def __init__(
        self,
        seed: int,
        memory_stream: MemoryStream,
        current: Callable[[], Any],
        check: Callable[[], None],
    ) -> None:
        self.random, self.memory_stream, self.current, self.check = (
            Random(seed),
            memory_stream,
            current,
            check,
        )
        self.rewriter = Rewriter(memory_stream, self.random)
        self.deed_names: list[str] = []
        memory_stream.kafka.create("in-a", 2)
        memory_stream.kafka.create("in-b", 1)

    def live(self, deed_count: int) -> None:
        """Do so many things at random, then publish."""
        self.slice()
        deeds = [self.slice] * 4 + [self.repair, self.compact, self.new_life, self.lose]
        deeds += [self.really_repair, self.really_repair, self.really_compact]
        deeds += [self.publish] * 3 + [self.crash, self.rebuild, self.overtaken]
        for _ in range(deed_count):
            deed = self.random.choice(deeds)
            self.deed_names.append(deed.__name__)
            deed()
        self.publish()
        self._publish(sequence=None)
        self.check()

    def slice(self) -> None:
        """Some messages, folded in slices of some size."""
        for _ in range(self.random.randrange(1, 25)):
            partition = self.random.choice(PLACES)
            body = self._message()
            session = f"s{partition.number}{self.random.randrange(3)}"
            self.memory_stream.kafka.produce(
                partition.topic, session, json.dumps(body).encode(), partition=partition.number
            )
        self.memory_stream.run(messages_max=self.random.choice((4, 1000)))

    def _message(self) -> dict[str, Any]:
        row = {"id": self.random.choice("abcde"), "v": self.random.randrange(100)}
        kind = self.random.choice(("snapshot", "insert", "update", "update", "delete"))
        if kind == "snapshot":
            names = self.random.sample("abcde", self.random.randrange(5))
            return {"type": "snapshot", "rows": [{"id": name, "v": row["v"]} for name in names]}
        return {"type": kind, **(row if kind != "delete" else {"id": row["id"]})}

    def repair(self) -> None:
        """Replace records of a partition by hand."""
        self.rewriter.repair(self.random.choice(self._known()))

    def compact(self) -> None:
        """Join files of a partition by hand."""
        self.rewriter.compact(self.random.choice(self._known()))

    def really_repair(self) -> None:
        """Repair by the operation itself. It replaces records made by hand with what the messages
        give, where Kafka still has them.
        """
        partition, account = self.random.choice(list(self.memory_stream.accounts().items()))
        start = self.random.randint(0, max(account.frontier - 1, 0))
        open_stream = self.memory_stream.open()
        if self.rewriter.root is not None:
            open_stream.joiner = ParquetJoiner(LocalStore(self.rewriter.root), "s")
        try:
            plan = plan_repair(open_stream, RepairRequest(partition=str(partition), start=start))
            RepairRun(open_stream).apply(plan, self.random.choice((3, 1000)))
        except (IntegrityError, ConfigError):
            self.deed_names.append("refused")

    def really_compact(self) -> None:
        """Compact by the operation itself."""
        rewriter = (
            None
            if self.rewriter.root is None
            else ParquetRewriter(LocalStore(self.rewriter.root), "s")
        )
        only = self.random.choice((None, *self._known()))
        run_compaction(self.memory_stream, only, rewriter=rewriter)

    def _known(self) -> list[Partition]:
        return list(self.memory_stream.accounts())

    def new_life(self) -> None:
        """A topic is deleted and created again, and a person accepts it."""
        topic = self.random.choice(("in-a", "in-b"))
        partitions = sum(partition.topic == topic for partition in PLACES)
        self.memory_stream.kafka.delete(topic)
        self.memory_stream.kafka.create(topic, partitions)
        self.memory_stream.run()
        accept_topic(self.memory_stream.open(), topic, "it was meant")

    def publish(self) -> None:
        """Publish the last entry, or one that may be older than the published one."""
        last_sequence = self._last()
        self._publish(
            sequence=self.random.choice(
                (None, last_sequence, self.random.randint(0, last_sequence))
            )
        )
        self.check()

    def rebuild(self) -> None:
        """Rebuild the table as of any entry."""
        self._publish(sequence=self.random.randint(0, self._last()), rebuild=True)
        self.check()

    def lose(self) -> None:
        """The table is deleted, sometimes."""
        if self.random.random() < 0.3:
            self.current().lose()

    def crash(self) -> None:
        """A publish crashes at one of its crash points; readers must still see the table as of an
        entry.
        """
        points_left = self.random.randrange(6)

        def hook(point: str) -> None:
            nonlocal points_left
            points_left -= point.startswith("current")
            if points_left < 0:
                raise Crashed

        self._hooked(hook)

    def overtaken(self) -> None:
        """Another process publishes in the middle of a publish."""
        visits = [True]

        def hook(point: str) -> None:
            if point == "current-written" and visits:
                visits.pop()
                self._publish(sequence=None)

        self._hooked(hook)

    def _hooked(self, hook: Callable[[str], None]) -> None:
        arm(hook)
        try:
            self._publish(sequence=None)
        except Crashed:
            pass
        finally:
            arm(None)
        if self.current().published_version().sequence >= 0:
            self.check()

    def _last(self) -> int:
        head = self.memory_stream.ledger.head(self.memory_stream.stream.name)
        assert head is not None
        return head.ledger.sequence

    def _publish(self, **options: Any) -> None:
        publish_current(
            self.memory_stream.stream.name, self.memory_stream.ledger, self.current(), **options
        )
