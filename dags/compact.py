"""Compact: once a day small files of each stream become few, and what is outdated goes. Wiring
only.

A task for each stream, one at a time; it stops no run. The same is `seriatim compact STREAM`.

Next room: seriatim/cli/compact.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from seriatim import config, stream_files
from seriatim.airflow.command import CommandOperator, common_task_arguments, schedule_arguments
from seriatim.airflow.failure_callback import FailureCallback

FOLDER = Path(__file__).resolve().parent.parent
STREAM_NAMES = [
    file.stream.name
    for file in stream_files.load_all_streams(config.load_settings(folder=FOLDER).streams)[0]
]

with DAG(
    dag_id="seriatim_compact",
    description="small files become few",
    doc_md=__doc__,
    tags=["seriatim"],
    **schedule_arguments("30 2 * * *"),
    max_active_tasks=1,
    on_failure_callback=FailureCallback(STREAM_NAMES, str(FOLDER)),
) as dag:
    for _name in STREAM_NAMES:
        CommandOperator(
            task_id=_name,
            arguments=["compact", _name],
            stream=_name,
            requires_ledger=True,
            execution_timeout=timedelta(hours=6),
            **common_task_arguments(FOLDER),
        )
