"""The manifests and the image agree with the server, the documents and each other. Nothing is
deployed here."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.loading.env import settings
from config.loading.parser import server_parser

ROOT = Path(__file__).parents[2]
MANIFESTS = ("compose.yaml", "compose.local.yaml", "kubernetes.yaml", "prometheus.yaml")
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])[^}]*)?\}")
"""An interpolated variable of compose: name and operator; `?` means required."""
LOCAL_MODEL_LINES = re.compile(r"^( *)# (- \{name: models, .*)$", re.MULTILINE)
"""The commented lines of kubernetes.yaml for a volume of local models."""


def text_of(name: str) -> str:
    return (ROOT / "deploy" / name).read_text(encoding="utf-8")


def manifest(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(name)))


def pod_of(text: str) -> dict[str, Any]:
    pod: dict[str, Any] = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_yaml_without_duplicate_keys(name: str) -> None:
    class Strict(yaml.SafeLoader):
        """Refuses duplicate keys, which the plain loader overwrites silently."""

    def mapping(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"duplicate key: {keys}"
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)

    documents = list(yaml.load_all(text_of(name), Loader=Strict))

    assert all(isinstance(document, dict) for document in documents)


def test_kubernetes_probes_use_the_right_paths() -> None:
    deployment, claim, service = manifest("kubernetes.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}

    assert probes["startup"]["httpGet"]["path"] == "/ready"
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 5000
    assert probes["readiness"]["httpGet"]["path"] == "/ready"
    assert probes["liveness"]["httpGet"]["path"] == "/health"
    assert container["resources"]["limits"]["habana.ai/gaudi"] == "1"
    assert pod["enableServiceLinks"] is False
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_the_pod_asks_for_a_card_in_each_way_that_a_cluster_may_need() -> None:
    pod = pod_of(text_of("kubernetes.yaml"))
    (container,) = pod["containers"]
    resources = container["resources"]

    assert pod["runtimeClassName"] == "habana"
    assert pod["nodeSelector"]
    assert {"key": "habana.ai/gaudi", "operator": "Exists", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]
    # Kubernetes refuses other requests for extended resources and huge pages.
    assert resources["requests"] == resources["limits"]


def test_the_hub_token_is_an_optional_secret_and_the_api_key_a_required_one() -> None:
    (container,) = pod_of(text_of("kubernetes.yaml"))["containers"]

    secrets = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]
        for entry in container["env"]
        if "valueFrom" in entry
    }

    assert set(secrets) == {"GAUDISERVE_API_KEY", "HF_TOKEN"}
    assert secrets["HF_TOKEN"]["optional"] is True
    assert "optional" not in secrets["GAUDISERVE_API_KEY"]
    for reference in secrets.values():
        command = f"create secret generic {reference['name']} --from-literal={reference['key']}="
        assert command in text_of("kubernetes.yaml")


@pytest.mark.parametrize(
    ("index", "kind"), [(1, "persistentVolumeClaim"), (2, "hostPath")], ids=["claim", "node"]
)
def test_a_volume_of_local_models_needs_two_uncommented_lines(index: int, kind: str) -> None:
    lines = list(LOCAL_MODEL_LINES.finditer(text_of("kubernetes.yaml")))
    text = text_of("kubernetes.yaml")
    for line in (lines[0], lines[index]):
        text = text.replace(line[0], f"{line[1]}{line[2]}")

    pod = pod_of(text)

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert len(lines) == 3
    assert kind in volumes["models"]
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert set(mounts) == set(volumes)


def test_grace_periods_are_longer_than_the_shutdown_timeout() -> None:
    pod = pod_of(text_of("kubernetes.yaml"))
    service = manifest("compose.yaml")[0]["services"]["gaudiserve"]

    def shutdown_s(words: list[str]) -> float:
        parsed = server_parser("serve", "").parse_all(words[1:])
        return next(float(one.value) for one in parsed.given if one.name == "shutdown-timeout")

    (container,) = pod["containers"]
    word, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    grace_s = pod["terminationGracePeriodSeconds"] - int(pause_s)
    assert grace_s > shutdown_s(container["args"])
    assert int(service["stop_grace_period"].rstrip("s")) > shutdown_s(service["command"])


def test_settings_in_manifests_are_settings() -> None:
    (container,) = pod_of(text_of("kubernetes.yaml"))["containers"]
    compose = manifest("compose.yaml")[0]["services"]["gaudiserve"]["environment"]
    names = [entry["name"] for entry in container["env"]] + list(compose)

    found = settings(dict.fromkeys(names, "x"))

    assert {name for name, _, _ in found} == {"model", "api-key"}
    assert names.count("HF_TOKEN") == 2


def test_compose_local_mounts_the_model_at_its_own_path() -> None:
    (mount,) = manifest("compose.local.yaml")[0]["services"]["gaudiserve"]["volumes"]
    environment = manifest("compose.yaml")[0]["services"]["gaudiserve"]["environment"]

    (source,), (target,), (model,) = (
        VARIABLE.findall(text)
        for text in (mount["source"], mount["target"], environment["GAUDISERVE_MODEL"])
    )

    assert mount["type"] == "bind"
    assert source == ("MODEL", "?")
    assert target[0] == model[0] == "MODEL"


def compose_commands() -> list[tuple[str, str]]:
    """(file, command) of each `docker compose` command of the documents and of the manifests."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.yaml")]
    found = []
    for page in sorted(pages):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"^(?:# )?((?:\w+=\S+ +)*docker compose .*)$", text, re.MULTILINE)
        found += [(page.name, line) for line in lines]
    return found


