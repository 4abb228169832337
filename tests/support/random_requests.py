"""Random requests with any parameters that a client may send."""

import random
from typing import Any

from tiny_models import VOCAB_SIZE

from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec

FORMS = [
    GrammarSpec("json", '{"type":"array","items":{"type":"integer"}}'),
    GrammarSpec("regex", "[a-z]{3}[0-9]*"),
    GrammarSpec("choice", '["yes","no"]'),
]


def random_sampling(rng: random.Random) -> SamplingParams:
    """Half of the requests are plain; the others have random parameters."""
    settings: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "temperature": 0.0}
    if rng.random() < 0.5:
        return SamplingParams(**settings)
    settings["temperature"] = rng.choice([0.0, 0.5, 1.0, 1.7])
    settings["seed"] = rng.randrange(1000)
    choices: dict[str, list[Any]] = {
        "top_k": [1, 5, 50],
        "top_p": [0.1, 0.9],
        "min_p": [0.05],
        "presence_penalty": [0.5],
        "frequency_penalty": [-0.5],
        "repetition_penalty": [1.2],
        "logit_bias": [{3: 5.0}, dict.fromkeys(range(9), -1.0)],
        "allowed_token_ids": [(5, 6, 7, 8)],
        "min_tokens": [1],
        "stop_token_ids": [(9,), (9, 10, 11)],
        "bad_words_token_ids": [((4, 5),), ((7,), (8, 9, 10))],
        "logprobs": [0, 1, 7, 20],
        "prompt_logprobs": [0, 3],
        "ignore_eos": [True],
        "structured_outputs": FORMS,
    }
    for name, values in choices.items():
        if rng.random() < (0.4 if name == "structured_outputs" else 0.15):
            settings[name] = rng.choice(values)
    settings["min_tokens"] = min(settings.get("min_tokens", 0), settings["max_tokens"])
    return SamplingParams(**settings)


def random_prompt(rng: random.Random, prefixes: list[list[int]]) -> list[int]:
    """A prompt of 1 to 200 tokens; a third of the prompts share a prefix with another prompt."""
    length = rng.choice([rng.randint(1, 40), rng.randint(1, 200)])
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    if rng.random() < 0.33:
        prompt = (rng.choice(prefixes) + prompt)[:200]
    return prompt
