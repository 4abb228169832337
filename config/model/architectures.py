"""Registry of decoder architectures, collected from config/model/families/. Imports no torch."""

import re
from difflib import get_close_matches

from config.errors import ConfigError
from config.kinds import Kinds
from config.model.decoder_spec import DecoderSpec, Family
from config.model.family_fields import causal_name
from config.model.model_config import AUTO, NATIVE, ModelConfig
from config.model.multimodal.text_part import WHOLE_MODELS

NEAR_NAME_RATIO = 0.85
"""Minimum similarity of a suggested name; high, since half of most names is ForCausalLM."""

_SPEECH = re.compile("Whisper|ASR|Speech|Transcri")

ARCHITECTURES = Kinds[Family]("config.model.families", "FAMILIES", "architecture").all


def is_native(config: ModelConfig, model_impl: str = AUTO) -> bool:
    """Whether the built-in implementation runs the generative model of `config`; otherwise the
    transformers implementation does. With NATIVE also for an unsupported architecture, for which
    `decoder_spec` then raises."""
    return model_impl == NATIVE or (model_impl == AUTO and config.architecture in ARCHITECTURES)


def decoder_spec(config: ModelConfig, *, has_head: bool = True) -> DecoderSpec:
    """Spec of the decoder. Without `has_head`, architecture names without an output head are
    accepted too. Raises ConfigError."""
    name = config.architecture
    if not has_head:
        name = causal_name(name)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{config.path} is a {config.architecture}, which is not supported; {nearest(name)}"
        )
    return ARCHITECTURES[name].make_spec(config)


def nearest(architecture: str) -> str:
    """Hint for an error about an unsupported architecture, such as supported architectures with
    similar names."""
    if _SPEECH.search(architecture):
        return "speech models are not supported"
    near = get_close_matches(
        architecture, [*ARCHITECTURES, *WHOLE_MODELS], n=3, cutoff=NEAR_NAME_RATIO
    )
    count = len(ARCHITECTURES) + len(WHOLE_MODELS)
    if not near:
        return f"docs/models.md lists the {count} supported architectures"
    return f"the nearest of the {count} architectures in docs/models.md are {', '.join(near)}"
