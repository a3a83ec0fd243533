"""A DAG for each stream file, as Airflow's own parser sees them."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from seriatim.alerts.incidents import TASKS_AFTER_FOLD
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
        "schedule": [type(dag.timetable).__name__, getattr(dag.timetable, "expression", None),
                     str(getattr(dag.timetable, "timezone", None))],
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
    schedule = 'schedule = {cron = "0 6 * * *", timezone = "Europe/Berlin"}'
    write_stream(folder / "streams", "orders", schedule)
    write_stream(folder / "streams", "by-hand", 'schedule = {cron = ""}\ntier = "order"')
    return dict(ask(folder, SHOWN))


def test_a_stream_is_a_dag(dags: dict[str, Any]) -> None:
    """Named after it, tagged, told, with an explicit timetable and no catching up."""
    orders = dags["orders"]
    assert orders["tags"] == ["seriatim", "tier strict"]
    assert orders["doc"].startswith("Orders of the exchange.\nAs they come.")
    assert 'path = "lake/orders"' in orders["doc"]
    assert orders["schedule"] == ["CronTriggerTimetable", "0 6 * * *", "Europe/Berlin"]
    assert (orders["catchup"], orders["runs"], orders["callbacks"]) == (False, 1, [True, True])
    assert dags["by-hand"]["schedule"][0] == "NullTimetable"
    assert dags["by-hand"]["tags"] == ["seriatim", "tier order"]


def test_its_tasks_follow_each_other(dags: dict[str, Any]) -> None:
    """Plan → fold → check → publish; these two whatever became of the fold, but not without a plan;
    `done` if all did; one fold at a time; retries.
    """
    tasks = dags["orders"]["tasks"]
    assert {task: told[4] for task, told in tasks.items()} == {
        "plan": [],
        "fold": ["plan"],
        "check": ["fold", "plan"],
        "publish": ["check", "plan"],
        "done": ["check", "fold", "publish"],
    }
    # A mail says of a run that failed in one of these that it has folded.
    assert [task for task in tasks if task in TASKS_AFTER_FOLD] == ["check", "publish"]
    assert {task: told[0] for task, told in tasks.items()} == {
        "plan": "all_success",
        "fold": "all_success",
        "check": "all_done_min_one_success",
        "publish": "all_done_min_one_success",
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
from airflow.timetables.trigger import CronTriggerTimetable
limits = TimeRestriction(earliest=datetime(2026, 1, 1), latest=None, catchup=True)
runs = 0
for cron in {crons!r}:
    timetable = CronTriggerTimetable(cron, timezone="UTC")
    timetable.validate()
    runs += timetable.next_dagrun_info(last_automated_data_interval=None, restriction=limits) is not None
print(json.dumps(runs))
"""
    assert ask(tmp_path, code) == len(crons)


