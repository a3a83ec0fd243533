"""What we ask of a bucket holds on other S3 servers, too, and what integration tests show on a disk holds
in a bucket. Each is a pytest of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.second_servers import COMMANDS

ROOT = Path(__file__).parent.parent.parent
SUITES = (
    "tests/contracts/test_store.py",
    "tests/contracts/test_ledger_in_bucket.py",
    "tests/contracts/test_life_in_bucket.py",
)
SUITES_OF_A_DISK = ("two_runs", "repair", "check", "outputs", "findings")


def _run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-rs"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.full
@pytest.mark.parametrize("server", COMMANDS)
def test_another_server_keeps_what_we_rely_on(server: str) -> None:
    """The contract of a store with its races, two writers over a lossy way, and a whole life. Skipped
    where the server cannot be had.
    """
    ended = _run_pytest("-k", "s3 or bucket", "--s3-server", server, *SUITES)
    last_line = ended.stdout.splitlines()[-1]
    if ended.returncode == 0 and "passed" not in last_line:
        pytest.skip(f"{server}: {ended.stdout[-300:]}")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]


@pytest.mark.full
def test_suites_of_a_disk_hold_in_a_bucket() -> None:
    """Races, a zombie, repair, check, publish and findings, as `make test` runs them, with the output in
    a bucket.
    """
    suites = [f"tests/integration/test_{name}.py" for name in SUITES_OF_A_DISK]
    ended = _run_pytest("--store", "s3", *suites)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
