"""Stream files that cannot be read, as an import error of this file: no DAG of another stream stands still for it.

Airflow marks every DAG of a file with an import error as gone, so the file that has the DAGs must not have the error.

Next room: dags/streams.py. Airflow only reads files that have its name in them: airflow.
"""

from __future__ import annotations

from pathlib import Path

from seriatim import config, streams
from seriatim.core.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent

if refused := streams.readable(config.load(folder=FOLDER).streams)[1]:
    raise ConfigError("\n\n".join(error.render() for error in refused))
