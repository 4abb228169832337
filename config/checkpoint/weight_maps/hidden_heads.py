"""Sizes and tensors of draft heads that read the hidden state of the last token: Medusa, and IBM's
MLP speculator. Field names follow vLLM's medusa.py and mlp_speculator.py."""

from dataclasses import dataclass
from pathlib import Path

from config.checkpoint.safetensors_files import folder_shapes
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.errors import ConfigError
from config.model.json_fields import Fields, read_json
from config.model.model_config import ModelConfig
from config.params.speculation import MEDUSA, SpeculationMethod

MAX_HEADS, MAX_BLOCKS = 64, 16


@dataclass(frozen=True, slots=True)
class HiddenHeadSizes:
    """Sizes of a head, from its config.json."""

    num_heads: int
    """Number of heads, which is the maximum number of draft tokens."""
    hidden_size: int
    """Hidden size of the target."""
    vocab_size: int
    num_blocks: int = 1
    """Medusa: residual blocks per head."""
    has_bias: bool = False
    """Medusa: whether the blocks have biases."""
    inner_size: int = 0
    """MLP speculator: size of its states."""
    is_tied: bool = False
    """MLP speculator: whether all heads share their weights; only the first projection is
    separate."""
    scales_input: bool = False
    """MLP speculator: whether the hidden states are normalized first."""


def read_head_sizes(method: SpeculationMethod, folder: str, target: ModelConfig) -> HiddenHeadSizes:
    """Sizes of the head of `method` in `folder`. Raises ConfigError if they do not fit `target` or
    the settings."""
    file = Path(folder) / "config.json"
    fields = Fields(read_json(file), file)
    read = _medusa if method.method == MEDUSA else _mlp_speculator
    sizes = read(fields, folder, target)
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
            f"--speculative-config asks for {method.max_drafts} draft tokens, it must ask for at "
            f"most {sizes.num_heads}, the number of heads in {file}"
        )
    return sizes


def _medusa(fields: Fields, folder: str, target: ModelConfig) -> HiddenHeadSizes:
    """Sizes of Medusa heads, in vLLM's format or in the original format."""
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
    return HiddenHeadSizes(
        fields.count("num_heads", num_heads, maximum=MAX_HEADS),
        fields.count("hidden_size", target.hidden_size),
        vocab_size,
        num_blocks=fields.count("num_hidden_layers", num_blocks, maximum=MAX_BLOCKS),
        has_bias=any(name in shapes for name in biases),
    )


def _mlp_speculator(fields: Fields, folder: str, target: ModelConfig) -> HiddenHeadSizes:
    hidden_size = fields.count("emb_dim")
    inner_size = fields.raw.get("inner_dim") or hidden_size
    if type(inner_size) is not int or inner_size < 1:
        raise ConfigError(f"inner_dim in {fields.file} is {inner_size!r}, it must be at least 0")
    return HiddenHeadSizes(
        fields.count("n_predict", maximum=MAX_HEADS),
        hidden_size,
        fields.count("vocab_size"),
        inner_size=inner_size,
        is_tied=fields.get("tie_weights", bool, False),
        scales_input=fields.get("scale_input", bool, False),
    )


def medusa_weight_map(sizes: HiddenHeadSizes) -> WeightMap:
    hidden, num_blocks = sizes.hidden_size, sizes.num_blocks
    specs: list[WeightSpec] = []
    renamed: list[tuple[str, str]] = [("medusa_heads.", "")]
    # In descending order: the index of a head may end with the index of another head.
    for i in reversed(range(sizes.num_heads)):
        for j in range(num_blocks):
            name = f"blocks.{i}.layers.{j}"
            specs.append(_same(f"{name}.weight", hidden, hidden))
            if sizes.has_bias:
                specs.append(_same(f"{name}.bias", hidden))
            renamed.append((f"{i}.{j}.linear.", f"{name}."))
        specs.append(_same(f"lm_heads.{i}.weight", sizes.vocab_size, hidden))
        renamed.append((f"{i}.{num_blocks}.weight", f"lm_heads.{i}.weight"))
    return WeightMap(tuple(specs), renamed=tuple(renamed))


def mlp_speculator_weight_map(sizes: HiddenHeadSizes) -> WeightMap:
    inner, vocab = sizes.inner_size, sizes.vocab_size
    specs: list[WeightSpec] = []
    for i in range(sizes.num_heads):
        columns = sizes.hidden_size if i == 0 else inner
        if i < (2 if sizes.is_tied else sizes.num_heads):
            specs.append(_same(f"proj.{i}.weight", inner, columns))
        if i < (1 if sizes.is_tied else sizes.num_heads):
            specs.append(_same(f"emb.{i}.weight", vocab, inner))
            specs.append(_same(f"head.{i}.weight", vocab, inner))
            specs += [_same(f"ln.{i}.weight", inner), _same(f"ln.{i}.bias", inner)]
    ignored: tuple[str, ...] = ()
    if sizes.is_tied:
        # A checkpoint may repeat the shared tensors for each head.
        later = range(1, sizes.num_heads)
        ignored = tuple(f"{name}.{i}." for name in ("emb", "head", "ln") for i in later)
        ignored += tuple(f"proj.{i}." for i in range(2, sizes.num_heads))
    return WeightMap(tuple(specs), stripped_prefixes=("speculator.",), ignored_prefixes=ignored)


def _same(name: str, *shape: int) -> WeightSpec:
    return WeightSpec(name, shape, name)
