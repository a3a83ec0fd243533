"""Make the golden files anew: `python -m tests.golden.make digests|output|outcomes|json [...]`.

Only for a deliberate change of behaviour, formats or JSON, and by code that is known to be right:
the commit that changes a golden file says why. `output` is made by the version that wrote it and
should never be made anew; a new format gets an output of its own beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden import commands, output
from tests.golden.combinations import COMBINATIONS, PINNED, folded_in_memory
from tests.golden.product import link_jars


def make_digests() -> None:
    """The outcome of every combination of tier and machine."""
    made = {}
    for tier, machine in COMBINATIONS:
        with tempfile.TemporaryDirectory() as folder:
            made[f"{tier}-{machine}"] = folded_in_memory(Path(folder), tier, machine)
        sys.stderr.write(f"{tier}-{machine}\n")
    PINNED.write_text(json.dumps(made, indent=1) + "\n")


def make_output() -> None:
    """The output that later versions must go on with."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("streams", "expectations"):
            shutil.copytree(
                output.NEWEST / name, root / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        output.make(root)
        output.pack(root, output.NEWEST)
        shutil.copy(root / "messages.jsonl", output.NEWEST)


def make_outcomes() -> None:
    """What comes of these outputs."""
    for golden in output.GOLDENS:
        outcomes = json.dumps(output.outcomes(golden), indent=1)
        (golden / "outcomes.json").write_text(f"{outcomes}\n")


def make_json() -> None:
    """What every command with --json prints. Starts the embedded servers for a moment."""
    made: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        link_jars(home)
        environ = {**os.environ, "SERIATIM_HOME": folder}
        groups = []
        for name in ("kafka", "s3", "cluster"):
            server = [sys.executable, "-m", "seriatim", name]
            subprocess.run([*server, "start"], env=environ, check=True, stdout=sys.stderr)
            try:
                groups.append(commands.embedded_server(name, home))
            finally:
                subprocess.run([*server, "stop"], env=environ, check=True, stdout=sys.stderr)
    groups += [commands.doctor(), *(commands.recorded(group) for group in commands.GROUPS)]
    for group in groups:
        for name, cases in group.items():
            made.setdefault(name, {}).update(cases)
    commands.write(made)


MAKERS = {
    "digests": make_digests,
    "output": make_output,
    "outcomes": make_outcomes,
    "json": make_json,
}

if __name__ == "__main__":
    chosen = sys.argv[1:]
    if not chosen or not set(chosen) <= set(MAKERS):
        sys.exit(f"name what is to be made: {', '.join(MAKERS)}")
    for kind in chosen:
        MAKERS[kind]()
