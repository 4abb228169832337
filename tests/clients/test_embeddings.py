"""Embeddings with openai-python, LangChain and LiteLLM, from a tiny encoder."""

import math
from collections.abc import Iterator
from typing import Any

import litellm
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from live import running
from pydantic import SecretStr
from tiny_encoders import make_pooling

pytestmark = pytest.mark.clients

TEXTS = ["A cat sleeps.", "A kitten naps.", "Two cars."]


@pytest.fixture(scope="module")
def url(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_pooling("bert", tmp_path_factory.mktemp("encoder") / "tiny")
    log = tmp_path_factory.mktemp("log") / "log"
    python = pytestconfig.getoption("--server-python")
    with running(str(folder), log, "--served-model-name=tiny", python=python) as live:
        yield f"{live.url}/v1"


@pytest.fixture(scope="module")
def vectors(url: str) -> list[list[float]]:
    """Embeddings by openai-python, which requests base64 by default."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        data = client.embeddings.create(model="tiny", input=TEXTS).data
    assert [entry.index for entry in data] == [0, 1, 2]
    return [entry.embedding for entry in data]


def test_base64_and_float_embeddings_are_equal_and_normalized(
    url: str, vectors: list[list[float]]
) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")

    for entry, vector in zip(answer.data, vectors, strict=True):
        assert entry.embedding == pytest.approx(vector, abs=1e-6)
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_langchain_returns_the_same_embeddings(url: str, vectors: list[list[float]]) -> None:
    ask: Any = {"model": "tiny", "base_url": url, "api_key": SecretStr("none"), "max_retries": 0}
    model = OpenAIEmbeddings(**ask, check_embedding_ctx_length=False)

    embeddings = model.embed_documents(TEXTS)

    assert embeddings[1] == pytest.approx(vectors[1], abs=1e-5)
    assert model.embed_query(TEXTS[1]) == pytest.approx(vectors[1], abs=1e-5)


def test_litellm_embeds_and_ranks(url: str, vectors: list[list[float]]) -> None:
    model: Any = {"model": "hosted_vllm/tiny", "api_base": url, "api_key": "none"}

    embeddings = litellm.embedding(**model, input=TEXTS)
    ranked = litellm.rerank(**model, query=TEXTS[0], documents=TEXTS[1:], top_n=1)

    assert embeddings.data[2]["embedding"] == pytest.approx(vectors[2], abs=1e-5)
    (best,) = ranked.results
    assert best["document"]["text"] == TEXTS[1 + best["index"]]


def test_an_embedding_model_refuses_chat(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    with client, pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
