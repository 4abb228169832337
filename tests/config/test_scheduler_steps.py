"""--num-scheduler-steps: bad values, and settings that lower it."""

import pytest

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.sources import load

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'


def taken(*words: str) -> EngineConfig:
    return load(["m", *words], environ={}).engine


@pytest.mark.parametrize("name", ["--num-scheduler-steps", "--num-scheduler-seqs"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("0", "is 0, it must be between 1 and 64"),
        ("-2", "is -2, it must be between 1 and 64"),
        ("65", "is 65, it must be between 1 and 64"),
        ("many", "is 'many', it must be a whole number"),
        ("2.5", "is '2.5', it must be a whole number"),
    ],
)
def test_an_invalid_value_is_refused_with_the_range(name: str, value: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        taken(name, value)

    message = str(caught.value)
    assert error in message
    assert message.startswith(("--num-scheduler-steps", "--num-scheduler-seqs"))
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], ""),
        (["--pipeline-parallel-size", "2"], "a sampled token reaches the first pipeline stage"),
        (["--speculative-config", DRAFTS], "the next decode starts after"),
    ],
)
def test_drafts_and_pipeline_stages_lower_the_decodes_of_a_step_to_one(
    words: list[str], reason: str
) -> None:
    config = taken("--num-scheduler-steps", "4", *words)

    assert config.decodes_per_step == (1 if words else 4)
    assert config.single_decode_reason.startswith(reason)
    assert bool(config.single_decode_reason) == bool(words)
