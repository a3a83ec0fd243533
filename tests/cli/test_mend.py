"""What a repair says of findings that it met again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from seriatim.cli.mend import still_so
from seriatim.core.integrity import Finding


@pytest.mark.parametrize(
    ("cause", "why"), [("", "expected sequence 78, found sequence 79"), ("unexplained", "unexplained")]
)
def test_a_finding_that_is_still_so_says_why(cause: str, why: str) -> None:
    """A message that a producer never sent has no cause of Kafka's: what was expected and found says it."""
    finding = Finding(finding="sequence gap", topic="a", partition=0, offset=337, cause=cause)
    finding = replace(finding, expected="sequence 78", found="sequence 79")
    assert still_so("demo", finding) == f"demo a/0: sequence gap at offset 337 is still so: {why}"
