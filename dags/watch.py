"""Watch: every five minutes a look at all streams; what needs a person is mailed, and what waited to be. Wiring only.

Without Airflow the same is one line of cron: `seriatim watch --once`.

Next room: seriatim/cli/watch.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from seriatim.airflow.command import common, every
from seriatim.airflow.watch import Watch
from seriatim.core.errors import IntegrityError

FOLDER = Path(__file__).resolve().parent.parent
SOON = timedelta(seconds=20)
"""At a start Airflow fails tasks before its API server is up: the next try is not worth waiting long for."""

with DAG(
    dag_id="seriatim_watch",
    description="looks at all streams and tells whom it concerns",
    doc_md=__doc__,
    tags=["seriatim"],
    **every("*/5 * * * *"),
) as dag:
    watch = Watch(
        task_id="watch",
        words=["watch", "--once"],
        fine=(0, IntegrityError.exit_code),
        execution_timeout=timedelta(minutes=10),
        **{**common(FOLDER), "retry_delay": SOON},
    )
