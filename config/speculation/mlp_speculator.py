"""Facts of IBM's MLP speculator. Field names follow vLLM's mlp_speculator.py."""

from dataclasses import dataclass

from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.errors import ConfigError
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig
from config.speculation.drafter import MAX_HEADS, HeadSizes, HiddenHeadFacts, tensor


@dataclass(frozen=True, slots=True)
class MlpSpeculatorSizes(HeadSizes):
    """Sizes of an MLP speculator."""

    inner_size: int
    """Size of the states."""
    is_tied: bool
    """Whether all heads share their weights; only the first projection is separate."""
    scales_input: bool
    """Whether the hidden states are normalized first."""


class MlpSpeculator(HiddenHeadFacts):
    def read_sizes(self, fields: Fields, folder: str, target: ModelConfig) -> MlpSpeculatorSizes:
        hidden_size = fields.count("emb_dim")
        inner_size = fields.raw.get("inner_dim") or hidden_size
        if type(inner_size) is not int or inner_size < 1:
            raise ConfigError(
                f"inner_dim in {fields.file} is {inner_size!r}, it must be an integer of at least 0"
            )
        return MlpSpeculatorSizes(
            fields.count("n_predict", maximum=MAX_HEADS),
            hidden_size,
            fields.count("vocab_size"),
            inner_size=inner_size,
            is_tied=fields.get("tie_weights", bool, False),
            scales_input=fields.get("scale_input", bool, False),
        )

    def weight_map(self, sizes: HeadSizes) -> WeightMap:
        assert isinstance(sizes, MlpSpeculatorSizes)
        inner, vocab = sizes.inner_size, sizes.vocab_size
        specs: list[WeightSpec] = []
        for i in range(sizes.num_heads):
            columns = sizes.hidden_size if i == 0 else inner
            if i < (2 if sizes.is_tied else sizes.num_heads):
                specs.append(tensor(f"proj.{i}.weight", inner, columns))
            if i < (1 if sizes.is_tied else sizes.num_heads):
                specs.append(tensor(f"emb.{i}.weight", vocab, inner))
                specs.append(tensor(f"head.{i}.weight", vocab, inner))
                specs += [tensor(f"ln.{i}.weight", inner), tensor(f"ln.{i}.bias", inner)]
        ignored: tuple[str, ...] = ()
        if sizes.is_tied:
            # A checkpoint may repeat the shared tensors for each head.
            later = range(1, sizes.num_heads)
            ignored = tuple(f"{name}.{i}." for name in ("emb", "head", "ln") for i in later)
            ignored += tuple(f"proj.{i}." for i in range(2, sizes.num_heads))
        return WeightMap(tuple(specs), stripped_prefixes=("speculator.",), ignored_prefixes=ignored)


METHODS = {"mlp_speculator": MlpSpeculator()}
