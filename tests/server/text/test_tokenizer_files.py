"""Chat templates of a checkpoint: five places, and their precedence."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tokenizer

from config.errors import ConfigError
from server.text.tokenizer_files import read_text_files

Templates = str | dict[str, str] | None


def _read(folder: Path, own: Any, **files: Any) -> Templates:
    """The templates of a folder with `own` in its tokenizer_config.json and other JSON files."""
    write_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": own}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_text_files(str(folder), folder).chat_template


TOOLS = [{"name": "default", "template": "own"}, {"name": "tool_use", "template": "tools"}]
JSON = {"chat_template": "json"}
PROCESSOR = {"chat_template": "processor"}


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("own", {}, "own"),
        (TOOLS, {}, {"default": "own", "tool_use": "tools"}),
        ({"default": "own"}, {}, "own"),
        (None, {"chat_template": JSON}, "json"),
        (None, {"processor_config": PROCESSOR}, "processor"),
        (None, {"processor_config": {"chat_template": None}}, None),
        # A text model has no processor, so this file is not read.
        ("own", {"chat_template": JSON}, "own"),
        # Requests with tools keep the tokenizer's template.
        (
            "own",
            {"chat_template": JSON, "preprocessor_config": {}},
            {"default": "json", "tool_use": "own"},
        ),
        ("processor", {"processor_config": PROCESSOR}, "processor"),
        (None, {"processor_config": PROCESSOR, "chat_template": JSON}, "json"),
        (TOOLS, {"processor_config": PROCESSOR}, {"default": "processor", "tool_use": "tools"}),
    ],
)
def test_the_first_place_with_a_template_takes_precedence(
    tmp_path: Path, own: Any, files: dict[str, Any], expected: Templates
) -> None:
    assert _read(tmp_path, own, **files) == expected


def test_template_files_take_precedence_over_all_other_files(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("more")

    found = _read(tmp_path, TOOLS, processor_config=PROCESSOR, chat_template=JSON)

    assert found == {"default": "jinja", "tool_use": "more"}


@pytest.mark.parametrize("name", ["chat_template", "processor_config"])
@pytest.mark.parametrize("template", [5, ["x"], [{"name": "default"}], {"default": 1}])
def test_a_template_of_another_form_is_refused_with_its_file(
    tmp_path: Path, name: str, template: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"chat_template in .*{name}\.json has "):
        _read(tmp_path, "own", **{name: {"chat_template": template}})
