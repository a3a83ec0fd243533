"""Verify over real files, for tests.

Next: test_verify.py, test_verify_damage.py and test_verify_contradictions.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seriatim.operations.prove.partition_rules import (
    Difference,
    StateRowReader,
    state_row_reader,
)
from seriatim.operations.prove.verify import Verification, VerifyResult
from seriatim.storage.audit import FileAudit
from seriatim.storage.store import LocalStore
from tests.contracts.disk_streams import DiskStream

READER = state_row_reader(DiskStream(Path()).runner)


def verify(
    root: Path, *, everything: bool = False, table: StateRowReader | None = READER
) -> VerifyResult:
    """Verify once."""
    return Verification(
        "s", FileAudit(LocalStore(root)), from_first_entry=everything, row_reader=table
    ).run()


def first_difference(root: Path, **options: Any) -> Difference:
    """The difference that verify reports."""
    difference = verify(root, **options).difference
    assert difference is not None
    return difference


def paths(root: Path, pattern: str) -> list[Path]:
    """Files below the output path, by name."""
    matching = sorted(root.glob(pattern))
    assert matching
    return matching


def flip_bit(content: bytes, bit: int) -> bytes:
    """The same bytes with one bit flipped."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
