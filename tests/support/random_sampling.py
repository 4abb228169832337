"""Random sampling settings, weighted so that every stage is often active and often inactive."""

import random

import numpy as np
import torch

from hpu.backends.cpu import CpuBackend
from hpu.protocol import RequestSampling

WORD_TOKENS = 4
"""Bad words consist of the first few tokens, so that their prefixes occur."""


class Float32Sums(CpuBackend):
    """CpuBackend that sums in float32, as a card does."""

    sum_dtype = torch.float32


def random_sampling(rng: random.Random, vocab_size: int) -> RequestSampling:
    """A random mix of sampling parameters."""
    pick = rng.choice
    words = [pick((1, 2, 3, 9)) for _ in range(pick((0, 0, 0, 3, 30)))]
    return RequestSampling(
        temperature=pick((0.0, 0.0, 1e-6, 0.3, 1.0, 2.0)),
        top_k=pick((0, 0, -1, 1, 2, 5, vocab_size, 1000)),
        top_p=pick((1.0, 1.0, 1e-9, 0.3, 0.9, 0.999)),
        min_p=pick((0.0, 0.0, 0.05, 0.5, 1.0)),
        seed=rng.getrandbits(63),
        presence_penalty=pick((0.0, 0.0, 0.0, -2.0, 0.7)),
        frequency_penalty=pick((0.0, 0.0, 0.0, 2.0, -0.3)),
        repetition_penalty=pick((1.0, 1.0, 1.0, 1.3, 0.5)),
        min_tokens=pick((0, 0, 3)),
        end_token_ids=tuple(rng.sample(range(vocab_size), rng.randrange(3))),
        logit_bias=tuple(
            (token, pick((-100.0, -1.0, 2.5, 100.0)))
            for token in rng.sample(range(vocab_size), pick((0, 0, 3)))
        ),
        allowed_token_ids=pick((None, None, tuple(rng.sample(range(vocab_size), 8)))),
        bad_words=tuple(
            tuple(rng.randrange(WORD_TOKENS) for _ in range(length)) for length in words
        ),
        num_logprobs=pick((-1, -1, 0, 3, 20)),
        masked=pick((False, False, True)),
    )


def random_mask(rng: random.Random, vocab_size: int) -> np.ndarray:
    """(1, W) mask words that allow about half of all tokens."""
    words = -(-vocab_size // 32)
    return np.array([[rng.getrandbits(32) - 2**31 for _ in range(words)]], dtype="<i4")


def random_history(rng: random.Random, vocab_size: int) -> tuple[np.ndarray, int]:
    """Tokens, and the number of prompt tokens among them; the others were generated."""
    tokens = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))]
    return np.array(tokens, dtype=np.uint32), rng.randint(1, len(tokens))
