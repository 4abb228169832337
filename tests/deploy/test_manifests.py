"""The files of compose and the images agree with the server, the documents and each other. Nothing
is deployed here."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from manifests import documents

from config.loading.env import settings
from config.loading.parser import server_parser

ROOT = Path(__file__).parents[2]
MANIFESTS = ("compose.yaml", "compose.local.yaml", "prometheus.yaml")
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

    (timeout_s,) = (float(one.value) for one in parsed.given if one.name == "shutdown-timeout")
    assert int(service["stop_grace_period"].rstrip("s")) > timeout_s


def test_settings_of_compose_are_settings() -> None:
    names = manifest("compose.yaml")[0]["services"]["gaudiserve"]["environment"]

    found = settings(dict.fromkeys(names, "x"))

    assert {name for name, _, _ in found} == {"model", "api-key"}
    assert "HF_TOKEN" in names


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
