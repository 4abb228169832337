"""Calibration files of Intel Neural Compressor (INC): configurations, and the measurements of each
rank, which are repaired and unified over the ranks. File format: save_files.py in fp8_quant of
intel/neural-compressor. Repair and unification follow fix_measurements.py and unify_measurements.py
in calibration/ of vllm-project/vllm-gaudi."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import ConfigError
from config.json_text import Json
from config.model.quantization.inc import MEASURE, QUANTIZE

Node = Json
"""Measurements of a module: `inputs`, and `outputs` if measured, with a nested list of shape (1, 1)
per tensor; `params`, if there are weights, with such a list for `weight`."""
Record = Json
"""A measurement file: GlobalRank, LocalRank, Mode, and Nodes, which maps module paths to Node."""

STATS = "inc_output"
MEASURE_FILE = "maxabs_measure.json"
QUANTIZE_FILE = "maxabs_quant.json"
CACHE_CLASS = "VLLMKVCache"
ATTENTION_CLASSES = ("Matmul", "B2BMatmul", "Softmax", "ModuleFusedSDPA", CACHE_CLASS)
LEAST_LOSING = (r"\.gate_up_proj$", r"\.experts\.")
"""Patterns of module paths that stay quantized after `keep_least_losing`."""
CACHE_OF = {"matmul_qk": ("k_cache", "latent_cache_k"), "matmul_av": ("v_cache", "latent_cache_k")}
"""Attention matmul -> cache modules that its second input is read from."""


def write_configs(
    folder: Path, *, quantizes_cache: bool, skipped: list[str], scale_method: str
) -> tuple[Path, Path]:
    """Write the configurations for measuring and for quantizing; returns their paths. `skipped`:
    components of module paths that are not quantized. Paths in the files are absolute."""
    common = {
        "method": "HOOKS",
        "observer": "maxabs",
        "allowlist": {"types": [], "names": []},
        "dump_stats_path": str((folder / STATS).resolve()),
    }
    unquantized = [] if quantizes_cache else [CACHE_CLASS]
    measure = {**common, "mode": MEASURE, "blocklist": {"types": [], "names": skipped}}
    quantize = {
        **common,
        "mode": QUANTIZE,
        "scale_method": scale_method,
        # Scalar scales would be part of the graph, so each layer would compile its own graph.
        "scale_format": "const",
        "blocklist": {"types": unquantized, "names": skipped},
    }
    paths = folder / MEASURE_FILE, folder / QUANTIZE_FILE
    for path, fields in zip(paths, (measure, quantize), strict=True):
        path.write_text(json.dumps(fields, indent=4) + "\n", "utf-8")
    return paths


def keep_least_losing(config: Path, num_ranks: int, *, with_attention: bool) -> None:
    """Limit a quantization configuration to gate_up_proj and experts, except in the last of several
    layers: these modules cost the demo model the least accuracy (docs/inc.md).

    `config`: path of the configuration, in the folder of the measurement files. `num_ranks`: number
    of ranks that were measured. `with_attention`: also quantize the matmuls of attention and the KV
    cache. Raises ConfigError, for example if no module is a gate_up_proj or has experts.
    """
    nodes = read_measures(measure_path(config.parent, 0, num_ranks))["Nodes"]
    layers = (re.search(r"\.layers\.([0-9]{1,9})\.", name) for name in nodes)
    last = max((int(match[1]) for match in layers if match), default=0)
    kept = rf"\.layers\.{last}\."
    fields = json.loads(config.read_text("utf-8"))
    if last > 0:
        fields["blocklist"]["names"].append(kept)
    if not any(re.search(pattern, name) for pattern in LEAST_LOSING for name in nodes):
        raise ConfigError(
            f"0 of {len(nodes)} measured modules are a gate_up_proj or have experts: quantize all "
            "modules with --all-modules"
        )
    types = list(ATTENTION_CLASSES) if with_attention else []
    fields["allowlist"] = {"types": types, "names": list(LEAST_LOSING)}
    config.write_text(json.dumps(fields, indent=4) + "\n", "utf-8")


def measure_path(folder: Path, rank: int, num_ranks: int) -> Path:
    """Path of a rank's measurement file, without the suffix."""
    return folder / f"{STATS}_hooks_maxabs_{rank}_{num_ranks}"


