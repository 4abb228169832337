"""The offline engine compared with transformers and with itself: float32, greedy or seeded, with
coarse buckets, chunks, prefix hits and a KV cache far too small for the batch."""

import asyncio
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from engine_rig import eventually, request_of
from greedy import greedy_by_transformers, load_reference
from releases import transformers_before
from tiny_models import FAMILIES, WITH_STATES, make_tiny, write_tokenizer

from config.loading.sources import from_keywords
from config.params.sampling import SamplingParams
from engine.client.inproc import InprocClient
from engine.client.output_queue import RequestOutputQueue
from engine.transport.messages import EngineStats
from gaudiserve import LLM, RequestOutput

NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

# Fewer blocks than two contexts need, so that some of six requests of up to 130 tokens are
# preempted.
FEW_BLOCKS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 144,
    "block_size": 8,
    "num_gpu_blocks_override": 26,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "bucketing_strategy": "exponential",
    "skip_tokenizer_init": True,
}
ROOMY: dict[str, Any] = {
    **FEW_BLOCKS,
    "num_gpu_blocks_override": 400,
    "max_num_batched_tokens": 512,
    "bucketing_strategy": "exact",
    "enable_prefix_caching": False,
    "overlap_depth": 1,
    "max_num_seqs": 1,
}

SHARED_PREFIX = [5 + 7 * i % 301 for i in range(41)]
PROMPTS = [
    [9],
    [*SHARED_PREFIX, 11, 12],
    [17 + i for i in range(23)],
    [*SHARED_PREFIX, 13],
    SHARED_PREFIX[:32],
    [*SHARED_PREFIX, *range(40, 65)],
    [3 * i % 290 + 8 for i in range(8)],
    [*SHARED_PREFIX[:24], 99, 98],
]


def run(
    folder: Path, shape: dict[str, Any], prompts: list[list[int]], params: Any
) -> tuple[list[RequestOutput], EngineStats]:
    with LLM(str(folder), **shape) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return outputs, llm._client.stats


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def assert_tokens_equal_transformers(outputs: list[RequestOutput], folder: Path) -> None:
    """Assert that the outputs for PROMPTS have the tokens of transformers."""
    found = tokens_of(outputs)
    assert [len(tokens) for tokens in found] == [NEW_TOKENS] * len(PROMPTS)
    for (expected, _), tokens in zip(
        greedy_by_transformers(load_reference(folder), PROMPTS, found), found, strict=True
    ):
        assert tokens == expected
    # A model that repeats one token would hide a wrong cache.
    assert sum(len(set(tokens)) > 10 for tokens in found) >= len(PROMPTS) - 2


def assert_blocks_ran_short(
    outputs: list[RequestOutput], stats: EngineStats, *, has_hits: bool = True
) -> None:
    """Assert that preemption, chunks and, with `has_hits`, prefix hits happened, and that all
    blocks are free."""
    assert stats.preemptions > 0
    assert any(output.num_cached_tokens for output in outputs) == has_hits
    assert stats.padding_tokens["prefill"] > 0 and stats.padding_tokens["decode"] > 0
    assert not any(name.endswith(("miss", "fallback")) for name in stats.lookups)
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BLOCK_INDEXERS = {"minimax_m3_vl_text": {"index_block_size": FEW_BLOCKS["block_size"]}}
"""Config of indexers, which choose whole blocks of the KV cache."""
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, BLOCK_INDEXERS.get(family, {})) for family in FAMILIES},
    # The window is shorter than the text, so that whole blocks leave it.
    "mistral: window": ("mistral", {"sliding_window": 24}),
    "phi3: window": ("phi3", {"sliding_window": 24}),
    "llama: llama3 rope, biases, one key head": (
        "llama",
        {
            "rope_parameters": LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    "qwen2: tied, window in the upper layers": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "gemma3: a window and a rope of its own in the first layer, capped logits": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
            "initializer_range": 0.3,
        },
    ),
    "mpt: ALiBi": ("mpt", {}),
}


SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "head_dim": 16,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
}
LATER = {
    **{
        name: pytest.mark.skipif(
            transformers_before("5"), reason="compared with transformers 5 only"
        )
        for name in VARIATIONS
        if name.startswith(("gemma3", "mpt"))
    },
    "qwen2: tied, window in the upper layers": pytest.mark.skipif(
        transformers_before("4.53"),
        reason="transformers before 4.53 masks every layer of a Qwen2 by the window, also those "
        "below max_window_layers",
    ),
}


