"""TransformersModel: a decoder that runs transformers' layers on our paged attention, linear
layers, loader and buckets. For architectures that are not built in, and for others if --model-impl
selects it.

The model is built without memory on torch's meta device and tried there: the trial records the
attention calls, and rejects code that does not run on paged attention.
"""

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from config.checkpoint.safetensors_files import Shapes, folder_shapes
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.shard import shard_of
from config.errors import ConfigError
from config.json_text import Json
from config.model.architectures import ARCHITECTURES, nearest
from config.model.json_fields import Fields, read_json
from config.model.model_config import MAX_LAYERS, ModelConfig, check_limits
from config.model.multimodal.text_part import text_part
from hpu.distributed.process_groups import ProcessGroup, shard_rank
from hpu.layers.attention import AttentionKind, HeadShape
from hpu.layers.attention_base import Shape
from hpu.layers.embedding import ParallelLMHead
from hpu.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from hpu.layers.metadata import (
    AttentionInputs,
    Visibility,
    WindowRings,
    build_metadata,
    distinct,
    make_rings,
)
from hpu.layers.moe import Experts
from hpu.layers.non_finite import NonFiniteGuard, nan_tensor
from hpu.layers.norm import RMSNorm
from hpu.models.base import LoadableModel, ModelBuild
from hpu.models.transformers_attention import (
    IMPLEMENTATION,
    MODULE,
    AttentionCall,
    CurrentLaunch,
    LayerAttention,
    UnsupportedModelCode,
    record_calls,
    register,
)
from hpu.models.transformers_experts import divide_experts, replace_experts
from hpu.models.transformers_replacements import replace_norms, replace_sparsity
from hpu.models.transformers_weights import weight_map_of
from hpu.models.transformers_writes import ViewWriteTrial, WithoutViewWrites
from hpu.ops.kernels import AttentionForm, Kernels
from hpu.quantization.base import LinearMethod, LinearShards
from hpu.quantization.kv_cache import KVCacheFormat
from hpu.quantization.unquantized import UNQUANTIZED

logger = logging.getLogger(__name__)

META = torch.device("meta")
TRIAL_BATCH, TRIAL_LENGTHS = 2, (3, 1)
"""Shapes of the trial launches on the meta device: a prefill and a decode."""

ATTENTION_KINDS = {"full_attention": False, "sliding_attention": True}
"""layer_types that paged attention supports -> whether they have a window."""

LINEAR_KINDS: Mapping[str, type[LinearBase]] = {
    "colwise": ColumnParallelLinear,
    "rowwise": RowParallelLinear,
}
"""Style in a tensor-parallel plan of transformers -> our layer."""
EXPERT_KIND = "moe_tp_experts"
WHOLE_KINDS = ("replicate", "replicated_with_grad_allreduce", "embedding_rowwise")
"""Styles of modules that can be replicated on every card."""


class _BodyOutput:
    """Output of a model body with hidden states only; other attributes are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _BodyStub(nn.Module):
    """Replaces the body of a model in the forward pass of its head: returns the hidden states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)

    @property
    def decoder(self) -> "_BodyStub":
        return self


