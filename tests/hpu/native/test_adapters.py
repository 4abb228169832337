"""Low-rank products in the library: a decoder with adapters, compared with merged weights."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import LINEAR, merge, write_adapter
from tiny_models import make_tiny

from gaudiserve import LLM, LoRARequest, RequestOutput, SamplingParams
from hpu.native.adapters import NativeAdapters
from hpu.native.decoder import CompiledDecoder

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "max_model_len": 128,
    "device": "cpu",
}
PROMPTS = ["Hello", "The sky is blue, and", "abc"]
SCORED = SamplingParams(temperature=0, max_tokens=1, logprobs=0, prompt_logprobs=1)


def logprobs(outputs: list[RequestOutput]) -> list[torch.Tensor]:
    """Log-probabilities of the prompt tokens."""
    found = []
    for output in outputs:
        positions = output.prompt_logprobs or []
        pairs = zip(output.prompt_token_ids[1:], positions[1:], strict=True)
        found.append(torch.tensor([at[token].logprob for token, at in pairs if at is not None]))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_the_compiled_decoder_adds_adapters_in_bfloat16(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each token uses every expert: in bfloat16, rounding alone may change the routing.
    experts = {"num_experts_per_tok": 4} if family == "mixtral" else {}
    base = make_tiny(family, tmp_path / "base", head_dim=32, **experts)
    targets = LINEAR if family != "mixtral" else LINEAR[:4]
    first = write_adapter(tmp_path / "one", base, targets=targets, rank=32, alpha=24.0, seed=1)
    two = write_adapter(tmp_path / "two", base, targets=targets[:3], rank=24, seed=2)
    expected = {}
    for name, adapter in (("one", first), ("two", two)):
        with LLM(str(merge(tmp_path / f"merged-{name}", base, adapter)), **SETTINGS) as llm:
            expected[name] = logprobs(llm.generate(PROMPTS, SCORED, use_tqdm=False))
    ran: list[bool] = []
    forward = CompiledDecoder.forward

    def watched(self: CompiledDecoder, *args: Any) -> Any:
        ran.append(self.is_compiled)
        with monkeypatch.context() as patched:
            patched.setattr(self.model, "forward", None)
            return forward(self, *args)

    with LLM(
        str(base),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=32,
        lora_modules=[f"one={first}", f"two={two}"],
        **SETTINGS,
    ) as llm:
        plain = logprobs(llm.generate(PROMPTS, SCORED, use_tqdm=False))
        monkeypatch.setattr(CompiledDecoder, "forward", watched)
        requests = [LoRARequest("one", 1), None, LoRARequest("two", 2)]
        mixed = llm.generate(
            [p for p in PROMPTS for _ in requests],
            SCORED,
            use_tqdm=False,
            lora_request=requests * len(PROMPTS),
        )

    found = logprobs(mixed)
    assert ran and all(ran)
    for index in range(len(PROMPTS)):
        ours = found[3 * index : 3 * index + 3]
        torch.testing.assert_close(ours[0], expected["one"][index], atol=0.25, rtol=0.02)
        torch.testing.assert_close(ours[1], plain[index], atol=0.25, rtol=0.02)
        torch.testing.assert_close(ours[2], expected["two"][index], atol=0.25, rtol=0.02)
        assert (ours[0] - ours[1]).abs().max() > 0.5


@pytest.mark.parametrize("has_tiles", [False, True])
def test_rows_are_grouped_by_adapter_within_blocks(has_tiles: bool) -> None:
    adapters = NativeAdapters({}, max_loras=4, max_rank=8, has_tiles=has_tiles)
    # 20 of the first 32 rows have an adapter; the next 32 rows have the same adapter.
    slots = torch.tensor([-1, 2, 0, 3, -1, 3, 3, 3] * 4 + [1] * 32 + [-1, 0, 1])
    found = adapters.rows(slots, 1)
    assert found is not None
    by_row, order, starts, places, tiles = (column.tolist() for column in found[1])
    assert by_row == slots.tolist()
    assert sorted(order) == [row for row, slot in enumerate(by_row) if slot >= 0]
    assert [places[row] for row in order] == list(range(len(order)))
    assert starts[0] == 0 and starts[-1] == len(order)
    for begin, end in itertools.pairwise(starts):
        assert len({by_row[row] for row in order[begin:end]}) == 1
        assert end - begin <= (16 if has_tiles else 4)
    # Two tiles of at most 16 rows for each block of 32.
    assert len(tiles) == 2 * 3 + 1 and tiles[-1] == len(starts) - 1
    for tile, (begin, end) in enumerate(itertools.pairwise(tiles)):
        rows = order[starts[begin] : starts[end]]
        assert len(rows) <= 16 and {row // 32 for row in rows} <= {tile // 2}
    assert adapters.rows(torch.tensor([-1, -1]), 1) is None
