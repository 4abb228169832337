"""The examples of docs/clients.md, run as they are written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from live import LiveServer

pytestmark = pytest.mark.clients

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = FENCE.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "example"), EXAMPLES, ids=[f"{kind} {i}" for i, (kind, _) in enumerate(EXAMPLES)]
)
def test_an_example_of_the_page_runs(
    kind: str,
    example: str,
    server: LiveServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    text = example.replace("http://localhost:8000", server.url)
    if kind == "python":
        command, folder = [sys.executable, "-c", text], tmp_path
    elif kind == "javascript":
        node, folder = request.getfixturevalue("node")
        command = [node, "--input-type=module", "--eval", text]
    else:
        program, *words = shlex.split(text.replace("\\\n", ""))
        command, folder = [str(Path(sys.executable).parent / program), *words], tmp_path
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi", "output_tokens_count": 8}\n' * 8)
        # Its task comes from the internet; ours beside it is of the same kind.
        command = [word.replace("arc_easy", str(local_task(tmp_path))) for word in command]

    done = subprocess.run(
        command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def local_task(folder: Path) -> Path:
    task = folder / "arc_easy.yaml"
    task.write_text(
        f"""\
task: arc_easy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {Path(__file__).parent / "capitals.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
"""
    )
    return task
