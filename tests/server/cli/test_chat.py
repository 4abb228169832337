"""The commands of `gaudiserve chat`."""

import pytest

from server.cli.chat import unknown_command


def test_an_unknown_command_is_refused_with_the_known_commands() -> None:
    said = "unknown command /foo; commands: /clear, /system TEXT, /help, /exit, /quit"

    assert unknown_command("/foo") == said


@pytest.mark.parametrize("text", ["/sytem be kind", "/systme", "/sistem you are x"])
def test_a_misspelled_command_is_answered_with_the_nearest(text: str) -> None:
    said = f"unknown command {text.split()[0]}; did you mean /system? commands: "

    assert unknown_command(text).startswith(said)


@pytest.mark.parametrize(
    "text",
    [
        "/system",
        "/system be kind",
        "/clear now",
        "",
        "hello",
        "/exit",
        "/quit",
        "/etc/x y",
        "/etc/x",
        "/tmp is full",
        "//foo",
        "a /foo",
    ],
)
def test_a_message_or_a_known_command_is_not_refused(text: str) -> None:
    assert unknown_command(text) == ""
