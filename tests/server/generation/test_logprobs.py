"""server/generation/logprobs.py: log-probabilities of a prompt are converted only when they are
read."""

import gc

import pytest
from scripted_client import columns

from server.generation import logprobs
from server.generation.logprobs import PromptLogprobs, read_logprobs


def test_prompt_logprobs_start_with_none_and_equal_the_columns() -> None:
    parts = [columns([([i, i + 1], [-1.0, -float(i)], 1) for i in range(n)]) for n in (150, 1, 64)]
    prompt = PromptLogprobs(None)

    for part in parts:
        prompt.add([part])

    expected = [entry for part in parts for entry in read_logprobs(part, None)]
    assert list(prompt) == [None, *expected] and len(prompt) == len(expected) + 1
    assert list(prompt) == list(prompt)


def test_prompt_logprobs_are_converted_only_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_converted: list[int] = []
    convert = logprobs.read_logprobs
    monkeypatch.setattr(
        logprobs,
        "read_logprobs",
        lambda *given: num_converted.append(1) or convert(*given),
    )
    prompt = PromptLogprobs(None)
    prompt.add([columns([([1], [-1.0], 1)] * 1_000)])
    positions = iter(prompt)

    next(positions)
    assert num_converted == []
    next(positions)
    assert num_converted == [1]


def test_the_garbage_collector_does_not_visit_log_probabilities() -> None:
    (position,) = read_logprobs(columns([([1, 2], [-1.0, -2.0], 1)]), None)

    assert not gc.is_tracked(position) and not gc.is_tracked(position.chosen)
