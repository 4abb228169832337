"""The README's examples with the demo model: a new user's first commands give sensible text."""

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
    # Skip without a network; otherwise download the file that `demo` uses.
    demo_gguf()
    with running("demo", tmp_path_factory.mktemp("log") / "log", "--max-model-len=1024") as live:
        yield live


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("capital of Japan", "The capital of Japan is Tokyo."),
        ("three fruits", "Bananas"),
        ("get_weather", '"city": ?"Oslo"'),
        ("LLM(", "The capital of Italy is ->  Rome"),
        ("/metrics", "vllm:num_requests_running"),
    ],
)
def test_a_readme_example_prints_the_expected_answer(
    words: str, answer: str, server: LiveServer, tmp_path: Path
) -> None:
    (example,) = [example for example in EXAMPLES if words in example]
    text = example.replace("http://localhost:8000", server.url)
    program = ["bash", "-euc"] if example.startswith("curl") else [sys.executable, "-c"]

    done = subprocess.run([*program, text], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert re.search(answer, done.stdout.replace("\\", "")), done.stdout


def test_the_readme_has_five_examples_and_the_page_is_served(server: LiveServer) -> None:
    page = server.ask("/")

    assert len(EXAMPLES) == 5
    assert "http://localhost:8000/ is [a page]" in README
    assert "<title>gaudiserve</title>" in page.text
