"""Quantized checkpoints over HTTP."""

import contextlib
import json
from pathlib import Path

import pytest
from live import LiveServer, running
from quantized_checkpoints import FORMATS, as_auto_round, make_quantized, replace_tensor

from gaudiserve import LLM, SamplingParams

QUESTION = "Name three colours."
ON_CPU = ("--device=cpu", "--max-model-len=128", "--max-num-seqs=2")
# Few buckets, so that warm-up is short.
ON_CARD = (
    *("--device=hpu-emulator", "--max-model-len=128", "--max-num-seqs=2", "--block-size=32"),
    *("--num-gpu-blocks-override=8", "--bucketing-strategy=linear", "--max-num-batched-tokens=64"),
    *("--max-prefill-batch=1", "--prompt-query-bucket-min=64", "--prompt-query-bucket-step=64"),
    *("--prompt-ctx-bucket-step=4", "--prompt-ctx-bucket-max=4", "--decode-bs-bucket-min=2"),
    *("--decode-block-bucket-min=8", "--decode-block-bucket-step=8", "--decode-block-bucket-max=8"),
)


def answer(server: LiveServer) -> str:
    body = {"prompt": QUESTION, "temperature": 0, "max_tokens": 16}
    reply = server.http.post("/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    ("name", "method", "flags"),
    [
        ("awq", "awq", ON_CPU),
        pytest.param("gptq, desc_act", "gptq", ON_CPU, marks=pytest.mark.slow),
        pytest.param("fp8", "fp8", ON_CPU, marks=pytest.mark.slow),
        pytest.param("gptq", "gptq", ON_CARD, marks=pytest.mark.slow),
        pytest.param("awq", "awq", ON_CARD, marks=pytest.mark.slow),
        pytest.param("fp8, blocks", "fp8", ON_CARD, marks=pytest.mark.slow),
    ],
)
def test_a_quantized_checkpoint_is_served_without_the_quantization_flag(
    name: str, method: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    folder = str(make_quantized(FORMATS[name], tmp_path / "checkpoint").folder)

    with running(folder, tmp_path / "log", *flags, "--dtype=bfloat16") as server:
        found = answer(server)
        again = answer(server)
        log = server.text()

    assert found and found == again
    assert f"Quantization: {method}, " in log
    if flags is ON_CPU:
        with LLM(folder, dtype="bfloat16", quantization=method, max_model_len=128) as llm:
            (output,) = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=16))
        assert output.outputs[0].text == found


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("gptq", "auto_round:auto_gptq"),
        pytest.param("gptq, version 2", "auto_round", marks=pytest.mark.slow),
        pytest.param("awq", "auto_round:auto_awq", marks=pytest.mark.slow),
    ],
)
def test_packings_of_auto_round_give_the_answers_of_dequantized_weights(
    name: str, packing: str, tmp_path: Path
) -> None:
    folder, reference = make_quantized(FORMATS[name], tmp_path / "checkpoint")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings.pop("checkpoint_format", None)
    as_auto_round(packing)(folder, settings)

    with running(str(folder), tmp_path / "log", *ON_CPU, "--dtype=float32") as server:
        found = answer(server)
        log = server.text()

    assert "Quantization: auto-round, " in log
    with LLM(str(reference), dtype="float32", max_model_len=128) as llm:
        (output,) = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=16))
    assert output.outputs[0].text == found


def test_a_scale_of_zero_fails_the_start_in_one_sentence(tmp_path: Path) -> None:
    folder = make_quantized(FORMATS["gptq"], tmp_path / "checkpoint").folder
    name = "model.layers.1.self_attn.v_proj.scales"
    replace_tensor(folder, name, lambda scales: scales * 0)

    with contextlib.closing(LiveServer(str(folder), tmp_path / "log", *ON_CPU)) as server:
        status = server.wait_exit(60)
        lines = server.text().splitlines()

    assert status == 1
    # The last line has the reason of the refused start, and no other line repeats it.
    *before, error = lines
    assert not any("scales that are zero" in line for line in before)
    assert f"{name} in {folder / 'model.safetensors'} has 128 of 128 scales that are zero" in error
    assert not any("Traceback" in line for line in lines)
