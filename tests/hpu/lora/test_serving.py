"""Adapters under load, in pooling models, over pipeline stages, and after a sleep."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import ATTENTION, LINEAR, merge, write_adapter
from gguf_adapters import as_gguf
from tiny_encoders import make_pooling
from tiny_models import make_tiny

from config.lora.adapter import WEIGHTS_FILE
from config.params.beam_search import BeamSearchParams
from gaudiserve import LLM, LoRARequest, SamplingParams

SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
CARD: dict[str, Any] = {
    **SMALL,
    "device": "hpu-emulator",
    "emulator_strict": True,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_prefill_batch": 2,
    "num_gpu_blocks_override": 12,
    "bucketing_strategy": "exponential",
}
CPU: dict[str, Any] = {**SMALL, "device": "cpu", "max_num_seqs": 8, "num_gpu_blocks_override": 64}


def test_random_traffic_compiles_nothing(tmp_path: Path) -> None:
    """Four adapters share two slots and three places in host memory, with few blocks, so that
    requests are preempted. Each answer equals the answer on a CPU with a slot per adapter."""
    base = make_tiny("llama", tmp_path / "base")
    folders = {
        name: write_adapter(
            tmp_path / name,
            base,
            seed=seed,
            rank=2 + seed,
            targets=LINEAR if seed % 2 else ATTENTION,
        )
        for seed, name in enumerate("abcd")
    }
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    rng = random.Random(0)
    prompts, params, requests = [], [], []
    for _ in range(36):
        length = rng.randint(1, 40)
        prompts.append({"prompt_token_ids": [rng.randrange(4, 300) for _ in range(length)]})
        params.append(
            SamplingParams(
                temperature=rng.choice([0, 0, 0.8]),
                seed=rng.randrange(100),
                max_tokens=rng.randint(1, 12),
                ignore_eos=True,
                logprobs=rng.choice([None, None, 2]),
                n=rng.choice([1, 1, 2]),
            )
        )
        name = rng.choice([None, *folders])
        requests.append(None if name is None else LoRARequest(name, 1))

    def answers(llm: LLM) -> list[list[tuple[int, ...]]]:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return [[tuple(output.token_ids) for output in output.outputs] for output in outputs]

    with LLM(str(base), enable_lora=True, max_loras=4, lora_modules=modules, **CPU) as llm:
        expected = answers(llm)
    with LLM(
        str(base),
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=3,
        lora_modules=modules,
        **{**CARD, "num_gpu_blocks_override": 6},
    ) as llm:
        found = answers(llm)
        stats = llm._client.stats

    assert found == expected
    serving = {name: n for name, n in stats.compilations.items() if name.endswith("serving")}
    assert sum(serving.values()) == stats.recompilations == stats.cpu_fallbacks == 0
    assert stats.lora_loads > 4
    assert stats.preemptions > 0
    assert stats.lora_evictions > 0
    assert not stats.lora_running and not stats.lora_waiting


@pytest.mark.parametrize("device", ["cpu", pytest.param("hpu-emulator", marks=pytest.mark.slow)])
def test_encoders_have_adapters(device: str, tmp_path: Path) -> None:
    base = make_pooling("bert", tmp_path / "base")
    targets = ("query", "key", "value", "intermediate.dense", "output.dense")
    adapter = write_adapter(tmp_path / "one", base, targets=targets, task_type=None)
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "runner": "pooling"}
    texts = ["a text", "another, longer text with more words", "b"]
    with LLM(str(merge(tmp_path / "merged", base, adapter)), device="cpu", **settings) as llm:
        expected = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]

    with LLM(
        str(base), device=device, enable_lora=True, lora_modules=[f"one={adapter}"], **settings
    ) as llm:
        plain = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
        request = LoRARequest("one", 1)
        found = [
            output.outputs.embedding
            for output in llm.embed(texts, use_tqdm=False, lora_request=request)
        ]

    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(np.array(found) - np.array(plain)).max() > 0.01


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_gguf_adapter_gives_the_answers_of_a_peft_folder(name: str, tmp_path: Path) -> None:
    base = make_tiny(name, tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, targets=(*LINEAR, "embed_tokens"))
    architecture = {"llama": "llama", "qwen3_moe": "qwen3moe"}[name]
    file = as_gguf(tmp_path / "two.gguf", adapter, base, architecture)
    modules = [f"one={adapter}", f"two={file}"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    with LLM(str(base), enable_lora=True, max_loras=2, lora_modules=modules, **CPU) as llm:
        adapters = [None, LoRARequest("one", 1), LoRARequest("two", 2)]
        outputs = llm.generate(["Hello"] * 3, params, use_tqdm=False, lora_request=adapters)

    plain, expected, found = (list(output.outputs[0].token_ids) for output in outputs)
    assert found == expected != plain
    logprobs = [output.outputs[0].cumulative_logprob for output in outputs[1:]]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


def test_pipeline_stages_have_adapters(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, targets=(*LINEAR, "embed_tokens", "lm_head"))
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(merge(tmp_path / "merged", base, adapter)), **CPU) as llm:
        expected = llm.generate(["Hello", "abc"], greedy, use_tqdm=False)

    with LLM(
        str(base),
        enable_lora=True,
        lora_modules=[f"one={adapter}"],
        pipeline_parallel_size=2,
        **CPU,
    ) as llm:
        found = llm.generate(
            ["Hello", "abc"], greedy, use_tqdm=False, lora_request=LoRARequest("one", 1)
        )

    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


def test_grammars_beams_and_n_equal_merged_weights(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    first = write_adapter(tmp_path / "one", base)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    as_json = SamplingParams(
        temperature=0.8, seed=3, max_tokens=40, structured_outputs={"json": json.dumps(schema)}
    )
    several = SamplingParams(temperature=0.9, seed=4, n=3, max_tokens=12, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    prompts = ["Hello", "abc"]

    def answers(llm: LLM, adapter: LoRARequest | None) -> tuple[list[str], list[Any], list[Any]]:
        outputs = llm.generate(prompts, as_json, use_tqdm=False, lora_request=adapter)
        choices = llm.generate(prompts, several, use_tqdm=False, lora_request=adapter)
        found = llm.beam_search(prompts, beams, lora_request=adapter)
        return (
            [output.outputs[0].text for output in outputs],
            [list(entry.token_ids) for output in choices for entry in output.outputs],
            [list(sequence.tokens) for output in found for sequence in output.sequences],
        )

    with LLM(str(merge(tmp_path / "merged", base, first)), **CPU) as llm:
        expected = answers(llm, None)
    with LLM(str(base), enable_lora=True, lora_modules=[f"one={first}"], **CPU) as llm:
        plain = answers(llm, None)
        found = answers(llm, LoRARequest("one", 1))

    assert found == expected
    assert all(before != after for before, after in zip(plain[1:], found[1:], strict=True))
    for text in found[0]:
        parsed = json.loads(text)
        assert set(parsed) == {"a", "b"} and parsed["a"] <= 99 and parsed["b"] in ("x", "y")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_adapter_whose_files_change_fails_only_its_requests(
    num_ranks: int, tmp_path: Path
) -> None:
    base = make_tiny("llama", tmp_path / "base")
    first = write_adapter(tmp_path / "one", base, seed=1)
    before = (first / WEIGHTS_FILE).read_bytes()
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {**CPU, "tensor_parallel_size": num_ranks}
    with LLM(str(base), enable_lora=True, lora_modules=[f"one={first}"], **settings) as llm:

        def ask(adapter: LoRARequest | None = None) -> Sequence[int]:
            outputs = llm.generate("Hello", greedy, use_tqdm=False, lora_request=adapter)
            return outputs[0].outputs[0].token_ids

        write_adapter(tmp_path / "one", base, seed=2)
        for _ in range(2):
            with pytest.raises(Exception, match="has changed since it was registered"):
                ask(LoRARequest("one", 1))
        plain = ask()
        (first / WEIGHTS_FILE).write_bytes(before)
        adapted = ask(LoRARequest("one", 1))

    assert len(plain) == len(adapted) == 4
    assert plain != adapted


@pytest.mark.slow
def test_prompts_in_one_row_have_their_own_adapters(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    folders = [write_adapter(tmp_path / name, base, seed=ord(name)) for name in "ab"]
    modules = [f"{folder.name}={folder}" for folder in folders]
    prompts = ["Hello", "abc", "The sky is", "x"]
    requests = [LoRARequest("a", 1), None, LoRARequest("b", 2), LoRARequest("a", 1)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = []
    for settings in (CPU, {**CARD, "use_merged_prefill": True}):
        with LLM(str(base), enable_lora=True, max_loras=2, lora_modules=modules, **settings) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False, lora_request=requests)
            found.append([output.outputs[0].token_ids for output in outputs])

    assert found[0] == found[1]


@pytest.mark.slow
def test_an_adapter_gives_the_same_tokens_after_a_sleep(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, seed=1)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(base), enable_lora=True, lora_modules=[f"one={adapter}"], **CARD) as llm:

        def answer() -> list[int]:
            outputs = llm.generate(
                "Hello", greedy, use_tqdm=False, lora_request=LoRARequest("one", 1)
            )
            return list(outputs[0].outputs[0].token_ids)

        before = answer()
        llm._background.run(llm._client.control("sleep", level=2))
        llm._background.run(llm._client.control("wake_up"))
        after = answer()

    assert before == after


def test_drafts_are_verified_by_the_adapter_of_their_request(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    folders = [write_adapter(tmp_path / name, base, seed=ord(name)) for name in "ab"]
    settings = {**CPU, "enable_lora": True, "max_loras": 2}
    settings["lora_modules"] = [f"{folder.name}={folder}" for folder in folders]
    prompts = ["abcabcabcabc", "abc", "Hello Hello Hello", "x"]
    requests = [LoRARequest("a", 1), None, LoRARequest("b", 2), LoRARequest("a", 1)]
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    drafts = {"speculative_config": {**ngram, "adaptive": False}}
    found = []
    for more in ({}, drafts):
        with LLM(str(base), **settings, **more) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False, lora_request=requests)
            found.append([output.outputs[0].token_ids for output in outputs])
            stats = llm._client.stats

    assert found[0] == found[1]
    assert stats.spec_decode["num_accepted_tokens"] > 0


def test_a_card_verifies_drafts_by_the_adapter_of_their_request(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    folders = [write_adapter(tmp_path / name, base, seed=ord(name)) for name in "ab"]
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    settings["lora_modules"] = [f"{folder.name}={folder}" for folder in folders]
    prompts = ["abcabcabcabc", "abc", "Hello Hello Hello", "x"]
    requests = [LoRARequest("a", 1), None, LoRARequest("b", 2), LoRARequest("a", 1)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    card = {**CARD, "num_gpu_blocks_override": 24, "speculative_config": ngram}
    found = []
    for flags in (CPU, card):
        with LLM(str(base), **{**flags, **settings}) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False, lora_request=requests)
            found.append([output.outputs[0].token_ids for output in outputs])
            stats = llm._client.stats

    assert found[0] == found[1]
    assert stats.spec_decode["num_accepted_tokens"] > 0
    assert (stats.recompilations, stats.cpu_fallbacks) == (0, 0)


@pytest.mark.parametrize("method", ["ngram", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_drafts_with_adapters_prefix_hits_and_preemptions_change_no_token(
    method: str, tmp_path: Path
) -> None:
    base = make_tiny("llama", tmp_path / "base")
    folders = [write_adapter(tmp_path / name, base, seed=ord(name)) for name in "ab"]
    settings: dict[str, Any] = {**CPU, "enable_lora": True, "max_loras": 2, "block_size": 8}
    settings["lora_modules"] = [f"{folder.name}={folder}" for folder in folders]
    settings |= {"max_num_batched_tokens": 24, "max_model_len": 96}
    shared = [5 + 7 * i % 301 for i in range(33)]
    prompts = [{"prompt_token_ids": [*shared, 9 + i]} for i in range(9)]
    names = [None, "a", "b"] * 3
    requests = [None if name is None else LoRARequest(name, 1) for name in names]
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    keys: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    keys |= {"model": str(base)} if method == "draft_model" else {"prompt_lookup_min": 1}

    def answers(**flags: Any) -> tuple[list[Any], Any, int]:
        with LLM(str(base), **{**settings, **flags}) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False, lora_request=requests)
            again = llm.generate(prompts, greedy, use_tqdm=False, lora_request=requests)
            tokens = [output.outputs[0].token_ids for output in (*outputs, *again)]
            return tokens, llm._client.stats, sum(o.num_cached_tokens or 0 for o in again)

    expected, _, _ = answers()

    found, stats, num_cached = answers(num_gpu_blocks_override=30, speculative_config=keys)

    assert found == expected
    assert stats.preemptions > 0 and num_cached > 0
    assert stats.spec_decode["num_accepted_tokens"] > 0
