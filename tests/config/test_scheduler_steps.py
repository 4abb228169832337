"""--num-scheduler-steps: bad values, and settings that it excludes."""

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
def test_a_bad_value_is_one_error_with_the_range(name: str, value: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        taken(name, value)

    message = str(caught.value)
    assert error in message
    assert message.startswith(("--num-scheduler-steps", "--num-scheduler-seqs"))
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size is 2, so that a sampled"),
        (["--speculative-config", DRAFTS], "--speculative-config is set, so that only the result"),
    ],
)
def test_a_setting_that_excludes_further_decodes_is_named_with_the_setting_that_works(
    words: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        taken("--num-scheduler-steps", "4", *words)
    alone = taken("--num-scheduler-steps", "1", *words)

    message = str(caught.value)
    assert message.startswith(f"--num-scheduler-steps is 4 and {reason}")
    assert "set --num-scheduler-steps to 1" in message
    assert alone.scheduler.num_scheduler_steps == 1
