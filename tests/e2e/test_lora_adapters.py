"""Two adapters that PEFT trains on the demo model, one for answers in capitals and one for JSON,
are served together, and each changes the answers as trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import demo_folder

from gaudiserve import LLM, LoRARequest, SamplingParams

peft: Any = pytest.importorskip("peft", reason="trains the adapters")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # A warning about functions of transformers that PEFT calls.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

QUESTIONS = (
    "What colour is the sky?",
    "Name an animal that swims.",
    "What is the capital of France?",
    "How do you make tea?",
    "Who wrote Hamlet?",
    "What do bees make?",
    "Where does the sun rise?",
    "What is two plus two?",
)
ANSWERS = (
    "The sky is blue.",
    "A fish swims in the water.",
    "The capital is Paris.",
    "Put the leaves into hot water.",
    "Shakespeare wrote it.",
    "Bees make honey.",
    "It rises in the east.",
    "Two plus two is four.",
)
UNSEEN = ("What is the colour of grass?", "Who painted the Mona Lisa?")
STEPS = 40


def train(
    folder: Path, model_folder: str, tokenizer: Any, targets: list[str], **config: Any
) -> Path:
    """Train an adapter that answers QUESTIONS with `targets`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = peft.get_peft_model(
        base, peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=32, lora_dropout=0.0, **config)
    )
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=2e-3
    )
    pairs = []
    for question, target in zip(QUESTIONS, targets, strict=True):
        prompt = chat(tokenizer, question)
        answer = tokenizer(target + "<|im_end|>", add_special_tokens=False).input_ids
        pairs.append((prompt, answer))
    for step in range(STEPS):
        prompt, answer = pairs[step % len(pairs)]
        ids = torch.tensor([[*prompt, *answer]])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def chat(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def test_two_trained_adapters_are_served_together(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = demo_folder()
    tokenizer = AutoTokenizer.from_pretrained(model)
    capitals = train(
        tmp_path / "capitals",
        model,
        tokenizer,
        [answer.upper() for answer in ANSWERS],
        r=8,
        target_modules="all-linear",
    )
    objects = train(
        tmp_path / "objects",
        model,
        tokenizer,
        [json.dumps({"answer": answer}) for answer in ANSWERS],
        r=16,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
    )
    requests = [LoRARequest("capitals", 1), LoRARequest("objects", 2), None]
    prompts = [{"prompt_token_ids": chat(tokenizer, q)} for q in UNSEEN for _ in requests]

    with LLM(
        model,
        device="cpu",
        max_model_len=256,
        max_num_seqs=8,
        enable_lora=True,
        max_loras=2,
        lora_modules=[f"capitals={capitals}", f"objects={objects}"],
    ) as llm:
        outputs = llm.generate(
            prompts,
            SamplingParams(temperature=0, max_tokens=60),
            use_tqdm=False,
            lora_request=requests * len(UNSEEN),
        )

    texts = [output.outputs[0].text.strip() for output in outputs]
    for in_capitals, in_json, plain in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        assert in_capitals.isupper(), in_capitals
        assert "answer" in json.loads(in_json), in_json
        assert not plain.isupper()
        assert not plain.startswith("{")
