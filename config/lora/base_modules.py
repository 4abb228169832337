"""BaseModules: the base-model modules that an adapter may have weights for, and their shapes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from config.checkpoint.safetensors_files import StoredTensor, read_header, weight_files
from config.checkpoint.shapes import weight_map_of
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.errors import ConfigError
from config.lora.adapter_folder import DTYPES
from config.model.model_config import ModelConfig
from config.params.lora import EMBEDDING, EXPERTS, HEAD

_WEIGHT = ".weight"
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""transformers' names of the parameters that stack all experts of a layer."""
_ROUTER = ".gate.weight"
_GATES = (_ROUTER, ".shared_expert_gate.weight")
"""Suffixes of the parameters of routers and shared-expert gates."""
_ROUTER_NAMES = re.compile(r".+\.(?:gate|router)")
"""Module paths of routers in transformers."""


class TensorLocation(NamedTuple):
    """A tensor and its file."""

    file: Path
    tensor: StoredTensor


class BaseTensors:
    """The tensors in the files of a folder."""

    def __init__(self, folder: Path, weight_map: WeightMap) -> None:
        self._folder = folder
        self._weight_map = weight_map
        self.aliases: dict[str, str] = {}
        """Tensor name -> the name under which the checkpoint stores it."""

    def find(self, name: str) -> TensorLocation | None:
        """Location of the tensor with the mapped name `name` (WeightMap.map_name); None if the
        checkpoint has no tensor of this name in one of DTYPES."""
        return self._places.get(name) or self._places.get(self.aliases.get(name, ""))

    @cached_property
    def _places(self) -> dict[str, TensorLocation]:
        try:
            files = weight_files(self._folder)
        except ConfigError:
            # There are no complete weight files, as with random weights.
            return {}
        return {
            self._weight_map.map_name(tensor.name): TensorLocation(file, tensor)
            for file in files
            for tensor in read_header(file)
            if tensor.dtype in DTYPES
        }


@dataclass(frozen=True, slots=True)
class BaseModule:
    """A module of the base model."""

    name: str
    """Path in the checkpoint, as WeightMap.map_name returns it. An expert in a stacked tensor has
    the path of the tensor and the index of the expert; a tied output head is called lm_head."""
    in_features: int
    out_features: int
    """Output size. For the token embedding, `in_features` is the vocabulary size and
    `out_features` the hidden size."""
    spec: WeightSpec
    """WeightSpec of the module's weight."""
    kind: str = ""
    """One of EXTRA_TARGETS; empty: not an optional target."""
    refusal: str = ""
    """Reason why adapters for this module are not supported; empty: adapters are supported."""


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The routed experts of a layer, grouped by the stacked parameters of transformers."""

    parameters: dict[str, list[list[BaseModule]]] = field(
        default_factory=lambda: {GATE_UP: [], DOWN: []}
    )
    """Parameter name -> for each of its projections, the experts' modules."""

    @property
    def num_experts(self) -> int:
        return len(self.parameters[DOWN][0])

    def add(self, spec: WeightSpec) -> None:
        """Add a checkpoint weight of a single expert or of all experts."""
        is_down = spec.parameter.endswith(".w2_weight")
        projections = self.parameters[DOWN if is_down else GATE_UP]
        output = spec.outputs[0] if spec.outputs else 0
        while len(projections) <= output:
            projections.append([])
        if spec.num_experts is None:
            module = module_of(spec)
            assert module is not None, "an expert has matrices"
            projections[output].append(module)
            return
        projections[output] += [
            _of_stack(spec, expert, spec.num_experts) for expert in range(spec.num_experts)
        ]


