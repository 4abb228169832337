"""Images with two ranks that both hold the whole tower: the tokens equal a single rank's, on the
CPU and on emulated cards, whether each rank encodes all images or a part of them."""

from pathlib import Path
from typing import Any

import pytest
from tiny_vision import FAMILIES, make_tiny_vision, picture

from gaudiserve import LLM, SamplingParams

CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 16,
    "max_num_seqs": 2,
    # The chunks are small, so that the images of a prompt span several chunks.
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 24,
}
CARD: dict[str, Any] = {
    **CPU,
    "device": "hpu-emulator",
    "emulator_strict": True,
    "prompt_bs_bucket_max": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
READS_TWO = {"mllama": {"cross_attention_images": 2}}
"""Options of families with cross-attention to images: the second prompt has two images."""
PICTURES = [picture(60, 40), picture(40, 60, seed=3), picture(56, 56, seed=5)]


def prompts_of(family: str) -> list[Any]:
    mark = FAMILIES[family].mark
    return [
        {"prompt": f"a {mark} b", "multi_modal_data": {"image": PICTURES[0]}},
        {"prompt": f"{mark}{mark} what?", "multi_modal_data": {"image": PICTURES[1:]}},
        "text alone",
        # A repeated image is not encoded again.
        {"prompt": f"c {mark}", "multi_modal_data": {"image": PICTURES[0]}},
    ]


def run(folder: Path, family: str, **options: Any) -> tuple[list[list[int]], Any]:
    with LLM(str(folder), **options, **READS_TWO.get(family, {})) as llm:
        outputs = llm.generate(prompts_of(family), GREEDY, use_tqdm=False)
        stats = llm._client.stats
    return [list(output.outputs[0].token_ids) for output in outputs], stats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llava", "replicated"),
        ("qwen2_vl", "replicated"),
        ("qwen2_vl", "data"),
        ("qwen3_5", "replicated"),
    ],
)
def test_two_ranks_give_the_tokens_of_a_single_rank(family: str, mode: str, tmp_path: Path) -> None:
    folder = make_tiny_vision(family, tmp_path)
    expected, _ = run(folder, family, **CPU)

    ranks = {"tensor_parallel_size": 2, "compare_ranks": True, "mm_encoder_tp_mode": mode}
    found, stats = run(folder, family, **CPU, **ranks)

    assert found == expected
    assert stats.encoded_images == len(PICTURES)
    assert stats.encoder_cache_hits == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "mode"),
    [
        ("llava", "1", "replicated"),
        ("qwen2_vl", "16,32,64", "replicated"),
        ("llava", "1,2", "data"),
        ("qwen2_vl", "16,32,64", "data"),
        ("mllama", "auto", "data"),
        ("qwen3_5", "16,32,64", "data"),
    ],
)
def test_two_emulated_cards_give_the_tokens_of_the_cpu_and_compile_nothing(
    family: str, sizes: str, mode: str, tmp_path: Path
) -> None:
    folder = make_tiny_vision(family, tmp_path)
    expected, _ = run(folder, family, **CPU)

    found, stats = run(
        folder,
        family,
        **CARD,
        multimodal_buckets=sizes,
        tensor_parallel_size=2,
        compare_ranks=True,
        mm_encoder_tp_mode=mode,
    )

    assert found == expected
    assert stats.encoded_images == len(PICTURES)
    assert {k: n for k, n in stats.compilations.items() if k.endswith(".serving") and n} == {}
