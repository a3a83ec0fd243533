"""What spark-submit runs: one `seriatim` command that folds, in the Spark it was submitted to.

Arguments are those of the command line: VERB STREAM …; so are the screens, the outcome file and the
exit codes, which spark-submit passes on. Settings come from the environment and seriatim.toml,
never from arguments.

Next room: seriatim/cli/run.py; seriatim/airflow/fold.py submits this.
"""

from __future__ import annotations

import sys

from seriatim import cli, config
from seriatim.errors import ConfigError

VERBS = ("run", "backfill", "repair", "replay")


def main(arguments: list[str]) -> None:
    """Do what the words say, if it is a verb that folds."""
    if not arguments or arguments[0] not in VERBS:
        error = ConfigError(
            f"{arguments[:1]} does not fold", next=f"submit one of {', '.join(VERBS)}"
        )
        cli.fail(error, config.take_outcome_path())
    cli.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
