"""Commands and manifests of the pages about deployment. test_docs.py runs the commands of
gaudiserve itself."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from inspect import signature
from pathlib import Path

import pytest
from manifests import KUBERNETES, OVERLAYS, ROOT, Document, documents, pod_templates, rendered

from config.loading.cards import NODES
from config.loading.env import settings
from config.loading.sources import load
from config.server import ServerConfig

GUIDE = "\n".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("deployment.md", "containers.md", "monitoring.md", "kubernetes.md")
)
BLOCKS = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", GUIDE, re.MULTILINE | re.DOTALL)
LINES = [
    line.strip()
    for kind, text in BLOCKS
    if kind == "console"
    for line in text.replace("\\\n", " ").splitlines()
]
BUILDS = re.findall(r"`(docker build [^`]*)`", GUIDE)
EXAMPLES = ROOT / "deploy" / "examples" / "kubernetes"
MANIFESTS: list[Document] = [
    document
    for path in sorted(EXAMPLES.glob("*.yaml"))
    for document in documents(path.read_text(encoding="utf-8"))
    if "kind" in document
]
UNIT = configparser.ConfigParser(strict=False, interpolation=None)
UNIT.optionxform = str  # type: ignore[assignment, method-assign]
UNIT.read_string((ROOT / "deploy" / "gaudiserve.service").read_text(encoding="utf-8"))
OVERLAY, TWO_NODES = (
    (EXAMPLES / name / "kustomization.yaml").read_text(encoding="utf-8")
    for name in ("one-card", "two-nodes")
)
"""Overlays of a user, `deploy/kubernetes/mine`: one node, two nodes."""
PATCHES = (EXAMPLES / "patches.yaml").read_text(encoding="utf-8").partition("patches:\n")[2]
"""Patches of an overlay, for resources of the base."""
# Commands that name no file of the repository.
NAME_NO_FILE = (
    "get",
    "describe",
    "logs",
    "exec",
    "rollout",
    "label",
    "config",
    "cp",
    "delete",
    "wait",
    "patch",
    "port-forward",
    "set",
)


@pytest.mark.parametrize("line", LINES)
def test_a_command_names_existing_files_and_objects(line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    while re.match(r"[A-Z_]+=", program):
        program, *words = words
    program = Path(program).name

    if program in ("curl", "docker", "cp"):
        files = {path for path in words if path.startswith("deploy/")}
        missing = {path for path in files if not (ROOT / path).exists()}
        assert missing <= {"deploy/kubernetes/mine"}
        return
    if program in ("useradd", "systemctl", "journalctl"):
        assert "gaudiserve" in words
        return
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE)
        return
    if program == "pip":
        assert words[:2] == ["wheel", "--wheel-dir"]
        return
    assert program in ("kubectl", "gaudiserve", "oc")
    if program == "gaudiserve" or words[0] in NAME_NO_FILE or words[1] == "namespace":
        return
    if words[:2] == ["apply", "-f"]:
        assert (ROOT / words[2]).is_file()
    elif words[0] in ("apply", "diff"):
        overlay = ROOT / words[2]
        assert overlay.name == "mine" or (overlay / "kustomization.yaml").is_file()
    elif words[:2] == ["create", "configmap"]:
        assert (ROOT / words[3].removeprefix("--from-file=")).is_file()
    elif words[:3] == ["create", "secret", "generic"]:
        name, key = words[3], re.sub("^--from-(literal|file)=", "", words[4]).partition("=")[0]
        used = [path.read_text(encoding="utf-8") for path in KUBERNETES.rglob("*.yaml")]
        assert any(f"secretKeyRef: {{name: {name}, key: {key}" in text for text in used)
    else:
        # URL of the vendor's device plugin.
        assert words[:2] == ["create", "-f"] and words[2].startswith("https://vault.habana.ai/")


@pytest.mark.parametrize("command", BUILDS)
def test_a_build_command_uses_existing_files_and_build_arguments(command: str) -> None:
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


def test_the_guide_names_every_example() -> None:
    kinds = {manifest["kind"] for manifest in MANIFESTS}

    assert kinds == {"RuntimeClass", "HTTPRoute", "PersistentVolumeClaim", "Pod"}
    for path in EXAMPLES.iterdir():
        assert f"deploy/examples/kubernetes/{path.name}" in GUIDE


def mine(tmp_path: Path, example: str, text: str) -> str:
    """The folder of a user's overlay: a copy of `example`, with the kustomization `text`."""
    folder = Path(shutil.copytree(KUBERNETES, tmp_path / "kubernetes"), "mine")
    shutil.copytree(EXAMPLES / example, folder)
    (folder / "kustomization.yaml").write_text(text)
    return str(folder)


def enabled(*lines: str) -> str:
    """The overlay of one node with the commented lines that begin with `lines`."""
    text = OVERLAY
    for line in lines:
        assert f"# {line}" in text
        text = text.replace(f"# {line}", line)
    return text