class TransformersModel(LoadableModel):
    """Causal language model of transformers. Parameters are allocated, not filled, under
    transformers' module paths."""

    _body: Any
    """Body of the model: returns hidden states."""
    _head: Any
    """Head of the model: maps hidden states to logits."""

    def __init__(
        self,
        config: ModelConfig,
        build: ModelBuild,
        *,
        has_files: bool = True,
    ) -> None:
        """`has_files` False: only config.json is read. Raises ConfigError for unsupported code."""
        super().__init__()
        dtype, device, group = build.dtype, build.device, build.group
        self.config = config
        self.dtype = dtype
        self.device = device
        self._group = group
        self._quantization = build.quantization
        self._launch = CurrentLaunch()
        self._form: AttentionForm | None = None
        self._contiguous = False
        self._block_size = 0
        self._rings: WindowRings | None = None
        self.guard: NonFiniteGuard | None = None
        """Set if attention zeroes non-finite values."""
        has_files = has_files and device.type != "meta"
        stored = folder_shapes(Path(config.path)) if has_files else {}
        causal = _build(config, dtype, max_layers=len(stored) or MAX_LAYERS)
        try:
            body = causal.base_model
            register_stored_buffers(causal)
            shapes = {name: tuple(parameter.shape) for name, parameter in causal.named_parameters()}
            renamed = replace_experts(causal)
            replace_norms(causal)
            replace_sparsity(causal, dtype)
            frequencies = _freeze_rotary(causal, build.length(config))
            calls, self._writes_to_views = _try(causal, body, config)
            visibilities = [Visibility(call.window) for call in calls]
            self._kinds = distinct(visibilities)
            self._has_score_options = any(
                call.soft_cap is not None or call.has_sinks for call in calls
            )
            plan = _linear_plan(causal, group)
            self.weight_map = weight_map_of(
                causal, shapes, plan, renamed, stored, is_text_part=config.is_text_part
            )
            if has_files:
                _compare(self.weight_map, stored, config)
            head = causal.get_output_embeddings()
            self._replace_linears(causal, plan, head)
            if group.size > 1:
                divide_experts(causal, group, build.expert_group)
            allocate(causal, device, frequencies)
            self.layers = _decoder_layers(body, len(calls))
        except UnsupportedModelCode as error:
            raise _refusal(config, str(error)) from error
        self.attention_layers = [
            self._attention(call, visibility)
            for call, visibility in zip(calls, visibilities, strict=True)
        ]
        self._cache_sources = [
            index if call.shares_with is None else call.shares_with
            for index, call in enumerate(calls)
        ]
        """Index of the layer whose caches each layer reads."""
        for name, child in causal.named_children():
            self.add_module(name, child)
        # Not registered as modules: the loop above has registered their parts.
        self.__dict__["_body"] = body
        self.__dict__["_head"] = _detach_body(causal)
        logger.info(
            "Model: %s in transformers %s, with %d linear layers replaced",
            config.architecture,
            transformers.__version__,
            len(plan),
        )

    def _attention(self, call: AttentionCall, visibility: Visibility) -> LayerAttention:
        """Paged attention of a layer, added as a submodule of the module that calls it."""
        size = self._group.size
        if call.num_heads % size or call.num_kv_heads % size:
            raise ConfigError(
                f"{self.config.path} has {call.num_heads} query heads and {call.num_kv_heads} KV "
                f"heads, and {size} (--tensor-parallel-size) does not divide them"
            )
        shape = HeadShape(
            call.num_heads // size, call.num_kv_heads // size, call.head_dim, call.scale
        )
        kind = AttentionKind(
            visibility=visibility,
            index=self._kinds.index(visibility),
            soft_cap=call.soft_cap,
            shares_kv=call.shares_with is not None,
        )
        attention = LayerAttention(shape, self.dtype, kind, self._launch, rank=self._group.rank)
        call.module.add_module(MODULE, attention)
        return attention

    def _replace_linears(
        self, causal: Any, plan: Mapping[str, type[LinearBase]], head: nn.Module | None
    ) -> None:
        for path, kind in plan.items():
            linear: Any = causal.get_submodule(path)
            replacement = kind(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                dtype=self.dtype,
                device=META,
                method=self._method(path, kind, linear, is_head=linear is head),
                group=self._group,
            )
            replacement.device = self.device
            embedding = causal.get_input_embeddings()
            if linear.weight is embedding.weight:
                replacement.weight = embedding.weight
            parent, _, name = path.rpartition(".")
            setattr(causal.get_submodule(parent), name, replacement)

    def _method(
        self, path: str, kind: type[LinearBase], linear: Any, *, is_head: bool
    ) -> LinearMethod:
        if self._quantization is None:
            return UNQUANTIZED
        shape = linear.out_features, linear.in_features
        spec = WeightSpec(
            f"{path}.weight",
            shape,
            f"{path}.weight",
            shard_dim=kind.shard_dim,
            rounds_up=kind is ParallelLMHead,
        )
        shard = shard_of(spec, shard_rank(self._group))
        assert shard is not None, "a rank has a part of each linear layer"
        return self._quantization.linear_method(
            LinearShards([shard], in_features=shard.spec.shape[1], is_head=is_head)
        )

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        self._launch.metadata = build_metadata(
            inputs,
            self._block_size,
            self._kinds,
            self._form,
            contiguous=self._contiguous,
            rings=self._rings,
        )
        with WithoutViewWrites() if self._writes_to_views else contextlib.nullcontext():
            given = {"input_ids" if tokens.dim() == 2 else "inputs_embeds": tokens}
            out = self._body(**given, position_ids=inputs.positions, use_cache=False)
        # Reset: otherwise the metadata would be among the outputs of a compiled graph.
        self._launch.metadata = None
        hidden: Tensor = out.last_hidden_state
        return hidden if self.guard is None else self.guard(hidden, inputs)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._body.get_input_embeddings()(tokens)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits from the model's own head code; see CausalLM.logits."""
        out = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        return out.logits.squeeze(0)  # type: ignore[no-any-return]

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        for layer in self.attention_layers:
            layer.attn.use_kv_cache_format(format, self.device)

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        specs = (layer.attn.kv_cache_spec for layer in self.attention_layers)
        return [
            spec.shapes(num_blocks, block_size, num_rings) for spec in specs if spec is not None
        ]

    def cache_windows(self) -> list[int | None]:
        specs = [layer.attn.kv_cache_spec for layer in self.attention_layers]
        # A layer that shares a ring would read it after new tokens have overwritten tokens that
        # it sees.
        is_shared = None in specs
        return [None if is_shared else spec.window for spec in specs if spec is not None]

    def bind_caches(
        self, caches: list[tuple[Tensor, ...]], block_size: int, num_rings: int = 0
    ) -> None:
        own = dict(zip(sorted(set(self._cache_sources)), caches, strict=True))
        for attention, source in zip(self.attention_layers, self._cache_sources, strict=True):
            keys, values = own[source]
            attention.attn.bind_caches(keys, values, block_size, num_rings)
        self._block_size = block_size
        self._rings = make_rings(self._kinds, block_size, num_rings)

    @property
    def non_finite_guard(self) -> NonFiniteGuard | None:
        return self.guard

    def zero_non_finite(self) -> None:
        nan = nan_tensor(self.dtype, next(self.parameters()).device)
        for attention in self.attention_layers:
            attention.zero_non_finite(nan)
        if self.guard is None:
            self.guard = NonFiniteGuard(nan)

    def read_contiguously(self) -> None:
        self._contiguous = True
        self.zero_non_finite()

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool = False) -> None:
        """Switch attention, and our RMS norms and experts, to the device's fused kernels. Rotations
        stay in the model's code; projections are never merged."""
        self._form = kernels.attention_form(self.dtype, has_score_options=self._has_score_options)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.use_kernel(kernels.rms_norm)
            elif isinstance(module, Experts):
                module.use_kernels(kernels)
        for attention in self.attention_layers:
            attention.use_kernels(kernels)
        self.zero_non_finite()


