"""Log-probabilities over HTTP compared with transformers, in the combinations that evaluation
harnesses send: with echo, without output, in batches, streamed, from texts and token ids."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live import LiveServer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from gaudiserve import LLM, SamplingParams

Scores = Callable[[list[int]], torch.Tensor]
TEXTS = ["Hello there, how are you?", "a", "Söme ☃ text"]
"""The second text is a single token, which has no log-probability because no token precedes it."""


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> Tokenizer:
    return Tokenizer.from_file(f"{tiny_model}/tokenizer.json")


@pytest.fixture(scope="module")
def scores(tiny_model: str) -> Scores:
    """Log-probabilities of the next token after each token: (tokens, vocabulary)."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model).float()

    def score(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    return score


def ask(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer by index; the chunks of a stream are joined."""
    response = server.http.post(path, json={"return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        answer = response.json()
        num_tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
        drawn_for_one = body["best_of"] // body["n"] if "best_of" in body else 1
        assert answer["usage"]["completion_tokens"] == num_tokens * drawn_for_one
        return answer["choices"]
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames[:-2]:
        (part,) = json.loads(frame.removeprefix("data: "))["choices"]
        whole = choices.setdefault(part["index"], {**part, "text": "", "token_ids": []})
        whole["text"] += part["text"]
        whole["token_ids"] += part["token_ids"]
        if part["logprobs"] and whole["logprobs"] is not part["logprobs"]:
            for key, entries in part["logprobs"].items():
                whole["logprobs"][key] += entries
    return [choices[index] for index in sorted(choices)]


def check(choice: dict[str, Any], fields: dict[str, Any], scores: Scores, text: str) -> None:
    """Compare the log-probabilities of a choice with transformers, and check their format."""
    logprobs, k = choice["logprobs"], fields["logprobs"]
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    tokens = [*prompt, *output]
    table = scores(tokens)
    skipped = 0 if fields.get("echo") else len(prompt)
    expected = [None, *[float(table[i, token]) for i, token in enumerate(tokens[1:])]][skipped:]
    assert len(logprobs["tokens"]) == len(tokens) - skipped
    assert logprobs["token_logprobs"][0 if skipped else 1 :] == pytest.approx(
        expected[0 if skipped else 1 :], abs=1e-4
    )
    if not skipped:
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for i, (value, top) in enumerate(
        zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    ):
        if value is None:
            continue
        assert len(top) in ({1} if k == 0 else {k, k + 1})
        assert top[logprobs["tokens"][i]] == value
        best = table[i + skipped - 1].topk(max(k, 1)).values.tolist()
        if k:
            # Harnesses call a token greedy if no value of the dict exceeds its own value.
            assert sorted(top.values(), reverse=True)[:k] == pytest.approx(best, abs=1e-4)
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    if fields.get("echo"):
        assert choice["text"].startswith(text)
        assert offsets[0] == 0
        for token, start in zip(logprobs["tokens"][: len(prompt)], offsets, strict=False):
            assert "\ufffd" in token or text[start : start + len(token)] == token
        assert offsets[len(prompt) :][:1] == ([len(text)] if output else [])
    elif output:
        assert offsets[0] == 0


COMBINATIONS: list[dict[str, Any]] = [
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234},
    {"echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "stream": True},
    {"echo": True, "max_tokens": 0, "logprobs": 5, "n": 2, "stream": True},
    {"echo": True, "max_tokens": 3, "logprobs": 0, "n": 3, "stream": True},
    {"echo": True, "max_tokens": 4, "logprobs": 20, "n": 2, "temperature": 2, "top_p": 0.9},
    {"echo": True, "max_tokens": 5, "logprobs": 2, "use_beam_search": True, "n": 3},
    {"echo": True, "max_tokens": 5, "logprobs": 2, "best_of": 4, "n": 2, "ignore_eos": True},
    {"echo": True, "max_tokens": 2, "logprobs": 2, "prompt_logprobs": 4},
    {"max_tokens": 4, "logprobs": 0, "n": 2},
    {"max_tokens": 4, "logprobs": 5, "stream": True, "presence_penalty": 2, "logit_bias": {"9": 5}},
    {"max_tokens": 8, "logprobs": 3, "stop": ["e", "a", "☃"], "n": 4},
    {"max_tokens": 8, "logprobs": 3, "stop": ["e", "a"], "n": 4, "stream": True},
    {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0, "n": 2},
]


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "token ids"])
@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_log_probabilities_equal_transformers(
    server: LiveServer, tokenizer: Tokenizer, scores: Scores, fields: dict[str, Any], as_ids: bool
) -> None:
    prompts: list[Any] = list(TEXTS)
    if as_ids:
        prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]

    choices = ask(server, "/v1/completions", {"prompt": prompts, **fields})

    num_choices = fields.get("n", 1)
    assert len(choices) == len(TEXTS) * num_choices
    for index, choice in enumerate(choices):
        assert choice["index"] == index
        i = index // num_choices
        check(choice, fields, scores, TEXTS[i])
        width = fields.get("prompt_logprobs")
        if width is not None:
            check_prompt(choice["prompt_logprobs"], choice["prompt_token_ids"], scores, width)


def check_prompt(logprobs: list[Any], prompt: list[int], scores: Scores, width: int) -> None:
    table = scores(prompt)
    assert len(logprobs) == len(prompt) and logprobs[0] is None
    for i, (token, entries) in enumerate(zip(prompt[1:], logprobs[1:], strict=True)):
        assert len(entries) in (max(width, 1), width + 1)
        assert entries[str(token)]["logprob"] == pytest.approx(float(table[i, token]), abs=1e-4)
        best = table[i].topk(width).indices.tolist()
        assert set(map(str, best)) <= set(entries)
        for rank, item in enumerate(best, start=1):
            assert entries[str(item)]["rank"] == rank


def test_chat_returns_prompt_logprobs(server: LiveServer, scores: Scores) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "prompt_logprobs": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "max_tokens": 3,
        "return_token_ids": True,
    }

    answer = server.http.post("/v1/chat/completions", json=body).json()

    prompt = answer["prompt_token_ids"]
    check_prompt(answer["prompt_logprobs"], prompt, scores, 3)
    for choice in answer["choices"]:
        output = choice["token_ids"]
        table = scores([*prompt, *output])[len(prompt) - 1 :]
        for i, (entry, token) in enumerate(zip(choice["logprobs"]["content"], output, strict=True)):
            assert entry["logprob"] == pytest.approx(float(table[i, token]), abs=1e-4)
            best = table[i].topk(2).values.tolist()
            assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
                best, abs=1e-4
            )


def test_a_prompt_that_fills_the_context_is_scored(server: LiveServer, scores: Scores) -> None:
    prompt = [5 + i * 7 % 300 for i in range(2048)]

    (choice,) = ask(
        server,
        "/v1/completions",
        {"prompt": [prompt], "echo": True, "max_tokens": 0, "logprobs": 1},
    )
    refused = server.http.post(
        "/v1/completions", json={"prompt": [prompt], "echo": True, "max_tokens": 1, "logprobs": 1}
    )

    values = choice["logprobs"]["token_logprobs"]
    table = scores(prompt)
    assert values[1:] == pytest.approx(
        [float(table[i, token]) for i, token in enumerate(prompt[1:])], abs=2e-4
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_logprobs_mode_reaches_the_sampler(tiny_model: str, scores: Scores, mode: str) -> None:
    params = SamplingParams(temperature=0.5, top_k=3, max_tokens=2, logprobs=4, prompt_logprobs=0)
    flags: dict[str, Any] = {"max_model_len": 64, "device": "cpu", "dtype": "float32"}

    with LLM(tiny_model, **flags, logprobs_mode=mode) as llm:
        (output,) = llm.generate([[7, 8, 9]], params, use_tqdm=False)

    (choice,) = output.outputs
    table = scores([7, 8, 9, *choice.token_ids])
    for i, entries in enumerate(choice.logprobs or (), start=2):
        shifts = [entry.logprob - float(table[i, token]) for token, entry in entries.items()]
        if mode == "raw_logits":
            # Logits differ from log-probabilities by a constant that is not 0.
            assert shifts == pytest.approx([shifts[0]] * len(shifts), abs=1e-4)
            assert abs(shifts[0]) > 1e-2
        else:
            best = torch.log_softmax(2 * table[i].topk(3).values, dim=-1).tolist()
            found = sorted((entry.logprob for entry in entries.values()), reverse=True)
            assert found == pytest.approx([*best, *[-9999.0] * (len(found) - 3)], abs=1e-4)
    assert output.prompt_logprobs is not None
    for i, entries in enumerate(output.prompt_logprobs[1:]):
        assert entries is not None
        ((token, entry),) = entries.items()
        assert entry.logprob == pytest.approx(float(table[i, token]), abs=1e-4)
