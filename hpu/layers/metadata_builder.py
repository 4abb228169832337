"""MetadataBuilder: `build_metadata` with the arguments that are fixed for a model. It is a module,
so that a back end can compile it like a layer."""

from typing import Any

from torch import Tensor, nn

from config.model.decoder_spec import IndexerSpec, TemperatureTuning
from hpu.layers.metadata import (
    AttentionInputs,
    AttentionMetadata,
    Visibility,
    WindowRings,
    build_metadata,
    images_metadata,
    make_rings,
    state_metadata,
    with_block_index,
    with_query_scale,
)
from hpu.ops.kernels import AttentionForm


class MetadataBuilder(nn.Module):
    """Derives the attention metadata of a launch. Has no parameters."""

    alibi_slopes: Tensor | None

    def __init__(
        self,
        kinds: tuple[Visibility, ...],
        *,
        causal: bool,
        alibi_slopes: Tensor | None = None,
        temperature: TemperatureTuning | None = None,
    ) -> None:
        """Parameters: see `build_metadata` and `with_query_scale`."""
        super().__init__()
        self.block_size = 0
        """Block size of the bound caches."""
        self._rings: WindowRings | None = None
        self.attention_form: AttentionForm | None = None
        """Mask form of the fused kernels; None: plain operations."""
        self.contiguous = False
        self._kinds = kinds
        self._causal = causal
        self._temperature = temperature
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def bind(self, block_size: int, num_rings: int) -> None:
        """Set the block size of the bound caches, and the number of rings of layers with a window;
        `num_rings` 0: these layers have blocks."""
        self.block_size = block_size
        self._rings = make_rings(self._kinds, block_size, num_rings)

    def forward(self, inputs: AttentionInputs) -> AttentionMetadata:
        metadata = build_metadata(
            inputs,
            self.block_size,
            self._kinds,
            self.attention_form,
            contiguous=self.contiguous,
            causal=self._causal,
            alibi_slopes=self.alibi_slopes,
            rings=self._rings,
        )
        if self._temperature is None:
            return metadata
        return with_query_scale(metadata, inputs.positions, self._temperature)


class HybridMetadataBuilder(MetadataBuilder):
    """Builder for models with states, cross attention or indexers. A separate class, because
    torch.compile guards every attribute that a decoder reads in a launch."""

    def __init__(
        self,
        kinds: tuple[Visibility, ...],
        *,
        has_states: bool,
        embeddings_per_tile: int,
        indexer: IndexerSpec | None,
        **arguments: Any,
    ) -> None:
        """`has_states`: whether some layers have a state. `embeddings_per_tile`: embeddings of an
        image tile for cross attention; 0: no cross attention. `indexer`: indexer of the layers that
        choose blocks of keys. `arguments`: arguments of MetadataBuilder."""
        super().__init__(kinds, **arguments)
        self._has_states = has_states
        self._indexer = indexer
        self._embeddings_per_tile = embeddings_per_tile

    def forward(self, inputs: AttentionInputs) -> AttentionMetadata:
        metadata = super().forward(inputs)
        if self._has_states:
            metadata = metadata._replace(states=state_metadata(inputs))
        if self._embeddings_per_tile:
            cross = images_metadata(inputs, self._embeddings_per_tile)
            metadata = metadata._replace(cross=cross)
        if self._indexer:
            metadata = with_block_index(metadata, inputs, self._indexer, self.attention_form)
        return metadata
