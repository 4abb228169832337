"""Commands and manifests of docs/deployment.md. test_docs.py runs the commands of gaudiserve
itself."""

import re
import shlex

import pytest
from manifests import KUBERNETES, OVERLAYS, ROOT, Document, documents

GUIDE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", GUIDE, re.MULTILINE | re.DOTALL)
LINES = [line.strip() for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]
BUILDS = re.findall(r"`(docker build [^`]*)`", GUIDE)
MANIFESTS: list[Document] = [
    document for kind, text in BLOCKS if kind == "yaml" for document in documents(text)
]
READ_ONLY = ("get", "describe", "logs")


@pytest.mark.parametrize("line", LINES)
def test_a_command_names_what_exists(line: str) -> None:
    program, *words = shlex.split(line)

    if program in ("curl", "docker", "API_KEY=secret"):
        files = [path for path in words if path.startswith("deploy/")]
        assert [path for path in files if not (ROOT / path).is_file()] == []
        return
    assert program in ("kubectl", "gaudiserve")
    if program == "gaudiserve" or words[0] in READ_ONLY:
        return
    if words[:2] == ["apply", "-k"]:
        assert (ROOT / words[2] / "kustomization.yaml").is_file()
    elif words[:3] == ["create", "secret", "generic"]:
        name, key = words[3], words[4].removeprefix("--from-literal=").partition("=")[0]
        used = [path.read_text(encoding="utf-8") for path in KUBERNETES.rglob("*.yaml")]
        assert any(f"secretKeyRef: {{name: {name}, key: {key}" in text for text in used)
    else:
        # The vendor's device plugin.
        assert words[:2] == ["create", "-f"] and words[2].startswith("https://vault.habana.ai/")


@pytest.mark.parametrize("command", BUILDS)
def test_a_build_names_a_file_and_its_arguments(command: str) -> None:
    words = shlex.split(command)
    text = (ROOT / words[words.index("-f") + 1]).read_text(encoding="utf-8")

    given = [
        words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--build-arg"
    ]

    assert given
    assert all(re.search(rf"^ARG {name}=", text, re.MULTILINE) for name in given)


def test_the_guide_names_every_overlay_and_image() -> None:
    images = {path.name for path in ROOT.glob("Dockerfile*")}

    assert [name for name in OVERLAYS if f"deploy/kubernetes/{name}" not in GUIDE] == []
    assert [name for name in images if f"`{name}`" not in GUIDE] == []
    assert len(LINES) > 5
    assert len(BUILDS) > 0


def test_the_manifests_of_the_guide_are_complete() -> None:
    assert [manifest["kind"] for manifest in MANIFESTS] == ["RuntimeClass", "ResourceQuota"]


@pytest.mark.deploy
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda entry: entry["kind"])
def test_a_manifest_of_the_guide_fits_the_schema(manifest: Document) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(manifest, "1.32", strict=True)


def test_the_guide_says_what_the_manifests_say() -> None:
    (deployment,) = documents((KUBERNETES / "base" / "deployment.yaml").read_text("utf-8"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    (hpa,) = documents((KUBERNETES / "autoscale-hpa" / "hpa.yaml").read_text("utf-8"))
    waiting, usage = (item["pods"]["target"]["averageValue"] for item in hpa["spec"]["metrics"])

    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert "waits five seconds (`preStop`)" in " ".join(GUIDE.split())
    assert {"/cache", "/tmp", "/var/log/gaudiserve"} <= mounts
    assert (waiting, usage) == ("4", "800m")
    assert "more than four requests wait for each" in " ".join(GUIDE.split())
