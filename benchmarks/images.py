"""Chats with images of 448 x 448 pixels: time to first token and tokens per second of a server with
one and eight requests, the number of encodings of a repeated image, and the same for transformers.

    python benchmarks/images.py make TOKENIZER_FOLDER OUT_FOLDER
    python benchmarks/images.py serve "gaudiserve serve OUT_FOLDER --port {port}"
    python benchmarks/images.py transformers OUT_FOLDER

`make` writes a Qwen2.5-VL with random weights, in bfloat16: the text model has the shape of
Qwen2.5-0.5B, the tower 12 layers of 768. It only generates tokens that are words.
"""

import argparse
import asyncio
import base64
import io
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer

from benchmarks.checkpoints import word_ids
from benchmarks.machine import machine
from benchmarks.started import started

SIDE = 448
NUM_TOKENS = 64
ROUNDS = 3
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def make(source: Path, out: Path) -> None:
    """Write the checkpoint with the tokenizer in `source`, to which the special tokens are
    added."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(out / "tokenizer.json"))
    settings = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    image, video, start, end = map(tokenizer.token_to_id, SPECIAL)
    vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
    make_config: Any = transformers.Qwen2_5_VLConfig
    config = make_config(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": 12,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_heads": 12,
            "out_hidden_size": 896,
            "fullatt_block_indexes": [2, 5, 8, 11],
            "window_size": 112,
            "tokens_per_second": 2,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).bfloat16()
    words = torch.zeros(vocab_size, 1, dtype=torch.bfloat16)
    words[word_ids(out / "tokenizer.json")] = 1
    model.lm_head.weight.data *= words
    model.save_pretrained(out)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters in {out}")


def picture(seed: int) -> bytes:
    """A PNG of noise that differs for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (28, 28, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def content(seed: int) -> list[dict[str, Any]]:
    data = base64.b64encode(picture(seed)).decode()
    return [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": "Describe this picture."},
    ]


async def chat(http: httpx.AsyncClient, model: str, seed: int) -> tuple[float, int]:
    """Seconds to the first token, and the number of tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content(seed)}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_s, tokens, begun_s = 0.0, 0, time.monotonic()
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if not first_s and any(item["delta"].get("content") for item in event["choices"]):
                first_s = time.monotonic() - begun_s
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return first_s, tokens


async def measure(url: str) -> list[str]:
    """Rows of the table, and a line about an image that is sent again."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        await chat(http, model, 0)
        lines, seed = [], 1
        for streams in (1, 8):
            firsts, rates = [], []
            for _ in range(ROUNDS):
                begun_s = time.monotonic()
                found = await asyncio.gather(
                    *(chat(http, model, seed + item) for item in range(streams))
                )
                seed += streams
                rates.append(sum(count for _, count in found) / (time.monotonic() - begun_s))
                firsts += [first_s for first_s, _ in found]
            lines.append(_row(str(streams), firsts, rates))
        await chat(http, model, seed)
        before = await encoded(http)
        again = [(await chat(http, model, seed))[0] for _ in range(ROUNDS)]
        first_ms, count = 1000 * statistics.median(again), await encoded(http) - before
        lines.append(
            f"\nAn image that is sent again: {first_ms:.0f} ms to the first token, {count:.0f} "
            "images encoded."
        )
    return lines


async def encoded(http: httpx.AsyncClient) -> float:
    """Number of images that the tower has encoded; NaN for a server without this metric."""
    name = "gaudiserve:encoded_images_total"
    found = [
        line for line in (await http.get("/metrics")).text.splitlines() if line.startswith(name)
    ]
    return sum(float(entry.rsplit(" ", 1)[1]) for entry in found) if found else float("nan")


def generate(folder: Path) -> list[str]:
    """Lines of the table for transformers: an image, and eight images in a batch."""
    kind: Any = transformers.Qwen2_5_VLForConditionalGeneration
    model = kind.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    make_processor: Any = transformers.AutoImageProcessor
    processor = make_processor.from_pretrained(folder, backend="pil")
    lines, seed = [], 1
    for streams in (1, 8):
        firsts, rates = [], []
        for _ in range(ROUNDS):
            images: list[Image.Image] = [
                Image.open(io.BytesIO(picture(seed + item))) for item in range(streams)
            ]
            seed += streams
            begun_s = time.monotonic()
            inputs = _inputs(tokenizer, processor, images)
            with torch.inference_mode():
                model.generate(**inputs, max_new_tokens=1, do_sample=False)
                firsts.append(time.monotonic() - begun_s)
                begun_s = time.monotonic()
                inputs = _inputs(tokenizer, processor, images)
                model.generate(
                    **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
                )
            rates.append(streams * NUM_TOKENS / (time.monotonic() - begun_s))
        lines.append(_row(str(streams), firsts, rates))
    return lines


def _inputs(tokenizer: Any, processor: Any, images: list[Image.Image]) -> dict[str, Any]:
    pixels = processor(images, return_tensors="pt")
    count = int(pixels["image_grid_thw"][0].prod()) // 4
    messages = [{"role": "user", "content": content(0)}]
    messages[0]["content"][0] = {"type": "image"}  # type: ignore[index]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text = text.replace(SPECIAL[0], SPECIAL[0] * count)
    ids = tokenizer([text] * len(images), return_tensors="pt")["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids(SPECIAL[0])).long()
    return {**pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": kinds}  # fmt: skip


def _row(name: str, firsts: list[float], rates: list[float]) -> str:
    first_ms = 1000 * statistics.median(firsts)
    return f"| {name} | {first_ms:.0f} | {statistics.median(rates):.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("make")
    command.add_argument("tokenizer", type=Path)
    command.add_argument("out", type=Path)
    commands.add_parser("serve").add_argument("server")
    commands.add_parser("transformers").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.tokenizer, arguments.out)
        return
    print(f"{machine()}\n")
    if arguments.command == "serve":
        with started(arguments.server) as server:
            lines = asyncio.run(measure(f"http://127.0.0.1:{server.port}"))
    else:
        lines = generate(arguments.folder)
    print("| requests | first token, ms | tokens per second |\n| ---: | ---: | ---: |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
