"""The tasks themselves, executed in a process of their own: words, errors, notes, kills,
connections.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dags.bag import ask, write_stream

BEGIN = """
import os, threading
from pathlib import Path
from types import SimpleNamespace as Made
from seriatim import config
from seriatim.airflow import environment
from seriatim.airflow.command import CommandOperator
from seriatim.airflow.fold import FoldOperator, LoggedSparkSubmitHook, find_spark_connection
from seriatim.airflow.operators import PlanOperator
from seriatim.errors import SeriatimError
said, answers = [], {}
class Keep:
    def info(self, text, *words): said.append(text % words if words else text)
    def warning(self, *_): pass  # Airflow's word that a test calls it
def context(**params):
    form = {name: bag.dags["orders"].params.get_param(name).value for name in bag.dags["orders"].params}
    run = Made(run_type="manual", run_id="r1")
    task = Made(try_number=2, log_url="log")
    given = {"params": {**form, **params}, "dag_run": run, "ti": task}
    return {"dag": bag.dags["orders"], "run_id": "r1", **given}
CommandOperator.log = LoggedSparkSubmitHook.log = Keep()
def tried(task, given):
    try:
        return task.execute(given)
    except SeriatimError as error:
        return [error.title, error.message]
def notes():
    outbox = environment.open_outbox(FOLDER, "orders")
    left = outbox.notes()
    outbox.delete_notes(list(left))
    return [[note.kind, note.task, note.exit_code, note.text, note.is_form_error, note.error] for note in left.values()]
"""


CODE = """
one = CommandOperator(task_id="version", arguments=["--version"], folder=FOLDER)
answers['a_command_says_what_it_says'] = [one.run_command(context()), said]
one = CommandOperator(task_id="plan", arguments=["plan", "none-such"], folder=FOLDER, stream="orders")
answers['a_command_that_fails_is_a_typed_error_and_leaves_a_note'] = [tried(one, context()), notes()]
one = CommandOperator(task_id="watch", arguments=["watch", "--no-mail", "--every", "1000"], folder=FOLDER)
answer = []
thread = threading.Thread(target=lambda: answer.append(tried(one, context())))
thread.start()
while one._process is None:
    time.sleep(0.05)
import psutil
watch_processes = [psutil.Process(one._process.pid), *psutil.Process(one._process.pid).children(recursive=True)]
one.on_kill()
thread.join(600)
psutil.wait_procs(watch_processes, 600)
still_running = [process.pid for process in watch_processes if process.is_running()]
answers['a_kill_ends_the_command_and_what_it_started'] = [answer[0], still_running]
one = PlanOperator(task_id="plan", stream="orders", folder=FOLDER)
given = context(**{"action": "backfill", "partitions": ["a/0"], "from": "5", "until": "4"})
answers['plan_refuses_what_a_schema_cannot'] = [tried(one, given), notes()]
by_schedule = {**given, "dag_run": Made(run_type="scheduled", run_id="r1")}
from seriatim.airflow.repair import RepairPlanOperator
other = {**context(), "params": {"stream": "orders", "partition": "no"}}
bad_file = PlanOperator(task_id="plan", stream="orders", folder=FOLDER)
bad_file.build_arguments = lambda _: ["plan", "none-such"]
repair_plan = RepairPlanOperator(task_id="plan", folder=FOLDER)
asked = [(one, given), (bad_file, context()), (one, by_schedule), (repair_plan, other)]
answers['a_slip_in_a_form_is_marked_as_one'] = [[tried(*each), notes()[0][4]] for each in asked]
def running(code):
    import subprocess
    one, opened = CommandOperator(task_id="t", arguments=["x"], folder=FOLDER), subprocess.Popen
    subprocess.Popen = lambda words, **how: opened([sys.executable, "-c", code], **how)
    try:
        return [tried(one, context()), said[-1]]
    finally:
        subprocess.Popen = opened
