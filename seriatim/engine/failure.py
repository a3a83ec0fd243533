"""Failures: an error of ours as a value, so that another process can raise it again. Pure.

There are three such borders. A Spark task returns its failure inside its result (engine/task.py), a
piece of work answers with one (workers.py), and a command that a scheduler started leaves a
`CommandOutcome` in a file (cli/__init__.py writes it, airflow/outcome.py reads it). The error is
rendered for a person only at its destination; nothing reads a rendered error.

Next: errors.py has the tree of errors; engine/findings.py has the findings.
"""

from __future__ import annotations

import traceback
from typing import Any

from msgspec import Struct, field

from seriatim.engine.findings import Finding, FindingsError
from seriatim.errors import (
    BrokenPromiseError,
    ConfigError,
    DamagedFileError,
    FencedError,
    IntegrityError,
    KafkaSilentError,
    MissingTopicsError,
    PlatformError,
    SeriatimError,
)

FieldValue = str | int | float | bool | None

ERROR_CLASSES: dict[str, type[SeriatimError]] = {
    error_class.__name__: error_class
    for error_class in (
        SeriatimError,
        BrokenPromiseError,
        ConfigError,
        MissingTopicsError,
        IntegrityError,
        DamagedFileError,
        FindingsError,
        PlatformError,
        FencedError,
        KafkaSilentError,
    )
}
"""Errors that cross a border with their own class. Any other crosses as its nearest parent."""

LOOK_AT_WORKERS = "look at the disk, memory and network of the workers, then run again"
INTEGER_MAX = 2**63
"""Numbers from here on do not fit into MessagePack. They cross as text."""


class Failure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as a value."""

    error: str
    """The name of its class in `ERROR_CLASSES`."""
    message: str
    next: str = ""
    fields: dict[str, FieldValue] = field(default_factory=dict)
    """The facts that the error's screen shows, in order."""
    path: str = ""
    """Of a `DamagedFileError`."""
    findings: tuple[Finding, ...] = ()
    """Of a `FindingsError`."""

    @classmethod
    def of(cls, error: SeriatimError) -> Failure:
        """The value of an error."""
        fields: dict[str, FieldValue] = {}
        for name, value in error.fields.items():
            fields[name] = _plain(value)
        path = ""
        if isinstance(error, DamagedFileError):
            path = error.path
        findings: tuple[Finding, ...] = ()
        if isinstance(error, FindingsError):
            findings = error.findings
        return cls(
            error=_crossing_class(error).__name__,
            message=_text(error.message),
            next=_text(error.next),
            fields=fields,
            path=path,
            findings=findings,
        )

    def to_error(self) -> SeriatimError:
        """The error, ready to be raised. A class that this version does not know becomes a
        `PlatformError`.
        """
        error_class = ERROR_CLASSES.get(self.error, PlatformError)
        details: dict[str, Any] = {}
        if error_class is DamagedFileError:
            details["path"] = self.path
        if error_class is FindingsError:
            details["findings"] = self.findings
        error = error_class(self.message, next=self.next, **details)
        error.fields = dict(self.fields)
        return error


def as_worker_error(where: str, error: Exception) -> SeriatimError:
    """An error of ours, with advice, for what a worker raised. `where` names its piece of work."""
    if isinstance(error, SeriatimError):
        if isinstance(error, PlatformError) and not error.next:
            error.next = LOOK_AT_WORKERS
        return error
    message = f"{where}: {type(error).__name__}: {error}"
    if isinstance(error, OSError | MemoryError):
        return PlatformError(message, next=LOOK_AT_WORKERS)
    last_lines = "".join(traceback.format_exception(error)[-6:])
    return BrokenPromiseError(
        message, detail=last_lines, next="report this as a bug, with the lines above"
    )


class CommandOutcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a command ended, for the process that started it."""

    exit_code: int
    failure: Failure | None = None
    """None: it succeeded, or ended without an error of ours (for example because of a wrong option)."""


def _crossing_class(error: SeriatimError) -> type[SeriatimError]:
    """The nearest class of an error that other processes know."""
    for parent in type(error).__mro__:
        if parent in ERROR_CLASSES.values():
            return ERROR_CLASSES[parent.__name__]
    return SeriatimError


def _plain(value: Any) -> FieldValue:
    if isinstance(value, bool | float) or value is None:
        return value
    if isinstance(value, int) and -INTEGER_MAX <= value < INTEGER_MAX:
        return value
    return _text(str(value))


def _text(text: str) -> str:
    # JSON and MessagePack refuse lone surrogates, which file names may have.
    return text.encode("utf-8", "replace").decode()
