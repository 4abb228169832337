"""DrafterFacts: facts of a method with a draft model or a draft head. DraftHeadFacts: heads with a
KV cache. HiddenHeadFacts: heads without a KV cache, which read a single hidden state."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from config.checkpoint.weight_maps.base import Axis, WeightMap, WeightSpec, matrix
from config.errors import ConfigError
from config.model.architectures import ARCHITECTURES, decoder_spec
from config.model.decoder_spec import DecoderSpec
from config.model.json_fields import Fields, read_json
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from config.model.split import check_split, states_of
from config.speculation.base import MethodFacts, SpeculationMethod

HEAD_KEYS: Mapping[str, type] = {"model": str, "revision": str, "draft_tensor_parallel_size": int}
"""Keys of a method with a checkpoint of its own."""
DRAFTER_KEYS: Mapping[str, type] = {**HEAD_KEYS, "max_model_len": int}
"""Keys of a method with a checkpoint and a KV cache of its own."""


class DrafterFacts(MethodFacts):
    """Facts of a method with a draft model or a draft head."""

    has_drafter = True
    is_whole_model = False
    """Whether the drafter is a model that `decoder_spec` handles, with its own embedding and output
    head."""
    has_kv_cache = True
    num_kept_layers = 0
    """Number of layers of the target before which the drafter reads hidden states; 0: it reads the
    hidden states after the last norm."""

    def model_config(
        self, method: SpeculationMethod, folder: str, target: ModelConfig, num_ranks: int
    ) -> ModelConfig:
        """ModelConfig of the drafter in `folder`; the target's for a head without a KV cache.
        Raises ConfigError, also if the drafter cannot be divided among `num_ranks` tensor-parallel
        ranks."""
        raise NotImplementedError

    def weights(
        self, method: SpeculationMethod, folder: str, model_config: ModelConfig, target: ModelConfig
    ) -> WeightMap:
        """Weights of a draft head with the ModelConfig `model_config`. The head loads only the last
        layer of the map."""
        raise NotImplementedError

    def kept_layers(self, model_config: ModelConfig, num_layers: int) -> tuple[int, ...]:
        """Indices of the `num_kept_layers` layers of a target of `num_layers` layers. Raises
        ConfigError if the checkpoint names layers that the target does not have."""
        return ()


def facts_of(method: SpeculationMethod) -> DrafterFacts:
    """Facts of a method with a draft model or a draft head."""
    facts = method.facts
    assert isinstance(facts, DrafterFacts), f"the method {method.method} has a drafter"
    return facts


def check_vocabulary(
    method: SpeculationMethod, model_config: ModelConfig, target: ModelConfig
) -> None:
    """Raise ConfigError if the vocabulary sizes of a drafter and its target differ."""
    if model_config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {method.model} has {model_config.vocab_size} tokens in its "
            f"vocabulary, and {target.path} has {target.vocab_size}, they must have the same "
            "vocabulary"
        )


def check_decoder(method: SpeculationMethod, model_config: ModelConfig) -> None:
    """Raise ConfigError unless the drafter is a decoder with a KV cache in each layer."""
    if model_config.is_encoder or states_of(model_config):
        what = "is an encoder" if model_config.is_encoder else "has recurrent layers"
        raise ConfigError(
            f"the draft model {method.model} {what}, it must be a decoder whose layers all have a "
            "KV cache"
        )


class DraftHeadFacts(DrafterFacts):
    """Facts of a head with a single decoder layer. It shares the embedding of the target."""

    keys = DRAFTER_KEYS
    reads_embedding = True

    def read(self, folder: str, target: ModelConfig) -> ModelConfig:
        """ModelConfig of the head, before the checks of `model_config`. Raises ConfigError."""
        return read_model_config(folder)

    def check_num_layers(self, method: SpeculationMethod, model_config: ModelConfig) -> None:
        """Raise ConfigError unless the head has 1 layer."""
        if model_config.num_layers != 1:
            raise ConfigError(
                f"the draft head {method.model} has {model_config.num_layers} layers, the method "
                f"{method.method} requires 1"
            )

    def weight_map(self, config: ModelConfig, spec: DecoderSpec, target: ModelConfig) -> WeightMap:
        """Weights of the head."""
        raise NotImplementedError

    def model_config(
        self, method: SpeculationMethod, folder: str, target: ModelConfig, num_ranks: int
    ) -> ModelConfig:
        """See DrafterFacts.model_config; the architecture is the decoder layer's."""
        model_config = self.read(folder, target)
        check_vocabulary(method, model_config, target)
        name = re.sub(r"Eagle\d?", "", model_config.architecture)
        if name not in ARCHITECTURES:
            raise ConfigError(
                f"the draft head {method.model} is a {model_config.architecture}, which is not "
                "supported"
            )
        if model_config.hidden_size != target.hidden_size:
            raise ConfigError(
                f"the draft head {method.model} has a hidden_size of {model_config.hidden_size}, "
                f"and {target.path} has {target.hidden_size}, they must be equal"
            )
        self.check_num_layers(method, model_config)
        model_config = replace(model_config, architecture=name, tie_word_embeddings=False)
        if num_ranks > 1:
            check_split(model_config, num_ranks)
        check_decoder(method, model_config)
        return model_config

    def weights(
        self, method: SpeculationMethod, folder: str, model_config: ModelConfig, target: ModelConfig
    ) -> WeightMap:
        return self.weight_map(model_config, decoder_spec(model_config), target)