@pytest.mark.parametrize(("page", "command"), compose_commands())
def test_a_compose_command_names_the_files_and_variables_that_it_needs(
    page: str, command: str
) -> None:
    words = shlex.split(command)
    given = dict(word.split("=", 1) for word in words[: words.index("docker")])
    files = [words[i + 1] for i, word in enumerate(words) if word == "-f"]

    texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]

    used = VARIABLE.findall("\n".join(texts))
    assert set(given) <= {name for name, _ in used}
    assert {name for name, operator in used if operator == "?"} <= set(given)
    # A path reaches the container only with the file that mounts it.
    is_path = given.get("MODEL", "").startswith("/")
    assert is_path == ("deploy/compose.local.yaml" in files)


def test_both_kinds_of_model_have_a_compose_command() -> None:
    pages = {page for page, command in compose_commands() if "compose.local.yaml" in command}

    assert {"compose.yaml", "gaudi.md"} <= pages
    assert len(compose_commands()) > len(pages)


def image() -> str:
    return (ROOT / "Dockerfile.hpu").read_text(encoding="utf-8")


def test_the_image_has_no_extra_of_the_package_and_no_test_tool() -> None:
    instructions = "\n".join(line for line in image().splitlines() if not line.startswith("#"))

    assert "pytest" not in instructions
    assert not re.search(r"\.whl\[|\.\[", instructions)


def test_the_default_base_image_has_the_vendors_torch() -> None:
    base = re.search(r"^ARG BASE_IMAGE=(\S+)$", image(), re.MULTILINE)

    assert base is not None
    assert "/pytorch-installer-" in base[1]


def test_the_folders_that_the_image_sets_belong_to_its_user() -> None:
    user = re.search(r"^USER (\w+)$", image(), re.MULTILINE)
    created = re.search(r"install -d -o (\w+) -g \w+ (.*)$", image(), re.MULTILINE)
    folders = re.findall(r"(?:XDG_CACHE_HOME|HABANA_LOGS)=(\S+)", image())

    assert user is not None and created is not None
    assert user[1] == created[1]
    assert len(folders) == 2
    assert set(folders) <= set(created[2].split())


def test_the_files_that_the_image_copies_exist() -> None:
    copied = re.findall(r"^COPY (deploy/.*) /tmp/build/$", image(), re.MULTILINE)

    names = " ".join(copied).split()

    assert len(names) == 2
    assert all((ROOT / name).is_file() for name in names)
    assert all(f"python3 {Path(name).name}" in image() for name in names)
