"""Checks of a request against the model: vocabulary, context length, kind of log-probabilities; and
truncation to the context."""

from collections.abc import Iterable

from config.errors import PromptTooLong, UserError
from config.params.sampling import SamplingParams
from server.generation.outputs import Prompt


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise UserError for token ids outside the vocabulary."""
    fields: list[tuple[str, Iterable[int]]] = [
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words_token_ids", (i for word in params.bad_words_token_ids for i in word)),
    ]
    for name, ids in fields:
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise UserError(
                    f"{name} names token id {token_id}, the vocabulary has 0 to {vocab_size - 1}",
                    param=name,
                )


def check_allowed_tokens(params: SamplingParams, eos_ids: Iterable[int]) -> None:
    """Raise UserError if no token is allowed as the first one; the sampler would find none."""
    if params.allowed_token_ids is None:
        return
    banned = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        banned.update(params.stop_token_ids, () if params.ignore_eos else eos_ids)
    if banned.issuperset(params.allowed_token_ids):
        raise UserError(
            f"allowed_token_ids has {len(params.allowed_token_ids)} tokens, and bad_words or "
            "min_tokens ban every one of them",
            param="allowed_token_ids",
        )


def output_limit(
    prompt: Prompt, params: SamplingParams, vocab_size: int, max_model_len: int, param: str
) -> int:
    """The maximum number of output tokens; without max_tokens, what the context leaves."""
    count = len(prompt.token_ids)
    if not count:
        raise UserError("the prompt is empty, it must have at least 1 token", param=param)
    for token_id in (min(prompt.token_ids), max(prompt.token_ids)):
        if not 0 <= token_id < vocab_size:
            raise UserError(
                f"the prompt has token id {token_id}, the vocabulary has 0 to {vocab_size - 1}",
                param=param,
            )
    max_output = max_model_len - count
    if params.max_tokens is None:
        if max_output < 1:
            raise PromptTooLong(count, None, max_model_len, param=param)
        if params.min_tokens > max_output:
            raise PromptTooLong(count, params.min_tokens, max_model_len, param=param)
        return max_output
    if params.max_tokens > max_output:
        raise PromptTooLong(count, params.max_tokens, max_model_len, param=param)
    return params.max_tokens


def check_comparable(logprobs_mode: str, param: str) -> None:
    """Raise UserError if the server reports logits: they cannot be compared between positions."""
    if logprobs_mode.endswith("logits"):
        raise UserError(
            f"{param} compares log-probabilities, and this server reports {logprobs_mode}",
            param=param,
        )


def truncate_prompt(
    ids: list[int], keep: int | None, max_model_len: int, limit: int | None
) -> list[int]:
    """The last `keep` tokens; -1 keeps as many as fit into the context beside the output."""
    num_kept = num_kept_tokens(keep, max_model_len, limit)
    return ids if num_kept is None or len(ids) <= num_kept else ids[-num_kept:]


def num_kept_tokens(keep: int | None, max_model_len: int, limit: int | None) -> int | None:
    """Number of prompt tokens that truncation keeps; None: all."""
    if keep == -1:
        return max(1, max_model_len - (1 if limit is None else limit))
    return keep
