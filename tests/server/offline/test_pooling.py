"""Offline vectors, classes and scores, with a fake engine whose vectors identify their tokens."""

from typing import Any

import numpy as np
import pytest
from http_rig import TOKENIZER, VOCAB_SIZE, ids
from pooling_client import EMBEDDER, PoolingClient, pooled

from config.errors import PromptTooLong, UserError
from config.params.pooling import PoolingFacts, PoolingParams
from server.offline.pooling import OfflinePooling, classification_outputs, embedding_outputs
from server.pooling.inputs import make_input_processor
from server.pooling.scores import TextPairs

EMBED = PoolingParams(task="embed")
CROSS_ENCODER = PoolingFacts(tasks=("score",), width=1, token_width=1)
CLASSIFIER = PoolingFacts(tasks=("classify",), width=3, token_width=8)
QUIET: dict[str, Any] = {"truncate": None, "use_tqdm": False}


def offline(facts: PoolingFacts = EMBEDDER) -> tuple[OfflinePooling, PoolingClient]:
    client = PoolingClient(facts, vocab_size=VOCAB_SIZE)
    processor = make_input_processor(client.ready, TOKENIZER)
    assert processor is not None
    return OfflinePooling(client, processor, max_concurrent=2), client


def vector(text: str, params: PoolingParams = EMBED, facts: PoolingFacts = EMBEDDER) -> Any:
    return pytest.approx(pooled(ids(text), params, facts)[0])


async def test_prompts_of_every_form_have_their_vectors_in_order() -> None:
    pooling, _ = offline()
    prompts = ["hello", {"prompt": "b"}, {"prompt_token_ids": ids("hello")}, ids("b"), "c"]

    outputs = embedding_outputs(await pooling.encode(prompts, None, "embed", **QUIET))

    expected = [vector(text) for text in ("hello", "b", "hello", "b", "c")]
    assert [output.outputs.embedding for output in outputs] == expected
    assert [output.prompt_token_ids for output in outputs[:2]] == [ids("hello"), ids("b")]
    assert outputs[0].outputs.hidden_size == 8
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3", "4"]


async def test_each_prompt_may_have_its_own_parameters() -> None:
    pooling, _ = offline()
    given = [PoolingParams(dimensions=2), PoolingParams(normalize=False)]

    first, other = await pooling.encode(["a", "b"], given, "embed", **QUIET)

    assert first.outputs.data == vector("a", given[0])
    assert other.outputs.data == vector("b", given[1])
    with pytest.raises(UserError, match="3 prompts have 2"):
        await pooling.encode(["a", "b", "c"], given, "embed", **QUIET)


async def test_encode_returns_a_row_per_token_and_a_number_per_class() -> None:
    pooling, _ = offline()
    (tokens,) = await pooling.encode("hello", None, "token_embed", **QUIET)
    classifier, _ = offline(CLASSIFIER)
    (made,) = classification_outputs(await classifier.encode("a", None, "classify", **QUIET))

    assert tokens.outputs.data.shape == (len(ids("hello")), 8)
    assert made.outputs.probs == vector("a", PoolingParams(task="classify"), CLASSIFIER)
    assert made.outputs.num_classes == 3


async def test_pairs_are_scored_by_either_kind_of_model() -> None:
    embedder, _ = offline()
    cross, client = offline(CROSS_ENCODER)
    a, b = (pooled(ids(text), EMBED, EMBEDDER)[0] for text in "ab")

    pair_scores = await embedder.score(TextPairs(["a"], ["b", "a"]), use_tqdm=False)
    each = await embedder.score(TextPairs(["a", "b"], ["b", "b"]), use_tqdm=False)
    read = await cross.score(TextPairs(["a"], ["b", "c"]), use_tqdm=False)

    assert [entry.outputs.score for entry in pair_scores] == pytest.approx([a @ b, 1.0])
    assert [entry.outputs.score for entry in each] == pytest.approx([a @ b, 1.0])
    assert [entry.prompt_token_ids for entry in each] == [ids("a") + ids("b"), ids("b") + ids("b")]
    scores = [
        pooled(queue.prompt, PoolingParams(task="score"), CROSS_ENCODER) for queue in client.queues
    ]
    assert [entry.outputs.score for entry in read] == pytest.approx(np.concatenate(scores)[:, 0])
    with pytest.raises(UserError, match="2 texts, it must have 1 or 3"):
        TextPairs(["a"] * 2, ["b"] * 3)


async def test_errors_name_the_index_of_the_prompt() -> None:
    pooling, client = offline()

    with pytest.raises(PromptTooLong, match=r"prompts\[1\]"):
        await pooling.encode(["a", "b" * 65], None, "embed", **QUIET)
    with pytest.raises(PromptTooLong, match=r"prompts\[1\]"):
        await pooling.encode([[1], "b" * 65], None, "embed", **QUIET)
    with pytest.raises(UserError, match="'classify', this model supports embed"):
        await pooling.encode("a", None, "classify", **QUIET)
    with pytest.raises(UserError, match="2 cache salts"):
        salted = [{"prompt": "a", "cache_salt": salt} for salt in "xy"]
        await pooling.encode(salted, None, "embed", **QUIET)

    assert not client.queues
