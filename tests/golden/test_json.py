"""The JSON of every command is the one of the golden files: keys, nesting, types, and values where
they are stable.

It is an interface that people script against. Made anew, for a deliberate change only, by `python
-m tests.golden.make json`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seriatim.embedded.broker import BrokerInfo
from tests.conftest import BROKER_HOME
from tests.golden.commands import FOLDER, GROUPS, doctor, embedded_server, file_of, pinned, recorded
from tests.golden.product import commands_with_json


@pytest.mark.parametrize("group", GROUPS)
def test_commands_print_what_scripts_expect(group: str) -> None:
    """Exit codes, the objects on stdout, and findings and errors on stderr are those of the golden
    files.
    """
    cases, expected = recorded(group), pinned(group)
    for name in expected:
        assert cases.get(name) == expected[name], name
    assert set(cases) == set(expected)


def test_every_command_with_json_is_pinned() -> None:
    """No command has the option --json without a golden file, and no golden file is of a command
    that is gone.
    """
    assert sorted(FOLDER.iterdir()) == sorted(file_of(name) for name in commands_with_json())


def test_doctor() -> None:
    """Every line of doctor is an object with these keys."""
    assert doctor() == pinned("doctor")


def test_the_embedded_broker(broker: BrokerInfo) -> None:
    """Where it listens, its process and its data; nulls and exit code 4 where none runs."""
    assert broker.pid
    assert embedded_server("kafka", Path(os.environ[BROKER_HOME])) == pinned("kafka")


@pytest.mark.usefixtures("s3_variables")
def test_the_embedded_s3_server() -> None:
    """Its address, bucket and process; nulls and exit code 4 where none runs."""
    assert embedded_server("s3", Path(os.environ[BROKER_HOME])) == pinned("s3")


@pytest.mark.usefixtures("spark_cluster")
def test_the_embedded_spark_cluster() -> None:
    """Its master, and the process and host of each worker; nulls and exit code 4 where none runs."""
    assert embedded_server("cluster", Path(os.environ[BROKER_HOME])) == pinned("cluster")
