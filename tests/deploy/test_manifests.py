"""The compose files and the images agree with the server, the documents and each other. Nothing is
deployed here."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from dockerfiles import instructions
from manifests import documents

from config.loading.env import settings
from server.cli.bench.options import bench_parser
from server.process.open_files import MAX_OPEN_FILES

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

    timeout_s = service["environment"]["GAUDISERVE_SHUTDOWN_TIMEOUT"]
    assert int(service["stop_grace_period"].rstrip("s")) > timeout_s


def test_compose_gives_the_server_the_group_of_the_device_nodes() -> None:
    service = manifest("compose.yaml")[0]["services"]["gaudiserve"]

    (group,) = service["group_add"]

    assert VARIABLE.sub("0", group) == "0"
    assert "ACCEL_GROUP" in group


def test_a_container_may_open_as_many_files_as_the_server_uses() -> None:
    guide = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    limits = manifest("compose.yaml")[0]["services"]["gaudiserve"]["ulimits"]

    assert limits == {"nofile": MAX_OPEN_FILES}
    assert guide.count(f"--ulimit nofile={MAX_OPEN_FILES}") == 2


def test_environment_variables_of_compose_are_settings_of_the_server() -> None:
    names = manifest("compose.yaml")[0]["services"]["gaudiserve"]["environment"]

    found = settings(dict.fromkeys(names, "x"))

    assert {name for name, _, _ in found} == {
        "model", "api-key", "device", "host", "shutdown-timeout"
    }  # fmt: skip
    assert "HF_TOKEN" in names


def test_the_cpu_compose_file_removes_privileges_and_variables_of_cards() -> None:
    first = manifest("compose.yaml")[0]["services"]["gaudiserve"]
    second = manifest("compose.cpu.yaml")[0]["services"]["gaudiserve"]
    rights = ("runtime", "group_add", "cap_add", "ipc")

    # None is compose's `!reset`.
    assert all(first[name] and second[name] is None for name in rights)
    left = {**first["environment"], **second["environment"]}
    assert not any("HABANA" in name or "OMPI" in name for name in left if left[name] is not None)
    assert all(port.startswith("127.0.0.1:") for port in second["ports"])


def test_compose_passes_the_variables_of_a_file() -> None:
    (given,) = manifest("compose.yaml")[0]["services"]["gaudiserve"]["env_file"]
    head = text_of("compose.yaml").split("services:")[0]

    assert given == {"path": "server.env", "required": False}
    assert all(name in head for name in ("server.env", "GAUDISERVE_*", "VLLM_*", "PT_HPU_*"))
    # The files may contain keys.
    for ignored in (".gitignore", ".dockerignore"):
        lines = (ROOT / ignored).read_text(encoding="utf-8").splitlines()
        assert {"deploy/server.env", "deploy/.env"} <= set(lines)


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
    """(file, command) of each `docker compose` command of the documents and of the manifests. Where
    a page shows deploy/.env, the variables of this file precede the variables of a command."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.yaml")]
    found = []
    for page in sorted(pages):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"^(?:# )?((?:\w+=\S+ +)*docker compose .*)$", text, re.MULTILINE)
        dotenv = " ".join(
            re.findall(r"(?:^# |`)((?:GAUDISERVE_API_KEY|MODEL)=[\w/]+)(?:$|`)", text, re.MULTILINE)
        )
        found += [(page.name, f"{dotenv} {line}") for line in lines]
    return found


@pytest.mark.parametrize(("page", "command"), compose_commands())
def test_a_compose_command_names_the_files_and_variables_that_it_needs(
    page: str, command: str
) -> None:
    words = shlex.split(command)
    given = dict(word.split("=", 1) for word in words[: words.index("docker")])
    # The last word may be the -f of `logs`.
    files = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "-f"]

    texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]

    used = VARIABLE.findall("\n".join(texts))
    assert set(given) <= {name for name, _ in used}
    assert {name for name, operator in used if operator == "?"} <= set(given)
    # A path reaches the container only with compose.local.yaml, which mounts it.
    is_path = given.get("MODEL", "").startswith("/")
    assert is_path == ("deploy/compose.local.yaml" in files)


