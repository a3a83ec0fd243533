"""docker-compose.yaml, validated without Docker: structure, names, paths, ports, users, secrets."""

from __future__ import annotations

import re
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.cli import cli_parser

from seriatim.config import ENVIRONMENT_PREFIX, Settings
from seriatim.embedded import cluster, s3

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docker-compose.yaml").read_text()
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
DEPLOYING = (ROOT / "docs" / "DEPLOY.md").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
KEYS = {
    "build", "image", "user", "restart", "environment", "volumes", "depends_on", "command", "ports", "healthcheck",
    "profiles", "entrypoint", "read_only", "tmpfs",
}  # fmt: skip
SECRETS = ("PASSWORD", "SECRET", "KEY", "TOKEN")
ONE_SHOT = {"init"}
ROOTS = {None, "root", "0", "0:0"}


@pytest.fixture(scope="module")
def airflow_settings() -> set[str]:
    """Every setting that this Airflow knows, as an environment variable."""
    known = yaml.safe_load(
        (Path(str(files("airflow"))) / "config_templates" / "config.yml").read_text()
    )
    return {
        f"AIRFLOW__{section.upper()}__{name.upper()}"
        for section, told in known.items()
        for name in told["options"]
    }


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_whole(name: str) -> None:
    """Only keys that compose knows; an image with a tag; not root; a health check; dependencies
    that are there.
    """
    service = SERVICES[name]
    assert set(service) <= KEYS
    assert re.fullmatch(r"[a-z0-9][a-z0-9./-]*:[A-Za-z0-9._-]+", service["image"])
    assert not service["image"].endswith(":latest")
    assert service.get("user") not in ROOTS
    assert name in ONE_SHOT or service["healthcheck"]["test"][0] == "CMD"
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    for needed, how in service.get("depends_on", {}).items():
        wanted = "service_completed_successfully" if needed in ONE_SHOT else "service_healthy"
        assert how == {"condition": wanted}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_it_listens_here_alone(name: str) -> None:
    """Every published port is of 127.0.0.1, and none is published twice."""
    ports = SERVICES[name].get("ports", [])
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
    others = [
        port
        for other, service in SERVICES.items()
        if other != name
        for port in service.get("ports", [])
    ]
    assert not {port.split(":")[1] for port in ports} & {port.split(":")[1] for port in others}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_what_is_mounted_is_there(name: str) -> None:
    """Folders of the repository exist, volumes are declared."""
    for mount in SERVICES[name].get("volumes", []):
        source = mount.split(":")[0]
        assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_every_volume_is_used() -> None:
    """None is left over."""
    used = {
        mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])
    }
    assert set(COMPOSE["volumes"]) == {source for source in used if not source.startswith(".")}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_settings_have_names_that_somebody_reads(name: str, airflow_settings: set[str]) -> None:
    """A setting with a typo would be ignored without a word."""
    ours = {f"{ENVIRONMENT_PREFIX}{field.upper()}" for field in Settings.__struct_fields__}
    for key in SERVICES[name].get("environment", {}):
        assert not key.startswith(ENVIRONMENT_PREFIX) or key in ours
        assert not key.startswith("AIRFLOW__") or key in airflow_settings


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_secret_has_a_default(name: str) -> None:
    """Each comes from outside, and its absence is said: by compose, or for a bucket, which not everybody
    has, by whoever needs it.
    """
    for key, value in SERVICES[name].get("environment", {}).items():
        if key.startswith("AWS_"):
            assert value is None
            continue
        if any(part in key.rpartition("__")[2].split("_") for part in SECRETS) and not key.endswith(
            "_FILE"
        ):
            assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", str(value)), key
    assert not re.search(r"\$\{\w+(:-[^}]*)?\}", TEXT), "a value that may be left out"


def test_secrets_stay_where_they_are() -> None:
    """Neither git nor an image takes .env along; the image's context is what the Dockerfile copies,
    and no more.
    """
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(copied())


@pytest.mark.parametrize("name", [name for name in SERVICES if name.startswith("spark")])
def test_spark_has_no_key_of_airflow(name: str) -> None:
    """Whoever folds there runs users' machines: nothing that opens the database or the API."""
    assert not [key for key in SERVICES[name]["environment"] if key.startswith("AIRFLOW")]
    assert "${" not in str(SERVICES[name])
    assert {mount.split(":")[0] for mount in SERVICES[name]["volumes"]} == {"lake"}