bytes_of = "import sys; sys.stdout.buffer.write(b'\\\\xff out'); sys.stderr.buffer.write(b'\\\\xfe err')"
answers['bytes_that_are_no_text_break_no_task'] = running(bytes_of)
from airflow.sdk import Connection
local_spark = Connection(conn_id="seriatim_spark", conn_type="spark", host="local[2]")
hook = LoggedSparkSubmitHook(folder=FOLDER, connection=local_spark)
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
plain_hook = SparkSubmitHook(conn_id="seriatim_spark")
plain_operator = SparkSubmitOperator(task_id="plain", application="x")
answers['the_names_that_airflow_does_not_promise_are_there'] = [
    "_submit_sp" in vars(plain_hook),
    "_spark_exit_code" in vars(plain_hook),
    list(__import__("inspect").signature(SparkSubmitHook._process_spark_submit_log).parameters),
    "_hook" in vars(plain_operator),
]
hook._build_spark_submit_command = lambda _: [sys.executable, "-c", bytes_of]
before = len(said)
hook.submit("x")
answers['bytes_that_are_no_text_break_no_task'].append(said[before:])
found = []
for text in ('{"conn_type": "smtp", "login": "us"}', '{"conn_type": "smtp", "host": "mail.example.org"}'):
    os.environ["AIRFLOW_CONN_SMTP_DEFAULT"] = text
    found.append(environment._mail_server_environment().get("SERIATIM_SMTP"))
del os.environ["AIRFLOW_CONN_SMTP_DEFAULT"]
answers['a_mail_connection_without_a_host_is_none'] = found
one = FoldOperator(task_id="fold", stream="orders", folder=FOLDER)
asked = [{}, {"messages_max": 5}, {"action": "backfill", "topics": ["a"]}, {"dry_run": True}]
asked += [{"action": "replay", "topics": ["a"]}]
answers['fold_takes_its_words_from_the_form'] = [one.build_arguments(context(**given)) for given in asked]
from airflow.sdk.api.datamodels._generated import DagRunType
FoldOperator.log, kinds = Keep(), []
for kind in (DagRunType.BACKFILL, DagRunType.MANUAL):
    before = len(said)
    one.execute({**context(dry_run=True), "dag_run": Made(run_type=kind)})
    kinds.append(" ".join(said[before:]))
answers['a_backfill_of_airflow_says_what_it_is_for'] = kinds
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException
def nothing(conn_id): raise AirflowNotFoundException(conn_id)
os.environ["AIRFLOW_CONN_SERIATIM_SPARK"] = '{"conn_type": "spark", "host": "spark://there:7077"}'
def master():
    connection = find_spark_connection("seriatim_spark", default_master="local[2]")
    return LoggedSparkSubmitHook(folder=FOLDER, connection=connection)._connection["master"]
found = [master()]
kept, BaseHook.get_connection = BaseHook.get_connection, nothing
found.append(master())
try:
    find_spark_connection("elsewhere", default_master="")
except SeriatimError as error:
    found.append(error.message)
BaseHook.get_connection = kept
answers['an_unknown_connection_is_refused_and_ours_may_be_missing'] = found
from seriatim.embedded import jars
jars.ensure_jars = lambda *_: []
for name in ("SERIATIM_SMTP_PASSWORD", "SERIATIM_KAFKA_CONFIG", "KAFKA_SASL_PASSWORD"):
    os.environ[name] = f"canary-{name}"
