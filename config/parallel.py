"""ParallelConfig: how a model is divided among devices. Stage: the position of a pipeline stage."""

from dataclasses import dataclass
from typing import NamedTuple

from config.errors import ConfigError, SettingError
from config.setting import check_settings, setting

DATA = "data"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The devices that run a copy of the model. The rank of a device is stage * tensor parallel
    size + shard."""

    tensor_parallel_size: int = setting(1, "Devices among which each layer is divided", minimum=1)
    pipeline_parallel_size: int = setting(
        1,
        "Stages into which the layers are divided, each on its own devices",
        minimum=1,
    )
    enable_expert_parallel: bool = setting(
        False,
        "Distribute whole experts over the tensor-parallel devices of all engines",
    )
    mm_encoder_tp_mode: str = setting(
        "replicated",
        "Whether tensor-parallel devices encode all images each (replicated) or a part each (data)",
        choices=("replicated", DATA, "weights"),
    )
    compare_ranks: bool = setting(
        False,
        "Debugging: stop when tensor-parallel ranks sample different tokens",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.mm_encoder_tp_mode == "weights":
            raise ConfigError(
                "--mm-encoder-tp-mode is weights, and the weights of vision towers are not "
                "divided among devices: use data, which divides the images"
            )

    @property
    def divides_images(self) -> bool:
        """Whether each tensor-parallel device encodes a share of the images."""
        return self.mm_encoder_tp_mode == DATA and self.tensor_parallel_size > 1

    @property
    def world_size(self) -> int:
        """Number of workers per engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """First rank of the last stage; its worker sends the results."""
        return self.world_size - self.tensor_parallel_size


class Stage(NamedTuple):
    """Position of a pipeline stage."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds the tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the final norm and the head, and samples."""
        return self.rank == self.size - 1

    def layers(self, num_layers: int) -> range:
        """Indices of this stage's layers among `num_layers`. Raises SettingError if a stage would
        have no layers."""
        if self.size > num_layers:
            raise SettingError(
                f"the model has {num_layers} layers and --pipeline-parallel-size is {self.size}: "
                "each stage needs at least 1 layer"
            )
        first, end = (num_layers * rank // self.size for rank in (self.rank, self.rank + 1))
        return range(first, end)


WHOLE = Stage()
"""The only stage of a model that is not divided."""
