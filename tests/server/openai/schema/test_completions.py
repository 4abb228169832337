"""Prompts of /v1/completions."""

from typing import Any

import pytest

from config.errors import UserError
from server.openai.schema.completions import given_prompts


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1.5], "prompt[0] is 1.5, it must be a string, a token id or a list of token ids"),
        (
            [{}],
            "prompt[0] is an empty object, it must be a string, a token id or a list of token ids",
        ),
        ([[1], "a"], "prompt[1] is 'a', it must be a list of token ids like prompt[0]"),
        (["a", [1]], "prompt[1] is a list, it must be a string like prompt[0]"),
    ],
)
def test_an_entry_of_a_wrong_type_is_compared_with_an_earlier_entry_only(
    given: list[Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        given_prompts(given, "prompt", 8)

    assert caught.value.message == words
