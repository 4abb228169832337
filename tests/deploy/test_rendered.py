"""`make test-deploy`: each overlay of deploy/kubernetes, rendered by kubectl, against the schemas
of Kubernetes. Custom resources are checked against `crd_expectations.yaml` and, with
`--crd-schemas FOLDER`, against published schemas: files of CustomResourceDefinitions, or
`kind_version.json` of a catalogue."""

import copy
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from manifests import OVERLAYS, Document, documents, pod_templates, rendered

pytestmark = pytest.mark.deploy

EXPECTED = documents((Path(__file__).parent / "crd_expectations.yaml").read_text(encoding="utf-8"))[
    0
]
KUBERNETES_VERSIONS = ("1.32", "1.35")
"""The oldest and the newest version, whose schemas all resources fit."""


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> tuple[str, list[Document]]:
    return request.param, rendered(request.param)


def at(value: Any, path: list[str]) -> Iterator[Document]:
    """The mappings at `path`; lists on the way are searched entry by entry."""
    if isinstance(value, list):
        for item in value:
            yield from at(item, path)
    elif not path:
        yield value
    elif path[0] in value:
        yield from at(value[path[0]], path[1:])


def test_resources_of_kubernetes_fit_its_schemas(overlay: tuple[str, list[Document]]) -> None:
    import kubernetes_validate

    found = [item for item in overlay[1] if item["kind"] not in EXPECTED]

    for entry, version in itertools.product(found, KUBERNETES_VERSIONS):
        # In strict mode, a field that the schema does not know is an error.
        kubernetes_validate.validate(entry, version, strict=True)

    assert {"Service", "NetworkPolicy", "ServiceAccount", "PodDisruptionBudget"} <= {
        entry["kind"] for entry in found
    }


def test_the_cpu_overlay_requests_no_card_resources() -> None:
    found = rendered("cpu")
    (pod,) = [template["spec"] for entry in found for template in pod_templates(entry)]
    (container,) = pod["containers"]

    assert {"runtimeClassName", "hostIPC", "tolerations"}.isdisjoint(pod)
    assert container["image"] == "gaudiserve:cpu"
    assert container["args"] == ["serve"]
    assert {"name": "GAUDISERVE_DEVICE", "value": "cpu"} in container["env"]
    for amounts in container["resources"].values():
        assert set(amounts) <= {"cpu", "memory"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "habana" not in str(found)


def test_the_disruption_budget_of_ray_clusters_uses_min_available(
    overlay: tuple[str, list[Document]],
) -> None:
    (spec,) = [item["spec"] for item in overlay[1] if item["kind"] == "PodDisruptionBudget"]
    kinds = {item["kind"] for item in overlay[1]}

    # Kubernetes asks the owner of the pods for their number, unless minAvailable is a number.
    expected = {"minAvailable": 1} if "RayCluster" in kinds else {"maxUnavailable": 1}
    assert {name: spec[name] for name in spec if name != "selector"} == expected


def test_pods_of_custom_resources_fit_the_schema_of_a_pod(
    overlay: tuple[str, list[Document]],
) -> None:
    import kubernetes_validate

    templates = [
        pod_template for document in overlay[1] for pod_template in pod_templates(document)
    ]

    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(pod, version, strict=True)

    assert templates


def test_custom_resources_have_the_expected_fields(overlay: tuple[str, list[Document]]) -> None:
    for item in overlay[1]:
        if item["kind"] not in EXPECTED:
            continue
        expected = EXPECTED[item["kind"]]
        assert item["apiVersion"] == expected["apiVersion"]
        assert set(expected["required"]) <= set(item["spec"])
        for path, names in expected.items():
            if path.startswith("spec"):
                for mapping in at(item, path.split(".")):
                    assert set(mapping) <= set(names), (item["kind"], path)


@functools.cache
def schemas(folder: Path) -> dict[tuple[str, str, str], Document]:
    """Published schemas by group, kind and version."""
    found = {}
    for path in folder.rglob("*.yaml"):
        for document in documents(path.read_text(encoding="utf-8")):
            spec = document["spec"]
            for version in spec["versions"]:
                key = (spec["group"], spec["names"]["kind"].lower(), version["name"])
                found[key] = version["schema"]["openAPIV3Schema"]
    for path in folder.rglob("*.json"):
        kind, _, version = path.stem.rpartition("_")
        found[path.parent.name, kind, version] = json.loads(path.read_text(encoding="utf-8"))
    return found


def closed(schema: Any) -> Any:
    """The schema with unknown fields forbidden: an API server would drop them with only a
    warning."""
    if isinstance(schema, list):
        return [closed(option) for option in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    return made


def test_custom_resources_fit_published_schemas(
    overlay: tuple[str, list[Document]], request: pytest.FixtureRequest
) -> None:
    folder = request.config.getoption("--crd-schemas")
    if folder is None:
        pytest.skip("no --crd-schemas")
    known = schemas(Path(folder))

    for item in overlay[1]:
        if item["kind"] in EXPECTED:
            group, version = item["apiVersion"].split("/")
            schema = closed(known[group, item["kind"].lower(), version])
            # Kubernetes itself validates these two fields.
            body = {"spec": item["spec"]}
            schema["required"] = []
            errors = [
                f"{list(error.path)}: {error.message[:200]}"
                for error in Draft7Validator(schema).iter_errors(body)
            ]
            assert errors == [], item["kind"]


def test_an_overlay_has_the_cards_and_autoscaling_of_its_name(
    overlay: tuple[str, list[Document]],
) -> None:
    name, found = overlay
    kinds = {entry["kind"] for entry in found}
    cards = [
        int(template["spec"]["containers"][0]["resources"]["limits"].get("habana.ai/gaudi", 0))
        for entry in found
        for template in pod_templates(entry)
    ]

    expected = {"eight-cards": [8], "two-nodes-lws": [8, 8], "two-nodes-ray": [8, 8], "cpu": [0]}
    assert cards == expected.get(name, [1])
    assert ("Deployment" in kinds) != ("two-nodes" in name)
    autoscaled = name.startswith("autoscale")
    assert ("PodMonitor" in kinds) == autoscaled
    for entry in found:
        if entry["kind"] == "Deployment":
            # An autoscaler must not be combined with a fixed number of replicas in the file.
            assert ("replicas" in entry["spec"]) != autoscaled
