"""Checks of the vendor's operators for experts and for quantized weights."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from config.execution import PACKED_EXPERTS_FLAG
from hpu.gaudi_devices import PACKED_EXPERTS
from hpu.selftest.base import BFLOAT16, Card, Check, Comparison, Fallback, NotApplicable

if TYPE_CHECKING:
    from torch import Tensor

BRIDGE = "HabanaAI/gaudi-pytorch-bridge"
PLUGIN = "vllm-project/vllm-gaudi"
UNFUSED = Fallback("fused-experts", ("off",))
EXPANDED_BLOCKS = Fallback("force-channel-fp8", ("off",))
CONVERTED = Fallback("quantized-kernels", ("off",))
NUM_TOKENS = 6
HIDDEN = 32
INNER = 32
"""Sizes of the experts; a scale of 4-bit floats covers 32 inputs."""
MANY_EXPERTS = 128
"""Number of experts in a layer of Qwen3-30B-A3B."""
FP8 = 0.15
"""Tolerance of experts in FP8, which has three mantissa bits."""
CODE_BLOCK = 32
CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Layer(NamedTuple):
    """Experts on the CPU, and tokens with their selected experts."""

    hidden: "Tensor"
    """(tokens, HIDDEN)."""
    ids: "Tensor"
    """(tokens, chosen) int64."""
    shares: "Tensor"
    w13: "Tensor"
    """(experts, 2 * INNER, HIDDEN): gate, then up; interleaved for experts with biases."""
    w2: "Tensor"
    """(experts, HIDDEN, INNER)."""

    def tokens(self, card: Card) -> "dict[str, Tensor]":
        """Arguments that all forms of the operator have in common."""
        return {
            "hidden_states": card.put(self.hidden.bfloat16()),
            "expert_routing_table": card.put(self.ids),
            "router_weights": card.put(self.shares.bfloat16()),
        }

    def expected(self, card: Card) -> "Tensor":
        """Output of the layer with the activation silu, computed on the CPU."""
        silu = card.torch.nn.functional.silu
        out: Tensor = card.torch.zeros(self.hidden.shape)
        for token, hidden in enumerate(self.hidden):
            for number, share in zip(self.ids[token].tolist(), self.shares[token], strict=True):
                gate, up = (self.w13[number] @ hidden).chunk(2)
                out[token] += share * (self.w2[number] @ (silu(gate) * up))
        return out


def _layer(card: Card, num_experts: int, chosen: int) -> Layer:
    generator = card.torch.Generator().manual_seed(5)
    return Layer(
        card.values(NUM_TOKENS, HIDDEN, seed=1),
        card.torch.rand(NUM_TOKENS, num_experts, generator=generator).topk(chosen).indices,
        card.values(NUM_TOKENS, chosen, seed=4).abs(),
        card.values(num_experts, 2 * INNER, HIDDEN, seed=2) / 8,
        card.values(num_experts, HIDDEN, INNER, seed=3) / 8,
    )


def _own_layer(card: Card) -> Layer:
    return _layer(card, card.shape.num_experts, card.shape.experts_per_token)


def _fused(card: Card, layer: Layer) -> "Tensor":
    found: Tensor = card.torch.ops.hpu.mixture_of_experts(
        **layer.tokens(card),
        w12=list(card.put(layer.w13.bfloat16())),
        w3=list(card.put(layer.w2.bfloat16())),
        permuted_weights=True,
        activation="silu",
        experts_min=0,
        experts_max=len(layer.w13) - 1,
    )
    return found


def experts(card: Card) -> Iterator[Comparison]:
    layer = _own_layer(card)
    yield Comparison("experts", _fused(card, layer), layer.expected(card), BFLOAT16)


def many_experts(card: Card) -> Iterator[Comparison]:
    limit = card.max_experts
    layer = _layer(card, limit or max(MANY_EXPERTS, card.shape.num_experts), 4)
    what = f"{len(layer.w13)} experts in a call"
    yield Comparison(what, _fused(card, layer), layer.expected(card), BFLOAT16)


def experts_with_bias(card: Card) -> Iterator[Comparison]:
    card.need_kernel("mixture_of_experts.bias_fused_weights")
    layer, biases = _with_biases(card)
    given = [list(card.put(host.bfloat16())) for host in (layer.w13, layer.w2, *biases)]
    found = card.torch.ops.hpu.mixture_of_experts.bias_fused_weights(
        **layer.tokens(card),
        w12=given[0],
        w3=given[1],
        w12_bias=given[2],
        w3_bias=given[3],
        permuted_weights=True,
        experts_min=0,
        experts_max=len(layer.w13) - 1,
    )
    expected = _clamped(card, layer, biases)
    # A high tolerance: bfloat16 terms of the sums cancel each other.
    yield Comparison("experts with biases, as in gpt-oss", found, expected, 0.15)


def packed_experts(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    overload = PACKED_EXPERTS.partition(".")[2]
    if not hasattr(torch.ops.hpu.mixture_of_experts, overload):
        raise NotApplicable(f"this release has no {PACKED_EXPERTS}")
    layer, biases = _with_biases(card)
    # Each weight contains every code and two scales.
    packed = [_codes(card, weight.shape, seed) for seed, weight in ((8, layer.w13), (9, layer.w2))]
    layer = layer._replace(w13=packed[0][2], w2=packed[1][2])
    codes, scales = ([list(card.put(pack[part])) for pack in packed] for part in (0, 1))
    given = [list(card.put(host.bfloat16())) for host in biases]
    found = getattr(torch.ops.hpu.mixture_of_experts, overload)(
        **layer.tokens(card),
        w12=codes[0],
        w3=codes[1],
        w12_bias=given[0],
        w3_bias=given[1],
        d_scale_w12=scales[0],
        d_scale_w3=scales[1],
        block_size=CODE_BLOCK,
        permuted_weights=True,
        experts_min=0,
        experts_max=len(layer.w13) - 1,
        is_fp4=True,
        alpha=1.702,
        limit=7.0,
    )
    yield Comparison("experts in 4-bit floats", found, _clamped(card, layer, biases), 0.15)


def _with_biases(card: Card) -> "tuple[Layer, tuple[Tensor, Tensor]]":
    layer = _own_layer(card)
    count = len(layer.w13)
    biases = card.values(count, 2 * INNER, seed=6), card.values(count, HIDDEN, seed=7)
    # Scaled so that the activation's limit applies.
    return layer._replace(hidden=layer.hidden * 4), biases


def _clamped(card: Card, layer: Layer, biases: "tuple[Tensor, Tensor]") -> "Tensor":
    """Output with biases and the activation of gpt-oss, computed on the CPU; gate and up are
    interleaved."""
    torch = card.torch
    out: Tensor = torch.zeros(layer.hidden.shape)
    for token, hidden in enumerate(layer.hidden):
        for number, share in zip(layer.ids[token].tolist(), layer.shares[token], strict=True):
            both = layer.w13[number] @ hidden + biases[0][number]
            gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            out[token] += share * (layer.w2[number] @ inner + biases[1][number])
    return out


def _codes(card: Card, shape: "tuple[int, ...]", seed: int) -> "tuple[Tensor, Tensor, Tensor]":
    """Codes (experts, out, in / 2) uint8, scales (experts, out, in / 32) uint8, and the dequantized
    weights (experts, out, in)."""
    torch = card.torch
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=generator)
    exponents = torch.randint(-5, -3, (*shape[:-1], shape[-1] // CODE_BLOCK), generator=generator)
    sizes = torch.tensor(CODE_VALUES)[codes & 7]
    values = torch.where(codes > 7, -sizes, sizes).view(*exponents.shape, CODE_BLOCK)
    weights = (values * torch.exp2(exponents.float()).unsqueeze(-1)).view(shape)
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return packed, (exponents + 127).to(torch.uint8), weights


def fp8(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    largest = card.generation.fp8_max
    given = torch.tensor([0.5, -3.0, 100.0, largest, -largest, largest * 1.5, -10_000.0, 0.0])
    unit = card.put(torch.ones(()))
    found = torch.ops.hpu.cast_from_fp8(_cast(card, given, unit), unit, torch.bfloat16)
    expected = given.clamp(-largest, largest)
    # Tolerance for three mantissa bits.
    yield Comparison(f"values up to {largest:g} in FP8", found, expected, 2.0**-4)


def fp8_matmuls(card: Card) -> Iterator[Comparison]:
    """FP8 matmuls with weight scales per output channel, and with input scales per token or per
    tensor."""
    torch = card.torch
    rows, weight = _exact(card, 5, 32, seed=1), _exact(card, 8, 32, seed=2)
    multipliers = torch.tensor([1.0, 2.0, 4.0, 2.0, 1.0]).unsqueeze(1)
    scales = torch.tensor([0.5, 1.0, 2.0, 0.25] * 2)
    codes = card.put(weight.to(torch.float8_e4m3fn))
    expected = rows @ (weight * scales.unsqueeze(1)).t()
    for what, multiplier in (("a scale per token", multipliers), ("one scale", torch.ones(1))):
        quantized = _cast(card, rows, card.put(multiplier))
        found = torch.ops.hpu.fp8_gemm_v2(
            *(quantized, False, codes, True, None, torch.bfloat16),
            *(card.put(1 / multiplier), card.put(scales), None, False),
        )
        yield Comparison(f"FP8 product with {what}", found, expected, BFLOAT16)


def fp8_experts(card: Card) -> Iterator[Comparison]:
    """FP8 experts in both forms: the operator quantizes the inputs of the second matmul dynamically
    per token, or with a given scale per expert."""
    torch = card.torch
    card.need_kernel("mixture_of_experts.fp8_fused_weights")
    layer = _own_layer(card)
    count = len(layer.w13)
    layer = layer._replace(
        hidden=_exact(card, *layer.hidden.shape, seed=1),
        w13=_exact(card, *layer.w13.shape, seed=2) / 8,
        w2=_exact(card, *layer.w2.shape, seed=3) / 8,
    )
    scale = card.put(torch.full((NUM_TOKENS, 1), 0.5))
    weights = {
        "w12": list(card.put((layer.w13 * 8).to(torch.float8_e4m3fn))),
        "w3": list(card.put((layer.w2 * 8).to(torch.float8_e4m3fn))),
        "d_scale_w12": list(card.put(torch.full((count, 2 * INNER), 1 / 8))),
        "d_scale_w3": list(card.put(torch.full((count, HIDDEN), 1 / 8))),
    }
    tokens = layer.tokens(card)
    form = {
        "permuted_weights": True,
        "activation": "silu",
        "experts_min": 0,
        "experts_max": count - 1,
    }
    forms = torch.ops.hpu.mixture_of_experts
    expected = layer.expected(card)
    tokens["hidden_states"] = _cast(card, layer.hidden, card.put(torch.full((1,), 2.0)))
    found = forms.fp8_fused_weights_dynamic(
        **tokens, **weights, **form, d_scale_hidden_states=scale
    )
    yield Comparison("FP8 experts, inputs quantized by token", found, expected, FP8)
    inner = list(card.put(torch.full((count,), 0.5)))
    found = forms.fp8_fused_weights(
        **tokens,
        **weights,
        **form,
        d_scale_hidden_states=card.put(torch.tensor(0.5)),
        d_scale_intermediate_hidden_states=inner,
    )
    yield Comparison("FP8 experts with static scales", found, expected, FP8)


def _exact(card: Card, *shape: int, seed: int) -> "Tensor":
    """Multiples of 1/4 between -2 and 2: exact in FP8, also after multiplication with the checks'
    scales."""
    found: Tensor = card.values(*shape, seed=seed).mul(4).round() / 4
    return found


def _cast(card: Card, rows: "Tensor", multiplier: "Tensor") -> "Tensor":
    """`rows` times `multiplier` (a tensor on the card), in FP8."""
    torch = card.torch
    found: Tensor = torch.ops.hpu.cast_to_fp8_v2(
        card.put(rows.bfloat16()), multiplier, False, False, torch.float8_e4m3fn
    )[0]
    return found


def uint4(card: Card) -> Iterator[Comparison]:
    values, scales, zeros = _uint4(card)
    groups = card.torch.arange(16) // 8
    found = card.torch.ops.hpu.convert_from_uint4(
        *_packed(card, values, scales, zeros), card.torch.bfloat16
    )
    yield _weights(found, values, scales, zeros, groups)


def uint4_groups(card: Card) -> Iterator[Comparison]:
    card.need_kernel("convert_from_uint4.g_idx")
    values, scales, zeros = _uint4(card)
    groups = card.torch.arange(16) * 5 % 16 // 8
    found = card.torch.ops.hpu.convert_from_uint4(
        *_packed(card, values, scales, zeros), card.torch.bfloat16, card.put(groups.int())
    )
    yield _weights(found, values, scales, zeros, groups)


def _uint4(card: Card) -> "tuple[Tensor, Tensor, Tensor]":
    """Values (in, out) below 16, and scales and zero points (groups, out), for two groups of 8
    inputs."""
    torch = card.torch
    values = torch.arange(16 * 24).view(16, 24) * 7 % 16
    zeros = torch.arange(2 * 24).view(2, 24) * 5 % 16
    return values, card.values(2, 24, seed=1).abs() + 0.125, zeros


def _packed(
    card: Card, values: "Tensor", scales: "Tensor", zeros: "Tensor"
) -> "tuple[Tensor, Tensor, Tensor]":
    """Operands on the card: eight values in an int32, the first in the lowest bits."""
    shifts = card.torch.arange(8) * 4

    def pack(table: "Tensor") -> "Tensor":
        return card.put((table.view(len(table), -1, 8) << shifts).sum(-1).int())

    return pack(values), card.put(scales.bfloat16()), pack(zeros)


def _weights(
    found: "Tensor", values: "Tensor", scales: "Tensor", zeros: "Tensor", groups: "Tensor"
) -> Comparison:
    expected = (values - zeros[groups]).float() * scales[groups]
    return Comparison("4-bit weights", found, expected, BFLOAT16)


CHECKS = (
    Check(
        name="experts",
        assumption="mixture_of_experts takes fused_weights by keywords, and int64 ids",
        source=f"{BRIDGE}, the kernel mixture_of_experts",
        program=experts,
        fallbacks=(UNFUSED,),
        is_quick=True,
    ),
    Check(
        name="experts-in-a-call",
        assumption="one call of mixture_of_experts takes all experts of a layer",
        source=f"{PLUGIN}, vllm_gaudi/extension/ops.py (a comment)",
        program=many_experts,
        fallbacks=(UNFUSED,),
        needs=("experts",),
    ),
    Check(
        name="experts-with-bias",
        assumption="bias_fused_weights computes the activation of gpt-oss",
        source=f"{PLUGIN}, vllm_gaudi/extension/ops.py (VllmMixtureOfExpertsOp)",
        program=experts_with_bias,
        fallbacks=(UNFUSED,),
        is_quick=True,
    ),
    Check(
        name="packed-experts",
        assumption="the low half of a byte is the first 4-bit float",
        source=f"{BRIDGE}, the test of {PACKED_EXPERTS}",
        program=packed_experts,
        fallbacks=(Fallback(PACKED_EXPERTS_FLAG, ("off",)),),
    ),
    Check(
        name="fp8-casts",
        assumption="FP8 ends at 240 (Gaudi 2) or 448, and casts saturate",
        source=f"{PLUGIN}, vllm_gaudi/extension/ops.py",
        program=fp8,
        fallbacks=(
            EXPANDED_BLOCKS,
            CONVERTED,
            Fallback("kv-cache-dtype", ("auto", "bfloat16", "float16")),
        ),
        is_quick=True,
    ),
    Check(
        name="fp8-products",
        assumption="fp8_gemm_v2 takes scales per token and output",
        source=f"{BRIDGE}, the test of fp8_gemm_v2",
        program=fp8_matmuls,
        fallbacks=(EXPANDED_BLOCKS, CONVERTED),
        needs=("fp8-casts",),
    ),
    Check(
        name="fp8-experts",
        assumption="mixture_of_experts takes FP8 with scales that dequantize",
        source=f"{PLUGIN}, vllm_gaudi/extension/ops.py",
        program=fp8_experts,
        fallbacks=(EXPANDED_BLOCKS, CONVERTED),
        needs=("fp8-casts",),
    ),
    Check(
        name="uint4",
        assumption="convert_from_uint4 takes the lowest value first",
        source=f"{BRIDGE}, the test of convert_from_uint4",
        program=uint4,
        fallbacks=(CONVERTED,),
    ),
    Check(
        name="uint4-groups",
        assumption="convert_from_uint4 takes a g_idx",
        source=f"{PLUGIN}, vllm_gaudi/ops/hpu_gptq.py",
        program=uint4_groups,
        fallbacks=(CONVERTED,),
        needs=("uint4",),
    ),
)
