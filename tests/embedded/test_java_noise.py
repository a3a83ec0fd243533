"""One line of Java's is dropped; every other line of a child arrives, and ours go straight through."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import subprocess, sys
from seriatim.embedded.java import INCUBATOR_WARNING, quiet_java

child = "import sys, time; sys.stderr.write({!r}); sys.stderr.flush(); sys.stdin.read(); sys.stderr.write('later\\\\n')"
program = child.format("early\\n" + INCUBATOR_WARNING.decode())
with quiet_java():
    started = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    print("ours", file=sys.stderr)
print("after", file=sys.stderr)
started.communicate()
import threading
[thread.join() for thread in threading.enumerate() if thread.daemon]
"""


def test_only_the_noise_is_dropped() -> None:
    """A child may live longer than the filter's block, and is heard until it ends."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stderr.splitlines()) == ["after", "early", "later", "ours"]
