"""One seed's mix of slices, repairs, compactions, new lives of topics and crashes, with publishes
in between.

Next room: test_current.py; rewriting.py has the repairs and compactions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from seriatim.engine.crash_points import arm
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, IntegrityError
from seriatim.operations.accept import DecisionContext, accept_topic
from seriatim.operations.compact import compact_stream
from seriatim.operations.publish import publish_current
from seriatim.operations.repair.plan import RepairRequest
from seriatim.operations.repair.repair import RepairRun, plan_repair
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.rewrite import ParquetRewriter
from seriatim.testing import MemoryStream
from tests.operations.compact_helper import means
from tests.operations.repair_helper import mending
from tests.sim.rewriting import Rewriter

PLACES = [Partition("in-a", 0), Partition("in-a", 1), Partition("in-b", 0)]


class Crashed(BaseException):
    """The process ends here."""


class Mix:
    """A stream of rows, and a table `current` that must follow whatever is done to it."""

    def __init__(
        self, seed: int, made: MemoryStream, current: Callable[[], Any], check: Callable[[], None]
    ) -> None:
        self.random, self.made, self.current, self.check = Random(seed), made, current, check
        self.rewriter = Rewriter(made, self.random)
        self.done: list[str] = []
        made.kafka.create("in-a", 2)
        made.kafka.create("in-b", 1)

    def live(self, deeds: int) -> None:
        """So many deeds, then a last publish."""
        self.slice()
        kinds = [self.slice] * 4 + [self.repair, self.compact, self.new_life, self.lose]
        kinds += [self.really_repair, self.really_repair, self.really_compact]
        kinds += [self.publish] * 3 + [self.crash, self.rebuild, self.overtaken]
        for _ in range(deeds):
            deed = self.random.choice(kinds)
            self.done.append(deed.__name__)
            deed()
        self.publish()
        self._publish(sequence=None)
        self.check()

    def slice(self) -> None:
        """Some messages, folded in slices of some size."""
        for _ in range(self.random.randrange(1, 25)):
            place = self.random.choice(PLACES)
            body = self._message()
            session = f"s{place.number}{self.random.randrange(3)}"
            self.made.kafka.produce(
                place.topic, session, json.dumps(body).encode(), partition=place.number
            )
        self.made.run(messages_max=self.random.choice((4, 1000)))

    def _message(self) -> dict[str, Any]:
        row = {"id": self.random.choice("abcde"), "v": self.random.randrange(100)}
        kind = self.random.choice(("snapshot", "insert", "update", "update", "delete"))
        if kind == "snapshot":
            names = self.random.sample("abcde", self.random.randrange(5))
            return {"type": "snapshot", "rows": [{"id": name, "v": row["v"]} for name in names]}
        return {"type": kind, **(row if kind != "delete" else {"id": row["id"]})}

    def repair(self) -> None:
        """Records of a partition made again."""
        self.rewriter.repair(self.random.choice(self._known()))

    def compact(self) -> None:
        """Files of a partition as fewer ones."""
        self.rewriter.compact(self.random.choice(self._known()))

    def really_repair(self) -> None:
        """By the step itself, which makes of hand-made records what the messages say; where Kafka
        has them still.
        """
        partition, account = self.random.choice(list(self.made.accounts().items()))
        start = self.random.randint(0, max(account.frontier - 1, 0))
        tools = mending(self.made)
        if self.rewriter.root is not None:
            tools = replace(
                tools,
                fold_context=replace(
                    tools.fold_context, joiner=ParquetJoiner(self.rewriter.root, "s")
                ),
            )
        try:
            wanted = plan_repair(tools, RepairRequest(partition=str(partition), start=start))
            RepairRun(tools).apply(wanted, self.random.choice((3, 1000)))
        except (IntegrityError, ConfigError):
            self.done.append("refused")

    def really_compact(self) -> None:
        """By the step itself."""
        rewriter = None if self.rewriter.root is None else ParquetRewriter(self.rewriter.root, "s")
        compact_stream(
            means(self.made, rewriter=rewriter), self.random.choice((None, *self._known()))
        )

    def _known(self) -> list[Partition]:
        return list(self.made.accounts())

    def new_life(self) -> None:
        """A topic is made again, and a person accepts it."""
        topic = self.random.choice(("in-a", "in-b"))
        partitions = sum(place.topic == topic for place in PLACES)
        self.made.kafka.delete(topic)
        self.made.kafka.create(topic, partitions)
        self.made.run()
        told = DecisionContext(
            stream=self.made.stream,
            runner=self.made.machine(),
            log=self.made.kafka,
            ledger=self.made.ledger,
            records=self.made.files,
            state=self.made.files,
            clock=self.made.clock,
            new_attempt=lambda: f"accept{self.random.random()}",
        )
        accept_topic(told, topic, "it was meant")

    def publish(self) -> None:
        """To the last entry, or to one that may be behind what is published."""
        last = self._last()
        self._publish(sequence=self.random.choice((None, last, self.random.randint(0, last))))
        self.check()

    def rebuild(self) -> None:
        """As of any entry."""
        self._publish(sequence=self.random.randint(0, self._last()), rebuild=True)
        self.check()

    def lose(self) -> None:
        """Somebody deletes the table."""
        if self.random.random() < 0.3:
            self.current().lose()

    def crash(self) -> None:
        """A publish ends at one of its points; readers then see the table as of an entry all the
        same.
        """
        left = self.random.randrange(6)

        def hook(point: str) -> None:
            nonlocal left
            left -= point.startswith("current")
            if left < 0:
                raise Crashed

        self._hooked(hook)

    def overtaken(self) -> None:
        """Another one publishes while this one is at work."""
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
        head = self.made.ledger.head(self.made.stream.name)
        assert head is not None
        return head.ledger.sequence

    def _publish(self, **asked: Any) -> None:
        publish_current(self.made.stream.name, self.made.ledger, self.current(), **asked)
