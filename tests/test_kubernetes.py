"""deploy/kubernetes, validated without a cluster: against the schemas of Kubernetes, and against what the
code reads and exits with.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
import yaml

from seriatim import errors, stream_files
from seriatim.config import ENVIRONMENT_PREFIX, Settings

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
BASE = FOLDER / "base"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((BASE / "kustomization.yaml").read_text())
MANIFESTS = [*KUSTOMIZATION["resources"], "executor.yaml"]
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
RETRIED = {errors.PlatformError.exit_code, errors.FencedError.exit_code}


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((BASE / name).read_text()))


def _only(name: str) -> dict[str, Any]:
    (document,) = _documents(name)
    return document


def _pods() -> dict[str, dict[str, Any]]:
    """The pod of the driver, and that of an executor."""
    job = _only("fold.yaml")["spec"]["jobTemplate"]["spec"]
    return {"driver": job["template"], "executor": _only("executor.yaml")}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_fits_the_schema(name: str) -> None:
    """Strictly: a key that Kubernetes does not know is an error."""
    validate = pytest.importorskip("kubernetes_validate")
    for document in _documents(name):
        # An executor's template has no name: Spark gives one to each pod.
        if name == "executor.yaml":
            document["metadata"]["name"] = "executor"
        validate.validate(document, "1.34", strict=True)


def test_kustomize_builds_it() -> None:
    """What a cluster would be given: each document fits its schema, and what pods mount is there."""
    validate = pytest.importorskip("kubernetes_validate")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl")
    command = [kubectl, "kustomize", str(BASE)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    documents = list(yaml.safe_load_all(built))
    for document in documents:
        validate.validate(document, "1.34", strict=True)
        assert document["metadata"].get("namespace", "seriatim") == "seriatim"
    maps = {
        document["metadata"]["name"]: set(document["data"])
        for document in documents
        if document["kind"] == "ConfigMap"
    }
    assert maps == {
        generator["name"]: set(generator["files"])
        for generator in KUSTOMIZATION["configMapGenerator"]
    }
    volumes = _pods()["driver"]["spec"]["volumes"]
    assert {volume["configMap"]["name"] for volume in volumes if "configMap" in volume} == set(maps)


def test_everything_is_listed() -> None:
    """Each file of the base is a resource, or goes into a ConfigMap, and each that is named is there."""
    listed = {"kustomization.yaml", *KUSTOMIZATION["resources"]}
    for generator in KUSTOMIZATION["configMapGenerator"]:
        listed |= set(generator["files"])
    assert {path.name for path in BASE.iterdir()} == listed


@pytest.mark.parametrize("kind", ["driver", "executor"])
def test_a_pod_is_no_root_and_has_no_rights(kind: str) -> None:
    """It fits the namespace's `restricted` standard."""
    spec = _pods()[kind]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == 50000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "USER 50000:0" in DOCKERFILE


