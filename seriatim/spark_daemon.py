"""`python -m seriatim.spark_daemon`: Spark's daemon of Python workers, with what a task needs
loaded before it forks them.

A worker takes 1.4 s of CPU to load Arrow, our rooms and the compiled fold. Forked from here, it has
them at once, and all workers share that memory. Only for a Spark on this machine: elsewhere the
daemon may not find this package.

Next room: tuned.py says which streams have it; wiring.py has the task.
"""

from __future__ import annotations


def preload() -> None:
    """Import what tasks import, and load the compiled fold, if it was compiled."""
    from seriatim import context  # noqa: F401  # importing it is the point, here and below
    from seriatim.engine import task  # noqa: F401
    from seriatim.fast import ready
    from seriatim.fast.helpers import fold  # noqa: F401
    from seriatim.kafka import task_reader  # noqa: F401
    from seriatim.storage import arrow, record_files, state_files  # noqa: F401

    if ready.is_ready():
        from seriatim.fast.__main__ import compile_all

        compile_all()


if __name__ == "__main__":
    from pyspark.daemon import manager

    preload()
    manager()
