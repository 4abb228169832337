"""Body of /v1/completions, and validation of prompts: texts or token ids, one or many."""

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, WithJsonSchema

from config.errors import UserError, value_text
from config.params.sampling import MAX_LOGPROBS, MAX_N
from server.openai.schema.generation import (
    UNSUPPORTED,
    GenerationBody,
    Integer,
    OtherRoutes,
    Unsupported,
    check_between,
)
from server.openai.schema.json_schema import TEXT, Schema, any_of, array

Texts = list[str]
TokenLists = list[list[int]]

_IDS = array({"type": "integer", "minimum": 0})
MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16


def prompts_schema(most: int) -> Schema:
    """The JSON schema of a prompt field with at most `most` entries."""
    return any_of(TEXT, array(TEXT, maxItems=most), _IDS, array(_IDS, maxItems=most))


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions: a text or token ids to complete."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "Once upon a time", "max_tokens": 32}}
    )
    unsupported: ClassVar[Unsupported] = {
        **UNSUPPORTED,
        "suffix": ("",),
        "thinking_token_budget": (),
    }
    other_routes: ClassVar[OtherRoutes] = {"messages": ("prompt", "/v1/chat/completions")}
    prompt_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Annotated[Any, WithJsonSchema(prompts_schema(MAX_PROMPTS))]
    max_tokens: Integer | None = Field(
        None, description=f"Maximum generated tokens; default {DEFAULT_MAX_TOKENS}."
    )
    logprobs: Integer | None = None
    best_of: Integer | None = Field(
        None, description="Generated choices per prompt, of which the likeliest n are returned."
    )

    def check(self) -> None:
        super().check()
        self._check_best_of()
        check_between(self, "logprobs", 0, MAX_LOGPROBS)
        least = 0 if self.echo else 1
        if self.max_tokens is not None and self.max_tokens < least:
            only = "" if self.echo else " (0 only with echo)"
            raise UserError(
                f"max_tokens is {self.max_tokens}, it must be at least {least}{only}",
                param="max_tokens",
            )

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        num_choices = 1 if self.n is None else self.n
        if not num_choices <= self.best_of <= MAX_N:
            raise UserError(
                f"best_of is {self.best_of}, it must be between {num_choices} (n) and {MAX_N}",
                param="best_of",
            )
        if self.best_of == num_choices:
            return
        for name, is_on in (("stream", self.stream), ("use_beam_search", self.use_beam_search)):
            if is_on:
                raise UserError(
                    f"best_of is {self.best_of}, with {name} it must be n, which is {num_choices}",
                    param="best_of",
                )

    @property
    def num_drawn(self) -> int:
        """Number of choices to sample per prompt; the response has the best `n` of them."""
        return self.best_of or self.n or 1

    @property
    def num_prompt_logprob_lists(self) -> int:
        """Number of lists of a prompt's log-probabilities in the response. Each choice has a list
        in `logprobs` with echo, and a list in `prompt_logprobs`."""
        is_echoed = bool(self.echo) and self.logprobs is not None
        return (self.n or 1) * max(1, is_echoed + (self.prompt_logprobs is not None))

    @property
    def limit(self) -> int:
        """Maximum generated tokens of a choice."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> Texts | TokenLists:
        """The prompts as a list, all texts or all token ids. Raises UserError."""
        return given_prompts(self.prompt, "prompt", MAX_PROMPTS)


def numbers_of_ids(given: object) -> list[int]:
    """Lengths of the token id lists, without validation."""
    if not isinstance(given, list) or not given:
        return []
    if _is_id(given[0]):
        return [len(given)]
    return [len(value) for value in given if isinstance(value, list)]


def given_prompts(given: object, name: str, most: int) -> Texts | TokenLists:
    """The entries of field `name` as a list, all texts or all token ids. Raises UserError."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise _bad(
            f"{name} is {value_text(given)}, it must be a string, a list of strings, a list of "
            "token ids, or a list of lists of token ids",
            name,
        )
    if not given:
        raise _bad(f"{name} is an empty list, it must have at least 1 {name} or token id", name)
    first = given[0]
    if _is_id(first):
        return [_token_ids(given, name, name)]
    if len(given) > most:
        raise _bad(f"{name} has {len(given)} entries, it may have at most {most}", name)
    if isinstance(first, str):
        for place, prompt in enumerate(given):
            if not isinstance(prompt, str):
                raise _unlike(f"{name}[{place}]", prompt, "a string", name)
        return given
    if not isinstance(first, list):
        raise _bad(
            f"{name}[0] is {value_text(first)}, it must be a string, a token id or a list of token "
            "ids",
            name,
        )
    return [_token_ids(prompt, f"{name}[{place}]", name) for place, prompt in enumerate(given)]


def _token_ids(given: object, where: str, name: str) -> list[int]:
    if not isinstance(given, list):
        raise _unlike(where, given, "a list of token ids", name)
    if not given:
        raise _bad(f"{where} is an empty list, it must have at least 1 token id", name)
    for place, token_id in enumerate(given):
        if not _is_id(token_id):
            raise _unlike(f"{where}[{place}]", token_id, "a token id", name)
        # Only integers beyond 64 bits are rejected here: the pipeline checks the vocabulary size.
        if not -(2**63) <= token_id < 2**63:
            raise _bad(
                f"{where} has token id {value_text(token_id)}, it must be between 0 and the size "
                "of the vocabulary",
                name,
            )
    return given


def _is_id(value: object) -> bool:
    return type(value) is int


def _unlike(where: str, value: object, wanted: str, name: str) -> UserError:
    first = f"{where.rpartition('[')[0]}[0]"
    return _bad(f"{where} is {value_text(value)}, it must be {wanted} like {first}", name)


def _bad(message: str, name: str) -> UserError:
    return UserError(message, param=name)
