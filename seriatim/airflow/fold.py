"""Fold: the task that folds, through spark-submit on the Spark of connection `seriatim_spark`;
without one, here.

A thin subclass of Airflow's own operator: unknown connections are refused (it would take YARN),
lines come out as they were said, the outcome that the driver leaves becomes a typed error, and a
kill takes the driver along. Nothing secret is in an argument: settings and their files reach the
driver by the environment it inherits.

Next room: spark_apps/fold.py is what is submitted; airflow/params.py reads the form.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from seriatim import config, spark_settings, stream_files
from seriatim.airflow import environment
from seriatim.airflow.command import die_with_parent, terminate_process_tree
from seriatim.airflow.link import RunPage
from seriatim.airflow.outcome import build_error, outcome_file, read_outcome
from seriatim.airflow.run_request import command_arguments, parse_run_request
from seriatim.config import Settings
from seriatim.errors import ConfigError, PlatformError, SeriatimError

SPARK_CONNECTION_ID = "seriatim_spark"
APPLICATION = "spark_apps/fold.py"
JAVA_WARNING = "WARNING: Using incubator modules"
"""What Java says of every Spark, and nobody can act on."""
BACKFILL_HINT = (
    "Airflow's backfill folds what is not committed yet, whatever its dates are; "
    "to fold a range again, trigger this DAG with action = backfill"
)


class LoggedSparkSubmitHook(SparkSubmitHook):
    """spark-submit whose lines come out as they were said, and whose driver leaves an outcome."""

    def __init__(self, *, folder: str, default_master: str, **kwargs: Any) -> None:
        self.folder, self.default_master = folder, default_master
        self.outcome_path: Path | None = None
        """Where the driver is told to leave how it ended."""
        super().__init__(**kwargs)

    def get_connection(self, conn_id: str) -> Any:
        """The connection; ours may be missing, any other is refused: Airflow would take YARN for
        it.
        """
        try:
            return super().get_connection(conn_id)
        except AirflowNotFoundException:
            if self.default_master:
                return Connection(conn_id=conn_id, conn_type="spark", host=self.default_master)
            raise ConfigError(
                f"there is no Airflow connection {conn_id!r}",
                next=f"make it (type Spark), or unset SERIATIM_SPARK_CONNECTION: then {SPARK_CONNECTION_ID} or local Spark",
            ) from None

    @property
    def is_local(self) -> bool:
        """Whether Spark runs on this machine."""
        return str(self._connection["master"]).startswith("local")

    def _process_spark_submit_log(self, itr: Iterable[str]) -> None:
        if self._connection["deploy_mode"] == "cluster":
            super()._process_spark_submit_log(_without_noise(itr))
            return
        self._spark_exit_code = 0
        for line in _without_noise(itr):
            self.log.info("%s", line)

    def _build_spark_submit_command(self, application: str) -> list[str]:
        """The command; its environment names the outcome file, which a driver on this machine
        inherits.

        A driver that the cluster starts elsewhere does not: its exit code alone says how it ended.
        """
        command = super()._build_spark_submit_command(application)
        if self.outcome_path is not None:
            inherited: dict[str, Any] = self._env or {}
            self._env: dict[str, Any] | None = {**inherited, config.OUTCOME: str(self.outcome_path)}
        return command

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        """In the project's folder: relative paths and seriatim.toml are those of the command line."""
        ours = {"cwd": self.folder, "preexec_fn": die_with_parent, "errors": "replace"}
        return super().submit(application, **{**ours, **kwargs})


