"""The tokenizer's end token ends an answer even if the other files name another token."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import BOS, EOS, make_tiny

from gaudiserve import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An LLM with the files of a fine-tuned base model: only the tokenizer has the new end
    token."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama", eos_token_id=BOS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": BOS}))
    assert _eos_token(folder) == "<|im_end|>"
    with LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4, max_model_len=64) as made:
        yield made


def _eos_token(folder: Path) -> str:
    text: str = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    return text


def _finish(llm: LLM, params: SamplingParams) -> tuple[str | None, int]:
    answer = llm.generate("Hello", params)[0].outputs[0]
    return answer.finish_reason, len(answer.token_ids)


@pytest.mark.parametrize("token", [BOS, EOS])
def test_each_end_token_ends_an_answer(llm: LLM, token: int) -> None:
    always = {token: 100.0}

    assert _finish(llm, SamplingParams(max_tokens=5, logit_bias=always)) == ("stop", 1)


@pytest.mark.parametrize("token", [BOS, EOS])
def test_ignored_end_tokens_do_not_end_an_answer(llm: LLM, token: int) -> None:
    params = SamplingParams(max_tokens=5, logit_bias={token: 100.0}, ignore_eos=True)

    assert _finish(llm, params) == ("length", 5)


def test_no_end_token_is_generated_before_min_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, min_tokens=3, logit_bias={BOS: 100.0, EOS: 100.0})

    assert _finish(llm, params) == ("stop", 4)
