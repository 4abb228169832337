"""An emulated card for one test: its own environment, and torch as it was afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hpu.emulator import settings
from hpu.emulator.install import Emulator, install
from hpu.emulator.settings import EmulatorConfig


@contextmanager
def emulated(
    lazy: bool = True, variables: dict[str, str] | None = None, **config: Any
) -> Iterator[Emulator]:
    """The stand-in in place and imported; `config` goes to EmulatorConfig."""
    environment = {"PT_HPU_LAZY_MODE": "1" if lazy else "0", **(variables or {})}
    with install(EmulatorConfig(**config), environment) as emulator:
        import habana_frameworks.torch  # noqa: F401

        yield emulator


def change_cards(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Give the emulated cards that a back end installs `changes` of their EmulatorConfig."""

    def changed(**given: Any) -> EmulatorConfig:
        return EmulatorConfig(**{**given, **changes})

    monkeypatch.setattr(settings, "EmulatorConfig", changed)
