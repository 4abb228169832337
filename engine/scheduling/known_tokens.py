"""Tokens that a plan carries to the pipeline stages: only the last stage has sampled them."""

from engine.request import Request
from hpu.protocol import TOKEN_BYTES, SampledTokens


def known_tokens(decodes: list[Request], width: int) -> SampledTokens:
    """The last `width` tokens and the drafts of each request in `decodes`. Clears the drafts.

    A decode runs at least `num_stages` steps after the previous decode of its request, and at most
    `num_stages` steps are in flight, so the result of the previous decode is known.
    """
    tokens = bytearray()
    for request in decodes:
        last = request.token_bytes(max(request.num_tokens - width, 0), request.num_tokens)
        tokens += bytes(width * TOKEN_BYTES - len(last)) + last
    known = SampledTokens(
        [request.num_tokens for request in decodes],
        memoryview(tokens),
        [request.drafts for request in decodes],
    )
    for request in decodes:
        request.drafts = []
    return known