@pytest.mark.parametrize("kind", ["driver", "executor"])
def test_volumes_secrets_and_settings_are_there(kind: str) -> None:
    """Each mounted volume is declared, each setting is one of ours, and no secret has a value here."""
    spec = _pods()[kind]["spec"]
    (container,) = spec["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    known = {f"{ENVIRONMENT_PREFIX}{field.upper()}" for field in Settings.__struct_fields__}
    for variable in container["env"]:
        assert variable["name"] in known | {"SPARK_CONF_DIR"}
        assert not re.search("PASSWORD|SECRET|KEY|TOKEN", variable["name"])
    texts = [path.read_text() for path in FOLDER.rglob("*") if path.is_file()]
    assert not any("kind: Secret\n" in text for text in texts)


def test_exit_codes_decide_about_a_retry() -> None:
    """A job fails at once where a retry cannot help, and is tried again where it can."""
    job = _only("fold.yaml")["spec"]["jobTemplate"]["spec"]
    _, fail = job["podFailurePolicy"]["rules"]
    classes = (errors.BrokenPromiseError, errors.ConfigError, errors.IntegrityError)
    assert fail["onExitCodes"]["values"] == sorted(error.exit_code for error in classes)
    assert not RETRIED & set(fail["onExitCodes"]["values"])
    (container,) = job["template"]["spec"]["containers"]
    assert fail["onExitCodes"]["containerName"] == container["name"]


def test_the_role_is_limited_to_its_namespace() -> None:
    """No ClusterRole, no wildcard, and only what Spark's driver asks for."""
    for document in _documents("access.yaml"):
        assert not document["kind"].startswith("Cluster")
        for rule in document.get("rules", []):
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in rule["resources"]


def test_policies_select_the_pods() -> None:
    """The network policy covers drivers and executors; only drivers are kept from eviction."""
    labels = {kind: pod["metadata"]["labels"].items() for kind, pod in _pods().items()}
    network = _only("network.yaml")["spec"]["podSelector"]["matchLabels"].items()
    budget = _only("disruption.yaml")["spec"]["selector"]["matchLabels"].items()
    assert all(network <= of_pod for of_pod in labels.values())
    assert budget <= labels["driver"]
    assert not budget <= labels["executor"]


def test_one_image_everywhere() -> None:
    """Driver, executors and Spark's settings name the same image, with a version."""
    images = {pod["spec"]["containers"][0]["image"] for pod in _pods().values()}
    settings = dict(
        line.split(maxsplit=1)
        for line in (BASE / "spark-defaults.conf").read_text().splitlines()
        if not line.startswith("#")
    )
    images.add(settings["spark.kubernetes.container.image"])
    (image,) = images
    (override,) = KUSTOMIZATION["images"]
    assert image == f"{override['name']}:{override['newTag']}"
    template = Path(settings["spark.kubernetes.executor.podTemplateFile"])
    assert (BASE / template.name).exists()
    container = _only("executor.yaml")["spec"]["containers"][0]
    assert settings["spark.kubernetes.executor.podTemplateContainerName"] == container["name"]


def test_the_stream_file_can_be_read() -> None:
    """The example is a stream whose output is in a bucket, and the job runs it."""
    file = stream_files.load_stream("orders", BASE)
    assert stream_files.is_in_bucket(file.stream)
    (container,) = _pods()["driver"]["spec"]["containers"]
    assert container["args"][:2] == ["run", file.stream.name]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--version"], "seriatim "),
        (["run", "--help"], "seriatim run"),
        (["driver", "--version"], f"version {pyspark.__version__}"),
    ],
    ids=["seriatim", "command", "driver"],
)
def test_what_a_container_does(arguments: list[str], words: str) -> None:
    """Commands of seriatim, and Spark's driver as operators start it."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(FOLDER / "entrypoint.sh"), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert words in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "path", sorted((FOLDER / "examples").iterdir()), ids=lambda path: path.stem
)
def test_an_example_names_what_is_there(path: Path) -> None:
    """The image, the account, the program and the versions are those of the base and of the package."""
    text = path.read_text()
    values = yaml.safe_load(text)
    assert values
    account = _documents("access.yaml")[0]["metadata"]["name"]
    assert account in re.findall(r"(?:serviceAccount(?:Name)?|name): (\S+)", text)
    (override,) = KUSTOMIZATION["images"]
    assert override["newTag"] in text
    for program in re.findall(r"local:///opt/seriatim/([\w/.]+)", text):
        assert (ROOT / program).exists()
    for version in re.findall(r'sparkVersion: "?([\d.]+)', text):
        assert version == pyspark.__version__
    known = {f"{ENVIRONMENT_PREFIX}{field.upper()}" for field in Settings.__struct_fields__}
    assert set(re.findall(r"name: (SERIATIM_\w+)", text)) <= known


def test_the_image_copies_what_is_there() -> None:
    """Every path that the image copies exists, and its user can write where it must."""
    for line in DOCKERFILE.splitlines():
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
    assert "gcc" not in DOCKERFILE
    assert "--owner=50000" in DOCKERFILE
