"""What a request may ask for beside beam search, and beside best_of. Knows no engine."""

from typing import TYPE_CHECKING

from config.errors import UserError

if TYPE_CHECKING:
    from server.schema.common import GenerationBody

_SHAPES = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([],),
}
"""Fields that change which tokens may come, and their values that change nothing."""


def check_beams(body: "GenerationBody") -> None:
    """Raise UserError for what a beam search cannot heed, and for a length_penalty without one.

    What shapes a draw (temperature, top_p, top_k, min_p, seed) is fine, as in a greedy choice:
    nothing is drawn.
    """
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise UserError(
                f"length_penalty is {body.length_penalty}, without use_beam_search it must be 1",
                param="length_penalty",
            )
        return
    if body.stream:
        raise UserError(
            "a beam search cannot be streamed: its best sequence is known at the end; set stream "
            "to false",
            param="stream",
        )
    for name, neutral in _SHAPES.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            hint = "; use stop_token_ids" if name == "stop" else ""
            raise UserError(f"{name} cannot be had with use_beam_search{hint}", param=name)
    form = body.form
    if form is not None:
        raise UserError(f"{form[0]} cannot be had with use_beam_search", param=form[0])