@pytest.mark.deploy
@pytest.mark.parametrize("in_a_claim", [False, True])
def test_the_overlay_of_the_guide_is_rendered(tmp_path: Path, in_a_claim: bool) -> None:
    import kubernetes_validate

    text = enabled("components", "volumeMounts", "volumes") if in_a_claim else OVERLAY

    found = {document["kind"]: document for document in rendered(mine(tmp_path, "one-card", text))}

    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    kubernetes_validate.validate(found["Deployment"], "1.32", strict=True)
    assert {document["metadata"]["namespace"] for document in found.values()} == {"models"}
    assert container["image"] == "registry.example.org/gaudiserve:hpu-0.2.0"
    assert given["GAUDISERVE_MODEL"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert [name for name, _, _ in settings(given) if name == "max-model-len"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert ("models" in mounts) == ("PodMonitor" in found) == ("Route" in found) == in_a_claim
    if in_a_claim:
        # Kubernetes refuses a subject without a namespace.
        assert found["RoleBinding"]["subjects"][0]["namespace"] == "models"


@pytest.mark.deploy
def test_the_variables_that_kubectl_lists_are_a_file_for_docker_without_secrets(
    tmp_path: Path,
) -> None:
    found = rendered(str(KUBERNETES / "one-card"))
    (deployment,) = (document for document in found if document["kind"] == "Deployment")
    file = tmp_path / "deployment.json"
    file.write_text(json.dumps(deployment))

    words = ["kubectl", "set", "env", "--local", "-f", str(file), "--list"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)

    # docker reads NAME=value, and skips lines that begin with #.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines)
    assert "GAUDISERVE_API_KEY" not in variables
    assert load([], environ=variables).engine.model == "demo"


@pytest.mark.deploy
def test_the_patch_of_the_guide_replaces_the_key_by_a_file(tmp_path: Path) -> None:
    import kubernetes_validate

    folder = mine(tmp_path, "one-card", enabled("- path: keys.yaml"))

    found = {document["kind"]: document for document in rendered(folder)}

    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "keys")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "keys")
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    kubernetes_validate.validate(found["Deployment"], "1.32", strict=True)
    assert "GAUDISERVE_API_KEY" not in given
    # A subPath mount would keep the first key.
    assert "subPath" not in mount
    assert given["GAUDISERVE_API_KEY_FILE"] == f"{mount['mountPath']}/key"
    assert volume["secret"]["secretName"] == "gaudiserve-key"
    # The file belongs to root and to the group fsGroup.
    assert volume["secret"]["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == 10001


@pytest.mark.deploy
def test_the_overlay_of_the_guide_for_two_nodes_is_rendered(tmp_path: Path) -> None:
    folder = mine(tmp_path, "two-nodes", TWO_NODES)

    found = {document["kind"]: document for document in rendered(folder)}

    containers = [
        template["spec"]["containers"][0] for template in pod_templates(found["LeaderWorkerSet"])
    ]
    assert len(containers) == 2
    for container in containers:
        names = [entry["name"] for entry in container["env"]]
        given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        assert container["image"] == "registry.example.org/gaudiserve:hpu-0.2.0"
        assert given["GAUDISERVE_MODEL"] == "Qwen/Qwen3-30B-A3B"
        assert len(names) == len(set(names))
        assert [name for name, _, _ in settings(given) if name == "max-model-len"]


@pytest.mark.deploy
def test_the_patches_of_the_guide_change_the_base(tmp_path: Path) -> None:
    import kubernetes_validate

    text = OVERLAY.replace("../one-card", "../autoscale-keda") + PATCHES

    found = {document["kind"]: document for document in rendered(mine(tmp_path, "one-card", text))}

    policy = found["NetworkPolicy"]["spec"]
    triggers = found["ScaledObject"]["spec"]["triggers"]
    assert found["ServiceAccount"]["imagePullSecrets"] == [{"name": "registry"}]
    assert policy["egress"][-1] == {"ports": [{"protocol": "TCP", "port": 3128}]}
    assert policy["ingress"][0]["from"][-1] == {"ipBlock": {"cidr": "10.0.0.0/8"}}
    for kind in ("PodMonitor", "PrometheusRule"):
        assert found[kind]["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    addresses = {trigger["metadata"]["serverAddress"] for trigger in triggers}
    assert addresses == {"http://prometheus.example:9090"}
    for kind in ("ServiceAccount", "NetworkPolicy"):
        kubernetes_validate.validate(found[kind], "1.32", strict=True)


@pytest.mark.deploy
def test_the_pods_of_a_suffixed_overlay_have_a_service_of_their_own(tmp_path: Path) -> None:
    text = enabled("nameSuffix", "labels")

    found = rendered(mine(tmp_path, "one-card", text))

    (service,) = (entry for entry in found if entry["kind"] == "Service")
    (deployment,) = (entry for entry in found if entry["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    labels = {"app": "gaudiserve", "model": "chat"}
    assert all(entry["metadata"]["name"].endswith("-chat") for entry in found)
    assert service["spec"]["selector"] == labels
    assert template["metadata"]["labels"].items() >= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert template["spec"]["serviceAccountName"] == "gaudiserve-chat"
    assert claims == {"gaudiserve-hub-chat", "gaudiserve-recipes-chat"}


def test_the_route_of_the_guide_leads_to_the_api_only() -> None:
    (route,) = (manifest for manifest in MANIFESTS if manifest["kind"] == "HTTPRoute")
    (service,) = documents((KUBERNETES / "base" / "service.yaml").read_text("utf-8"))
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]

    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"] == service["spec"]["ports"][0]["port"]


def test_the_patch_for_a_sleeping_pod_removes_probes_and_arguments() -> None:
    (line,) = (line for line in LINES if line.startswith("kubectl patch"))
    patch = (ROOT / line.split()[-1]).read_text(encoding="utf-8")
    (deployment,) = documents((KUBERNETES / "base" / "deployment.yaml").read_text("utf-8"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]

    for entry in json.loads(patch):
        folder, _, name = entry["path"].rpartition("/")
        assert folder == "/spec/template/spec/containers/0"
        # A removed or replaced field exists.
        assert (name in container) == (entry["op"] != "add")
        container[name] = entry.get("value")

    assert (container["command"], container["args"]) == (["sleep", "infinity"], [])
    assert [name for name in container if name.endswith("Probe") and container[name]] == []


def test_the_unit_has_the_command_and_stop_timeout_of_a_server() -> None:
    service = UNIT["Service"]
    program, *words = shlex.split(service["ExecStart"])
    environment = dict(word.split("=", 1) for word in service["Environment"].split())

    given = {name: value for name, value, _ in settings(environment)}

    # A flag would win over a variable of the file.
    assert (program, words) == ("/opt/gaudiserve/.venv/bin/gaudiserve", ["serve"])
    assert "host" not in given, "other machines reach the server only if the file says so"
    # systemd kills the processes of the service after this time.
    assert int(service["TimeoutStopSec"]) > float(given["shutdown-timeout"])
    # Its own processes end with the server; SIGTERM is for the server alone.
    assert service["KillMode"] == "mixed"
    # The server chooses no other device, and has started when it is ready, however long that takes.
    assert given["device"] == "hpu"
    assert (service["Type"], service["TimeoutStartSec"]) == ("notify", "infinity")
    # Each of several API servers is a child of the unit's main process.
    assert service["NotifyAccess"] == "all"


def test_the_unit_has_the_capabilities_of_a_pod_and_the_documented_folders() -> None:
    service = UNIT["Service"]
    environment = dict(word.split("=", 1) for word in service["Environment"].split())
    (deployment,) = documents((KUBERNETES / "base" / "deployment.yaml").read_text("utf-8"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    rights = [f"CAP_{name}" for name in container["securityContext"]["capabilities"]["add"]]
    folders = [f"/var/cache/{service['CacheDirectory']}", f"/var/log/{service['LogsDirectory']}"]

    assert [environment["XDG_CACHE_HOME"], environment["HABANA_LOGS"]] == folders
    assert all(f"`{folder}`" in GUIDE for folder in folders)
    assert f"`{service['EnvironmentFile']}`" in GUIDE
    assert service["AmbientCapabilities"].split() == rights
    assert service["CapabilityBoundingSet"].split() == rights
    assert (service["ProtectSystem"], service["NoNewPrivileges"]) == ("strict", "yes")


def test_the_user_of_the_unit_is_in_the_group_that_the_udev_rule_gives_to_the_nodes() -> None:
    text = (ROOT / "docs" / "gaudi.md").read_text(encoding="utf-8")
    ((subsystems, group),) = re.findall(r'SUBSYSTEM=="(.*)", GROUP="(\w+)", MODE="0660"', text)
    (useradd,) = (line for line in LINES if line.startswith("useradd"))

    words = re.findall(r"(?:udevadm trigger .*|groupadd .*)", text)

    assert set(subsystems.split("|")) == {system for _, _, system in NODES}
    assert f"groupadd --system {group}" in words
    assert f"udevadm trigger -c add -s {subsystems.replace('|', ' -s ')}" in words
    assert f"--groups {group} gaudiserve" in useradd


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # The program and the user of the unit do not exist here.
    text = (ROOT / "deploy" / "gaudiserve.service").read_text(encoding="utf-8")
    unit = tmp_path / "gaudiserve.service"
    text = text.replace(UNIT["Service"]["ExecStart"], shutil.which("true") or "")
    unit.write_text(text.replace("User=gaudiserve", "User=daemon"))

    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )

    # An unknown name is a warning.
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "line", [line for line in LINES if line.startswith("docker run") and " serve " in line]
)
def test_docker_waits_for_streams(line: str) -> None:
    words = shlex.split(line)
    timeout_s = signature(ServerConfig).parameters["shutdown_timeout_s"].default

    assert int(words[words.index("--stop-timeout") + 1]) > timeout_s


@pytest.mark.deploy
@pytest.mark.parametrize(
    "manifest",
    [manifest for manifest in MANIFESTS if manifest["kind"] != "HTTPRoute"],
    ids=lambda entry: entry["kind"],
)
def test_a_manifest_of_the_guide_fits_the_schema(manifest: Document) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(manifest, "1.32", strict=True)


def test_the_guide_agrees_with_the_manifests() -> None:
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
