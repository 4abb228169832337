"""config/server.py: default sampling parameters."""

import pytest

from config.errors import ConfigError
from config.server import ServerConfig


def test_a_model_config_is_kept_or_left_out_under_the_override() -> None:
    of_model = {"temperature": 0.6, "top_p": 0.9}
    override = '{"temperature": 0.5}'

    over = ServerConfig(override_generation_config=override)
    alone = ServerConfig(override_generation_config=override, generation_config="vllm")

    assert over.sampling_defaults(of_model) == {"temperature": 0.5, "top_p": 0.9}
    assert alone.sampling_defaults(of_model) == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"max_new_tokens": 5}', "it must be a JSON object of some of temperature, top_p"),
        ('{"temperature": 9}', "temperature is 9, it must be between 0 and 2"),
        ('{"temperature": "hot"}', "temperature is 'hot', it must be between 0 and 2"),
        ("[1]", "it must be a JSON object"),
        ("{x", "it must be JSON"),
    ],
)
def test_sampling_defaults_that_make_no_sense_are_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(override_generation_config=value)
