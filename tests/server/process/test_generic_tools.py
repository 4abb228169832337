"""Log lines for a missing chat template, and for a template without support for tools."""

import logging

import pytest

from server.process.api_server import log_chat_template
from server.text.chat_template import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson }}" + PLAIN


@pytest.mark.parametrize(
    ("source", "parser", "num_warnings"),
    [
        (PLAIN, "hermes", 0),
        (PLAIN, "qwen25", 0),
        (PLAIN, None, 0),
        (PLAIN, "llama3_json", 1),
        (WITH_TOOLS, "llama3_json", 0),
    ],
)
def test_a_tool_parser_that_does_not_match_the_generic_template_is_a_warning(
    source: str, parser: str | None, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})

    with caplog.at_level(logging.INFO):
        log_chat_template(template, parser)

    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(warnings) == num_warnings
    assert all("--tool-call-parser llama3_json does not read" in text for text in warnings)
    template.close()


def test_a_missing_chat_template_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(None, {})

    log_chat_template(template, None)

    assert caplog.messages == [
        "The model has no chat template, so chats are refused: use /v1/completions, or start the "
        "server with --chat-template FILE"
    ]
    template.close()
