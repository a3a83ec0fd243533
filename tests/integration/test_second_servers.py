"""What we ask of a bucket holds on other S3 servers, too. Each suite is a pytest of its own."""

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


@pytest.mark.full
@pytest.mark.parametrize("server", COMMANDS)
def test_another_server_keeps_what_we_rely_on(server: str) -> None:
    """The contract of a store with its races, two writers over a lossy way, and a whole life. Skipped
    where the server cannot be had.
    """
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-rs"]
    command += ["-k", "s3 or bucket", "--s3-server", server, *SUITES]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last_line = ended.stdout.splitlines()[-1]
    if ended.returncode == 0 and "passed" not in last_line:
        pytest.skip(f"{server}: {ended.stdout[-300:]}")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
