"""The files of deploy/kubernetes agree with the server and with each other, as far as this can be
checked without kubectl. test_rendered.py renders and validates them."""

import functools
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import KUBERNETES, OVERLAYS, Document, documents, pod_templates

from config.engine import EngineConfig, SchedulerConfig
from config.loading.env import settings
from config.loading.parser import server_parser
from config.model.model_config import ModelConfig
from config.parallel import ParallelConfig
from engine.reports.plan import Target, make_plan
from hpu.doctor.environment import HUGE_PAGES_MIB_PER_CARD

FILES = sorted(KUBERNETES.rglob("*.yaml"))
RESOURCES = [
    path for path in FILES if path.name not in ("kustomization.yaml", "adapter-rules.yaml")
]
PODS = [
    (path, template)
    for path in RESOURCES
    for document in documents(path.read_text(encoding="utf-8"))
    for template in pod_templates(document)
]
"""All pod templates, including patches, which have only some fields."""
WHOLE = [(path, template) for path, template in PODS if "volumes" in template["spec"]]
WITH_API = [
    (path, template)
    for path, template in WHOLE
    if "startupProbe" in template["spec"]["containers"][0]
]
CONSTRAINT = KUBERNETES / "openshift" / "constraint.yaml"
COUNTS = {
    "base": 1,
    "eight-cards": 1,
    "two-nodes-lws": 2,
    "two-nodes-ray": 2,
    "replicas": 1,
}
"""Pod templates by folder."""
METRICS_PAGE = (KUBERNETES.parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
LOCAL_MODEL_LINES = re.compile(r"^( *)# (- \{name: models, .*)$", re.MULTILINE)
"""The commented lines of the deployment for a volume of local models."""
DEPLOYMENT = (KUBERNETES / "base" / "deployment.yaml").read_text(encoding="utf-8")


def ids(pods: list[tuple[Path, Document]]) -> list[str]:
    return [f"{path.parent.name} {i}" for i, (path, _) in enumerate(pods)]


def served_words(container: Document) -> list[str]:
    """Arguments of `gaudiserve serve` in the container; empty if the container does not serve."""
    words = container.get("args", [])
    if len(words) == 1:
        command = words[0].rpartition("exec gaudiserve ")[2] if "gaudiserve" in words[0] else ""
        words = shlex.split(command)
    return list(words[1:])


def given(container: Document) -> dict[str, Any]:
    """Settings of a container, by variables and flags."""
    environment = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    flags = server_parser("serve", "").parse_all(served_words(container)).given
    return {name: value for name, value, _ in settings(environment)} | {
        flag.name: flag.value for flag in flags
    }


def document_of(path: Path, kind: str) -> Document:
    (found,) = (
        document
        for document in documents(path.read_text(encoding="utf-8"))
        if document["kind"] == kind
    )
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name} {path.name}")
def test_a_file_is_yaml_without_duplicate_keys(path: Path) -> None:
    found = documents(path.read_text(encoding="utf-8"))

    assert found
    if path in RESOURCES:
        assert all(
            entry["apiVersion"] and entry["kind"] and entry["metadata"]["name"] for entry in found
        )


def test_every_file_belongs_to_a_kustomization() -> None:
    used = set()
    for path in KUBERNETES.rglob("kustomization.yaml"):
        (document,) = documents(path.read_text(encoding="utf-8"))
        entries = [*document.get("resources", ()), *document.get("components", ())]
        entries += [patch["path"] for patch in document.get("patches", ()) if "path" in patch]
        for entry in entries:
            target = (path.parent / entry).resolve()
            assert target.exists(), (path, entry)
            used.add(target)

    # An administrator applies it for the whole cluster.
    assert set(RESOURCES) - used == {CONSTRAINT}
    folders = {path.parent.name for path in KUBERNETES.rglob("kustomization.yaml")}
    assert folders == {*OVERLAYS, "base", "monitoring", "openshift"}


