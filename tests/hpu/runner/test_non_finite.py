"""Requests after a request with non-finite keys and values, and requests that reuse its blocks:
each gets the tokens of a fresh worker."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_harness import load_decoder, load_transformers_model
from safetensors.torch import load_file, save_file
from tiny_encoders import Reader, make_pooling
from tiny_models import make_tiny
from worker_rig import BLOCK_SIZE, WorkerRig

from config.buckets import BucketConfig, Range
from config.execution import EmulatorSettings, ExecutionConfig
from hpu.layers.metadata import TextAttentionInputs
from hpu.models.base import CausalLM

POISON = 200
"""Token whose embedding is NaN."""
NUM_BLOCKS = 24
PROMPTS = [
    [(7 * number + index * index) % 190 + 4 for index in range(1 + 5 * number % 26)]
    for number in range(16)
]


def poisoned(family: str, folder: Path) -> Path:
    """A checkpoint of `family` in which the embedding of POISON is NaN."""
    file = make_tiny(family, folder) / "model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[name][POISON] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def overflowing(family: str, folder: Path, size: float) -> Path:
    """A checkpoint of `family` in which the poison token, and token 0, which replaces a NaN token,
    have queries and keys of about `size` in the first layer."""
    file = make_tiny(family, folder) / "model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    embeddings = tensors[name]
    embeddings[:, 0] = 0
    embeddings[[0, POISON], 0] = 50 * embeddings.abs().max()
    for name, tensor in tensors.items():
        if "layers.0." in name and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor[:, 0] = size / tensor.shape[1] ** 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@contextmanager
def working(folder: Path, device: str, **more: Any) -> Iterator[WorkerRig]:
    settings: dict[str, Any] = {"device": device, "prefix_caching": False, "max_model_len": 192}
    settings |= more
    if device != "cpu":
        settings |= {"buckets": BucketConfig(strategy="exact"), "enforce_eager": True}
    rig = WorkerRig(folder, num_blocks=NUM_BLOCKS, **settings)
    try:
        yield rig
    finally:
        rig.worker.close()


def answers(rig: WorkerRig, poison: tuple[int, ...] = (), *, ends: bool = True) -> list[list[int]]:
    """Six tokens for each prompt, four requests at a time. With `poison`, a request with this
    prompt is in the middle of all launches; if it `ends`, its first token is -1."""
    found = []
    for first in range(0, len(PROMPTS), 4):
        indices = list(range(4))
        for index in indices:
            rig.admit(index, PROMPTS[first + index])
        launched = list(indices)
        if poison:
            rig.admit(4, list(poison))
            launched.insert(2, 4)
        rig.prefill(dict.fromkeys(launched))
        rig.step()
        rig.run(launched, 5)
        if poison:
            # The engine ends a request at its first -1, and drops later tokens.
            assert (rig.free(4)[0] == -1) >= ends
        found += [rig.free(index) for index in indices]
    return found


def poison_all_blocks(rig: WorkerRig, *, samples: bool) -> list[int]:
    """Run requests with the poison token that take all blocks, and return their sampled tokens.
    With `samples`, their logits are computed; otherwise, they end between two chunks of their
    prompts."""
    length = NUM_BLOCKS // 2 * BLOCK_SIZE
    for index in range(2):
        rig.admit(index, [5, POISON, *[9] * (length - 2)])
        rig.prefill({index: None if samples else length - 1})
        rig.step()
    return [token for index in range(2) for token in rig.free(index)]


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "cpu"),
        ("gemma2", "cpu"),
        ("deepseek_v2", "cpu"),
        ("qwen3_next", "cpu"),
        ("granitemoehybrid", "cpu"),
        ("lfm2", "cpu"),
        ("llama", "hpu-emulator"),
        ("deepseek_v2", "hpu-emulator"),
    ],
    ids=" on ".join,
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, list[list[int]]]:
    """The folder, the device, and the tokens of a fresh worker."""
    family, device = request.param
    folder = poisoned(family, tmp_path_factory.mktemp(family))
    with working(folder, device) as rig:
        return folder, device, answers(rig)


def test_the_padding_of_a_nan_prompt_does_not_affect_prompts_with_less_context(
    model: tuple[Path, str, list[list[int]]],
) -> None:
    folder, device, _ = model
    found = []
    with working(folder, device) as rig:
        for second in (POISON - 1, POISON):
            rig.admit(0, [(7 * place) % 190 + 4 for place in range(3 * BLOCK_SIZE)])
            rig.prefill({0: 2 * BLOCK_SIZE})
            rig.step()
            # Padding of the second row, and a third row that has no context.
            rig.admit(1, [5, second])
            rig.admit(2, PROMPTS[1])
            rig.prefill({0: None, 1: None, 2: None})
            rig.step()
            bad = rig.free(1)
            assert (bad[0] == -1) == (second == POISON)
            rig.run([0, 2], 3)
            found.append([rig.free(index) for index in (0, 2)])

    assert found[0] == found[1]


@pytest.mark.parametrize("samples", [True, False], ids=["sampled", "ended in its prompt"])
def test_later_requests_are_not_affected_by_blocks_of_a_nan_request(
    model: tuple[Path, str, list[list[int]]], samples: bool
) -> None:
    folder, device, expected = model
    with working(folder, device) as rig:
        tokens = poison_all_blocks(rig, samples=samples)
        found = answers(rig)

    assert tokens == ([-1, -1] if samples else [])
    assert found == expected


@pytest.mark.parametrize(
    "prompt", [(POISON,), (5, POISON, 9, 9, 9)], ids=["last token", "earlier token"]
)
def test_requests_in_the_same_launches_are_not_affected_by_a_nan_request(
    model: tuple[Path, str, list[list[int]]], prompt: tuple[int, ...]
) -> None:
    folder, device, expected = model
    with working(folder, device) as rig:
        assert answers(rig, prompt) == expected


@pytest.mark.parametrize("device", ["cpu", "hpu-emulator"])
@pytest.mark.parametrize("size", [2.4e3, 2.4e4])
def test_overflowing_products_affect_no_other_request(
    device: str, size: float, tmp_path: Path
) -> None:
    """Queries and keys are finite, but their scores overflow float16."""
    folder = overflowing("llama", tmp_path, size)
    with working(folder, device, dtype="float16") as rig:
        expected = answers(rig)
        found = [answers(rig, prompt, ends=False) for prompt in ((POISON,), (5, POISON, 9))]
        later = answers(rig)

    assert found == [expected, expected]
    assert later == expected


TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(32, 32, 32),
    prompt_context=Range(0, 8, 8),
    decode_batch=Range(1, 1, 1),
    decode_blocks=Range(8, 8, 24),
)
SLOW = pytest.mark.slow


@contextmanager
def on_card(folder: Path, **settings: Any) -> Iterator[WorkerRig]:
    rig = WorkerRig(
        folder,
        buckets=TABLE,
        steps=(1, 32, 8),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=64,
        device="hpu-emulator",
        emulator=EmulatorSettings(is_strict=True),
        **settings,
    )
    try:
        yield rig
    finally:
        rig.worker.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"execution": ExecutionConfig(mode="eager")}, marks=SLOW),
        {"execution": ExecutionConfig(mode="hpu-graphs")},
        pytest.param({"prefix_caching": False}, marks=SLOW),
        pytest.param({"merged_prefill": True}, marks=SLOW),
        pytest.param({"execution": ExecutionConfig(mode="torch-compile")}, marks=SLOW),
    ],
    ids=["eager", "graphs", "contiguous", "merged", "compile"],
)
def test_a_nan_token_fails_its_request_on_a_card(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = poisoned("llama", tmp_path)
    with on_card(folder, **settings) as rig:
        # The last token is finite, and is in the second chunk.
        rig.admit(0, [5, POISON, *[9] * 30])
        rig.prefill({0: 20})
        rig.step()
        rig.prefill({0: None})
        found = list(rig.step().tokens)
        if settings.get("prefix_caching", True):
            # The tokens that this request computes are finite.
            rig.admit(1, [5, POISON, *[9] * 24], shared_with=0)
            rig.prefill({1: None})
            found += rig.step().tokens
            rig.free(1)
        rig.free(0)
        rig.admit(0, [7, 8, 9] * 4)
        rig.prefill({0: None})
        rig.step()
        rig.run([0], 3)

    assert set(found) == {-1}
    assert min(rig.requests[0].sampled) >= 0


@pytest.mark.parametrize(
    ("family", "load"),
    [
        ("llama", load_decoder),
        ("qwen3_next", load_decoder),
        ("deepseek_v2", load_decoder),
        ("llama", load_transformers_model),
    ],
    ids=["merged projection", "gate", "latents", "transformers"],
)
def test_nan_keys_make_the_hidden_state_of_every_token_nan(
    family: str, load: Callable[..., CausalLM], tmp_path: Path
) -> None:
    file = make_tiny(family, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = next(
        name for name in tensors if name.endswith(("k_proj.weight", "kv_a_proj_with_mqa.weight"))
    )
    tensors[name][1, 2] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    model = load(tmp_path)
    model.read_contiguously()
    zeros, lengths = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 2])

    hidden = model(zeros + 5, TextAttentionInputs(zeros, zeros, lengths))

    assert hidden.isnan().any(-1).tolist() == [[True] * 3] * 2


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN"])
@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cpu"},
        pytest.param(
            {
                "device": "hpu-emulator",
                "buckets": BucketConfig(strategy="exact"),
                "enforce_eager": True,
            },
            marks=SLOW,
        ),
    ],
    ids=["cpu", "card"],
)
def test_a_text_with_a_nan_token_gets_no_vector(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    file = make_pooling("llama", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    reader = Reader(tmp_path, pooler_config=json.dumps({"pooling_type": kind}), **settings)
    try:
        found = reader.run([[POISON, 5, 6, 7], [5, 6, 7]])
        alone = reader.run([[5, 6, 7]])
    finally:
        reader.worker.close()

    assert [rows for rows, _ in found] == [-1, 1]
    np.testing.assert_allclose(
        *(np.frombuffer(data, "<f4") for _, data in (found[1], alone[0])), atol=1e-5
    )