def test_a_spark_connection_of_yours_reaches_who_submits() -> None:
    """By .env or the shell, if it is there; suites of yours are those that check judges by."""
    scheduler = SERVICES["scheduler"]
    assert scheduler["environment"]["AIRFLOW_CONN_SERIATIM_SPARK"] is None
    assert "./expectations:/opt/seriatim/expectations:ro" in scheduler["volumes"]
    assert "AIRFLOW_CONN_SERIATIM_SPARK" in DEPLOYING


@pytest.mark.parametrize("name", ["scheduler", "spark-worker", "s3"])
def test_a_bucket_of_yours_reaches_who_opens_it(name: str) -> None:
    """By .env or the shell, if it is there; compose's own server takes the same credentials, and keeps
    objects where they stay.
    """
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(SERVICES[name]["environment"])
    assert SERVICES["s3"]["volumes"] == [f"bucket:{SERVICES['s3']['command'][0]}"]
    assert f"{SERVICES['s3']['command'][0]} " in DOCKERFILE
    assert f"127.0.0.1:{s3.CONTAINER_PORT}/" in SERVICES["s3"]["healthcheck"]["test"][-1]
    assert f"AWS_ENDPOINT_URL=http://s3:{s3.CONTAINER_PORT}" in DEPLOYING


def copied() -> list[str]:
    """What the Dockerfile copies."""
    return [
        word
        for line in DOCKERFILE.splitlines()
        if line.startswith("COPY")
        for word in line.split()[2:-1]
    ]


def test_the_image_is_made_of_what_is_there() -> None:
    """Everything that is copied exists, and the last user is not root."""
    assert copied()
    assert [word for word in copied() if not (ROOT / word).exists()] == []
    assert [line.split()[1] for line in DOCKERFILE.splitlines() if line.startswith("USER")][
        -1
    ] == "airflow"


def test_airflow_knows_its_commands() -> None:
    """What services run, and what their health checks ask, is parsed by Airflow's own command line."""
    parser = cli_parser.get_parser()
    for service in SERVICES.values():
        # The image runs `airflow` by itself.
        if service["image"] != SERVICES["scheduler"]["image"] or "entrypoint" in service:
            continue
        assert parser.parse_args(service["command"]).func
        _, *check = service.get("healthcheck", {"test": ["CMD", "curl"]})["test"]
        assert check[0] in {"airflow", "curl"}
        if check[0] == "airflow":
            parser.parse_args(check[1:])


def test_the_spark_of_compose_is_that_of_the_package() -> None:
    """Its programs are in the pyspark package, and the workers, Airflow's connection and the documents
    name the master's address.
    """
    (master,) = SERVICES["spark"]["command"]
    (worker,) = SERVICES["spark-worker"]["command"]
    assert master == f"exec spark-class {cluster.MASTER_CLASS} --host spark --port 7077"
    assert worker == f"exec spark-class {cluster.WORKER_CLASS} spark://spark:7077"
    assert '"host": "spark://spark:7077"' in DEPLOYING
    program, *_ = cluster.spark_class_command(cluster.MASTER_CLASS)
    assert Path(program).exists()
    for main_class in (cluster.MASTER_CLASS, cluster.WORKER_CLASS):
        (jar,) = (Path(program).parent.parent / "jars").glob("spark-core_*.jar")
        with zipfile.ZipFile(jar) as archive:
            assert f"{main_class.replace('.', '/')}.class" in archive.namelist()


def test_versions_are_those_that_were_tried() -> None:
    """Airflow in the image and in the lock are the same."""
    wanted = re.search(
        r"^apache-airflow==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE
    )
    assert wanted
    assert f"apache/airflow:{wanted[1]}-python3.11" in (ROOT / "docker" / "Dockerfile").read_text()


def test_what_is_written_to_is_made_for_who_writes() -> None:
    """Docker gives a volume to root where the image has no such folder. JARs are fetched to where
    tasks look.
    """
    ours = SERVICES["scheduler"]
    made = set(
        re.findall(r"/opt/\S+", re.search(r"install --directory --owner=airflow.*", DOCKERFILE)[0])
    )  # type: ignore[index]
    volumes = {mount.split(":")[1] for mount in ours["volumes"] if not mount.startswith(".")}
    assert volumes - {"/opt/airflow/logs"} <= made  # that one is Airflow's own
    assert {"/opt/seriatim", ours["environment"]["SERIATIM_HOME"]} <= made
    assert f"ENV SERIATIM_HOME={ours['environment']['SERIATIM_HOME']}\n" in DOCKERFILE
