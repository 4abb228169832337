"""Facts of EAGLE-3 heads, in vLLM's layout (llama_eagle3.py)."""

from dataclasses import replace

from config.checkpoint.weight_maps.base import Axis, WeightMap, WeightSpec, matrix
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec
from config.model.model_config import ModelConfig
from config.speculation.drafter import DraftHeadFacts, projection, with_outer_tensors


class Eagle3(DraftHeadFacts):
    num_kept_layers = 3

    def is_inferred(self, model: str) -> bool:
        return "eagle3" in model

    def weight_map(self, config: ModelConfig, spec: DecoderSpec, target: ModelConfig) -> WeightMap:
        """A projection of three hidden states, a layer that reads concatenated embeddings and
        hidden states, a norm, and an output head over the most frequent tokens."""
        hidden = Axis(config.hidden_size, "hidden_size")
        three = Axis(3 * target.hidden_size, "3 * hidden_size of the target")
        both = Axis(2 * hidden.size, "2 * hidden_size")
        layers = decoder_weight_map(config, spec, has_head=False)
        first = [
            weight._replace(
                shape=(weight.shape[0], both.size),
                fields=f"{weight.fields.partition(' x ')[0]} x {both.fields}",
            )
            if weight.parameter == "self_attn.qkv_proj.weight"
            else weight
            for weight in layers.layers[0]
        ]
        first.append(WeightSpec("hidden_norm.weight", (hidden.size,), "hidden_norm.weight"))
        norm = WeightSpec("model.norm.weight", (hidden.size,), "norm.weight")
        vocab = Axis(draft_vocab_size(config), "draft_vocab_size")
        head = matrix("lm_head.weight", vocab, hidden, shard_dim=0)._replace(rounds_up=True)
        found = with_outer_tensors(
            replace(layers, layers=(tuple(first),), renamed=(("midlayer.", "layers.0."),)),
            [projection("fc", hidden, three), norm, head],
        )
        kept = tuple(prefix for prefix in found.ignored_prefixes if prefix != "lm_head.weight")
        # d2t and t2d map between draft tokens and target tokens; d2t is read separately.
        return replace(found, ignored_prefixes=(*kept, "model.d2t", "model.t2d"))

    def kept_layers(self, model_config: ModelConfig, num_layers: int) -> tuple[int, ...]:
        names = "eagle_aux_hidden_state_layer_ids"
        raw = model_config.fields.raw
        own = raw.get("eagle_config")
        found = raw.get(names) or (own.get(names) if isinstance(own, dict) else None)
        layers = found if found is not None else [2, num_layers // 2, num_layers - 3]
        if not (isinstance(layers, list) and len(layers) == 3) or not all(
            type(layer) is int and 0 <= layer < num_layers for layer in layers
        ):
            raise ConfigError(
                f"{model_config.path} reads hidden states before the layers {layers}, it must be 3 "
                f"of the {num_layers} layers of the target"
            )
        return tuple(layers)


def draft_vocab_size(config: ModelConfig) -> int:
    """Number of tokens that the head of `config` can draft."""
    return config.fields.count("draft_vocab_size", config.vocab_size)


FACTS = Eagle3()
METHODS = {"eagle3": FACTS}
