"""A table that is folded from a simulated source equals it, and single faults on the way are found."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from seriatim.engine.findings import Finding
from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.records import MAIN_TABLE
from seriatim.formats.debezium import debezium_decoder
from seriatim.stream import Stream, parse_stream
from seriatim.testing import MemoryStream
from tests.formats.change_events import base64_decimal
from tests.formats.simulated_source import COLUMNS, SentMessage, SimulatedSource, Table

PARTITION = Partition("shop.public.orders", 0)
SETTINGS = {
    "nothing": {"before_images": "partial", "history": "partial"},
    "history": {"before_images": "partial", "history": "whole"},
    "images": {"before_images": "full", "history": "partial"},
    "both": {"before_images": "full", "history": "whole"},
}


def new_fold(session: str, settings: str) -> Fold:
    """A fold of a stream file with these settings."""
    toml_values: dict[str, Any] = {
        "topics": "shop.public.orders",
        "decoder": "debezium",
        "machine": "table",
        "session": session,
        "table": {"key": ["id"], "columns": COLUMNS},
        "debezium": {**SETTINGS[settings], "decimals": "precise"},
        "output": {"path": "memory"},
    }
    stream = parse_stream("orders", toml_values, "orders.toml")
    runner = stream.table_machine(decoder=debezium_decoder(stream))
    return Fold(PARTITION, runner, stream.tier, stream.on_poison, lambda _: {})


def fold_messages(fold: Fold, messages: list[SentMessage], start: int) -> None:
    """Fold messages that follow each other, from this offset on."""
    keys = [None if message.key is None else message.key.encode() for message in messages]
    values = [message.value for message in messages]
    fold.fold_batch(MessageBatch(start, [0] * len(messages), keys, values))


def rows_of(fold: Fold) -> Table:
    """All rows of all sessions, as the source has them."""
    rows: Table = {}
    for session in fold.sessions.values():
        state = session.state or {}
        for row in fold.runner.to_plain(state)["rows"]:
            row["amount"] = base64_decimal(round(float(row["amount"]) * 100))
            assert row["id"] not in rows
            rows[row["id"]] = row
    return rows


def new_source(seed: int, session: str, settings: str) -> SimulatedSource:
    """A source that is as the settings say."""
    source = SimulatedSource(
        seed,
        has_full_identity="full" in SETTINGS[settings].values(),
        has_truncates=session == "partition",
        # A session by key cannot know the values of the row's old key.
        has_large_key_changes=session == "partition",
    )
    source.send_snapshot(6)
    return source


@pytest.mark.parametrize("session", ["key", "partition"])
@pytest.mark.parametrize("settings", list(SETTINGS))
def test_the_rows_equal_the_source_after_every_message(session: str, settings: str) -> None:
    """For each kind of session and each setting, with no finding: there are no false alarms."""
    for seed in range(3):
        source = new_source(seed, session, settings)
        source.commit(150)
        fold = new_fold(session, settings)
        for offset, message in enumerate(source.messages):
            fold_messages(fold, [message], offset)
            assert rows_of(fold) == message.table, (seed, offset)
        assert fold.tally.findings == []
        assert fold.counts.headless == 0


@pytest.mark.full
@pytest.mark.parametrize("session", ["key", "partition"])
@pytest.mark.parametrize("settings", ["nothing", "both"])
def test_half_a_million_clean_messages_give_no_finding(session: str, settings: str) -> None:
    """In all, and the rows equal the source at the end of each part."""
    source = new_source(1, session, settings)
    fold = new_fold(session, settings)
    offset = 0
    while offset < 125_000:
        source.commit(10_000)
        messages = source.messages
        source.messages = []
        fold_messages(fold, messages, offset)
        offset += len(messages)
        assert rows_of(fold) == messages[-1].table
    assert fold.tally.findings == []
    assert fold.counts.headless == 0
    assert fold.counts.findings == {}


@pytest.mark.parametrize("session", ["key", "partition"])
def test_a_run_in_slices_gives_the_same_table(session: str) -> None:
    """Also where the process ends between the delete and the create of a changed key."""
    source = new_source(1, session, "history")
    source.commit(60)
    fold = new_fold(session, "history")
    world = MemoryStream(
        parse_stream(
            "orders",
            {
                "topics": "shop.public.orders",
                "decoder": "debezium",
                "machine": "table",
                "session": session,
                "table": {"key": ["id"], "columns": COLUMNS},
                "debezium": {"history": "whole", "decimals": "precise"},
                "output": {"path": "memory"},
            },
            "orders.toml",
        ),
        lambda: fold.runner,
    )
    world.kafka.create(PARTITION.topic, 1)
    for message in source.messages:
        world.kafka.produce(PARTITION.topic, message.key, message.value)
    assert world.run(messages_max=1).findings == []
    rows = {}
    for saved in world.sessions(PARTITION).values():
        state = fold.runner.load(saved.state_bytes or b"", saved.state_version)
        for row in fold.runner.to_plain(state)["rows"]:
            rows[row["id"]] = row["customer"]
    assert rows == {row_id: row["customer"] for row_id, row in source.table.items()}


def planted(seed: int, source: SimulatedSource, kind: str) -> tuple[list[SentMessage], int]:
    """The messages with one fault, and the offset where it begins."""
    messages = list(source.messages)
    chance = random.Random(seed)
    while True:
        place = chance.randrange(8, len(messages))
        message = messages[place]
        if message.value is None:
            continue  # without a tombstone, or with two, the table is the same
        if kind == "drop":
            del messages[place]
            return messages, place
        if kind == "repeat":
            messages.insert(place + 1, message)
            return messages, place + 1
        # Messages of two rows may come in either order, so two of one row are swapped.
        of_same_row = [
            i
            for i in range(place + 1, len(messages))
            if messages[i].key == message.key and messages[i].value is not None
        ]
        if message.key is not None and of_same_row:
            other = of_same_row[0]
            messages[place], messages[other] = messages[other], message
            return messages, place


def first_wrong_offset(  # noqa: C901, PLR0911, PLR0912  # one branch per rule
    messages: list[SentMessage], session: str, settings: str
) -> int | None:
    """The first offset whose message contradicts the rows, found without the machine: a plain walk
    over the messages, with what the settings take as proof. None: no message does.
    """
    has_images = SETTINGS[settings]["before_images"] == "full"
    has_history = SETTINGS[settings]["history"] == "whole"
    has_proof = has_images or has_history
    rows: dict[str, Any] = {}
    positions: dict[str, int] = {}
    known: set[str] = set()
    deleted_source = None
    for offset, message in enumerate(messages):
        if message.value is None:
            continue
        payload = msgspec.json.decode(message.value)
        key = message.key or ""
        position = payload["source"]["lsn"]
        if message.kind == "t":
            newer = {name for name in rows if positions.get(name, -1) >= position}
            if newer and has_proof:
                return offset
            positions |= {name: position for name in rows if name not in newer}
            rows = {name: row for name, row in rows.items() if name in newer}
            continue
        if message.kind != "r" and position <= positions.get(key, -1):
            if has_proof:
                return offset
            continue
        row = rows.get(key)
        is_unavailable = "__debezium_unavailable_value" in str(payload["after"])
        if message.kind == "c" and is_unavailable and payload["source"] != deleted_source:
            return offset  # the delete of the old key is missing, and with it the value
        if message.kind == "c" and row is not None and has_proof:
            return offset
        if message.kind in "ud" and row is None:
            # In a session by key without a state, an update that lacks a value is headless.
            is_headless = session == "key" and key not in known and is_unavailable
            if not is_headless and (has_history or is_unavailable):
                return offset
            if is_headless:
                continue
        if message.kind in "ud" and row is not None and has_images and payload["before"] != row:
            return offset
        known.add(key)
        if message.kind != "r":
            positions[key] = position
        if message.kind != "d":
            rows[key] = payload["after"]
        elif row is not None:
            del rows[key]
            deleted_source = payload["source"]
    return None


def findings_of(messages: list[SentMessage], session: str, settings: str) -> list[Finding]:
    """The findings of a fold over the messages."""
    fold = new_fold(session, settings)
    fold_messages(fold, messages, 0)
    return fold.tally.findings


FOUND: dict[tuple[str, str], tuple[int, int, int]] = {
    # session, settings: drops, swaps, repeats found, of 34, 33 and 33.
    ("key", "nothing"): (1, 4, 0),
    ("key", "history"): (15, 32, 33),
    ("key", "images"): (26, 33, 33),
    ("key", "both"): (33, 33, 33),
    ("partition", "nothing"): (6, 7, 0),
    ("partition", "history"): (18, 33, 33),
    ("partition", "images"): (23, 33, 33),
    ("partition", "both"): (32, 33, 33),
}


@pytest.mark.parametrize("session", ["key", "partition"])
@pytest.mark.parametrize("settings", list(SETTINGS))
def test_single_faults_are_found_at_the_message_that_contradicts(
    session: str, settings: str
) -> None:
    """Of 100 faults, a third each, every one is found exactly at the first contradiction, if there is
    any; docs/STREAMS.md has the shares.
    """
    found: Counter[str] = Counter()
    for seed in range(100):
        kind = ("drop", "swap", "repeat")[seed % 3]
        source = new_source(seed, session, settings)
        source.commit(150)
        messages, place = planted(seed, source, kind)
        expected = first_wrong_offset(messages, session, settings)
        findings = findings_of(messages, session, settings)
        assert [finding.finding for finding in findings] == ["precondition"] * len(findings)
        actual = findings[0].offset if findings else None
        assert actual == expected, (seed, kind, place)
        if actual is not None:
            assert actual >= place
            found[kind] += 1
    counts = tuple(found[kind] for kind in ("drop", "swap", "repeat"))
    assert counts == FOUND[session, settings]


@pytest.mark.parametrize("session", ["key", "partition"])
@pytest.mark.parametrize("settings", list(SETTINGS))
def test_columns_that_are_added_in_the_middle_are_those_of_the_source(
    session: str, settings: str, full: bool
) -> None:
    """A row that changed since has them; of any other they are null. Where a message lacks a value that
    is not known, that is said: with whole images nothing is ever missing.
    """
    for seed in range(25 if full else 3):
        source = new_source(seed, session, settings)
        chance = random.Random(seed)
        source.commit(chance.randrange(10, 60))
        messages_before = len(source.messages)
        source.commit(chance.randrange(5, 80))
        added = ["big"] if chance.random() < 0.5 else ["amount", "big"]
        columns = {name: kind for name, kind in COLUMNS.items() if name not in added}
        world = _GrowingStream(session, settings, columns)
        world.send(source.messages[:messages_before])
        assert world.run(messages_max=chance.choice([1, 5, 1000])).findings == []

        world.set_columns({**columns, **{name: COLUMNS[name] for name in added}})
        later_messages = source.messages[messages_before:]
        world.send(later_messages)
        outcome = world.run(messages_max=chance.choice([1, 5, 1000]))
        is_marked = bool(outcome.findings) or outcome.headless > 0
        has_whole_images = "full" in SETTINGS[settings].values()
        assert not (has_whole_images and is_marked), (seed, outcome.findings)
        if is_marked:
            continue
        changed_keys = {message.key for message in later_messages if message.value is not None}
        expected = {}
        for row_id, row in source.table.items():
            unknown = [] if f'{{"id":{row_id}}}' in changed_keys else added
            expected[row_id] = {**row, **dict.fromkeys(unknown)}
        assert world.source_rows() == expected, seed


class _GrowingStream(MemoryStream):
    """A stream in memory whose stream file gets columns."""

    def __init__(self, session: str, settings: str, columns: dict[str, str]) -> None:
        self._session = session
        self._settings = settings
        self._columns = columns
        super().__init__(self._parse(), self._machine)
        self.kafka.create(PARTITION.topic, 1)

    def _parse(self) -> Stream:
        return parse_stream(
            "orders",
            {
                "topics": "shop.public.orders",
                "decoder": "debezium",
                "machine": "table",
                "session": self._session,
                "table": {"key": ["id"], "columns": self._columns},
                "debezium": {**SETTINGS[self._settings], "decimals": "precise"},
                "output": {"path": "memory"},
            },
            "orders.toml",
        )

    def _machine(self) -> Any:
        stream = self._parse()
        return stream.table_machine(decoder=debezium_decoder(stream))

    def set_columns(self, columns: dict[str, str]) -> None:
        """Give the stream file other columns."""
        self._columns = columns
        self.files.columns[MAIN_TABLE] = self._machine().columns

    def send(self, messages: list[SentMessage]) -> None:
        """Send messages of the source."""
        for message in messages:
            self.kafka.produce(PARTITION.topic, message.key, message.value)

    def source_rows(self) -> Table:
        """All rows of all sessions, as the source has them."""
        machine = self._machine()
        rows: Table = {}
        for saved in self.sessions(PARTITION).values():
            state = machine.load(saved.state_bytes or b"", saved.state_version)
            for row in machine.to_plain(state)["rows"]:
                if row["amount"] is not None:
                    row["amount"] = base64_decimal(round(float(row["amount"]) * 100))
                rows[row["id"]] = row
        return rows
