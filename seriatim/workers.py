"""Workers: run a function for each piece of work, wherever there is room.

A piece of work is a small value that names files by key and digest; the function opens the store
itself and answers with a small value. Nothing else crosses the border, so that works, answers and
the function can be sent to another process. A piece that fails answers with a `Failure`; the others
have their answers all the same.

`LocalWorkers` is this process; spark_workers.py has the executors of a cluster. tests/contracts/test_workers.py
says what holds for every kind.

Next: storage/audit.py and storage/join.py read files through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from seriatim.engine.failure import Failure, as_worker_error

W = TypeVar("W")
A = TypeVar("A")
WORK_TEXT_MAX = 200
"""Characters of a work that an error text shows."""


class Workers(Protocol):
    """Where pieces of work are done."""

    def map(self, function: Callable[[W], A], works: Iterable[W]) -> Iterator[A | Failure]:
        """The answer of the function to each work, in the order of the works.

        `function` is a function of a module, or a Struct that can be called. Function, works and
        answers can be pickled; a work says by `str` what it is about, for errors. Answers come as
        early as they can, so that the caller can show progress, and can stop before the rest is
        done.
        """
        ...


ChooseWorkers = Callable[[int], Workers]
"""Chooses workers by the number of records that they will read."""


class LocalWorkers:
    """This process: one piece after the other, each when its answer is asked for."""

    def map(self, function: Callable[[W], A], works: Iterable[W]) -> Iterator[A | Failure]:
        """The answers, in the order of the works."""
        for work in works:
            yield answer_or_failure(function, work)


def this_process(_records: int) -> Workers:
    """This process, however much there is to do."""
    return LocalWorkers()


def answer_or_failure(function: Callable[[W], A], work: W) -> A | Failure:
    """The answer to one piece of work. An exception becomes a value, for any kind of workers."""
    try:
        return function(work)
    except Exception as error:  # noqa: BLE001  # the caller decides what a failure means
        return Failure.of(as_worker_error(str(work)[:WORK_TEXT_MAX], error))


def map_or_raise(workers: Workers, function: Callable[[W], A], works: Iterable[W]) -> Iterator[A]:
    """The answers of all works. The first failure is raised at its turn."""
    for answer in workers.map(function, works):
        if isinstance(answer, Failure):
            raise answer.to_error()
        yield answer