os.environ["AIRFLOW_CONN_SERIATIM_SPARK"] = '{"conn_type": "spark", "host": "local[1]", "password": "canary-conn"}'
one = FoldOperator(task_id="fold", stream="orders", folder=FOLDER)
hook = one._create_submit_hook(config.load_settings(folder=Path(FOLDER)), one.build_arguments(context()))
answers['no_setting_of_ours_is_in_the_arguments_of_spark_submit'] = hook._build_spark_submit_command(one.application)
from seriatim import class_archive
settings = config.load_settings(folder=Path(FOLDER))
archive = class_archive.archive_path(settings)
def begin(host, extra=""):
    # Whether the archive is used, and the Python that Spark starts.
    os.environ["AIRFLOW_CONN_SERIATIM_SPARK"] = json.dumps({"conn_type": "spark", "host": host, "extra": extra})
    hook = one._create_submit_hook(settings, ["run", "orders"])
    has_archive = str(archive) in hook._conf["spark.driver.extraJavaOptions"]
    python = []
    if not hook.is_cluster_mode:
        code = "import os; print(os.environ.get('PYSPARK_PYTHON', ''))"
        hook._build_spark_submit_command = lambda _: [sys.executable, "-c", code]
        before = len(said)
        hook.submit("x")
        python = [line for line in said[before:] if "python" in line]
    return [has_archive, python]
if archive is not None:
    archive.parent.mkdir(parents=True)
    archive.touch()
    cluster_mode = '{"deploy-mode": "cluster"}'
    # What a local Spark has left in the environment is not for a Spark on other hosts.
    os.environ.update(config.worker_python_variables(is_local=True))
    answers['spark_submit_starts_as_quickly_as_the_command_line'] = [
        begin("local[1]"), begin("spark://there:7077"), begin("spark://there:7077", cluster_mode)
    ]
    archive.unlink()
from seriatim.airflow.failure_callback import FailureCallback
from seriatim.alerts.incidents import Note
environment.open_outbox(FOLDER, "b").add_note(Note(kind="task", at_seconds=1.0, run="r1", task="b"))
asked = [
    (["one"], {"run_id": "r1"}),
    (["a", "b", "c"], {"run_id": "r1"}),
    (["a", "b", "c"], {"run_id": "r2", "ti": Made(task_id="c")}),
    ([], {"run_id": "r1", "params": {"stream": "d"}}),
    ([], {"run_id": "r1"}),
    ([], {"run_id": "r9"}),
    (["a", "b", "c"], {"run_id": "r9"}),
]
other = Path(FOLDER, "streams", "b.toml")
other.write_text("")
whom = [FailureCallback(names, FOLDER)._affected_streams(given) for names, given in asked]
answers['a_run_concerns_the_stream_whose_task_failed'] = whom
other.unlink()
from seriatim.alerts.outbox import StoreOutbox
def unreadable(*_): raise PermissionError("not ours")
kept, StoreOutbox.notes = StoreOutbox.notes, unreadable
whom = FailureCallback(["a", "b"], FOLDER)._affected_streams({"run_id": "r1"})
answers['notes_that_cannot_be_read_keep_nobody_from_being_told'] = whom
StoreOutbox.notes = kept
from airflow.sdk.exceptions import AirflowSkipException
from seriatim.airflow.repair import RepairPlanOperator
part = {"partition": "a/0", "does": "folds again [0, 5)", "facts": {"why": "lost"}}
part["facts"]["begins"] = "from the state of entry 3, at offset 0"
def planned(parts, notes, well=()):
    one = RepairPlanOperator(task_id="plan", folder=FOLDER, stream="orders")
    made = {"stream": "orders", "sequence": 7, "approval": "t"}
    made |= {"parts": parts, "notes": notes, "drops": [], "resumes": None, "holds": []}
    made["well"] = well
    one.run_command = lambda context: json.dumps(made)
    try:
        return [tried(one, context()), notes_left()]
    except AirflowSkipException as skipped:
        return str(skipped)
notes_left = notes
answers['a_plan_of_a_repair_is_shown_with_what_it_leaves'] = [
    planned([part], ["b/1 needs its topic back", "orders-of-the-whole-of-europe-and-of-the-west/1 waits"]),
    planned([], ["b/1 needs its topic back"]), planned([], []),
    planned([], [], [{"says": "session s in a/0 is already well since offset 4, by its snapshot"}]),
]
from seriatim.airflow.repair import ApproveOperator
class Plan:
    def xcom_pull(self, task_ids): return {"approval": "", "text": "orders: session s is already well"}
