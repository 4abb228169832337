"""Tokens after drafts of a draft model or a head follow the distribution of the target."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import make_eagle
from greedy import load_reference
from tiny_models import make_tiny

from config.params.sampling import SamplingParams
from gaudiserve import LLM

VOCAB, NUM_DRAWS, ROUND = 9, 20_000, 2_000
PROMPT = [5, 2, 7, 5, 1]
TEMPERATURE = 2.0
MAX_CHI_SQUARE = 133.0
"""Limit for 80 degrees of freedom: one run in ten thousand exceeds it by chance."""


def expected_pairs(folder: Path) -> np.ndarray[Any, Any]:
    """(VOCAB, VOCAB) probabilities of the second and third token, computed by transformers."""
    model = load_reference(folder)

    @torch.no_grad()
    def following(texts: list[list[int]]) -> torch.Tensor:
        logits = model(torch.tensor(texts)).logits[:, -1].double()
        return torch.softmax(logits / TEMPERATURE, dim=-1)

    tokens = range(VOCAB)
    first = following([PROMPT])[0]
    second = following([[*PROMPT, token] for token in tokens])
    third = following([[*PROMPT, token, two] for token in tokens for two in tokens])
    pairs = first[:, None, None] * second[:, :, None] * third.view(VOCAB, VOCAB, VOCAB)
    found: np.ndarray[Any, Any] = pairs.sum(0).numpy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_token_pairs_after_drafts_follow_the_target_distribution(
    method: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = make_tiny("llama", tmp_path, vocab_size=VOCAB, initializer_range=0.07)
    head = tmp_path_factory.mktemp("head")
    if method == "eagle":
        make_eagle(target, head)
    config: dict[str, Any] = {
        "method": method,
        "model": str(target if method == "draft_model" else head),
        "num_speculative_tokens": 2,
        "adaptive": False,
    }
    expected = expected_pairs(target) * NUM_DRAWS
    found = np.zeros((VOCAB, VOCAB))

    with LLM(
        str(target),
        device="cpu",
        dtype="float32",
        max_model_len=32,
        max_num_seqs=256,
        num_gpu_blocks_override=600,
        skip_tokenizer_init=True,
        speculative_config=config,
    ) as llm:
        for start in range(0, NUM_DRAWS, ROUND):
            params = [
                SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=3, ignore_eos=True)
                for seed in range(start, start + ROUND)
            ]
            for output in llm.generate([PROMPT] * ROUND, params, use_tqdm=False):
                _, second, third = output.outputs[0].token_ids
                found[second, third] += 1
        counts = llm._client.stats.spec_decode

    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert found.sum() == NUM_DRAWS
    assert expected.min() > 5
    assert chi_square < MAX_CHI_SQUARE
    assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]
