"""Draft models and heads on the strict emulated card: answers equal the CPU's without speculation,
nothing is compiled after the warm-up, and the drafts equal dense code."""

import random
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from adapters import write_adapter
from draft_heads import make_head
from msgspec.structs import replace
from tiny_models import make_tiny

from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec
from engine.transport.messages import EngineStats
from gaudiserve import LLM, LoRARequest
from hpu.protocol import Bucket
from hpu.spec_decode.device import DeviceSpeculation, DraftInputs, VerifyBatch

SHAPE: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "skip_tokenizer_init": True}
CARD: dict[str, Any] = {
    "device": "hpu-emulator",
    "emulator_strict": True,
    "executor": "uni",
    "block_size": 16,
    # Few buckets, and few blocks, so that requests are preempted.
    "num_gpu_blocks_override": 7,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_prefill_batch": 2,
    "bucketing_strategy": "exponential",
}
DRAFTS = 3
Kept = list[tuple[list[int], list[int]]]
"""Known tokens, and the drafts for the tokens after them."""


def requests(*, draws: bool) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with a shared prefix, in chunks. All are greedy; with `draws`, two are sampled."""
    rng = random.Random(3)
    shared = [rng.randrange(300) for _ in range(35)]
    prompts = [
        [
            *shared[: rng.choice((0, 20, 35))],
            *(rng.randrange(300) for _ in range(rng.randint(1, 9))),
        ]
        for _ in range(6)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True)
    drawn = SamplingParams(temperature=0.3, seed=4, max_tokens=40, ignore_eos=True)
    other = drawn if draws else greedy
    return prompts, [greedy, greedy, other, greedy, other, greedy]


def run(folder: Path, *, draws: bool = True, **flags: Any) -> tuple[list[Any], EngineStats]:
    with LLM(str(folder), **{**SHAPE, **flags}) as llm:
        outputs = llm.generate(*requests(draws=draws), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], llm._client.stats


def speculation(method: str, **keys: Any) -> dict[str, Any]:
    own = {"method": method, "num_speculative_tokens": DRAFTS, **keys}
    return {"speculative_config": own}


def check_nothing_was_compiled(stats: EngineStats) -> None:
    while_serving = [name for name in stats.compilations if not name.endswith(".warmup")]
    assert stats.compilations and while_serving == []
    assert (stats.recompilations, stats.cpu_fallbacks) == (0, 0)


@pytest.mark.parametrize(
    "mode", ["hpu-graphs", pytest.param("torch-compile", marks=pytest.mark.slow)]
)
def test_a_draft_model_on_a_card_changes_no_token(mode: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=1)
    expected, _ = run(folder, draws=False, device="cpu")

    found, stats = run(
        folder,
        draws=False,
        **CARD,
        execution_mode=mode,
        **speculation("draft_model", model=str(folder)),
    )

    assert found == expected
    assert stats.preemptions > 0
    counts = stats.spec_decode
    # The target itself is the drafter. A block found in the cache may lack the last token of its
    # request.
    assert counts["num_accepted_tokens"] > 0.95 * counts["num_draft_tokens"] > 50
    check_nothing_was_compiled(stats)


HEADS = [
    "eagle",
    *(
        pytest.param(method, marks=pytest.mark.slow)
        for method in ("eagle3", "mtp", "medusa", "mlp_speculator")
    ),
]


@pytest.mark.parametrize("method", HEADS)
def test_most_drafts_of_a_head_on_a_card_equal_dense_code(
    method: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, keys, draft = make_head(method, tmp_path, tmp_path_factory.mktemp("head"))
    expected, _ = run(target, device="cpu")
    kept: Kept = []
    prepare = DeviceSpeculation.prepare

    def recorded(
        self: DeviceSpeculation, inputs: DraftInputs, bucket: Bucket, *, from_next_drafts: bool
    ) -> VerifyBatch:
        rows = prepare(self, inputs, bucket, from_next_drafts=from_next_drafts)
        known = self._history.cpu().view(-1, SHAPE["max_model_len"])
        counts, lasts = rows.num_drafts.tolist(), rows.last_positions.tolist()
        drafts = rows.drafts.tolist()
        for i, req_index in enumerate(inputs.req_indices.tolist()):
            if counts[i] > 0:
                kept.append((known[req_index, : lasts[i] + 1].tolist(), drafts[i][: counts[i]]))
        return rows

    # Recording waits for the card, which the strict emulator does not allow.
    with patch.object(DeviceSpeculation, "prepare", recorded):
        found, _ = run(target, **{**CARD, "emulator_strict": False}, **speculation(method, **keys))

    assert found == expected
    wrong = [tensor for tensor in kept if tensor[1] != draft(tensor[0], len(tensor[1]))]
    assert len(kept) > 50
    # A block that two sequences share holds the next token of only one sequence.
    has_cache = method in ("eagle", "eagle3", "mtp")
    assert len(wrong) <= (len(kept) // 7 if has_cache else 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa", "mlp_speculator"])
@pytest.mark.parametrize("mode", ["hpu-graphs", "torch-compile"])
def test_a_draft_head_on_a_card_compiles_nothing(
    mode: str, method: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, keys, _ = make_head(method, tmp_path, tmp_path_factory.mktemp("head"))
    expected, _ = run(target, device="cpu")

    found, stats = run(target, **CARD, execution_mode=mode, **speculation(method, **keys))

    assert found == expected
    check_nothing_was_compiled(stats)


ASCII = GrammarSpec("regex", "[ -~]{1,200}")
"""Grammar that allows half of the tokens."""


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("draft_model", "hpu-graphs"),
        *(
            pytest.param(method, mode, marks=pytest.mark.slow)
            for method, mode in (
                *((head, "hpu-graphs") for head in ("eagle", "eagle3", "mtp", "medusa")),
                ("mlp_speculator", "hpu-graphs"),
                ("draft_model", "torch-compile"),
            )
        ),
    ],
)
def test_drafts_under_a_grammar_are_verified(
    method: str, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if method == "draft_model":
        target = make_tiny("llama", tmp_path, num_hidden_layers=1)
        keys = {"model": str(target)}
    else:
        target, keys, _ = make_head(method, tmp_path, tmp_path_factory.mktemp("head"))
    greedy = SamplingParams(temperature=0, max_tokens=40)
    params = [
        replace(greedy, structured_outputs=ASCII),
        replace(greedy, ignore_eos=True),
        replace(greedy, temperature=0.3, seed=2, structured_outputs=ASCII),
    ] * 2
    prompts = [[number, 9 + number, number] for number in range(len(params))]
    text = {"skip_tokenizer_init": False}
    with LLM(str(target), device="cpu", **{**SHAPE, **text}) as llm:
        expected = [item.outputs[0].token_ids for item in llm.generate(prompts, params)]

    flags = {**SHAPE, **CARD, **text, "execution_mode": mode, **speculation(method, **keys)}
    with LLM(str(target), **flags) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm._client.stats

    assert [output.outputs[0].token_ids for output in outputs] == expected
    for item, param in zip(outputs, params, strict=True):
        if param.structured_outputs is not None:
            assert re.fullmatch("[ -~]+", item.outputs[0].text)
    assert stats.spec_decode["num_draft_tokens"] > 50
    if method == "draft_model":
        # The target itself is the drafter.
        assert stats.spec_decode["num_accepted_tokens"] > 50
    check_nothing_was_compiled(stats)


@pytest.mark.slow
def test_a_drafter_stops_at_the_end_of_its_context(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=1)
    expected, _ = run(folder, device="cpu")
    short = speculation("draft_model", model=str(folder), max_model_len=40)

    found, stats = run(folder, **CARD, **short)

    assert found == expected
    assert stats.spec_decode["num_accepted_tokens"] > 0
    check_nothing_was_compiled(stats)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_two_cards_draft_the_same_tokens(method: str, tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path, num_hidden_layers=1)
    expected, _ = run(folder, device="cpu")
    keys: dict[str, Any] = {
        "ngram": {"prompt_lookup_min": 1},
        "suffix": {"suffix_decoding_max_spec_factor": 4.0},
        "draft_model": {"model": str(folder)},
    }[method]
    flags = {name: value for name, value in CARD.items() if name != "executor"}

    found, stats = run(
        folder,
        **{**flags, "max_prefill_batch": 1},
        tensor_parallel_size=2,
        compare_ranks=True,
        **speculation(method, **keys),
    )

    assert found == expected
    assert stats.spec_decode["num_accepted_tokens"] > 0
    check_nothing_was_compiled(stats)


@pytest.mark.parametrize(
    "method",
    ["eagle", *(pytest.param(method, marks=pytest.mark.slow) for method in ("eagle3", "mtp"))],
)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"device": "cpu"}, id="cpu"),
        pytest.param(CARD, id="card", marks=pytest.mark.slow),
    ],
)
def test_a_head_drafts_for_requests_with_adapters_and_changes_no_token(
    flags: dict[str, Any], method: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, keys, _ = make_head(method, tmp_path, tmp_path_factory.mktemp("head"))
    parts = ("q_proj", "o_proj", "down_proj", "embed_tokens", "lm_head")
    if method == "mtp":
        parts = ("layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj", "model.embed_tokens")
    folders = [
        write_adapter(tmp_path_factory.mktemp(name), target, targets=parts, seed=ord(name))
        for name in "ab"
    ]
    modules = [f"{name}={folder}" for name, folder in zip("ab", folders, strict=True)]
    asked = [LoRARequest("a", 1), None, LoRARequest("b", 2), LoRARequest("a", 1), None, None]
    adapters: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "lora_modules": modules}

    def answers(**more: Any) -> tuple[list[Any], EngineStats]:
        with LLM(str(target), **{**SHAPE, **adapters, **more}) as llm:
            outputs = llm.generate(*requests(draws=True), use_tqdm=False, lora_request=asked)
            return [output.outputs[0].token_ids for output in outputs], llm._client.stats

    expected, _ = answers(device="cpu")

    found, stats = answers(**flags, **speculation(method, **keys, adaptive=False))

    assert found == expected
    assert stats.spec_decode["num_draft_tokens"] > 50
    assert (stats.recompilations, stats.cpu_fallbacks) == (0, 0)