approve = ApproveOperator(task_id="approve", plan_task_id="plan", subject="?", body="")
try:
    approve.execute({"ti": Plan()})
except AirflowSkipException as skip:
    answers['nobody_approves_what_is_well'] = str(skip)
one = RepairPlanOperator(task_id="plan", folder=FOLDER)
answers['a_plan_that_leaves_something_is_still_a_plan'] = [
    one.is_success(*given) for given in [(0, "{}"), (3, "{}"), (3, ""), (4, "{}")]
]
from seriatim.airflow.operators import CheckOperator, PublishOperator
def skipped(kind, **form):
    try:
        return kind(task_id="t", stream="orders", folder=FOLDER).execute(context(**form))
    except AirflowSkipException as word:
        return str(word)
asked = [{"dry_run": True}, {"action": "replay", "topics": ["a"]}, {}]
answers['a_rehearsal_judges_and_publishes_nothing'] = [
    [skipped(kind, **form) for form in asked] for kind in (CheckOperator, PublishOperator)
]
told = []
class Told(FailureCallback):
    def _run_watch(self, stream): told.append(stream)
environment.open_outbox(FOLDER, "orders").add_note(Note(kind="failed", at_seconds=1.0, run="r0"))
for form in asked:
    Told(["orders"], FOLDER, run_succeeded=True)(context(**form))
answers['a_rehearsal_ends_no_incident'] = [note[0] for note in notes()]
def full(*_): raise SeriatimError("no room")
kept, StoreOutbox.add_note, told = StoreOutbox.add_note, full, []
Told(["orders"], FOLDER)(context())
one = CommandOperator(task_id="plan", arguments=["plan", "none-such"], folder=FOLDER, stream="orders")
answers['a_note_that_cannot_be_left_is_told_all_the_same'] = [told, tried(one, context())[0]]
StoreOutbox.add_note = kept
one = FoldOperator(task_id="fold", stream="orders", folder=FOLDER)
def nowhere(*_): raise PlatformError("no JARs can be had", next="make setup")
from seriatim.errors import PlatformError
jars.ensure_jars = nowhere
answers['fold_leaves_a_note_where_nothing_could_be_submitted'] = [tried(one, context()), notes()]
from seriatim.alerts.incidents import REPAIR, Concern, AlertState, Incident
incident = Incident(concern=Concern(kind=REPAIR, text="x", next=""), since_seconds=1.0)
environment.open_outbox(FOLDER, "orders").put_alert_state(AlertState(open_incidents={REPAIR: incident}), 0)
kept, found = context, []
for form in ({}, {"partition": "a/0"}):
    context = lambda form=form, kept=kept: {**kept(), "params": {"stream": "orders", **form}}
    _, left = planned([], [])
    found.append([note[0] for note in left])
context = kept
environment.open_outbox(FOLDER, "orders").put_alert_state(AlertState(), 1)
answers['a_plan_of_the_whole_stream_that_finds_nothing_hurt_ends_a_failed_repair'] = found
from seriatim.airflow.operators import WatchOperator
class States:
    # Airflow's answers about runs: r1 is marked failed, r2 runs, and of r3 nothing can be learned.
    asked = []
    def get_dr_count(self, *, dag_id, run_ids, states):
        self.asked.append([dag_id, run_ids, states])
        if run_ids == ["r3"]:
            raise RuntimeError("the API server is away")
        return int(run_ids == ["r1"])
watched = []
class SilentWatch(WatchOperator):
    def run_command(self, context): watched.append(notes())
WatchOperator.log = Keep()
from msgspec.structs import replace
for number, run in enumerate(("r3", "r1", "r2")):
    note = environment.task_note({**context(), "run_id": run}, "fold", PlatformError("no broker"))
    note = replace(note, at_seconds=1000.0 + number)  # of one millisecond, the order would be any
    environment.open_outbox(FOLDER, "orders").add_note(note)
