"""Texts, pairs of texts or token ids to the inputs of a pooling model, checked. Knows no HTTP."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from config.errors import PromptTooLong, UserError
from config.params.pooling import TOKEN_EMBED, PoolingFacts, PoolingParams
from engine.transport.messages import Ready
from server.pooling.pipeline import PoolingInput
from server.text.pooling_inputs import InputRule, InputTooLong, Text
from server.text.tokenizer import Tokenizer, TooManyCharacters

MANY_IDS = 10_000
"""Token ids that are checked on the event loop: a millisecond."""
MAX_NUMBERS = 2**24
"""In one answer: 64 MiB, or five times that as JSON; 2048 vectors of 8192 numbers."""
_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class InputOptions:
    """What is to be made of each input, and how it is read."""

    params: PoolingParams
    param: str = "input"
    """The field that holds the inputs."""
    is_list: bool = True
    """Whether that field holds several; they are then called by their index."""
    truncate: int | None = None
    """Tokens that are left of a longer input; -1: as many as the model takes."""
    keeps_end: bool = False
    special: bool = True
    """Whether special tokens are put around texts."""
    prompt_name: str | None = None
    """Which of the model's prompts goes before a text; None: its default."""
    most_first: int | None = None
    """Tokens that are left of the first text of a pair."""
    most_second: int | None = None

    def item(self, place: int) -> str:
        """What an input is called in errors."""
        return f"{self.param}[{place}]" if self.is_list else self.param


def make_input_processor(
    ready: Ready | None, tokenizer: Tokenizer | None
) -> "InputProcessor | None":
    """What reads the inputs of a pooling model; None for a model that generates."""
    if ready is None or ready.pooling is None:
        return None
    return InputProcessor(
        tokenizer, ready.pooling, vocab_size=ready.vocab_size, max_model_len=ready.max_model_len
    )


def not_a_pooling_model() -> UserError:
    """What is wrong with asking a model that generates for vectors."""
    return UserError(
        "This model generates text; only a pooling model (of embeddings, scores or classes) does "
        "this.",
        param="model",
    )


