"""The demo model, read from its GGUF file, against transformers' own reading of that file."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from demo import demo_gguf
from releases import transformers_before
from transformers import AutoModelForCausalLM

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
]


@pytest.fixture(scope="module")
def answers() -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy output) of every question, all in one batch."""
    params = SamplingParams(temperature=0, max_tokens=32)
    with LLM(model="demo", dtype="float32", max_model_len=512, max_num_seqs=32) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": question}] for question in QUESTIONS],
            params,
            use_tqdm=False,
        )
    return [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs]


def test_greedy_text_equals_that_of_transformers_on_twenty_prompts(
    answers: list[tuple[list[int], list[int]]],
) -> None:
    gguf = Path(demo_gguf())
    options: dict[str, Any] = {
        "torch_dtype" if transformers_before("5") else "dtype": torch.float32
    }
    # Releases that know this keep the weights quantised unless told; older ones never do.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **options)
    reference.eval()

    for prompt, output in answers:
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0]

        # The most likely token after every prefix of our own text: what greedy search would take.
        expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert output == expected
        assert len(output) == 32 or output[-1] == 2
