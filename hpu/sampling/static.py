"""Sampler stages with static shapes, as pure functions of tensors: each may be compiled, captured
or run as a recipe.

Nothing is modified in place: a captured graph without tensor cache may free such an intermediate.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from config.params.sampling import MAX_LOGPROBS
from hpu.backends.base import Backend
from hpu.sampling import filters
from hpu.sampling.logprobs import LogprobsMode, TopLogprobs, processed_logits, top_logprobs
from hpu.sampling.params import FEW_TOP_K, Params, Stages, TableRows

TokensOf = Callable[..., Tensor]
Drawn = tuple[Tensor, Tensor | None]

GREEDY_STAGES = Stages()
DRAWS = tuple(
    Stages(draw=True, top_k=is_filtered, sort=sort).merged()
    for is_filtered, sort in ((False, False), (True, False), (True, True))
)
"""Variants of the draw with different operations: without a filter, with `topk`, with a sort."""


class StaticStages:
    """Sampler stages as compiled functions of `backend`. B: batch width, V: vocabulary. `params`:
    (len(Params) * B,) float32, the concatenated columns of Params."""

    def __init__(
        self, backend: Backend, mode: LogprobsMode, ties: filters.Ties = filters.keep_ties
    ) -> None:
        index_dtype = backend.index_dtype
        is_processed, is_logits = mode

        def greedy(scores: Tensor) -> Tensor:
            return finite_tokens(filters.first_argmax(scores), index_dtype)

        def drawn(scores: Tensor, params: Tensor, num_sorted: int) -> Drawn:
            tokens, weights = draw(scores, params, num_sorted, ties)
            # Returning unused weights would take memory and time.
            return finite_tokens(tokens, index_dtype), weights if is_processed else None

        def draw_all(scores: Tensor, params: Tensor) -> Drawn:
            return drawn(scores, params, 0)

        def draw_few(scores: Tensor, params: Tensor) -> Drawn:
            return drawn(scores, params, min(FEW_TOP_K, scores.shape[1]))

        def draw_sorted(scores: Tensor, params: Tensor) -> Drawn:
            return drawn(scores, params, scores.shape[1])

        def logprobs(logits: Tensor, tokens: Tensor) -> TopLogprobs:
            return top_logprobs(logits, tokens, MAX_LOGPROBS, normalises=not is_logits)

        compiled = backend.compiled
        self.to_float: Callable[[Tensor], Tensor] = compiled(_to_float)
        self.with_grammar: Callable[..., Tensor] = compiled(_with_grammar)
        self.without_bad_words: Callable[..., Tensor] = compiled(_without_bad_words)
        self.with_tables: Callable[..., Tensor] = compiled(_with_tables)
        self.greedy: Callable[[Tensor], Tensor] = compiled(greedy)
        """Maps (B, V) scores to (B,) tokens of the index type; -1 if the largest score is
        non-finite."""
        self.processed: Callable[..., Tensor] = compiled(_processed)
        self.counted: Callable[..., Tensor] = compiled(_counted)
        self.appended: Callable[..., Tensor] = compiled(_appended)
        self.logprobs: Callable[[Tensor, Tensor], TopLogprobs] = compiled(logprobs)
        draws = dict(zip(DRAWS, (draw_all, draw_few, draw_sorted), strict=True))
        self._draws = {stages: compiled(function) for stages, function in draws.items()}
        self._whole: dict[Stages, TokensOf] = {
            GREEDY_STAGES: greedy,
            **{stages: _tokens_of(function) for stages, function in draws.items()},
        }

    def draw(self, scores: Tensor, params: Tensor, stages: Stages) -> Drawn:
        """(B,) tokens of the index type, -1 if non-finite; in a processed mode also the weights (B,
        V) of the draw."""
        return self._draws[_draw_stages(stages)](scores, params)

    def fused_function(self, stages: Stages) -> TokensOf | None:
        """Fused sampler as a pure, uncompiled function: maps logits, and params if `stages` draw,
        to tokens. None if no function covers `stages`. Few combinations are supported, because each
        is captured for every width."""
        return self._whole.get(stages)


def finite_tokens(chosen: filters.Argmax, dtype: torch.dtype) -> Tensor:
    """(B,) tokens as `dtype`, -1 if the largest score is non-finite."""
    tokens = torch.where(chosen.values.isfinite(), chosen.tokens, -1)
    return tokens.squeeze(1).to(dtype)


def minus_inf(banned: Tensor) -> Tensor:
    """-inf where banned, else 0."""
    zero = torch.zeros((), dtype=torch.float32, device=banned.device)
    return torch.where(banned, float("-inf"), zero)


def bad_word_ends(words: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, W) last token of each of `words` (B, W, L + 1), and (B, W) values to add to its score:
    -inf if the token would complete the word after `last_tokens` (B, N >= L), else 0."""
    prefixes, ends = words[:, :, :-1], words[:, :, -1]
    recent = last_tokens[:, -prefixes.shape[2] :].unsqueeze(1)
    completes = ((prefixes == recent) | (prefixes == 0)).all(-1) & (ends > 0)
    return (ends - 1).clamp(min=0), minus_inf(completes)


