"""Errors, sorted by what the human must do.

SeriatimError
 ├─ ConfigError          exit 2   fix a file or an argument
 │   └─ MissingTopicsError        no topic of the stream is there yet
 ├─ IntegrityError       exit 3   the data is damaged: read the findings, repair; never retried
 │   └─ DamagedFileError          a committed file is not as committed; `path` says which
 ├─ PlatformError        exit 4   Kafka, Spark, disk or network: retry, then look at the infrastructure
 │   ├─ FencedError      exit 5   another run moved the frontier, and there is still work
 │   └─ KafkaSilentError          no broker answered
 └─ BrokenPromiseError   exit 1   our bug: report it

Every error has typed fields, survives pickling (it crosses the process borders of Spark and
Airflow), and names the next thing to do. `render()` makes the one screen that a person sees. A
subclass without an exit code of its own exists for code that must tell cases apart; people see its
parent's name.

Next: engine/failure.py makes an error a value for another process; engine/findings.py has the findings.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

LABEL_WIDTH = 10


class SeriatimError(Exception):
    """The root of all errors. `fields` are shown in order; `next` is what the person should do."""

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

    def render(self, *, with_title: bool = True) -> str:
        """The error as a person reads it: a headline, the facts, what to do. Without its title it can
        stand as a note among others.
        """
        facts = {name: value for name, value in self.fields.items() if value not in ("", None)}
        facts["next"] = self.next
        headline = self.headline() if with_title else self.message
        return render_screen(headline, facts)

    def headline(self) -> str:
        """What kind of error it is, and what it says, without the facts."""
        return f"{self.title}: {self.message}"


class ConfigError(SeriatimError):
    """A file or an argument is wrong."""

    exit_code = 2
    title = "ConfigError"


class MissingTopicsError(ConfigError):
    """No topic matches a stream that was never run. Its topics may come later, or their name in the
    stream file is wrong; only a person can tell.
    """


class IntegrityError(SeriatimError):
    """The data is damaged. Retrying cannot help."""

    exit_code = 3
    title = "IntegrityError"


class DamagedFileError(IntegrityError):
    """A committed file was changed or lost after it was committed."""

    def __init__(self, message: str, *, path: str, next: str = "", **fields: Any) -> None:
        super().__init__(message, next=next, **fields)
        self.path = path
        """The path of the file, as in the ledger."""


class PlatformError(SeriatimError):
    """Kafka, Spark, a disk or the network failed: retry, then look at the infrastructure."""

    exit_code = 4
    title = "PlatformError"


class KafkaSilentError(PlatformError):
    """No broker answered. A command for several streams does not wait for it again."""


class FencedError(PlatformError):
    """Another run moved the frontier while this one was folding. Nothing was written."""

    exit_code = 5
    title = "FencedError"


class BrokenPromiseError(SeriatimError):
    """A promise of the code does not hold: a bug in Seriatim."""

    exit_code = 1
    title = "BrokenPromiseError"


SIGKILL_CAUSE = "by the kernel, because the host or the container ran out of memory, or by somebody"
SIGKILL_ADVICE = (
    "see which: `dmesg` or `journalctl -k` names what the kernel ended; a container's memory limit is in its own\n"
    "events (OOMKilled). If it was memory: lower --messages-max or SERIATIM_SPARK_DRIVER_MEMORY, or raise that limit"
)
"""Cause and advice for a process that ended by signal 9. No process can catch that signal, so it
leaves no message of its own.
"""


def render_screen(headline: str, facts: dict[str, Any]) -> str:
    """A headline and its facts: labels in one column, further lines of a fact aligned below it."""
    lines = [headline]
    for label, fact in facts.items():
        if fact in ("", None):
            continue
        margin = label.replace("_", " ")
        for line in str(fact).splitlines() or [""]:
            lines.append(f"  {margin:<{LABEL_WIDTH}} {line}")
            margin = ""
    return "\n".join(lines)


def ensure(holds: bool, promise: str, **fields: Any) -> None:
    """Raise when a promise does not hold. Unlike `assert` it also works under `python -O`."""
    if not holds:
        raise_broken_promise(promise, **fields)


def raise_broken_promise(promise: str, **fields: Any) -> NoReturn:
    """Raise the error of a broken promise, which is our bug."""
    raise BrokenPromiseError(promise, next="report this as a bug, with the lines above", **fields)


def _rebuild(cls: type[SeriatimError], message: str, attributes: dict[str, Any]) -> SeriatimError:
    # The class is not called, because a subclass may take other arguments than its parent.
    error = cls.__new__(cls, message)
    vars(error).update(attributes)
    return error