def test_both_kinds_of_model_have_a_compose_command() -> None:
    pages = {page for page, command in compose_commands() if "compose.local.yaml" in command}

    assert "compose.yaml" in pages
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
        # Mounted files exist, and volumes are declared.
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
    # A flag would win over a variable.
    assert compose["services"]["gaudiserve"]["command"] == ["serve"]
    assert "command" not in cpu["gaudiserve"]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_built_with_the_registry_and_package_index_of_the_user(name: str) -> None:
    text = image(name)
    stages = text.split("\nFROM ")[1:]

    assert all(stage.startswith("${BASE_IMAGE}") for stage in stages)
    # An argument without a value: pip takes an empty variable for an index.
    for stage in stages:
        assert (" pip install " in stage or " pip wheel " in stage) == (
            "\nARG PIP_INDEX_URL\n" in stage
        )


def test_another_version_of_the_image_is_selected_by_a_variable() -> None:
    for name, tag in (("compose.yaml", "hpu"), ("compose.cpu.yaml", "cpu")):
        assert manifest(name)[0]["services"]["gaudiserve"]["image"] == (
            f"${{IMAGE:-gaudiserve:{tag}}}"
        )


def test_the_benchmark_of_compose_loads_the_server_and_writes_a_report() -> None:
    (command,) = manifest("compose.yaml")[0]["services"]["benchmark"]["command"]
    words = shlex.split(command.rpartition("exec gaudiserve bench serve ")[2])

    options = bench_parser().parse_args(words)

    # Waiting must end even if the server never becomes ready.
    assert "until " not in command and "while " not in command
    assert options.base_url == "http://gaudiserve:8000"
    assert options.json == "/cache/benchmark.json"
    assert f"{options.base_url}/ready" in command


def test_compose_gives_up_on_a_server_that_fails_at_every_start() -> None:
    service = manifest("compose.yaml")[0]["services"]["gaudiserve"]

    assert re.fullmatch(r"on-failure:\d+", service["restart"])


def test_compose_leaves_the_health_check_to_the_image() -> None:
    # The image's health check finds the port, socket and TLS from the server's flags.
    files = [manifest(name)[0] for name in ("compose.yaml", "compose.cpu.yaml")]

    assert not any("healthcheck" in file["services"]["gaudiserve"] for file in files)
    assert files[0]["services"]["benchmark"]["healthcheck"] == {"disable": True}


def test_ports_that_the_network_policy_opens_are_documented() -> None:
    policy = next(
        part for part in manifest("kubernetes/base/access.yaml") if part["kind"] == "NetworkPolicy"
    )
    ports = {
        str(port["port"]) for rule in policy["spec"]["egress"] for port in rule.get("ports", ())
    }
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")

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
    # Kubernetes checks runAsNonRoot by a number.
    assert last["USER"] == "10001"
    assert json.loads(last["ENTRYPOINT"]) == ["gaudiserve"]
    assert json.loads(last["CMD"]) == ["serve"]
    # A chart may replace CMD by flags only.
    assert "GAUDISERVE_HOST=0.0.0.0" in image(name)
    assert 'CMD ["python3", "/opt/healthcheck.py"]' in last["HEALTHCHECK"]
    assert "COPY deploy/healthcheck.py /opt/\n" in image(name)
    assert last["EXPOSE"] == "8000"
    assert [word for word, _ in steps].count("FROM") == 2


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_writes_the_vllm_command_before_it_changes_the_user(name: str) -> None:
    steps = instructions(image(name))

    writes = [i for i, (_, value) in enumerate(steps) if "gaudiserve vllm-command" in value]
    users = [i for i, (word, _) in enumerate(steps) if word == "USER"]
    assert len(writes) == 1 and writes[0] < users[0]


@pytest.mark.parametrize("name", IMAGES)
def test_the_default_base_image_has_an_exact_version(name: str) -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(.+)$", image(name), re.MULTILINE))
    base = defaults["BASE_IMAGE"]
    while "${" in base:
        base = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], base)

    _, _, tag = base.rpartition(":")
    assert re.match(r"\d+\.\d+\.\d+-\w+", tag)
    # The tag of the vendor's image begins with the release of its path.
    assert "habana" not in base or f"/{tag.partition('-')[0]}/" in base


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
