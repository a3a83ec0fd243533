"""Stream files that cannot be read, as an import error of this file: no DAG of another stream stands still for it.

Airflow marks every DAG of a file with an import error as gone, so the file that has the DAGs must not have the error.

Next room: dags/streams.py.
"""

from __future__ import annotations

from pathlib import Path

from seriatim import config, streams
from seriatim.core.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent


def refusals(folder: Path) -> list[str]:
    """What is wrong with each stream file that an airflow DAG cannot be made of, as its own screen."""
    found = []
    for name in streams.names(folder):
        try:
            streams.load(name, folder)
        except ConfigError as error:
            found.append(error.render())
    return found


if refused := refusals(config.load(folder=FOLDER).streams):
    raise ConfigError("\n\n".join(refused))
