"""A published GGUF file: its tokens equal the tokens of transformers with the same file."""

import json
from pathlib import Path

import pytest
from gemma_gguf import gemma_gguf

from gaudiserve import LLM, SamplingParams

# transformers takes minutes to read a vocabulary of 262,144 tokens.
ANSWERS = json.loads((Path(__file__).parents[1] / "vectors" / "gemma_gguf.json").read_text())


@pytest.mark.slow  # The test downloads and converts 250 MB.
@pytest.mark.timeout(600)
def test_greedy_tokens_of_a_file_with_k_quants_equal_transformers() -> None:
    expected = ANSWERS["answers"]
    params = SamplingParams(temperature=0, max_tokens=len(expected[0]["tokens"]))

    with LLM(model=str(gemma_gguf()), dtype="float32", max_model_len=512) as llm:
        outputs = llm.generate([answer["text"] for answer in expected], params, use_tqdm=False)

    for output, answer in zip(outputs, expected, strict=True):
        assert output.prompt_token_ids == answer["prompt"]
        assert list(output.outputs[0].token_ids) == answer["tokens"]
