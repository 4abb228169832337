"""Facts of EAGLE heads, in vLLM's layout (llama_eagle.py)."""

from dataclasses import replace

from config.checkpoint.weight_maps.base import Axis, WeightMap
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.model.decoder_spec import DecoderSpec
from config.model.model_config import ModelConfig
from config.speculation.drafter import DraftHeadFacts, projection, with_outer_tensors


class Eagle(DraftHeadFacts):
    def is_inferred(self, model: str) -> bool:
        return "eagle-" in model

    def weight_map(self, config: ModelConfig, spec: DecoderSpec, target: ModelConfig) -> WeightMap:
        """A projection, and a decoder layer without an input norm. There is no final norm. The
        embedding and the output head are the target's."""
        hidden = Axis(config.hidden_size, "hidden_size")
        both = Axis(2 * hidden.size, "2 * hidden_size")
        layers = decoder_weight_map(config, spec, has_head=False)
        first = tuple(
            weight for weight in layers.layers[0] if not weight.name.startswith("input_layernorm.")
        )
        return with_outer_tensors(
            replace(layers, layers=(first, *layers.layers[1:])), [projection("fc", hidden, both)]
        )


METHODS = {"eagle": Eagle()}
