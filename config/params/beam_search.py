"""BeamSearchParams: the parameters of a beam search."""

import msgspec

from config.errors import UserError, value_text

MAX_LENGTH_PENALTY = 10.0
"""Maximum absolute value of length_penalty. Scores overflow a float far above it."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Beam search parameters. Names and defaults are vLLM's; the search has the semantics of
    transformers' `generate` with `num_beams`. Raises `UserError` when a value is out of range."""

    beam_width: int
    """Number of beams, and of returned sequences."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Without effect: beams are ranked by raw log-probabilities, without sampling."""
    length_penalty: float = 1.0
    """A sequence's score is its log-probability divided by its length to this power."""
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"{name} is {value!r}, it must be an integer of at least 1", param=name
                )
        check_length_penalty(self.length_penalty)


def check_length_penalty(value: float) -> None:
    """Raise UserError for a penalty that is out of range."""
    if not (isinstance(value, (int, float)) and abs(value) <= MAX_LENGTH_PENALTY):
        raise UserError(
            f"length_penalty is {value_text(value)}, it must be a number between "
            f"{-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}",
            param="length_penalty",
        )
