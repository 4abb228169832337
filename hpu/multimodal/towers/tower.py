"""VisionTower: the vision tower and projector of a model, in transformers' own code, with weights
filled by this server's loader."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.text_part import OUTSIDE
from config.errors import ConfigError
from config.model.model_config import ModelConfig
from config.model.multimodal.vision import VisionFacts
from hpu.models.transformers_attention import UnsupportedModelCode
from hpu.models.transformers_fallback import allocate, register_stored_buffers
from hpu.multimodal.base import Patches, Tiles, Tower, WholeImages
from hpu.multimodal.cross.tower import MllamaImages
from hpu.multimodal.towers.llama4_tiles import use_real_rotation
from hpu.multimodal.towers.patches import make_patches
from hpu.multimodal.towers.tiles import make_tiles
from hpu.multimodal.towers.whole_model import build_whole, drop_language_model, features_owner


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWeightMap(WeightMap):
    """Maps tensors of a tower to the paths of its parameters; all other tensors are OUTSIDE."""

    names: frozenset[str]
    conversions: tuple[Any, ...]
    """Transformers' renamings of tensors in older checkpoints, in order."""

    def map_name(self, name: str) -> str:
        for conversion in self.conversions:
            name, _ = conversion.rename_source_key(name)
        for candidate in (name, f"model.{name}", name.removeprefix("model.")):
            if candidate in self.names:
                return candidate
        return OUTSIDE + name


class VisionTower(Tower):
    """Maps the tensors of an image processor to embeddings. Parameters are allocated, not filled,
    under their paths in the transformers model."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError if transformers cannot build the tower."""
        super().__init__()
        assert config.vision is not None, "a model that takes images"
        self.facts: VisionFacts = config.vision
        self.dtype = dtype
        self.device = device
        self._hidden_size = config.hidden_size * self.facts.embeddings_per_row
        whole = build_whole(config, self.facts, dtype)
        renamings = [
            conversion
            for conversion in get_model_conversion_mapping(whole)
            if isinstance(conversion, WeightRenaming)
        ]
        drop_language_model(whole)
        rotation = use_real_rotation(whole)
        register_stored_buffers(whole)
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
        self.weight_map = TowerWeightMap(
            tuple(WeightSpec(name, shape, name) for name, shape in shapes.items()),
            names=frozenset(shapes),
            conversions=tuple(renamings),
            has_tower=True,
        )
        try:
            allocate(whole, device, rotation)
        except UnsupportedModelCode as error:
            raise ConfigError(
                f"{config.path} is a {self.facts.architecture}, whose vision tower cannot be "
                f"used: its code in transformers {transformers.__version__} {error}"
            ) from error
        for name, child in whole.named_children():
            self.add_module(name, child)
        for name, parameter in whole.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        # Not registered as a submodule: its parameters are registered above.
        self.__dict__["_whole"] = whole

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Embeddings (rows, n * hidden) of an image, see Tower.forward. `tensors`: outputs of the
        image processor; outputs that the tower does not take are ignored."""
        given = {
            name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        whole: Any = self.__dict__["_whole"]
        images = self.whole_images()
        if images is not None:
            return images.features(*images.prepare(given))
        tiles = self.tiles()
        if tiles is not None and tiles.is_for_all_devices:
            return _by_tiles(tiles, given)
        owner = features_owner(whole)
        names = inspect.signature(owner.get_image_features).parameters
        # Processors return more than the tower reads.
        output = owner.get_image_features(
            **{name: tensor for name, tensor in given.items() if name in names}
        )
        features = output.pooler_output
        if isinstance(features, list | tuple):
            features = torch.cat(tuple(features), dim=0)
        if self.facts.num_deepstack_layers:
            further = (torch.cat(tuple(feature), dim=0) for feature in output.deepstack_features)
            features = torch.cat((features, *further), dim=-1)
        return features.reshape(-1, self._hidden_size)  # type: ignore[no-any-return]

    def tiles(self) -> Tiles | None:
        # LLaVA has tiles, unless its tower is Pixtral's.
        if self.facts.is_unlisted or self.patches() is not None:
            return None
        return make_tiles(self.__dict__["_whole"], self.dtype)

    def patches(self) -> Patches | None:
        if self.facts.is_unlisted:
            return None
        return make_patches(self.__dict__["_whole"], self.dtype)

    def whole_images(self) -> WholeImages | None:
        whole: Any = self.__dict__["_whole"]
        is_mllama = type(whole.config).model_type == "mllama"
        return MllamaImages(whole, self.dtype) if is_mllama else None


def _by_tiles(tiles: Tiles, tensors: Mapping[str, Tensor]) -> Tensor:
    """Embeddings (rows, hidden) of an image."""
    features = tiles.features(*tiles.prepare(tensors))
    layout = torch.from_numpy(tiles.layout(tensors, *features.shape[:2])).to(features.device)
    parts = [features.flatten(0, 1)]
    if tiles.separators is not None:
        # Separators have negative indices, which count from the end.
        parts.append(tiles.separators.flip(0))
    return torch.cat(parts)[layout]
