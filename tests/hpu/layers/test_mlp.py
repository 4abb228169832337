"""Activations compared with transformers' activations."""

import pytest
import torch
from transformers.activations import ACT2FN

from hpu.layers.mlp import ACTIVATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_equals_transformers_activation_of_that_name(name: str) -> None:
    x = torch.linspace(-4, 4, 33)

    found = ACTIVATIONS[name](x)

    torch.testing.assert_close(found, ACT2FN[name](x), rtol=1e-6, atol=1e-6)
