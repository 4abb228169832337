"""Attention of the Gaudi kernels compared with plain attention: in slices, over windows and in
16-bit types; and the operators that a decode layer launches."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from tiny_models import make_tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from two_prompts import working

from config.execution import ExecutionConfig
from hpu.emulator.card import rules
from hpu.emulator.card.recipes import Segment
from hpu.layers.attention import AttentionKind, HeadShape, PagedAttention
from hpu.layers.metadata import (
    FULL,
    DecodeAttentionInputs,
    PrefillAttentionInputs,
    Visibility,
    build_metadata,
)
from hpu.ops.attention import AttentionPart, attend, attend_unfused, merge_parts
from hpu.ops.block_softmax import REFERENCES, Blocks
from hpu.ops.kernels import PLAIN_SCORES, ScoreOptions, SliceSizes
from hpu.ops.torch_kernels import TorchKernels

BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM = 4, 64, 8
SCALE = 0.25
"""A power of two: queries of float16 are multiplied with it exactly."""


@pytest.fixture
def card() -> Iterator[None]:
    """The emulator, with operators that also accept CPU tensors."""
    with emulated(lazy=False, runs_on_host=True), torch.inference_mode():
        yield


def gaudi(**settings: Any) -> Any:
    from hpu.ops.gaudi import GaudiKernels

    return GaudiKernels(**{"fused_sdpa": True, **settings})


def random(*shape: int, seed: int) -> Tensor:
    """Random numbers that float16 holds exactly."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().float()


