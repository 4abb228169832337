"""AttentionInputs: what a forward pass is told beside its tokens. Tensors and nothing else, because
a
captured graph is keyed by every value that is not a tensor."""

from typing import NamedTuple

from torch import Tensor


class PrefillAttentionInputs(NamedTuple):
    """A prefill of `batch` rows, `query` new tokens each (right-padded), over cached context.

    Integers are int32 on devices that want it and int64 on CPU; `B` batch, `Q` query, `C` context
    blocks a row. A padded token has position 0 and writes to the pad block; a padded row has
    query_lens 0.
    """

    positions: Tensor
    """(B, Q)"""
    slot_mapping: Tensor
    """(B * Q): block * block_size + offset where each new token's K and V go."""
    query_lens: Tensor
    """(B): real new tokens of each row."""
    context_lens: Tensor
    """(B): cached tokens of each row; at most C * block_size."""
    block_list: Tensor
    """(B * C): physical blocks of the cached context, row by row, padded with the pad block."""


class DecodeAttentionInputs(NamedTuple):
    """A decode of `B` rows, one token each, over `N` blocks that all rows together hold (flat paged
    attention: the cost follows N, not B times the longest)."""

    positions: Tensor
    """(B, 1)"""
    slot_mapping: Tensor
    """(B): where each token's K and V go; the blocks below already count it."""
    block_list: Tensor
    """(N): physical blocks, all of row 0, then all of row 1, ...; padded with the pad block. Where
    the cache is read as one slice nobody reads this: there entry i stands for block i."""
    block_groups: Tensor
    """(N): batch index of each block's row; -1 for padding, and for blocks of no row here."""
    block_starts: Tensor
    """(N): position of the block's first token in its sequence (for windows)."""
    block_usage: Tensor
    """(N): valid slots of the block, the new token included; padding has 1."""


class TextAttentionInputs(NamedTuple):
    """Whole texts of `batch` rows (right-padded), for a pooling model: nothing is cached."""

    positions: Tensor
    """(B, Q): 0 for padding."""
    types: Tensor
    """(B, Q): 0, or 1 for the second text of a pair."""
    lengths: Tensor
    """(B): real tokens of each row; 0 for a padded row."""


AttentionInputs = PrefillAttentionInputs | DecodeAttentionInputs | TextAttentionInputs
