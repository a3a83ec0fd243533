"""Exit codes become typed errors, in the words of the process that ended."""

from __future__ import annotations

import pytest

from seriatim.airflow.outcome import error_of, screen_of
from seriatim.core.errors import BrokenPromiseError, ConfigError, FencedError, IntegrityError, PlatformError

SCREEN = [
    "GapError: orders a/3: gap at offset 7",
    "  next       seriatim repair orders",
    "",
    "IntegrityError: orders: 1 new finding in a/3",
    "  next       read the findings above",
    "             and act",
    "after it",
]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, ConfigError),
        (3, IntegrityError),
        (4, PlatformError),
        (5, FencedError),
        (-9, PlatformError),
        (137, PlatformError),
    ],
)
def test_a_code_is_a_kind_of_error(code: int, kind: type[Exception]) -> None:
    """What is not ours is trouble of the platform: it may be tried again."""
    assert type(error_of("seriatim run", code, [])) is kind


def test_code_1_is_our_bug_only_where_our_screen_says_so() -> None:
    """Spark's launcher ends with 1 as well when it cannot start."""
    assert type(error_of("x", 1, ["BrokenPromiseError: oh"])) is BrokenPromiseError
    assert type(error_of("x", 1, ['Exception in thread "main" java.lang.Error'])) is PlatformError


def test_the_last_screen_is_the_error() -> None:
    """Headline, facts, what to do; findings before it and lines after it are not part of it."""
    error = error_of("seriatim run", 3, SCREEN)
    assert error.message == "orders: 1 new finding in a/3"
    assert error.next == "read the findings above\nand act"
    assert screen_of(SCREEN).splitlines() == SCREEN[3:6]


def test_an_error_told_to_a_script_is_told_to_people_as_well() -> None:
    """Tasks that read a command's JSON get its errors as JSON, too: the mail says what a screen would."""
    line = '{"error":"IntegrityError","message":"orders: a file is gone","cause":"deleted","next":"seriatim repair"}'
    error = error_of("seriatim publish", 3, ["first", line])
    assert (type(error), error.message, error.next) == (IntegrityError, "orders: a file is gone", "seriatim repair")
    assert "cause" in screen_of([line])
    assert screen_of(['{"error": cut']) == screen_of(['{"error":"x"']) == ""


def test_a_process_without_a_word_still_says_how_it_ended() -> None:
    """By a signal, or by a code; and what that means."""
    assert error_of("seriatim run", -9, ["x"]).message == "seriatim run was ended by signal 9 and left no word"
    assert "goes on from the last commit" in error_of("seriatim run", 137, []).next
    assert screen_of(["x"]) == ""


def test_a_screen_of_another_kind_than_the_code_is_not_believed() -> None:
    """A retry that is reported as over is not this attempt's end."""
    assert type(error_of("x", 4, SCREEN)) is PlatformError
    assert "ended with code 4" in error_of("x", 4, SCREEN).message


@pytest.mark.parametrize("code", [-9, 137])
def test_a_killed_process_is_told_as_killed(code: int) -> None:
    """A shell reports signal 9 as 137. By whom is not known: the mail says where that can be read."""
    error = error_of("seriatim run", code, [])
    assert error.message == "seriatim run was ended by signal 9 and left no word"
    for words in ("dmesg", "memory limit", "from the last commit"):
        assert words in error.next
