"""Errors, sorted by what the human must do.

SeriatimError
 ├─ ConfigError          exit 2   fix a file or an argument
 ├─ IntegrityError       exit 3   the data is hurt: read the findings, repair; never retried
 │   └─ DamagedFileError          a committed file is not as committed; `path` says which
 ├─ PlatformError        exit 4   Kafka, Spark, disk or network: retry, then look at the infrastructure
 │   ├─ FencedError      exit 5   another run moved the frontier, and there is still work
 │   └─ KafkaSilentError          no broker answered
 └─ BrokenPromiseError   exit 1   our bug: report it

Every error carries typed fields, survives pickling (it crosses Spark's and Airflow's process
borders), and names the next thing to do. `render()` is what a person sees: one screen. A subclass
without an exit code of its own is for code that must tell cases apart: people see its parent's
name.

Next room: failure.py writes an error down for another process; integrity.py has the findings.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

LABEL_WIDTH = 10


class SeriatimError(Exception):
    """The root. `fields` are shown in order; `next` is the command or deed that helps."""

    exit_code: ClassVar[int] = 1
    title: ClassVar[str] = "SeriatimError"
    """The name that people and scripts see."""

    def __init__(self, message: str, *, next: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.next = next
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(vars(self)))

    def render(self) -> str:
        """The error as a person reads it: a headline, the facts, what to do."""
        facts = {**{k: v for k, v in self.fields.items() if v not in ("", None)}, "next": self.next}
        return render_screen(f"{self.title}: {self.message}", facts)


class ConfigError(SeriatimError):
    """A file or an argument is wrong."""

    exit_code = 2
    title = "ConfigError"


class IntegrityError(SeriatimError):
    """The data is hurt. Retrying cannot help."""

    exit_code = 3
    title = "IntegrityError"


class DamagedFileError(IntegrityError):
    """A committed file was changed or lost after it was committed."""

    def __init__(self, message: str, *, path: str, next: str = "", **fields: Any) -> None:
        super().__init__(message, next=next, **fields)
        self.path = path
        """As the ledger names it."""


class PlatformError(SeriatimError):
    """The world around us failed: retry, then look at the infrastructure."""

    exit_code = 4
    title = "PlatformError"


class KafkaSilentError(PlatformError):
    """No broker answered: whoever asks for several streams need not wait for it again."""


class FencedError(PlatformError):
    """Another run moved the frontier while this one was folding. Nothing was written."""

    exit_code = 5
    title = "FencedError"


class BrokenPromiseError(SeriatimError):
    """We broke our own promise: a bug in Seriatim."""

    exit_code = 1
    title = "BrokenPromiseError"


SIGKILL_CAUSE = (
    "by the kernel, because the machine or the container ran out of memory, or by somebody"
)
SIGKILL_ADVICE = (
    "see which: `dmesg` or `journalctl -k` names what the kernel ended; a container's memory limit is in its own\n"
    "events (OOMKilled). If it was memory: lower --messages-max or SERIATIM_SPARK_DRIVER_MEMORY, or raise that limit"
)
"""Of a process that ended by signal 9. Nobody can catch that signal, so the process itself says
nothing.
"""


def render_screen(headline: str, facts: dict[str, Any]) -> str:
    """A headline and its facts, labels in one column, continuation lines aligned."""
    lines = [headline]
    for label, fact in facts.items():
        if fact in ("", None):
            continue
        first, *rest = str(fact).splitlines() or [""]
        lines.append(f"  {label.replace('_', ' '):<{LABEL_WIDTH}} {first}")
        lines += [f"  {'':<{LABEL_WIDTH}} {line}" for line in rest]
    return "\n".join(lines)


def ensure(holds: bool, promise: str, **fields: Any) -> None:
    """Raise when a promise does not hold. Unlike `assert` it also works under `python -O`."""
    if not holds:
        raise_broken_promise(promise, **fields)


def raise_broken_promise(promise: str, **fields: Any) -> NoReturn:
    """Raise the error that says: this is our bug."""
    raise BrokenPromiseError(promise, next="report this as a bug, with the lines above", **fields)


def _rebuild(cls: type[SeriatimError], message: str, attributes: dict[str, Any]) -> SeriatimError:
    # Not by calling the class: a subclass may take other arguments than its parent.
    error = cls.__new__(cls, message)
    vars(error).update(attributes)
    return error
