"""What verify finds, as values. An error means that something is lost, changed or invented.

Next: operations/prove/chain.py and operations/prove/rules.py make differences; cli/verify.py shows
them.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from seriatim.errors import IntegrityError

RESTORE_ADVICE = (
    "restore {file} from a backup; `seriatim verify {stream} --all` then looks at everything again"
)
REPAIR_ADVICE = (
    "`seriatim repair {stream}` makes it again from Kafka, and shows how;"
    " or restore {file} from a backup"
)
RESTORE_LOG_ADVICE = (
    "restore records/_delta_log and manifests/ from a backup; nothing starts again from 0 by itself"
)


class Difference(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is not as it must be, and where."""

    description: str
    """One line, for people."""
    file: str = ""
    partition: str = ""
    offset: int = -1
    sequence: int = -1
    """The ledger entry."""
    session: str | None = None
    expected: str = ""
    found: str = ""
    cause: str = ""
    next: str = ""
    """What a person can do. `{stream}` and `{file}` in it are replaced by their names."""
    level: Literal["error", "warning"] = "error"

    def facts(self, stream: str) -> dict[str, Any]:
        """What is known, for a screen or for scripts."""
        facts = {
            "file": self.file,
            "partition": self.partition,
            "offset": self.offset if self.offset >= 0 else None,
            "entry": self.sequence if self.sequence >= 0 else None,
            "session": self.session,
            "expected": self.expected,
            "found": self.found,
            "cause": self.cause,
            "next": self.next.replace("{stream}", stream).replace("{file}", self.file),
        }
        return {name: value for name, value in facts.items() if value not in ("", None)}

    def to_error(self, stream: str) -> IntegrityError:
        """The difference as the error that ends a verify."""
        facts = self.facts(stream)
        advice = facts.pop("next", "")
        return IntegrityError(f"{stream}: {self.description}", next=advice, **facts)


class DifferenceError(Exception):
    """The first difference that is an error. It ends the verification, which reports it."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.description)
        self.difference = difference
