"""SamplingParams: invalid values are refused by name and never reach an engine."""

from typing import Any

import pytest

from config.errors import UserError
from config.params.sampling import SamplingParams, invalid_token


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
        ("logit_bias", {5: 1.0, 6: float("nan"), 7: 2.0}),
        ("logit_bias", {5: 1.0, 6: float("-inf")}),
        ("logit_bias", {5: 1.0, 6: 100.5}),
        ("logit_bias", {5: 1.0, -1: 1.0}),
        ("allowed_token_ids", [4, True]),
        ("bad_words_token_ids", (("a",),)),
        ("bad_words_token_ids", ((),)),
        ("bad_words", [5]),
        ("bad_words", 5),
        ("bad_words_token_ids", [5]),
        ("bad_words_token_ids", 5),
        ("stop", 5),
        ("stop", [5]),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("allowed_token_ids", 5),
        ("logit_bias", 5),
        ("logit_bias", [5]),
        ("logit_bias", {5: 10**400}),
        pytest.param("temperature", 10**400, id="huge"),
        ("ignore_eos", "no"),
        ("detokenize", 1),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name) as caught:
        SamplingParams(**{name: value})

    assert caught.value.param == name


def test_list_parameters_are_stored_as_tuples() -> None:
    params = SamplingParams(
        stop="end", stop_token_ids=[3], allowed_token_ids=[4, 5], bad_words_token_ids=[[6, 7]]
    )

    assert (params.stop, params.stop_token_ids) == (("end",), (3,))
    assert (params.allowed_token_ids, params.bad_words_token_ids) == ((4, 5), ((6, 7),))


def test_null_means_an_empty_list_or_object() -> None:
    params = SamplingParams(stop=None, bad_words=None, logit_bias=None)  # type: ignore[arg-type]

    assert (params.stop, params.bad_words, params.logit_bias) == ((), (), {})


def test_an_unchecked_copy_shares_the_lists_of_the_original() -> None:
    params = SamplingParams(n=3, logit_bias={5: 1.0}, stop_token_ids=(3,))

    other = params.replace_unchecked(n=1)

    assert (params.n, other.n) == (3, 1)
    assert other.logit_bias is params.logit_bias
    assert other.stop_token_ids is params.stop_token_ids


@pytest.mark.parametrize(
    ("token_ids", "invalid"), [((), None), ((0, 9), None), ((3, -1), -1), ({5: 1, 10: 2}, 10)]
)
def test_invalid_token_returns_a_token_outside_the_vocabulary(
    token_ids: Any, invalid: int | None
) -> None:
    assert invalid_token(token_ids, 10) == invalid


@pytest.mark.parametrize(
    "value",
    [
        *(5, 1.5, True, "x", [5], ["x"], [None], [[1.5]], {"a": 1}),
        pytest.param(object(), id="object"),
        pytest.param(10**400, id="huge"),
    ],
)
@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_a_value_of_any_type_is_accepted_or_refused_by_name(name: str, value: object) -> None:
    """Without a server, no schema has checked the types."""
    error = UserError(name, param=name)
    try:
        SamplingParams(**{name: value})
    except UserError as refused:
        error = refused

    assert name in error.message and error.param == name
