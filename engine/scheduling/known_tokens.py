"""What pipeline stages learn of speculation with a plan: the last stage alone has sampled."""

from engine.request import Request
from hpu.protocol import TOKEN_BYTES, KnownTokens


def known_tokens(decodes: list[Request], width: int) -> KnownTokens:
    """The last `width` tokens of each request that decodes, and its drafts, which it loses.

    A decode follows `num_stages` steps behind the last one of its request, and so many steps are in
    flight at most: the result of that one is known.
    """
    tokens = bytearray()
    for request in decodes:
        last = request.token_bytes(max(request.num_tokens - width, 0), request.num_tokens)
        tokens += bytes(width * TOKEN_BYTES - len(last)) + last
    known = KnownTokens(
        [request.num_tokens for request in decodes],
        memoryview(tokens),
        [request.drafts for request in decodes],
    )
    for request in decodes:
        request.drafts = []
    return known
