"""Files of GPTQModel, in its GPTQ and AWQ formats, are served like the weights that GPTQModel
dequantizes.

Skipped without GPTQModel, which requires newer releases of transformers than llmcompressor."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from gaudiserve import LLM, SamplingParams

# GPTQModel reads this at import; its default number of threads on two cores is too small.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
gptqmodel = pytest.importorskip("gptqmodel")
dequantize_gemm = pytest.importorskip(
    "gptqmodel.quantization.awq.utils.packing_utils"
).dequantize_gemm

pytestmark = pytest.mark.quantizers

FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq, not symmetric": {"sym": False},
    "gptq, desc_act": {"desc_act": True},
    "gptq, 8 bits": {"bits": 8},
    "gptq, version 2": {"format": "gptq_v2"},
    "awq": {"quant_method": "awq", "format": "gemm"},
}
PROMPT = [3 + (7 * at) % 90 for at in range(40)]
SAMPLES = [[3 + (index * step + step) % 300 for step in range(64)] for index in range(64)]


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3, tied": {"tie_word_embeddings": True, "head_dim": 32},
    "qwen3_moe": {"moe_intermediate_size": 128, "head_dim": 32},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_served_model_equals_the_tools_model(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GPTQModel writes logs into the working directory.
    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 128, "intermediate_size": 256, **FAMILIES[family]}
    plain = make_tiny(family.partition(",")[0], tmp_path / "plain", **shape)
    config = gptqmodel.QuantizeConfig(
        **{"bits": 4, "group_size": 32, "desc_act": False, **FORMATS[name]}
    )
    model = gptqmodel.GPTQModel.load(str(plain), config, device="cpu")
    samples = [{"input_ids": sample, "attention_mask": [1] * len(sample)} for sample in SAMPLES]
    try:
        model.quantize(samples, batch_size=1)
    except ValueError as error:
        if "CUDA is not available" in str(error):
            pytest.skip(f"this release of GPTQModel needs a GPU for {name}")
        raise
    folder = tmp_path / "quantized"
    model.save(str(folder))

    expected = _logprobs_of_tool(plain, folder, is_awq=name == "awq")
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    following = zip(PROMPT[1:], answer.prompt_logprobs[1:], strict=True)
    found = [entries[token].logprob for token, entries in following]
    assert found == pytest.approx(expected, abs=1e-4)


def _logprobs_of_tool(plain: Path, folder: Path, *, is_awq: bool) -> list[float]:
    """Log-probabilities of PROMPT without its first token, with the weights that GPTQModel
    dequantizes."""
    backend = gptqmodel.BACKEND.AWQ_TORCH if is_awq else gptqmodel.BACKEND.TORCH
    quantized = gptqmodel.GPTQModel.load(
        str(folder), device="cpu", backend=backend, dtype=torch.float16
    )
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    # Embeddings, norms and the head are rounded to 16 bits in the file.
    model.load_state_dict(
        {name: parameter.float() for name, parameter in quantized.model.named_parameters()},
        strict=False,
    )
    for name, module in quantized.model.named_modules():
        if hasattr(module, "qweight"):
            # GPTQModel rounds its own dequantized weights to 16 bits.
            scales = module.scales.float()
            if is_awq:
                weight = dequantize_gemm(
                    qweight=module.qweight,
                    qzeros=module.qzeros,
                    scales=scales,
                    bits=module.bits,
                    group_size=module.group_size,
                )
            else:
                module.scales = scales
                weight = module.dequantize_weight()
            # (in, out)
            model.get_submodule(name).weight.data.copy_(weight.T)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
