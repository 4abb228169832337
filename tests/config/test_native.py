"""Panics of native extensions become exceptions; other exceptions do not change."""

import asyncio

import pytest
from native_panics import panic

from config.native import NativePanic, panics_as_errors


def test_a_panic_becomes_an_exception() -> None:
    with pytest.raises(NativePanic, match="panicked: Onig"), panics_as_errors():
        panic()


@pytest.mark.parametrize(
    "kind",
    [
        KeyboardInterrupt,
        SystemExit,
        GeneratorExit,
        asyncio.CancelledError,
        ValueError,
        StopIteration,
    ],
)
def test_other_exceptions_are_raised_unchanged(kind: type[BaseException]) -> None:
    error = kind()

    with pytest.raises(kind) as raised, panics_as_errors():
        raise error

    assert raised.value is error
