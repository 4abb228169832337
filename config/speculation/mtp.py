"""Facts of the layer for multi-token prediction (MTP) of DeepSeek-V3 and GLM-4.5, in vLLM's layout
(deepseek_mtp.py)."""

from collections.abc import Mapping
from dataclasses import replace

from config.checkpoint.weight_maps.base import Axis, WeightMap, WeightSpec, matrix
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.errors import SettingError
from config.model.decoder_spec import DecoderSpec
from config.model.model_config import ModelConfig
from config.speculation.base import SpeculationMethod
from config.speculation.drafter import DraftHeadFacts


class Mtp(DraftHeadFacts):
    keys: Mapping[str, type] = {"draft_tensor_parallel_size": int}
    spellings = ("deepseek_mtp",)

    def read(self, folder: str, target: ModelConfig) -> ModelConfig:
        """The target's ModelConfig, extended by the MTP layer."""
        if not target.num_mtp_layers:
            raise SettingError(
                f"--speculative-config names the method mtp, and {target.path} has no MTP layer "
                "(num_nextn_predict_layers; MTP layers of GGUF files are not loaded): use another "
                "method"
            )
        if target.is_quantized:
            raise SettingError(
                f"--speculative-config names the method mtp, and the weights of {target.path} are "
                "quantized, MTP is supported for unquantized weights only: use another method"
            )
        return replace(target, num_layers=target.num_layers + 1, num_mtp_layers=0)

    def check_num_layers(self, method: SpeculationMethod, model_config: ModelConfig) -> None:
        """No check: the layer follows the target's layers."""

    def weight_map(self, config: ModelConfig, spec: DecoderSpec, target: ModelConfig) -> WeightMap:
        """The last layer of `config`, which follows the target's layers in its checkpoint. The
        embedding and the output head are the target's; the copies in the layer are ignored."""
        hidden = Axis(config.hidden_size, "hidden_size")
        both = Axis(2 * hidden.size, "2 * hidden_size")
        layers = decoder_weight_map(config, spec, has_head=False)
        path = f"model.layers.{config.num_layers - 1}."
        own = [
            WeightSpec(f"{path}enorm.weight", (hidden.size,), "enorm.weight"),
            WeightSpec(f"{path}hnorm.weight", (hidden.size,), "hnorm.weight"),
            WeightSpec(f"{path}shared_head.norm.weight", (hidden.size,), "norm.weight"),
            matrix(f"{path}eh_proj.weight", hidden, both)._replace(parameter="fc.weight"),
        ]
        return replace(
            layers,
            outer=(*layers.outer, *own),
            ignored_suffixes=(
                *layers.ignored_suffixes,
                *(f"{path}embed_tokens.weight", f"{path}shared_head.head.weight"),
            ),
        )


METHODS = {"mtp": Mtp()}
