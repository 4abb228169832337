"""Decides whether a model's images are served, and builds its vision tower."""

import logging
from dataclasses import replace

import torch

from config.errors import ConfigError
from config.model.model_config import ModelConfig
from config.model.multimodal.vision import VisionFacts
from config.parallel import Stage
from hpu.backends.base import Backend
from hpu.multimodal.base import Tower

logger = logging.getLogger(__name__)


def served_facts(config: ModelConfig, backend: Backend, *, is_native: bool) -> ModelConfig:
    """`config`, without its vision facts if images cannot be served; the reason is logged. Raises
    ConfigError like build_tower."""
    vision = config.vision
    if vision is None:
        return config
    reason = _unsupported_reason(config, vision, backend, is_native=is_native)
    if not reason:
        return config
    logger.warning(
        "Images are not served: %s is a %s, and %s", config.path, vision.architecture, reason
    )
    return replace(config, vision=None)


def _unsupported_reason(
    config: ModelConfig, vision: VisionFacts, backend: Backend, *, is_native: bool
) -> str:
    """Reason why images of the model are not served; empty if they are served."""
    # Imported here: the import takes half a second, which models without images do not need.
    import transformers

    if vision.uses_mrope and not is_native:
        return (
            "the transformers implementation (--model-impl) supports positions with one axis only"
        )
    # dir() instead of hasattr, which would import the model's code.
    if vision.architecture not in dir(transformers):
        return f"transformers {transformers.__version__} has no {vision.architecture}"
    return _unlisted_reason(config, backend) if vision.is_unlisted else ""


def _unlisted_reason(config: ModelConfig, backend: Backend) -> str:
    """Reason why a vision model that only transformers supports is not served; empty if it is
    served."""
    if backend.compiles:
        return f"its tower has no fixed shapes, which {backend.name} needs"
    # Imported here: it imports all of transformers, which other models do not need.
    from hpu.multimodal.towers.merge_trial import image_merge_error

    return image_merge_error(config)


def build_tower(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, stage: Stage
) -> Tower | None:
    """Vision tower with unfilled parameters; None for a model without images, and on a pipeline
    stage that does not embed tokens. Raises ConfigError."""
    if config.vision is None or not stage.is_first:
        return None
    num_layers = len(stage.layers(config.num_layers))
    if stage.size > 1 and num_layers < config.vision.num_deepstack_layers:
        raise ConfigError(
            f"{config.path} adds embeddings of images to its first "
            f"{config.vision.num_deepstack_layers} layers, and the first of {stage.size} stages "
            f"(--pipeline-parallel-size) has {num_layers}"
        )
    # Imported here: it imports all of transformers, which other models do not need.
    from hpu.multimodal.towers.tower import VisionTower

    return VisionTower(config, dtype=dtype, device=device)


def count_tower(config: ModelConfig) -> int:
    """Number of parameters of the vision tower, which is built on the meta device. The model must
    support images. Raises ConfigError like build_tower."""
    tower = build_tower(config, dtype=torch.bfloat16, device=torch.device("meta"), stage=Stage())
    assert tower is not None, "a model that takes images"
    return sum(parameter.numel() for parameter in tower.parameters())
