"""Claude Code: streams of the Messages API."""

import json
from typing import Any

import pytest
from coding_agents import ANSWER, INTENT, NOTE, PROMPT, READ_NOTE, THOUGHT, Workplace, needs

pytestmark = [pytest.mark.clients, needs("claude", "npm")]


def run_claude(workplace: Workplace, prompt: str, options: str, status: int = 0) -> str:
    script = workplace.documented("Claude Code", "bash").replace("Explain README.md.", prompt)
    return workplace.run(script.replace("claude -p", f"claude {options} -p"), status)


def blocks(events: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """Content blocks of the messages of `role`."""
    messages = [event["message"] for event in events if event["type"] == role]
    return [block for message in messages for block in message["content"]]


def test_claude_code_prints_an_answer(workplace: Workplace) -> None:
    result = json.loads(run_claude(workplace, PROMPT, "--output-format=json"))

    assert (result["result"], result["is_error"]) == (ANSWER, False)
    assert result["modelUsage"]["demo"]["contextWindow"] == 200_000
    assert workplace.asked_hosts == []


def test_claude_code_returns_the_output_of_a_command(workplace: Workplace) -> None:
    options = "--allowedTools=Bash --output-format=stream-json --verbose"

    lines = run_claude(workplace, "Read the note with Bash.", options).splitlines()

    events = [json.loads(line) for line in lines]
    thinking, before, use, after = blocks(events, "assistant")
    assert (thinking["thinking"], before["text"], after["text"]) == (THOUGHT, INTENT, READ_NOTE)
    assert (use["name"], use["input"]) == ("Bash", {"command": "cat note.txt"})
    (result,) = blocks(events, "user")
    assert (result["tool_use_id"], result["content"]) == (use["id"], NOTE)
    assert (events[-1]["result"], events[-1]["is_error"]) == (READ_NOTE, False)
    # The second prompt repeats the first one and its answer.
    usage = events[-1]["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"] / 2
    assert workplace.asked_hosts == []


def test_claude_code_sends_back_hidden_reasoning(workplace: Workplace) -> None:
    # Without a stream of events, Claude Code does not request the text of the reasoning.
    output = run_claude(workplace, "Read the note with Bash.", "--allowedTools=Bash")

    assert output.strip() == READ_NOTE


def test_claude_code_reports_a_conversation_that_is_too_long(small_workplace: Workplace) -> None:
    output = run_claude(small_workplace, PROMPT, "", status=1)

    assert output.startswith("Prompt is too long")
