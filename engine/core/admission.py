"""Admission: checks that a request can run at all."""

from collections.abc import Collection

import numpy as np

from config.params.sampling import SamplingParams, invalid_token
from config.params.token_ids import TokenIds
from engine.kv_cache.manager import KVCacheManager
from engine.request import ModelLimits
from engine.transport.messages import AddRequest
from hpu.protocol import TOKEN_BYTES


def num_prompt_tokens(message: AddRequest) -> int:
    """Tokens of the request's prompt."""
    return message.prompt.nbytes // TOKEN_BYTES


def admission_error(
    message: AddRequest, limits: ModelLimits, kv: KVCacheManager | None
) -> str | None:
    """Why a request cannot run, with the numbers that disagree; None if it can. `kv` is None for a
    pooling model."""
    num_bytes = message.prompt.nbytes
    if num_bytes % TOKEN_BYTES:
        return f"the prompt has {num_bytes} bytes, which is no multiple of {TOKEN_BYTES}"
    num_tokens = num_prompt_tokens(message)
    if num_tokens == 0:
        return "the prompt has 0 tokens, it must have at least 1"
    has_no_output = message.pooling is not None or message.sampling.max_tokens == 0
    max_tokens = limits.max_model_len - (0 if has_no_output else 1)
    if num_tokens > max_tokens:
        return (
            f"the prompt has {num_tokens} tokens, the model's context of "
            f"{limits.max_model_len} takes at most {max_tokens}"
        )
    num_blocks = 0 if kv is None else kv.num_blocks_for(num_tokens)
    if kv is not None and num_blocks > kv.pool.size:
        return (
            f"the prompt needs {num_blocks} KV blocks of {kv.block_size} tokens, "
            f"the cache has {kv.pool.size}"
        )
    max_token = int(np.frombuffer(message.prompt, dtype="<u4").max())
    num_ids = limits.prompt_vocab_size or limits.vocab_size
    if max_token >= num_ids:
        return f"the prompt has token {max_token}, the vocabulary has {num_ids}"
    token = _invalid_token(message.sampling, limits.vocab_size)
    if token is not None:
        return f"the sampling names token {token}, the vocabulary has {limits.vocab_size}"
    return None


def _invalid_token(params: SamplingParams, vocab_size: int) -> int | None:
    """A token id in the sampling parameters that is outside the vocabulary; None if all are valid
    ids."""
    lists: tuple[Collection[int] | TokenIds, ...] = (
        params.logit_bias,
        params.allowed_token_ids or (),
        *params.bad_words_token_ids,
    )
    found = (invalid_token(token_ids, vocab_size) for token_ids in lists)
    return next((token for token in found if token is not None), None)
