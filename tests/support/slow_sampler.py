"""Sampling of a single row in simple numpy: the reference for the batched sampler."""

import numpy as np
import numpy.typing as npt

from hpu.protocol import RequestSampling
from hpu.sampling.rng import uniforms

Row = npt.NDArray[np.float64]


def scores(logits: Row, asked: RequestSampling, prompt: list[int], generated: list[int]) -> Row:
    """Logits after masks and penalties."""
    scores: Row = logits.copy()
    if asked.allowed_token_ids is not None:
        for token in range(len(scores)):
            if token not in asked.allowed_token_ids:
                scores[token] = -np.inf
    if len(generated) < asked.min_tokens:
        scores[list(asked.end_token_ids)] = -np.inf
    for token, bias in asked.logit_bias:
        scores[token] += bias
    for word in asked.bad_words:
        prefix = list(word[:-1])
        if not prefix or generated[-len(prefix) :] == prefix:
            scores[word[-1]] = -np.inf
    for token in set(prompt) | set(generated):
        if scores[token] > 0:
            scores[token] /= asked.repetition_penalty
        else:
            scores[token] *= asked.repetition_penalty
    for token in set(generated):
        scores[token] -= asked.frequency_penalty * generated.count(token)
        scores[token] -= asked.presence_penalty
    return scores


def probabilities(scores: Row, asked: RequestSampling) -> Row:
    """Probabilities of a sampled row; ties at a limit are kept."""
    weights: Row = np.exp((scores - scores.max()) / max(asked.temperature, 1e-30))
    weights /= weights.sum()
    weights[weights < asked.min_p * weights.max()] = 0
    if 0 < asked.top_k < len(weights):
        weights[weights < np.sort(weights)[-asked.top_k]] = 0
    weights /= weights.sum()
    if asked.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order])
        last = min(int(np.sum(sums < asked.top_p)), len(order) - 1)
        weights[weights < weights[order[last]]] = 0
        if last == 0:
            weights[order[1:]] = 0
    weights /= weights.sum()
    return weights


def sample(logits: Row, asked: RequestSampling, prompt: list[int], generated: list[int]) -> int:
    """The token that the batched sampler must return."""
    row = scores(logits, asked, prompt, generated)
    if asked.temperature == 0 or asked.top_k == 1 or asked.min_p == 1:
        return int(np.argmax(row))
    sums = np.cumsum(probabilities(row, asked))
    seed = np.array([asked.seed & (2**64 - 1)], dtype=np.uint64)
    number = uniforms(seed, np.array([len(generated)]))[0]
    return int(np.sum(sums <= number * sums[-1]))
