"""Result dtypes and arguments of fused kernels, as the bridge's wrappers have them."""

from typing import Any

import pytest
import torch
from emulated import emulated


def test_a_norm_with_a_weight_of_another_dtype_is_float32() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        x = torch.ones(2, 8, dtype=torch.bfloat16).to("hpu")

        assert FusedRMSNorm.apply(x, torch.ones(8).to("hpu"), 1e-5).dtype == torch.float32
        assert FusedRMSNorm.apply(x, x[0].clone(), 1e-5).dtype == torch.bfloat16


def test_a_rotation_by_float32_angles_is_float32() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import apply_rotary_pos_emb

        narrow = torch.ones(2, 1, 8, dtype=torch.bfloat16).to("hpu")
        wide = narrow.float()

        assert apply_rotary_pos_emb(narrow, wide, wide, None, 0).dtype == torch.float32
        assert apply_rotary_pos_emb(wide, narrow, narrow, None, 0).dtype == torch.float32
        assert apply_rotary_pos_emb(narrow, narrow, narrow, None, 0).dtype == torch.bfloat16


def test_a_rotation_takes_no_names_and_no_plain_number_as_its_mode() -> None:
    with emulated():
        from habana_frameworks.torch.hpex import kernels

        rotate: Any = kernels.apply_rotary_pos_emb
        x = torch.ones(2, 1, 8).to("hpu")

        with pytest.raises(TypeError):
            rotate(x, cos=x, sin=x)
        with pytest.raises(AttributeError):
            rotate(x, x, x, None, 0, 0)


def test_fused_attention_takes_a_mask_for_each_query_head() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.randn(1, 4, 3, 3, generator=generator)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        found = FusedSDPA.apply(*(given.to("hpu") for given in (q, k, v, mask)))

        torch.testing.assert_close(found.cpu(), wanted)
