"""PoolingParams: the pooling parameters of a request. PoolingFacts: what a pooling model
supports."""

import msgspec

from config.errors import UserError, value_text

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
    """How to pool the hidden states of a text or pair.

    Raises `UserError` for a value that no model supports; the engine refuses values that its model
    does not support.
    """

    task: str = EMBED
    """One of TASKS."""
    dimensions: int | None = None
    """Truncate the vector to this many numbers before it is normalized; None: all."""
    normalize: bool | None = None
    """Vectors of length 1; for score and classify, numbers between 0 and 1 instead of logits.
    None: the model's default."""
    num_first: int = 0
    """Number of tokens of the first text of a pair; later tokens have token type 1, if the model
    has token types. 0: a single text."""
    num_skipped: int = 0
    """Number of leading tokens that are computed but not pooled: a prompt."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UserError(
                f"task is {self.task!r}, it must be one of {', '.join(TASKS)}", param="task"
            )
        if self.dimensions is not None:
            _at_least("dimensions", self.dimensions, 1)
            if self.task not in (EMBED, TOKEN_EMBED):
                raise UserError(
                    f"dimensions is {self.dimensions}, and {self.task} gives no vector to truncate",
                    param="dimensions",
                )
        _at_least("num_first", self.num_first, 0)
        _at_least("num_skipped", self.num_skipped, 0)


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a pooling model supports, from its config.json and the files of
    sentence-transformers."""

    tasks: tuple[str, ...]
    """The supported TASKS."""
    width: int
    """Size of a vector of embed and classify."""
    token_width: int
    """Size of each vector of token_embed."""
    normalizes: bool = False
    """Default of PoolingParams.normalize."""
    dimensions: tuple[int, ...] | None = ()
    """Lengths to which a vector may be truncated (Matryoshka); None: any; empty: none."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    similarity: str = "cosine"
    """How vectors are compared: cosine, dot, euclidean or manhattan."""
    prompts: dict[str, str] = {}
    """Prompts to put before an input, by name."""
    default_prompt: str | None = None
    """Name of the default prompt."""
    includes_prompt: bool = True
    """Whether the prompt's tokens are pooled (see PoolingParams.num_skipped)."""
    lowers_case: bool = False
    """Whether texts are converted to lower case before tokenization."""


def _at_least(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UserError(f"{name} is {value_text(value)}, it must be at least {minimum}", param=name)
