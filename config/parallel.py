"""ParallelConfig: how one model is divided among devices, and who starts their workers."""

from dataclasses import dataclass

from config.setting import check_settings, setting


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The devices that run one copy of the model. A rank is one of them: rank = stage * tensor
    parallel size + shard."""

    tensor_parallel_size: int = setting(
        1, "Devices that each layer of the model is divided among", minimum=1
    )
    pipeline_parallel_size: int = setting(
        1,
        "Stages, each on devices of its own, that the layers of the model are divided into",
        minimum=1,
    )
    enable_expert_parallel: bool = setting(
        False,
        "Distribute whole experts over the tensor-parallel devices, in place of dividing each one",
    )
    compare_ranks: bool = setting(
        False,
        "Debugging: compare the tokens that the tensor-parallel ranks sample, and stop at the "
        "first difference",
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The first rank of the last stage: its worker sends the results."""
        return self.world_size - self.tensor_parallel_size
