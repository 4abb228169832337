"""Offline beam search compared with `generate(num_beams=...)` of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EOS, make_tiny
from transformers import AutoModelForCausalLM

from gaudiserve import LLM, BeamSearchParams

PROMPTS = [[9], [5 + 7 * i % 301 for i in range(41)], [17 + i for i in range(23)]]
SHAPE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 96,
    # Small blocks, so that beams fill several blocks and share some of them.
    "block_size": 4,
    "skip_tokenizer_init": True,
}
SEARCHES = [
    # width, tokens, length penalty
    (1, 12, 1.0),
    (2, 1, 1.0),
    (2, 12, 0.0),
    (3, 16, 2.0),
    (4, 16, 1.0),
    (4, 7, -1.0),
    (8, 16, 0.6),
]
MANY_ENDS = [EOS, *range(10, 120, 10)]
"""Many end tokens, so that some beams finish early and must be outscored."""


def transformers_beam_search(
    model: Any, prompt: list[int], width: int, num_tokens: int, penalty: float, ends: list[int]
) -> tuple[list[list[int]], list[float]]:
    """Output sequences up to their end token, and their scores."""
    input_ids = torch.tensor([prompt])
    with torch.inference_mode():
        result = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            length_penalty=penalty,
            max_new_tokens=num_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 3,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = []
    for row in result.sequences[:, len(prompt) :].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), len(row))
        sequences.append(row[: stop + 1])
    scores = result.sequences_scores.tolist() if width > 1 else []
    return sequences, scores


@pytest.mark.parametrize("ends", ["the model's", "many", "none"])
def test_sequences_and_scores_equal_transformers(ends: str, tmp_path: Path) -> None:
    end_ids = {"the model's": [EOS], "many": MANY_ENDS, "none": []}[ends]
    folder = make_tiny("llama", tmp_path, eos_token_id=end_ids or None)
    if not end_ids:
        # tokenizer_config.json names another end token.
        (folder / "tokenizer_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    num_stopped = 0

    with LLM(str(folder), **SHAPE) as llm:
        for width, num_tokens, penalty in SEARCHES:
            params = BeamSearchParams(
                beam_width=width, max_tokens=num_tokens, length_penalty=penalty
            )
            outputs = llm.beam_search(PROMPTS, params)

            for prompt, output in zip(PROMPTS, outputs, strict=True):
                expected, scores = transformers_beam_search(
                    model, prompt, width, num_tokens, penalty, end_ids
                )
                actual = [seq.tokens[len(prompt) :] for seq in output.sequences]
                assert actual == expected, (width, num_tokens, penalty, len(prompt))
                lengths = [len(tokens) ** penalty for tokens in actual]
                for seq, length, score in zip(output.sequences, lengths, scores, strict=False):
                    assert seq.cum_logprob / length == pytest.approx(score, rel=1e-5, abs=1e-5)
                    logprobs = [entry[token].logprob for entry, token in
                             zip(seq.logprobs, seq.tokens[len(prompt) :], strict=True)]  # fmt: skip
                    assert sum(logprobs) == pytest.approx(seq.cum_logprob)
                num_stopped += sum(seq.finish_reason == "stop" for seq in output.sequences)
        stats = llm._client.stats

    assert (num_stopped > 10) == (ends == "many"), num_stopped
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_ignore_eos_is_respected_with_a_concurrency_limit(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, eos_token_id=MANY_ENDS)

    with LLM(str(folder), **SHAPE, enable_prefix_caching=False) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True)
        outputs = llm.beam_search(PROMPTS, params, concurrency_limit=1)

    lengths = [len(seq.tokens) for output in outputs for seq in output.sequences]
    assert lengths == [len(prompt) + 9 for prompt in PROMPTS for _ in range(2)]
    assert {seq.finish_reason for output in outputs for seq in output.sequences} == {"length"}
