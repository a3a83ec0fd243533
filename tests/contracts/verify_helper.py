"""Verify over real files, for tests.

Next room: test_verify.py, test_verify_damage.py and test_verify_lies.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seriatim.operations.prove.difference import Difference
from seriatim.operations.prove.verify import Verification, VerifyResult, VerifyTableSpec
from seriatim.storage.audit import FileAudit
from tests.contracts.disk_streams import COLUMNS, DiskStream

TABLE = VerifyTableSpec(("id",), tuple(COLUMNS), DiskStream(Path()).runner.load)


def verify(
    root: Path, *, everything: bool = False, table: VerifyTableSpec | None = TABLE
) -> VerifyResult:
    """One pass."""
    return Verification("s", FileAudit(root), from_first_entry=everything, table_spec=table).run()


def first(root: Path, **how: Any) -> Difference:
    """The difference that a pass names."""
    found = verify(root, **how).difference
    assert found is not None
    return found


def paths(root: Path, pattern: str) -> list[Path]:
    """Files below the output path, by name."""
    found = sorted(root.glob(pattern))
    assert found
    return found


def flipped(content: bytes, bit: int) -> bytes:
    """The same with one bit turned."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
