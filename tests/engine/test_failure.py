"""Failures: an error written down in one process is the same error in another."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seriatim.alerts.incidents import MailRefusedError
from seriatim.engine.failure import ERROR_CLASSES, CommandOutcome, Failure
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
from seriatim.operations.run_request import RefusedValueError

FINDINGS = (
    Finding(finding="truncated", topic="a", partition=3, offset=9, log_end=7, found="log end 7"),
    Finding(finding="raised", topic="a", partition=0, offset=4, session="s\n1", level="warning"),
)
FACTS: dict[str, Any] = {
    "next": "do this\nand that",
    "cause": "two\nlines",
    "offset": 7,
    "share": 0.5,
    "sure": True,
}
ERRORS: list[SeriatimError] = [
    SeriatimError("orders: something", **FACTS),
    BrokenPromiseError("orders: something", **FACTS),
    ConfigError("orders: something", **FACTS),
    MissingTopicsError("orders: something", **FACTS),
    IntegrityError("orders: something", **FACTS),
    DamagedFileError("orders: something", path="records/a/0/x.parquet", **FACTS),
    FindingsError("orders: something", findings=FINDINGS, **FACTS),
    PlatformError("orders: something", **FACTS),
    FencedError("orders: something", **FACTS),
    KafkaSilentError("orders: something", **FACTS),
]


def through_json(error: SeriatimError) -> SeriatimError:
    """An error on its way through an outcome file."""
    outcome = CommandOutcome(exit_code=error.exit_code, failure=Failure.of(error))
    back = msgspec.json.decode(msgspec.json.encode(outcome), type=CommandOutcome)
    assert back.failure is not None
    return back.failure.to_error()


def through_msgpack(error: SeriatimError) -> SeriatimError:
    """An error on its way from a Spark task to the driver."""
    return msgspec.msgpack.decode(
        msgspec.msgpack.encode(Failure.of(error)), type=Failure
    ).to_error()


def through_pickle(error: SeriatimError) -> SeriatimError:
    """A failure as Spark or Airflow may hand it on."""
    back: Failure = pickle.loads(pickle.dumps(Failure.of(error)))
    return back.to_error()


def test_every_error_class_is_tried() -> None:
    """A new one must cross the border, too."""
    assert [type(error).__name__ for error in ERRORS] == list(ERROR_CLASSES)


@pytest.mark.parametrize("way", [through_json, through_msgpack, through_pickle])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_crosses_a_border_whole(way: Any, error: SeriatimError) -> None:
    """Its class, its words, its facts in their order, its path and its findings; and so its screen."""
    back = way(error)
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert list(back.fields) == list(error.fields)
    assert back.render() == error.render()
    assert back.exit_code == error.exit_code


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (RefusedValueError("until", "found 'x'", "an offset"), ConfigError),
        (MailRefusedError("the server says no", next="read it"), PlatformError),
    ],
)
def test_an_error_of_one_module_crosses_as_its_parent(
    error: SeriatimError, known: type[SeriatimError]
) -> None:
    """What its class knows beside its words is of use only where it was raised."""
    back = through_json(error)
    assert (type(back), back.message, back.next, back.fields) == (
        known,
        error.message,
        error.next,
        error.fields,
    )


def test_an_error_of_a_later_version_is_trouble_of_the_platform() -> None:
    """A class that is not known here: its words are told, and it may be tried again."""
    assert type(Failure(error="NewError", message="new").to_error()) is PlatformError


def test_any_fact_can_be_written_down() -> None:
    """What no format takes crosses as the text that its screen shows."""
    facts = {"files": [Path("a")], "huge": 1 << 70, "name": "\udcff", "none": None, "nothing": ""}
    error = BrokenPromiseError("bad \udcff", **facts)
    for way in (through_json, through_msgpack):
        back = way(error)
        assert back.message == "bad ?"
        assert back.fields == {
            "files": str([Path("a")]),
            "huge": str(1 << 70),
            "name": "?",
            "none": None,
            "nothing": "",
        }


def test_a_fact_may_have_any_name() -> None:
    """Also one that an argument has: facts are not handed over as arguments."""
    for name in ("message", "path", "findings", "next"):
        given = Failure(error="IntegrityError", message="m", fields={name: "x"})
        assert given.to_error().fields == {name: "x"}
