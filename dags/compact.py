"""The DAG `seriatim_compact`: once a day, the many small files of each stream become few large ones,
and outdated files are deleted.

It has a task for each stream, and runs one at a time; it stops no run of a stream. Without Airflow
the same is `seriatim compact STREAM`.

Next: seriatim/cli/compact.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from seriatim import config, stream_files
from seriatim.airflow.command import CommandOperator, common_task_arguments, schedule_arguments
from seriatim.airflow.failure_callback import FailureCallback

FOLDER = Path(__file__).resolve().parent.parent
SETTINGS = config.load_settings(folder=FOLDER)
STREAM_FILES, _ = stream_files.load_all_streams(SETTINGS.streams)
STREAM_NAMES = [file.stream.name for file in STREAM_FILES]

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
