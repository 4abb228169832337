"""The manifests of deploy/kubernetes, as files and rendered by `kubectl kustomize`."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = (
    "cpu",
    "one-card",
    "eight-cards",
    "two-nodes-lws",
    "two-nodes-ray",
    "replicas",
    "replicas-gateway",
    "autoscale-hpa",
    "autoscale-keda",
)
TEMPLATES = (
    ("template",),
    ("leaderWorkerTemplate", "leaderTemplate"),
    ("leaderWorkerTemplate", "workerTemplate"),
    ("headGroupSpec", "template"),
    ("workerGroupSpecs", 0, "template"),
)
"""Paths of pod templates in the specs of Deployment, LeaderWorkerSet and RayCluster."""

Document = dict[str, Any]


class StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, which the plain loader overwrites silently."""


def _mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"duplicate key: {keys}"
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _sequence(loader: StrictLoader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
# Tags of compose: a second file removes or replaces a field of the first.
StrictLoader.add_constructor("!reset", lambda loader, node: None)
StrictLoader.add_constructor("!override", _sequence)


def documents(text: str) -> list[Document]:
    """Documents of a file; a duplicate key is an AssertionError."""
    return list(yaml.load_all(text, Loader=StrictLoader))


def rendered(overlay: str) -> list[Document]:
    """Documents of an overlay, rendered by `kubectl kustomize`."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # A warning names a field that is deprecated.
    assert not done.stderr.strip(), done.stderr
    return documents(done.stdout)


def pod_templates(document: Document) -> Iterator[Document]:
    """Pod templates of a document, with metadata and spec."""
    for path in TEMPLATES:
        found: Any = document.get("spec", {})
        for key in path:
            is_list = isinstance(key, int) and isinstance(found, list)
            found = found[key] if is_list or (isinstance(found, dict) and key in found) else {}
        if "containers" in found.get("spec", {}):
            yield found