class LargestOutput(TorchDispatchMode):
    """Tracks the largest number of elements of a new tensor, for all dtypes or for `dtype`."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or func._schema.name in rules.VIEWS:
            return result
        for output in result if isinstance(result, tuple) else (result,):
            if isinstance(output, Tensor) and self._dtype in (None, output.dtype):
                self.most = max(self.most, output.numel())
        return result


def make_layer(
    kernels: Any,
    *,
    heads: int,
    kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
    size: float = 1.0,
    soft_cap: float | None = None,
) -> PagedAttention:
    """A layer over caches of random keys, of about `size`, and values; plain operations without
    `kernels`."""
    kind = AttentionKind(visibility=Visibility(window), soft_cap=soft_cap)
    layer = PagedAttention(HeadShape(heads, kv_heads, HEAD_DIM, SCALE), dtype, kind)
    if kernels is not None:
        layer.impl = kernels.make_attention()
    slots = (NUM_BLOCKS + 1) * BLOCK_SIZE
    keys, values = (random(slots, kv_heads, HEAD_DIM, seed=seed).to(dtype) for seed in (1, 2))
    layer.bind_caches(keys * size, values, BLOCK_SIZE)
    return layer


def prompt(
    kernels: Any,
    query_lens: list[int],
    context_lens: list[int],
    *,
    blocks: int = 12,
    heads: int = 6,
    kv_heads: int = 2,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    watch: Any = None,
    size: float = 1.0,
    options: ScoreOptions = PLAIN_SCORES,
    slopes: Tensor | None = None,
) -> Tensor:
    """Outputs (tokens, heads, D) of the real tokens of all rows, in float32. Each row has a padding
    token at its end and `blocks` blocks of context. `watch` observes the operators of the
    launch. `size`: factor of the queries and of the keys. `slopes`: slopes of ALiBi."""
    batch, length = len(query_lens), max(query_lens) + 1
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
    inputs = PrefillAttentionInputs(
        positions=torch.zeros(batch, length, dtype=torch.long),
        # All new tokens are written to the pad block.
        slot_mapping=torch.full((batch * length,), NUM_BLOCKS * BLOCK_SIZE),
        query_lens=torch.tensor(query_lens),
        context_lens=torch.tensor(context_lens),
        block_list=order[: batch * blocks],
    )
    layer = make_layer(
        kernels,
        heads=heads,
        kv_heads=kv_heads,
        window=window,
        dtype=dtype,
        size=size,
        soft_cap=options.soft_cap,
    )
    form = None
    if kernels is not None:
        form = kernels.attention_form(dtype, has_score_options=not options.are_plain)
    query = random(batch, length, heads, HEAD_DIM, seed=4).to(dtype) * size
    key, value = (random(batch, length, kv_heads, HEAD_DIM, seed=seed) for seed in (5, 6))
    key, value = key.to(dtype) * size, value.to(dtype)
    with watch or nullcontext():
        metadata = build_metadata(
            inputs, BLOCK_SIZE, (Visibility(window),), form, alibi_slopes=slopes
        )
        out = layer(query, key, value, metadata, options.sinks)
    return torch.cat([out[row, :count] for row, count in enumerate(query_lens)]).float()


SHAPES = {
    "one row": ([13], [37]),
    "whole slices": ([16], [48]),
    "a single token": ([1], [1]),
    "rows of all lengths": ([5, 23, 1, 9], [48, 0, 3, 31]),
}


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)], ids=["grouped", "equal", "one"])
@pytest.mark.parametrize("size", [1, 8, 12, 64])
def test_sliced_attention_equals_plain_attention(
    lengths: tuple[list[int], list[int]], heads: tuple[int, int], size: int, card: None
) -> None:
    form = {"heads": heads[0], "kv_heads": heads[1]}

    expected = prompt(None, *lengths, **form)
    whole = prompt(gaudi(), *lengths, **form)
    sliced = prompt(gaudi(slices=SliceSizes(1, size)), *lengths, **form)

    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sliced, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)], ids=["grouped", "equal", "one"])
@pytest.mark.parametrize("blocks", [0, 12], ids=["whole prompts", "with context"])
def test_flex_attention_equals_plain_attention(
    lengths: tuple[list[int], list[int]], heads: tuple[int, int], blocks: int, card: None
) -> None:
    from hpu.ops.gaudi_flex import FlexKernels

    query_lens, context_lens = lengths
    given = query_lens, context_lens if blocks else [0] * len(query_lens)
    form = {"heads": heads[0], "kv_heads": heads[1], "blocks": blocks}
    kernels = FlexKernels(gaudi(fused_sdpa=False))

    found = prompt(kernels, *given, **form)

    assert kernels.attention_form(torch.float32).knows_causality
    torch.testing.assert_close(found, prompt(None, *given, **form), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["fast", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slices_in_16_bit_types_are_as_close_as_unsliced_attention(
    dtype: torch.dtype, mode: str, card: None
) -> None:
    lengths = SHAPES["rows of all lengths"]
    expected = prompt(None, *lengths)

    for slices in (None, SliceSizes(1, 8)):
        found = prompt(gaudi(softmax_mode=mode, slices=slices), *lengths, dtype=dtype)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.03)


LARGE = 128.0
"""Factor of queries and keys whose scores differ by more than the largest number of float16."""
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "soft cap": {"options": ScoreOptions(soft_cap=50.0)},
    "sinks": {"options": ScoreOptions(sinks=torch.linspace(-1, 1, 6))},
    "bias": {"slopes": torch.linspace(0.1, 0.6, 6)},
}


def kernels_in_float16(name: str) -> Any:
    """Kernels as the back ends make them for float16; `fast`: with --softmax-mode fast."""
    if name == "cuda":
        return TorchKernels()
    if name == "flex":
        from hpu.ops.gaudi_flex import FlexKernels

        return FlexKernels(gaudi(fused_sdpa=False, softmax_mode="fp32"))
    slices = SliceSizes(1, 8) if name == "slices" else None
    mode = "fast" if name == "fast" else "fp32"
    return gaudi(fused_sdpa=name != "products", softmax_mode=mode, slices=slices)


@pytest.mark.parametrize("blocks", [0, 12], ids=["whole prompts", "with context"])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("name", ["fused", "fast", "slices", "products", "flex", "cuda"])
def test_float16_prefills_with_large_scores_equal_plain_attention(
    name: str, scores: dict[str, Any], blocks: int, card: None
) -> None:
    query_lens, context_lens = SHAPES["rows of all lengths"]
    given = query_lens, context_lens if blocks else [0] * len(query_lens)
    expected = prompt(None, *given, blocks=blocks, size=LARGE, **scores)

    found = prompt(
        kernels_in_float16(name),
        *given,
        blocks=blocks,
        size=LARGE,
        dtype=torch.float16,
        **scores,
    )

    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("soft_cap", [None, 50.0])
@pytest.mark.parametrize("name", ["fused", "fast", "products", "flex", "cuda"])
def test_float16_decodes_with_large_scores_equal_plain_attention(
    name: str, soft_cap: float | None, card: None
) -> None:
    expected = decode(None, torch.float32, size=LARGE, soft_cap=soft_cap)

    found = decode(kernels_in_float16(name), torch.float16, size=LARGE, soft_cap=soft_cap)

    torch.testing.assert_close(found[:3], expected[:3], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("soft_cap", [None, 50.0])
def test_large_scores_of_unfused_attention_in_float16_are_finite(soft_cap: float | None) -> None:
    query, key, value = (random(1, heads, 20, 8, seed=heads) for heads in (6, 2, 1))
    query, key, value = query * LARGE, key * LARGE, value.expand(1, 2, 20, 8)
    options: dict[str, Any] = {"scale": SCALE, "causal": True, "soft_cap": soft_cap}

    found = attend_unfused(query.half(), key.half(), value.half(), **options)

    expected = attend_unfused(query, key, value, **options)
    torch.testing.assert_close(found[0].float(), expected[0], rtol=0.01, atol=0.01)
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [1, 2, 4, 9, 13, 40, 100])
@pytest.mark.parametrize("fused_sdpa", [True, False], ids=["fused", "unfused"])
def test_a_window_attends_to_its_last_blocks(
    lengths: tuple[list[int], list[int]], window: int, fused_sdpa: bool, card: None
) -> None:
    kernels = gaudi(fused_sdpa=fused_sdpa, slices=SliceSizes(1, 8))

    plain = prompt(None, *lengths, window=window)
    found = prompt(kernels, *lengths, window=window)

    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    # Reference of row 0: a mask over its whole context.
    new, cached = lengths[0][0], lengths[1][0]
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
    layer = make_layer(None, heads=6, kv_heads=2, window=None, dtype=torch.float32)
    slots = torch.arange(cached)
    slots = order[slots // BLOCK_SIZE] * BLOCK_SIZE + slots % BLOCK_SIZE
    longest = max(lengths[0]) + 1
    keys, values = (
        torch.cat((cache[slots], random(len(lengths[0]), longest, 2, 8, seed=seed)[0, :new]))
        for cache, seed in zip(layer.caches, (5, 6), strict=True)
    )
    distance = torch.arange(cached, cached + new).unsqueeze(1) - torch.arange(cached + new)
    mask = torch.where((distance >= 0) & (distance < window), 0.0, -1e30).view(1, 1, new, -1)
    query = random(len(lengths[0]), longest, 6, 8, seed=4)[:1, :new]
    expected, _ = attend(
        query.transpose(1, 2),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        scale=SCALE,
        mask=mask,
    )
    torch.testing.assert_close(plain[:new], expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def prefill_metadata(form: Any, *, blocks: int, window: int | None = None) -> Any:
    inputs = PrefillAttentionInputs(
        positions=torch.zeros(2, 20, dtype=torch.long),
        slot_mapping=torch.zeros(40, dtype=torch.long),
        query_lens=torch.tensor([20, 7]),
        context_lens=torch.tensor([blocks * BLOCK_SIZE, 3]),
        block_list=torch.arange(2 * blocks),
    )
    kinds = (FULL,) if window is None else (FULL, Visibility(window))
    return build_metadata(inputs, BLOCK_SIZE, kinds, form)


def test_no_mask_of_slices_grows_with_new_times_cached_tokens(card: None) -> None:
    form = gaudi(slices=SliceSizes(100, 16)).attention_form(torch.bfloat16)

    below = prefill_metadata(form, blocks=19)
    above = prefill_metadata(form, blocks=21)

    assert below.masks[0].shape == (2, 1, 20, 19 * 4 + 20) and below.slices == ()
    assert above.masks[0].shape == (1, 1, 16, 16)
    assert [tuple(slice.mask.shape) for slice in above.slices] == [(2, 1, 1, 16)] * 5 + [
        (2, 1, 1, 4)
    ]
    assert [slice.blocks.shape[0] for slice in above.slices] == [8] * 5 + [2]
    assert (
        {slice.mask.dtype for slice in above.slices} == {above.masks[0].dtype} == {torch.bfloat16}
    )


def test_no_tensor_of_slices_is_as_large_as_the_context(card: None) -> None:
    watch = LargestOutput()

    prompt(gaudi(slices=SliceSizes(1, 4)), [13], [200], blocks=60, watch=watch)

    # The output is the largest tensor; keys of the context would have 3840 elements, a mask of new
    # x cached tokens 3360.
    assert watch.most == 14 * 6 * HEAD_DIM == 672


def test_a_window_takes_a_mask_over_its_own_blocks_only(card: None) -> None:
    form = gaudi(slices=SliceSizes(1, 16)).attention_form(torch.bfloat16)

    found = prefill_metadata(form, blocks=21, window=9)

    # 8 cached tokens are in at most 3 blocks.
    assert found.block_lists[1].shape == (2 * 3,)
    assert found.masks[1].shape == (2, 1, 20, 3 * 4 + 20)
    assert found.block_lists[1].tolist() == [19 - 1, 19, 20, 21, 22, 23]


def test_parts_without_a_visible_key_have_no_weight() -> None:
    out, highest, total = random(1, 2, 3, 8, seed=0), random(1, 2, 3, 1, seed=1), torch.ones(1)
    part = AttentionPart(out, highest, total.expand(1, 2, 3, 1))
    empty = AttentionPart(out * 100, torch.full((1, 2, 3, 1), -1e30), part.total * 9)

    for merged in (merge_parts(part, empty), merge_parts(empty, part)):
        torch.testing.assert_close(merged.out, part.out)


def decode(
    kernels: Any,
    dtype: torch.dtype,
    watch: Any = None,
    value: float = 0.0,
    size: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """Outputs of three sequences of 3, 1 and 2 blocks and of a padding row, with two padding
    blocks; `watch` observes the operators of the layer. `value`: all values of the second sequence,
    unless 0. `size`: factor of the queries and of the keys."""
    groups = torch.tensor([0, 0, 0, 1, 2, 2, -1, -1])
    inputs = DecodeAttentionInputs(
        positions=torch.zeros(4, 1, dtype=torch.long),
        slot_mapping=torch.full((4,), NUM_BLOCKS * BLOCK_SIZE),
        block_list=torch.tensor([9, 3, 40, 7, 11, 2, NUM_BLOCKS, NUM_BLOCKS]),
        block_groups=groups,
        block_starts=torch.zeros(8, dtype=torch.long),
        block_usage=torch.tensor([4, 4, 1, 3, 4, 2, 1, 1]),
    )
    layer = make_layer(
        kernels, heads=6, kv_heads=2, window=None, dtype=dtype, size=size, soft_cap=soft_cap
    )
    if value:
        layer.caches[1][7 * BLOCK_SIZE : 8 * BLOCK_SIZE] = value
    form = None if kernels is None else kernels.attention_form(dtype)
    query = (random(4, 1, 6, HEAD_DIM, seed=4) * 3).half().to(dtype) * size
    new = torch.zeros(4, 1, 2, HEAD_DIM, dtype=dtype)
    metadata = build_metadata(inputs, BLOCK_SIZE, (FULL,), form)
    with watch or nullcontext():
        out: Tensor = layer(query, new, new, metadata)
    return out.float()


def test_values_whose_sum_overflows_affect_no_other_sequence(card: None) -> None:
    expected = decode(gaudi(), torch.float16)

    found = decode(gaudi(), torch.float16, value=60_000.0)

    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("is_finite", [True, False])
def test_blocks_of_another_sequence_outside_a_window_have_no_effect(is_finite: bool) -> None:
    layer = make_layer(None, heads=6, kv_heads=2, window=4, dtype=torch.float32)
    if not is_finite:
        for cache in layer.caches:
            cache[7 * BLOCK_SIZE : 8 * BLOCK_SIZE] = torch.nan
    inputs = DecodeAttentionInputs(
        positions=torch.tensor([[5 * BLOCK_SIZE - 1], [0]]),
        slot_mapping=torch.tensor([8 * BLOCK_SIZE - 1, 7 * BLOCK_SIZE]),
        block_list=torch.tensor([9, 3, 40, 2, 11, 7]),
        block_groups=torch.tensor([0, 0, 0, 0, 0, 1]),
        block_starts=torch.arange(6) % 5 * BLOCK_SIZE,
        block_usage=torch.tensor([BLOCK_SIZE] * 5 + [1]),
    )
    new = torch.full((2, 1, 2, HEAD_DIM), 0.0 if is_finite else torch.nan)
    metadata = build_metadata(inputs, BLOCK_SIZE, (Visibility(window=4),), None)

    out = layer(random(2, 1, 6, HEAD_DIM, seed=4), new, new, metadata)

    assert out[0].isfinite().all()
    assert bool(out[1].isfinite().all()) == is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_scores_in_the_models_dtype_equal_plain_attention(
    dtype: torch.dtype, card: None
) -> None:
    found = decode(gaudi(), dtype)

    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(found, decode(None, torch.float32), **close)
    assert torch.equal(found[3], torch.zeros(6, HEAD_DIM))


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_softmax_reference_equals_plain_attention(
    name: str, dtype: torch.dtype, card: None
) -> None:
    found = decode(gaudi(block_softmax=name), dtype)

    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(found, decode(None, torch.float32), **close)
    assert torch.equal(found[3], torch.zeros(6, HEAD_DIM))


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        *((name, 0) for name in ("index_reduce", "scatter_reduce", "wsum", "wsum_head_amax")),
        *((name, 1) for name in ("amax", "head_amax")),
    ],
)
def test_a_softmax_reference_over_all_sequences_loses_a_sequence_with_low_scores(
    name: str, lost: int, card: None
) -> None:
    # Two sequences with a block each, whose scores differ by 200: exp(-200) is 0 in float32.
    blocks = Blocks(
        torch.tensor([[200.0], [0.0]]), torch.tensor([0, 1]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    )
    reference = REFERENCES[name]

    totals = torch.exp(blocks.highest - reference.of(blocks))

    assert int((totals < reference.least_total).sum()) == lost


def test_only_statistics_of_a_decode_are_float32(card: None) -> None:
    watch = LargestOutput(torch.float32)

    decode(gaudi(), torch.bfloat16, watch)

    # Blocks times heads.
    assert watch.most == 8 * 6


def test_float32_scores_are_written_by_the_product(card: None) -> None:
    kernels, given = gaudi(softmax_mode="fp32"), []

    class Recorder(nn.Module):
        def forward(self, input: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
            assert out is not None
            given.append((input.dtype, other.dtype, out.dtype, tuple(out.shape)))
            return out.copy_(input.float() @ other.float())

    make = kernels.make_attention

    def make_recorded() -> Any:
        attention = make()
        attention.matmul_qk = Recorder()
        return attention

    kernels.make_attention = make_recorded
    found = decode(kernels, torch.bfloat16)

    assert given == [(torch.bfloat16, torch.bfloat16, torch.float32, (8, 2, 3, 1, BLOCK_SIZE))]
    torch.testing.assert_close(found, decode(None, torch.float32), rtol=0.03, atol=0.03)


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Operators of a decode on the emulated card, counted by name, without operators that only
    create views."""
    found: Counter[str] = Counter()
    original = Segment.add

    def add(self: Segment, op: str, parts: Any, largest: int) -> None:
        if op not in rules.VIEWS:
            found[op] += 1
        original(self, op, parts, largest)

    with working(
        folder,
        device="hpu-emulator",
        dtype="bfloat16",
        execution=ExecutionConfig(mode="lazy"),
    ) as rig:
        rig.admit(0, [3, 5, 7])
        rig.prefill({0: None})
        rig.step()
        monkeypatch.setattr(Segment, "add", add)
        rig.run([0], 1)
        monkeypatch.undo()
    return found


def test_shared_inputs_of_layers_are_computed_once_per_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for layers in (1, 2):
        folder = make_tiny("llama", tmp_path / str(layers), num_hidden_layers=layers)
        counts.append(launched(folder, monkeypatch))

    found = counts[1] - counts[0]

    # The count was 50 when each layer cast scores, masks and the mapping.
    assert sum(found.values()) <= 45
    # Casts of maxima and of sums (both per block), and of the block weights back.
    assert found["aten::_to_copy"] == 3
    made_once = {"aten::eq", "aten::ge", "aten::arange", "aten::masked_fill_", "aten::zeros"}
    assert made_once & counts[0].keys() and not made_once & found.keys()
