"""The DAG `seriatim_watch`: every five minutes it looks at all streams, mails what needs a person,
and sends mails that could not be sent before.

Without Airflow the same is one line of cron: `seriatim watch --once`.

Next: seriatim/cli/watch.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from seriatim.airflow.command import common_task_arguments, schedule_arguments
from seriatim.airflow.operators import WatchOperator
from seriatim.errors import IntegrityError

FOLDER = Path(__file__).resolve().parent.parent
RETRY_DELAY = timedelta(seconds=20)
"""While Airflow starts, tasks fail before its API server is up: a retry soon after succeeds."""

with DAG(
    dag_id="seriatim_watch",
    description="looks at all streams and mails what needs a person",
    doc_md=__doc__,
    tags=["seriatim"],
    **schedule_arguments("*/5 * * * *"),
) as dag:
    watch = WatchOperator(
        task_id="watch",
        arguments=["watch", "--once"],
        accepted_exit_codes=(0, IntegrityError.exit_code),
        execution_timeout=timedelta(minutes=10),
        **{**common_task_arguments(FOLDER), "retry_delay": RETRY_DELAY},
    )
