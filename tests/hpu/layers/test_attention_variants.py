"""Windows, chunks, soft caps, sinks and ALiBi in every kind of launch, with plain operations and
the kernels of each device, compared with a float64 softmax."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from emulated import emulated
from torch import Tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from config.model.decoder_spec import TemperatureTuning, alibi_slopes
from hpu.layers.attention import AttentionKind, HeadShape, PagedAttention
from hpu.layers.metadata import (
    FULL,
    AttentionInputs,
    DecodeAttentionInputs,
    FeatureInputs,
    PrefillAttentionInputs,
    TextAttentionInputs,
    Visibility,
    build_metadata,
    distinct,
    make_rings,
    with_query_scale,
)
from hpu.ops.kernels import AttentionForm, SliceSizes
from hpu.ops.torch_kernels import TorchKernels

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 4, 64, 6, 2, 8
SCALE = 0.7


class Variant(NamedTuple):
    visibility: Visibility = FULL
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    has_rings: bool = False
    """Whether the cache is a ring of the window's size."""

    @property
    def sink_logits(self) -> Tensor | None:
        return torch.linspace(-2, 3, HEADS) if self.sinks else None

    @property
    def slopes(self) -> Tensor | None:
        return torch.tensor(alibi_slopes(HEADS)) if self.alibi else None


VARIANTS = {
    "full": Variant(),
    "window": Variant(Visibility(window=7)),
    "chunk of whole blocks": Variant(Visibility(chunk=8)),
    "chunk that ends in a block": Variant(Visibility(chunk=6)),
    "chunk smaller than a block": Variant(Visibility(chunk=3)),
    "soft cap": Variant(soft_cap=2.0),
    "sinks": Variant(sinks=True),
    "ALiBi": Variant(alibi=True),
    "window, soft cap, sinks": Variant(Visibility(window=7), 2.0, sinks=True),
    # Not combined with sinks: with ALiBi the result would depend on the reference position of the
    # bias.
    "chunk, soft cap, ALiBi": Variant(Visibility(chunk=6), 2.0, alibi=True),
    "window in rings, sinks": Variant(Visibility(window=7), sinks=True, has_rings=True),
    "chunk in rings, ALiBi": Variant(Visibility(chunk=8), alibi=True, has_rings=True),
}


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """The emulator, with operators that also accept CPU tensors."""
    with emulated(lazy=False, generation="gaudi3", runs_on_host=True), torch.inference_mode():
        yield


def gaudi(**settings: Any) -> Any:
    from hpu.ops.gaudi import GaudiKernels

    return GaudiKernels(**settings)


def flex() -> Any:
    from hpu.ops.gaudi_flex import FlexKernels

    return FlexKernels(gaudi(fused_sdpa=False))


