"""Launches compared with transformers, on a tiny model in float32."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM
from worker_rig import BLOCK_SIZE, WorkerRig

from config.buckets import BucketConfig
from hpu.protocol import Logprobs, RequestSampling, StepResult
from hpu.runner.launch_results import PROMPT_LOGITS

COUNT = 12
VOCAB = 320
COARSE = (4, 16, 8)
EVERYTHING = RequestSampling(temperature=0.0, num_logprobs=VOCAB - 1)

PROMPTS = [
    [(7 * i + 31 * j) % 300 + 10 for j in range(length)] for i, length in enumerate((5, 8, 17, 30))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Greedy continuation of each prompt by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    return [_continue(model, prompt, COUNT) for prompt in PROMPTS]


def _continue(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(params=[(1, 1, 1), COARSE], ids=["exact", "coarse"])
def rig(folder: Path, request: pytest.FixtureRequest) -> Iterator[WorkerRig]:
    made = WorkerRig(folder, steps=request.param)
    yield made
    made.worker.close()


def test_a_batch_of_mixed_lengths_gives_the_tokens_of_single_prompts(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    for req_index, prompt in enumerate(PROMPTS):
        rig.admit(req_index, prompt)
    rig.prefill(dict.fromkeys(range(4)))
    rig.step()

    rig.run([2, 0, 3, 1], COUNT - 1)

    assert [rig.requests[req_index].sampled for req_index in range(4)] == expected


def test_a_prompt_in_chunks_gives_the_tokens_of_a_whole_prompt(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    rig.admit(3, PROMPTS[3])
    for count in (7, 1, 13, None):
        rig.prefill({3: count})
        rig.step()

    rig.run([3], COUNT - 1)

    assert rig.requests[3].sampled == expected[3]


def test_chunks_and_decodes_in_one_plan_do_not_affect_each_other(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    rig.admit(0, PROMPTS[0])
    rig.prefill({0: None})
    rig.step()
    rig.admit(5, PROMPTS[3])
    rig.admit(6, PROMPTS[2])

    for count in (10, 10, 10):
        rig.decode([0])
        rig.prefill({5: count})
        if rig.requests[6].computed == 0:
            rig.prefill({6: None})
        rig.step()
    rig.run([0, 5, 6], COUNT - 4)

    assert rig.requests[0].sampled == expected[0]
    assert rig.requests[5].sampled == expected[3][: COUNT - 3]
    assert rig.requests[6].sampled == expected[2][: COUNT - 3]


def test_a_prefix_cached_by_another_request_is_not_recomputed(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    rig.admit(0, PROMPTS[3])
    rig.prefill({0: None})
    rig.step()

    rig.admit(1, PROMPTS[3], shared_with=0)
    hit = rig.requests[1].computed
    rig.prefill({1: None})
    rig.step()
    rig.run([0, 1], COUNT - 1)

    assert hit == 3 * BLOCK_SIZE
    assert rig.requests[0].sampled == rig.requests[1].sampled == expected[3]


def test_a_reused_index_has_no_trace_of_the_previous_request(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    rig.admit(0, PROMPTS[3])
    rig.prefill({0: None})
    rig.step()
    rig.run([0], COUNT - 1)

    first = rig.free(0)
    rig.admit(0, PROMPTS[1])
    rig.prefill({0: None})
    rig.step()
    rig.run([0], COUNT - 1)

    assert first == expected[3]
    assert rig.requests[0].sampled == expected[1]


def test_prompt_logprobs_equal_transformers(rig: WorkerRig, folder: Path) -> None:
    prompt = PROMPTS[2]
    rig.admit(0, prompt, sampling=RequestSampling(temperature=0.0, num_prompt_logprobs=2))
    rig.admit(1, PROMPTS[0])

    rig.prefill({1: None, 0: 6})
    first = rig.step().prompt_logprobs
    rig.prefill({0: None})
    second = rig.step().prompt_logprobs

    plain = _plain_logprobs(folder, prompt)
    pieces = [logprobs for _, logprobs in first + second]
    ids = np.concatenate([np.frombuffer(p.ids, "<i4").reshape(-1, 3) for p in pieces])
    values = np.concatenate([np.frombuffer(p.values, "<f4").reshape(-1, 3) for p in pieces])
    ranks = np.concatenate([np.frombuffer(p.ranks, "<i4") for p in pieces])
    assert [req_index for req_index, _ in first + second] == [0, 0]
    assert [len(np.frombuffer(p.ranks, "<i4")) for p in pieces] == [6, len(prompt) - 7]
    assert ids[:, 0].tolist() == prompt[1:]
    np.testing.assert_allclose(values, np.take_along_axis(plain, ids, 1), atol=1e-4)
    chosen = np.take_along_axis(plain, ids[:, :1], 1)
    assert ranks.tolist() == ((plain > chosen).sum(1) + 1).tolist()


def test_prompt_logprobs_in_slices_equal_unsliced_logprobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (PROMPT_LOGITS, 5 * VOCAB):
        monkeypatch.setattr("hpu.runner.launch_results.PROMPT_LOGITS", most)
        rig = WorkerRig(folder, steps=COARSE)
        rig.admit(0, PROMPTS[3], sampling=RequestSampling(temperature=0.0, num_prompt_logprobs=1))
        rig.prefill({0: None})
        (_, logprobs), *rest = rig.step().prompt_logprobs
        found.append((bytes(logprobs.ids), bytes(logprobs.ranks)))
        assert not rest
        rig.worker.close()

    assert found[0] == found[1]
    assert len(found[0][1]) == 4 * (len(PROMPTS[3]) - 1)


def test_each_request_gets_the_requested_number_of_logprobs(rig: WorkerRig, folder: Path) -> None:
    for req_index, k in enumerate((-1, 0, 3)):
        rig.admit(req_index, PROMPTS[2], sampling=RequestSampling(temperature=0.0, num_logprobs=k))
    rig.prefill(dict.fromkeys(range(3)))

    result = rig.step()

    plain = _plain_logprobs(folder, [*PROMPTS[2], 0])[-1]
    assert [(index, logprobs.k) for index, logprobs in result.logprobs] == [(1, 0), (2, 3)]
    ids = np.frombuffer(result.logprobs[1][1].ids, "<i4")
    values = np.frombuffer(result.logprobs[1][1].values, "<f4")
    assert ids.tolist() == [result.tokens[2], *np.argsort(-plain)[:3].tolist()]
    np.testing.assert_allclose(values, plain[ids], atol=1e-4)


MASKED = RequestSampling(temperature=0.0, masked=True, num_logprobs=1)


def _masked_step(rig: WorkerRig, *, is_late: bool) -> StepResult:
    """One plan with two decodes of masked requests, an unmasked request between them, and two
    prompts."""
    samplings = (MASKED, RequestSampling(temperature=0.0), MASKED)
    for req_index, sampling in enumerate(samplings):
        rig.admit(req_index, PROMPTS[req_index], sampling=sampling)
    rig.prefill(dict.fromkeys(range(3)))
    rig.submit({0: list(range(30, 60)), 2: list(range(60, 90))})
    rig.collect()
    for req_index in range(3):
        rig.decode([req_index])
    rig.admit(3, PROMPTS[0], sampling=MASKED)
    rig.prefill({3: None})
    rig.admit(4, PROMPTS[3])
    rig.prefill({4: 5})
    allowed = {0: [100, 101, 102], 2: [200, 201]}
    if not is_late:
        rig.submit(allowed | {3: [9]})
        return rig.collect()
    rig.submit({3: [9]}, late=(0, 2))
    assert not rig.worker.has_result() and rig.worker.lacks_masks
    rig.mask(allowed)
    assert rig.worker.has_result() and not rig.worker.lacks_masks
    return rig.collect()


@pytest.mark.parametrize("steps", [(1, 1, 1), COARSE], ids=["exact", "coarse"])
def test_masks_sent_after_a_plan_equal_masks_sent_with_it(
    folder: Path, steps: tuple[int, int, int]
) -> None:
    results = []
    for is_late in (False, True):
        rig = WorkerRig(folder, steps=steps)
        results.append(_masked_step(rig, is_late=is_late))
        rig.worker.close()

    early, late = results
    assert late.tokens == early.tokens
    assert early.tokens[0] in (100, 101, 102) and early.tokens[2] in (200, 201)
    assert early.tokens[3] == 9
    assert [index for index, _ in late.logprobs] == [index for index, _ in early.logprobs]
    assert len(late.seconds) == 5 and all(seconds > 0 for seconds in late.seconds)


def test_the_wait_for_masks_is_not_counted_as_device_time(folder: Path) -> None:
    rig = WorkerRig(folder)
    rig.admit(0, PROMPTS[0], sampling=MASKED)
    rig.prefill({0: None})
    rig.submit({0: [5]})
    rig.collect()
    rig.decode([0])

    rig.submit(late=(0,))
    time.sleep(0.8)
    rig.mask({0: [7]})
    result = rig.collect()

    rig.worker.close()
    assert result.tokens == [7]
    assert result.seconds[0] < 0.8


def test_masks_of_another_step_are_a_bug_of_the_engine(rig: WorkerRig) -> None:
    rig.admit(0, PROMPTS[0], sampling=MASKED)
    rig.prefill({0: None})
    rig.submit({0: [5]})

    with pytest.raises(
        RuntimeError, match="masks are for step 0, the newest plan is for step 0 with"
    ):
        rig.mask({0: [7]})


def test_a_request_without_sampling_has_no_entry_in_the_sampled_tokens(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    rig.admit(0, PROMPTS[3])
    rig.admit(1, PROMPTS[0])
    rig.prefill({0: 5, 1: None})

    tokens = rig.step().tokens

    assert tokens == expected[0][:1]


def test_a_nan_sequence_is_reported_and_its_blocks_are_cleaned(
    folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    broken = _with_a_poisoned_token(folder, tmp_path, token=9)
    rig = WorkerRig(broken, num_blocks=2, max_model_len=16)
    rig.admit(0, [9] * 12)
    rig.prefill({0: None})
    tokens = rig.step().tokens
    rig.decode([0])
    tokens += rig.step().tokens

    rig.free(0)
    rig.admit(1, PROMPTS[0])
    rig.prefill({1: None})
    rig.step()
    rig.run([1], 5)

    assert tokens[0] == -1
    assert rig.requests[1].sampled == expected[0][:6]


@pytest.mark.parametrize("device", ["cpu", "hpu-emulator"])
def test_a_nan_sequence_affects_no_other_decode(
    device: str, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    broken = _with_a_poisoned_token(folder, tmp_path, token=9)
    exact = BucketConfig(strategy="exact")
    rig = WorkerRig(broken, num_blocks=20, max_model_len=64, device=device, buckets=exact)
    for req_index, tokens in ((0, PROMPTS[0]), (1, [9] * 12), (2, PROMPTS[1])):
        rig.admit(req_index, tokens)
        rig.prefill({req_index: None})
        rig.step()

    rig.run([0, 1, 2], 5)

    first, poisoned, last = (rig.requests[req_index].sampled for req_index in (0, 1, 2))
    rig.worker.close()
    assert (first, last) == (expected[0][:6], expected[1][:6])
    # Only the first -1 matters, because it ends the request.
    assert poisoned[0] == -1


def test_a_preempted_request_returns_with_its_tokens_and_continues(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    rig.admit(0, PROMPTS[2])
    rig.prefill({0: None})
    rig.step()
    rig.run([0], 4)

    said = rig.free(0)
    rig.admit(2, PROMPTS[1])
    rig.prefill({2: None})
    rig.step()
    rig.admit(1, PROMPTS[2] + said, num_prompt=len(PROMPTS[2]))
    rig.prefill({1: None})
    rig.step()
    rig.run([1, 2], COUNT - 6)

    assert said + rig.requests[1].sampled == expected[2]


def test_the_next_plan_is_launched_before_the_previous_tokens_are_read(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    rig.admit(0, PROMPTS[0])
    rig.prefill({0: None})
    rig.submit()

    for _ in range(COUNT - 1):
        rig.decode([0])
        rig.submit()
        rig.collect()
    rig.collect()

    assert rig.requests[0].sampled == expected[0]


def test_a_decode_may_be_submitted_before_the_tokens_of_the_last_chunk_are_read(
    rig: WorkerRig, expected: list[list[int]]
) -> None:
    rig.admit(0, PROMPTS[1])
    rig.admit(1, PROMPTS[2])
    rig.prefill({0: None, 1: 9})
    rig.submit()
    rig.decode([0])
    rig.prefill({1: None})
    rig.submit()
    rig.decode([1, 0])
    rig.submit()

    for _ in range(3):
        rig.collect()

    assert rig.requests[0].sampled == expected[1][:3]
    assert rig.requests[1].sampled == expected[2][:2]


def test_padding_moves_no_log_probability_by_more_than_float_rounding(folder: Path) -> None:
    values: list[list[np.ndarray]] = []
    tokens = []
    for steps in ((1, 1, 1), COARSE):
        rig = WorkerRig(folder, steps=steps)
        found = []
        for req_index, prompt in enumerate(PROMPTS[:3]):
            rig.admit(req_index, prompt, sampling=EVERYTHING)
        rig.prefill({0: None, 1: 3, 2: None})
        found += rig.step().logprobs
        rig.decode([0])
        rig.prefill({1: None})
        found += rig.step().logprobs
        for _ in range(4):
            rig.decode([2, 0, 1])
            found += rig.step().logprobs
        values.append([_by_token(logprobs) for _, logprobs in found])
        tokens.append([rig.requests[req_index].sampled for req_index in range(3)])
        rig.worker.close()

    exact, coarse = values
    assert tokens[0] == tokens[1]
    assert len(exact) == 2 + 2 + 12
    for first, other in zip(exact, coarse, strict=True):
        np.testing.assert_allclose(first, other, atol=1e-5, rtol=0)


def _plain_logprobs(folder: Path, tokens: list[int]) -> np.ndarray:
    """(len(tokens) - 1, VOCAB) log-probabilities of the next token after each token except the
    last."""
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    found: np.ndarray = torch.log_softmax(logits, -1).numpy()
    return found


def _with_a_poisoned_token(folder: Path, target: Path, *, token: int) -> Path:
    """A copy of a checkpoint in which the embedding of `token` is NaN."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    file = target / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def _by_token(logprobs: Logprobs) -> np.ndarray:
    """(VOCAB,) log-probabilities, from a position that lists all tokens."""
    ids = np.frombuffer(logprobs.ids, "<i4")[1:]
    values = np.frombuffer(logprobs.values, "<f4")[1:]
    by_token = np.full(VOCAB, np.nan, np.float32)
    by_token[ids] = values
    return by_token
