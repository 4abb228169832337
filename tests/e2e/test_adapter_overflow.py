"""Adapters of PEFT whose products overflow, in one batch with requests of another adapter and of
the base model."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from config.errors import RequestFailed
from gaudiserve import LLM, LoRARequest, SamplingParams

LIMITS: dict[str, Any] = {
    **{"max_model_len": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 24, "block_size": 16},
    **{"enable_lora": True, "max_loras": 3, "max_cpu_loras": 6},
}
CARD: dict[str, Any] = {
    **{"device": "hpu-emulator", "emulator_strict": True, "bucketing_strategy": "exponential"},
    **{"max_num_batched_tokens": 64, "max_prefill_batch": 2},
}
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "hpu-graphs": {**CARD, "execution_mode": "hpu-graphs"},
    "torch-compile": {**CARD, "execution_mode": "torch-compile"},
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FINITE = 6e4
"""Larger weights are refused, as are infinity and NaN."""
ADAPTERS = {"good": 1.0, "large": 1e6}
"""Name -> factor of the weights before they are clamped to FINITE."""
DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = [[5 + (7 * number + place) % 300 for place in range(20)] for number in range(12)]


def write(folder: Path, base: Path, seed: int) -> str:
    """An adapter of ADAPTERS that PEFT saves, with random weights. Returns its module flag."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weights = torch.randn(weight.shape, generator=made) / weight.shape[1] ** 0.5
                weight.copy_((weights * ADAPTERS[folder.name]).clamp(-FINITE, FINITE))
    model.save_pretrained(folder)
    return f"{folder.name}={folder}"


@pytest.mark.timeout(900)
# PEFT reads a deprecated attribute of transformers.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        *(
            pytest.param(device, dtype, marks=pytest.mark.slow)
            for device in DEVICES
            for dtype in DTYPES
            if (device, dtype) != ("cpu", "float32")
        ),
    ],
)
def test_requests_of_other_adapters_keep_their_tokens(
    device: str, dtype: str, tmp_path: Path
) -> None:
    base = make_tiny("llama", tmp_path / "base")
    modules = [write(tmp_path / name, base, seed) for seed, name in enumerate(ADAPTERS)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    settings = {**LIMITS, **DEVICES[device], "dtype": dtype, "lora_modules": modules}
    with (
        LLM(str(base), **settings) as llm,
        ThreadPoolExecutor(2 * len(PROMPTS)) as pool,
    ):

        def ask(prompt: list[int], name: str) -> Any:
            adapter = LoRARequest(name, 1) if name else None
            try:
                (output,) = llm.generate(
                    {"prompt_token_ids": prompt}, params, use_tqdm=False, lora_request=adapter
                )
            except RequestFailed as error:
                return str(error)
            return list(output.outputs[0].token_ids)

        def answers(*, bad: bool) -> list[Any]:
            """Tokens of requests of the base model and of the good adapter, alternately. `bad`:
            requests of the large adapter run beside them."""
            names = ["", "good"] * (len(PROMPTS) // 2)
            found = []
            for prompt, name in zip(PROMPTS, names, strict=True):
                found.append(pool.submit(ask, prompt, name))
                if bad:
                    overflowing.append(pool.submit(ask, prompt, "large"))
            return [each.result() for each in found]

        overflowing: list[Any] = []
        expected = answers(bad=False)
        beside = answers(bad=True)
        after = answers(bad=False)
        own = [each.result() for each in overflowing]
        stats = llm._client.stats

    assert all(isinstance(tokens, list) for tokens in expected)
    assert expected == beside == after
    # Other dtypes can hold the products, and some norms make the values finite again.
    ended = [
        tokens for tokens in own if tokens == "the logits of output token 1 were NaN or infinite"
    ]
    whole = [tokens for tokens in own if len(tokens) == params.max_tokens]
    assert len(ended) + len(whole) == len(PROMPTS)
    assert len(ended) == len(PROMPTS) or dtype != "float16"
    assert stats.recompilations == 0
