"""One seed of the simulation: producers, topics that come and go, runs that crash, overlap and
continue late.

Everything is drawn from one `Random`. A disturbance happens where the real code passes a named crash
point or calls the ledger. It ends the process, lets another whole run happen in between (so that the
first one becomes a zombie), loses the answer of a commit, or changes Kafka while it is read.

Next: test_sim.py compares the outcome with straight.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from seriatim.engine.crash_points import arm
from seriatim.engine.machine import Runner, UserMachine
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from seriatim.errors import ConfigError, FencedError, IntegrityError, PlatformError
from seriatim.operations.repair.refold import abandon_repair
from seriatim.testing import MemoryStream
from tests.operations.compact_helper import DAY, run_compaction
from tests.operations.repair_helper import repair
from tests.sim.producer import MessageProducer, Sent, TallyMachine, draw_stream


class SimCrash(BaseException):
    """The process ends here. A BaseException: no `except Exception` may catch it."""


class Chaos:
    """The streams, producers and disturbances of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.stream = draw_stream(self.random)
        self.world = MemoryStream(self.stream, self.machine)
        self.world.reader.slicing = self._slicing
        self.world.reader.cuts = self._cuts
        self.world.reader.tasks = self._tasks
        self.world.ledger.on_call = lambda name: self._on_point(f"ledger: {name}")
        self.producer = MessageProducer(self.random, self.stream)
        self.history: dict[tuple[str, Partition], list[Sent]] = {}
        """All messages that were ever sent, by topic id, also those that Kafka has deleted."""
        self.expired: dict[Partition, int] = {}
        """The offset up to which messages have expired."""
        self.closed: set[Partition] = set()
        """Partitions that get no more messages."""
        self.calm = True
        self.depth = 0
        self.crash_rate = self.random.choice((0.0, 0.02, 0.05))
        self.visit_rate = self.random.choice((0.0, 0.01, 0.03))
        self.change_rate = self.random.choice((0.0, 0.01, 0.03))
        self.topic_faults = self.random.random() < 0.3
        self.loses = self.random.random() < 0.15
        self.runners: dict[int, Runner] = {}
        self.points: set[str] = set()

    def machine(self) -> Runner:
        """The machine, as a new process creates it."""
        if self.stream.machine == "table":
            return self.stream.table_machine()
        return UserMachine(self.stream.machine, TallyMachine, self.stream.sequence)

    def live(self) -> None:
        """A few rounds of sending and running, then calm, and runs until nothing is left."""
        self._topic()
        for _ in range(self.random.randrange(2, 6)):
            self._send(self.random.randrange(60))
            self._change_topics()
            self._try()
        arm(None)
        self.calm = True
        self.world.ledger.lost_answers = self.world.ledger.refusals = 0
        self.world.reader.failures.clear()
        self._release()
        for _ in range(3):
            self.run()
        self.refold()
        self.compact()

    def run(self) -> None:
        """One process from start to end."""
        runner = self.runners.get(self.depth) or self.runners.setdefault(self.depth, self.machine())
        if self.world.kafka.bounds(self.stream.topics) or self.world.ledger.commits:
            self.world.folding(runner).run(self.random.choice((3, 20, 1000)))

    def compact(self) -> None:
        """One process that compacts; sometimes long after the last one, so that old files go."""
        if any(commit.entry is not None for commit in self.world.ledger.commits):
            if self.depth == 0 and self.random.random() < 0.3:
                self.world.clock.sleep(40 * DAY)
            run_compaction(self.world, bytes_target=self.random.choice((400, 4_000, 1 << 20)))

    def refold(self) -> None:
        """One process that folds a range again: with the same code nothing changes, unless Kafka
        lost something.
        """
        accounts = self.world.accounts()
        folded = [
            p
            for p, account in accounts.items()
            if account.frontier > account.initial_frontier and not account.retired
        ]
        if not folded:
            return
        chosen = self.random.choice(folded)
        edges = sorted(
            self.random.sample(
                range(accounts[chosen].initial_frontier, accounts[chosen].frontier + 1), 2
            )
        )
        asked: dict[str, Any] = {"ranges": {str(chosen): tuple(edges)}}
        if (
            accounts[chosen].hold is not None
        ):  # one that died, or sleeps: a plain repair goes on with it
            asked = {"partition": str(chosen)}
        try:
            repair(self.world, self.random.choice((3, 20, 1000)), **asked)
        except (IntegrityError, ConfigError):
            # A repair that came in between may hold the partition for another range by now.
            is_held = self.world.accounts()[chosen].hold is not None
            assert is_held or self.topic_faults or self.loses, "nothing was lost"

    def _run_any_process(self) -> None:
        """One process: mostly a run."""
        choice = self.random.random()
        if choice < 0.25:
            self.compact()
        elif choice < 0.5:
            self.refold()
        else:
            self.run()

    def _release(self) -> None:
        """Abandon the repairs that were killed and still hold a partition, as a person would."""
        for hold in {account.hold for account in self.world.accounts().values()} - {None}:
            abandon_repair(self.world.open(), str(hold))

    def _try(self) -> None:
        """Run under disturbances, as a scheduler would: again after a crash, a few times."""
        arm(self._on_point)
        self.calm = False
        for _ in range(self.random.randrange(1, 5)):
            try:
                self._run_any_process()
                break
            except (SimCrash, FencedError):
                continue
            except PlatformError:
                self.world.ledger.refusals = 0
            except ConfigError:
                assert not self.world.ledger.commits, "only a first run may find no topic"
        self.calm = True
        arm(None)

    def _on_point(self, point: str) -> None:
        """The real code passes a point: mostly nothing happens there."""
        self.points.add(point)
        if self.calm:
            return
        choice = self.random.random()
        if choice < self.crash_rate:
            raise SimCrash(point)
        if choice < self.crash_rate + self.visit_rate and self.depth < 2:
            self._visit()
        elif choice > 1 - self.change_rate:
            self._disturb()

    def _visit(self) -> None:
        """Another whole run in the middle of this one; it may crash by itself."""
        self.depth += 1
        try:
            self._run_any_process()
        except (SimCrash, FencedError, PlatformError):
            pass
        finally:
            self.depth -= 1

    def _disturb(self) -> None:
        """Change something around the run."""
        deeds: list[Callable[[], None]] = [
            lambda: self._send(self.random.randrange(10)),
            self._topic,
            self._lose_answer,
            self._refuse,
            self._break_reading,
            self._change_topics,
            self._foreign,
        ]
        if self.topic_faults:
            deeds += [self._damage_topic] * 4
        self.random.choice(deeds)()

    def _lose_answer(self) -> None:
        self.world.ledger.lost_answers += 1

    def _refuse(self) -> None:
        self.world.ledger.refusals += self.random.choice((1, 2, 9))

    def _break_reading(self) -> None:
        self.world.reader.failures.append("the broker went away")

    def _foreign(self) -> None:
        if self.world.ledger.commits:
            self.world.ledger.foreign_commit(self.random.choice(("", "a row was deleted")))

    def _topic(self) -> None:
        """A new topic, sometimes one whose beginning has expired already; at most three."""
        kafka = self.world.kafka
        name = f"in-{len(kafka.topics)}"
        if len(kafka.topics) < 3 and name not in kafka.topics:
            kafka.create(name, self.random.randrange(1, 4))
            if self.random.random() < 0.2:
                self._send(20, [Partition(name, 0)])
                kafka.delete_records(Partition(name, 0), self.random.randrange(20))

    def _partitions(self) -> list[Partition]:
        return [p for p in self.world.kafka.bounds(".*") if p not in self.closed]

    def _send(self, count: int, partitions: list[Partition] | None = None) -> None:
        partitions = partitions or self._partitions()
        for _ in range(count if partitions else 0):
            partition = self.random.choice(partitions)
            key, value, sent = self.producer.draw(partition)
            topic = self.world.kafka.topics[partition.topic]
            _, offset = self.world.kafka.produce(
                partition.topic, key, value, partition=partition.number
            )
            history = self.history.setdefault((topic.id, partition), [])
            assert offset == len(history)
            history.append(sent)
            if self.loses and partition not in self.closed and self.random.random() < 0.01:
                self.world.reader.lost_offsets.add((partition, offset))

    def _change_topics(self) -> None:
        """In some seeds: partitions added, messages expired, topics deleted, made again, truncated."""
        partitions = self._partitions()
        if partitions and self.random.random() < 0.2:
            topic = self.random.choice(partitions).topic
            if len(self.world.kafka.topics[topic].messages) < 4:
                self.world.kafka.add_partitions(topic, 1)
        elif self.topic_faults and self.random.random() < 0.5:
            self._damage_topic()

    def _damage_topic(self) -> None:
        if partitions := self._partitions():
            deed = self.random.choice((self._expire, self._truncate, self._make_again))
            deed(self.random.choice(partitions))

    def _expire(self, partition: Partition) -> None:
        end = len(self.world.kafka.topics[partition.topic].messages[partition.number])
        before = self.random.randint(0, end)
        self.world.kafka.delete_records(partition, before)
        self.expired[partition] = max(before, self.expired.get(partition, 0))

    def _truncate(self, partition: Partition) -> None:
        """Truncate a partition. It gets no more messages: new ones at lost offsets could not be told
        from the old ones.
        """
        end = len(self.world.kafka.topics[partition.topic].messages[partition.number])
        self.world.kafka.truncate(partition, self.random.randint(0, end))
        self.closed.add(partition)

    def _make_again(self, partition: Partition) -> None:
        """Delete a topic; mostly it is created again, often with more messages than before."""
        topic = self.world.kafka.topics[partition.topic]
        self.world.kafka.delete(partition.topic)
        self.closed |= {Partition(partition.topic, number) for number in range(len(topic.messages))}
        if self.random.random() < 0.7 or not self.world.ledger.commits:
            self.world.kafka.create(partition.topic, len(topic.messages))
            for number, old in enumerate(topic.messages):
                more = self.random.choice((0, len(old) + 5))
                self._send(more, [Partition(partition.topic, number)])

    def _slicing(self, ranges: Ranges, messages_max: int) -> list[Ranges]:
        """Slices of any size, with any of the partitions; all is read in the end."""
        slices = []
        remaining = {p: offsets for p, offsets in ranges.items() if len(offsets)}
        while remaining:
            piece: Ranges = {}
            count = self.random.randint(1, len(remaining))
            for partition in self.random.sample(sorted(remaining), count):
                offsets = remaining.pop(partition)
                middle = min(offsets.end, offsets.start + self.random.randint(0, messages_max))
                piece[partition] = offsets.until(middle)
                if middle < offsets.end:
                    remaining[partition] = OffsetRange(middle, offsets.end)
            slices.append(piece)
        return slices

    def _tasks(self, ranges: Ranges) -> Iterator[Partition]:
        """Tasks in any order; anything may happen before each."""
        for partition in self.random.sample(sorted(ranges), len(ranges)):
            self._on_point("reading")
            yield partition

    def _cuts(self, count: int) -> list[int]:
        return [self.random.randint(0, count) for _ in range(self.random.choice((0, 0, 1, 4)))]
