"""RMS norms compared with the formula."""

import pytest
import torch

from hpu.ops.norm import mirrored_rms_norm, rms_norm


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 100.0])
def test_both_implementations_equal_the_formula(spread: float) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = (torch.randn(3, 2, 64, generator=random) + 0.5) * spread
    weight = torch.randn(64, generator=random)
    expected = hidden / torch.sqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    plain = rms_norm(hidden, weight, 1e-5)
    mirrored = mirrored_rms_norm(
        hidden, torch.tensor([[1.0], [-1.0]]), torch.stack((weight, weight)), 1e-5
    )

    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mirrored, expected, rtol=1e-5, atol=1e-6)
