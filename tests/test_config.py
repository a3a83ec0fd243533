"""Settings: environment over file over defaults; relative folders are the project's; no secret in a
shared file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seriatim import config
from seriatim.errors import ConfigError


def test_folders_are_taken_from_the_project(tmp_path: Path) -> None:
    """Airflow's processes have another working folder: what they are told counts."""
    (tmp_path / "seriatim.toml").write_text('streams = "ours"\nsmtp = "mail:25"\n')
    made = config.load_settings({"SERIATIM_HOME": str(tmp_path / "home")}, tmp_path)
    assert (made.streams, made.smtp) == (tmp_path / "ours", "mail:25")
    assert made.outbox == str(tmp_path / "home" / "outbox")


def test_the_cache_is_in_the_home_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if seriatim.toml says where that is: it may be 4 GB, for which the user's own disk has no
    room.
    """
    (tmp_path / "seriatim.toml").write_text('home = "ours"\n')
    monkeypatch.delenv("SERIATIM_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "default"))
    monkeypatch.chdir(tmp_path)
    assert config.cache_folder() == tmp_path / "ours" / "cache"
    monkeypatch.setenv("SERIATIM_HOME", str(tmp_path / "told"))
    assert config.cache_folder() == tmp_path / "told" / "cache"


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    """One setting, two places."""
    (tmp_path / "seriatim.toml").write_text('smtp = "mail:25"\noutbox = "box"\n')
    made = config.load_settings(
        {"SERIATIM_SMTP": "other:26", "SERIATIM_STREAMS": "/elsewhere"}, tmp_path
    )
    assert (made.smtp, made.streams, made.outbox) == (
        "other:26",
        Path("/elsewhere"),
        str(tmp_path / "box"),
    )


@pytest.mark.parametrize("name", ["kafka_config", "ivy_settings", "smtp_password_file"])
def test_a_home_in_a_path_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell replaces `~` in seriatim.toml. A home that does not exist is refused by name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "seriatim.toml").write_text(f'{name} = "~/mine"\n')
    assert getattr(config.load_settings({}, tmp_path), name) == tmp_path / "mine"
    (tmp_path / "seriatim.toml").write_text(f'{name} = "~no-such-user/mine"\n')
    with pytest.raises(ConfigError, match=f"settings: {name}: .*there is no such home"):
        config.load_settings({}, tmp_path)


def test_an_outbox_may_be_in_a_bucket(tmp_path: Path) -> None:
    """Tasks that share no folder share a bucket. Its address is kept as it is."""
    made = config.load_settings({"SERIATIM_OUTBOX": "s3://bucket/outbox"}, tmp_path)
    assert made.outbox == "s3://bucket/outbox"


def test_a_password_in_the_file_is_refused(tmp_path: Path) -> None:
    """It is in nobody's error text; the environment and a file of its own may have it."""
    (tmp_path / "seriatim.toml").write_text('smtp_password = "canary"\n')
    with pytest.raises(ConfigError) as refused:
        config.load_settings({}, tmp_path)
    assert "canary" not in refused.value.render()
    assert "smtp_password_file" in refused.value.next
    (tmp_path / "seriatim.toml").write_text('smtp_password_file = "secret"\n')
    assert (
        config.load_settings({"SERIATIM_SMTP_PASSWORD": "canary"}, tmp_path).smtp_password
        == "canary"
    )


def test_a_wrong_choice_is_refused(tmp_path: Path) -> None:
    """With the setting named."""
    with pytest.raises(ConfigError, match="smtp_tls"):
        config.load_settings({"SERIATIM_SMTP_TLS": "maybe"}, tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SERIATIM_SPARK_MASTER", "sc://spark:15002", "SERIATIM_SPARK_REMOTE"),
        ("SERIATIM_SPARK_MASTER", "spark:7077", "spark://HOST:PORT"),
        ("SERIATIM_SPARK_MASTER", "10.0.0.7", "spark://HOST:PORT"),
        ("SERIATIM_SPARK_REMOTE", "spark:15002", "sc://HOST:PORT"),
        ("SERIATIM_SPARK_REMOTE", "spark://spark:7077", "sc://HOST:PORT"),
        ("SERIATIM_SPARK_EXECUTOR_WAIT_SECONDS", "-1", "spark_executor_wait_seconds"),
        ("SERIATIM_SPARK_RECORDS_MIN", "-1", "spark_records_min"),
    ],
)
def test_an_address_of_another_kind_is_refused(
    tmp_path: Path, variable: str, value: str, words: str
) -> None:
    """Before Spark is started, which would say it late or not at all."""
    with pytest.raises(ConfigError) as refused:
        config.load_settings({"HOME": str(tmp_path), variable: value}, tmp_path)
    assert words in refused.value.render()


