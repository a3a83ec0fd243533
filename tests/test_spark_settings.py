"""What the Spark of a stream is started with, and workers that are forked ready."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from seriatim import class_archive, config, spark_settings
from seriatim.stream import parse_stream
from tests.test_stream import given

FORKED = """
import os, sys
from seriatim import spark_daemon
spark_daemon.preload()
loaded = set(sys.modules)
assert {"numba", "pyarrow.parquet", "seriatim.engine.task", "seriatim.kafka.task_reader"} <= loaded
pid = os.fork()
if pid == 0:
    import pyarrow as pa, pyarrow.compute as pc
    from seriatim.fast.__main__ import compile_all
    compile_all()
    more = set(sys.modules) - loaded
    table = pa.table({"n": pa.array(range(200_000))})
    assert pc.sum(table.filter(pc.field("n") > 10)["n"]).as_py() > 0  # by Arrow's threads, which a fork does not copy
    os._exit(bool(more))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_worker_needs_nothing_more() -> None:
    """What was loaded before the fork works after it: the compiled fold, and Arrow with its
    threads.
    """
    ended = subprocess.run(
        [sys.executable, "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd="/",
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("read", "columns", "quick", "forked"),
    [
        (None, {"id": "string"}, True, True),
        (None, {"id": "date"}, True, True),
        ("task", {"id": "string"}, True, True),
        ("spark", {"id": "string"}, False, True),
        ("spark", {"id": "date"}, False, False),
    ],
)
def test_who_needs_what(
    read: str | None, columns: dict[str, str], *, quick: bool, forked: bool
) -> None:
    """A JVM that no message passes through compiles less; workers load compiled code where tasks
    will use it.
    """
    stream = parse_stream(
        "s",
        given(slice={"read": read} if read else {}, table={"key": ["id"], "columns": columns}),
        "s.toml",
    )
    assert ("TieredStopAtLevel=1" in spark_settings.java_options(stream)) is quick
    assert ("spark.python.daemon.module" in spark_settings.local_spark_settings(stream)) is forked


def test_workers_import_what_is_installed_and_no_zip() -> None:
    """Spark puts its own zips and a JAR first on PYTHONPATH. The script drops these alone, and runs the
    Python of this process.
    """
    variables = config.worker_python_variables(is_local=True)
    spark_entries = ["/s/python/lib/pyspark.zip", "/s/python/lib/py4j-0.10.9.9-src.zip", "/s/a.jar"]
    own_entries = ["/own/machines", "/own/more*.zip"]
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join([*spark_entries, *own_entries]),
    }
    code = "import sys; print(sys.argv[1:], sys.executable, sys.path)"
    ended = subprocess.run(
        [variables["PYSPARK_PYTHON"], "-c", code, "a b"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert variables["PYSPARK_PYTHON"] != sys.executable
    assert ended.stdout.startswith(f"['a b'] {sys.executable} ")
    assert all(entry in ended.stdout for entry in own_entries)
    assert not any(entry in ended.stdout for entry in spark_entries)


def test_a_planner_that_comes_too_late_prints_no_stack_trace() -> None:
    """Spark has stopped listening: the run has said in a line that it goes on without the planner. What
    other Python processes of Spark print is kept.
    """
    variables = config.worker_python_variables(is_local=True)
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        environment = {
            **os.environ,
            **variables,
            "PYTHON_WORKER_FACTORY_PORT": str(nobody_listens.getsockname()[1]),
            "PYTHON_WORKER_FACTORY_SECRET": "secret",
        }
        program = variables["PYSPARK_PYTHON"]
        arguments_of_planner = ["-m", "pyspark.sql.streaming.python_streaming_source_runner"]
        planner, other_process = (
            subprocess.run(
                [program, *arguments], env=environment, capture_output=True, text=True, check=False
            )
            for arguments in (arguments_of_planner, ["-c", "raise SystemExit('a reason')"])
        )
    assert planner.returncode != 0
    assert planner.stderr == ""
    assert other_process.stderr == "a reason\n"


@pytest.mark.parametrize(
    ("named", "expected"),
    [("", sys.executable), ("/opt/python", "/opt/python"), ("our script", sys.executable)],
)
def test_the_python_of_a_cluster_is_chosen_by_people(
    monkeypatch: pytest.MonkeyPatch, named: str, expected: str
) -> None:
    """A local Spark, of this process or of the one that started it, leaves a script in the environment
    that works on its own host alone: that is nobody's choice.
    """
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", config.WORKER_PYTHON):
        monkeypatch.setenv(name, "")
    if named == "our script":
        config.use_this_python(is_local=True)
        assert os.environ["PYSPARK_PYTHON"].endswith("worker_python.sh")
    elif named:
        monkeypatch.setenv("PYSPARK_PYTHON", named)
    config.use_this_python(is_local=False)
    assert os.environ["PYSPARK_PYTHON"] == expected


def test_workers_elsewhere_start_without_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors on other hosts do not have it, and an unpacked package may have lost its mode."""
    variables = config.worker_python_variables(is_local=False)
    assert variables["PYSPARK_PYTHON"] == variables["PYSPARK_DRIVER_PYTHON"] == sys.executable
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert config.worker_python_variables(is_local=True) == variables


def test_an_archive_of_classes_is_used_if_there_is_one(tmp_path: Path) -> None:
    """The archive is one of this Java and these JARs, and a start without it says nothing of it."""
    settings = config.load_settings({"SERIATIM_HOME": str(tmp_path / "a home")}, tmp_path)
    archive = class_archive.archive_path(settings)
    if archive is None:
        pytest.skip("this Java has no archive of its own classes")
    assert class_archive.java_options(settings) == ""
    archive.parent.mkdir(parents=True)
    archive.touch()
    options = spark_settings.java_options(class_archive=class_archive.java_options(settings))
    # A path may have spaces; Spark's launcher takes an option in quotes as one.
    assert f' "-XX:SharedArchiveFile={archive}" ' in options


def test_an_archive_that_could_not_be_finished_is_left_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JVM never finds half an archive."""
    settings = config.load_settings({"SERIATIM_HOME": str(tmp_path)}, tmp_path)
    archive = class_archive.archive_path(settings)
    if archive is None:
        pytest.skip("this Java has no archive of its own classes")

    def fail_after_half(_settings: config.Settings, path: Path, _print_line: object) -> None:
        path.write_text("half")
        raise OSError("the disk is full")

    monkeypatch.setattr(class_archive, "_write_archive", fail_after_half)
    with pytest.raises(OSError, match="full"):
        class_archive.make_archive(settings, lambda _: None)
    assert list(archive.parent.iterdir()) == []
    monkeypatch.setattr(class_archive, "_write_archive", lambda *_: True)
    lines: list[str] = []
    class_archive.make_archive(settings, lines.append)
    assert lines[-1] == "Java wrote no archive: Spark starts without one"


def test_a_jvm_that_was_killed_leaves_no_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote may be a part, with which Java crashes. A whole one is on the disk before it has
    its name.
    """
    settings = config.load_settings({"SERIATIM_HOME": str(tmp_path)}, tmp_path)
    archive = class_archive.archive_path(settings)
    if archive is None:
        pytest.skip("this Java has no archive of its own classes")
    has_ended_well = False
    synced: list[bool] = []

    def write(_settings: config.Settings, path: Path, _print_line: object) -> bool:
        path.write_text("archive")
        return has_ended_well

    monkeypatch.setattr(class_archive, "_write_archive", write)
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(archive.exists()))
    class_archive.make_archive(settings, lambda _: None)
    assert list(archive.parent.iterdir()) == []
    has_ended_well = True
    class_archive.make_archive(settings, lambda _: None)
    assert list(archive.parent.iterdir()) == [archive]
    assert synced == [False]


def test_the_archive_is_made_by_a_spark_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting up asks no cluster and no server of Spark Connect, also where streams are folded there."""
    variables = {
        "SERIATIM_HOME": str(tmp_path),
        "SERIATIM_SPARK_MASTER": "spark://spark:7077",
        "SERIATIM_SPARK_REMOTE": "sc://spark:15002",
    }
    settings = config.load_settings(variables, tmp_path)
    if class_archive.archive_path(settings) is None:
        pytest.skip("this Java has no archive of its own classes")
    asked: list[tuple[str, str]] = []

    def write(used: config.Settings, _path: Path, _print_line: object) -> bool:
        asked.append((used.spark_master, used.spark_remote))
        return True

    monkeypatch.setattr(class_archive, "_write_archive", write)
    class_archive.make_archive(settings, lambda _: None)
    assert asked == [("local[2]", "")]


def test_setting_up_goes_on_without_an_archive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing needs it: a disk that is full, or a home that cannot be written, is told and no more."""

    def fail(*_: object) -> None:
        raise PermissionError("the home cannot be written")

    monkeypatch.setattr(class_archive, "make_archive", fail)
    class_archive.main()
    captured = capsys.readouterr()
    assert captured.err == "no archive of Spark's classes: the home cannot be written\n"
    assert captured.out == ""


def test_archives_of_an_earlier_installation_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 160 MB, and a new .venv has other JARs. Those of other places stay: two checkouts may
    have one home.
    """
    settings = config.load_settings({"SERIATIM_HOME": str(tmp_path)}, tmp_path)
    archive = class_archive.archive_path(settings)
    if archive is None:
        pytest.skip("this Java has no archive of its own classes")
    archive.parent.mkdir()
    places = archive.stem.rpartition("-")[0]
    earlier = archive.with_name(f"{places}-0123456789abcdef.jsa")
    elsewhere = archive.with_name("spark-0123456789abcdef-0123456789abcdef.jsa")
    earlier.touch()
    elsewhere.touch()

    def write(_settings: config.Settings, path: Path, _print_line: object) -> bool:
        path.touch()
        return True

    monkeypatch.setattr(class_archive, "_write_archive", write)
    class_archive.make_archive(settings, lambda _: None)
    assert sorted(archive.parent.iterdir()) == sorted([archive, elsewhere])
