"""A real embedding model, offline: its vectors equal sentence-transformers' vectors."""

from typing import Any

import numpy as np
import pytest
from minilm import minilm_folder, reference

from gaudiserve import LLM

TOLERANCE = 1e-3

CARD: dict[str, Any] = {
    "device": "hpu-emulator",
    "bucketing_strategy": "linear",
    "prompt_query_bucket_min": 64,
    "prompt_query_bucket_step": 192,
    "prompt_bs_bucket_max": 4,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="cpu"),
        # Slow: warm-up computes every bucket on the host.
        pytest.param({**CARD, "dtype": "float32"}, id="card", marks=pytest.mark.slow),
    ],
)
def test_vectors_equal_sentence_transformers_batched_and_alone(
    settings: dict[str, Any],
) -> None:
    texts = [text for text, _ in reference()]
    options: dict[str, Any] = {"truncate_prompt_tokens": -1, "use_tqdm": False}

    with LLM(model=minilm_folder(), **settings) as llm:
        together = llm.embed(texts, **options)
        alone = [llm.embed(text, **options)[0] for text in texts[:3]]

    for (text, expected), item in zip(reference(), together, strict=True):
        found = np.array(item.outputs.embedding)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, err_msg=text)
    for first, other in zip(alone, together, strict=False):
        np.testing.assert_allclose(first.outputs.embedding, other.outputs.embedding, atol=1e-5)