def _refusal(config: ModelConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"{_named(config)} and its code in transformers {transformers.__version__} cannot be "
        f"used: it {reason}{_neighbours(config)}"
    )


def _named(config: ModelConfig) -> str:
    built_in = (
        "" if config.architecture in ARCHITECTURES else ", which has no native implementation,"
    )
    return f"{config.path} is a {config.architecture}{built_in}"


def _neighbours(config: ModelConfig) -> str:
    return "" if config.architecture in ARCHITECTURES else f"; {nearest(config.architecture)}"


def _build(config: ModelConfig, dtype: torch.dtype, *, max_layers: int) -> Any:
    """Causal language model (a PreTrainedModel) on the meta device. Raises ConfigError, also if it
    has more than `max_layers` layers: the files have at least one tensor per layer."""
    check_limits(config)
    file = Path(config.path, "config.json")
    if config.num_layers > max_layers:
        raise ConfigError(
            f"{file} specifies {config.num_layers} layers, the files have {max_layers} tensors"
        )
    fields = _config_fields(file)
    kind = _class_of(config, fields)
    if not getattr(kind, "_supports_attention_backend", False):
        raise _refusal(config, "does not call attention through transformers' interface")
    register()
    options = {"dtype": dtype, "attn_implementation": IMPLEMENTATION}
    causal = empty_model(lambda: kind, fields, options, named=_named(config), file=file)
    # With a pad token, some models search the tokens for padding, which would wait for the
    # device.
    causal.config.pad_token_id = None
    return causal


def empty_model(
    find_class: Callable[[], Any], fields: Json, options: Json, *, named: str, file: Path
) -> Any:
    """PreTrainedModel on the meta device, for inference, from the `fields` of a config.json
    `file`. `options`: arguments of the class; `named`: the model in an error. Raises ConfigError if
    transformers cannot build the model."""
    try:
        kind = find_class()
        theirs = kind.config_class.from_dict(fields)
        with torch.device(META):
            model = kind._from_config(theirs, **options)
    except Exception as error:
        # Third-party code reads a third-party file: any field may be wrong in any way.
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{named} and transformers {transformers.__version__} cannot build it from {file} "
            f"({type(error).__name__}: {text:.300})"
        ) from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def _config_fields(file: Path) -> Json:
    fields = Fields(read_json(file), file)
    return (text_part(fields) or fields).raw


def _class_of(config: ModelConfig, fields: Json) -> Any:
    """Model class in transformers. Raises ConfigError if there is no class."""
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
        if getattr(kind, "__name__", "") == config.architecture:
            return kind
    raise ConfigError(
        f"{_named(config)} and it is not a causal language model of transformers "
        f"{transformers.__version__}; code in a checkpoint is never run{_neighbours(config)}"
    )