SilentWatch(task_id="watch", arguments=["watch", "--once"], folder=FOLDER).execute({**context(), "ti": States()})
answers['watch_notes_the_end_of_a_run_that_was_marked_failed'] = [States.asked, watched]
from seriatim.engine.failure import CommandOutcome, Failure
from seriatim.engine.findings import Finding, new_findings_error
jars.ensure_jars = lambda *_: []
error = new_findings_error("orders", [Finding(finding="gap", topic="a", partition=0, offset=3)])
content = __import__("msgspec").json.encode(CommandOutcome(exit_code=3, failure=Failure.of(error))).decode()
leaves = f"import os, sys; open(os.environ['SERIATIM_OUTCOME'], 'w').write({content!r}); sys.exit(3)"
dies = "import os; os.kill(os.getpid(), 9)"
def submitted(code, **form):
    build = SparkSubmitHook._build_spark_submit_command
    def other(self, application):
        build(self, application)
        return [sys.executable, "-c", code]
    SparkSubmitHook._build_spark_submit_command = other
    try:
        return [tried(FoldOperator(task_id="fold", stream="orders", folder=FOLDER), context(**form)), notes()]
    finally:
        SparkSubmitHook._build_spark_submit_command = build
answers['a_driver_tells_how_it_ended_through_spark_submit'] = [submitted(code) for code in (leaves, dies)]
from seriatim.errors import ConfigError, MissingTopicsError
def leaving(error):
    outcome = CommandOutcome(exit_code=error.exit_code, failure=Failure.of(error))
    content = __import__("msgspec").json.encode(outcome).decode()
    write = f"open(os.environ['SERIATIM_OUTCOME'], 'w').write({content!r})"
    return f"import os, sys; {write}; sys.exit({error.exit_code})"
refused = leaving(ConfigError("orders: it has no partition a/9"))
asked = [{"action": "backfill", "partitions": ["a/9"]}, {"action": "replay", "topics": ["a"]}, {"messages_max": 5}, {}]
answers['what_fold_refuses_of_a_form_is_a_slip'] = [submitted(refused, **form)[1][0][4] for form in asked]
answers['what_fold_refuses_of_a_form_is_a_slip'].append(submitted(dies, **asked[0])[1][0][4])
def planned(error):
    import subprocess
    one, opened = PlanOperator(task_id="plan", stream="orders", folder=FOLDER), subprocess.Popen
    subprocess.Popen = lambda words, **how: opened([sys.executable, "-c", leaving(error)], **how)
    try:
        return [tried(one, context()), len(notes())]
    except AirflowSkipException as skipped:
        return [["skipped", str(skipped)], len(notes())]
    finally:
        subprocess.Popen = opened