# The default run has one family for each kind of cache, mask and feed-forward. The engine treats
# the other families the same, and tests/hpu/models compares all of them with transformers.
DISTINCT = {
    *("llama", "mixtral", "glm4_moe", "gpt_oss", "llama4_text", "deepseek_v2"),
    *("granitemoehybrid", "qwen3_next"),
}
SLOW = {name: pytest.mark.slow for name in FAMILIES if name not in DISTINCT}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=(SLOW | LATER).get(name, ())) for name in VARIATIONS]
)
def test_an_engine_short_of_blocks_gives_the_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    family, overrides = VARIATIONS[name]
    folder = make_tiny(family, tmp_path, seed=3, **overrides)

    outputs, stats = run(folder, FEW_BLOCKS, PROMPTS, GREEDY)

    assert_tokens_equal_transformers(outputs, folder)
    assert_blocks_ran_short(outputs, stats, has_hits=family not in WITH_STATES)


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("gpt_oss", {"sliding_window": 9}),
        ("llama4_text", {"attention_chunk_size": 7}),
        pytest.param(
            "gemma3_text",
            {
                "head_dim": 16,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"],
                "initializer_range": 0.3,
            },
            marks=LATER["gemma3: a window and a rope of its own in the first layer, capped logits"],
        ),
    ],
)
def test_window_sized_caches_give_the_tokens_of_transformers(
    family: str, window: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sixteen requests of several windows on twelve request indices, with chunks, preemptions and
    reused indices."""
    folder = make_tiny(family, tmp_path, seed=3, **window)
    shape = {
        **FEW_BLOCKS,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 40,
        "max_num_seqs": 12,
    }

    with caplog.at_level("INFO"):
        outputs, stats = run(folder, shape, [*PROMPTS, *PROMPTS], GREEDY)

    assert "for the windows of 12 requests" in caplog.text
    assert_tokens_equal_transformers(outputs[: len(PROMPTS)], folder)
    assert tokens_of(outputs[len(PROMPTS) :]) == tokens_of(outputs[: len(PROMPTS)])
    assert_blocks_ran_short(outputs, stats, has_hits=False)


@pytest.mark.skipif(transformers_before("5.18"), reason="needs the interfaces of 5.18")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("olmo2", {}),
        ("starcoder2", {"sliding_window": 24}),
        ("gemma4_text", {**SHARED_KV, "global_head_dim": 32}),
        (
            "gemma3n_text",
            {
                **SHARED_KV,
                "laurel_rank": 8,
                "altup_num_inputs": 3,
                "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
            },
        ),
    ],
)
def test_the_transformers_fallback_gives_the_tokens_of_transformers_with_few_blocks(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, seed=3, **overrides)

    outputs, stats = run(folder, {**FEW_BLOCKS, "model_impl": "transformers"}, PROMPTS, GREEDY)

    assert_tokens_equal_transformers(outputs, folder)
    assert_blocks_ran_short(outputs, stats)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed=3)
    write_tokenizer(folder)
    return folder


EVERY_SAMPLING_RULE = [
    GREEDY.replace(temperature=1.0, seed=1, n=2),
    GREEDY.replace(temperature=0.8, top_p=0.9, top_k=40, seed=2),
    GREEDY.replace(temperature=1.2, min_p=0.02, seed=3, repetition_penalty=1.3),
    GREEDY.replace(presence_penalty=1.5, frequency_penalty=0.7),
    GREEDY.replace(temperature=1.0, seed=5, allowed_token_ids=tuple(range(30, 90))),
    GREEDY.replace(logit_bias={44: 8.0, 50: -100.0}, bad_words_token_ids=((44, 44), (60,))),
    GREEDY.replace(temperature=1.5, seed=-7, ignore_eos=False, min_tokens=20),
    GREEDY.replace(temperature=2.0, seed=8, stop_token_ids=tuple(range(0, 60)), min_tokens=9),
]


def test_every_sampling_rule_gives_the_same_tokens_alone_and_in_a_batch_short_of_blocks(
    folder: Path,
) -> None:
    params = [rule.replace(logprobs=3) for rule in EVERY_SAMPLING_RULE]
    alone, _ = run(folder, ROOMY, PROMPTS, params)

    batched, stats = run(folder, FEW_BLOCKS, PROMPTS, params)

    assert tokens_of(batched) == tokens_of(alone)
    assert set(tokens_of(alone)[5]) <= set(range(30, 90))
    assert_same_values(
        [list(c.logprobs or []) for o in batched for c in o.outputs],
        [list(c.logprobs or []) for o in alone for c in o.outputs],
    )
    assert_blocks_ran_short(batched, stats)


def assert_same_values(actual: list[list[Any]], expected: list[list[Any]]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        for here, there in zip(mine, theirs, strict=True):
            if there is None:
                assert here is None
                continue
            values = {token: entry.logprob for token, entry in there.items()}
            assert {t: e.logprob for t, e in here.items()} == pytest.approx(values, abs=1e-3)


def test_prompt_logprobs_with_chunks_and_preemption_equal_a_single_launch(
    folder: Path,
) -> None:
    params = GREEDY.replace(prompt_logprobs=2, max_tokens=40)
    alone, _ = run(folder, ROOMY, PROMPTS, params)

    batched, stats = run(folder, FEW_BLOCKS, PROMPTS, params)

    assert [len(o.prompt_logprobs or []) for o in batched] == [len(p) for p in PROMPTS]
    assert_same_values(
        [o.prompt_logprobs or [] for o in batched], [o.prompt_logprobs or [] for o in alone]
    )
    assert tokens_of(batched) == tokens_of(alone)
    assert stats.preemptions > 0 and stats.blocks_used == 0


def test_prompt_logprobs_of_a_full_context_do_not_depend_on_chunks(
    folder: Path,
) -> None:
    prompt = [[5 + 11 * i % 300 for i in range(FEW_BLOCKS["max_model_len"])]]
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)

    (alone,), _ = run(folder, {**ROOMY, "max_num_batched_tokens": 512}, prompt, params)
    (chunked,), stats = run(folder, FEW_BLOCKS, prompt, params)

    assert len(chunked.prompt_logprobs or []) == len(prompt[0])
    assert_same_values([chunked.prompt_logprobs or []], [alone.prompt_logprobs or []])
    assert (chunked.outputs[0].token_ids, stats.blocks_used) == ([], 0)


async def read(queue: RequestOutputQueue) -> list[int]:
    tokens: list[int] = []
    while True:
        update = await queue.get()
        tokens += update.tokens
        if update.finish is not None:
            assert update.finish.reason == "length", update.finish
            return tokens


async def test_many_aborts_change_no_other_request_and_leak_no_blocks(
    folder: Path,
) -> None:
    alone, _ = run(folder, ROOMY, PROMPTS, GREEDY)
    rng = random.Random(5)
    config = from_keywords(model=str(folder), **FEW_BLOCKS).engine
    client = InprocClient(config)
    await client.start()
    await client.wait_ready()

    async def give_up(prompt: bytes) -> None:
        queue = client.add(request_of(prompt, GREEDY))
        for _ in range(rng.randrange(6)):
            await queue.get()
        client.abort([queue.key])
        client.abort([queue.key])

    prompts = [array("I", prompt).tobytes() for prompt in PROMPTS]
    leavers = [give_up(rng.choice(prompts)) for _ in range(60)]
    stayers = [read(client.add(request_of(prompt, GREEDY))) for prompt in prompts]
    *survived, _ = await asyncio.gather(*stayers, asyncio.gather(*leavers))
    is_empty = await eventually(lambda: not client.stats.blocks_used)
    again = await read(client.add(request_of(prompts[1], GREEDY)))
    await client.close()

    assert is_empty and (client.stats.running, client.stats.waiting) == (0, 0)
    assert survived == tokens_of(alone)
    assert again == survived[1]


STEPPED: dict[str, dict[str, Any]] = {
    "short of blocks": FEW_BLOCKS,
    "no overlap": {**FEW_BLOCKS, "overlap_depth": 1, "num_gpu_blocks_override": 200},
    "no prefixes": {**FEW_BLOCKS, "enable_prefix_caching": False, "bucketing_strategy": "exact"},
}


@pytest.mark.parametrize(
    ("shape", "num_steps"),
    [("short of blocks", 3), ("no overlap", 2), ("no prefixes", 8)],
)
def test_several_decodes_per_step_change_no_token_of_any_sampling_rule(
    folder: Path, shape: str, num_steps: int
) -> None:
    params = [rule.replace(logprobs=3) for rule in EVERY_SAMPLING_RULE]
    expected, before = run(folder, STEPPED[shape], PROMPTS, params)

    found, stats = run(
        folder, {**STEPPED[shape], "num_scheduler_steps": num_steps}, PROMPTS, params
    )

    assert tokens_of(found) == tokens_of(expected)
    choices = [choice for output in found for choice in output.outputs]
    others = [choice for output in expected for choice in output.outputs]
    assert_same_values(
        [list(c.logprobs or []) for c in choices], [list(c.logprobs or []) for c in others]
    )
    ends = [(c.finish_reason, c.stop_reason) for c in choices]
    assert ends == [(c.finish_reason, c.stop_reason) for c in others]
    assert stats.steps < before.steps
    assert (stats.preemptions > 0) == (shape != "no overlap")
    assert stats.blocks_used == 0


def test_drafts_with_several_decodes_per_step_change_no_token(folder: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    shape = {**FEW_BLOCKS, "speculative_config": {**drafts, "adaptive": False}}
    expected, _ = run(folder, FEW_BLOCKS, PROMPTS, GREEDY)

    found, stats = run(folder, {**shape, "num_scheduler_steps": 4}, PROMPTS, GREEDY)

    assert tokens_of(found) == tokens_of(expected)
    assert stats.spec_decode["num_accepted_tokens"] > 0
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("granitemoehybrid", {}),
        pytest.param("qwen3_next", {}, marks=pytest.mark.slow),
        ("gpt_oss", {"sliding_window": 9}),
        pytest.param("llama4_text", {"attention_chunk_size": 7}, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {}, marks=pytest.mark.slow),
    ],
)
def test_recurrent_states_windows_and_mla_advance_with_each_decode_of_a_step(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = make_tiny(family, tmp_path, seed=3, **overrides)
    expected, _ = run(model, FEW_BLOCKS, PROMPTS, GREEDY)

    found, stats = run(model, {**FEW_BLOCKS, "num_scheduler_steps": 4}, PROMPTS, GREEDY)

    assert tokens_of(found) == tokens_of(expected)
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_stop_strings_and_end_tokens_end_at_the_same_place_with_several_decodes(
    folder: Path,
) -> None:
    shape = {**FEW_BLOCKS, "skip_tokenizer_init": False}
    long = SamplingParams(temperature=1.0, seed=5, max_tokens=60, n=2, ignore_eos=True)
    with LLM(str(folder), **shape) as llm:
        (whole,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], long, use_tqdm=False)
        text = whole.outputs[0].text
        stops = [text[7:9], text[20:22]]
        params = [
            long.replace(stop=(stops[0],)),
            long.replace(stop=(stops[1],), include_stop_str_in_output=True),
            long.replace(stop_token_ids=(whole.outputs[1].token_ids[13],)),
            long.replace(ignore_eos=False, temperature=2.0),
        ]
        prompts = [{"prompt_token_ids": PROMPTS[0]}] * len(params)
        expected = llm.generate(prompts, params, use_tqdm=False)

    with LLM(str(folder), **shape, num_scheduler_steps=8) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)

    def ends(outputs: list[Any]) -> list[Any]:
        return [
            (c.text, c.token_ids, c.finish_reason, c.stop_reason)
            for o in outputs
            for c in o.outputs
        ]

    assert ends(found) == ends(expected)
    assert {reason for _, _, reason, _ in ends(found)} >= {"stop"}
    assert any(isinstance(stop, str) for *_, stop in ends(found))
    assert any(isinstance(stop, int) for *_, stop in ends(found))


async def test_aborts_between_the_decodes_change_no_other_request_and_leak_no_blocks(
    folder: Path,
) -> None:
    alone, _ = run(folder, FEW_BLOCKS, PROMPTS, GREEDY)
    rng = random.Random(5)
    config = from_keywords(model=str(folder), **FEW_BLOCKS, num_scheduler_steps=8).engine
    client = InprocClient(config)
    await client.start()
    await client.wait_ready()

    async def give_up(prompt: bytes) -> None:
        queue = client.add(request_of(prompt, GREEDY))
        for _ in range(rng.randrange(4)):
            await queue.get()
        client.abort([queue.key])

    prompts = [array("I", prompt).tobytes() for prompt in PROMPTS]
    leavers = [give_up(rng.choice(prompts)) for _ in range(30)]
    stayers = [read(client.add(request_of(prompt, GREEDY))) for prompt in prompts]
    *survived, _ = await asyncio.gather(*stayers, asyncio.gather(*leavers))
    is_empty = await eventually(lambda: not client.stats.blocks_used)
    await client.close()

    assert is_empty and (client.stats.running, client.stats.waiting) == (0, 0)
    assert survived == tokens_of(alone)
