"""BucketLimits: the limits of every shape in a bucket table."""

import math
from dataclasses import dataclass

from config.engine import SchedulerConfig

Shape = tuple[int, int, int]
"""(batch, query, blocks)"""

Shapes = tuple[list[Shape], list[Shape]]
"""Prompt shapes, decode shapes."""


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """The sizes of scheduler, model and KV cache that limit every shape."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_batch: int
    num_blocks: int
    prefix_caching: bool
    is_pooling: bool = False
    """Pooling models compute whole texts without a KV cache: no decodes, no context blocks."""

    @classmethod
    def for_pooling(
        cls, schedule: SchedulerConfig, *, block_size: int, max_model_len: int
    ) -> "BucketLimits":
        """Limits of a pooling model; `block_size` is only the step between query lengths."""
        return cls(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_prefill_batch=schedule.prefill_batch(is_pooling=True),
            # No cache is allocated; some strategies compute decode shapes that are then dropped.
            num_blocks=schedule.max_num_seqs * math.ceil(max_model_len / block_size),
            prefix_caching=False,
            is_pooling=True,
        )

    @property
    def max_query(self) -> int:
        """New tokens of one sequence in one launch."""
        return min(self.max_num_batched_tokens, self.max_model_len)

    @property
    def blocks_per_seq(self) -> int:
        """Blocks of a full context."""
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def max_decode_blocks(self) -> int:
        """Block references of one decode; a shared block counts once for each sequence."""
        full = self.max_num_seqs * self.blocks_per_seq
        return full if self.prefix_caching else min(full, self.num_blocks)
