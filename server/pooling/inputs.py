"""Converts texts, pairs of texts or token ids to validated inputs of a pooling model."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from config.errors import PromptTooLong, UserError
from config.params.pooling import TOKEN_EMBED, PoolingFacts, PoolingParams
from config.params.token_ids import unknown_token
from engine.transport.messages import Ready
from server.openai.schema.completions import Texts, TokenLists
from server.pooling.pipeline import PoolingInput
from server.pooling.schema import MANY_IDS
from server.text.long_texts import TooManyTokens
from server.text.pooling_inputs import Text, TextInputOptions
from server.text.tokenizer import Tokenizer, TooManyCharacters

MAX_NUMBERS = 2**24
"""Maximum number of values in a response, such as 2048 vectors of 8192 values: 64 MiB, or five
times as much as JSON."""
_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class InputOptions:
    """Task and tokenization options of the inputs."""

    params: PoolingParams
    param: str = "input"
    """Field with the inputs, for errors."""
    is_list: bool = True
    """Whether the names of inputs have an index (see `item`)."""
    truncate: int | None = None
    """Truncate inputs to this many tokens; -1: to the model's maximum."""
    keep_end: bool = False
    special: bool = True
    """Whether special tokens are added to texts."""
    prompt_name: str | None = None
    """Name of the model's prompt that is put before a text; None: the default prompt."""
    max_first_tokens: int | None = None
    """Truncate a single text, or the first text of a pair, to this many tokens."""
    max_second_tokens: int | None = None

    def item(self, index: int) -> str:
        """Name of an input, for errors."""
        return f"{self.param}[{index}]" if self.is_list else self.param


def make_input_processor(
    ready: Ready | None, tokenizer: Tokenizer | None
) -> "InputProcessor | None":
    """Create the input processor of a pooling model; None for a generative model, and before the
    engine is ready."""
    if ready is None or ready.pooling is None:
        return None
    return InputProcessor(
        tokenizer, ready.pooling, vocab_size=ready.vocab_size, max_model_len=ready.max_model_len
    )


def not_a_pooling_model() -> UserError:
    """The error for a pooling request to a generative model."""
    return UserError(
        "This model generates text; this request needs a pooling model: serve one, or serve this "
        "model with --runner pooling or --convert embed.",
        param="model",
    )