@pytest.mark.parametrize(
    "master",
    ["local", "local[2,4]", "local-cluster[2,1,1024]", "yarn", "spark://a:1,b:2", "k8s://a"],
)
def test_every_master_of_spark_is_taken(tmp_path: Path, master: str) -> None:
    """Also of a cluster manager that we do not know, if it has an address."""
    settings = config.load_settings(
        {"HOME": str(tmp_path), "SERIATIM_SPARK_MASTER": master}, tmp_path
    )
    assert settings.spark_master == master


def test_a_password_is_in_no_text_of_settings() -> None:
    """Whoever prints them, in a log or an error, prints no secret."""
    settings = config.load_settings(
        {"SERIATIM_SMTP_PASSWORD": "canary-77", "SERIATIM_SMTP": "mail:25"}
    )
    assert settings.smtp_password == "canary-77"
    assert "canary" not in f"{settings} {settings!r}"
    assert "mail:25" in repr(settings)


def test_each_secret_setting_is_hidden_and_refused_in_the_shared_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line in `SECRET_SETTINGS` does both. A secret without a setting for a file belongs into the
    environment.
    """
    monkeypatch.setattr(config, "SECRET_SETTINGS", ("smtp_password", "airflow_url"))
    environ = {"SERIATIM_AIRFLOW_URL": "https://canary-77"}
    assert "canary" not in repr(config.load_settings(environ, tmp_path))
    (tmp_path / "seriatim.toml").write_text('airflow_url = "https://canary-77"\n')
    with pytest.raises(ConfigError, match="airflow_url: a secret") as refused:
        config.load_settings({}, tmp_path)
    assert refused.value.next == "set SERIATIM_AIRFLOW_URL in the environment"


@pytest.mark.parametrize("name", ["HOME", "STREAMS", "OUTBOX"])
def test_the_home_of_nobody_is_refused(name: str, tmp_path: Path) -> None:
    """The setting is named; nobody reads of a RuntimeError."""
    with pytest.raises(ConfigError, match=f"settings: {name.lower()}: ~nobody-here/x") as refused:
        config.load_settings({f"SERIATIM_{name}": "~nobody-here/x"}, tmp_path)
    assert f"SERIATIM_{name}" in refused.value.next


def test_a_named_connection_is_a_section_of_a_file_and_variables(tmp_path: Path) -> None:
    """Variables win. Each kind has its own names."""
    path = tmp_path / "connections.toml"
    path.write_text(
        '[kafka.west]\n"bootstrap.servers" = "a:1"\n"client.id" = "x"\n[store.west]\nregion = "r"\n'
    )
    path.chmod(0o600)
    environ = {"SERIATIM_CONNECTIONS": str(path), "SERIATIM_KAFKA_WEST_CLIENT_ID": "y"}
    assert config.named_connection("kafka", "west", environ) == {
        "bootstrap.servers": "a:1",
        "client.id": "x",
        "client_id": "y",
    }
    assert config.named_connection("store", "west", environ) == {"region": "r"}
    with pytest.raises(ConfigError, match="there is no kafka named 'east'"):
        config.named_connection("kafka", "east", environ)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root")
def test_a_secret_that_root_gives_to_a_group_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts it for a process without root's rights; but not one that all may read."""
    path = tmp_path / "mounted"
    path.write_text("password = x\n")
    path.chmod(0o440)
    with pytest.raises(ConfigError, match="can be read by others"):
        config.read_private_text(path, "VARIABLE")
    monkeypatch.setattr(os, "geteuid", lambda: 50_000)
    assert config.read_private_text(path, "VARIABLE") == "password = x\n"
    path.chmod(0o444)
    with pytest.raises(ConfigError, match=r"VARIABLE: .* can be read by others") as caught:
        config.read_private_text(path, "VARIABLE")
    assert caught.value.next == f"chmod 640 {path}"
