"""The text model of Qwen3-VL MoE, whose expert tensors are stacked, (experts, in, out); the dense
model is a plain Qwen3."""

from collections.abc import Mapping
from dataclasses import replace

from config.model.decoder_spec import DecoderSpec, Family, MoESpec
from config.model.families.dense import qwen3
from config.model.families.moe import QWEN_FIELDS
from config.model.model_config import ModelConfig


def _qwen3_vl_moe(config: ModelConfig) -> DecoderSpec:
    return replace(qwen3(config), moe=MoESpec(layout="transposed"))


FAMILIES: Mapping[str, Family] = {
    "Qwen3VLMoeTextForCausalLM": Family(
        _qwen3_vl_moe,
        "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B (text)",
        renamed={"num_local_experts": ("num_experts",)},
        # The router weights are always normalized to sum 1.
        moe=QWEN_FIELDS._replace(renormalize=""),
    ),
}
