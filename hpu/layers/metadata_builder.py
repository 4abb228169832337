"""MetadataBuilder: `build_metadata` with what is the same for every launch of a model; a module, so
that a back end compiles it like a layer."""

from torch import nn

from hpu.layers.metadata import AttentionInputs, AttentionMetadata, Windows, build_metadata
from hpu.ops.kernels import AttentionForm


class MetadataBuilder(nn.Module):
    """Derives the attention metadata of a launch. It has no parameters."""

    def __init__(self, windows: Windows, *, causal: bool) -> None:
        super().__init__()
        self.block_size = 0
        """Of the bound caches."""
        self.attention_form: AttentionForm | None = None
        """That of the fused kernels, where the model runs on them."""
        self.contiguous = False
        self._windows = windows
        self._causal = causal

    def forward(self, inputs: AttentionInputs) -> AttentionMetadata:
        return build_metadata(
            inputs,
            self.block_size,
            self._windows,
            self.attention_form,
            contiguous=self.contiguous,
            causal=self._causal,
        )
