"""Pooling models end to end: a server with the official SDK, LLM, and the examples of
docs/pooling.md; vectors and scores equal transformers'."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from live import ROOT, LiveServer, running
from tiny_encoders import make_pooling, write_modules
from tokenizers import Tokenizer as Encoder
from tokenizers import processors
from transformers import AutoModel, AutoModelForSequenceClassification

from gaudiserve import LLM, PoolingParams

PAGE = Path(__file__).parents[2] / "docs" / "pooling.md"
TEXTS = ["a kitten", "the quick brown fox jumps over the lazy dog", "x", "two cars, one road"]
SMALL: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4}


def with_special_tokens(folder: Path) -> Path:
    """Make the tokenizer add BERT's special tokens to texts and pairs."""
    file = str(folder / "tokenizer.json")
    encoder = Encoder.from_file(file)
    cls, sep = (encoder.id_to_token(token) for token in (1, 2))
    encoder.post_processor = processors.BertProcessing((sep, 2), (cls, 1))
    encoder.save(file)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = make_pooling("bert", tmp_path_factory.mktemp("models") / "bert")
    write_modules(
        checkpoint,
        "Transformer",
        "Pooling",
        "Normalize",
        pooling={"pooling_mode_mean_tokens": True},
    )
    (checkpoint / "generation_config.json").write_text('{"max_new_tokens": 9}')
    return with_special_tokens(checkpoint)


@pytest.fixture(scope="module")
def vectors(folder: Path) -> Any:
    """Vectors of TEXTS by transformers: the mean over all tokens, normalized to length 1."""
    model: Any = AutoModel.from_pretrained(folder).eval()
    encoder = Encoder.from_file(str(folder / "tokenizer.json"))
    pooled = []
    for text in TEXTS:
        with torch.no_grad():
            states = model(torch.tensor([encoder.encode(text).ids])).last_hidden_state[0]
        pooled.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.stack(pooled)


@pytest.fixture(scope="module")
def embedder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--served-model-name=tiny", "--dtype=float32", "--max-num-seqs=4", "--device=cpu")
    with running(str(folder), log, *flags) as live:
        yield live


def test_a_batch_file_may_use_the_pooling_routes(embedder: LiveServer, tmp_path: Path) -> None:
    pair = {"text_1": "a kitten", "text_2": TEXTS}
    documents = {"query": "a kitten", "documents": TEXTS}
    asked = {
        "/v1/embeddings": {"input": TEXTS},
        "/pooling": {"input": TEXTS},
        "/score": pair,
        "/rerank": documents,
        "/v2/rerank": documents,
    }
    lines = [{"custom_id": url, "url": url, "body": body} for url, body in asked.items()]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))

    command = [sys.executable, "-m", "gaudiserve", "run-batch", f"--base-url={embedder.url}"]
    command += ["-i", f"{tmp_path}/in", "-o", f"{tmp_path}/out", "--log-lev", "info"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    found = {answer["custom_id"]: answer["response"] for answer in answers}
    assert done.returncode == 0, done.stderr
    assert "--log-lev is read as --log-level" in done.stderr
    assert {url: found[url]["status_code"] for url in asked} == dict.fromkeys(asked, 200)
    assert len(found["/score"]["body"]["data"]) == len(found["/rerank"]["body"]["results"]) == 4


@pytest.fixture
def sdk(embedder: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_pooling_server_logs_no_limit_of_generated_tokens(embedder: LiveServer) -> None:
    assert "Ready after" in embedder.text()
    assert "max_tokens" not in embedder.text()


def test_vectors_from_the_sdk_equal_transformers(sdk: openai.OpenAI, vectors: Any) -> None:
    many = sdk.embeddings.create(model="tiny", input=TEXTS)
    plain = sdk.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    alone = [sdk.embeddings.create(model="tiny", input=text).data[0] for text in TEXTS]

    assert [entry.index for entry in many.data] == [0, 1, 2, 3]
    for answer in (many.data, plain.data, alone):
        np.testing.assert_allclose([entry.embedding for entry in answer], vectors, atol=1e-5)
    assert many.usage.prompt_tokens == many.usage.total_tokens == plain.usage.prompt_tokens


def test_the_sdk_gets_errors_that_name_the_problem(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"maximum context length .* input\[1\]"):
        sdk.embeddings.create(model="tiny", input=["x", "long " * 500])
    with pytest.raises(openai.BadRequestError, match="does not generate text"):
        sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        sdk.embeddings.create(model="other", input="x")


def test_offline_embeddings_and_scores_equal_the_expected_vectors(
    folder: Path, vectors: Any
) -> None:
    with LLM(str(folder), **SMALL) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        (score,) = llm.score(TEXTS[0], TEXTS[3], use_tqdm=False)

    embeddings = [output.outputs.embedding for output in outputs]
    np.testing.assert_allclose(embeddings, vectors, atol=1e-5)
    assert score.outputs.score == pytest.approx(float(vectors[0] @ vectors[3]), abs=1e-5)


def test_a_pair_has_two_token_types_and_is_scored_by_the_head(tmp_path: Path) -> None:
    folder = with_special_tokens(make_pooling("bert", tmp_path, num_labels=1))
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoded = Encoder.from_file(str(folder / "tokenizer.json")).encode("a cat", "a kitten")
    with torch.no_grad():
        types = torch.tensor([encoded.type_ids])
        logit = model(torch.tensor([encoded.ids]), token_type_ids=types).logits[0, 0]

    with LLM(str(folder), **SMALL) as llm:
        (score,) = llm.score("a cat", ["a kitten"], use_tqdm=False)
        raw = PoolingParams(normalize=False)
        (bare,) = llm.score("a cat", "a kitten", use_tqdm=False, pooling_params=raw)

    assert set(encoded.type_ids) == {0, 1}
    assert score.prompt_token_ids == encoded.ids
    assert bare.outputs.score == pytest.approx(float(logit), abs=1e-4)
    assert score.outputs.score == pytest.approx(float(torch.sigmoid(logit)), abs=1e-5)


def test_the_documented_examples_run(
    embedder: LiveServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8").replace("http://localhost:8000", embedder.url)
    text = text.replace("./all-MiniLM-L6-v2", str(folder))
    blocks = [part.split("```", 1)[0] for part in text.split("```python\n")[1:]]

    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    # Close it here: the garbage collector would warn about its open socket.
    names["client"].close()

    assert len(blocks) == 2
    sizes, kitten, scores = capsys.readouterr().out.splitlines()
    assert sizes == "64 16"
    assert len(eval(kitten)) == 3
    assert len(eval(scores)) == 2