def penalized(scores: Tensor, counts: Tensor, params: Params) -> Tensor:
    """Scores (B, V) after repetition, frequency and presence penalties; `counts`: see
    SamplingTables."""
    generated = counts >= 1
    repeated = torch.where(scores > 0, scores / params.repetition, scores * params.repetition)
    scores = torch.where(counts > 0, repeated, scores)
    out: Tensor = scores - params.frequency * counts.floor() - params.presence * generated
    return out


def split_params(params: Tensor) -> Params:
    """Columns of `params`, each as (B, 1)."""
    width = params.shape[0] // len(Params._fields)
    return Params(*(column.unsqueeze(1) for column in torch.split(params, width)))


def _tokens_of(function: Callable[[Tensor, Tensor], Drawn]) -> TokensOf:
    def tokens(logits: Tensor, params: Tensor) -> Tensor:
        return function(logits.float(), params)[0]

    return tokens


def _draw_stages(stages: Stages) -> Stages:
    """The element of DRAWS that covers `stages`."""
    return Stages(draw=True, top_k=stages.top_k, top_p=stages.top_p, sort=stages.sort).merged()


def _to_float(logits: Tensor) -> Tensor:
    return logits.float()


def _with_grammar(scores: Tensor, words: Tensor, bits: Tensor) -> Tensor:
    banned = (words.view(len(scores), -1, 1) & bits) == 0
    return scores + minus_inf(banned.view(len(scores), -1)[:, : scores.shape[1]])


def _without_bad_words(
    scores: Tensor, words: Tensor, rows: Tensor, last_tokens: Tensor, last_rows: Tensor
) -> Tensor:
    ends, bans = bad_word_ends(words.index_select(0, rows), last_tokens.index_select(0, last_rows))
    return scores.scatter_add(1, ends, bans)


def _with_tables(
    scores: Tensor, bias: Tensor, banned: Tensor, counts: Tensor, rows: TableRows, params: Tensor
) -> Tensor:
    scores = scores + bias.index_select(0, rows.bias)
    scores = scores + banned.index_select(0, rows.banned)
    return penalized(scores, counts.index_select(0, rows.counts), split_params(params))


def draw(
    scores: Tensor, flat_params: Tensor, num_sorted: int, ties: filters.Ties = filters.keep_ties
) -> tuple[filters.Argmax, Tensor]:
    """Draw by `scores` (B, V). Returns (largest scores, drawn tokens) and weights (B, V).

    Args:
        num_sorted: number of weights to sort for top_k and top_p, at least the number of tokens
            that any request's filters keep, apart from ties; 0: no top_k and top_p.
        ties: handling of tokens that tie with the k-th token of top_k.
    """
    params = split_params(flat_params)
    best = filters.first_argmax(scores)
    # Subtract the maximum first: tiny temperatures then give -inf and weight 0, never infinity.
    # Softmax subtracts it anyway, so a temperature of 1 changes no bit.
    weights = torch.softmax((scores - best.values) / params.temperature, dim=-1)
    threshold = filters.min_p_threshold(weights, best.tokens, params.min_p)
    threshold = threshold.clamp(min=filters.TINY)
    is_best = params.greedy > 0.5
    if num_sorted:
        weights = ties(weights, params.top_k, num_sorted)
        largest = _largest(weights, num_sorted)
        kth = filters.top_values_threshold(largest, params.top_k)
        threshold = torch.maximum(threshold, kth)
        has_top_p = params.top_p < 1
        total = filters.totals(_kept(weights, threshold), weights.dtype)
        mass = total * params.top_p * has_top_p
        # If the argmax alone is the nucleus, tokens that tie with it are not drawn.
        is_best = is_best | ((weights.gather(1, best.tokens) >= mass) & has_top_p)
        nucleus = filters.nucleus(_kept(largest, threshold), mass)
        threshold = torch.maximum(threshold, torch.where(has_top_p, nucleus, 0.0))
    weights = _kept(weights, threshold)
    drawn = filters.draw(weights, params.random).unsqueeze(1)
    tokens = torch.where(is_best, best.tokens, drawn)
    return filters.Argmax(best.values, tokens), weights


def _largest(weights: Tensor, size: int) -> Tensor:
    """(B, size) largest weights in descending order."""
    if size == weights.shape[1]:
        return weights.sort(dim=-1, descending=True).values
    return weights.topk(size, dim=-1).values


def _kept(weights: Tensor, threshold: Tensor) -> Tensor:
    """Set weights below the row's threshold to 0, and preserve NaN. Compares instead of dividing,
    because a device may round a quotient."""
    return torch.where(weights < threshold, 0.0, weights)


def _processed(scores: Tensor, weights: Tensor, params: Tensor) -> Tensor:
    return processed_logits(scores, weights, split_params(params))


def _counted(counts: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the counts table after counting `tokens`; -1 is not counted."""
    every = torch.arange(counts.shape[1], device=tokens.device, dtype=tokens.dtype)
    return counts.index_select(0, rows) + (every == tokens.unsqueeze(1))


def _appended(last_tokens: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the last-tokens table with `tokens` appended."""
    kept = last_tokens.index_select(0, rows)[:, 1:]
    return torch.cat((kept, (tokens + 1).unsqueeze(1)), dim=1)
