"""Experts compared with a loop over tokens, with the CPU's method and with the method of other
devices."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from config.model.decoder_spec import ClampedSwiGLU
from hpu.distributed.process_groups import ProcessGroup
from hpu.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from hpu.layers.mlp import GatedMLP
from hpu.layers.moe import Experts, ExpertsSpec, MoE, SparseMixer, TopKRouter
from hpu.quantization import unquantized
from hpu.quantization.registry import process_weights

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 6, 16, 24, 2
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@pytest.fixture(params=["chosen", "all"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations of experts; devices other than the CPU use the second."""
    name: str = request.param
    if name == "all":
        monkeypatch.setattr(unquantized, "_apply_to_chosen", unquantized._apply_to_all)
    return name


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def make_experts(
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
    activation: str | ClampedSwiGLU = "silu",
    has_bias: bool = False,
) -> Experts:
    experts = Experts(
        ExpertsSpec(NUM_EXPERTS, HIDDEN, INNER, activation, has_bias),
        dtype=dtype,
        device=CPU,
        group=group or ProcessGroup(),
    )
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return experts


def make_moe(
    dtype: torch.dtype, *, renormalize: bool = True, shared: GatedMLP | None = None
) -> MoE:
    gate = ReplicatedLinear(HIDDEN, NUM_EXPERTS, dtype=dtype, device=CPU)
    assert gate.weight is not None
    gate.weight.copy_(torch.randn(gate.weight.shape))
    return MoE(gate, TopKRouter(TOP_K, renormalize), make_experts(dtype), shared)


def by_token(moe: MoE, hidden: Tensor, *, renormalize: bool) -> Tensor:
    """Reference: each token separately, each expert as two products in float32."""
    gate, w13, w2 = (
        weight.float()
        for weight in (moe.gate.weight, moe.experts.w13_weight, moe.experts.w2_weight)
        if weight is not None
    )
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for place in torch.cartesian_prod(*map(torch.arange, hidden.shape[:2])).tolist():
        token = hidden[tuple(place)].float()
        shares = torch.softmax(gate @ token, dim=-1)
        chosen = shares.argsort(descending=True)[:TOP_K].tolist()
        total = float(shares[chosen].sum()) if renormalize else 1.0
        for expert in chosen:
            inner = functional.silu(w13[expert, :INNER] @ token) * (w13[expert, INNER:] @ token)
            out[tuple(place)] += shares[expert] / total * (w2[expert] @ inner)
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_experts_of_each_token_are_summed_by_their_weights(
    method: str, dtype: torch.dtype, renormalize: bool
) -> None:
    moe = make_moe(dtype, renormalize=renormalize)
    hidden = torch.randn(3, 5, HIDDEN).to(dtype)

    found = moe(hidden)

    expected = by_token(moe, hidden, renormalize=renormalize)
    assert found.dtype == dtype and expected.std() > 0.1
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected, rtol=limit, atol=limit)


