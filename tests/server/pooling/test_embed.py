"""POST /v2/embed: Cohere's route for embeddings."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from http_rig import VOCAB_SIZE, Rig, ids, in_memory
from pooling_client import EMBEDDER, PoolingClient, pooled

from config.params.pooling import PoolingFacts, PoolingParams
from server.http.json_encoder import encode_json
from server.pooling.pipeline import encode_vectors, typed_embeddings

EMBED = PoolingParams(task="embed")
PROMPTED = PoolingFacts(
    tasks=("embed",),
    width=8,
    token_width=8,
    normalizes=True,
    dimensions=None,
    includes_prompt=True,
    prompts={"search_query": "to: "},
)


def client(facts: PoolingFacts = EMBEDDER) -> PoolingClient:
    return PoolingClient(facts, vocab_size=VOCAB_SIZE)


def expected(text: str, params: PoolingParams = EMBED) -> Any:
    return pytest.approx(pooled(ids(text), params, EMBEDDER)[0])


async def embed(rig: Rig, **body: Any) -> dict[str, Any]:
    response = await rig.post("/v2/embed", body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def refused(rig: Rig, **body: Any) -> dict[str, Any]:
    response = await rig.post("/v2/embed", body)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


async def test_texts_have_the_vectors_of_the_openai_route() -> None:
    async with in_memory(client()) as rig:
        answer = await embed(rig, model="demo", texts=["hello", "world"])
        openai = (await rig.post("/v1/embeddings", {"input": ["hello", "world"]})).json()

    vectors = [entry["embedding"] for entry in openai["data"]]
    assert answer.pop("id").startswith("embd-")
    assert answer == {
        "embeddings": {"float": vectors},
        "texts": ["hello", "world"],
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {
                "input_tokens": openai["usage"]["prompt_tokens"],
                "image_tokens": 0,
            },
        },
        "response_type": "embeddings_by_type",
    }
    assert vectors[1] == expected("world")


async def test_vectors_are_returned_in_all_requested_types() -> None:
    types = ["float", "binary", "ubinary", "base64"]
    async with in_memory(client()) as rig:
        found = (await embed(rig, texts=["hello"], embedding_types=types))["embeddings"]

    (vector,) = found["float"]
    bits = "".join("1" if number >= 0 else "0" for number in vector)
    assert list(found) == types
    assert found["ubinary"] == [[int(bits, 2)]]
    assert found["binary"] == [[int(bits, 2) - 128]]
    assert np.frombuffer(base64.b64decode(found["base64"][0]), "<f4") == pytest.approx(vector)


def test_binary_vectors_have_the_first_number_in_the_highest_bit() -> None:
    rows = np.array([[1, -1, -1, -1, -1, -1, -1, 0.0] * 2], "<f4")

    found = typed_embeddings(["ubinary", "binary"], [rows])

    assert found["ubinary"] == [[0b10000001, 0b10000001]]
    assert found["binary"] == [[1, 1]]


@pytest.mark.parametrize(
    "shape", [(3,), (4097,), (20_000,), (1, 8), (1500, 8), (7, 5000), (3, 4096), (2, 4097)]
)
def test_pieces_of_vectors_concatenate_to_the_whole_vectors(shape: tuple[int, ...]) -> None:
    vectors = np.random.default_rng(0).standard_normal(shape).astype("<f4")

    numbers = encode_json({"a": [encode_vectors(vectors, "float")]})
    text = encode_json({"a": [encode_vectors(vectors, "base64")]})

    assert json.loads(numbers) == {"a": [vectors.tolist()]}
    assert base64.b64decode(json.loads(text)["a"][0]) == vectors.tobytes()


async def test_text_parts_of_an_input_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    async with in_memory(client()) as rig:
        answer = await embed(rig, inputs=[{"content": parts}])

    assert answer["embeddings"]["float"] == [expected("hello")]
    assert "texts" not in answer


async def test_truncation_side_and_length_come_from_the_request() -> None:
    engine = client()
    async with in_memory(engine) as rig:
        await embed(rig, texts=["hello world"], max_tokens=2)
        await embed(rig, texts=["hello world"], max_tokens=2, truncate="START")
        await embed(rig, texts=["hello " * 200])
        await embed(rig, texts=["hello world"], max_tokens=5000)
        await embed(rig, texts=["hello"], output_dimension=8)
        too_long = await refused(rig, texts=["hi", "hello " * 200], truncate="NONE")
        over = await refused(rig, texts=["hi", "hello world"], truncate="NONE", max_tokens=3)

    first, second, third, whole, sized = engine.queues
    assert first.prompt == ids("hello world")[:2]
    assert second.prompt == ids("hello world")[-2:]
    assert len(third.prompt) == 64
    assert whole.prompt == ids("hello world")
    assert sized.pooling == PoolingParams(task="embed", dimensions=8)
    assert too_long["param"] == over["param"] == "texts"
    assert over["message"].startswith("texts[1] has ")


async def test_the_input_type_names_a_prompt_of_the_model() -> None:
    engine = client(PROMPTED)
    async with in_memory(engine) as rig:
        await embed(rig, texts=["hello"], input_type="search_query")
        await embed(rig, texts=["hello"])
        unknown = await refused(rig, texts=["hello"], input_type="clustering")

    assert [queue.prompt for queue in engine.queues] == [ids("to: hello"), ids("hello")]
    assert unknown["param"] == "input_type"
    assert unknown["message"] == "Unsupported input_type 'clustering', this model has search_query"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", ""]}, "texts"),
        ({"texts": [1]}, "texts"),
        ({"texts": "a"}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": []}]}, "inputs"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, "inputs"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 3}, "embedding_types"),
        ({"texts": ["a"], "output_dimension": 9}, "output_dimension"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "input_type": "x"}, "input_type"),
    ],
)
async def test_the_error_names_invalid_fields(body: dict[str, Any], param: str) -> None:
    async with in_memory(client()) as rig:
        assert (await refused(rig, **body))["param"] == param
