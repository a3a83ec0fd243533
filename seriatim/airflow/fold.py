"""The task `fold`: it runs spark-submit on the Spark of connection `seriatim_spark`, or on this
host if there is no such connection.

It is a thin subclass of Airflow's own operator. What it changes:

- An unknown connection is refused. Airflow would use YARN instead.
- The log lines of the driver come out as they were printed.
- The outcome that the driver writes to a file becomes a typed error.
- When the task is killed, the driver ends as well.

No argument holds a secret: settings and their files reach the driver by its environment.

This is the only module that uses names which Airflow's Spark provider does not promise to keep:
`_process_spark_submit_log`, `_spark_exit_code` and `_submit_sp` of its hook, `_hook` of its operator.
tests/dags/test_tasks.py notices if one of them is gone.

Next: spark_apps/fold.py is the program that is submitted; airflow/params.py shows the form.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseHook, Connection
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException
from msgspec.structs import replace

from seriatim import class_archive, config, spark_settings, stream_files
from seriatim.airflow import environment
from seriatim.airflow.command import RunPage, die_with_parent, terminate_process_tree
from seriatim.airflow.outcome import build_error, outcome_file, read_outcome
from seriatim.config import Settings
from seriatim.errors import ConfigError, PlatformError, SeriatimError
from seriatim.operations.run_request import command_arguments, parse_run_request

SPARK_CONNECTION_ID = "seriatim_spark"
APPLICATION = "spark_apps/fold.py"
JAVA_WARNING = "WARNING: Using incubator modules"
"""Java prints it for every Spark, and nobody can do anything about it."""
BACKFILL_HINT = (
    "Airflow's backfill folds what is not committed yet, whatever its dates are; "
    "to fold a range again, trigger this DAG with action = backfill"
)


def find_spark_connection(connection_id: str, default_master: str) -> Connection:
    """The connection of the Spark that folds. If there is none, `default_master` is used; without
    that, a missing connection is refused. Airflow itself would use YARN for it.
    """
    try:
        return BaseHook.get_connection(connection_id)
    except AirflowNotFoundException:
        if default_master:
            return Connection(conn_id=connection_id, conn_type="spark", host=default_master)
        raise ConfigError(
            f"there is no Airflow connection {connection_id!r}",
            next="make it (type Spark), or unset SERIATIM_SPARK_CONNECTION:"
            f" then {SPARK_CONNECTION_ID} or local Spark",
        ) from None


def is_local(connection: Connection) -> bool:
    """Whether Spark runs on this host."""
    return spark_settings.is_local_master(str(connection.host))


def is_in_cluster_mode(connection: Connection) -> bool:
    """Whether the cluster starts the driver, and not spark-submit on this host."""
    return bool(connection.extra_dejson.get("deploy-mode") == "cluster")


class LoggedSparkSubmitHook(SparkSubmitHook):
    """spark-submit whose log lines come out as printed, and whose driver writes an outcome file."""

    def __init__(self, *, folder: str, connection: Connection, **kwargs: Any) -> None:
        self.folder = folder
        self.connection = connection
        self.outcome_path: Path | None = None
        """The file in which the driver leaves its outcome."""
        super().__init__(conn_id=connection.conn_id, **kwargs)

    def get_connection(self, conn_id: str) -> Connection:  # noqa: ARG002  # Airflow's signature
        """The connection that was found already."""
        return self.connection

    @property
    def is_cluster_mode(self) -> bool:
        """Whether the driver runs in the cluster, and not on this host."""
        return is_in_cluster_mode(self.connection)

    @property
    def process(self) -> subprocess.Popen[str] | None:
        """The process of spark-submit; None: it was not started."""
        return self._submit_sp

    def _process_spark_submit_log(self, itr: Iterable[str]) -> None:
        if self.is_cluster_mode:
            super()._process_spark_submit_log(_without_noise(itr))
            return
        # Airflow's own method strips the lines, and ours are indented for people. On Kubernetes it
        # also notes this code, without which `submit` would raise an error.
        self._spark_exit_code = 0
        for line in _without_noise(itr):
            self.log.info("%s", line)

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        """Submit in the project's folder, where relative paths and seriatim.toml are looked for.

        The environment names the outcome file. A driver on this host inherits that. A driver that
        the cluster starts elsewhere does not: only its exit code says how it ended.
        """
        variables = config.child_environment()
        if is_local(self.connection):
            # Otherwise Spark starts whatever `python3` is first in PATH.
            variables |= config.worker_python_variables(is_local=True)
        else:
            variables = config.without_worker_script(variables)
        if self.outcome_path is not None:
            variables[config.OUTCOME] = str(self.outcome_path)
        process_options = {
            "cwd": self.folder,
            "env": variables,
            "preexec_fn": die_with_parent,
            "errors": "replace",
        }
        return super().submit(application, **{**process_options, **kwargs})


class FoldOperator(SparkSubmitOperator):
    """Folds a stream as the trigger form asks, in one submission."""

    operator_extra_links = (RunPage(),)

    def __init__(self, *, folder: str, stream: str = "", **kwargs: Any) -> None:
        # Without a stream the form names it: then the subclass says what the application is called.
        kwargs.setdefault("name", f"seriatim {stream}")
        super().__init__(
            application=str(Path(folder) / APPLICATION),
            durable=False,
            **kwargs,
        )
        self.stream = stream
        self.folder = folder
        self._submit_hook: LoggedSparkSubmitHook | None = None

    def build_arguments(self, context: Any) -> list[str]:
        """The arguments of the command to be submitted; empty: there is nothing to fold."""
        request = parse_run_request(dict(context["params"]))
        # The dry run of a backfill is a command of its own. Others are shown by the task `plan`.
        if request.action != "backfill" and request.dry_run:
            return []
        scratch_folder = ""
        if request.action == "replay":
            scratch_folder = self._scratch_folder(context)
        return command_arguments(request, self.stream, scratch_folder)

    def _scratch_folder(self, context: Any) -> str:
        """The folder of a replay: one for each try, below the home. Nothing else deletes it."""
        run_name = re.sub(r"[^A-Za-z0-9]+", "-", context["run_id"])
        attempt = context["ti"].try_number
        home = config.load_settings(folder=Path(self.folder)).home
        return str(home / "scratch" / self.stream / f"{run_name}-{attempt}")

    def execute(self, context: Any) -> None:
        """Submit the command. If it fails, leave a note for the alert and raise a typed error."""
        if getattr(context["dag_run"], "run_type", "") == "backfill":
            self.log.info(BACKFILL_HINT)
        arguments = self.build_arguments(context)
        if not arguments:
            self.log.info("%s: a dry run: the task plan says what would be done", self.stream)
            return
        settings = config.load_settings(folder=Path(self.folder))
        try:
            hook = self._create_submit_hook(settings, arguments)
        except SeriatimError as error:
            self._add_note(context, error)
            raise
        # Airflow's `execute` uses `_hook`, and makes another one if it is None.
        self._hook = hook
        self._submit_hook = hook
        with outcome_file() as path:
            hook.outcome_path = path
            try:
                super().execute(context)
            except (AirflowException, OSError, RuntimeError) as error:
                # Airflow's error is the same whatever happened: the outcome file says more.
                typed_error = self._typed_error(hook, arguments[0], error)
                self._add_note(context, typed_error)
                raise typed_error from None

    def _create_submit_hook(
        self, settings: Settings, arguments: list[str]
    ) -> LoggedSparkSubmitHook:
        """The hook with JARs, memory, log settings, and what a local or a remote Spark needs."""
        # Airflow parses DAG files again and again: what only a task needs is imported here.
        from seriatim.embedded import jars

        jar_paths = jars.ensure_jars("spark", settings, self.log.info)
        connection = find_spark_connection(
            settings.spark_connection or SPARK_CONNECTION_ID,
            default_master="" if settings.spark_connection else settings.spark_master,
        )
        file = stream_files.load_stream(self.stream, settings.streams)
        # A driver that the cluster starts elsewhere has no archive of this host.
        archive = "" if is_in_cluster_mode(connection) else class_archive.java_options(settings)
        spark_conf = {
            "spark.driver.extraJavaOptions": spark_settings.java_options(
                file.stream, class_archive=archive
            ),
            "spark.ui.showConsoleProgress": "false",
        }
        machine_files: list[str] = []
        if is_local(connection):
            spark_conf |= spark_settings.local_spark_settings(file.stream)
        else:
            spark_conf |= _cluster_conf(connection, settings)
            # Executors elsewhere do not have the user's machines, which lie beside stream files.
            machine_files = sorted(map(str, Path(file.folder).glob("*.py")))
        return LoggedSparkSubmitHook(
            folder=self.folder,
            connection=connection,
            name=self.name,
            jars=",".join(map(str, jar_paths)),
            driver_memory=settings.spark_driver_memory,
            application_args=arguments,
            spark_binary=_program_beside_python("spark-submit"),
            conf=spark_conf,
            py_files=",".join(machine_files) or None,
        )

    def _typed_error(
        self, hook: LoggedSparkSubmitHook, verb: str, error: Exception
    ) -> SeriatimError:
        """The error of a failed submission, by the driver's outcome or else by its exit code."""
        code = None
        if hook.process is not None:
            code = hook.process.poll()
        if not code:
            return PlatformError(f"spark-submit did not run: {error}")
        outcome = None
        if hook.outcome_path is not None:
            outcome = read_outcome(hook.outcome_path)
        return build_error(f"seriatim {verb}", code, outcome)

    def _add_note(self, context: Any, error: SeriatimError) -> None:
        """Leave a note for the alert."""
        note = environment.task_note(context, self.task_id, error)
        # A backfill and a replay are only asked for by a form: what they refuse is a slip in it.
        is_asked_by_form = context["params"].get("action") in ("backfill", "replay")
        is_form_error = isinstance(error, ConfigError) and is_asked_by_form
        note = replace(note, is_form_error=is_form_error)
        environment.add_note(self.folder, self.stream, note, self.log)

    def on_kill(self) -> None:
        """End spark-submit and all processes below it: its JVM, the driver, and Spark's workers."""
        hook = self._submit_hook
        if hook is None:
            return
        if hook.process is not None:
            terminate_process_tree(hook.process.pid)
        # In a cluster the driver is no child of ours: Airflow asks Spark to end it.
        if hook.is_cluster_mode:
            super().on_kill()


def _cluster_conf(connection: Connection, settings: Settings) -> dict[str, str]:
    """Settings of the driver for a cluster. A driver that the cluster starts itself (cluster mode) has
    the address of the host where it is started.
    """
    master = str(connection.host)
    if connection.port:
        master = f"{master}:{connection.port}"
    conf = spark_settings.cluster_spark_settings(master, settings)
    if is_in_cluster_mode(connection):
        conf = {name: value for name, value in conf.items() if "spark.driver." not in name}
    return conf


def _without_noise(lines: Iterable[str]) -> Iterator[str]:
    """Lines without their line ends, and without the one that Java prints for every Spark."""
    for line in lines:
        if not line.startswith(JAVA_WARNING):
            yield line.rstrip("\n")


def _program_beside_python(program: str) -> str | None:
    """A program of the environment that runs this process; None: PATH is searched for it."""
    path = Path(sys.executable).with_name(program)
    if path.exists():
        return str(path)
    return None
