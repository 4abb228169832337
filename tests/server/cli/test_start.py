"""server/cli/start.py: the cache of converted files, errors, and the default names of a model."""

from pathlib import Path

import pytest

from config.checkpoint.model_name import default_names
from config.engine import EngineConfig
from config.errors import CheckpointError, ConfigError, SettingError
from config.params.lora import LoRAConfig
from config.progress import Report, unreported
from config.server import ServerConfig
from server.cli import start


def test_a_converted_tokenizer_is_written_to_the_cache_folder_of_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "resolve", lambda *_, **__: "folder")
    monkeypatch.setattr(start, "check_checkpoint", lambda *_: None)
    folders: list[Path] = []

    def convert(folder: str, cache: Path, report: Report) -> Path:
        folders.append(cache)
        return tmp_path

    monkeypatch.setattr(start, "tokenizer_folder", convert)
    monkeypatch.setattr(start, "check_tokenizer_file", lambda _: None)

    start.resolve_checkpoint(
        EngineConfig(model="tiny", cache_dir=str(tmp_path)), ServerConfig(), unreported
    )

    assert folders == [tmp_path]


def test_the_error_names_a_missing_adapter_and_its_flag_before_anything_starts(
    tmp_path: Path,
) -> None:
    engine = EngineConfig(
        model="tiny", lora=LoRAConfig(enable_lora=True, lora_modules=(f"a={tmp_path}/nosuch",))
    )

    with pytest.raises(ConfigError, match=f"--lora-modules a={tmp_path}/nosuch: no such file or"):
        start.resolve_checkpoint(engine, ServerConfig(), unreported)


def test_a_missing_chat_template_ends_the_start_before_any_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "serve", lambda *_: pytest.fail("a process was started"))

    with pytest.raises(ConfigError, match=r"missing\.jinja.* No such file"):
        start.start(EngineConfig("tiny"), ServerConfig(chat_template="missing.jinja"))


def test_an_unusable_certificate_ends_the_start_before_any_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(start, "serve", lambda *_: pytest.fail("a process was started"))
    file = tmp_path / "cert.pem"
    file.write_text("no certificate")

    with pytest.raises(ConfigError, match=r"--ssl-certfile is .*cert\.pem, which has no"):
        start.start(
            EngineConfig("tiny"), ServerConfig(ssl_certfile=str(file), ssl_keyfile=str(file))
        )


def test_a_missing_file_of_keys_ends_the_start_before_any_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "serve", lambda *_: pytest.fail("a process was started"))

    with pytest.raises(ConfigError, match=r"--api-key-file is /none: No such file"):
        start.start(EngineConfig("tiny"), ServerConfig(api_key_file="/none"))


def test_a_flag_that_the_model_does_not_allow_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit status 2, because another value of the flag helps."""

    def refuse(_: EngineConfig, folder: str) -> None:
        raise SettingError(f"--max-model-len is 5000, {folder} takes 512")

    monkeypatch.setattr(start, "resolve", lambda *_, **__: "/cache/folder")
    monkeypatch.setattr(start, "check_checkpoint", refuse)

    with pytest.raises(SettingError, match="5000, demo takes 512"):
        start._checked(EngineConfig(model="demo"), ServerConfig(), unreported)


def test_errors_of_a_converted_model_show_the_name_that_the_user_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = "/cache/converted/SmolLM2-bfloat16"

    def refuse(_: EngineConfig, found: str) -> None:
        raise CheckpointError(f"{found} has 9 heads, {found}/config.json says so: {found}")

    monkeypatch.setattr(start, "resolve", lambda *_, **__: folder)
    monkeypatch.setattr(start, "check_checkpoint", refuse)

    with pytest.raises(CheckpointError) as caught:
        start.resolve_checkpoint(EngineConfig(model="demo"), ServerConfig(), unreported)

    assert str(caught.value) == f"demo has 9 heads, {folder}/config.json says so: demo"


def test_a_local_model_has_its_folder_name_as_a_second_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    monkeypatch.chdir(folder)

    assert default_names(str(folder)) == (str(folder), "llama")
    assert default_names(f"{folder}/") == (f"{folder}/", "llama")
    assert default_names(".") == (".", "llama")
    assert default_names("../llama") == ("../llama", "llama")
    assert default_names("org/llama") == ("org/llama",)
    assert default_names("/") == ("/",)
    assert default_names(str(folder), {"llama"}) == (str(folder),)
    assert default_names("demo") == ("demo", "SmolLM2-135M-Instruct")
