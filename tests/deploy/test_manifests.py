"""The files of compose and the images agree with the server, the documents and each other. Nothing
is deployed here."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from dockerfiles import instructions
from manifests import documents

from config.loading.env import settings
from config.loading.parser import server_parser
from server.cli.bench.options import bench_parser

ROOT = Path(__file__).parents[2]
MANIFESTS = tuple(sorted(path.name for path in (ROOT / "deploy").glob("*.yaml")))
IMAGES = ("Dockerfile", "Dockerfile.hpu", "Dockerfile.hpu.ubi")
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])[^}]*)?\}")
"""An interpolated variable of compose: name and operator; `?` means required."""


def text_of(name: str) -> str:
    return (ROOT / "deploy" / name).read_text(encoding="utf-8")


def manifest(name: str) -> list[dict[str, Any]]:
    return documents(text_of(name))


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_yaml_without_duplicate_keys(name: str) -> None:
    assert all(isinstance(document, dict) for document in documents(text_of(name)))


def test_the_grace_period_of_compose_is_longer_than_the_shutdown_timeout() -> None:
    service = manifest("compose.yaml")[0]["services"]["gaudiserve"]

    parsed = server_parser("serve", "").parse_all(service["command"][1:])

    (timeout_s,) = (float(name.value) for name in parsed.given if name.name == "shutdown-timeout")
    assert int(service["stop_grace_period"].rstrip("s")) > timeout_s


def test_compose_gives_the_server_the_group_of_the_device_nodes() -> None:
    service = manifest("compose.yaml")[0]["services"]["gaudiserve"]

    (group,) = service["group_add"]

    assert VARIABLE.sub("0", group) == "0"
    assert "ACCEL_GROUP" in group


def test_settings_of_compose_are_settings() -> None:
    names = manifest("compose.yaml")[0]["services"]["gaudiserve"]["environment"]

    found = settings(dict.fromkeys(names, "x"))

    assert {name for name, _, _ in found} == {"model", "api-key"}
    assert "HF_TOKEN" in names


def test_compose_passes_the_variables_of_a_file() -> None:
    (given,) = manifest("compose.yaml")[0]["services"]["gaudiserve"]["env_file"]
    head = text_of("compose.yaml").split("services:")[0]

    assert given == {"path": "server.env", "required": False}
    assert all(name in head for name in ("server.env", "GAUDISERVE_*", "VLLM_*", "PT_HPU_*"))
    # The file may hold keys.
    for ignored in (".gitignore", ".dockerignore"):
        assert "deploy/server.env" in (ROOT / ignored).read_text(encoding="utf-8").splitlines()


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


PROFILES = {
    "serve": {"gaudiserve"},
    "metrics": {"gaudiserve", "prometheus", "grafana"},
    "benchmark": {"gaudiserve", "benchmark"},
}


def test_a_profile_of_compose_starts_its_services() -> None:
    compose = manifest("compose.yaml")[0]
    started: dict[str, set[str]] = {}
    for name, service in compose["services"].items():
        for profile in service["profiles"]:
            started.setdefault(profile, set()).add(name)
        # Files that a service mounts are there, and its volumes are declared.
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (ROOT / "deploy" / source).is_file()

    assert started == PROFILES
    cpu = manifest("compose.cpu.yaml")[0]["services"]
    assert set(cpu) <= set(compose["services"])
    assert (ROOT / "deploy" / cpu["gaudiserve"]["build"]["context"]).resolve() == ROOT
    for file in (compose["services"], cpu):
        assert (ROOT / file["gaudiserve"]["build"]["dockerfile"]).is_file()
        assert file["benchmark"]["image"] == file["gaudiserve"]["image"]
        words = file["gaudiserve"]["command"]
        assert words[0] == "serve"
        server_parser("serve", "").parse_all(words[1:])


def test_the_benchmark_of_compose_loads_the_server_and_writes_a_report() -> None:
    (command,) = manifest("compose.yaml")[0]["services"]["benchmark"]["command"]
    words = shlex.split(command.rpartition("exec gaudiserve bench serve ")[2])

    options = bench_parser().parse_args(words)

    # A server that never becomes ready ends the wait.
    assert "until " not in command and "while " not in command
    assert options.base_url == "http://gaudiserve:8000"
    assert options.json == "/cache/benchmark.json"
    assert f"{options.base_url}/ready" in command


def test_compose_gives_up_on_a_server_that_fails_at_every_start() -> None:
    service = manifest("compose.yaml")[0]["services"]["gaudiserve"]

    assert re.fullmatch(r"on-failure:\d+", service["restart"])


def test_compose_leaves_the_health_check_to_the_image() -> None:
    # The image's check finds a port, a socket and TLS by the flags of the server.
    files = [manifest(name)[0] for name in ("compose.yaml", "compose.cpu.yaml")]

    assert not any("healthcheck" in file["services"]["gaudiserve"] for file in files)


def test_ports_that_the_network_policy_opens_are_documented() -> None:
    policy = next(
        part for part in manifest("kubernetes/base/access.yaml") if part["kind"] == "NetworkPolicy"
    )
    ports = {
        str(port["port"]) for rule in policy["spec"]["egress"] for port in rule.get("ports", ())
    }
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")

    told = text.split("The server itself may connect only to ")[1].split(".")[0]
    assert set(re.findall(r"\d+", told)) == ports


def image(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_no_test_tool_and_starts_the_server_as_its_user(name: str) -> None:
    steps = instructions(image(name))
    last = dict(steps)

    assert "pytest" not in " ".join(value for _, value in steps)
    assert not re.search(r"\.whl\[|\[dev|,dev", image(name))
    assert last["USER"] in ("gaudiserve", "10001")
    assert json.loads(last["ENTRYPOINT"]) == ["gaudiserve"]
    assert json.loads(last["CMD"]) == ["serve"]
    # A chart replaces CMD by flags alone.
    assert "GAUDISERVE_HOST=0.0.0.0" in image(name)
    assert 'CMD ["python3", "/opt/healthcheck.py"]' in last["HEALTHCHECK"]
    assert "COPY deploy/healthcheck.py /opt/\n" in image(name)
    assert last["EXPOSE"] == "8000"
    assert [word for word, _ in steps].count("FROM") == 2


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_a_command_vllm_that_its_root_writes(name: str) -> None:
    steps = instructions(image(name))

    writes = [i for i, (_, value) in enumerate(steps) if "gaudiserve vllm-command" in value]
    users = [i for i, (word, _) in enumerate(steps) if word == "USER"]
    assert len(writes) == 1 and writes[0] < users[0]


@pytest.mark.parametrize("name", IMAGES[1:])
def test_the_default_base_image_has_the_vendors_torch(name: str) -> None:
    base = re.search(r"^ARG BASE_IMAGE=(\S+)$", image(name), re.MULTILINE)

    assert base is not None
    assert "/pytorch-installer-" in base[1]


@pytest.mark.parametrize("name", IMAGES)
def test_the_folders_that_an_image_sets_belong_to_its_user(name: str) -> None:
    (created,) = re.findall(
        r"install -d (?:-m 770 )?-o (\w+) -g \w+ (.*)$", image(name), re.MULTILINE
    )
    folders = re.findall(r"(?:XDG_CACHE_HOME|HABANA_LOGS)=(\S+)", image(name))

    assert created[0] == "gaudiserve"
    assert len(folders) == (1 if name == "Dockerfile" else 2)
    assert set(folders) <= set(created[1].split())


@pytest.mark.parametrize("name", IMAGES)
def test_the_files_of_deploy_that_an_image_uses_exist(name: str) -> None:
    copied = re.findall(r"^COPY (deploy/.*) /tmp/build/$", image(name), re.MULTILINE)
    used = re.findall(r"(?:python3|/python) (?:deploy/)?(\w+\.py)", image(name))

    assert used
    assert all((ROOT / "deploy" / file).is_file() for file in used)
    if name != "Dockerfile":
        assert {f"deploy/{file}" for file in used} == set(" ".join(copied).split())
