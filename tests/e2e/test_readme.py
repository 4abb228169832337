"""The README's examples with the demo model: what a new user pastes gives text that makes sense."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import demo_gguf
from live import ROOT, LiveServer, running

README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(?:bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = FENCE.findall(README)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    # Skips without a network; then `demo` finds the same file.
    demo_gguf()
    with running("demo", tmp_path_factory.mktemp("log") / "log", "--max-model-len=1024") as live:
        yield live


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("capital of Japan", "The capital of Japan is Tokyo."),
        ("three fruits", "Bananas"),
        ("about the sea", "The sea is"),
        ("get_weather", '"city": ?"Oslo"'),
        ("LLM(", "The capital of Italy is ->  Rome"),
        ("/metrics", "vllm:num_requests_running"),
    ],
)
def test_an_example_gives_the_text_that_it_asks_for(
    words: str, answer: str, server: LiveServer, tmp_path: Path
) -> None:
    (example,) = [example for example in EXAMPLES if words in example]
    text = example.replace("http://localhost:8000", server.url)
    program = ["bash", "-euc"] if example.startswith("curl") else [sys.executable, "-c"]

    done = subprocess.run([*program, text], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert re.search(answer, done.stdout.replace("\\", "")), done.stdout


def test_every_example_is_tried(server: LiveServer) -> None:
    page = server.ask("/")

    assert len(EXAMPLES) == 6
    assert "http://localhost:8000/ is a page" in README and "<title>gaudiserve</title>" in page.text
