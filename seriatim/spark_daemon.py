"""`python -m seriatim.spark_daemon`: Spark's daemon of Python workers, with everything that a task
needs imported before workers are forked.

A new worker needs 1.4 s of CPU to load Arrow, our modules and the compiled fold. A worker forked
from here has them at once, and all workers share that memory. On the hosts of a cluster this package
must be installed as well; where it is not, kafka/worker_setup.py names the host.

Next: spark_settings.py says which streams use it; context.py has the task.
"""

from __future__ import annotations

import sys

FOLD_WORKER = "pyspark.worker"
"""The module that Spark runs in the workers of tasks."""


def preload() -> None:
    """Import the modules that tasks import, and load the compiled fold if it was compiled before."""
    from seriatim import context  # noqa: F401  # importing it is the point, here and below
    from seriatim.engine import task  # noqa: F401
    from seriatim.fast import ready
    from seriatim.fast.helpers import fold  # noqa: F401
    from seriatim.kafka import range_source, task_reader  # noqa: F401
    from seriatim.storage import arrow, record_files, state_files  # noqa: F401

    if ready.is_ready():
        from seriatim.fast.__main__ import compile_all

        compile_all()


if __name__ == "__main__":
    from pyspark.daemon import manager

    # Spark starts further daemons for the processes that plan our source. They fold nothing.
    if sys.argv[1:] == [FOLD_WORKER]:
        preload()
    manager()