def projection(name: str, rows: Axis, columns: Axis) -> WeightSpec:
    """Weight of a linear layer outside the head's decoder layer."""
    return matrix(f"model.{name}.weight", rows, columns)._replace(parameter=f"{name}.weight")


def with_outer_tensors(layers: WeightMap, outer: Iterable[WeightSpec]) -> WeightMap:
    """`layers` with the outer tensors `outer`, for a checkpoint that may also contain the target's
    embedding."""
    ignored = (*layers.ignored_prefixes, "model.embed_tokens.weight")
    return replace(layers, outer=tuple(outer), ignored_prefixes=ignored)


MAX_HEADS = 64


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of a head without a KV cache, from its config.json."""

    num_heads: int
    """Number of heads, which is the maximum number of draft tokens."""
    hidden_size: int
    """Hidden size of the target."""
    vocab_size: int


class HiddenHeadFacts(DrafterFacts):
    """Facts of a head without a KV cache. Its ModelConfig is the target's."""

    keys = HEAD_KEYS
    has_kv_cache = False

    def read_sizes(self, fields: Fields, folder: str, target: ModelConfig) -> HeadSizes:
        """Sizes of the head in `folder` with the config.json `fields`. Raises ConfigError."""
        raise NotImplementedError

    def weight_map(self, sizes: HeadSizes) -> WeightMap:
        """Weights of the head."""
        raise NotImplementedError

    def sizes(self, method: SpeculationMethod, folder: str, target: ModelConfig) -> HeadSizes:
        """Sizes of the head in `folder`. Raises ConfigError."""
        file = Path(folder) / "config.json"
        sizes = self.read_sizes(Fields(read_json(file), file), folder, target)
        for name, own, theirs in (
            ("hidden_size", sizes.hidden_size, target.hidden_size),
            ("vocab_size", sizes.vocab_size, target.vocab_size),
        ):
            if own != theirs:
                raise ConfigError(
                    f"{file} has {name} {own}, and {target.path} has {theirs}, they must be equal"
                )
        if method.max_drafts > sizes.num_heads:
            raise ConfigError(
                f"--speculative-config asks for {method.max_drafts} draft tokens, it must ask for "
                f"at most {sizes.num_heads}, the number of heads in {file}"
            )
        return sizes

    def model_config(
        self, method: SpeculationMethod, folder: str, target: ModelConfig, num_ranks: int
    ) -> ModelConfig:
        self.sizes(method, folder, target)
        return target

    def weights(
        self, method: SpeculationMethod, folder: str, model_config: ModelConfig, target: ModelConfig
    ) -> WeightMap:
        return self.weight_map(self.sizes(method, folder, target))


def tensor(name: str, *shape: int) -> WeightSpec:
    """Weight that has the same name in the checkpoint and in the head."""
    return WeightSpec(name, shape, name)