class FoldOperator(SparkSubmitOperator):
    """Folds a stream as the trigger form asks, in one submission."""

    operator_extra_links = (RunPage(),)

    def __init__(self, *, stream: str, folder: str, **kwargs: Any) -> None:
        super().__init__(
            application=str(Path(folder) / APPLICATION),
            name=f"seriatim {stream}",
            durable=False,
            **kwargs,
        )
        self.stream, self.folder = stream, folder
        self._submit_hook: LoggedSparkSubmitHook | None = None

    def build_arguments(self, context: Any) -> list[str]:
        """The command to be submitted, word by word; none: nothing is to be folded."""
        request = parse_run_request(dict(context["params"]))
        if request.action != "backfill" and request.dry_run:
            return []
        return command_arguments(
            request,
            self.stream,
            self._scratch_folder(context) if request.action == "replay" else "",
        )

    def _scratch_folder(self, context: Any) -> str:
        """Where a replay goes: a folder for each try, below the home. Who has compared it may
        delete it.
        """
        run, attempt = re.sub(r"[^A-Za-z0-9]+", "-", context["run_id"]), context["ti"].try_number
        home = config.load_settings(folder=Path(self.folder)).home
        return str(home / "scratch" / self.stream / f"{run}-{attempt}")

    def execute(self, context: Any) -> None:
        """Submit, and tell what came of it."""
        if getattr(context["dag_run"], "run_type", "") == "backfill":
            self.log.info(BACKFILL_HINT)
        words = self.build_arguments(context)
        if not words:
            self.log.info("%s: a dry run: the task plan says what would be done", self.stream)
            return
        settings = config.load_settings(folder=Path(self.folder))
        self.application_args = words
        self._spark_binary = _program_beside_python("spark-submit")
        try:
            self._hook = self._submit_hook = self._create_submit_hook(settings)
        except SeriatimError as error:
            self._add_note(context, error)
            raise
        with outcome_file() as path:
            self._submit_hook.outcome_path = path
            try:
                super().execute(context)
            except (
                AirflowException,
                OSError,
                RuntimeError,
            ) as error:  # Airflow's is the same whatever happened
                known = self._known_error(self._submit_hook, words[0], error)
                self._add_note(context, known)
                raise known from None

    def _create_submit_hook(self, settings: Settings) -> LoggedSparkSubmitHook:
        """The submission: JARs, memory, a quiet log; and what only a Spark on this machine needs."""
        from seriatim.embedded import jars

        self.jars = ",".join(map(str, jars.ensure_jars("spark", settings, self.log.info)))
        self._driver_memory = settings.spark_driver_memory
        hook = LoggedSparkSubmitHook(
            folder=self.folder,
            default_master="" if settings.spark_connection else settings.spark_master,
            conn_id=settings.spark_connection or SPARK_CONNECTION_ID,
            name=self.name,
            jars=self.jars,
            driver_memory=self._driver_memory,
            application_args=self.application_args,
            spark_binary=self._spark_binary,
            conf={},
        )
        file = stream_files.load_stream(self.stream, settings.streams)
        options = spark_settings.java_options(file.stream)
        hook._conf |= {
            "spark.driver.extraJavaOptions": options,
            "spark.ui.showConsoleProgress": "false",
        }
        if hook.is_local:
            hook._conf |= spark_settings.local_spark_settings(file.stream)
            hook._env_vars = {
                "PYSPARK_PYTHON": sys.executable,
                "PYSPARK_DRIVER_PYTHON": sys.executable,
            }
        else:
            machines = sorted(map(str, Path(file.folder).glob("*.py")))
            hook._py_files = ",".join(machines) or None
        return hook

    def _known_error(
        self, hook: LoggedSparkSubmitHook, verb: str, error: Exception
    ) -> SeriatimError:
        """What the submission came to, as an error of ours."""
        process = hook._submit_sp
        code = process.poll() if process is not None else None
        if not code:
            return PlatformError(f"spark-submit did not run: {error}")
        outcome = read_outcome(hook.outcome_path) if hook.outcome_path is not None else None
        return build_error(f"seriatim {verb}", code, outcome)

    def _add_note(self, context: Any, error: SeriatimError) -> None:
        """A note for the alert."""
        environment.add_note(
            self.folder, self.stream, environment.task_note(context, self.task_id, error), self.log
        )

    def on_kill(self) -> None:
        """The driver is a child of spark-submit's JVM: both end, and Spark's own workers with them."""
        process = self._submit_hook._submit_sp if self._submit_hook is not None else None
        if process is not None:
            terminate_process_tree(process.pid)
        if (
            self._submit_hook is not None
            and self._submit_hook._connection["deploy_mode"] == "cluster"
        ):
            super().on_kill()


def _without_noise(lines: Iterable[str]) -> Iterator[str]:
    """Lines as they were said, without those that Java says of every Spark."""
    return (line.rstrip("\n") for line in lines if not line.startswith(JAVA_WARNING))


def _program_beside_python(program: str) -> str | None:
    """A program of the environment that runs us; None: whatever PATH has."""
    path = Path(sys.executable).with_name(program)
    return str(path) if path.exists() else None
