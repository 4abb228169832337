"""config/server.py: default sampling parameters."""

import pytest

from config.errors import ConfigError
from config.server import ServerConfig


def test_override_generation_config_applies_with_and_without_the_models_defaults() -> None:
    of_model = {"temperature": 0.6, "top_p": 0.9}
    override = '{"temperature": 0.5}'

    over = ServerConfig(override_generation_config=override)
    alone = ServerConfig(override_generation_config=override, generation_config="vllm")

    assert over.sampling_defaults(of_model) == {"temperature": 0.5, "top_p": 0.9}
    assert alone.sampling_defaults(of_model) == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"seed": 5}', "it must be a JSON object of some of temperature, top_p"),
        ('{"max_new_tokens": 0}', "max_new_tokens 0, it must be an integer above 0"),
        ('{"max_new_tokens": 2.5}', "max_new_tokens 2.5, it must be an integer above 0"),
        ('{"max_tokens": 0}', "max_tokens 0, it must be an integer above 0"),
        ('{"temperature": 9}', "temperature is 9, it must be a number between 0 and 2"),
        ('{"temperature": "hot"}', "temperature is 'hot', it must be a number between 0 and 2"),
        ("[1]", "it must be a JSON object"),
        ("{x", "not JSON: .* write it as .{.name"),
    ],
)
def test_invalid_sampling_defaults_are_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(override_generation_config=value)


def test_unknown_sampling_parameters_are_ignored() -> None:
    value = '{"attn_temperature_tuning": true, "top_k": 3}'

    assert ServerConfig(override_generation_config=value).sampling_defaults({}) == {"top_k": 3}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{x", "default_chat_template_kwargs is '{x', which is not JSON"),
        ("[1]", "it must be a JSON object"),
        ('{"tools": []}', "default_chat_template_kwargs sets 'tools', which the server sets"),
    ],
)
def test_invalid_template_variables_are_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(default_chat_template_kwargs=value)


def test_limits_of_images_and_videos_are_read_in_both_forms() -> None:
    assert ServerConfig().max_images == 64
    plain = ServerConfig(limit_mm_per_prompt='{"image": 4, "audio": 0}')
    assert (plain.max_images, plain.max_videos) == (4, 8)
    former = ServerConfig(limit_mm_per_prompt="image=13,video=0")
    assert (former.max_images, former.max_videos) == (13, 0)
    sized = ServerConfig(limit_mm_per_prompt='{"video": {"count": 2, "num_frames": 9}}')
    assert (sized.max_images, sized.max_videos) == (64, 2)
    options = ServerConfig(mm_processor_kwargs='{"max_pixels": 9}').image_options
    assert options == {"max_pixels": 9}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("limit_mm_per_prompt", '{"image": -1}', "has -1 images, it must be at least 0"),
        ("limit_mm_per_prompt", '{"image": "many"}', "has image 'many', it must be an integer"),
        ("limit_mm_per_prompt", '{"images": 4}', "has images, it may have image, video, audio"),
        ("limit_mm_per_prompt", "4", "limit_mm_per_prompt"),
        ("mm_processor_kwargs", "[1]", "mm_processor_kwargs"),
    ],
)
def test_wrong_limits_and_options_of_images_are_refused(
    name: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**{name: value})  # type: ignore[arg-type]
