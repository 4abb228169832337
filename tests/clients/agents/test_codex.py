"""Codex: streams of the Responses API."""

import json
from typing import Any

import pytest
from coding_agents import ANSWER, INTENT, NOTE, PROMPT, READ_NOTE, Workplace, needs

pytestmark = [pytest.mark.clients, needs("codex", "npm")]


def run_codex(workplace: Workplace, prompt: str, status: int = 0) -> list[dict[str, Any]]:
    """The events that Codex prints with --json."""
    config = workplace.home / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(workplace.documented("Codex", "toml"))
    script = workplace.documented("Codex", "bash").replace("Explain README.md.", prompt)
    # The sandbox needs user namespaces, which a container may not have.
    options = "--json --skip-git-repo-check --sandbox danger-full-access"
    output = workplace.run(script.replace("codex exec", f"codex exec {options}"), status)
    return [json.loads(line) for line in output.splitlines()]


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Completed items of type `kind`."""
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


def test_codex_prints_an_answer(workplace: Workplace) -> None:
    events = run_codex(workplace, PROMPT)

    assert [item["text"] for item in items(events, "agent_message")] == [ANSWER]
    assert events[-1]["type"] == "turn.completed"
    assert workplace.asked_hosts == []


def test_codex_returns_the_output_of_a_command(workplace: Workplace) -> None:
    events = run_codex(workplace, "Read the note with exec_command.")

    (command,) = items(events, "command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == (f"{NOTE}\n", 0)
    texts = [item["text"] for item in items(events, "agent_message")]
    assert texts == [INTENT, READ_NOTE]
    usage = events[-1]["usage"]
    # The second prompt repeats the first one and its answer.
    assert usage["cached_input_tokens"] > usage["input_tokens"] / 3
    assert workplace.asked_hosts == []


def test_codex_reports_a_conversation_that_is_too_long(small_workplace: Workplace) -> None:
    events = run_codex(small_workplace, PROMPT, status=1)

    assert events[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in events[-1]["error"]["message"]
