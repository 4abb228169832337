"""PoolingParams: the pooling parameters of a request. PoolingFacts: what a pooling model
supports."""

import msgspec

from config.errors import UserError, value_text

EMBED = "embed"
"""A vector for the whole text."""
TOKEN_EMBED = "token_embed"
"""A vector for each token."""
SCORE = "score"
"""A score for a pair of texts that are encoded together."""
CLASSIFY = "classify"
"""A score for each label of the model."""
TASKS = (EMBED, TOKEN_EMBED, SCORE, CLASSIFY)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How to pool the hidden states of a text or pair. Raises `UserError` for a value that no model
    supports."""

    task: str = EMBED
    """One of TASKS."""
    dimensions: int | None = None
    """Number of leading elements of the vector to keep, before normalization; None: all."""
    normalize: bool | None = None
    """Whether to normalize vectors to length 1; for score and classify, whether to apply the
    activation of the head to its logits. None: the model's default."""
    num_first: int = 0
    """Number of tokens of the first text of a pair; the other tokens have token type 1, if the
    model has token types. 0: a single text."""
    num_skipped: int = 0
    """Number of leading tokens that pooling excludes: the tokens of a prompt."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UserError(
                f"task is {self.task!r}, it must be one of {', '.join(TASKS)}", param="task"
            )
        if self.dimensions is not None:
            _at_least("dimensions", self.dimensions, 1)
            if self.task not in (EMBED, TOKEN_EMBED):
                raise UserError(
                    f"dimensions is {self.dimensions}, and {self.task} returns no vector to "
                    "truncate",
                    param="dimensions",
                )
        _at_least("num_first", self.num_first, 0)
        _at_least("num_skipped", self.num_skipped, 0)


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a pooling model supports, from its config.json, the files of sentence-transformers and
    --pooler-config."""

    tasks: tuple[str, ...]
    """The supported TASKS."""
    width: int
    """Size of the vectors of embed, score and classify."""
    token_width: int
    """Size of the vectors of token_embed."""
    normalizes: bool = False
    """Default of PoolingParams.normalize."""
    dimensions: tuple[int, ...] | None = ()
    """Lengths to which a vector may be truncated (Matryoshka); None: any; empty: none."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    similarity: str = "cosine"
    """Similarity function: cosine, dot, euclidean or manhattan."""
    prompts: dict[str, str] = {}
    """Name -> prompt that is prepended to an input."""
    default_prompt: str | None = None
    """Name of the default prompt."""
    includes_prompt: bool = True
    """Whether the prompt's tokens are pooled (see PoolingParams.num_skipped)."""
    lowers_case: bool = False
    """Whether texts are lowercased before tokenization."""


def _at_least(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UserError(
            f"{name} is {value_text(value)}, it must be an integer of at least {minimum}",
            param=name,
        )
