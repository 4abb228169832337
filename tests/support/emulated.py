"""An emulated card for a single test, with its own environment; torch is restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from config.execution import EMULATED_RELEASE
from hpu.emulator import settings
from hpu.emulator.install import Emulator, install
from hpu.emulator.settings import EmulatorConfig
from hpu.ops.products import matmul_by_element, matmul_in_parts

WRITES_FLOAT32 = "1.24.1"
"""A release whose product of bfloat16 can write float32."""

SPLIT_PRODUCTS = [
    pytest.param(matmul_in_parts, WRITES_FLOAT32, id="parts"),
    pytest.param(matmul_by_element, EMULATED_RELEASE, id="elements"),
]
"""Products of float32 on a card that multiplies no float32 matrices, each with a release that uses
it."""


@contextmanager
def emulated(
    lazy: bool = True, variables: dict[str, str] | None = None, **config: Any
) -> Iterator[Emulator]:
    """Install and import the emulator; `config` goes to EmulatorConfig."""
    environment = {"PT_HPU_LAZY_MODE": "1" if lazy else "0", **(variables or {})}
    with install(EmulatorConfig(**config), environment) as emulator:
        import habana_frameworks.torch  # noqa: F401

        yield emulator


def change_cards(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Apply `changes` to the EmulatorConfig of cards that back ends install."""

    def changed(**given: Any) -> EmulatorConfig:
        return EmulatorConfig(**{**given, **changes})

    monkeypatch.setattr(settings, "EmulatorConfig", changed)
