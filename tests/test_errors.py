"""Errors: they cross processes whole, and fit on one screen."""

from __future__ import annotations

import pickle

import pytest

from seriatim import errors
from seriatim.engine.findings import Finding, FindingsError
from seriatim.errors import BrokenPromiseError, DamagedFileError, SeriatimError, ensure
from seriatim.operations.run_request import RefusedValueError

KINDS = [
    errors.ConfigError,
    errors.IntegrityError,
    errors.PlatformError,
    errors.FencedError,
    BrokenPromiseError,
]


@pytest.mark.parametrize("kind", [SeriatimError, *KINDS])
def test_errors_survive_pickling(kind: type[SeriatimError]) -> None:
    """Spark and Airflow hand errors from process to process; nothing of them may get lost."""
    error = kind("orders: something", next="do this", found=[1, 2], cause="that")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (back.message, back.next, back.fields, str(back)) == (
        error.message,
        "do this",
        error.fields,
        str(error),
    )
    assert back.render() == error.render()


@pytest.mark.parametrize(
    "error",
    [
        DamagedFileError("records/a is missing", path="records/a", next="repair", cause="lost"),
        FindingsError(
            "s: 1 new finding",
            findings=[Finding(finding="gap", topic="a", partition=0)],
            next="look",
        ),
        RefusedValueError("until", "found 'x'", "an offset"),
        errors.KafkaSilentError("Kafka does not answer", next="check it"),
    ],
)
def test_special_cases_survive_pickling_and_show_their_parents_name(error: SeriatimError) -> None:
    """Code tells them apart by class and attributes; people and scripts see the five names that
    there are.
    """
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)
    assert back.title == next(kind for kind in KINDS if isinstance(error, kind)).__name__
    assert back.render().startswith(f"{back.title}: ")


def test_exit_codes_say_what_to_do() -> None:
    """People script against these."""
    assert {kind.__name__: kind.exit_code for kind in KINDS} == {
        "ConfigError": 2,
        "IntegrityError": 3,
        "PlatformError": 4,
        "FencedError": 5,
        "BrokenPromiseError": 1,
    }
    assert issubclass(errors.FencedError, errors.PlatformError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Every error is drawn once, with its exit code."""
    for kind in KINDS:
        assert f"{kind.__name__}" in (errors.__doc__ or "")
        line = next(line for line in (errors.__doc__ or "").splitlines() if kind.__name__ in line)
        assert f"exit {kind.exit_code}" in line


def test_facts_are_shown_in_one_column() -> None:
    """A person reads a headline, the facts in order, what to do; empty facts are left out."""
    shown = errors.ConfigError(
        "a.toml: tier", allowed="none\nstrict", found="", next="fix tier"
    ).render()
    assert shown.splitlines() == [
        "ConfigError: a.toml: tier",
        "  allowed    none",
        "             strict",
        "  next       fix tier",
    ]


def test_a_broken_promise_is_ours() -> None:
    """`ensure` raises with its facts, and asks for a report."""
    ensure(True, "fine")
    with pytest.raises(BrokenPromiseError, match="goes back") as raised:
        ensure(False, "a slice never goes back", until=3)
    assert raised.value.fields == {"until": 3}
    assert "report" in raised.value.next