def _try(causal: Any, body: Any, config: ModelConfig) -> tuple[list[AttentionCall], bool]:
    """Attention calls of the layers, and whether WithoutViewWrites is needed, found by forward
    passes on the meta device. Raises UnsupportedModelCode for code that does not run on paged
    attention."""
    theirs = causal.config
    if body is causal:
        raise UnsupportedModelCode("has no base model that is separate from its head")
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise UnsupportedModelCode("takes no positions")
    if getattr(theirs, "attention_chunk_size", None):
        raise UnsupportedModelCode("attends within chunks")
    num_layers = theirs.num_hidden_layers
    calls: list[AttentionCall] = []
    writes = ViewWriteTrial()

    def run(length: int) -> None:
        tokens = torch.zeros(TRIAL_BATCH, length, dtype=torch.int64, device=META)
        # In inference mode torch does not track views.
        with torch.inference_mode(False), torch.no_grad(), writes:
            out = body(input_ids=tokens, position_ids=tokens, use_cache=False)
            # clone reads the tensor, so that `writes` sees a read under another name.
            hidden = out.last_hidden_state.clone()
        if hidden.shape[:2] != tokens.shape:
            raise UnsupportedModelCode(f"returns hidden states of {tuple(hidden.shape)}")

    for length in TRIAL_LENGTHS:
        calls = record_calls(lambda length=length: run(length))  # type: ignore[misc]
        if len(calls) != num_layers or len({id(call.module) for call in calls}) != num_layers:
            raise UnsupportedModelCode(
                f"calls attention {len(calls)} times for its {num_layers} layers: separate caches "
                "and recurrent layers are not supported"
            )
    _check_windows(calls, theirs)
    _try_head(causal, body, config)
    return calls, writes.is_needed


def _try_head(causal: Any, body: Any, config: ModelConfig) -> None:
    hidden = torch.zeros(1, TRIAL_BATCH, causal.config.hidden_size, dtype=causal.dtype, device=META)
    logits: list[Tensor] = []

    def run() -> None:
        logits.append(causal(inputs_embeds=hidden, use_cache=False).logits)

    _detach_body(causal)
    record_calls(run)
    setattr(causal, causal.base_model_prefix, body)
    if logits[0].shape != (1, TRIAL_BATCH, config.vocab_size):
        raise UnsupportedModelCode(
            f"returns logits of {logits[0].shape[-1]} tokens, config.json specifies "
            f"{config.vocab_size}"
        )


def _detach_body(causal: Any) -> Any:
    """Turn `causal` into its head alone, which takes hidden states as `inputs_embeds`."""
    setattr(causal, causal.base_model_prefix, _BodyStub())
    return causal


def _check_windows(calls: list[AttentionCall], theirs: Any) -> None:
    """Raise UnsupportedModelCode unless the windows that the layers pass match the config."""
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        if getattr(theirs, "sliding_window", None) and not any(call.window for call in calls):
            raise UnsupportedModelCode("applies its sliding window only through a mask")
        return
    for index, (call, kind) in enumerate(zip(calls, kinds, strict=True)):
        if kind not in ATTENTION_KINDS:
            raise UnsupportedModelCode(f"has layers of the kind {kind}")
        if ATTENTION_KINDS[kind] != (call.window is not None):
            raise UnsupportedModelCode(f"applies the window of layer {index} only through a mask")


def _freeze_rotary(causal: Any, length: int) -> dict[nn.Module, Tensor]:
    """Fix the frequencies of length-dependent rope scalings for sequences of `length` tokens,
    the maximum that will be served: cached keys are never rotated again. Returns the frequencies
    by module."""
    frozen = {}
    for module in causal.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            frozen[module], module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, torch.device("cpu"), seq_len=length
            )
            module.rope_type = "frozen"
    return frozen


