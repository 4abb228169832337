"""BeamSearchParams: what a caller may ask of a beam search. Knows nothing of models."""

import math

import msgspec

from config.errors import UserError

MOST_LENGTH_PENALTY = 10.0
"""Either way; far beyond it no float holds a score."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How to search. Names and defaults are vLLM's; the results are those of `generate` of
    transformers with `num_beams`. Raises `UserError` when a value is out of range."""

    beam_width: int
    """Beams that are kept, and sequences that are given."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Changes nothing: beams are compared by what the model says, and nothing is drawn."""
    length_penalty: float = 1.0
    """A sequence's score is its log-probability divided by its length to this power."""
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} is {value!r}, it must be at least 1", param=name)
        check_length_penalty(self.length_penalty)


def check_length_penalty(value: float) -> None:
    """Raise UserError for what no score can be made of."""
    number = isinstance(value, (int, float)) and math.isfinite(value)
    if not (number and abs(value) <= MOST_LENGTH_PENALTY):
        raise UserError(
            f"length_penalty is {value!r}, it must be between {-MOST_LENGTH_PENALTY:g} and "
            f"{MOST_LENGTH_PENALTY:g}",
            param="length_penalty",
        )
