"""Tokenization of prompts, with length limits and truncation."""

from config.errors import PromptTooLong, UserError
from server.generation.outputs import Prompt
from server.generation.validation import num_kept_tokens, truncate_prompt
from server.serving.state import AppState
from server.text.long_texts import TooManyTokens
from server.text.tokenizer import TooManyCharacters

COUNTED_CONTEXTS = 4
MIN_COUNTED_TOKENS = 131_072
"""A text is tokenized for counting up to the larger of COUNTED_CONTEXTS context lengths of the
model and MIN_COUNTED_TOKENS. Clients that split documents for a small embedding model count the
whole document first."""


async def encode_prompt(
    state: AppState,
    text: str,
    *,
    special: bool,
    keep: int | None,
    keep_end: bool,
    limit: int | None,
    param: str,
) -> Prompt:
    """Encode `text`, truncated to its last `keep` tokens, or to its first `keep` tokens without
    `keep_end`. -1 keeps as many tokens as fit into the context with `limit` output tokens; None
    keeps all tokens.

    Raises PromptTooLong if more tokens than the context remain. The error comes before tokenization
    if the length in characters is enough to tell. Also raises UserError and Overloaded.
    """
    max_model_len = state.max_model_len
    try:
        ids = await _encode(state, text, special, keep, keep_end, limit, max_model_len, param)
    except TooManyTokens as error:
        raise PromptTooLong(
            error.count, limit, max_model_len, param=param, at_least=error.at_least
        ) from None
    truncated_ids = truncate_prompt(ids, keep, max_model_len, limit, keep_end=keep_end)
    is_whole = truncated_ids is ids
    return Prompt(truncated_ids, state.text_tokenizer(param).unmarked(text) if is_whole else None)


def max_counted_tokens(state: AppState) -> int:
    """Maximum number of tokens of a text that is tokenized only for counting."""
    return max(COUNTED_CONTEXTS * state.max_model_len, MIN_COUNTED_TOKENS)


async def encode_for_counting(
    state: AppState,
    text: str,
    *,
    special: bool,
    keep: int | None = None,
    keep_end: bool = True,
    limit: int | None = None,
    param: str,
) -> list[int]:
    """Token ids of a text that is tokenized only for counting, truncated like in `encode_prompt`.
    Raises UserError for more than `max_counted_tokens`, and Overloaded."""
    max_tokens = max_counted_tokens(state)
    try:
        ids = await _encode(state, text, special, keep, keep_end, limit, max_tokens, param)
    except TooManyTokens as error:
        more = "at least " if error.at_least else ""
        raise UserError(
            f"the text has {more}{error.count} tokens, at most {max_tokens} can be counted; this "
            f"model's maximum context length is {state.max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        ) from None
    return truncate_prompt(ids, keep, state.max_model_len, limit, keep_end=keep_end)


async def _encode(
    state: AppState,
    text: str,
    special: bool,
    keep: int | None,
    keep_end: bool,
    limit: int | None,
    max_tokens: int,
    param: str,
) -> list[int]:
    """Token ids of `text`, or of a part of `text` that contains the tokens that truncation keeps.
    Such a part may have more than `max_tokens` tokens. Raises TooManyTokens if all tokens are
    needed and there are more than `max_tokens`, UserError and Overloaded."""
    tokenizer = state.text_tokenizer(param)
    num_kept = num_kept_tokens(keep, state.max_model_len, limit)
    try:
        if num_kept is None or num_kept > max_tokens:
            return await tokenizer.encode(text, special, max_tokens)
        return await tokenizer.encode_part(text, special, num_kept, from_end=keep_end)
    except TooManyCharacters as error:
        error.param = param
        raise
