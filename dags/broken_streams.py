"""Stream files that make no DAG, as an import error of this file: no DAG of another stream stands
still for it.

Airflow marks every DAG of a file with an import error as gone, so the file that has the DAGs must
not have the error. This one does what that one does, and keeps of it what was left out.

Next room: dags/streams.py. Airflow only reads files that have its name in them: airflow.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from seriatim.errors import ConfigError

if refused := runpy.run_path(str(Path(__file__).with_name("streams.py")))["REFUSED"]:
    raise ConfigError(
        "\n\n".join(error.render() for error in refused).encode("utf-8", "replace").decode()
    )
