"""A task that fails returns why as a value, and the driver raises the same error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from seriatim.engine.failure import LOOK_AT_WORKERS
from seriatim.engine.files import SourceFailedError
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.task import PartitionWork, find_work, read_result, run_task
from seriatim.errors import (
    BrokenPromiseError,
    ConfigError,
    DamagedFileError,
    PlatformError,
    SeriatimError,
)

WORK = PartitionWork(
    partition=Partition("a", 3), start=0, end=5, epoch=0, topic_id="id", attempt="x"
)


def failed(error: BaseException) -> SeriatimError:
    """What the driver raises when a task meets this."""

    def raise_it() -> Any:
        raise error

    kit: Any = SimpleNamespace(digests=raise_it)
    with pytest.raises(SeriatimError) as raised:
        read_result(run_task(WORK, [], kit))
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        DamagedFileError(
            "state file x: it is missing",
            path="x",
            cause="lost\0or changed",
            next="seriatim repair s",
        ),
        PlatformError("no helper", next="look at them", cause="out of memory", helpers=2),
        ConfigError("the machine is not there", next="deploy it"),
        BrokenPromiseError("offsets come in order", offset=7, next="report this"),
    ],
)
def test_an_error_of_ours_arrives_whole(error: SeriatimError) -> None:
    """Class, words, facts, advice: whatever is in them."""
    arrived = failed(error)
    assert (type(arrived), vars(arrived)) == (type(error), vars(error))
    assert arrived.render() == error.render()


def test_trouble_without_advice_gets_some() -> None:
    """The disk or memory of a worker: which partition, and where to look."""
    assert failed(PlatformError("no room")).next == LOOK_AT_WORKERS
    for error in (OSError(28, "No space left"), MemoryError("arrow")):
        arrived = failed(error)
        assert type(arrived) is PlatformError
        assert arrived.message == f"a/3: {type(error).__name__}: {error}"
        assert arrived.next == LOOK_AT_WORKERS


def test_what_nobody_foresaw_is_our_bug_with_its_last_lines() -> None:
    """Whoever reports it has the trace."""
    arrived = failed(KeyError("gone"))
    assert type(arrived) is BrokenPromiseError
    assert arrived.message == "a/3: KeyError: 'gone'"
    assert "raise_it" in arrived.fields["detail"]


def test_reading_that_broke_is_no_failure_of_the_task() -> None:
    """Discovery decides what it means."""

    def raise_it() -> Any:
        raise SourceFailedError("the broker went away")

    kit: Any = SimpleNamespace(digests=raise_it)
    with pytest.raises(SourceFailedError):
        run_task(WORK, [], kit)


@pytest.mark.parametrize(
    ("partition", "whole"),
    [
        (Partition("a", 3), OffsetRange(1, 5)),
        (Partition("a", 3), OffsetRange(0, 6)),
        (Partition("a", 3), OffsetRange(5, 9)),
        (Partition("a", 4), OffsetRange(0, 5)),
    ],
)
def test_a_range_that_the_state_does_not_belong_to_is_refused(
    partition: Partition, whole: OffsetRange
) -> None:
    """A frame of an earlier slice that Spark runs once more finds the work of the present one."""
    works = {WORK.partition: WORK}
    assert find_work(works, WORK.partition, OffsetRange(0, 5)) is WORK
    with pytest.raises(BrokenPromiseError, match="the range that its state belongs to"):
        find_work(works, partition, whole)
