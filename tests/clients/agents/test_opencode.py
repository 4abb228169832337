"""opencode: streams of chat completions, of the Responses API and of the Messages API."""

import json
from typing import Any

import pytest
from coding_agents import ANSWER, INTENT, NOTE, PROMPT, READ_NOTE, Workplace, needs

CHAT = "@ai-sdk/openai-compatible"
pytestmark = [
    pytest.mark.clients,
    needs("opencode", "npm"),
    pytest.mark.parametrize("package", [CHAT, "@ai-sdk/openai", "@ai-sdk/anthropic"]),
]


def run_opencode(
    workplace: Workplace, package: str, prompt: str, status: int = 0
) -> list[dict[str, Any]]:
    """Message parts that opencode prints, and its errors."""
    config = workplace.home / ".config" / "opencode" / "opencode.json"
    config.parent.mkdir(parents=True)
    documented = workplace.documented("opencode", "json")
    assert CHAT in documented
    config.write_text(documented.replace(CHAT, package))
    script = workplace.documented("opencode", "bash").replace("Explain README.md.", prompt)
    output = workplace.run(script.replace("opencode run", "opencode run --format json"), status)
    events = [json.loads(line) for line in output.splitlines()]
    return [event["part"] if "part" in event else event["error"] for event in events]


def texts(parts: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for part in parts if part["type"] == "text"]


def test_opencode_prints_an_answer(workplace: Workplace, package: str) -> None:
    parts = run_opencode(workplace, package, PROMPT)

    assert texts(parts) == [ANSWER]
    assert parts[-1]["reason"] == "stop"
    assert {*workplace.asked_hosts} <= {"registry.npmjs.org:443"}


def test_opencode_returns_the_output_of_a_command(workplace: Workplace, package: str) -> None:
    parts = run_opencode(workplace, package, "Read the note with bash.")

    (command,) = [part["state"] for part in parts if part["type"] == "tool"]
    assert (command["output"], command["metadata"]["exit"]) == (f"{NOTE}\n", 0)
    assert texts(parts) == [INTENT, READ_NOTE]
    ends = [part for part in parts if part["type"] == "step-finish"]
    assert [end["reason"] for end in ends] == ["tool-calls", "stop"]
    # The second prompt repeats the first one and its answer.
    assert ends[1]["tokens"]["cache"]["read"] > ends[1]["tokens"]["input"]
    assert {*workplace.asked_hosts} <= {"registry.npmjs.org:443"}


def test_opencode_reports_a_conversation_that_is_too_long(
    small_workplace: Workplace, package: str
) -> None:
    errors = run_opencode(small_workplace, package, PROMPT, status=1)

    assert {error["name"] for error in errors} == {"ContextOverflowError"}
