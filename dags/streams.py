"""A DAG for each stream file: plan → fold → check → publish, and `done` if all went well. Wiring
only.

Airflow parses this file again and again, so nothing heavy is imported. Dropping a file into
`streams/` makes its DAG appear; one that is broken, in whatever way, is left out here and shown as
an import error by broken_streams.py.

Next room: seriatim/airflow has the tasks; seriatim/cli what they run.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from airflow.sdk.definitions.param import ParamsDict

from seriatim import config, stream_files
from seriatim.airflow.command import common_task_arguments, schedule_arguments
from seriatim.airflow.failure_callback import FailureCallback
from seriatim.airflow.fold import FoldOperator
from seriatim.airflow.operators import CheckOperator, PlanOperator, PublishOperator
from seriatim.airflow.params import stream_params
from seriatim.errors import ConfigError
from seriatim.stream_files import StreamFile

FOLDER = Path(__file__).resolve().parent.parent
FORM_PARAMS = ParamsDict(stream_params())
"""One for all: given to each DAG in the usual way it is validated and copied again and again, most
of the parsing.
"""


def stream_dag(file: StreamFile) -> DAG:
    """The DAG of one stream."""
    stream = file.stream
    ours = {"stream": stream.name, **common_task_arguments(FOLDER)}
    with DAG(
        dag_id=stream.name,
        description=f"{stream.topics} → {stream.machine} → {stream.output.path}",
        doc_md=stream_files.describe_stream(file),
        tags=["seriatim", f"tier {stream.tier}"],
        **schedule_arguments(stream.schedule.cron),
        on_failure_callback=FailureCallback([stream.name], str(FOLDER)),
        on_success_callback=FailureCallback([stream.name], str(FOLDER), run_succeeded=True),
        auto_register=False,  # of broken_streams.py, which makes them, too, they would be as well
    ) as dag:
        plan = PlanOperator(task_id="plan", **ours, execution_timeout=timedelta(hours=1))
        fold = FoldOperator(
            task_id="fold", **ours, max_active_tis_per_dag=1, execution_timeout=timedelta(days=1)
        )
        check = CheckOperator(
            task_id="check", **ours, trigger_rule="all_done", execution_timeout=timedelta(hours=6)
        )
        publish = PublishOperator(
            task_id="publish", **ours, trigger_rule="all_done", execution_timeout=timedelta(hours=6)
        )
        done = EmptyOperator(task_id="done", owner=ours["owner"])
        plan >> fold >> check >> publish
        [fold, check, publish] >> done
    vars(dag)["params"] = FORM_PARAMS
    return dag


_files, REFUSED = stream_files.load_all_streams(config.load_settings(folder=FOLDER).streams)
for _file in _files:
    _name = _file.stream.name
    try:
        globals()[f"dag_{_name}"] = stream_dag(_file)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this file's, and the others appear
        _why = f"{_name}.toml: no DAG can be made of it: {type(error).__name__}: {error}"
        REFUSED.append(ConfigError(_why, next=f"fix {_name}.toml, or what lies beside it"))
