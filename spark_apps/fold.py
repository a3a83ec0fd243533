"""The program that spark-submit runs: one `seriatim` command that folds, in the Spark to which it
was submitted.

Arguments, printed texts, outcome file and exit codes are those of the command line; spark-submit
passes the exit code on. Settings come from the environment and seriatim.toml, never from arguments.

Next: seriatim/cli/run.py is such a command; seriatim/airflow/fold.py submits this program.
"""

from __future__ import annotations

import sys

from seriatim import cli, config
from seriatim.errors import ConfigError

VERBS = ("run", "backfill", "repair", "replay")


def main(arguments: list[str]) -> None:
    """Run the command if its verb is one that folds; otherwise end with a ConfigError."""
    if not arguments or arguments[0] not in VERBS:
        advice = f"submit one of {', '.join(VERBS)}"
        error = ConfigError(f"{arguments[:1]} does not fold", next=advice)
        cli.fail(error, config.take_outcome_path())
    cli.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
