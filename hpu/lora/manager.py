"""LoRAManager: adapters in host memory and in the slots of a model's layers."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor, nn

from config.errors import ConfigError, bytes_text, counted
from config.lora.adapter import LoadedAdapter, load_adapter
from config.lora.adapter_folder import AdapterFolder
from config.lora.base_modules import BaseModules
from config.lora.configured import extra_targets
from config.model.model_config import ModelConfig
from config.params.lora import EMBEDDING, EXPERTS, HEAD, LoRAConfig
from hpu.backends.base import Backend, Event
from hpu.distributed.process_groups import SINGLE, ProcessGroup, shard_rank
from hpu.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from hpu.layers.linear import LinearBase, RowParallelLinear
from hpu.layers.metadata import AttentionInputs
from hpu.layers.moe import Experts, MoE
from hpu.lora.adapter_weights import LowRank, rank_weights
from hpu.lora.context import LoRAContext
from hpu.lora.experts import ExpertSlots, RouterSlots, wrap_experts
from hpu.lora.layers import (
    EmbeddingSlots,
    HeadSlots,
    wrap_embedding,
    wrap_head,
    wrap_linear,
)
from hpu.lora.slots import CopySlot, LayerShape, PaddedSlots, PerAdapterSlots, Slots
from hpu.models.base import CausalLM, CompiledAdapters
from hpu.models.encoder import Encoder
from hpu.protocol import AdapterLoaded, LoadAdapter

logger = logging.getLogger(__name__)


Forward = Callable[[Tensor, AttentionInputs], Tensor]


class StagedAdapter(NamedTuple):
    """An adapter in host memory, ready to be copied to slots."""

    layers: dict[str, list[Tensor]]
    """Tensors for Slots.set, by layer path."""
    packed: Mapping[str, Any]
    """Tensors for CompiledAdapters.set, by layer name."""


NOTHING = StagedAdapter({}, {})


class Adapters:
    """The adapters of a worker. This base class is for a worker that serves no adapters."""

    is_on = False
    """Whether launches have the slot of each sequence."""

    def __init__(self) -> None:
        self.on_loaded: Callable[[], None] = lambda: None
        """Called when `take_loaded` has a new result, on the reading thread or within `load`."""

    def forward_of(self, forward: Forward) -> Forward:
        """`forward`, with the adapters of each launch set in the context first."""
        return forward

    def load(self, message: LoadAdapter) -> None:
        """Start to read an adapter, unless its content is already loaded or being read.
        `take_loaded` returns a result for each call."""
        raise AssertionError("adapters are not served")

    def drop(self, content: str) -> None:
        """Drop an adapter from host memory; it may stay in a slot."""
        raise AssertionError("adapters are not served")

    def activate(self, slots: Sequence[int], contents: Sequence[str]) -> None:
        """Copy adapters from host memory to slots, in order with the launches."""
        assert not slots, "a plan with adapters for a worker without adapters"

    def take_loaded(self) -> list[AdapterLoaded]:
        """Results of reads since the last call: loaded adapters and errors."""
        return []

    def clear(self) -> None:
        """Drop all adapters from host memory. Must not be called while an adapter is being read."""

    def close(self) -> None:
        """Stop the reading thread."""


class LoRAManager(Adapters):
    """The adapters of a worker. A thread reads adapters; the public methods must be called on the
    worker's thread. All ranks get the same calls."""

    is_on = True

    def __init__(
        self,
        config: LoRAConfig,
        model: CausalLM | Encoder,
        backend: Backend,
        *,
        group: ProcessGroup = SINGLE,
        expert_group: ProcessGroup = SINGLE,
        download_dir: str | None = None,
    ) -> None:
        """Wrap the layers of `model`, which is already prepared for its device. `download_dir`:
        folder of models from the hub. Raises ConfigError."""
        super().__init__()
        self._config = config
        self._base = BaseModules(model.config)
        self._backend = backend
        self._dtype = model.dtype
        self._group = group
        self._at = shard_rank(group, expert_group)
        self.extra_targets = extra_targets(config, self._base, download_dir)
        is_grouped = backend.shares_host_memory
        shards = group if config.fully_sharded_loras and not is_grouped else SINGLE
        rank = -(-config.max_lora_rank // shards.size) * shards.size
        self.context = LoRAContext(
            config.max_loras,
            rank,
            model.dtype,
            backend.device,
            backend.index_dtype,
            groups_rows=is_grouped,
        )
        self._shards = shards
        self._is_grouped = is_grouped
        self._copy: CopySlot = backend.compiled(_copy_slot)
        self.slots: dict[str, Slots] = {}
        """Slots by layer path."""
        self._head: HeadSlots | None = None
        self._compiled = CompiledAdapters()
        if isinstance(model, CausalLM):
            self._compiled = model.make_adapters(config.max_loras, rank)
        self._compiled_names: dict[str, str] = {}
        """Names of layers for which the compiled decoder computes adapters, by layer path."""
        # Keeps the creation of the slots out of the first copy's recipe.
        with backend.recipe:
            self._wrap(model)
        self._host: dict[str, Future[StagedAdapter]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lora")
        self._loaded: deque[AdapterLoaded] = deque()
        self._copied: deque[tuple[Event, StagedAdapter]] = deque()
        """Host tensors that copies may still read, with the event after which they are no longer
        read."""
        logger.info(
            "LoRA: slots for %s of rank %d in %d modules%s%s",
            counted(config.max_loras, "adapter"),
            config.max_lora_rank,
            len(self.slots),
            # On the CPU an adapter takes memory once it is loaded.
            f", {bytes_text(self.num_bytes)}" if self.num_bytes else "",
            f", with {', '.join(self.extra_targets)}" if self.extra_targets else "",
        )

    @property
    def num_bytes(self) -> int:
        stacked = (
            slots for slots in self.slots.values() if isinstance(slots, PaddedSlots | ExpertSlots)
        )
        return sum(tensor.num_bytes for tensor in stacked)

    def forward_of(self, forward: Forward) -> Forward:
        context, head = self.context, self._head

        def run(tokens: Tensor, inputs: AttentionInputs) -> Tensor:
            slots = inputs.features.lora_slots
            assert slots is not None, "a launch without slots"
            context.begin(slots)
            hidden = forward(tokens, inputs)
            if head is not None:
                hidden = head.extend(hidden)
            context.end()
            return hidden

        return run

    def load(self, message: LoadAdapter) -> None:
        future = self._host.get(message.content)
        if future is None:
            future = self._host[message.content] = self._pool.submit(self._read, message)

        def done(read: "Future[StagedAdapter]") -> None:
            if read.cancelled():
                return
            error = read.exception()
            if error is not None and self._host.get(message.content) is read:
                # Other ranks may have read it: all ranks retry at the next request.
                del self._host[message.content]
            text = None if error is None else str(error)
            if error is not None and not isinstance(error, ConfigError):
                logger.error("Adapter %s cannot be read", message.path, exc_info=error)
                text = f"{message.name} cannot be read"
            self._loaded.append(AdapterLoaded(message.content, text))
            self.on_loaded()

        future.add_done_callback(done)

    def drop(self, content: str) -> None:
        self._host.pop(content, None)

    def clear(self) -> None:
        self._host.clear()

    def take_loaded(self) -> list[AdapterLoaded]:
        loaded = []
        while self._loaded:
            loaded.append(self._loaded.popleft())
        return loaded

    def activate(self, slots: Sequence[int], contents: Sequence[str]) -> None:
        for slot, content in zip(slots, contents, strict=True):
            staged = self._host[content].result()
            self._copy_to(slot, staged)
            self._copied.append((self._backend.event(), staged))
            while self._copied and self._copied[0][0].done():
                self._copied.popleft()

    def warm_up(self) -> None:
        """Run the copies of a slot once, so that no copy compiles later."""
        if not self._is_grouped:
            self._copy_to(0, NOTHING)
            self._backend.synchronize()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _copy_to(self, slot: int, staged: StagedAdapter) -> None:
        for path, layer in self.slots.items():
            layer.set(slot, staged.layers.get(path, []))
        is_whole = staged.layers.keys() <= self._compiled_names.keys()
        self._compiled.set(slot, staged.packed, is_whole=is_whole)

    def _read(self, message: LoadAdapter) -> StagedAdapter:
        loaded = load_adapter(
            AdapterFolder(message.path, message.root, message.name),
            self._base,
            self._config.max_lora_rank,
            self.extra_targets,
            keeps_bytes=True,
        )
        if loaded.content != message.content:
            raise ConfigError(
                f"{message.name} has changed since it was registered: its hash is "
                f"{loaded.content[:12]}, it was {message.content[:12]}"
            )
        return self._stage(loaded)

    def _stage(self, loaded: LoadedAdapter) -> StagedAdapter:
        by_layer: dict[str, list[LowRank]] = {}
        for weight in rank_weights(loaded, self._at, self._dtype):
            by_layer.setdefault(weight.layer, []).append(weight)
        # A pipeline stage has only some of the layers.
        layers = {
            path: self.slots[path].stage(weights)
            for path, weights in by_layer.items()
            if path in self.slots
        }
        names = self._compiled_names
        packed = self._compiled.pack(
            {names[path]: staged for path, staged in layers.items() if path in names}
        )
        return StagedAdapter(layers, packed)

    def _wrap(self, model: CausalLM | Encoder) -> None:
        routers = {
            gate for module in model.modules() if isinstance(module, MoE) for gate in module.gates
        }
        for path, module in list(model.named_modules()):
            # Backends may wrap the model in a faster module.
            path = path.removeprefix("model.") if path.startswith("model.model.") else path
            if isinstance(module, ParallelLMHead):
                if HEAD in self.extra_targets:
                    slots = self._make_slots(_shape(module), module)
                    self.slots["lm_head"] = slots
                    self._head = HeadSlots(slots, self.context)
                    wrap_head(module, self._head)
            elif isinstance(module, VocabParallelEmbedding):
                if EMBEDDING in self.extra_targets and path.endswith("embed_tokens"):
                    vocab = self._base.find("model.embed_tokens") or self._base.find("embed_tokens")
                    assert vocab is not None, "a decoder has an embedding"
                    shape = LayerShape(vocab.in_features, (module.weight.shape[1],))
                    slots = self._make_slots(shape, None)
                    self.slots[path] = slots
                    wrap_embedding(module, EmbeddingSlots(slots, self.context, module.multiplier))
            elif isinstance(module, Experts):
                if EXPERTS in self.extra_targets:
                    found = wrap_experts(module, self.context, model.config.hidden_size)
                    self.slots |= {f"{path}.{name}": module for name, module in found.items()}
            elif isinstance(module, LinearBase) and module in routers:
                if EXPERTS in self.extra_targets:
                    shape = _shape(module)
                    router = RouterSlots(shape.in_features, sum(shape.output_sizes), self.context)
                    self.slots[path] = router
                    wrap_linear(module, router)
            elif isinstance(module, LinearBase):
                if path.endswith(".kv_b_proj"):
                    continue
                slots = self._make_slots(_shape(module), module)
                self.slots[path] = slots
                wrap_linear(module, slots)
                if module in self._compiled.names:
                    self._compiled_names[path] = self._compiled.names[module]

    def _make_slots(
        self, shape: LayerShape, module: LinearBase | None
    ) -> PerAdapterSlots | PaddedSlots:
        if self._is_grouped:
            return PerAdapterSlots(shape, self.context)
        group = self._shards
        if module is None or module.group.size == 1 or isinstance(module, ParallelLMHead):
            group = SINGLE
        return PaddedSlots(
            shape,
            self.context,
            self._copy,
            self._backend.zeros,
            group=group,
            is_row_parallel=isinstance(module, RowParallelLinear),
        )


def keep_adapted_experts(
    config: LoRAConfig, model_config: ModelConfig, model: nn.Module, download_dir: str | None
) -> None:
    """If experts have adapters, prevent fused operators from replacing their MoEMethod, and raise
    ConfigError if the router weights scale their inputs. Must be called before `model` is prepared
    for its device."""
    if EXPERTS not in extra_targets(config, BaseModules(model_config), download_dir):
        return
    for module in model.modules():
        if isinstance(module, MoE) and module.scales_input:
            raise ConfigError(
                f"--lora-extra-targets has experts, and in {model_config.architecture} the router "
                "weights scale the inputs of the experts: leave experts out"
            )
        if isinstance(module, Experts):
            module.keeps_method = True


def _shape(module: LinearBase) -> LayerShape:
    return LayerShape(module.in_features, tuple(module.output_sizes))


def _copy_slot(stack: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return stack.index_copy_(0, index, source)
