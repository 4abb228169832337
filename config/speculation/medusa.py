"""Facts of Medusa heads. Field names follow vLLM's medusa.py."""

from dataclasses import dataclass
from pathlib import Path

from config.checkpoint.safetensors_files import folder_shapes
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.errors import ConfigError
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig
from config.speculation.drafter import MAX_HEADS, HeadSizes, HiddenHeadFacts, tensor

MAX_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class MedusaSizes(HeadSizes):
    """Sizes of Medusa heads."""

    num_blocks: int
    """Residual blocks per head."""
    has_bias: bool
    """Whether the blocks have biases."""


class Medusa(HiddenHeadFacts):
    def read_sizes(self, fields: Fields, folder: str, target: ModelConfig) -> MedusaSizes:
        """Sizes of heads in vLLM's format or in the original format."""
        vocab_size = fields.count("vocab_size", target.vocab_size)
        if fields.count("truncated_vocab_size", vocab_size) != vocab_size:
            raise ConfigError(
                f"{fields.file} has truncated_vocab_size, which is not supported: the heads must "
                "cover the whole vocabulary"
            )
        num_heads = fields.count("medusa_num_heads", 5, maximum=MAX_HEADS)
        num_blocks = fields.count("medusa_num_layers", 1, maximum=MAX_BLOCKS)
        biases = ("blocks.0.layers.0.bias", "0.0.linear.bias", "medusa_heads.0.0.linear.bias")
        shapes = folder_shapes(Path(folder))
        return MedusaSizes(
            fields.count("num_heads", num_heads, maximum=MAX_HEADS),
            fields.count("hidden_size", target.hidden_size),
            vocab_size,
            num_blocks=fields.count("num_hidden_layers", num_blocks, maximum=MAX_BLOCKS),
            has_bias=any(name in shapes for name in biases),
        )

    def weight_map(self, sizes: HeadSizes) -> WeightMap:
        assert isinstance(sizes, MedusaSizes)
        hidden, num_blocks = sizes.hidden_size, sizes.num_blocks
        specs: list[WeightSpec] = []
        renamed: list[tuple[str, str]] = [("medusa_heads.", "")]
        # In descending order: the index of a head may end with the index of another head.
        for i in reversed(range(sizes.num_heads)):
            for j in range(num_blocks):
                name = f"blocks.{i}.layers.{j}"
                specs.append(tensor(f"{name}.weight", hidden, hidden))
                if sizes.has_bias:
                    specs.append(tensor(f"{name}.bias", hidden))
                renamed.append((f"{i}.{j}.linear.", f"{name}."))
            specs.append(tensor(f"lm_heads.{i}.weight", sizes.vocab_size, hidden))
            renamed.append((f"{i}.{num_blocks}.weight", f"lm_heads.{i}.weight"))
        return WeightMap(tuple(specs), renamed=tuple(renamed))


METHODS = {"medusa": Medusa()}
