"""The demo model, loaded from its GGUF file, compared with transformers loading the same file."""

import functools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from demo import demo_gguf, read_demo_once
from releases import transformers_before
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.checkpoint.demo import SAMPLING
from gaudiserve import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue in two sentences.",
    "def fibonacci(n):",
    "List five fruits.",
    "Translate 'good morning' to Spanish.",
    "What is 12 times 12?",
    "Tell me a joke about cats.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "Summarize the plot of Romeo and Juliet.",
    "What causes rain?",
    "Name three planets.",
    "How do I boil an egg?",
    "Qu'est-ce que la photosynthèse ?",
    "Write a SQL query that counts users.",
    "What is a black hole? 🕳️",
    "Continue: once upon a time, in a village far away,",
    "Why do we sleep?",
    "Compare tea and coffee.",
    # Typical first messages of new users. The answers are odd, and transformers gives the same
    # answers.
    *("Hello", "Hello!", "Who are you?", "What can you do?"),
]
FEW = [QUESTIONS[index] for index in (0, 3, 14, 16, 20)]
"""A question, code, another language, a character of four bytes, and a greeting."""


def answers(questions: list[str], max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy output) of every question, all in one batch."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(model="demo", dtype="float32", max_model_len=512, max_num_seqs=32) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": question}] for question in questions],
            params,
            use_tqdm=False,
        )
    return [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model, from the same file, in float32."""
    read_demo_once(monkeypatch)
    # transformers builds the name table again for every module, which takes seconds.
    names = functools.cache(gguf.get_tensor_name_map)
    monkeypatch.setattr(gguf, "get_tensor_name_map", names)
    path = Path(demo_gguf())
    options: dict[str, Any] = {
        "torch_dtype" if transformers_before("5") else "dtype": torch.float32
    }
    # Releases with this option keep the weights quantized by default; older ones never do.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()


def test_prompts_and_defaults_equal_the_model_card(monkeypatch: pytest.MonkeyPatch) -> None:
    read_demo_once(monkeypatch)
    path = Path(demo_gguf())
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    prompts = [prompt for prompt, _ in answers(QUESTIONS, 1)]

    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        text = tokenizer.decode(prompt)
        chat = [{"role": "user", "content": question}]
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert text == expected
        assert prompt == tokenizer.encode(expected, add_special_tokens=False)
        assert "You are a helpful AI assistant named SmolLM, trained by Hugging Face" in text
    # Values of the model card of SmolLM2-135M-Instruct, except max_tokens, which this project
    # chose.
    assert SAMPLING == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 512}


@pytest.mark.parametrize(
    ("questions", "max_tokens"),
    [(FEW, 16), pytest.param(QUESTIONS, 32, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_greedy_text_equals_transformers(
    questions: list[str], max_tokens: int, reference: Any
) -> None:
    found = answers(questions, max_tokens)
    # Right padding, which earlier tokens do not attend to.
    texts = pad_sequence([torch.tensor(prompt + output) for prompt, output in found], True)
    with torch.inference_mode():
        logits = reference(texts).logits

    for (prompt, output), row in zip(found, logits, strict=True):
        # The most likely token after every prefix of the output, which greedy search picks.
        end = len(prompt) + len(output)
        expected = row[len(prompt) - 1 : end - 1].argmax(-1).tolist()
        assert output == expected
        assert len(output) == max_tokens or output[-1] == 2
