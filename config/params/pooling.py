"""Pooling: what a caller may ask of a model that gives vectors, and what such a model says of
itself. Knows no tensors and no text."""

import msgspec

from config.errors import UserError

EMBED = "embed"
"""One vector for the whole text."""
TOKEN_EMBED = "token_embed"
"""One vector for each token."""
SCORE = "score"
"""One number for a pair of texts that were read together."""
CLASSIFY = "classify"
"""One number for each of the model's labels."""
TASKS = (EMBED, TOKEN_EMBED, SCORE, CLASSIFY)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What to make of one text's (or pair's) hidden states.

    Raises `UserError` for a value that no model takes; the engine refuses what its own does not.
    """

    task: str = EMBED
    """One of TASKS."""
    dimensions: int | None = None
    """The first so many numbers of a vector, cut before it is normalised; None: all."""
    normalize: bool | None = None
    """Vectors of length 1; for score and classify, numbers between 0 and 1 rather than logits.
    None: as the model was made for."""
    num_first: int = 0
    """Tokens of the first text of a pair: those behind it have token type 1, where the model has
    types. 0: there is one text."""
    num_skipped: int = 0
    """Tokens at the front that are read and not pooled: a prompt that does not count."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UserError(
                f"task is {self.task!r}, it must be one of {', '.join(TASKS)}", param="task"
            )
        if self.dimensions is not None:
            _at_least("dimensions", self.dimensions, 1)
            if self.task not in (EMBED, TOKEN_EMBED):
                raise UserError(
                    f"dimensions is {self.dimensions}, and {self.task} gives no vector that could "
                    "be cut",
                    param="dimensions",
                )
        _at_least("num_first", self.num_first, 0)
        _at_least("num_skipped", self.num_skipped, 0)


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a pooling model says of itself, in its config.json and in sentence-transformers' own
    files beside it."""

    tasks: tuple[str, ...]
    """Of TASKS, those it can do."""
    width: int
    """Numbers in a vector of embed and classify."""
    token_width: int
    """Numbers in each vector of token_embed."""
    normalizes: bool = False
    """Whether its vectors have length 1 unless asked otherwise."""
    dimensions: tuple[int, ...] | None = ()
    """Lengths that a vector may be cut to: it was trained for these; None: any; empty: none."""
    labels: tuple[str, ...] = ()
    """Names of what classify gives numbers for."""
    similarity: str = "cosine"
    """How its vectors are compared: cosine, dot, euclidean or manhattan."""
    prompts: dict[str, str] = {}
    """Texts to put in front of an input, by name."""
    default_prompt: str | None = None
    """The name of the one that is taken unless another is named."""
    includes_prompt: bool = True
    """Whether a prompt's tokens are pooled with the others (see PoolingParams.num_skipped)."""
    lowers_case: bool = False
    """Whether texts are written in small letters before they are tokenised."""


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} is {value!r}, it must be at least {least}", param=name)
