"""Prompts with torch's flex attention, on an emulated card: whole prompts and later chunks give the
most likely tokens, and lazy modes refuse the setting."""

from pathlib import Path

import pytest
from greedy import assert_greedy_within, load_reference
from tiny_models import make_tiny
from two_prompts import PROMPTS, greedy, working

from config.errors import ConfigError
from config.execution import ExecutionConfig
from hpu.ops import gaudi_modules


@pytest.mark.parametrize("mode", ["eager", "torch-compile"])
def test_flex_attention_gives_the_most_likely_tokens(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path)
    execution = ExecutionConfig(mode=mode, flex_attention=True)
    fused = []
    monkeypatch.setattr(gaudi_modules.ModuleFusedSDPA, "forward", lambda *given: fused.append(1))

    with working(folder, device="hpu-emulator", dtype="float32", execution=execution) as rig:
        found = greedy(rig)

    assert not fused
    assert_greedy_within(1e-3, list(PROMPTS), found, load_reference(folder))


@pytest.mark.parametrize("mode", ["hpu-graphs", "lazy"])
def test_lazy_modes_refuse_flex_attention(mode: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    execution = ExecutionConfig(mode=mode, flex_attention=True)

    with (
        pytest.raises(ConfigError, match=f"mode is {mode}: flex attention needs .* torch-compile"),
        working(folder, device="hpu-emulator", dtype="float32", execution=execution),
    ):
        pass
