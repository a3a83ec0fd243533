"""A DAG for each stream file: plan → fold → check → publish, and `done` if all of them succeeded.

A new file in `streams/` makes its DAG appear. A stream file that is broken is left out here, and
shown as an import error by broken_streams.py. Airflow parses this file again and again, so nothing
heavy is imported.

Next: seriatim/airflow has the tasks; seriatim/cli has the commands that they run.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

from seriatim import config, stream_files
from seriatim.airflow.command import common_task_arguments, schedule_arguments
from seriatim.airflow.failure_callback import FailureCallback
from seriatim.airflow.fold import FoldOperator
from seriatim.airflow.operators import AFTER_FOLD, CheckOperator, PlanOperator, PublishOperator
from seriatim.airflow.params import stream_params
from seriatim.errors import ConfigError
from seriatim.stream_files import StreamFile

FOLDER = Path(__file__).resolve().parent.parent
FORM_PARAMS = stream_params()
"""The form of all DAGs."""


def stream_dag(file: StreamFile) -> DAG:
    """The DAG of one stream."""
    stream = file.stream
    common = {"stream": stream.name, **common_task_arguments(FOLDER)}
    on_failure = FailureCallback([stream.name], str(FOLDER))
    on_success = FailureCallback([stream.name], str(FOLDER), run_succeeded=True)
    with DAG(
        dag_id=stream.name,
        description=f"{stream.topics} → {stream.machine} → {stream.output.path}",
        doc_md=stream_files.describe_stream(file),
        tags=["seriatim", f"tier {stream.tier}"],
        **schedule_arguments(stream.schedule.cron, stream.schedule.timezone),
        on_failure_callback=on_failure,
        on_success_callback=on_success,
        # broken_streams.py runs this file, too, and must not own the DAGs.
        auto_register=False,
    ) as dag:
        plan = PlanOperator(task_id="plan", **common, execution_timeout=timedelta(hours=1))
        fold = FoldOperator(
            task_id="fold", **common, max_active_tis_per_dag=1, execution_timeout=timedelta(days=1)
        )
        check = CheckOperator(
            task_id="check", **common, trigger_rule=AFTER_FOLD, execution_timeout=timedelta(hours=6)
        )
        publish = PublishOperator(
            task_id="publish",
            **common,
            trigger_rule=AFTER_FOLD,
            execution_timeout=timedelta(hours=6),
        )
        all_succeeded = EmptyOperator(task_id="done", owner=common["owner"])
        plan >> fold >> check >> publish
        # By their rule, check and publish run only if this one succeeded.
        plan >> [check, publish]
        [fold, check, publish] >> all_succeeded
    # Given to the DAG when it is made, they would be validated, and copied for each task, which takes
    # most of the time of parsing this file.
    dag.params.update(FORM_PARAMS)
    return dag


SETTINGS = config.load_settings(folder=FOLDER)
STREAM_FILES, REFUSED = stream_files.load_all_streams(SETTINGS.streams)
for stream_file in STREAM_FILES:
    stream_name = stream_file.stream.name
    try:
        # Airflow finds the DAGs among the names of the module.
        globals()[f"dag_{stream_name}"] = stream_dag(stream_file)
    except Exception as error:  # noqa: BLE001  # one broken stream must not hide the DAGs of the others
        problem = f"no DAG can be made of it: {type(error).__name__}: {error}"
        refusal = ConfigError(
            f"{stream_name}.toml: {problem}",
            next=f"fix {stream_name}.toml, or what lies beside it",
        )
        REFUSED.append(refusal)
