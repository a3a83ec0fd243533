"""Fold: the task that folds, through spark-submit on the Spark of connection `seriatim_spark`; without one, here.

A thin subclass of Airflow's own operator: unknown connections are refused (it would take YARN), lines come out as they
were said, the outcome that the driver leaves becomes a typed error, and a kill takes the driver along. Nothing secret
is in an argument: settings and their files reach the driver by the environment it inherits.

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

from seriatim import config, streams, tuned
from seriatim.airflow import place
from seriatim.airflow.command import die_with_parent, end_all
from seriatim.airflow.link import RunPage
from seriatim.airflow.outcome import error_of, outcome_file, read_outcome
from seriatim.config import Settings
from seriatim.core.errors import ConfigError, PlatformError, SeriatimError
from seriatim.core.request import arguments, parse

CONNECTION = "seriatim_spark"
APPLICATION = "spark_apps/fold.py"
NOISE = "WARNING: Using incubator modules"
"""What Java says of every Spark, and nobody can act on."""
ONLY_NEW = (
    "Airflow's backfill folds what is not committed yet, whatever its dates are; "
    "to fold a range again, trigger this DAG with action = backfill"
)


class Submit(SparkSubmitHook):
    """spark-submit whose lines come out as they were said, and whose driver leaves an outcome."""

    def __init__(self, *, folder: str, without_connection: str, **kwargs: Any) -> None:
        self.folder, self.without_connection = folder, without_connection
        self.outcome_path: Path | None = None
        """Where the driver is told to leave how it ended."""
        super().__init__(**kwargs)

    def get_connection(self, conn_id: str) -> Any:
        """The connection; ours may be missing, any other is refused: Airflow would take YARN for it."""
        try:
            return super().get_connection(conn_id)
        except AirflowNotFoundException:
            if self.without_connection:
                return Connection(conn_id=conn_id, conn_type="spark", host=self.without_connection)
            raise ConfigError(
                f"there is no Airflow connection {conn_id!r}",
                next=f"make it (type Spark), or unset SERIATIM_SPARK_CONNECTION: then {CONNECTION} or local Spark",
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
        """The command; its environment names the outcome file, which a driver on this machine inherits.

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


class Fold(SparkSubmitOperator):
    """Folds a stream as the trigger form asks, in one submission."""

    operator_extra_links = (RunPage(),)

    def __init__(self, *, stream: str, folder: str, **kwargs: Any) -> None:
        super().__init__(
            application=str(Path(folder) / APPLICATION), name=f"seriatim {stream}", durable=False, **kwargs
        )
        self.stream, self.folder = stream, folder
        self._submission: Submit | None = None

    def words_for(self, context: Any) -> list[str]:
        """The command to be submitted, word by word; none: nothing is to be folded."""
        request = parse(dict(context["params"]))
        if request.action != "backfill" and request.dry_run:
            return []
        return arguments(request, self.stream, self._scratch(context) if request.action == "replay" else "")

    def _scratch(self, context: Any) -> str:
        """Where a replay goes: a folder for each try, below the home. Who has compared it may delete it."""
        run, attempt = re.sub(r"[^A-Za-z0-9]+", "-", context["run_id"]), context["ti"].try_number
        home = config.load(folder=Path(self.folder)).home
        return str(home / "scratch" / self.stream / f"{run}-{attempt}")

    def execute(self, context: Any) -> None:
        """Submit, and tell what came of it."""
        if getattr(context["dag_run"], "run_type", "") == "backfill":
            self.log.info(ONLY_NEW)
        words = self.words_for(context)
        if not words:
            self.log.info("%s: a dry run: the task plan says what would be done", self.stream)
            return
        settings = config.load(folder=Path(self.folder))
        self.application_args = words
        self._spark_binary = _beside_python("spark-submit")
        try:
            self._hook = self._submission = self._prepared(settings)
        except SeriatimError as error:
            self._leave(context, error)
            raise
        with outcome_file() as path:
            self._submission.outcome_path = path
            try:
                super().execute(context)
            except (AirflowException, OSError, RuntimeError) as error:  # Airflow's is the same whatever happened
                known = self._known_error(self._submission, words[0], error)
                self._leave(context, known)
                raise known from None

    def _prepared(self, settings: Settings) -> Submit:
        """The submission: JARs, memory, a quiet log; and what only a Spark on this machine needs."""
        from seriatim.embedded import jars

        self.jars = ",".join(map(str, jars.ensure("spark", settings, self.log.info)))
        self._driver_memory = settings.spark_driver_memory
        hook = Submit(
            folder=self.folder,
            without_connection="" if settings.spark_connection else settings.spark_master,
            conn_id=settings.spark_connection or CONNECTION,
            name=self.name,
            jars=self.jars,
            driver_memory=self._driver_memory,
            application_args=self.application_args,
            spark_binary=self._spark_binary,
            conf={},
        )
        file = streams.load(self.stream, settings.streams)
        options = tuned.java_options(file.stream)
        hook._conf |= {"spark.driver.extraJavaOptions": options, "spark.ui.showConsoleProgress": "false"}
        if hook.is_local:
            hook._conf |= tuned.on_this_machine(file.stream)
            hook._env_vars = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        else:
            machines = sorted(map(str, Path(file.folder).glob("*.py")))
            hook._py_files = ",".join(machines) or None
        return hook

    def _known_error(self, hook: Submit, verb: str, error: Exception) -> SeriatimError:
        """What the submission came to, as an error of ours."""
        process = hook._submit_sp
        code = process.poll() if process is not None else None
        if not code:
            return PlatformError(f"spark-submit did not run: {error}")
        outcome = read_outcome(hook.outcome_path) if hook.outcome_path is not None else None
        return error_of(f"seriatim {verb}", code, outcome)

    def _leave(self, context: Any, error: SeriatimError) -> None:
        """A note for the alert."""
        place.leave(self.folder, self.stream, place.note_of_task(context, self.task_id, error), self.log)

    def on_kill(self) -> None:
        """The driver is a child of spark-submit's JVM: both end, and Spark's own workers with them."""
        process = self._submission._submit_sp if self._submission is not None else None
        if process is not None:
            end_all(process.pid)
        if self._submission is not None and self._submission._connection["deploy_mode"] == "cluster":
            super().on_kill()


def _without_noise(lines: Iterable[str]) -> Iterator[str]:
    """Lines as they were said, without those that Java says of every Spark."""
    return (line.rstrip("\n") for line in lines if not line.startswith(NOISE))


def _beside_python(program: str) -> str | None:
    """A program of the environment that runs us; None: whatever PATH has."""
    path = Path(sys.executable).with_name(program)
    return str(path) if path.exists() else None