def _linear_plan(causal: Any, group: ProcessGroup) -> dict[str, type[LinearBase]]:
    """Path of each linear layer -> its replacement class. Raises UnsupportedModelCode if the layers
    cannot be divided among the ranks of `group`."""
    styles = getattr(causal.config, "base_model_tp_plan", None) or {}
    if group.size > 1 and not styles:
        raise UnsupportedModelCode("has no plan for several cards")
    prefix = f"{causal.base_model_prefix}."
    head = causal.get_output_embeddings()
    plan: dict[str, type[LinearBase]] = {}
    for path, module in causal.named_modules():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", path.removeprefix(prefix))
        style = styles.get(pattern, "replicate")
        if type(module) is nn.Linear and module is head:
            # The embedding is replicated on every card, and so is a tied head weight.
            is_tied = module.weight is causal.get_input_embeddings().weight
            plan[path] = ReplicatedLinear if is_tied and group.size > 1 else ParallelLMHead
        elif type(module) is nn.Linear and style in LINEAR_KINDS:
            plan[path] = LINEAR_KINDS[style]
            is_column = plan[path].shard_dim == 0
            divided = module.out_features if is_column else module.in_features
            if divided % group.size:
                raise UnsupportedModelCode(
                    f"has {divided} {'outputs' if is_column else 'inputs'} in {path}, and "
                    f"{group.size} (--tensor-parallel-size) does not divide them"
                )
        elif (
            group.size > 1 and style not in WHOLE_KINDS and not _has_divided_experts(module, style)
        ):
            raise UnsupportedModelCode(f"divides {path} among cards as {style}")
        elif type(module) is nn.Linear:
            plan[path] = ReplicatedLinear
    return plan


def _has_divided_experts(module: nn.Module, style: str) -> bool:
    return isinstance(module, Experts) and style == EXPERT_KIND


def register_stored_buffers(causal: Any) -> None:
    """Turn buffers that a checkpoint holds into parameters: the loader fills parameters only."""
    for module in causal.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _compare(weight_map: WeightMap, stored: Shapes, config: ModelConfig) -> None:
    """Raise ConfigError unless the `stored` tensors have the shapes that the model needs."""
    shapes = {weight_map.map_name(name): shape for name, shape in stored.items()}
    file = Path(config.path, "config.json")
    for spec in weight_map.entries():
        shape = shapes.get(spec.name)
        if shape != spec.shape:
            found = "no tensor of this name" if shape is None else _size_text(shape)
            raise ConfigError(
                f"{file} specifies {_size_text(spec.shape)} for {spec.name}, the files have {found}"
            )


def _size_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def allocate(causal: Any, device: torch.device, frequencies: Mapping[nn.Module, Tensor]) -> None:
    """Move parameters and buffers from the meta device to `device`: parameters empty, buffers with
    the values that the model's code computes, or with `frequencies`. Raises UnsupportedModelCode
    for buffers without a value and for other tensors on the meta device."""
    allocated: dict[int, nn.Parameter] = {}
    for path, module in causal.named_modules():
        if any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values()):
            raise UnsupportedModelCode(f"keeps tensors of {path} outside parameters and buffers")
        if device.type == "meta":
            continue
        if module in frequencies:
            for name, _ in list(module.named_buffers(recurse=False)):
                setattr(module, name, frequencies[module].to(device))
        else:
            _fill_buffers(_owner(causal, path), path, module, device)
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Tied parameters stay a single parameter.
            if id(parameter) not in allocated:
                empty = torch.empty_like(parameter, device=device)
                allocated[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, allocated[id(parameter)])


def _owner(causal: Any, path: str) -> Any:
    """Innermost PreTrainedModel that contains the module at `path`; for example, a vision tower."""
    owner = causal
    names = path.split(".")
    for count in range(1, len(names)):
        parent = causal.get_submodule(".".join(names[:count]))
        if isinstance(parent, PreTrainedModel):
            owner = parent
    return owner


def _fill_buffers(causal: Any, path: str, module: nn.Module, device: torch.device) -> None:
    """Compute the buffers of `module` on the host with the model's own initialization."""
    buffers = dict(module.named_buffers(recurse=False))
    if not buffers:
        return
    for name, buffer in buffers.items():
        # Mark the buffers: unchanged marks show that a buffer was not computed.
        marked = torch.full_like(buffer, _mark(buffer.dtype), device="cpu")
        setattr(module, name, marked)
    try:
        # `_init_weights` of a body may read attributes of the body.
        getattr(module, "_init_weights", causal._init_weights)(module)
    except AttributeError as error:
        # Some code reads attributes that only a part of the model has.
        raise UnsupportedModelCode(f"cannot initialize {path} by itself ({error})") from error
    for name in buffers:
        buffer = getattr(module, name)
        if (buffer == _mark(buffer.dtype)).all():
            raise UnsupportedModelCode(f"does not say how {path}.{name} is computed")
        setattr(module, name, buffer.to(device))


def _mark(dtype: torch.dtype) -> float:
    """Value that marks an uncomputed buffer."""
    return -12345.0 if dtype.is_floating_point else -123


def _decoder_layers(body: nn.Module, num_layers: int) -> list[nn.Module]:
    """Decoder layers in order. Raises UnsupportedModelCode if there is no list of `num_layers`
    layers."""
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise UnsupportedModelCode("has no list of layers")
