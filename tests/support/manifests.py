"""The manifests of deploy/kubernetes, as files and as `kubectl kustomize` renders them."""

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
"""Where a spec of Deployment, LeaderWorkerSet or RayCluster has a pod's template."""

Document = dict[str, Any]


class StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, which the plain loader overwrites silently."""


def _mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"duplicate key: {keys}"
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def documents(text: str) -> list[Document]:
    """The documents of a file; a duplicate key is an AssertionError."""
    return list(yaml.load_all(text, Loader=StrictLoader))


def rendered(overlay: str) -> list[Document]:
    """What `kubectl kustomize` makes of an overlay."""
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
    """The templates of a document's pods, with metadata and spec."""
    for path in TEMPLATES:
        found: Any = document.get("spec", {})
        for key in path:
            is_list = isinstance(key, int) and isinstance(found, list)
            found = found[key] if is_list or (isinstance(found, dict) and key in found) else {}
        if "containers" in found.get("spec", {}):
            yield found
