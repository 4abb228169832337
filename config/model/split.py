"""Checks whether a model can be divided among tensor-parallel ranks or pipeline stages, using only
its config."""

from collections.abc import Iterator

from config.errors import ConfigError, SettingError
from config.model.architectures import ARCHITECTURES, decoder_spec
from config.model.decoder_spec import IndexerSpec, MLASpec
from config.model.model_config import ModelConfig
from config.model.state_space import Divided, StateSpec
from config.parallel import Stage

MAX_RANKS = 1024
"""Maximum group size that errors suggest."""


def check_split(
    config: ModelConfig,
    num_cards: int,
    *,
    distributes_experts: bool = False,
    num_engines: int = 1,
) -> None:
    """Raise ConfigError, with the numbers that disagree, if the model cannot be divided among
    `num_cards` cards. `distributes_experts`: each card has whole experts instead of a shard of each
    expert; the cards of all `num_engines` engines share the experts."""
    if distributes_experts and config.moe is None:
        raise ConfigError(f"{config.path} has no experts to distribute over ranks")
    counts = [*_divided(config, distributes_experts)]
    for count, what, may_repeat in counts:
        if not _divides(num_cards, count, may_repeat):
            fitting = [
                str(size)
                for size in range(1, MAX_RANKS + 1)
                if all(_divides(size, other, repeats) for other, _, repeats in counts)
            ]
            no_multiple = ", nor is it a multiple of them" if may_repeat else ""
            raise SettingError(
                f"{config.path} has {count} {what}, and {num_cards} (--tensor-parallel-size) does "
                f"not divide them{no_multiple}: it works with {', '.join(fitting)}"
            )
    if distributes_experts and config.moe is not None:
        count, num_ranks = config.moe.num_experts, num_cards * num_engines
        if count % num_ranks:
            raise SettingError(
                f"{config.path} has {count} experts, and {num_ranks} (--data-parallel-size "
                f"{num_engines} x --tensor-parallel-size {num_cards}) does not divide them: "
                "set another --data-parallel-size, or leave --enable-expert-parallel out"
            )


def check_stages(config: ModelConfig, num_stages: int) -> None:
    """Raise ConfigError if the layers of a built-in model cannot be divided into `num_stages`
    pipeline stages."""
    if num_stages == 1:
        return
    if states_of(config):
        raise SettingError(
            f"{config.path} has recurrent layers, which cannot be divided into {num_stages} "
            "pipeline stages (--pipeline-parallel-size): use --tensor-parallel-size"
        )
    if cross_layers_of(config):
        raise SettingError(
            f"{config.path} has layers that read images, which only the first of {num_stages} "
            "stages (--pipeline-parallel-size) receives: use --tensor-parallel-size"
        )
    Stage(0, num_stages).layers(config.num_layers)


def _divides(num_cards: int, count: int, may_repeat: bool) -> bool:
    return count % num_cards == 0 or (may_repeat and num_cards % count == 0)


def _divided(config: ModelConfig, distributes_experts: bool) -> Iterator[Divided]:
    yield config.num_heads, "query heads", False
    if latents_of(config) is None:
        # Latents are replicated on each card.
        yield config.num_kv_heads, "KV heads", True
    for state in {type(state): state for state in states_of(config)}.values():
        yield from state.divided()
    moe = config.moe
    has_experts = [moe is not None and moe.has_experts(i) for i in range(config.num_layers)]
    if not all(has_experts):
        yield _mlp_size(config), "inner features", False
    if moe is not None and any(has_experts):
        if distributes_experts:
            yield moe.num_experts, "experts", False
        else:
            yield moe.inner_size, "inner features in an expert", False
        if moe.shared_size:
            yield moe.shared_size, "inner features in the shared expert", False


def _mlp_size(config: ModelConfig) -> int:
    if config.architecture not in ARCHITECTURES:
        return config.intermediate_size
    return decoder_spec(config).mlp_size or config.intermediate_size


def latents_of(config: ModelConfig) -> MLASpec | None:
    """MLA spec of a built-in model; None without MLA and for other models."""
    return decoder_spec(config).mla if config.architecture in ARCHITECTURES else None


def indexer_of(config: ModelConfig) -> IndexerSpec | None:
    """Indexer spec of a built-in model; None without an indexer and for other models."""
    return decoder_spec(config).indexer if config.architecture in ARCHITECTURES else None


def states_of(config: ModelConfig) -> tuple[StateSpec, ...]:
    """State specs of the layers with a recurrent state of a built-in model; empty for other
    models."""
    if config.architecture not in ARCHITECTURES:
        return ()
    return decoder_spec(config).states


def cross_layers_of(config: ModelConfig) -> int:
    """Number of cross-attention layers of a built-in model; 0 for other models."""
    return decoder_spec(config).num_cross_layers if config.architecture in ARCHITECTURES else 0
