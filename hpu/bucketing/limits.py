"""BucketLimits: what bounds every shape of a bucket table."""

import math
from dataclasses import dataclass

from config.engine import SchedulerConfig


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """What bounds every shape: the schedule's and the cache's numbers."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_batch: int
    num_blocks: int
    prefix_caching: bool
    pools: bool = False
    """Whole texts are read, without a cache: there are no decodes and no context blocks."""

    @classmethod
    def of_texts(
        cls, schedule: SchedulerConfig, *, block_size: int, max_model_len: int
    ) -> "BucketLimits":
        """What bounds a pooling model, whose `block_size` is the step between lengths alone."""
        return cls(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_prefill_batch=schedule.prefill_batch(is_pooling=True),
            # Of a cache that is never made: some strategies ask before they know.
            num_blocks=schedule.max_num_seqs * math.ceil(max_model_len / block_size),
            prefix_caching=False,
            pools=True,
        )

    @property
    def max_query(self) -> int:
        """New tokens of one row in one launch."""
        return min(self.max_num_batched_tokens, self.max_model_len)

    @property
    def blocks_a_row(self) -> int:
        """Blocks of a full context."""
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def max_decode_blocks(self) -> int:
        """Block references of one decode: a shared block counts once for each row that holds it."""
        most = self.max_num_seqs * self.blocks_a_row
        return most if self.prefix_caching else min(most, self.num_blocks)
