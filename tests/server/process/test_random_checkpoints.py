"""Random changes of a checkpoint's files: they are loaded, or the start fails in one line."""

import json
import random
from pathlib import Path

import pytest
from hostile_files import changed, changed_text
from tiny_models import make_tiny

from config.engine import EngineConfig
from config.errors import ConfigError
from config.progress import unreported
from config.server import ServerConfig
from server.cli.start import resolve_checkpoint
from server.process.api_server import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def make_checkpoint(folder: Path, family: str) -> dict[str, bytes]:
    """Files of a checkpoint that has each kind of file."""
    model = make_tiny(family, folder, max_shard_size="200KB")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    (model / "special_tokens_map.json").write_text(json.dumps(special))
    file = model / "tokenizer_config.json"
    settings = {
        **json.loads(file.read_text()),
        "added_tokens_decoder": {"500": {"content": "<z>", "special": True}},
        "additional_special_tokens": ["<a>"],
        "extra_special_tokens": {"quote": "<q>"},
        "chat_template": [{"name": "default", "template": "x"}],
    }
    file.write_text(json.dumps(settings))
    return {file.name: file.read_bytes() for file in model.iterdir()}


def start(folder: Path) -> None:
    """Do the launcher's and an API server's work with a checkpoint before an engine reads its
    weights."""
    server = ServerConfig()
    path = resolve_checkpoint(EngineConfig(str(folder)), server, unreported)
    tokenizer, template, _ = load_tokenizer(path, server, path)
    assert tokenizer is not None
    assert template is not None
    tokenizer.close()
    template.close()


@pytest.mark.parametrize(
    ("family", "seeds"),
    [
        ("llama", range(100)),
        pytest.param("llama", range(100, 4_000), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", range(4_000, 5_000), marks=pytest.mark.slow),
        pytest.param("gpt_oss", range(5_000, 6_000), marks=pytest.mark.slow),
    ],
)
def test_random_changes_are_refused_in_one_line_or_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, seeds: range
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    contents = make_checkpoint(tmp_path / "original", family)
    names = [name for name in contents if not name.endswith(".safetensors")]
    folder = tmp_path / "changed"
    folder.mkdir()
    refused = 0

    for seed in seeds:
        chance = random.Random(seed)
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        name = chance.choice(names)
        if name.endswith(".json"):
            value = json.loads(contents[name])
            for _ in range(chance.choice((1, 1, 3))):
                value = changed(value, chance)
            (folder / name).write_text(json.dumps(value))
        else:
            text = changed_text(contents[name].decode(), chance)
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            start(folder)
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error), f"seed {seed}"
        except Exception as error:
            raise AssertionError(f"seed {seed}, {name}: {error!r}") from error

    assert 0 < refused < len(seeds)
