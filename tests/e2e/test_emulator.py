"""The demo model on the emulated card over HTTP: the text of the CPU, through captured graphs."""

from pathlib import Path
from typing import Any

from demo import demo_gguf
from live import LiveServer, running

ALIKE = ("--dtype=float32", "--max-model-len=192", "--max-num-seqs=2", "--block-size=32")
CARD = (
    *("--device=hpu-emulator", "--num-gpu-blocks-override=12", "--bucketing-strategy=linear"),
    *("--max-num-batched-tokens=64", "--max-prefill-batch=1", "--prompt-query-bucket-min=64"),
    *("--prompt-query-bucket-step=64", "--prompt-ctx-bucket-step=4", "--prompt-ctx-bucket-max=4"),
    *("--decode-bs-bucket-min=2", "--decode-block-bucket-min=8", "--decode-block-bucket-step=8"),
    "--decode-block-bucket-max=8",
)


def answers(server: LiveServer) -> list[Any]:
    """One short answer, and one to a prompt of several chunks."""
    texts = []
    for question in ("Name three colours.", "Repeat after me: " + "one two three " * 25):
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


def test_the_demo_model_says_the_same_on_the_emulated_card_as_on_the_cpu(tmp_path: Path) -> None:
    model = demo_gguf()
    with running(model, tmp_path / "cpu", *ALIKE) as on_cpu:
        expected = answers(on_cpu)

    with running(model, tmp_path / "card", *ALIKE, *CARD) as on_card:
        found = answers(on_card)
        metrics = on_card.http.get("/metrics").text

    assert found == expected
    compiled = [line for line in metrics.splitlines() if 'stage="serving"' in line]
    assert all(line.endswith(" 0.0") for line in compiled), compiled
    assert "hpu_graphs" in metrics
