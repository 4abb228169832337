"""Claude Code: streams of the Messages API."""

import json
from typing import Any

import pytest
from coding_agents import ANSWER, NOTE, PROMPT, READ_NOTE, Workplace, needs

pytestmark = [pytest.mark.clients, needs("claude")]


def run_claude(workplace: Workplace, prompt: str, options: str) -> list[dict[str, Any]]:
    """The events that Claude Code prints."""
    script = workplace.documented("Claude Code", "bash").replace("Explain README.md.", prompt)
    options = f"{options} --output-format stream-json --verbose"
    output = workplace.run(script.replace("claude -p", f"claude {options} -p"))
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def blocks(events: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """The content blocks of the messages of a role."""
    return [block for event in events if event["type"] == role for block in _content(event)]


def _content(event: dict[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = event["message"]["content"]
    return content


def test_claude_code_prints_an_answer(workplace: Workplace) -> None:
    events = run_claude(workplace, PROMPT, "")

    assert [block["text"] for block in blocks(events, "assistant")] == [ANSWER]
    assert (events[-1]["result"], events[-1]["is_error"]) == (ANSWER, False)
    assert events[-1]["modelUsage"]["demo"]["contextWindow"] == 200_000
    assert workplace.asked_hosts == []


def test_claude_code_returns_the_output_of_a_command(workplace: Workplace) -> None:
    events = run_claude(workplace, "Read the note with Bash.", "--allowedTools=Bash")

    before, use, after = blocks(events, "assistant")
    assert (before["text"], after["text"]) == ("I read the note.", READ_NOTE)
    assert (use["name"], use["input"]) == ("Bash", {"command": "cat note.txt"})
    (result,) = blocks(events, "user")
    assert (result["tool_use_id"], result["content"]) == (use["id"], NOTE)
    assert (events[-1]["result"], events[-1]["is_error"]) == (READ_NOTE, False)
    # The second prompt repeats the first one and its answer.
    usage = events[-1]["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"] / 2
    assert workplace.asked_hosts == []
