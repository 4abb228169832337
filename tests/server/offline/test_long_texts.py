"""Pooling of texts longer than the default token budget of a step."""

from pathlib import Path

import pytest
from tiny_encoders import make_pooling

from config.errors import PromptTooLong
from gaudiserve import LLM


@pytest.mark.parametrize("max_model_len", [None, 2600])
def test_a_classifier_takes_a_text_as_long_as_its_context(
    max_model_len: int | None, tmp_path: Path
) -> None:
    folder = make_pooling(
        "llama", tmp_path, num_labels=3, num_hidden_layers=1, max_position_embeddings=2600
    )

    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=max_model_len) as llm:
        longest, short = llm.classify([{"prompt_token_ids": [5] * 2600}, "Hello"])
        with pytest.raises(PromptTooLong, match="2601"):
            llm.classify([{"prompt_token_ids": [5] * 2601}])

    assert len(longest.outputs.probs) == len(short.outputs.probs) == 3
