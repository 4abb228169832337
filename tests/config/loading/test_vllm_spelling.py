"""config/loading/vllm_spelling.py: abbreviated and dotted flags."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from config.loading.sources import Loaded, from_keywords, load


def notes_of(line: str) -> tuple[str, ...]:
    return load(["m", *line.split()], environ={}).notes


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("--gpu-memory-util 0.5", "gpu-memory-utilization", 0.5),
        ("--gpu_memory_util=0.5", "gpu-memory-utilization", 0.5),
        ("--max-num-batched-token=4096", "max-num-batched-tokens", 4096),
        ("--served-model-nam a b", "served-model-name", ("a", "b")),
        ("--disable-log-request", "enable-log-requests", False),
        ("--no-enable-prefix-cach", "enable-prefix-caching", False),
    ],
)
def test_an_unambiguous_abbreviation_is_expanded_with_a_note(
    line: str, key: str, value: object
) -> None:
    loaded = load(["m", *line.split()], environ={})

    assert loaded.sources[key][0] == value
    (note,) = loaded.notes
    word = line.split()[0].partition("=")[0].replace("_", "-")
    assert note.startswith(f"{word} is read as --") and note.endswith("; write the whole name")


def test_a_full_flag_name_gets_no_note() -> None:
    assert (
        notes_of(
            "--max-num-seqs 4 --trust-remote-code --speculative-config.method ngram "
            "--speculative-config.num_speculative_tokens 2"
        )
        == ()
    )


@pytest.mark.parametrize(
    ("word", "end"), [("--max-lora", "; it may be --max-lora-rank, --max-loras"), ("--max", "")]
)
def test_an_abbreviation_of_several_flags_is_refused(word: str, end: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["m", word, "4"], environ={})

    assert str(caught.value) == f"{word} is not a flag of gaudiserve serve{end}"


def test_an_unsupported_flag_is_not_read_as_an_abbreviation() -> None:
    with pytest.raises(ConfigError, match="--hf-token is not supported"):
        load(["m", "--hf-token", "x"], environ={})


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens=2",
            "speculative-config",
            {"method": "ngram", "num_speculative_tokens": 2},
        ),
        (
            "-sc.method=ngram -sc.num_speculative_tokens 2",
            "speculative-config",
            {"method": "ngram", "num_speculative_tokens": 2},
        ),
        ("--limit_mm_per_prompt.image 4", "limit-mm-per-prompt", {"image": 4}),
        (
            "--media-io-kwargs.video.num_frames 8 --media-io-kwargs.video.fps 2",
            "media-io-kwargs",
            {"video": {"num_frames": 8, "fps": 2}},
        ),
        ("--mm-processor-kwargs.max_pixels 1k", "mm-processor-kwargs", {"max_pixels": 1000}),
        (
            "--default-chat-template-kwargs.enable_thinking false",
            "default-chat-template-kwargs",
            {"enable_thinking": False},
        ),
        (
            "--default-chat-template-kwargs.a+ 1,2 --default-chat-template-kwargs.a+ 3",
            "default-chat-template-kwargs",
            {"a": ["1", "2", "3"]},
        ),
        (
            '--default-chat-template-kwargs.a {"b":1} --default-chat-template-kwargs.a.c x',
            "default-chat-template-kwargs",
            {"a": {"b": 1, "c": "x"}},
        ),
        (
            '--default-chat-template-kwargs {"a":1} --default-chat-template-kwargs.b 2',
            "default-chat-template-kwargs",
            {"b": 2},
        ),
    ],
)
def test_dotted_flags_are_merged_into_a_json_object(line: str, key: str, value: Any) -> None:
    loaded = load(["m", *line.split()], environ={})

    assert json.loads(str(loaded.sources[key][0])) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--speculative-config.method", "--speculative-config.method has no value, it must"),
        ("--eplb-config.window_size 3", "--eplb-config is not supported"),
        ("--frobnicate.a 3", "--frobnicate is not a flag of gaudiserve serve"),
        ("--port.a 3", "--port is '{\"a\": 3}', it must be a whole number"),
        ("--a" + ".b" * 17 + " 1", "--a has 17 dots, it may have 16"),
    ],
)
def test_an_invalid_dotted_flag_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["m", *line.split()], environ={})

    assert message in str(caught.value)


def test_dotted_keys_in_a_file_are_merged_into_a_json_object(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "speculative-config.method: ngram\nspeculative_config.num_speculative_tokens: 2\n"
    )

    loaded = load(["m", "--config", str(file)], environ={})

    given = json.loads(str(loaded.sources["speculative-config"][0]))
    assert given == {"method": "ngram", "num_speculative_tokens": 2}


def from_file(folder: Path, lines: str) -> Loaded:
    file = folder / "serve.yaml"
    file.write_text(lines)
    return load(["m", "--config", str(file)], environ={})


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ("rope-scaling: {factor: 2}", {"rope_scaling": {"factor": 2}}),
        ("""rope_scaling: '{"factor": 2}'""", {"rope_scaling": {"factor": 2}}),
        ("rope-scaling.factor: 2\nrope_scaling.t: y", {"rope_scaling": {"factor": 2, "t": "y"}}),
        ("rope-theta: 5000", {"rope_theta": 5000}),
        ("rope_theta: 5000\nhf-overrides: {a: 1}", {"a": 1, "rope_theta": 5000}),
        ("""hf_overrides: '{"a": 1}'\nrope-theta: 5000""", {"a": 1, "rope_theta": 5000}),
    ],
)
def test_keys_of_a_config_file_set_fields_of_the_model_config(
    lines: str, value: Any, tmp_path: Path
) -> None:
    assert json.loads(from_file(tmp_path, lines).engine.hf_overrides) == value


@pytest.mark.parametrize(
    "line",
    [
        """--hf-overrides {"a":1} --rope-theta 5000""",
        """--rope-theta=5000 --hf-overrides={"a":1}""",
        """--hf-overrides {"a":1} --hf-overrides.rope_theta 5000""",
    ],
)
def test_flags_of_config_fields_are_merged_into_hf_overrides(line: str) -> None:
    loaded = load(["m", *line.split()], environ={})

    assert json.loads(loaded.engine.hf_overrides) == {"a": 1, "rope_theta": 5000}


def test_keywords_set_fields_of_the_config() -> None:
    loaded = from_keywords(model="m", rope_scaling={"factor": 2}, hf_overrides={"a": 1})

    assert json.loads(loaded.engine.hf_overrides) == {"a": 1, "rope_scaling": {"factor": 2}}


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ("default-chat-template-kwargs.a+: x,y", {"a": ["x", "y"]}),
        ("default_chat_template_kwargs.a+: [x, y]", {"a": ["x", "y"]}),
        ("default-chat-template-kwargs.a: 1k", {"a": 1000}),
    ],
)
def test_dotted_keys_in_a_file_have_the_values_of_dotted_flags(
    lines: str, value: Any, tmp_path: Path
) -> None:
    loaded = from_file(tmp_path, lines)

    assert json.loads(str(loaded.sources["default-chat-template-kwargs"][0])) == value


@pytest.mark.parametrize("key", ["gpu-memory-util", "gpu_memory_util"])
def test_an_abbreviation_in_a_file_is_expanded_with_a_note(key: str, tmp_path: Path) -> None:
    loaded = from_file(tmp_path, f"{key}: 0.5")

    assert loaded.engine.cache.gpu_memory_utilization == 0.5
    (note,) = loaded.notes
    assert note.startswith(f"{key} is read as gpu-memory-utilization (from file")


def test_an_ambiguous_abbreviation_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max-num is not a setting; it may be max-num-"):
        from_file(tmp_path, "max-num: 3")


def test_a_file_with_a_setting_as_an_object_and_as_dotted_keys_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config: {}\nspeculative-config.method: ngram\n")

    with pytest.raises(ConfigError, match="sets speculative-config twice"):
        load(["m", "--config", str(file)], environ={})


def test_a_dot_in_a_value_does_not_make_a_dotted_flag() -> None:
    loaded = load(["m", "--host=10.0.0.1", "--swap-space", "0.5"], environ={})

    assert (loaded.server.host, loaded.engine.offload.swap_space) == ("10.0.0.1", 0.5)


@pytest.mark.parametrize(
    ("flag", "words", "value"),
    [
        ("mm-processor-kwargs", "max_pixels=1003520", {"max_pixels": 1003520}),
        (
            "mm-processor-kwargs",
            "max_pixels=1003520,do_resize=false",
            {"max_pixels": 1003520, "do_resize": False},
        ),
        ("default-chat-template-kwargs", "enable_thinking=false", {"enable_thinking": False}),
    ],
)
def test_an_object_may_be_given_as_key_value_pairs(flag: str, words: str, value: Any) -> None:
    server = load(["m", f"--{flag}", words], environ={}).server

    given = server.image_options if flag == "mm-processor-kwargs" else server.template_defaults
    assert given == value


def test_sampling_defaults_may_be_given_as_key_value_pairs() -> None:
    line = ["m", "--override-generation-config", "temperature=0.7,top_p=0.95"]

    assert load(line, environ={}).server.sampling_defaults({}) == {
        "temperature": 0.7,
        "top_p": 0.95,
    }


@pytest.mark.parametrize("words", ["max_pixels=many", "max_pixels=", "=1", "a=1,,b=2", "a=1 b=2"])
def test_malformed_pairs_are_not_read_as_an_object(words: str) -> None:
    with pytest.raises(ConfigError, match=r"--mm-processor-kwargs is .*, which is not JSON"):
        load(["m", "--mm-processor-kwargs", words], environ={})


def test_a_boolean_may_be_disabled_in_a_file_by_its_no_key(tmp_path: Path) -> None:
    """vLLM turns each key of its file into a flag: `no-enable-prefix-caching: true`."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        "async-scheduling: true\nno_enable_prefix_caching: true\nno-enforce-eager: no\n"
    )

    loaded = load(["m", "--config", str(file)], environ={})

    assert loaded.engine.cache.enable_prefix_caching is False
    assert loaded.engine.enforce_eager is False  # vLLM omits a flag with the value false.


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("no-max-num-seqs: true", "no-max-num-seqs is not a setting"),
        ("no-enforce-eager: 3", "--no-enforce-eager is 3, it must be true or false"),
        ("no-enforce-eager: true\nenforce-eager: true", "sets enforce-eager twice"),
    ],
)
def test_an_invalid_no_key_in_a_file_is_refused(lines: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(lines)

    with pytest.raises(ConfigError, match=message):
        load(["m", "--config", str(file)], environ={})
