"""DAG files as Airflow's own parser sees them, in a process of its own: this one stays free of
Airflow.

Next room: the tests of this folder ask it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
STREAM = """
# Orders of the exchange.
# As they come.
topics = "{topics}"
machine = "table"
sequence = "seq"
table = {{key = ["id"], columns = {{id = "string", v = "int64"}}}}
output = {{path = "lake/{name}"}}
{more}
""".lstrip()


def write_stream(folder: Path, name: str, more: str = "", topics: str = "in-[a-z]+") -> None:
    """A stream file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(STREAM.format(name=name, more=more, topics=topics))


def environment(tmp_path: Path) -> dict[str, str]:
    """Settings under which Airflow leaves everything below `tmp_path`."""
    return {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("AIRFLOW", "SERIATIM"))
        },
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "SERIATIM_HOME": str(tmp_path / "home"),
        "SERIATIM_STREAMS": str(tmp_path / "streams"),
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
    }


def ask(tmp_path: Path, code: str, **settings: str) -> Any:
    """What a piece of Python says (as JSON on its last line) that sees the DAGs as `bag`.

    `opened` has the path of every file that was opened since parsing began.
    """
    begin = (
        "import json, sys, time\n"
        "from airflow.dag_processing.dagbag import DagBag\n"
        "import airflow.providers.apache.spark.operators.spark_submit\n"
        "opened = []\n"
        "sys.addaudithook(lambda name, words: opened.append(str(words[0])) if name == 'open' else None)\n"
        f"bag = DagBag(dag_folder={str(ROOT / 'dags')!r})\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", begin + code],
        env={**environment(tmp_path), **settings},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])
