"""Registry of parsers: names on the command line."""

import re

import pytest

from config.errors import ConfigError
from config.loading.sources import load
from config.server import ServerConfig
from server.cli.flags import server_parser
from server.generation.answer_parser import ParserConfig
from server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

FLAGS = {"tool-call-parser": TOOL_PARSERS, "reasoning-parser": REASONING_PARSERS}


def loaded(*words: str, **environ: str) -> ServerConfig:
    return load(["demo", *words], environ=environ, parser=server_parser("serve", "")).server


@pytest.mark.parametrize("flag", FLAGS)
def test_every_parser_is_a_choice_of_its_flag(flag: str) -> None:
    for name in FLAGS[flag].all:
        server = loaded(f"--{flag}", name)

        assert getattr(server, flag.replace("-", "_")) == name
        assert name in ParserConfig.of(server, "").__repr__()


@pytest.mark.parametrize("flag", FLAGS)
def test_an_unknown_parser_is_refused_with_the_nearest_parsers(flag: str) -> None:
    known = ", ".join(sorted(FLAGS[flag].all))
    field = flag.replace("-", "_")

    with pytest.raises(ConfigError) as of_flag:
        loaded(f"--{flag}", "seed_os")
    with pytest.raises(ConfigError) as of_variable:
        loaded(**{f"GAUDISERVE_{field.upper()}": "seed_os"})
    with pytest.raises(ConfigError) as of_keyword:
        ParserConfig.of(ServerConfig(**{field: "seed_os"}), "")

    num_names = len(FLAGS[flag].all) + 2
    allowed = rf"must be one of {num_names} names, the nearest: seed_oss; "
    listing = f"`gaudiserve serve --help={flag}` lists all"
    assert f"--{flag} is 'seed_os'" in str(of_flag.value)
    for error in (str(of_flag.value), str(of_variable.value)):
        assert re.search(allowed, error) and listing in error
    assert str(of_keyword.value).endswith(f"it must be one of {known}")


def test_only_names_like_an_unknown_parser_are_suggested() -> None:
    with pytest.raises(ConfigError) as unlike:
        loaded("--tool-call-parser", "foo")
    with pytest.raises(ConfigError) as family:
        loaded("--tool-call-parser", "qwen")

    assert re.search(r"one of \d+ names; `gaudiserve", str(unlike.value))
    assert re.search(r"the nearest: qwen\w+", str(family.value))


@pytest.mark.parametrize("flag", FLAGS)
def test_the_help_shows_every_parser(flag: str) -> None:
    text = " ".join(server_parser("serve", "").format_help_about(flag).split())

    assert "NAME is one of " + ", ".join(("auto", "none", *sorted(FLAGS[flag].all))) in text


def test_a_command_line_without_a_parser_imports_no_parsers() -> None:
    parser = server_parser("serve", "")
    parser.kinds = dict.fromkeys(parser.kinds, pytest.fail)

    assert load(["demo"], environ={}, parser=parser).server.tool_call_parser == "auto"
