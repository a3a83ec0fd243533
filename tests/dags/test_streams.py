"""A DAG for each stream file, as Airflow's own parser sees them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dags.bag import ROOT, ask, write_stream
from tests.operations.test_run_request import HOSTILE
from tests.test_stream import RIGHT_SCHEDULES

HEAVY = (
    "pyspark",
    "kafka",
    "confluent_kafka",
    "pyarrow",
    "great_expectations",
    "deltalake",
    "pandas",
)
DAG_FILES = sorted((ROOT / "dags").glob("*.py"))
SHOWN = """
def shown(dag):
    return {
        "tags": sorted(dag.tags), "doc": dag.doc_md, "catchup": dag.catchup, "runs": dag.max_active_runs,
        "schedule": [type(dag.timetable).__name__, getattr(dag.timetable, "expression", None)],
        "params": {name: dag.params.get_param(name).value for name in dag.params},
        "callbacks": [bool(dag.on_failure_callback), bool(dag.on_success_callback)],
        "tasks": {
            task.task_id: [task.trigger_rule.value, task.max_active_tis_per_dag, task.retries, task.owner,
                           sorted(task.upstream_task_ids), bool(task.retry_policy), bool(task.on_failure_callback)]
            for task in dag.tasks
        },
    }
print(json.dumps({name: shown(dag) for name, dag in bag.dags.items()}))
"""


@pytest.fixture(scope="module")
def dags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two streams and what Airflow makes of them."""
    folder = tmp_path_factory.mktemp("dags")
    write_stream(folder / "streams", "orders", 'schedule = {cron = "0 6 * * *"}')
    write_stream(folder / "streams", "by-hand", 'schedule = {cron = ""}\ntier = "order"')
    return dict(ask(folder, SHOWN))


def test_a_stream_is_a_dag(dags: dict[str, Any]) -> None:
    """Named after it, tagged, told, with an explicit timetable and no catching up."""
    orders = dags["orders"]
    assert orders["tags"] == ["seriatim", "tier strict"]
    assert orders["doc"].startswith("Orders of the exchange.\nAs they come.")
    assert 'path = "lake/orders"' in orders["doc"]
    assert orders["schedule"] == ["CronDataIntervalTimetable", "0 6 * * *"]
    assert (orders["catchup"], orders["runs"], orders["callbacks"]) == (False, 1, [True, True])
    assert dags["by-hand"]["schedule"][0] == "NullTimetable"
    assert dags["by-hand"]["tags"] == ["seriatim", "tier order"]


def test_its_tasks_follow_each_other(dags: dict[str, Any]) -> None:
    """Plan → fold → check → publish; these two whatever happened; `done` if all did; one fold at a
    time; retries.
    """
    tasks = dags["orders"]["tasks"]
    assert {task: told[4] for task, told in tasks.items()} == {
        "plan": [],
        "fold": ["plan"],
        "check": ["fold"],
        "publish": ["check"],
        "done": ["check", "fold", "publish"],
    }
    assert {task: told[0] for task, told in tasks.items()} == {
        "plan": "all_success",
        "fold": "all_success",
        "check": "all_done",
        "publish": "all_done",
        "done": "all_success",
    }
    assert tasks["fold"][1] == 1
    assert {told[3] for told in tasks.values()} == {"seriatim"}
    tasks.pop("done")
    assert all(told[2] == 2 and told[5] and not told[6] for told in tasks.values())


def test_the_form_left_as_it_is_is_a_plain_run(dags: dict[str, Any]) -> None:
    """Every field has a default that its own schema takes."""
    form = dags["orders"]["params"]
    assert list(form) == [
        "action",
        "dry_run",
        "topics",
        "partitions",
        "from",
        "until",
        "messages_max",
        "trace",
    ]
    assert (form["action"], form["dry_run"], form["topics"], form["from"]) == (
        "run",
        False,
        [],
        None,
    )


