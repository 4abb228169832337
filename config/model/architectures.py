"""Registry of the decoder architectures: what the families of config/model/families/ declare.

It imports no torch.
"""

from collections.abc import Mapping
from difflib import get_close_matches

from config.engine import AUTO, NATIVE
from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family
from config.model.families import (
    deepseek,
    dense,
    gemma,
    gpt,
    gpt_oss,
    hybrid,
    lfm2,
    llama4,
    mllama,
    moe,
    mpt,
    normed,
    phimoe,
    qwen3_vl,
    remote,
)
from config.model.family_fields import causal_name
from config.model.model_config import ModelConfig
from config.model.multimodal.text_part import WHOLE_MODELS

NEAR_NAME_RATIO = 0.85
"""A name that is less alike is not near: half of most names is ForCausalLM."""

ARCHITECTURES: Mapping[str, Family] = {
    **dense.FAMILIES,
    **gemma.FAMILIES,
    **normed.FAMILIES,
    **gpt.FAMILIES,
    **mpt.FAMILIES,
    **remote.FAMILIES,
    **moe.FAMILIES,
    **gpt_oss.FAMILIES,
    **llama4.FAMILIES,
    **mllama.FAMILIES,
    **phimoe.FAMILIES,
    **qwen3_vl.FAMILIES,
    **deepseek.FAMILIES,
    **hybrid.FAMILIES,
    **lfm2.FAMILIES,
}


def is_native(config: ModelConfig, model_impl: str = AUTO) -> bool:
    """Whether the generating model of `config` is built in, or to be refused by `decoder_spec`;
    otherwise transformers' code is run."""
    return model_impl == NATIVE or (model_impl == AUTO and config.architecture in ARCHITECTURES)


def decoder_spec(config: ModelConfig, *, has_head: bool = True) -> DecoderSpec:
    """The spec of the decoder; without `has_head` the family's other endings are accepted too.
    ConfigError for an architecture that is not supported."""
    name = config.architecture
    if not has_head:
        name = causal_name(name)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{config.path} is a {config.architecture}, which is not built in; {nearest(name)}"
        )
    return ARCHITECTURES[name].make_spec(config)


def nearest(architecture: str) -> str:
    """The architectures whose names are nearest to an architecture that is not served, for error
    messages; without a near name, where all names are."""
    near = get_close_matches(
        architecture, [*ARCHITECTURES, *WHOLE_MODELS], n=3, cutoff=NEAR_NAME_RATIO
    )
    count = len(ARCHITECTURES) + len(WHOLE_MODELS)
    if not near:
        return f"docs/models.md lists the {count} architectures that are served"
    return f"the nearest of the {count} architectures in docs/models.md are {', '.join(near)}"