class BaseModules:
    """The modules of a built-in model."""

    def __init__(self, model_config: ModelConfig) -> None:
        """Raises ConfigError, also for a model that is not built in."""
        weight_map = weight_map_of(model_config)
        if weight_map is None:
            raise ConfigError(
                f"{Path(model_config.path) / 'config.json'} is a {model_config.architecture}, "
                "which runs on the transformers implementation: adapters require a native "
                "implementation"
            )
        self.model_config = model_config
        self.weight_map: WeightMap = weight_map
        self._modules: dict[str, BaseModule] = {}
        self.expert_stacks: dict[str, ExpertStack] = {}
        """Checkpoint path of the layer -> its experts."""
        self._routers: dict[str, BaseModule] = {}
        self._layer = re.compile(re.escape(weight_map.layer_prefix) + r"[0-9]+(?=\.)")
        self.tensors = BaseTensors(Path(model_config.path), weight_map)
        for spec in weight_map.entries():
            module = module_of(spec)
            if module is not None:
                self._modules[module.name] = module
            layer = self._layer.match(spec.name)
            if layer is not None and module is not None and spec.parameter.endswith(_ROUTER):
                self._routers[layer[0]] = module
            if layer is not None and _is_of_experts(spec):
                self.expert_stacks.setdefault(layer[0], ExpertStack()).add(spec)
        if model_config.tie_word_embeddings and not model_config.is_encoder:
            self._add_tied_head()

    @property
    def modules(self) -> Mapping[str, BaseModule]:
        """Modules by name."""
        return self._modules

    @property
    def num_features(self) -> int:
        """Sum of the input and output sizes of all modules. Each expert of a stack counts."""
        found = dict(self._modules)
        for stack in self.expert_stacks.values():
            for projections in stack.parameters.values():
                found.update((module.name, module) for module in chain(*projections))
        return sum(module.in_features + module.out_features for module in found.values())

    def find(self, name: str) -> BaseModule | None:
        """The module for an adapter's module name `name`, if any. transformers and the checkpoint
        may have different paths for a router."""
        mapped = self._mapped(name)
        found = self._modules.get(mapped)
        if found is None and _ROUTER_NAMES.fullmatch(mapped):
            layer = self._layer.match(mapped)
            return None if layer is None else self._routers.get(layer[0])
        return found

    def find_experts(self, name: str) -> ExpertStack | None:
        """The routed experts for an adapter's module name `name`, if any. Only the layer and the
        last component of the path are compared: the components between may differ between
        transformers and the checkpoint."""
        if not name.endswith(".experts"):
            return None
        layer = self._layer.match(self._mapped(name))
        return None if layer is None else self.expert_stacks.get(layer[0])

    def _mapped(self, name: str) -> str:
        return self.weight_map.map_name(name + _WEIGHT).removesuffix(_WEIGHT)

    def _add_tied_head(self) -> None:
        """Add the output head that is tied to the embedding: the checkpoint has no tensor for
        it."""
        tables = [module for module in self._modules.values() if module.kind == EMBEDDING]
        for table in tables[:1]:
            spec = table.spec._replace(name="lm_head.weight", parameter="lm_head.weight")
            # `in_features` of an embedding is the vocabulary size.
            sizes = (table.out_features, table.in_features)
            self._modules["lm_head"] = BaseModule("lm_head", *sizes, spec, HEAD)
            self.tensors.aliases[spec.name] = table.spec.name


def _is_of_experts(spec: WeightSpec) -> bool:
    """Whether `spec` is a weight of routed experts, not a scale or bias."""
    is_weight = spec.parameter.endswith((".w13_weight", ".w2_weight"))
    is_values = spec.part is None or spec.part.role == "values"
    return is_weight and is_values and not spec.is_scales


def _of_stack(spec: WeightSpec, expert: int, count: int) -> BaseModule:
    """The module of an expert in a stacked tensor."""
    outputs, inputs = spec.features
    own = spec.plain()._replace(
        shape=spec.features, num_experts=None, expert=expert, total_experts=count
    )
    return BaseModule(f"{spec.name}.{expert}", inputs, outputs, own, EXPERTS)


def module_of(spec: WeightSpec) -> BaseModule | None:
    """The module with this weight; None for a tensor without a LoRA module, such as a bias, a norm
    or quantization scales."""
    name = spec.name
    if spec.part is not None:
        if spec.part.role != "values":
            return None
        name = spec.module + _WEIGHT
    parameter = spec.parameter
    if spec.num_experts is not None and name.endswith((".weight", "proj", "_blocks")):
        refusal = "its weights are stacked, and adapters for stacked experts are not supported"
        module = name.removesuffix(_WEIGHT)
        return BaseModule(module, spec.shape[-1], spec.shape[-2], spec, EXPERTS, refusal)
    if not name.endswith(_WEIGHT) or len(spec.shape) != 2:
        return None
    out_features, in_features = spec.shape[::-1] if spec.transposed else spec.shape
    kind = refusal = ""
    if parameter.endswith("embed_tokens.weight"):
        # The embedding table is (tokens, size).
        return BaseModule(name[: -len(_WEIGHT)], out_features, in_features, spec, EMBEDDING)
    if "embed" in parameter:
        refusal = "only the token embedding of a decoder takes an adapter"
    elif parameter == "lm_head.weight":
        kind = HEAD
        if spec.normalized or spec.offset:
            refusal = "the head's weights are changed when they are loaded"
    elif spec.expert is not None or parameter.endswith(_GATES):
        kind = EXPERTS
    elif parameter.endswith(".kv_b_proj.weight"):
        refusal = "it is absorbed into other weights for decodes"
    elif ".conv1d" in parameter or "qk_norm" in parameter:
        return None
    return BaseModule(name[: -len(_WEIGHT)], in_features, out_features, spec, kind, refusal)
