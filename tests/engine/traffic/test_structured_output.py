"""Requests with a grammar through a real worker: masks that arrive after their plan do not change
tokens."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from slow_model import Ledger, raw
from tiny_models import EOS, VOCAB_SIZE, make_tiny

from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec
from engine.core.build import build_core
from engine.core.engine_core import EngineCore
from engine.core.loop import make_table
from engine.executors.inproc import InprocExecutor
from engine.kv_cache.prefix_hashes import block_hashes
from engine.structured_output.grammar import Grammar, Vocabulary
from engine.transport.messages import AddRequest
from hpu.protocol import GrammarMasks, ToWorker
from hpu.worker.worker import Worker

REQUESTS = 40
FORMS = [
    GrammarSpec("json", '{"type":"array","items":{"type":"integer"}}'),
    GrammarSpec("regex", "[a-z]{3,8}[0-9]*"),
    GrammarSpec("choice", '["yes","no","perhaps"]'),
]


class SlowCard(InprocExecutor):
    """A CPU worker that behaves like a card: a result becomes available only after the next
    plan."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(Worker(config))
        self.num_masks = 0

    def has_result(self) -> bool:
        return False

    def send(self, message: ToWorker) -> None:
        self.num_masks += isinstance(message, GrammarMasks)
        super().send(message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def random_asks() -> list[tuple[list[int], SamplingParams]]:
    """Groups of requests with the same prompt, as for `n`; most groups have a grammar."""
    rng = random.Random(11)
    asks = []
    while len(asks) < REQUESTS:
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        options: dict[str, list[Any]] = {
            "structured_outputs": [None, *FORMS, *FORMS],
            "temperature": [0.0, 1.0],
            "min_tokens": [0, 0, 4],
            "top_k": [0, 9],
            "repetition_penalty": [1.0, 1.3],
            "bad_words_token_ids": [(), ((70, 71), (40,))],
            "logprobs": [None, 0, 2],
        }
        chosen = {name: rng.choice(values) for name, values in options.items()}
        for number in range(rng.choice([1, 1, 2, 3])):
            params = SamplingParams(max_tokens=rng.randint(4, 16), seed=number, **chosen)
            asks.append((prompt, params))
    return asks


def answers(folder: Path, depth: int) -> tuple[list[tuple[Any, ...]], EngineCore, int]:
    """(output of each request, engine, number of late masks)."""
    config = EngineConfig(
        str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=112,
        num_threads=1,
        cache=CacheConfig(block_size=8, num_blocks=14),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=20, max_inflight_steps=depth
        ),
    )
    vocabulary = Vocabulary(str(folder), VOCAB_SIZE, frozenset([EOS]))
    grammars = {form: Grammar(form, vocabulary) for form in FORMS}
    executor = SlowCard(config)
    ready = executor.start(lambda progress: None)
    core = build_core(config, executor, ready, make_table(config, ready), time.monotonic)
    ledger = Ledger()
    for key, (prompt, params) in enumerate(random_asks()):
        ledger.open(key)
        form = params.structured_outputs
        grammar = None if form is None else grammars[form]
        core.add_request(
            AddRequest(key, raw(prompt), params), block_hashes(raw(prompt), 8, ""), grammar
        )
    while core.has_work:
        ledger.take(core.step())
        core.check()
    executor.close()
    requests = ledger.requests.values()
    found = [(r.tokens, r.logprob_ids, r.finish and r.finish.reason) for r in requests]
    return found, core, executor.num_masks


def test_late_masks_give_the_tokens_of_early_masks(folder: Path) -> None:
    alone, _, never = answers(folder, depth=1)
    ahead, core, often = answers(folder, depth=2)

    assert ahead == alone
    assert never == 0 and often > 50
    assert core.stats().preemptions > 0
    assert {reason for _, _, reason in ahead} == {"stop", "length"}
