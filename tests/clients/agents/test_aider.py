"""aider: streams of chat completions, edits as text, and the output of a test command."""

import pytest
from coding_agents import ANSWER, COPY, PROMPT, READ_NOTE, Workplace, needs

pytestmark = [pytest.mark.clients, needs("aider", "Python 3.10 to 3.12")]


def run_aider(workplace: Workplace, prompt: str, options: str) -> str:
    config = workplace.home / ".aider.conf.yml"
    config.write_text(workplace.documented("aider", "yaml"))
    metadata = workplace.home / ".aider.model.metadata.json"
    metadata.write_text(workplace.documented("aider", "json"))
    script = workplace.documented("aider", "bash").replace("Explain README.md.", prompt)
    options = f"--no-pretty --yes-always --no-git {options}"
    return workplace.run(script.replace("aider ", f"aider {options} "))


def test_aider_prints_an_answer(workplace: Workplace) -> None:
    output = run_aider(workplace, PROMPT, "")

    assert ANSWER in output
    assert workplace.asked_hosts == []


def test_aider_returns_the_output_of_its_test_command(workplace: Workplace) -> None:
    test = "--auto-test --test-cmd 'cat note.txt; exit 1'"

    output = run_aider(workplace, "Write copy.txt, then test.", test)

    assert (workplace.folder / "copy.txt").read_text() == f"{COPY}\n"
    assert READ_NOTE in output
    assert workplace.asked_hosts == []
