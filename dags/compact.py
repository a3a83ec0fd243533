"""Compact: once a day small files of each stream become few, and what is outdated goes. Wiring only.

A task for each stream, one at a time; it stops no run. The same is `seriatim compact STREAM`.

Next room: seriatim/cli/compact.py.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, CronDataIntervalTimetable

from seriatim import config, streams
from seriatim.airflow.alert import Alert
from seriatim.airflow.command import Command, common
from seriatim.core.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent


def good_streams(folder: Path) -> list[str]:
    """Those whose file can be read; broken_streams.py shows the others."""
    found = []
    for name in streams.names(folder):
        try:
            found.append(streams.load(name, folder).stream.name)
        except ConfigError:
            continue
    return found


NAMES = good_streams(config.load(folder=FOLDER).streams)

with DAG(
    dag_id="seriatim_compact",
    description="small files become few",
    doc_md=__doc__,
    tags=["seriatim"],
    schedule=CronDataIntervalTimetable("30 2 * * *", timezone="UTC"),
    start_date=datetime(2026, 1, 1),  # noqa: DTZ001  # Airflow takes it as UTC
    catchup=False,
    max_active_runs=1,
    max_active_tasks=1,
    on_failure_callback=Alert(NAMES, str(FOLDER)),
) as dag:
    for _name in NAMES:
        Command(
            task_id=_name,
            words=["compact", _name],
            stream=_name,
            after_run=True,
            execution_timeout=timedelta(hours=6),
            **common(FOLDER),
        )
