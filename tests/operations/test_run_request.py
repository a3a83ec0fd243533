"""Requests: what a person may ask of a run, and forty things that nobody may."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.operations.run_request import (
    RunRequest,
    command_arguments,
    parse_run_request,
    plan_arguments,
    repair_arguments,
)

ONE = ["prefix-a/3"]
HOSTILE: list[dict[str, Any]] = [
    {"action": "rm -rf /"},
    {"action": "run; id"},
    {"action": "RUN"},
    {"action": ["run"]},
    {"action": True},
    {"surprise": 1},
    {"topics": ["$(id)"], "action": "backfill"},
    {"topics": ["`id`"], "action": "backfill"},
    {"topics": ["a;b"], "action": "backfill"},
    {"topics": ["a|b"], "action": "backfill"},
    {"topics": ["../../etc/passwd"], "action": "backfill"},
    {"topics": [".."], "action": "backfill"},
    {"topics": ["(a+)+$"], "action": "backfill"},
    {"topics": ["prefix-.*"], "action": "backfill"},
    {"topics": ["{{ conn.x.password }}"], "action": "backfill"},
    {"topics": ["a\nb"], "action": "backfill"},
    {"topics": ["a\n"], "action": "backfill"},
    {"topics": ["a\x00"], "action": "backfill"},
    {"topics": ["x" * 250], "action": "backfill"},
    {"topics": ["a", "a"], "action": "backfill"},
    {"topics": "prefix-a", "action": "backfill"},
    {"topics": [1], "action": "backfill"},
    {"topics": [f"t{i}" for i in range(1001)], "action": "backfill"},
    {"topics": ["--apply"], "partitions": ONE, "action": "backfill"},
    {"partitions": ["prefix-a"], "action": "backfill"},
    {"partitions": ["prefix-a/-1"], "action": "backfill"},
    {"partitions": ["prefix-a/03"], "action": "backfill"},
    {"partitions": ["prefix-a/٣"], "action": "backfill"},
    {"partitions": ["../3"], "action": "backfill"},
    {"partitions": ONE, "from": "-5", "action": "backfill"},
    {"partitions": ONE, "from": 5, "action": "backfill"},
    {"partitions": ONE, "from": "9" * 19, "action": "backfill"},
    {"partitions": ONE, "from": "10", "until": "10", "action": "backfill"},
    {"partitions": ONE, "from": "10", "until": "9", "action": "backfill"},
    {"partitions": ONE, "from": "10", "until": "2026-11-16T08:00:00Z", "action": "backfill"},
    {"from": "2026-11-16T08:00:00Z", "until": "2026-11-16T07:00:00Z", "action": "backfill"},
    {"from": "2026-02-30T08:00:00Z", "action": "backfill"},
    {"from": "yesterday", "action": "backfill"},
    {"from": "10", "action": "backfill"},
    {"from": "10", "partitions": ["a/0", "a/1"], "action": "backfill"},
    {"from": "2026-11-16T08:00:00Z'; DROP TABLE x", "action": "backfill"},
    {"messages_max": 0},
    {"messages_max": -1},
    {"messages_max": 10**10},
    {"messages_max": 1.5},
    {"messages_max": "100"},
    {"dry_run": "yes"},
    {"action": "backfill"},
    {"action": "run", "from": "10", "partitions": ONE},
    {"action": "run", "topics": ["prefix-a"]},
    {"action": "run", "until": "2026-11-16T08:00:00Z"},
]


@pytest.mark.parametrize("given", HOSTILE, ids=lambda given: json.dumps(given)[:60])
def test_hostile_values_are_refused_with_a_text(given: dict[str, Any]) -> None:
    """Shell, paths, patterns, templates, lines, bounds, reversed ranges: the field is named, and
    what is allowed.
    """
    with pytest.raises(ConfigError) as refused:
        parse_run_request(given)
    assert refused.value.message.partition(":")[0] in {*given, "from", "partitions", "until"}
    assert refused.value.fields["allowed"]
    assert len(refused.value.render()) < 600


def test_there_are_forty_of_them() -> None:
    """As many as were promised, and none twice."""
    assert len({json.dumps(given) for given in HOSTILE}) >= 40


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_an_empty_form_is_a_plain_run(empty: Any) -> None:
    """Airflow shows an empty object as {}: that, None, and empty texts are the same."""
    given = {
        "topics": empty,
        "partitions": empty,
        "from": empty,
        "until": empty,
        "messages_max": empty,
    }
    assert parse_run_request({"action": "run", **given, "dry_run": False}) == RunRequest()
    assert command_arguments(RunRequest(), "orders") == ["run", "orders"]


def test_a_run_may_end_at_an_offset() -> None:
    """Of one partition, as `seriatim run` has it."""
    request = parse_run_request({"partitions": ONE, "until": "1200", "messages_max": 500})
    words = [
        "run",
        "orders",
        "--until-offsets",
        '{"prefix-a": {"3": 1200}}',
        "--messages-max",
        "500",
    ]
    assert command_arguments(request, "orders") == words


def test_a_backfill_of_an_offset_range() -> None:
    """One partition, from and until, word by word."""
    request = parse_run_request(
        {"action": "backfill", "partitions": ONE, "from": "10", "until": "20"}
    )
    words = ["backfill", "orders", "--partition", "prefix-a/3", "--from", "10", "--until", "20"]
    assert command_arguments(request, "orders") == words


def test_a_backfill_of_topics_by_time() -> None:
    """Times are UTC and keep the text they were written in."""
    request = parse_run_request(
        {"action": "backfill", "topics": ["prefix-a"], "from": "2026-11-16T08:00Z"}
    )
    assert request.start is not None
    assert request.start.time_ms == 1_794_816_000_000
    assert command_arguments(request, "orders")[2:] == [
        "--topic",
        "prefix-a",
        "--from",
        "2026-11-16T08:00Z",
    ]


def test_a_replay_goes_into_a_folder_of_its_own() -> None:
    """The range as for a backfill, and where to; nothing of it comes from the form but the range."""
    request = parse_run_request(
        {"action": "replay", "partitions": ONE, "from": "10", "until": "20"}
    )
    words = [
        "replay",
        "orders",
        "--partition",
        "prefix-a/3",
        "--from",
        "10",
        "--until",
        "20",
        "--to",
        "/scratch/1",
    ]
    assert command_arguments(request, "orders", "/scratch/1") == words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["plan", "orders"]),
        ({"messages_max": 5}, ["plan", "orders"]),
        (
            {"partitions": ONE, "until": "12"},
            ["plan", "orders", "--until-offsets", '{"prefix-a": {"3": 12}}'],
        ),
        (
            {"action": "replay", "partitions": ONE, "from": "1"},
            ["plan", "orders", "--partition", "prefix-a/3"],
        ),
        ({"action": "replay", "topics": ["prefix-a"]}, ["plan", "orders", "--topic", "prefix-a"]),
        (
            {"action": "backfill", "topics": ["a"]},
            ["backfill", "orders", "--topic", "a", "--dry-run"],
        ),
    ],
)
def test_a_plan_is_told_what_the_form_names(given: dict[str, Any], words: list[str]) -> None:
    """So that it can refuse a place that the stream does not have, before anything is folded."""
    assert plan_arguments(parse_run_request(given), "orders") == words


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("partitions", {"partitions": ["a/0", "a/1"]}),
        ("messages_max", {"partitions": ONE, "messages_max": 5}),
    ],
)
def test_what_a_replay_cannot_take_is_refused_by_name(field: str, more: dict[str, Any]) -> None:
    """Several partitions, a slice size."""
    with pytest.raises(ConfigError, match=f"^{field}: "):
        parse_run_request({"action": "replay", **more})


def test_whom_a_request_means() -> None:
    """The partitions named, those of the topics named, or all."""
    here, there = Partition("a", 0), Partition("b", 0)
    assert [RunRequest(topics=("a",)).includes(p) for p in (here, there)] == [True, False]
    assert [RunRequest(partitions=(there,)).includes(p) for p in (here, there)] == [False, True]
    assert RunRequest().includes(here)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"stream": "a/b"},
        {"stream": "../x"},
        {"stream": ["orders"]},
        {"stream": "orders", "partition": "a"},
        {"stream": "orders", "partition": ["a/0"]},
        {"stream": "orders", "session": "x\n--apply"},
        {"stream": "orders", "session": "x" * 1001},
        {"stream": "orders", "session": 7},
        {"stream": "orders", "from": "5"},
        {"stream": "orders", "partition": "a/0", "from": "2026-11-16T08:00Z"},
        {"stream": "orders", "forward": "yes"},
        {"stream": "orders", "apply": True},
    ],
)
def test_a_repair_takes_nothing_else(given: dict[str, Any]) -> None:
    """No lines, no lists, no options that the form does not have."""
    with pytest.raises(ConfigError):
        repair_arguments(given)


def test_a_repair_word_by_word() -> None:
    """A session that looks like an option stays a session."""
    assert repair_arguments({"stream": "orders", "partition": None, "session": "", "from": ""}) == [
        "repair",
        "orders",
    ]
    given = {
        "stream": "orders",
        "partition": "a/3",
        "session": "--apply",
        "from": "7",
        "forward": True,
    }
    words = ["repair", "orders", "--partition=a/3", "--session=--apply", "--from=7", "--forward"]
    assert repair_arguments(given) == words


def test_a_run_can_be_asked_to_trace_sessions() -> None:
    """Each name is one word of the command, whatever it begins with; a name that is none is
    refused.
    """
    request = parse_run_request({"trace": ["session-7", "--debug", "session-7"]})
    assert command_arguments(request, "orders") == [
        "run",
        "orders",
        "--trace=session-7",
        "--trace=--debug",
    ]
    for given in (["a\nb"], "session-7", [7], ["x" * 1001], [f"s{number}" for number in range(21)]):
        with pytest.raises(ConfigError, match="trace"):
            parse_run_request({"trace": given})
    with pytest.raises(ConfigError, match="is not traced"):
        parse_run_request({"action": "backfill", "topics": ["a"], "trace": ["s"]})