def test_a_hundred_streams_are_parsed_without_anything_heavy(tmp_path: Path) -> None:
    """No heavy module is imported, and each stream file is opened as often as one alone would be:
    once per DAG file.
    """
    for number in range(100):
        write_stream(tmp_path / "streams", f"s{number}")
    loaded = f"[name for name in {HEAVY!r} if name in sys.modules]"
    toml_files = "[path for path in opened if path.endswith('.toml')]"
    code = f"print(json.dumps([len(bag.dags), bag.import_errors, {loaded}, {toml_files}]))"
    count, errors, heavy, opened_files = ask(tmp_path, code)
    assert (count >= 100, errors, heavy) == (True, {}, [])
    opened_times = Counter(Path(path).stem for path in opened_files)
    assert {f"s{number}" for number in range(100)} <= opened_times.keys()
    assert max(opened_times.values()) <= len(DAG_FILES)


def test_airflow_takes_the_schedules_that_a_stream_file_may_have(tmp_path: Path) -> None:
    """Each of them has a next run."""
    write_stream(tmp_path / "streams", "orders")
    crons = [cron for cron in RIGHT_SCHEDULES if cron]
    code = f"""
from pendulum import datetime
from airflow.timetables.base import TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable
limits = TimeRestriction(earliest=datetime(2026, 1, 1), latest=None, catchup=True)
runs = 0
for cron in {crons!r}:
    timetable = CronDataIntervalTimetable(cron, timezone="UTC")
    timetable.validate()
    runs += timetable.next_dagrun_info(last_automated_data_interval=None, restriction=limits) is not None
print(json.dumps(runs))
"""
    assert ask(tmp_path, code) == len(crons)


def test_a_broken_file_is_an_import_error_and_no_other_stream_stands_still(tmp_path: Path) -> None:
    """Airflow stops all DAGs of a file with an error: so that file has none of ours. It names file
    and key.
    """
    write_stream(tmp_path / "streams", "good")
    write_stream(tmp_path / "streams", "bad", 'tier = "stric"')
    (tmp_path / "streams" / "worse.toml").write_text("topics = [")
    dags, errors = ask(tmp_path, "print(json.dumps([sorted(bag.dags), bag.import_errors]))")
    assert "good" in dags
    assert "bad" not in dags
    ((file, text),) = errors.items()
    assert file.endswith("broken_streams.py")
    assert "bad.toml: tier: found 'stric'; did you mean 'strict'?" in text
    assert "worse.toml: not TOML" in text


UNFORESEEN = """
from seriatim import stream_files
describe_stream = stream_files.describe_stream
def describe_or_fail(file):
    if file.stream.name == "odd":
        raise MemoryError("nobody foresaw this")
    return describe_stream(file)
stream_files.describe_stream = describe_or_fail
"""


def test_whatever_a_file_does_is_told_and_the_others_appear(tmp_path: Path) -> None:
    """Also what no reader of files foresaw, met when its DAG is made; a file's name may be no text
    at all.
    """
    for name in ("good", "odd"):
        write_stream(tmp_path / "streams", name)
    (tmp_path / "streams" / "\udcff.toml").write_text("")
    (tmp_path / "sitecustomize.py").write_text(UNFORESEEN)
    code = "print(json.dumps([sorted(bag.dags), bag.import_errors]))"
    dags, errors = ask(tmp_path, code, PYTHONPATH=str(tmp_path))
    assert {"good", "seriatim_watch"} <= set(dags)
    assert "odd" not in dags
    ((file, text),) = errors.items()
    assert file.endswith("broken_streams.py")
    assert "odd.toml: no DAG can be made of it: MemoryError: nobody foresaw this" in text
    assert "cannot name a stream" in text
    text.encode()


def test_hostile_values_are_refused_by_the_form_or_by_plan(tmp_path: Path) -> None:
    """All of them; most already when they are typed."""
    write_stream(tmp_path / "streams", "orders")
    code = f"""
from airflow.sdk.exceptions import ParamValidationError
from seriatim.operations.run_request import parse_run_request
from seriatim.errors import ConfigError
form, hostile, typed, planned = bag.dags["orders"].params, json.loads({json.dumps(json.dumps(HOSTILE))}), 0, 0
for given in hostile:
    try:
        for name, value in given.items():
            if name in form:
                form.get_param(name).resolve(value)
    except ParamValidationError:
        typed += 1
    try:
        parse_run_request(given)
    except ConfigError:
        planned += 1
print(json.dumps([typed, planned, len(hostile)]))
"""
    typed, planned, all_of_them = ask(tmp_path, code)
    assert planned == all_of_them
    assert typed >= 35