def test_references_between_manifests_name_existing_objects() -> None:
    names = {
        (document["kind"], document["metadata"]["name"])
        for path in RESOURCES
        for document in documents(path.read_text(encoding="utf-8"))
    }
    service = document_of(KUBERNETES / "base" / "service.yaml", "Service")
    hpa = document_of(KUBERNETES / "autoscale-hpa" / "hpa.yaml", "HorizontalPodAutoscaler")
    keda = document_of(KUBERNETES / "autoscale-keda" / "scaledobject.yaml", "ScaledObject")
    route = document_of(KUBERNETES / "replicas-gateway" / "gateway.yaml", "HTTPRoute")
    pool = document_of(KUBERNETES / "replicas-gateway" / "gateway.yaml", "InferencePool")

    for target in (hpa["spec"]["scaleTargetRef"], keda["spec"]["scaleTargetRef"]):
        assert (target["kind"], target["name"]) in names
    (parent,) = route["spec"]["parentRefs"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    for reference in (parent, backend):
        assert (reference["kind"], reference["name"]) in names
    for _, template in WHOLE:
        labels = template["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in template["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert {("PersistentVolumeClaim", claim) for claim in claims} <= names
        assert ("ServiceAccount", template["spec"]["serviceAccountName"]) in names


def test_the_service_has_another_name_than_the_leader_worker_set() -> None:
    folder = KUBERNETES / "two-nodes-lws"
    name = document_of(folder / "leaderworkerset.yaml", "LeaderWorkerSet")["metadata"]["name"]
    service = document_of(KUBERNETES / "base" / "service.yaml", "Service")

    # The controller makes a headless service with the set's name, for pods that are not ready too,
    # but only where no service has this name.
    assert service["metadata"]["name"] != name


def test_each_deployment_folder_has_the_expected_number_of_pods() -> None:
    folders = [path.parent.name for path, _ in PODS]

    assert {name: folders.count(name) for name in folders} == COUNTS


@pytest.mark.parametrize(("path", "template"), PODS, ids=ids(PODS))
def test_flags_and_variables_of_a_pod_exist(path: Path, template: Document) -> None:
    (container,) = template["spec"]["containers"]

    flags = {
        name.name for name in server_parser("serve", "").parse_all(served_words(container)).given
    }
    chosen = given(container)

    assert "model" in chosen
    assert chosen.get("device", "hpu") == "hpu"
    assert "startupProbe" not in container or chosen["host"] == "0.0.0.0"
    # A flag would win over a variable of an overlay: flags are only what joins two nodes.
    allowed = {"enable-expert-parallel", "distributed-executor-backend", "pipeline-parallel-size"}
    assert all(name in allowed or name.startswith("data-parallel-") for name in flags)


def test_kuberay_containers_have_the_probes_that_kuberay_would_add() -> None:
    containers = [
        template["spec"]["containers"][0]
        for path, template in PODS
        if path.parent.name == "two-nodes-ray"
    ]

    assert len(containers) == 2
    assert all({"livenessProbe", "readinessProbe"} <= set(entry) for entry in containers)


def test_a_route_of_the_gateway_leads_to_the_api_only() -> None:
    route = document_of(KUBERNETES / "replicas-gateway" / "gateway.yaml", "HTTPRoute")

    paths = [match["path"]["value"] for match in route["spec"]["rules"][0]["matches"]]

    assert paths == ["/v1"]


@functools.cache
def longest_start_s() -> float:
    """Longest start that `gaudiserve plan` estimates, in seconds: 8B on one card and 70B on eight,
    with a long context and many sequences, at three times the usual time per graph."""
    sizes = (128256, 4096, 14336, 32, 32, 8, 128)
    facts = ModelConfig("8b", "LlamaForCausalLM", *sizes, max_position=131_072)
    large = replace(facts, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
    target = Target(device="gaudi3", seconds_per_graph=9.0)
    schedule = SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=8192)
    plans = [
        make_plan(
            model_facts,
            EngineConfig(
                model_facts.path,
                max_model_len=131_072,
                scheduler=schedule,
                parallel=ParallelConfig(tensor_parallel_size=cards),
            ),
            target,
        )
        for model_facts, cards in ((facts, 1), (large, 8))
    ]
    assert all(plan.fits for plan in plans)
    return max(plan.startup_seconds for plan in plans)


@pytest.mark.parametrize(("path", "template"), WITH_API, ids=ids(WITH_API))
def test_probes_ports_and_grace_periods_match_the_server(path: Path, template: Document) -> None:
    pod = template["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}

    assert (port["name"], port["containerPort"]) == ("http", 8000)
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
    assert probes["startup"]["httpGet"]["path"] == "/ready"
    allowed_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert allowed_s >= longest_start_s()
    assert probes["readiness"]["httpGet"]["path"] == "/ready"
    assert probes["liveness"]["httpGet"]["path"] == "/live"
    word, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    grace_s = pod["terminationGracePeriodSeconds"] - int(pause_s)
    assert grace_s > float(given(container)["shutdown-timeout"])


def test_a_rollout_may_take_as_long_as_the_startup_probe() -> None:
    spec = document_of(KUBERNETES / "base" / "deployment.yaml", "Deployment")["spec"]
    probe = spec["template"]["spec"]["containers"][0]["startupProbe"]

    # Without the field, `kubectl rollout status` fails after 600 s.
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_replicas_are_spread_over_nodes() -> None:
    spec = document_of(KUBERNETES / "replicas" / "replicas.yaml", "Deployment")["spec"]
    base = document_of(KUBERNETES / "base" / "deployment.yaml", "Deployment")["spec"]
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]

    assert spread["labelSelector"] == base["selector"]
    # One node may have all cards.
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize(("path", "template"), WHOLE, ids=ids(WHOLE))
def test_the_server_makes_its_cache_folder_in_a_volume(path: Path, template: Document) -> None:
    (container,) = template["spec"]["containers"]
    mounts = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    environment = {item["name"]: item.get("value", "") for item in container["env"]}
    folder = Path(environment["XDG_CACHE_HOME"]) / "gaudiserve"

    # Some provisioners make volumes with mode 0777; test_cache_folder.py shows that the server
    # writes no file beside the recipes in such a folder.
    assert folder not in mounts
    assert folder.parent in mounts


@pytest.mark.parametrize(("path", "template"), WHOLE, ids=ids(WHOLE))
def test_a_pod_requests_cards_with_group_and_node_selector(path: Path, template: Document) -> None:
    pod = template["spec"]
    (container,) = pod["containers"]
    resources = container["resources"]
    cards = int(resources["limits"]["habana.ai/gaudi"])

    assert pod["runtimeClassName"] == "habana"
    # The image's user can open root's device nodes only with their group.
    assert pod["securityContext"]["supplementalGroups"] == [0]
    assert pod["nodeSelector"]
    assert {"key": "habana.ai/gaudi", "operator": "Exists", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]
    # Kubernetes requires requests equal to limits for extended resources and huge pages.
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["hugepages-2Mi"] == f"{HUGE_PAGES_MIB_PER_CARD * cards // 1024}Gi"
    flags = given(container)
    assert cards == int(flags.get("tensor-parallel-size", 1 if cards == 1 else cards))
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize(("path", "template"), WHOLE, ids=ids(WHOLE))
def test_a_pod_has_no_token_drops_capabilities_and_writes_to_volumes_only(
    path: Path, template: Document
) -> None:
    pod = template["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    # Cache and log folders that the image sets, and the folder of temporary files.
    assert {"/cache", "/tmp", "/var/log/gaudiserve"} <= set(mounts.values())
    # A folder in the claim of recipes would be made by the host's root.
    environment = {item["name"]: item.get("value", "") for item in container["env"]}
    assert (mounts["hub"], environment["HF_HOME"]) == ("/hub", "/hub")


@pytest.mark.parametrize(("path", "template"), WHOLE, ids=ids(WHOLE))
def test_the_constraint_of_openshift_admits_a_pod(path: Path, template: Document) -> None:
    constraint = document_of(CONSTRAINT, "SecurityContextConstraints")
    pod = template["spec"]
    (container,) = pod["containers"]
    group = pod["securityContext"]["fsGroup"]

    assert constraint["runAsUser"]["uid"] == pod["securityContext"]["runAsUser"]
    assert any(row["min"] <= group <= row["max"] for row in constraint["fsGroup"]["ranges"])
    assert constraint["supplementalGroups"]["type"] == "RunAsAny"
    # Nothing more than the pod has.
    assert constraint["allowHostIPC"] == pod["hostIPC"]
    assert constraint["readOnlyRootFilesystem"] is True
    rights = container["securityContext"]["capabilities"]
    assert constraint["allowedCapabilities"] == rights["add"]
    assert constraint["requiredDropCapabilities"] == rights["drop"]
    assert constraint["allowPrivilegeEscalation"] is False
    assert constraint["seccompProfiles"] == ["runtime/default"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= set(constraint["volumes"])
    allowed = [name for name in constraint if name.startswith("allowHost") and constraint[name]]
    assert allowed == ["allowHostIPC"]


def test_the_constraint_of_openshift_has_the_required_fields() -> None:
    constraint = document_of(CONSTRAINT, "SecurityContextConstraints")

    # `required` of its published schema: openshift/api, security/v1.
    hosts = ("DirVolumePlugin", "IPC", "Network", "PID", "Ports")
    required = {f"allowHost{name}" for name in hosts}
    required |= {"allowPrivilegedContainer", "allowedCapabilities", "defaultAddCapabilities"}
    required |= {"priority", "readOnlyRootFilesystem", "requiredDropCapabilities", "volumes"}
    assert required <= set(constraint)


def test_the_pods_may_use_the_constraint_of_openshift() -> None:
    role = document_of(CONSTRAINT, "ClusterRole")
    binding = document_of(KUBERNETES / "openshift" / "binding.yaml", "RoleBinding")
    account = document_of(KUBERNETES / "base" / "access.yaml", "ServiceAccount")
    constraint = document_of(CONSTRAINT, "SecurityContextConstraints")
    (rule,) = role["rules"]
    (subject,) = binding["subjects"]

    assert rule["resourceNames"] == [constraint["metadata"]["name"]]
    assert (rule["verbs"], rule["resources"]) == (["use"], ["securitycontextconstraints"])
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert subject == {"kind": "ServiceAccount", "name": account["metadata"]["name"]}


def test_a_route_of_openshift_leads_to_the_api_only() -> None:
    (route,) = documents((KUBERNETES / "openshift" / "route.yaml").read_text("utf-8"))
    service = document_of(KUBERNETES / "base" / "service.yaml", "Service")

    assert route["spec"]["path"] == "/v1"
    assert route["spec"]["to"]["name"] == service["metadata"]["name"]
    assert route["spec"]["port"]["targetPort"] == service["spec"]["ports"][0]["name"]


def test_secrets_are_created_by_a_command_that_the_pages_show() -> None:
    page = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    wanted: dict[str, dict[str, Any]] = {}
    for _, template in PODS:
        for entry in template["spec"]["containers"][0]["env"]:
            if "secretKeyRef" in entry.get("valueFrom", {}):
                wanted[entry["name"]] = entry["valueFrom"]["secretKeyRef"]

    assert set(wanted) == {"GAUDISERVE_API_KEY", "HF_TOKEN", "GAUDISERVE_DATA_PARALLEL_TOKEN"}
    assert wanted["HF_TOKEN"]["optional"] is True
    assert "optional" not in wanted["GAUDISERVE_API_KEY"]
    for reference in wanted.values():
        command = f"create secret generic {reference['name']} --from-literal={reference['key']}="
        assert command in page


@pytest.mark.parametrize(
    ("index", "kind"), [(1, "persistentVolumeClaim"), (2, "hostPath")], ids=["claim", "node"]
)
def test_a_volume_of_local_models_needs_two_uncommented_lines(index: int, kind: str) -> None:
    lines = list(LOCAL_MODEL_LINES.finditer(DEPLOYMENT))
    text = DEPLOYMENT
    for line in (lines[0], lines[index]):
        text = text.replace(line[0], f"{line[1]}{line[2]}")

    pod = yaml.safe_load(text)["spec"]["template"]["spec"]

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert len(lines) == 3
    assert kind in volumes["models"]
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert set(mounts) == set(volumes)


def test_metrics_that_autoscalers_and_pickers_read_are_documented() -> None:
    # test_docs_examples.py checks that a server has all metrics of this page.
    served = set(re.findall(r"`(\w+:\w+)`", METRICS_PAGE))
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in FILES
        if path.parent.name in ("autoscale-hpa", "autoscale-keda", "replicas-gateway")
    )
    named = set(re.findall(r"(?:vllm|gaudiserve):\w+", text))

    # A server has the metrics of adapters only with --enable-lora.
    assert named - {"vllm:lora_requests_info", "gaudiserve:hpu"} <= served
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= named


def test_the_adapter_rules_name_the_metrics_of_the_autoscaler() -> None:
    (rules,) = documents((KUBERNETES / "autoscale-hpa" / "adapter-rules.yaml").read_text("utf-8"))
    hpa = document_of(KUBERNETES / "autoscale-hpa" / "hpa.yaml", "HorizontalPodAutoscaler")

    offered = {rule["name"]["as"] for rule in rules["rules"]["custom"]}

    assert {metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]} == offered
