"""Shows stream files that are broken as an import error of this file.

Airflow takes every DAG of a file with an import error as deleted. So the error must not be in
dags/streams.py, which has the DAGs of all other streams. This file runs that one, and raises an
error about the stream files that it left out.

Next: dags/streams.py. (Airflow reads only files in which the word airflow occurs.)
"""

from __future__ import annotations

import runpy
from pathlib import Path

from seriatim.errors import ConfigError

STREAMS_FILE = Path(__file__).with_name("streams.py")
REFUSED = runpy.run_path(str(STREAMS_FILE))["REFUSED"]
if REFUSED:
    text = "\n\n".join(error.render() for error in REFUSED)
    # Airflow's database takes no lone surrogates, which a file's name may bring along.
    raise ConfigError(text.encode("utf-8", "replace").decode())
