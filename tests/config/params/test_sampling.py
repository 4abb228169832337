"""SamplingParams: values that no engine may ever see, refused with their name."""

from typing import Any

import pytest

from config.errors import UserError
from config.params.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.5),
        ("top_k", 2.5),
        ("seed", 1.5),
        ("max_tokens", 1.5),
        ("max_tokens", "8"),
        ("min_tokens", 0.5),
        ("logprobs", 1.0),
        ("prompt_logprobs", "all"),
        ("truncate_prompt_tokens", 2.0),
        ("n", True),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1.5]),
        ("allowed_token_ids", "abc"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [None]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "x"}),
        ("bad_words_token_ids", (("a",),)),
        ("bad_words_token_ids", ((),)),
        ("bad_words", [5]),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name) as caught:
        SamplingParams(**{name: value})

    assert caught.value.param == name


def test_what_users_write_as_lists_is_kept_as_tuples() -> None:
    params = SamplingParams(
        stop="end", stop_token_ids=[3], allowed_token_ids=[4, 5], bad_words_token_ids=[[6, 7]]
    )

    assert (params.stop, params.stop_token_ids) == (("end",), (3,))
    assert (params.allowed_token_ids, params.bad_words_token_ids) == ((4, 5), ((6, 7),))