class InputProcessor:
    """For one model. Raises UserError for what it does not take, with the index of the input."""

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
        """Of one input."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def check(self, params: PoolingParams, param: str = "task") -> None:
        """Raise UserError for a task (which `param` asked for) or a size of vectors that this model
        does not have."""
        facts = self.facts
        if params.task not in facts.tasks:
            raise UserError(
                f"task is {params.task!r}, this model can {', '.join(facts.tasks)}",
                param=param,
            )
        if params.dimensions is None or params.dimensions == self._width(params):
            return
        if facts.dimensions is not None and params.dimensions not in facts.dimensions:
            may = (
                f"one of {', '.join(map(str, facts.dimensions))}" if facts.dimensions else "absent"
            )
            raise UserError(
                f"dimensions is {params.dimensions}, this model has {self._width(params)}: it must "
                f"be {may}",
                param="dimensions",
            )
        if params.dimensions > self._width(params):
            raise UserError(
                f"dimensions is {params.dimensions}, it must be at most {self._width(params)}",
                param="dimensions",
            )

    def check_size(self, inputs: Sequence[PoolingInput]) -> None:
        """Raise UserError if what comes of `inputs`, all for one task, has more numbers than one
        answer may hold."""
        params = inputs[0].params
        rows = len(inputs)
        if params.task == TOKEN_EMBED:
            rows = sum(len(one.token_ids) for one in inputs)
        count = rows * (params.dimensions or self._width(params))
        if count > MAX_NUMBERS:
            raise UserError(
                f"the answer would have {count} numbers, at most {MAX_NUMBERS} may be asked for at "
                "once: send fewer or shorter inputs",
                param="input",
            )

    async def texts(self, texts: Sequence[Text], asked: InputOptions) -> list[PoolingInput]:
        """Inputs of texts or pairs; the model's prompt goes before a text that comes alone."""
        if self._tokenizer is None:
            raise UserError("this server has no tokenizer, send token ids", param=asked.param)
        prefix = self._prefix(asked.prompt_name)
        rule = InputRule(
            most=self.limit(asked.truncate),
            cuts=asked.truncate is not None,
            keeps_end=asked.keeps_end,
            special=asked.special,
            prefix=prefix,
            lowers_case=self.facts.lowers_case,
            most_first=asked.most_first,
            most_second=asked.most_second,
        )
        try:
            made = await self._tokenizer.encode_inputs(texts, rule)
        except InputTooLong as error:
            raise self.too_long(error.count, asked, error.place, at_least=error.at_least) from None
        except TooManyCharacters as error:
            error.param = asked.param
            raise
        num_skipped = 0
        if prefix and not self.facts.includes_prompt:
            num_skipped = await self._num_prompt_tokens(self._tokenizer, prefix, asked)
        inputs = []
        for place, (text, tokens) in enumerate(zip(texts, made, strict=True)):
            skipped = num_skipped if isinstance(text, str) else 0
            if len(tokens.ids) <= skipped:
                raise UserError(
                    f"{asked.item(place)} has {len(tokens.ids)} tokens, it must have at least "
                    f"{skipped + 1}",
                    param=asked.param,
                )
            params = asked.params
            if tokens.num_first or skipped:
                params = msgspec.structs.replace(
                    params, num_first=tokens.num_first, num_skipped=skipped
                )
            inputs.append(PoolingInput(tokens.ids, params))
        return inputs

    async def token_lists(
        self, lists: Sequence[list[int]], asked: InputOptions
    ) -> list[PoolingInput]:
        """Inputs of token ids, taken as they are."""
        if sum(map(len, lists)) > MANY_IDS:
            return await asyncio.to_thread(self._token_lists, lists, asked)
        return self._token_lists(lists, asked)

    def _token_lists(self, lists: Sequence[list[int]], asked: InputOptions) -> list[PoolingInput]:
        most = self.limit(asked.truncate)
        inputs = []
        for place, given in enumerate(lists):
            ids = given
            if not ids:
                raise UserError(f"{asked.item(place)} holds 0 token ids", param=asked.param)
            for token_id in (min(ids), max(ids)):
                if not 0 <= token_id < self._vocab_size:
                    raise UserError(
                        f"{asked.item(place)} has token id {token_id}, the vocabulary has 0 to "
                        f"{self._vocab_size - 1}",
                        param=asked.param,
                    )
            if len(ids) > most:
                if asked.truncate is None:
                    raise self.too_long(len(ids), asked, place)
                ids = ids[-most:] if asked.keeps_end else ids[:most]
            inputs.append(PoolingInput(ids, asked.params))
        return inputs

    def _width(self, params: PoolingParams) -> int:
        return self.facts.token_width if params.task == TOKEN_EMBED else self.facts.width

    def limit(self, truncate: int | None) -> int:
        """Tokens of one input, where it may be cut to `truncate`. Raises UserError."""
        if truncate is None or truncate == -1:
            return self.max_tokens
        if not 1 <= truncate <= self.max_tokens:
            raise UserError(
                f"truncate_prompt_tokens is {truncate}, it must be -1, or between 1 and "
                f"{self.max_tokens}, which is all that the model takes",
                param="truncate_prompt_tokens",
            )
        return truncate

    def too_long(
        self, count: int, asked: InputOptions, place: int = 0, *, at_least: bool = False
    ) -> PromptTooLong:
        """The error for an input of so many tokens, or still more."""
        return PromptTooLong(
            count,
            None,
            self.max_tokens,
            param=asked.param,
            item=asked.item(place),
            at_least=at_least,
        )

    def _prefix(self, name: str | None) -> str:
        name = self.facts.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.facts.prompts:
            known = ", ".join(list(self.facts.prompts)[:_NAMES_SHOWN]) or "no prompts"
            raise UserError(
                f"prompt_name is {name[:80]!r}, this model has {known}", param="prompt_name"
            )
        return self.facts.prompts[name]

    async def _num_prompt_tokens(
        self, tokenizer: Tokenizer, prefix: str, asked: InputOptions
    ) -> int:
        """Of the prompt with the special tokens before it, as sentence-transformers counts them:
        one that ends the prompt alone does not stand before a text."""
        rule = InputRule(self.max_tokens, special=asked.special, lowers_case=self.facts.lowers_case)
        try:
            (tokens,) = await tokenizer.encode_inputs([prefix], rule)
        except InputTooLong as error:
            raise self.too_long(error.count, asked, 0) from None
        ends = bool(tokens.ids) and tokens.ids[-1] in tokenizer.special_ids
        return len(tokens.ids) - (1 if ends else 0)