SCHEDULED_RUNS = """
import datetime
import airflow.timetables.trigger
from airflow.serialization.encoders import coerce_to_core_timetable
from airflow.timetables.base import TimeRestriction
from pendulum import DateTime, instance
from zoneinfo import ZoneInfo
from seriatim.airflow.command import START_DATE, schedule_arguments

def scheduled_runs(cron, zone, first_day, down_from, down_until):
    # The runs of three days, as Airflow's scheduler creates them: it asks for the next run after each
    # run, and whenever a DAG file is parsed. While it is down, nobody asks.
    core_timetable = coerce_to_core_timetable(schedule_arguments(cron, zone)["schedule"])
    earliest = instance(START_DATE, tz="UTC")
    restriction = TimeRestriction(earliest=earliest, latest=None, catchup=False)
    now = instance(datetime.datetime.fromisoformat(first_day).replace(tzinfo=ZoneInfo(zone)))
    now = now.in_timezone("UTC")
    end = now.add(days=3)
    airflow.timetables.trigger.utcnow = lambda: now
    last_interval = None
    runs = []
    while now < end:
        if not down_from <= now.isoformat() < down_until:
            run = core_timetable.next_dagrun_info(
                last_automated_data_interval=last_interval, restriction=restriction
            )
            if run.run_after <= now:
                last_interval = run.data_interval
                runs.append(run.run_after.in_timezone(zone).isoformat(timespec="minutes"))
                continue
        now = now.add(minutes=15)
    return runs[1:]  # the first is the one before the first day

print(json.dumps([scheduled_runs(*case) for case in CASES]))
"""
MINUTES = ("00", "15", "30", "45")
CLOCK_CHANGES: list[tuple[tuple[str, str, str, str, str], list[str]]] = [
    # Cron, zone, first of three days, when the scheduler was down; the runs.
    (
        # The skipped hour: the run comes as much later as the clock skips.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28", "", ""),
        ["2026-03-28T02:30+01:00", "2026-03-29T03:30+02:00", "2026-03-30T02:30+02:00"],
    ),
    (
        # The same if Airflow was down at that time.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28", "2026-03-29T01:00", "2026-03-29T05:00"),
        ["2026-03-28T02:30+01:00", "2026-03-29T03:30+02:00", "2026-03-30T02:30+02:00"],
    ),
    (
        # The doubled hour: the run comes in the second one.
        ("30 2 * * *", "Europe/Berlin", "2026-10-24", "", ""),
        ["2026-10-24T02:30+02:00", "2026-10-25T02:30+01:00", "2026-10-26T02:30+01:00"],
    ),
    (
        ("0 3 * * *", "Europe/Berlin", "2026-03-28", "", ""),
        ["2026-03-28T03:00+01:00", "2026-03-29T03:00+02:00", "2026-03-30T03:00+02:00"],
    ),
    (
        ("0 3 * * *", "Europe/Berlin", "2026-10-24", "", ""),
        ["2026-10-24T03:00+02:00", "2026-10-25T03:00+01:00", "2026-10-26T03:00+01:00"],
    ),
    (
        ("30 1,2 * * *", "America/New_York", "2026-11-01", "", ""),
        [
            "2026-11-01T01:30-05:00",
            "2026-11-01T02:30-05:00",
            "2026-11-02T01:30-05:00",
            "2026-11-02T02:30-05:00",
            "2026-11-03T01:30-05:00",
            "2026-11-03T02:30-05:00",
        ],
    ),
    (
        # Of several times in the skipped hour one is left.
        ("*/15 2 * * *", "Europe/Berlin", "2026-03-29", "", "2026-03-29T00:30"),
        [
            "2026-03-29T03:45+02:00",
            *(f"2026-03-{day}T02:{minute}+02:00" for day in (30, 31) for minute in MINUTES),
        ],
    ),
    (
        # A zone that changes by half an hour.
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03", "", ""),
        ["2026-10-03T02:15+10:30", "2026-10-04T02:45+11:00", "2026-10-05T02:15+11:00"],
    ),
]
EVERY_HOUR = [
    (cron, zone, day, "", "")
    for cron in ("*/15 * * * *", "30 * * * *")
    for zone, day in (
        ("Europe/Berlin", "2026-03-28"),
        ("Europe/Berlin", "2026-10-24"),
        ("America/New_York", "2026-03-07"),
    )
]


def test_no_run_is_lost_or_doubled_on_the_days_of_clock_change(tmp_path: Path) -> None:
    """A time of day gives one run on each day. A schedule of every hour goes on in even steps."""
    write_stream(tmp_path / "streams", "orders")
    cases = [case for case, _ in CLOCK_CHANGES] + EVERY_HOUR
    answers = ask(tmp_path, f"CASES = {cases!r}\n{SCHEDULED_RUNS}")
    expected = [runs for _, runs in CLOCK_CHANGES]
    assert answers[: len(expected)] == expected
    for (cron, *_), runs in zip(EVERY_HOUR, answers[len(expected) :], strict=True):
        times = [datetime.fromisoformat(run) for run in runs]
        steps = {later - earlier for earlier, later in pairwise(times)}
        step = timedelta(minutes=15) if cron.startswith("*/15") else timedelta(hours=1)
        assert steps == {step}
        assert len(runs) >= timedelta(days=3) / step - 1


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
