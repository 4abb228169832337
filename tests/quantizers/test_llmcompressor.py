"""`gaudiserve quantize` with the real llmcompressor: what it writes is served like the model that
the library itself makes of the file."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import disable_quantization
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from gaudiserve import LLM, SamplingParams
from server.cli.main import main
from server.cli.quantize import TARGETS

pytestmark = pytest.mark.quantizers

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
FAMILIES = {"llama": SHAPE, "qwen3": {**SHAPE, "head_dim": 32}}
TEXTS = Path(__file__).parents[2] / "server" / "offline" / "perplexity.txt"
PROMPT = [3 + (7 * at) % 90 for at in range(40)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", TARGETS)
def test_the_served_model_is_that_of_the_library(kind: str, family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "plain", **FAMILIES[family])
    output = tmp_path / "quantized"
    flags = (
        ["--data", str(TEXTS), "--max-length=32", "--max-samples=8"]
        if TARGETS[kind].needs_data
        else []
    )

    assert (
        main(
            ["quantize", str(folder), "--to", kind, "-o", str(output), "--skip-perplexity", *flags]
        )
        == 0
    )

    expected = _logprobs_of_library(output)
    with LLM(str(output), device="cpu", dtype="float32", max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    following = zip(PROMPT[1:], answer.prompt_logprobs[1:], strict=True)
    found = [entries[token].logprob for token, entries in following]
    assert found == pytest.approx(expected, abs=1e-4)


def _logprobs_of_library(folder: Path) -> list[float]:
    """Of each token of PROMPT but the first, with the weights dequantized and activations as they
    are."""
    whole = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=whole
    )
    model.apply(disable_quantization)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
