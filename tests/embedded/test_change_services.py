"""The embedded PostgreSQL, and the settings of the connector that captures its changes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim.embedded import connect, postgres
from seriatim.embedded.postgres import PostgresInfo
from seriatim.errors import ConfigError

needs_postgres = pytest.mark.skipif(
    postgres.find_programs() is None, reason=f"no PostgreSQL: {postgres.INSTALL_ADVICE}"
)
INFO = PostgresInfo(5432, 1, "canary")


def silent(_: str) -> None:
    """Print nothing."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose server ends with the test."""
    yield tmp_path
    postgres.remove_postgres(tmp_path, silent)


def ask(server: PostgresInfo, statement: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a statement as a client."""
    return subprocess.run(
        [str(postgres.require_programs() / "psql"), "-qAtXc", statement],
        env={**os.environ, **server.client_environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
@needs_postgres
def test_postgres_starts_once_and_keeps_its_rows(home: Path) -> None:
    """A second start finds it; a start after a stop has the same port, password and rows."""
    server = postgres.start_postgres(home, silent)
    assert ask(server, "create table t (a int); insert into t values (7);").returncode == 0
    assert ask(server, "show wal_level").stdout == "logical\n"
    assert postgres.start_postgres(home, silent) == server
    assert postgres.stop_postgres(home, silent)
    assert not postgres.stop_postgres(home, silent)
    again = postgres.start_postgres(home, silent)
    assert (again.port, again.password) == (server.port, server.password)
    assert ask(again, "select a from t").stdout == "7\n"


@pytest.mark.full
@needs_postgres
def test_postgres_lets_nobody_in_without_its_password(home: Path) -> None:
    """Other users of this host reach its port, too."""
    server = postgres.start_postgres(home, silent)
    assert "password authentication failed" in ask(server, "select 1", PGPASSWORD="no").stderr
    assert (home / "postgres" / "client.properties").stat().st_mode & 0o777 == 0o600


@pytest.mark.full
@needs_postgres
def test_postgres_stops_while_a_client_is_connected(home: Path) -> None:
    """A connector holds its connection for ever, and a stop must not wait for it."""
    server = postgres.start_postgres(home, silent)
    with subprocess.Popen(
        [str(postgres.require_programs() / "psql"), "-qAtX"],
        env={**os.environ, **server.client_environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("select 1;\n")
        client.stdin.flush()
        assert client.stdout.readline() == "1\n"
        notices: list[str] = []
        assert postgres.stop_postgres(home, notices.append)
        assert notices == []  # it was not killed
        client.kill()


def test_a_host_without_postgres_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one part that we cannot bring along."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(postgres, "DEBIAN_PROGRAMS", tmp_path)
    with pytest.raises(ConfigError, match="PostgreSQL is not installed") as refused:
        postgres.start_postgres(tmp_path, silent)
    assert "apt-get install postgresql" in refused.value.next


def test_the_newest_version_of_debian_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 9 is older than version 15."""
    for version in ("9", "15", "common"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin" / "initdb").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(postgres, "DEBIAN_PROGRAMS", tmp_path)
    assert postgres.find_programs() == tmp_path / "15" / "bin"


def test_a_password_of_the_source_is_in_no_text() -> None:
    """Whoever prints the server prints no secret."""
    assert "canary" not in repr(INFO)


def test_a_connector_names_its_slot_as_postgres_allows() -> None:
    """Small letters, digits and _; a topic's name may have more than these."""
    settings = connect.debezium_settings(INFO, "Shop-1.x" * 20, "public.orders")
    assert len(settings["slot.name"]) < 63
    assert settings["slot.name"].startswith("seriatim_shop_1_xshop_1_x")
    assert settings["skipped.operations"] == "none"