def test_a_batch_that_uses_a_single_expert_equals_separate_tokens(method: str) -> None:
    experts = make_experts(torch.float32)
    hidden, ones = torch.randn(4, HIDDEN), torch.ones(4, 1)
    ids = torch.full((4, 1), 3)

    found = experts(hidden, ids, ones)

    expected = torch.cat([experts(row, ids[:1], ones[:1]) for row in hidden.split(1)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(experts(hidden, ids, ones / 2), found / 2, rtol=1e-5, atol=1e-6)


def test_an_expert_that_overflows_affects_only_tokens_that_chose_it(method: str) -> None:
    experts = make_experts(torch.float32)
    hidden, ids = torch.randn(4, HIDDEN), torch.tensor([[0, 2], [1, 3], [2, 4], [3, 1]])
    weights = torch.rand(4, TOP_K)
    expected = experts(hidden, ids, weights)
    assert experts.w2_weight is not None
    experts.w2_weight[3] = torch.inf

    found = experts(hidden, ids, weights)

    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert not found[[1, 3]].isfinite().any()


def test_experts_on_the_meta_device_have_no_data_dependent_shapes() -> None:
    meta = torch.device("meta")
    experts = Experts(
        ExpertsSpec(NUM_EXPERTS, HIDDEN, INNER, "silu"), dtype=torch.bfloat16, device=meta
    )
    hidden = torch.zeros(7, HIDDEN, dtype=torch.bfloat16, device=meta)
    chosen = torch.zeros(7, TOP_K, dtype=torch.int64, device=meta)

    out = experts(hidden, chosen, chosen.float())

    assert (out.shape, out.dtype) == (hidden.shape, hidden.dtype)


def test_the_shards_of_two_ranks_sum_to_the_whole(method: str) -> None:
    whole = make_experts(torch.float32)
    hidden, ids = torch.randn(7, HIDDEN), torch.randint(0, NUM_EXPERTS, (7, TOP_K))
    weights = torch.rand(7, TOP_K)
    assert whole.w13_weight is not None and whole.w2_weight is not None

    partial = []
    for rank in (0, 1):
        shard = make_experts(torch.float32, ProcessGroup(range(2), rank))
        assert shard.w13_weight is not None and shard.w2_weight is not None
        gate, up = (part.chunk(2, 1)[rank] for part in whole.w13_weight.chunk(2, 1))
        shard.w13_weight.copy_(torch.cat((gate, up), dim=1))
        shard.w2_weight.copy_(whole.w2_weight.chunk(2, 2)[rank])
        partial.append(shard.method.apply(shard, hidden, ids, weights))

    expected = whole(hidden, ids, weights)
    torch.testing.assert_close(partial[0] + partial[1], expected, rtol=1e-5, atol=1e-6)


def test_biases_of_the_second_product_are_added_by_one_rank(method: str) -> None:
    clamped = ClampedSwiGLU(1.702, 0.7)
    whole = make_experts(torch.float32, activation=clamped, has_bias=True)
    hidden, ids = torch.randn(7, HIDDEN), torch.randint(0, NUM_EXPERTS, (7, TOP_K))
    weights = torch.rand(7, TOP_K)

    partial = []
    for rank in (0, 1):
        group = ProcessGroup(range(2), rank)
        shard = make_experts(torch.float32, group, clamped, has_bias=True)
        # Gate and up of a feature are adjacent.
        for name, dim in (("w13_weight", 1), ("w13_bias", 1), ("w2_weight", 2)):
            getattr(shard, name).copy_(getattr(whole, name).chunk(2, dim)[rank])
        shard.w2_bias.copy_(whole.w2_bias)  # type: ignore[union-attr, arg-type]  # there are biases
        partial.append(shard.method.apply(shard, hidden, ids, weights))

    expected = whole(hidden, ids, weights)
    torch.testing.assert_close(partial[0] + partial[1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
def test_groups_are_chosen_by_their_two_best_experts(renormalize: bool) -> None:
    router = TopKRouter(
        3, renormalize, scoring="sigmoid", num_groups=4, top_groups=2, scaling_factor=2.5
    )
    logits, correction = torch.randn(50, 12), torch.randn(1, 12)

    ids, weights = router(logits, correction)

    for row, chosen, shares in zip(logits, ids.tolist(), weights, strict=True):
        scores = torch.sigmoid(row)
        by_choice = (scores + correction[0]).tolist()
        groups = sorted(
            range(4), key=lambda group: sum(sorted(by_choice[3 * group : 3 * group + 3])[-2:])
        )
        allowed = [3 * group + i for group in groups[-2:] for i in range(3)]
        best = sorted(allowed, key=by_choice.__getitem__, reverse=True)[:3]
        assert sorted(chosen) == sorted(best)
        total = scores[chosen].sum() if renormalize else 1.0
        torch.testing.assert_close(shares, scores[chosen] / total * 2.5)


def test_groups_are_chosen_by_their_best_expert() -> None:
    router = TopKRouter(2, False, num_groups=2, top_groups=1, group_scoring="max")

    # By the sum of the best two experts, the first group would win.
    ids, weights = router(torch.tensor([[0.5, 0.4, 0.6, -9.0]]))

    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.4, 0.6, -9.0]]).softmax(-1)[:, 2:])


def test_weights_whose_sum_rounds_to_zero_are_finite() -> None:
    router = TopKRouter(2, True, scoring="sigmoid")

    _, weights = router(torch.full((1, 4), -1000.0))

    assert weights.tolist() == [[0.0, 0.0]]


def test_logits_break_ties_of_equal_sigmoids() -> None:
    router = TopKRouter(1, False, scoring="sigmoid")

    ids, weights = router(torch.tensor([[20.0, 40.0, 30.0]]))

    assert (ids.tolist(), weights.tolist()) == ([[1]], [[1.0]])


def test_a_sparse_mixer_normalizes_each_expert_among_close_logits() -> None:
    router = SparseMixer(0.05)
    # Only 9.5 is within a tenth of the highest logit; 8.8 is within a tenth of 9.5.
    logits = torch.tensor([[10.0, 8.8, 9.5, -3.0]])

    ids, weights = router(logits)

    first = 1 / (1 + torch.tensor(-0.5).exp())
    second = 1 / (1 + torch.tensor(-0.7).exp())
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.stack((first, second)).unsqueeze(0))


def test_a_shared_expert_sees_every_token() -> None:
    options = {"dtype": torch.float32, "device": CPU}
    shared = GatedMLP(
        MergedColumnParallelLinear(HIDDEN, [INNER, INNER], **options),
        RowParallelLinear(INNER, HIDDEN, **options),
        "silu",
    )
    for parameter in shared.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    moe, hidden = make_moe(torch.float32, shared=shared), torch.randn(2, 3, HIDDEN)

    found = moe(hidden)

    moe.shared_experts = None
    expected = moe(hidden) + shared(hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_are_processed_after_loading() -> None:
    processed: list[object] = []

    class Recorder(unquantized.UnquantizedMoEMethod):
        def process_weights(self, layer: unquantized.ExpertsLayer) -> None:
            processed.append(layer)

    moe = make_moe(torch.float32)
    moe.experts.method = Recorder()

    num_bytes = process_weights(moe, None)

    assert (num_bytes, processed) == (0, [moe.experts])
