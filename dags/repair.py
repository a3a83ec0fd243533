"""The DAG `seriatim_repair`: the plan is shown, a person approves it, and it is applied.

The mail about a finding has the values for this form. Without Airflow the same is `seriatim repair
STREAM --apply`.

Next: seriatim/airflow/repair.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from seriatim import config, stream_files
from seriatim.airflow.command import common_task_arguments
from seriatim.airflow.failure_callback import FailureCallback
from seriatim.airflow.params import offset_param, partition_param
from seriatim.airflow.repair import ApproveOperator, RepairApplyOperator, RepairPlanOperator

FOLDER = Path(__file__).resolve().parent.parent
SETTINGS = config.load_settings(folder=FOLDER)
STREAM_NAMES = stream_files.list_streams(SETTINGS.streams)
ONLY_STREAM = STREAM_NAMES[0] if len(STREAM_NAMES) == 1 else None

with DAG(
    dag_id="seriatim_repair",
    description="damage is repaired from the last good state, after a person approved the plan",
    doc_md=__doc__,
    tags=["seriatim"],
    schedule=None,
    catchup=False,
    params={
        "stream": Param(
            ONLY_STREAM,
            "Which stream.",
            type="string",
            enum=STREAM_NAMES or [""],
        ),
        "partition": partition_param(
            "Only this partition, like prefix-a/3. Empty: all that is damaged."
        ),
        "session": Param(None, "Only this session.", type=["string", "null"], maxLength=1000),
        "from": offset_param(
            "Fold again from this offset on; needs the partition. Empty: from where the damage begins."
        ),
        "forward": Param(
            False, "Go on without messages that are gone; the gap is published.", type="boolean"
        ),
    },
    on_failure_callback=FailureCallback((), str(FOLDER)),
) as dag:
    plan = RepairPlanOperator(
        task_id="plan", execution_timeout=timedelta(hours=1), **common_task_arguments(FOLDER)
    )
    approve = ApproveOperator(
        task_id="approve",
        plan_task_id="plan",
        subject="Repair {{ params.stream }}?",
        body="{{ ti.xcom_pull(task_ids='plan')['text'] }}",
        response_timeout=timedelta(days=3),
        owner="seriatim",
    )
    apply = RepairApplyOperator(
        task_id="apply",
        plan_task_id="plan",
        max_active_tis_per_dag=1,
        **common_task_arguments(FOLDER),
    )
    plan >> approve >> apply