IMPLEMENTATIONS = {
    "plain": lambda: None,
    "cuda": TorchKernels,
    "fused": lambda: gaudi(fused_sdpa=True, block_softmax="adjustment"),
    "sliced": lambda: gaudi(fused_sdpa=True, slices=SliceSizes(1, 8)),
    "unfused": lambda: gaudi(fused_sdpa=False),
    "flex": lambda: flex(),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sequence(NamedTuple):
    """Queries, keys and values (tokens, heads, D) of all tokens, and block ids."""

    query: Tensor
    key: Tensor
    value: Tensor
    blocks: Tensor


def sequences(lengths: list[int]) -> list[Sequence]:
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
    found = []
    for index, length in enumerate(lengths):
        count = -(-length // BLOCK_SIZE)
        heads = [
            random(length, heads, HEAD_DIM, seed=10 * index + heads + kind)
            for kind, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        ]
        found.append(Sequence(*heads, order[:count]))
        order = order[count:]
    return found


def expected(sequence: Sequence, first: int, variant: Variant) -> Tensor:
    """Reference output for the tokens from `first` on, (tokens, heads, D), computed from the
    definitions."""
    query = sequence.query[first:].double()
    key, value = (
        item.double().repeat_interleave(HEADS // KV_HEADS, 1)
        for item in (sequence.key, sequence.value)
    )
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    if variant.soft_cap is not None:
        scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)
    queries = torch.arange(first, len(key)).unsqueeze(1)
    keys = torch.arange(len(key))
    if variant.slopes is not None:
        scores = scores + variant.slopes.double().view(-1, 1, 1) * keys
    visible = keys <= queries
    window, chunk = variant.visibility
    if window is not None:
        visible &= queries - keys < window
    if chunk is not None:
        visible &= queries // chunk == keys // chunk
    scores = scores.masked_fill(~visible, -torch.inf)
    if variant.sink_logits is not None:
        sinks = variant.sink_logits.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def attend(
    variant: Variant,
    kernels: Any,
    inputs: AttentionInputs,
    cached: list[tuple[Sequence, int]],
    heads: list[Tensor],
) -> Tensor:
    """Output of `heads`, each (B, Q, heads, D). `cached`: each sequence with its number of cached
    tokens; all other slots hold large numbers. The model also has layers of other kinds."""
    kinds = distinct((Visibility(window=5), variant.visibility, FULL))
    kind = AttentionKind(
        visibility=variant.visibility,
        index=kinds.index(variant.visibility),
        soft_cap=variant.soft_cap,
    )
    layer = PagedAttention(HeadShape(HEADS, KV_HEADS, HEAD_DIM, SCALE), torch.float32, kind)
    form: AttentionForm | None = None
    if kernels is not None:
        layer.impl = kernels.make_attention()
        has_options = variant.sinks or variant.soft_cap is not None
        form = kernels.attention_form(torch.float32, has_score_options=has_options)
    num_rings = NUM_RINGS if variant.has_rings else 0
    shapes = layer.kv_cache_spec.shapes(NUM_BLOCKS + 1, BLOCK_SIZE, num_rings)
    caches = [torch.full(shape, 1e3) for shape in shapes]
    for index, (sequence, count) in enumerate(cached):
        slots = slots_of(sequence, 0, count)
        if num_rings:
            slots = ring_slots(index, torch.arange(count), len(caches[0]) // num_rings)
        # If two tokens share a slot, the later token stays.
        for cache, tokens in zip(caches, (sequence.key, sequence.value), strict=True):
            for slot, token in zip(slots, tokens, strict=False):
                cache[slot] = token
    layer.bind_caches(*caches, BLOCK_SIZE, num_rings)
    if not isinstance(inputs, TextAttentionInputs):
        rows = (
            inputs.slot_mapping if isinstance(inputs, DecodeAttentionInputs) else inputs.query_lens
        )
        indices = torch.arange(len(rows))
        indices = torch.where(indices < len(cached), NUM_RINGS - 2 - indices, NUM_RINGS - 1)
        inputs = inputs._replace(features=FeatureInputs(indices))
    metadata = build_metadata(
        inputs,
        BLOCK_SIZE,
        kinds,
        form,
        alibi_slopes=variant.slopes,
        rings=make_rings(kinds, BLOCK_SIZE, num_rings),
    )
    query, key, value = heads
    return layer(query, key, value, metadata, variant.sink_logits)


def ring_slots(index: int, positions: Tensor, size: int) -> Tensor:
    """Slots of positions in the ring (`size` slots) of the sequence with this index in its
    launch."""
    return (NUM_RINGS - 2 - index) * size + positions % size


def slots_of(sequence: Sequence, first: int, end: int) -> Tensor:
    places = torch.arange(first, end)
    return sequence.blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE


def check(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


NUM_RINGS = 12
NEW, CACHED = [5, 23, 1, 9], [48, 0, 3, 31]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("has_context", [True, False], ids=["context", "new"])
def test_prefills_equal_the_float64_reference(
    has_context: bool, make: Any, variant: Variant
) -> None:
    cached = CACHED if has_context else [0] * len(NEW)
    rows = sequences([sum(pair) for pair in zip(NEW, cached, strict=True)])
    length, blocks = max(NEW) + 2, 14 if has_context else 0
    heads = [torch.zeros(len(rows), length, count, HEAD_DIM) for count in (6, 2, 2)]
    positions = torch.zeros(len(rows), length).long()
    slots = torch.full((len(rows), length), NUM_BLOCKS * BLOCK_SIZE)
    table = torch.full((len(rows), blocks), NUM_BLOCKS)
    for index, (row, new, first) in enumerate(zip(rows, NEW, cached, strict=True)):
        for given, tokens in zip(heads, row, strict=False):
            given[index, :new] = tokens[first:]
        positions[index, :new] = torch.arange(first, first + new)
        slots[index, :new] = slots_of(row, first, first + new)
        if has_context:
            used = row.blocks[: -(-first // BLOCK_SIZE)]
            table[index, : len(used)] = used
    inputs = PrefillAttentionInputs(
        positions, slots.view(-1), torch.tensor(NEW), torch.tensor(cached), table.view(-1)
    )

    found = attend(variant, make(), inputs, list(zip(rows, cached, strict=True)), heads)

    for out, row, new, first in zip(found, rows, NEW, cached, strict=True):
        check(out[:new], expected(row, first, variant))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_prompts_in_one_row_equal_the_float64_reference(make: Any, variant: Variant) -> None:
    new, cached = [5, 11, 2], [9, 0, 14]
    rows = sequences([sum(pair) for pair in zip(new, cached, strict=True)])
    pad, pad_block = 3, [NUM_BLOCKS] * 2
    heads = []
    for kind, count in enumerate((HEADS, KV_HEADS, KV_HEADS)):
        parts = [row[kind][first:] for row, first in zip(rows, cached, strict=True)]
        heads.append(torch.cat((*parts, torch.zeros(pad, count, HEAD_DIM))).unsqueeze(0))
    slots = [slots_of(row, first, len(row.key)) for row, first in zip(rows, cached, strict=True)]
    used = [row.blocks[: -(-first // BLOCK_SIZE)] for row, first in zip(rows, cached, strict=True)]
    ranges = [torch.arange(first, first + n) for n, first in zip(new, cached, strict=True)]
    inputs = PrefillAttentionInputs(
        positions=torch.cat((*ranges, torch.zeros(pad).long())).unsqueeze(0),
        slot_mapping=torch.cat((*slots, torch.full((pad,), NUM_BLOCKS * BLOCK_SIZE))),
        query_lens=torch.tensor([*new, 0]),
        context_lens=torch.tensor([*cached, 0]),
        block_list=torch.cat((*used, torch.tensor(pad_block))),
    )

    found = attend(variant, make(), inputs, list(zip(rows, cached, strict=True)), heads)

    for out, row, first in zip(found[0].split([*new, pad]), rows, cached, strict=False):
        check(out, expected(row, first, variant))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("lengths", [[30], [19, 1, 24, 13]], ids=["one", "several"])
def test_decodes_equal_the_float64_reference(
    lengths: list[int], make: Any, variant: Variant
) -> None:
    rows, pad_rows, pad_blocks = sequences(lengths), len(lengths) - 1, 2
    pad_slot = torch.full((pad_rows,), NUM_BLOCKS * BLOCK_SIZE)
    heads = [
        torch.cat((*(row[kind][-1:] for row in rows), torch.zeros(pad_rows, count, HEAD_DIM)))
        for kind, count in enumerate((HEADS, KV_HEADS, KV_HEADS))
    ]
    columns = [
        (int(block), index, start * BLOCK_SIZE, min(BLOCK_SIZE, length - start * BLOCK_SIZE))
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True))
        for start, block in enumerate(row.blocks)
    ]
    columns += [(NUM_BLOCKS, -1, 0, 1)] * pad_blocks
    last = torch.tensor([*(length - 1 for length in lengths), *[0] * pad_rows])
    slots = [slots_of(row, len(row.key) - 1, len(row.key)) for row in rows]
    inputs = DecodeAttentionInputs(
        last.unsqueeze(1), torch.cat((*slots, pad_slot)), *torch.tensor(columns).t().contiguous()
    )

    cached = [(row, length - 1) for row, length in zip(rows, lengths, strict=True)]
    found = attend(variant, make(), inputs, cached, [head.unsqueeze(1) for head in heads])

    for out, row, length in zip(found, rows, lengths, strict=False):
        check(out.unsqueeze(0), expected(row, length - 1, variant))
    assert found.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_whole_texts_equal_the_float64_reference(make: Any, variant: Variant) -> None:
    lengths = [17, 4]
    rows = sequences(lengths)
    heads = [torch.zeros(2, 19, count, HEAD_DIM) for count in (HEADS, KV_HEADS, KV_HEADS)]
    for index, row in enumerate(rows):
        for given, tokens in zip(heads, row, strict=False):
            given[index, : len(tokens)] = tokens
    zeros = torch.zeros(2, 19).long()

    inputs = TextAttentionInputs(zeros, zeros, torch.tensor(lengths))
    found = attend(variant, make(), inputs, [], heads)

    for out, row in zip(found, rows, strict=True):
        check(out[: len(row.key)], expected(row, 0, variant))


@pytest.mark.parametrize(
    ("chunk", "blocks"),
    # The largest count of tokens before the query in its chunk is chunk - 1.
    [(8, 2), (6, 3), (40, 10)],
)
def test_a_chunk_reads_the_blocks_that_can_be_visible(chunk: int, blocks: int) -> None:
    inputs = PrefillAttentionInputs(
        positions=torch.zeros(2, 5, dtype=torch.long),
        slot_mapping=torch.zeros(10, dtype=torch.long),
        query_lens=torch.tensor([5, 5]),
        context_lens=torch.tensor([46, 0]),
        block_list=torch.arange(24),
    )

    full, chunked = build_metadata(inputs, BLOCK_SIZE, (FULL, Visibility(chunk=chunk))).block_lists  # type: ignore[union-attr]

    assert (len(full), len(chunked)) == (24, 2 * blocks)
    first = min(46 // chunk * chunk // BLOCK_SIZE, 12 - blocks)
    assert chunked[:blocks].tolist() == list(range(first, first + blocks))


def test_a_mask_is_built_for_each_kind_of_visibility_in_the_model() -> None:
    inputs = PrefillAttentionInputs(
        positions=torch.zeros(1, 9, dtype=torch.long),
        slot_mapping=torch.zeros(9, dtype=torch.long),
        query_lens=torch.tensor([9]),
        context_lens=torch.tensor([0]),
        block_list=torch.zeros(0, dtype=torch.long),
    )
    kinds = distinct([Visibility(4), FULL, Visibility(6), Visibility(4), Visibility(chunk=3)])

    masks = build_metadata(inputs, BLOCK_SIZE, kinds).masks

    assert kinds == (Visibility(4), FULL, Visibility(6), Visibility(chunk=3))
    sums = [None if mask is None else int((mask == 0).sum()) for mask in masks]
    assert sums == [4 * 9 - 6, None, 6 * 9 - 15, 3 * 6]


@pytest.mark.parametrize("num_heads", [1, 6, 8, 40])
def test_alibi_slopes_equal_mpt(num_heads: int) -> None:
    theirs = build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0]

    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), -theirs)


def test_the_query_scale_grows_with_the_position() -> None:
    inputs = PrefillAttentionInputs(
        positions=torch.tensor([[6, 7, 15, 0]]),
        slot_mapping=torch.zeros(4, dtype=torch.long),
        query_lens=torch.tensor([3]),
        context_lens=torch.tensor([6]),
        block_list=torch.zeros(0, dtype=torch.long),
    )

    metadata = with_query_scale(
        build_metadata(inputs, BLOCK_SIZE, (FULL,)),
        inputs.positions,
        TemperatureTuning(0.1, 8, offset=1),
    )

    assert metadata.query_scale is not None
    expected = 1 + 0.1 * torch.log(torch.tensor([1.0, 2.0, 3.0, 1.0]))
    torch.testing.assert_close(metadata.query_scale.flatten(), expected)