kinds = (MissingTopicsError, ConfigError)
answers['a_stream_waits_for_its_topics'] = [planned(kind("orders: waiting for topics: none yet")) for kind in kinds]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of it in one process: Airflow takes long to be imported."""
    folder = tmp_path_factory.mktemp("tasks")
    write_stream(folder / "streams", "orders")
    return dict(
        ask(folder, f"FOLDER = {str(folder)!r}\n{BEGIN}\n{CODE}", SERIATIM_SMTP="127.0.0.1:1")
    )


def test_a_command_says_what_it_says(answers: dict[str, Any]) -> None:
    """Its output is what it printed; its words are in the log."""
    printed, lines = answers["a_command_says_what_it_says"]
    assert printed.startswith("seriatim ")
    assert lines[0] == "seriatim --version"


def test_a_command_that_fails_is_a_typed_error_and_leaves_a_note(answers: dict[str, Any]) -> None:
    """The screen it ended with, for the mail."""
    error, left = answers["a_command_that_fails_is_a_typed_error_and_leaves_a_note"]
    assert error[0] == "ConfigError"
    ((kind, name, code, text, _, error_class),) = left
    assert (kind, name, code, error_class) == ("task", "plan", 2, "ConfigError")
    assert text.startswith("ConfigError: no stream 'none-such'")


def test_a_kill_ends_the_command_and_what_it_started(answers: dict[str, Any]) -> None:
    """A watch never ends by itself; after the kill it and its children are gone, and the task ends
    in a typed error.
    """
    error, still_running = answers["a_kill_ends_the_command_and_what_it_started"]
    assert error[0] == "PlatformError"
    assert still_running == []


def test_plan_refuses_what_a_schema_cannot(answers: dict[str, Any]) -> None:
    """A range that goes backward; with a note, so that the mail says why."""
    error, left = answers["plan_refuses_what_a_schema_cannot"]
    assert error == ["ConfigError", "until: 4 is not after from (5)"]
    assert left[0][:3] == ["task", "plan", 2]


def test_a_slip_in_a_form_is_marked_as_one(answers: dict[str, Any]) -> None:
    """Of a run by hand whose form asks for something; a plain run's trouble, or a schedule's, is
    everybody's.
    """
    (by_form, slip), (by_file, plain), (_, by_schedule), (by_repair, repair) = answers[
        "a_slip_in_a_form_is_marked_as_one"
    ]
    assert [slip, plain, by_schedule, repair] == [True, False, False, True]
    assert [by_form[0], by_file[0], by_repair[0]] == ["ConfigError", "ConfigError", "ConfigError"]


def test_what_fold_refuses_of_a_form_is_a_slip(answers: dict[str, Any]) -> None:
    """A backfill and a replay are only asked for by a form. What is wrong with a plain run is wrong
    with every run, and a driver that dies is no slip of anybody.
    """
    slips = answers["what_fold_refuses_of_a_form_is_a_slip"]
    assert slips == [True, True, False, False, False]


def test_a_stream_waits_for_its_topics(answers: dict[str, Any]) -> None:
    """Plan is skipped with that word, and with it the run; no note is left. Any other mistake fails."""
    waiting, mistaken = answers["a_stream_waits_for_its_topics"]
    assert waiting == [["skipped", "orders: waiting for topics: none yet"], 0]
    assert (mistaken[0][0], mistaken[1]) == ("ConfigError", 1)


def test_bytes_that_are_no_text_break_no_task(answers: dict[str, Any]) -> None:
    """A library may say anything: what it says is shown as far as it can be."""
    error, last, submitted = answers["bytes_that_are_no_text_break_no_task"]
    assert (error, last) == (None, "\ufffd out")
    assert "\ufffd out" in "".join(submitted)


def test_a_mail_connection_without_a_host_is_none(answers: dict[str, Any]) -> None:
    """Not a server called None."""
    assert answers["a_mail_connection_without_a_host_is_none"] == [None, "mail.example.org:465"]


def test_fold_takes_its_words_from_the_form(answers: dict[str, Any]) -> None:
    """A plain run, a bounded one, a backfill; a dry run folds nothing."""
    *words, replay = answers["fold_takes_its_words_from_the_form"]
    assert replay[:5] == ["replay", "orders", "--topic", "a", "--to"]
    assert replay[5].endswith("/home/scratch/orders/r1-2")
    assert words == [
        ["run", "orders"],
        ["run", "orders", "--messages-max", "5"],
        ["backfill", "orders", "--topic", "a"],
        [],
    ]


def test_an_unknown_connection_is_refused_and_ours_may_be_missing(answers: dict[str, Any]) -> None:
    """Airflow would take YARN for it."""
    masters = answers["an_unknown_connection_is_refused_and_ours_may_be_missing"]
    assert masters == [
        "spark://there:7077",
        "local[2]",
        "there is no Airflow connection 'elsewhere'",
    ]


def test_the_names_that_airflow_does_not_promise_are_there(answers: dict[str, Any]) -> None:
    """The task fold needs these names of the Spark provider, which may go with any version of it."""
    has_process, has_exit_code, log_parameters, has_hook = answers[
        "the_names_that_airflow_does_not_promise_are_there"
    ]
    assert (has_process, has_exit_code, has_hook) == (True, True, True)
    assert log_parameters == ["self", "itr"]


def test_no_setting_of_ours_is_in_the_arguments_of_spark_submit(answers: dict[str, Any]) -> None:
    """Planted secrets reach the driver by the environment it inherits, and nothing else."""
    command = answers["no_setting_of_ours_is_in_the_arguments_of_spark_submit"]
    assert "canary" not in " ".join(command)
    assert command[-3:][1:] == ["run", "orders"]
    assert "log4j2.properties" in " ".join(command)


def test_spark_submit_starts_as_quickly_as_the_command_line(answers: dict[str, Any]) -> None:
    """A driver on this host takes the archive of Spark's classes. The script that makes Spark's Python
    start sooner is for a Spark that runs on this host alone. In cluster mode the driver is elsewhere.
    """
    if "spark_submit_starts_as_quickly_as_the_command_line" not in answers:
        pytest.skip("this Java has no archive of its own classes")
    local, client, in_cluster = answers["spark_submit_starts_as_quickly_as_the_command_line"]
    assert [local[0], client[0], in_cluster[0]] == [True, True, False]
    (script,) = local[1]
    assert script.endswith("seriatim/embedded/worker_python.sh")
    assert client[1] == []


def test_a_run_concerns_the_stream_whose_task_failed(answers: dict[str, Any]) -> None:
    """Of a DAG over many streams; of one that names none, the stream of its form. Else all:
    somebody must be told.
    """
    *known, by_note, by_nothing, of_many = answers["a_run_concerns_the_stream_whose_task_failed"]
    assert known == [["one"], ["b"], ["c"], ["d"]]
    assert by_note == ["b"]
    assert by_nothing == ["b", "orders"]
    assert of_many == ["a", "b", "c"]


def test_notes_that_cannot_be_read_keep_nobody_from_being_told(answers: dict[str, Any]) -> None:
    """Rather one mail too many."""
    assert answers["notes_that_cannot_be_read_keep_nobody_from_being_told"] == ["a", "b"]


def test_a_plan_of_a_repair_is_shown_with_what_it_leaves(answers: dict[str, Any]) -> None:
    """Nobody approves nothing: where no repair helps the task fails and says what does; nothing
    hurt is no failure.
    """
    name = "a_plan_of_a_repair_is_shown_with_what_it_leaves"
    (plan, _), (error, left), (unneeded, _), (well, notes) = answers[name]
    # Airflow's page shows a block of code without a language as one line.
    assert plan["text"].startswith("```text\n")
    assert plan["approval"] == "t"
    # As `seriatim repair` shows it: every fact of the plan, on a line of its own.
    facts = "\n  why       lost\n  begins    from the state of entry 3, at offset 0\n"
    assert f"a/0  folds again [0, 5){facts}" in plan["text"]
    assert "\nApprove   does this" in plan["text"]
    # A longer line pushes the buttons out of the panel in which Airflow shows it.
    assert max(map(len, plan["text"].splitlines())) <= 64
    assert "\nReject    changes nothing" in plan["text"]
    # Names are copied from here, so no line ends within one.
    assert "orders-of-the-whole-of-europe-and-of-the-west" in plan["text"]
    assert "not repaired by this: b/1 needs its topic back" in plan["text"]
    assert error == ["IntegrityError", "orders: no repair can fix the damage"]
    assert "b/1 needs its topic back" in left[0][3]
    assert unneeded == {
        "approval": "",
        "text": "orders: nothing is damaged, so there is nothing to approve",
    }
    assert well["approval"] == ""
    assert well["text"].startswith("orders: session s in a/0 is already well since offset 4")
    assert notes == []


def test_nobody_approves_what_is_well(answers: dict[str, Any]) -> None:
    """The plan is green; the tasks after it are skipped, and nobody is mailed."""
    assert answers["nobody_approves_what_is_well"] == "orders: session s is already well"


def test_a_plan_that_leaves_something_is_still_a_plan(answers: dict[str, Any]) -> None:
    """Exit 3 with a plan printed is one to approve; without, and any other, is an error."""
    assert answers["a_plan_that_leaves_something_is_still_a_plan"] == [True, True, False, False]


def test_a_backfill_of_airflow_says_what_it_is_for(answers: dict[str, Any]) -> None:
    """By the type of its run as Airflow hands it to a task; other runs say nothing of it."""
    backfill, manual = answers["a_backfill_of_airflow_says_what_it_is_for"]
    assert "trigger this DAG with action = backfill" in backfill
    assert "action = backfill" not in manual


def test_a_rehearsal_judges_and_publishes_nothing(answers: dict[str, Any]) -> None:
    """A dry run and a replay change nothing, as the form says; any other run goes on, and of
    nothing no asset tells.
    """
    for (dry, replay, plain), last in zip(
        answers["a_rehearsal_judges_and_publishes_nothing"],
        (None, "orders: nothing is published"),
        strict=True,
    ):
        assert "changes nothing" in dry
        assert "changes nothing" in replay
        assert plain == last


def test_a_rehearsal_ends_no_incident(answers: dict[str, Any]) -> None:
    """Runs failed, and a dry run went well: that says nothing of runs."""
    assert answers["a_rehearsal_ends_no_incident"] == ["failed", "good"]


def test_a_note_that_cannot_be_left_is_told_all_the_same(answers: dict[str, Any]) -> None:
    """A disk that is full is when a person is needed; and a task's error stays what it is, so it is
    not retried.
    """
    assert answers["a_note_that_cannot_be_left_is_told_all_the_same"] == [["orders"], "ConfigError"]


def test_fold_leaves_a_note_where_nothing_could_be_submitted(answers: dict[str, Any]) -> None:
    """JARs or a connection that are not there: the mail says which."""
    error, left = answers["fold_leaves_a_note_where_nothing_could_be_submitted"]
    assert error == ["PlatformError", "no JARs can be had"]
    ((kind, task, code, text, *_),) = left
    assert (kind, task, code) == ("task", "fold", 4)
    assert "make setup" in text


def test_watch_notes_the_end_of_a_run_that_was_marked_failed(answers: dict[str, Any]) -> None:
    """Airflow calls no callback then: before it looks, watch asks about each run whose task left a
    note.
    """
    asked, (left,) = answers["watch_notes_the_end_of_a_run_that_was_marked_failed"]
    assert asked == [["orders", [run], ["failed"]] for run in ("r3", "r1", "r2")]
    assert [note[0] for note in left] == ["task", "task", "task", "failed"]
    assert (
        left[-1][3]
        == "the run failed, and Airflow called no callback: it was probably marked failed by hand"
    )


def test_a_plan_of_the_whole_stream_that_finds_nothing_hurt_ends_a_failed_repair(
    answers: dict[str, Any],
) -> None:
    """A plan of one partition says nothing of the others."""
    name = "a_plan_of_the_whole_stream_that_finds_nothing_hurt_ends_a_failed_repair"
    assert answers[name] == [["good"], []]


def test_a_driver_tells_how_it_ended_through_spark_submit(answers: dict[str, Any]) -> None:
    """By the outcome that it leaves; one that is killed is told as such, and may be tried again."""
    (failed, left), (killed, of_killed) = answers[
        "a_driver_tells_how_it_ended_through_spark_submit"
    ]
    assert failed == ["IntegrityError", "orders: 1 new finding in a/0"]
    ((_, task, code, text, _, error_class),) = left
    assert (task, code, error_class) == ("fold", 3, "FindingsError")
    assert text.startswith("IntegrityError: orders: 1 new finding in a/0\n  next ")
    assert killed == ["PlatformError", "seriatim run was ended by signal 9 and left no message"]
    assert of_killed[0][2] == 4
