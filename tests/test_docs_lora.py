"""The examples of docs/lora.md run."""

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
from adapters import write_adapter
from live import running
from tiny_models import make_tiny

PAGE = (Path(__file__).parents[1] / "docs" / "lora.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RUNTIME = ("--allow-runtime-lora-updating", "--api-key=KEY")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the adapters of the page."""
    root = tmp_path_factory.mktemp("page") / "examples"
    base = make_tiny("llama", root / "base")
    for seed, name in enumerate(("sql", "poet", "sql2")):
        write_adapter(root / "adapters" / name, base, seed=seed)
    (root / "log").mkdir()
    return root


def test_the_offline_example(root: Path) -> None:
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    names = {"MODEL": str(root / "base"), "ADAPTER": str(root / "adapters" / "sql")}

    exec(compile(code, "lora.md", "exec"), names)

    adapted, plain = names["outputs"]
    assert adapted.outputs[0].text != plain.outputs[0].text  # type: ignore[attr-defined]


def test_the_commands(root: Path) -> None:
    consoles = [text for kind, text in BLOCKS if kind == "console"]
    (command,) = [text for text in consoles if "gaudiserve serve" in text]
    calls = [
        shlex.split(line)
        for text in consoles
        for line in text.replace("\\\n", " ").replace('",\n', '", ').split("\ncurl ")
        if "localhost" in line
    ]
    words = shlex.split(command)[3:]
    flags = [word.replace("=adapters/", f"={root}/adapters/") for word in words]
    answers = []
    with running(
        str(root / "base"),
        root / "log" / "server.txt",
        *(*flags, "--max-model-len=256", *RUNTIME, f"--lora-dir={root / 'adapters'}"),
    ) as server:
        for call in calls:
            url = next(word for word in call if word.startswith("localhost"))
            body = json.loads(call[call.index("-d") + 1])
            path = url.partition("/")[2]
            answers.append(
                httpx.post(
                    f"{server.url}/{path}",
                    json={"max_tokens": 8, **body} if "messages" in body else body,
                    headers={"Authorization": "Bearer KEY"},
                    timeout=60,
                )
            )

    assert [answer.status_code for answer in answers] == [200, 200, 200], [
        answer.text for answer in answers
    ]
    assert answers[0].json()["model"] == "sql"
