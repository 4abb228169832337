"""A model over HTTP on the emulated card with captured graphs gives the CPU's text."""

import contextlib
import re
from pathlib import Path

import pytest
from demo import demo_gguf
from live import LiveServer

from gaudiserve import LLM, SamplingParams

# The longest answer of the demo model ends at 126 tokens. These flags give chunks with and without
# context, and one decode bucket.
CARD = (
    *("--device=hpu-emulator", "--dtype=float32", "--max-model-len=128", "--max-num-seqs=2"),
    *("--block-size=32", "--num-gpu-blocks-override=8", "--bucketing-strategy=linear"),
    *("--max-num-batched-tokens=64", "--max-prefill-batch=1", "--prompt-query-bucket-min=64"),
    *("--prompt-query-bucket-step=64", "--prompt-ctx-bucket-step=4", "--prompt-ctx-bucket-max=4"),
    *("--decode-bs-bucket-min=2", "--decode-block-bucket-min=8", "--decode-block-bucket-step=8"),
    "--decode-block-bucket-max=8",
)
REPEATS = {"tiny": 5, "demo": 25}
"""Repetitions in the longer question, whose prompt has several chunks. The shorter prompt has a
single chunk."""


@pytest.fixture(params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(kind: str, tiny_model: str) -> str:
    return tiny_model if kind == "tiny" else demo_gguf()


@pytest.fixture
def questions(kind: str) -> list[str]:
    return ["Name three colours.", "Repeat after me: " + "one two three " * REPEATS[kind]]


def cpu_answers(model: str, questions: list[str]) -> list[tuple[str, str | None]]:
    with LLM(model=model, dtype="float32", max_model_len=128, max_num_seqs=2) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": question}] for question in questions],
            SamplingParams(temperature=0, max_tokens=16),
            use_tqdm=False,
        )
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


def server_answers(server: LiveServer, questions: list[str]) -> list[tuple[str, str | None]]:
    texts = []
    for question in questions:
        body = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 16,
            "logprobs": True,
        }
        reply = server.http.post("/v1/chat/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        texts.append((choice["message"]["content"], choice["finish_reason"]))
    return texts


def test_the_emulated_card_gives_the_same_text_as_the_cpu(
    model: str, questions: list[str], tmp_path: Path
) -> None:
    with contextlib.closing(LiveServer(model, tmp_path / "card", *CARD)) as on_card:
        # Runs while the emulated card warms up.
        expected = cpu_answers(model, questions)
        on_card.wait_ready()

        found = server_answers(on_card, questions)
        metrics = on_card.http.get("/metrics").text
        page = on_card.http.get("/page/state").json()

    assert found == expected
    compiled = [line for line in metrics.splitlines() if 'stage="serving"' in line]
    assert all(line.endswith(" 0.0") for line in compiled), compiled
    assert "hpu_graphs" in metrics
    # Every text that names the device says that the card is emulated.
    assert re.search(r'^hpu_info\{.*device="hpu-emulator"', metrics, re.MULTILINE)
    assert page["device"] == "hpu-emulator"
    assert " on hpu-emulator (float32)" in on_card.text()
    assert "The Gaudi is emulated on the CPU" in on_card.text()