def finish_measures(folder: Path, num_ranks: int) -> list[int]:
    """Repair and unify the measurements of all ranks. Writes files for each number of ranks that
    divides `num_ranks`, and returns these numbers: the maximum over all ranks bounds every shard.
    Raises ConfigError."""
    records = [read_measures(measure_path(folder, rank, num_ranks)) for rank in range(num_ranks)]
    unified = unify([repair(record) for record in records])
    _check_measured(unified)
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for size in sizes:
        for rank in range(size):
            write_measures(measure_path(folder, rank, size), {**unified, "LocalRank": rank})
    return sizes


def _check_measured(record: Record) -> None:
    """Raise ConfigError for a projection whose inputs were all zero: their scale would clamp all
    other inputs. Without images, cross attention has such inputs."""
    unmeasured = [
        name
        for name, node in record["Nodes"].items()
        if name.endswith("_proj") and not np.any([np.any(value) for value in node["inputs"]])
    ]
    if unmeasured:
        raise ConfigError(
            f"{len(unmeasured)} of {len(record['Nodes'])} modules had only zeros as inputs, the "
            f"first is {unmeasured[0]}: add samples that reach them (for a model with images: "
            "samples with images), or leave them in bfloat16 with --skip"
        )


def read_measures(path: Path) -> Record:
    """Read measurements from the JSON file, which has the same content as INC's pickled file.
    Raises ConfigError if the file cannot be read."""
    file = path.with_suffix(".json")
    try:
        record: Record = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"no measurements were written: {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} holds no measurements: {error}; measure again") from error
    return record


def write_measures(path: Path, record: Record) -> None:
    """Write measurements as JSON, and as .npz with arrays for INC."""
    path.with_suffix(".json").write_text(json.dumps(record, indent=4), "utf-8")
    nodes = {name: _as_arrays(node) for name, node in record["Nodes"].items()}
    # INC expects an array that contains a single object.
    payload: Any = {**record, "Nodes": nodes}
    np.savez(path.with_suffix(".npz"), payload)


def repair(record: Record) -> Record:
    """Replace the measurements of values read from a KV cache by the measurements of the cache's
    inputs, because the reads include blocks of other requests and slots that were never written."""
    nodes = {name: dict(node) for name, node in record["Nodes"].items()}
    for name, node in nodes.items():
        parent, _, own = name.rpartition(".")
        caches = (nodes.get(f"{parent}.{cache}") for cache in CACHE_OF.get(own, ()))
        cache = next((candidate for candidate in caches if candidate is not None), None)
        if cache is not None:
            node["inputs"] = [node["inputs"][0], cache["inputs"][0]]
    return {**record, "Nodes": nodes}


def unify(records: list[Record]) -> Record:
    """Maximum of each measurement over all ranks. Raises ConfigError if the ranks' modules
    differ."""
    first, *others = records
    for record in others:
        if record["Nodes"].keys() != first["Nodes"].keys():
            raise ConfigError(
                f"the ranks measured {len(first['Nodes'])} and {len(record['Nodes'])} modules, "
                "they must be the same"
            )
    nodes = {
        name: _largest([record["Nodes"][name] for record in records]) for name in first["Nodes"]
    }
    return {**first, "Nodes": nodes}


def _largest(nodes: list[Node]) -> Node:
    def largest(values: list[Any]) -> Any:
        return np.max([np.asarray(value, np.float32) for value in values], axis=0).tolist()

    first = nodes[0]
    found: Node = {
        kind: [largest([node[kind][index] for node in nodes]) for index in range(len(first[kind]))]
        for kind in ("inputs", "outputs")
        if first.get(kind) is not None
    }
    if "params" in first:
        found["params"] = {
            name: largest([node["params"][name] for node in nodes]) for name in first["params"]
        }
    return found


def _as_arrays(node: Node) -> Node:
    found: Node = {
        kind: [np.array(value) for value in node[kind]]
        for kind in ("inputs", "outputs")
        if kind in node
    }
    if "params" in node:
        found["params"] = {name: np.array(value) for name, value in node["params"].items()}
    return found
