"""Whether a text ends in a repetition: the same characters at least four times, over 400
characters. The page has the same rule (server/page/repetition.js)."""

MAX_PERIOD, MIN_REPEATS, MIN_CHARACTERS = 400, 4, 400


def repeats(text: str) -> bool:
    """Whether the end of `text` repeats itself."""
    for period in range(1, MAX_PERIOD + 1):
        length = max(MIN_CHARACTERS, MIN_REPEATS * period)
        if length > len(text):
            return False
        if text[-length + period :] == text[-length:-period]:
            return True
    return False