class InputProcessor:
    """Prepares inputs for a model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        facts: PoolingFacts,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self.facts = facts
        self.max_tokens = max_model_len
        """Maximum tokens of an input."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def check(
        self, params: PoolingParams, param: str = "task", *, size_param: str = "dimensions"
    ) -> None:
        """Raise UserError for a task (from the field `param`) or a vector size (from the field
        `size_param`) that the model does not support."""
        facts = self.facts
        if params.task not in facts.tasks:
            raise UserError(
                f"task is {params.task!r}, this model supports {', '.join(facts.tasks)}",
                param=param,
            )
        if params.dimensions is None or params.dimensions == self._width(params):
            return
        if facts.dimensions is not None and params.dimensions not in facts.dimensions:
            allowed = (
                f"one of {', '.join(map(str, facts.dimensions))}" if facts.dimensions else "absent"
            )
            raise UserError(
                f"{size_param} is {params.dimensions}, this model has {self._width(params)}: it "
                f"must be {allowed}",
                param=size_param,
            )
        if params.dimensions > self._width(params):
            raise UserError(
                f"{size_param} is {params.dimensions}, it must be at most {self._width(params)}",
                param=size_param,
            )

    def check_size(self, inputs: Sequence[PoolingInput], param: str = "input") -> None:
        """Raise UserError, for the field `param`, if the results of `inputs`, all with the same
        task, have more than MAX_NUMBERS values."""
        params = inputs[0].params
        rows = len(inputs)
        if params.task == TOKEN_EMBED:
            rows = sum(len(item.token_ids) for item in inputs)
        count = rows * (params.dimensions or self._width(params))
        if count > MAX_NUMBERS:
            raise UserError(
                f"the response would have {count} numbers, at most {MAX_NUMBERS} are allowed: "
                "send fewer or shorter inputs",
                param=param,
            )

    async def texts(self, texts: Sequence[Text], options: InputOptions) -> list[PoolingInput]:
        """Create inputs from texts or pairs; the model's prompt is put before single texts. Raises
        UserError and Overloaded."""
        if self._tokenizer is None:
            raise UserError("this server has no tokenizer, send token ids", param=options.param)
        prefix = self._prefix(options.prompt_name)
        rule = TextInputOptions(
            most=self.limit(options.truncate),
            cuts=options.truncate is not None,
            keep_end=options.keep_end,
            special=options.special,
            prefix=prefix,
            lowercase=self.facts.lowers_case,
            max_first_tokens=options.max_first_tokens,
            max_second_tokens=options.max_second_tokens,
        )
        try:
            tokenized = await self._tokenizer.encode_inputs(texts, rule)
        except TooManyTokens as error:
            raise self._too_long(error, options) from None
        except TooManyCharacters as error:
            error.param = options.param
            raise
        num_skipped = 0
        if prefix and not self.facts.includes_prompt:
            num_skipped = await self._num_prompt_tokens(self._tokenizer, prefix, options)
        inputs = []
        for index, (text, tokens) in enumerate(zip(texts, tokenized, strict=True)):
            skipped = num_skipped if isinstance(text, str) else 0
            if len(tokens.ids) <= skipped:
                raise UserError(
                    f"{options.item(index)} has {len(tokens.ids)} tokens, it must have at least "
                    f"{skipped + 1}",
                    param=options.param,
                )
            params = options.params
            if tokens.num_first or skipped:
                params = msgspec.structs.replace(
                    params, num_first=tokens.num_first, num_skipped=skipped
                )
            inputs.append(PoolingInput(tokens.ids, params))
        return inputs

    async def prompts(
        self, prompts: Texts | TokenLists, options: InputOptions
    ) -> list[PoolingInput]:
        """Create inputs from texts or from token ids. Raises UserError and Overloaded."""
        texts = [item for item in prompts if isinstance(item, str)]
        if texts:
            return await self.texts(texts, options)
        return await self.token_lists(
            [item for item in prompts if not isinstance(item, str)], options
        )

    async def rendered(self, text: str, options: InputOptions) -> list[PoolingInput]:
        """Create a list with the input from text that a chat template rendered. Control tokens in
        the caller's text may be marked (see server/text/control_tokens.py). Raises UserError and
        Overloaded."""
        assert self._tokenizer is not None, "a template has rendered"
        most = self.limit(options.truncate)
        try:
            if options.truncate is None:
                ids = await self._tokenizer.encode(text, options.special, most)
            else:
                ids = await self._tokenizer.encode_part(
                    text, options.special, most, from_end=options.keep_end
                )
        except TooManyTokens as error:
            raise self._too_long(error, options) from None
        except TooManyCharacters as error:
            error.param = options.param
            raise
        return await self.token_lists([ids], options)

    async def token_lists(
        self, lists: Sequence[list[int]], options: InputOptions
    ) -> list[PoolingInput]:
        """Create inputs from token ids. Raises UserError."""
        if sum(map(len, lists)) > MANY_IDS:
            return await asyncio.to_thread(self._token_lists, lists, options)
        return self._token_lists(lists, options)

    def _token_lists(self, lists: Sequence[list[int]], options: InputOptions) -> list[PoolingInput]:
        max_tokens = self.limit(options.truncate)
        inputs = []
        for index, ids in enumerate(lists):
            if not ids:
                raise UserError(
                    f"{options.item(index)} has 0 token ids, it must have at least 1",
                    param=options.param,
                )
            for token_id in (min(ids), max(ids)):
                if not 0 <= token_id < self._vocab_size:
                    raise unknown_token(
                        options.item(index), token_id, self._vocab_size, options.param
                    )
            if len(ids) > max_tokens:
                if options.truncate is None:
                    raise self._too_long(TooManyTokens(len(ids), index=index), options)
                ids = ids[-max_tokens:] if options.keep_end else ids[:max_tokens]
            inputs.append(PoolingInput(ids, options.params))
        return inputs

    def _width(self, params: PoolingParams) -> int:
        return self.facts.token_width if params.task == TOKEN_EMBED else self.facts.width

    def limit(self, truncate: int | None) -> int:
        """Maximum tokens of an input with the option `truncate` (see InputOptions). Raises
        UserError."""
        if truncate is None or truncate == -1:
            return self.max_tokens
        if not 1 <= truncate <= self.max_tokens:
            raise UserError(
                f"truncate_prompt_tokens is {truncate}, it must be -1, or between 1 and "
                f"{self.max_tokens}, the maximum input length of the model",
                param="truncate_prompt_tokens",
            )
        return truncate

    def prompt_names(self) -> str:
        """Names of the model's prompts, for errors."""
        return ", ".join(list(self.facts.prompts)[:_NAMES_SHOWN]) or "no prompts"

    def _too_long(self, error: TooManyTokens, options: InputOptions) -> PromptTooLong:
        return PromptTooLong(
            error.count,
            None,
            self.max_tokens,
            param=options.param,
            item=options.item(error.index),
            at_least=error.at_least,
        )

    def _prefix(self, name: str | None) -> str:
        name = self.facts.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.facts.prompts:
            raise UserError(
                f"prompt_name is {name[:80]!r}, this model has {self.prompt_names()}",
                param="prompt_name",
            )
        return self.facts.prompts[name]

    async def _num_prompt_tokens(
        self, tokenizer: Tokenizer, prefix: str, options: InputOptions
    ) -> int:
        """Number of tokens of the prompt, including leading special tokens. As in
        sentence-transformers, a trailing special token is not counted, since a text follows the
        prompt."""
        rule = TextInputOptions(
            self.max_tokens, special=options.special, lowercase=self.facts.lowers_case
        )
        try:
            (tokens,) = await tokenizer.encode_inputs([prefix], rule)
        except TooManyTokens as error:
            raise self._too_long(error, options) from None
        ends_special = bool(tokens.ids) and tokens.ids[-1] in tokenizer.special_ids
        return len(tokens.ids) - (1 if ends_special else 0)
