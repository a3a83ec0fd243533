"""Watch: every five minutes a look at all streams; what needs a person is mailed, and what waited to be. Wiring only.

Without Airflow the same is one line of cron: `seriatim watch --once`.

Next room: seriatim/cli/watch.py.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, CronDataIntervalTimetable

from seriatim.airflow.command import Command, common
from seriatim.core.errors import IntegrityError

FOLDER = Path(__file__).resolve().parent.parent

with DAG(
    dag_id="seriatim_watch",
    description="looks at all streams and tells whom it concerns",
    doc_md=__doc__,
    tags=["seriatim"],
    schedule=CronDataIntervalTimetable("*/5 * * * *", timezone="UTC"),
    start_date=datetime(2026, 1, 1),  # noqa: DTZ001  # Airflow takes it as UTC
    catchup=False,
    max_active_runs=1,
) as dag:
    watch = Command(
        task_id="watch",
        words=["watch", "--once"],
        fine=(0, IntegrityError.exit_code),
        execution_timeout=timedelta(minutes=10),
        **{**common(FOLDER), "retries": 0},
    )
