"""`make test-deploy`: each overlay of deploy/kubernetes, rendered by kubectl, against the schemas
of Kubernetes. Custom resources are checked against `crd_expectations.yaml` and, with
`--crd-schemas FOLDER`, against published schemas: files of CustomResourceDefinitions, or
`kind_version.json` of a catalogue."""

import copy
import functools
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
KUBERNETES_VERSION = "1.32"


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> tuple[str, list[Document]]:
    return request.param, rendered(request.param)


def at(value: Any, path: list[str]) -> Iterator[Document]:
    """The mappings at a path, through lists."""
    if isinstance(value, list):
        for one in value:
            yield from at(one, path)
    elif not path:
        yield value
    elif path[0] in value:
        yield from at(value[path[0]], path[1:])


def test_resources_of_kubernetes_fit_its_schemas(overlay: tuple[str, list[Document]]) -> None:
    import kubernetes_validate

    found = [one for one in overlay[1] if one["kind"] not in EXPECTED]

    for one in found:
        # Strict: a field that the schema does not know is an error.
        kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)

    assert {"Service", "NetworkPolicy", "ServiceAccount", "PodDisruptionBudget"} <= {
        one["kind"] for one in found
    }


def test_the_cpu_overlay_asks_for_nothing_of_a_card() -> None:
    found = rendered("cpu")
    (pod,) = [template["spec"] for one in found for template in pod_templates(one)]
    (container,) = pod["containers"]

    assert {"runtimeClassName", "hostIPC", "tolerations"}.isdisjoint(pod)
    assert container["image"] == "gaudiserve:cpu"
    assert container["args"][:3] == ["serve", "--device", "cpu"]
    for amounts in container["resources"].values():
        assert set(amounts) <= {"cpu", "memory"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "habana" not in str(found)


def test_pods_of_custom_resources_fit_the_schema_of_a_pod(
    overlay: tuple[str, list[Document]],
) -> None:
    import kubernetes_validate

    templates = [one for document in overlay[1] for one in pod_templates(document)]

    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)

    assert templates


def test_custom_resources_have_the_expected_fields(overlay: tuple[str, list[Document]]) -> None:
    for one in overlay[1]:
        if one["kind"] not in EXPECTED:
            continue
        expected = EXPECTED[one["kind"]]
        assert one["apiVersion"] == expected["apiVersion"]
        assert set(expected["required"]) <= set(one["spec"])
        for path, names in expected.items():
            if path.startswith("spec"):
                for mapping in at(one, path.split(".")):
                    assert set(mapping) <= set(names), (one["kind"], path)


@functools.cache
def schemas(folder: Path) -> dict[tuple[str, str, str], Document]:
    """By group, kind and version."""
    found = {}
    for path in folder.rglob("*.yaml"):
        for one in documents(path.read_text(encoding="utf-8")):
            spec = one["spec"]
            for version in spec["versions"]:
                key = (spec["group"], spec["names"]["kind"].lower(), version["name"])
                found[key] = version["schema"]["openAPIV3Schema"]
    for path in folder.rglob("*.json"):
        kind, _, version = path.stem.rpartition("_")
        found[path.parent.name, kind, version] = json.loads(path.read_text(encoding="utf-8"))
    return found


def closed(schema: Any) -> Any:
    """The schema with unknown fields forbidden, as an API server would drop them with a warning."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
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

    for one in overlay[1]:
        if one["kind"] in EXPECTED:
            group, version = one["apiVersion"].split("/")
            schema = closed(known[group, one["kind"].lower(), version])
            # Kubernetes itself checks these two.
            body = {"spec": one["spec"]}
            schema["required"] = []
            errors = [
                f"{list(error.path)}: {error.message[:200]}"
                for error in Draft7Validator(schema).iter_errors(body)
            ]
            assert errors == [], one["kind"]


def test_an_overlay_has_what_its_name_says(overlay: tuple[str, list[Document]]) -> None:
    name, found = overlay
    kinds = {one["kind"] for one in found}
    cards = [
        int(template["spec"]["containers"][0]["resources"]["limits"].get("habana.ai/gaudi", 0))
        for one in found
        for template in pod_templates(one)
    ]

    expected = {"eight-cards": [8], "two-nodes-lws": [8, 8], "two-nodes-ray": [8, 8], "cpu": [0]}
    assert cards == expected.get(name, [1])
    assert ("Deployment" in kinds) != ("two-nodes" in name)
    autoscaled = name.startswith("autoscale")
    assert ("PodMonitor" in kinds) == autoscaled
    for one in found:
        if one["kind"] == "Deployment":
            # An autoscaler and a number of replicas in the file would fight.
            assert ("replicas" in one["spec"]) != autoscaled
