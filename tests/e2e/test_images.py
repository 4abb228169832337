"""Images over HTTP and from Python, from the bytes to the tokens, compared with transformers."""

import base64
import json
import operator
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import ATTEMPTS
from live import LiveServer, running
from PIL import Image
from tiny_vision import FAMILIES as TINY
from tiny_vision import clip, gif_bytes, image_bytes, make_tiny_vision, picture
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)
from waits import WAIT_S

from gaudiserve import LLM, SamplingParams
from server.multimodal.image_processor import ImageProcessor, minimax_m3_processor
from server.multimodal.messages import Setup, Video
from server.multimodal.phi4_images import Phi4ImageProcessor
from server.multimodal.video import read_frames

# The last two families support images only in transformers.
FAMILIES = ["llava", "qwen2_vl"]
FAMILIES += [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "gemma3", "mllama", "phi4_multimodal"),
        "minimax_m3_vl",
    )
]
FAMILIES += [
    pytest.param(name, marks=pytest.mark.slow) for name in ("lighton_ocr", "llava_onevision")
]
NUM_TOKENS = 12
QUESTION = "Who?"
FLAGS = ("--served-model-name=tiny", "--dtype=float32", "--max-model-len=512")
FLAGS += ("--cross-attention-images=2",)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_vision(family, tmp_path_factory.mktemp("vision") / family))


@pytest.fixture(scope="module")
def live(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with running(folder, tmp_path_factory.mktemp("images") / "log", *FLAGS) as server:
        yield server


def part(image: Image.Image) -> dict[str, Any]:
    data = base64.b64encode(image_bytes(image)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def turn(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": entry} if isinstance(entry, str) else part(entry)
        for entry in parts
    ]
    return {"role": "user", "content": content}


def processed(folder: str, text: str, images: list[Image.Image]) -> dict[str, Any]:
    """Inputs from the processor of transformers; for families whose processor needs torchvision,
    from its image processor and an expanded prompt."""
    if "mllama" in folder:
        return seen_by_layers(folder, text, images)
    if "phi4" in folder:
        return with_crops(folder, text, images)
    if "minimax" in folder:
        return with_own_patches(folder, text, images)
    if "onevision" in folder:
        # The processor's class needs torchvision for videos.
        return with_rows(folder, text, images)
    if "qwen" not in folder:
        processor = AutoProcessor.from_pretrained(folder, backend="pil")
        return dict(processor(text=text, images=images or None, return_tensors="pt"))
    inputs: dict[str, Any] = {}
    mark = "<|image_pad|>"
    if images:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        inputs = dict(processor(images, return_tensors="pt"))
        first, *others = text.split(mark)
        counts = (inputs["image_grid_thw"].prod(-1) // 4).tolist()
        text = first + "".join(mark * n + item for n, item in zip(counts, others, strict=True))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids(mark)).long()
    return {**inputs, "input_ids": ids, "mm_token_type_ids": kinds}


def seen_by_layers(folder: str, text: str, images: list[Image.Image]) -> dict[str, Any]:
    """Inputs from Llama 3.2 Vision's processor, without the BOS token, which the template
    writes."""
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    if not images:
        return {"input_ids": ids}
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = dict(processor([images], return_tensors="pt"))
    num_tiles = inputs.pop("num_tiles")
    token_id = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|image|>")
    mask = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(ids[0].tolist(), token_id)], num_tiles, 4, ids.shape[1]
    )
    return {**inputs, "input_ids": ids, "cross_attention_mask": torch.from_numpy(mask)}


def with_own_patches(folder: str, text: str, images: list[Image.Image]) -> dict[str, Any]:
    """Inputs from this project's image processor, which other tests compare with transformers'."""
    inputs: dict[str, Any] = {}
    first, *others = text.split("]<]image[>[")
    if images:
        fields = json.loads(Path(folder, "preprocessor_config.json").read_text())
        inputs = dict(minimax_m3_processor(fields)(images=images, return_tensors="pt"))
        first += "".join(
            f"]<]start of image[>[{']<]image[>[' * (int(grid.prod()) // 4)}]<]end of image[>[{rest}"
            for grid, rest in zip(inputs["image_grid_thw"], others, strict=True)
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {**inputs, "input_ids": tokenizer(first, return_tensors="pt")["input_ids"]}


def with_rows(folder: str, text: str, images: list[Image.Image]) -> dict[str, Any]:
    """Inputs with as many image tokens as transformers' tower makes embeddings."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not images:
        return {"input_ids": tokenizer(text, return_tensors="pt")["input_ids"]}
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = dict(processor(images, return_tensors="pt"))
    # The model's processor gives the number of images per conversation.
    inputs["batch_num_images"] = torch.ones(len(images), dtype=torch.int64)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        features = model.model.get_image_features(**inputs).pooler_output
    first, *others = text.split("<image>")
    text = first + "".join(
        "<image>" * len(rows) + item for rows, item in zip(features, others, strict=True)
    )
    return {**inputs, "input_ids": tokenizer(text, return_tensors="pt")["input_ids"]}


def with_crops(folder: str, text: str, images: list[Image.Image]) -> dict[str, Any]:
    """Inputs from this project's image processor, with each image padded to the largest number of
    crops."""
    fields = json.loads(Path(folder, "preprocessor_config.json").read_text())
    found = [Phi4ImageProcessor(fields)(images=[image]) for image in images]
    inputs: dict[str, Any] = {}
    if found:
        most = max(entry["image_pixel_values"].shape[1] for entry in found)
        for name in ("image_pixel_values", "image_attention_mask"):
            tensors = [torch.from_numpy(entry[name]) for entry in found]
            inputs[name] = torch.cat(
                [
                    torch.cat(
                        (tensor, tensor.new_ones(1, most - tensor.shape[1], *tensor.shape[2:])),
                        dim=1,
                    )
                    for tensor in tensors
                ]
            )
        inputs["image_sizes"] = torch.cat(
            [torch.from_numpy(entry["image_sizes"]) for entry in found]
        )
    mark = "<|image|>"
    first, *others = text.split(mark)
    counts = [entry["num_img_tokens"][0] for entry in found]
    text = first + "".join(mark * n + item for n, item in zip(counts, others, strict=True))
    return {
        **inputs,
        "input_ids": AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"],
    }


def expected(folder: str, parts: tuple[Any, ...]) -> tuple[list[int], int]:
    """(greedy tokens of transformers, number of prompt tokens)."""
    kind = AutoModelForCausalLM if "phi4" in folder else AutoModelForImageTextToText
    # With sdpa, transformers' tower of Phi-4 is causal for images without padding.
    options = {"attn_implementation": "eager"} if "phi4" in folder else {}
    model = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in parts
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    images = [part for part in parts if not isinstance(part, str)]
    inputs = processed(folder, text, images)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    count = inputs["input_ids"].shape[1]
    return output[0, count:].tolist(), count


@pytest.mark.parametrize(
    "sizes", [[(56, 56)], [(100, 40), (60, 90)], []], ids=["one", "two", "none"]
)
def test_a_chat_with_images_gives_the_tokens_of_transformers(
    live: LiveServer, folder: str, sizes: list[tuple[int, int]]
) -> None:
    parts = ("Look:", *(picture(*size, seed=i) for i, size in enumerate(sizes)), "What is it?")
    body = {"messages": [turn(*parts)], "temperature": 0, "max_tokens": NUM_TOKENS}
    tokens, count = expected(folder, parts)

    answer = live.ask("/v1/chat/completions", {**body, "return_token_ids": True}).json()

    assert answer["usage"]["prompt_tokens"] == count
    assert answer["choices"][0]["token_ids"] == tokens
    counted = live.ask("/tokenize", {"messages": body["messages"]}).json()
    assert counted["count"] == count


def test_a_chat_with_a_video_gives_the_tokens_of_transformers(
    live: LiveServer, folder: str, family: str
) -> None:
    if "qwen" not in family:
        pytest.skip("it does not accept videos")
    # In transformers 5, text after a video with more time steps than rows has other positions.
    frames = gif_bytes(clip(100, 90, 5))
    url = f"data:image/gif;base64,{base64.b64encode(frames).decode()}"
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "Then?"}]
    kind = AutoModelForCausalLM if "phi4" in folder else AutoModelForImageTextToText
    # With sdpa, transformers' tower of Phi-4 is causal for images without padding.
    options = {"attn_implementation": "eager"} if "phi4" in folder else {}
    model = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The class of transformers needs torchvision.
    own = ImageProcessor(Setup(folder, "<|image_pad|>", {}, "<|video_pad|>"))
    answer = own.process_video(read_frames(Video(frames), 32, -1))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, content[1]]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    mark = TINY[family].video_mark if family.startswith("qwen3") else "<|video_pad|>"
    ids = tokenizer(text.replace(mark, answer.text), return_tensors="pt")["input_ids"]
    values = {
        tensor.name: torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))
        for tensor in answer.tensors
    }
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            mm_token_type_ids=2 * (ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")).long(),
            pixel_values_videos=values["pixel_values"].view(answer.tensors[0].shape),
            video_grid_thw=values["image_grid_thw"].view(1, 3),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )

    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    told = live.ask(
        "/v1/chat/completions", {**body, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    ).json()

    assert told["usage"]["prompt_tokens"] == ids.shape[1]
    assert told["choices"][0]["token_ids"] == output[0, ids.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "status", "reason"),
    [
        # The processor writes 256 tokens for an image, and this tower makes 16 embeddings.
        ("got_ocr2", 500, "logits of output token 1 were NaN or infinite"),
        ("ovis2", 400, "the model takes 0"),
        ("idefics2", 400, "this server does not accept images"),
    ],
)
def test_an_image_that_an_unlisted_model_cannot_take_fails_only_its_request(
    family: str, status: int, reason: str, tmp_path: Path
) -> None:
    folder = str(make_tiny_vision(family, tmp_path / family))
    body = {"temperature": 0, "max_tokens": NUM_TOKENS}
    with running(folder, tmp_path / "log", *FLAGS) as live:
        before = live.ask("/v1/chat/completions", {**body, "messages": [turn("Hello")]}).json()
        refused = live.ask(
            "/v1/chat/completions", {**body, "messages": [turn("Look:", picture(56, 56))]}
        )
        behind = live.ask("/v1/chat/completions", {**body, "messages": [turn("Hello")]}).json()

    assert refused.status_code == status
    assert reason in refused.json()["error"]["message"]
    assert before["choices"] == behind["choices"]
    log = (tmp_path / "log").read_text()
    assert "Images are not served" in log or "An image cannot be encoded" in log
    assert "is started again" not in log


IMAGE_METRICS = (
    "gaudiserve:encoded_images_total",
    "gaudiserve:encoded_image_tokens_total",
    "vllm:mm_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "gaudiserve:image_preprocessing_seconds_count",
)


def test_an_image_is_encoded_once(live: LiveServer) -> None:
    image = picture(80, 80, seed=9)
    body = {"messages": [turn(image, "and?")], "temperature": 0, "max_tokens": 4, "n": 3}

    def counted() -> list[float]:
        lines = live.ask("/metrics").text.splitlines()
        return [
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))
            for name in IMAGE_METRICS
        ]

    before = counted()
    first = live.ask("/v1/chat/completions", body).json()
    again = live.ask("/v1/chat/completions", body).json()
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    turns = [*body["messages"], said, {"role": "user", "content": "more?"}]
    live.ask("/v1/chat/completions", {**body, "messages": turns})
    images, tokens, queries, hits, preprocessed = map(operator.sub, counted(), before)

    assert (images, queries, hits, preprocessed) == (1, 3, 2, 1)
    assert 4 <= tokens <= first["usage"]["prompt_tokens"]
    texts = {choice["message"]["content"] for choice in [*first["choices"], *again["choices"]]}
    assert len(texts) == 1


def test_a_request_with_an_image_is_resumed_after_an_engine_kill(live: LiveServer) -> None:
    body = {
        "messages": [turn(picture(80, 60, seed=3), "and?")],
        **{"temperature": 0, "max_tokens": 350, "ignore_eos": True, "return_token_ids": True},
        "stream": True,
    }

    def tokens(*, kills: bool) -> list[int]:
        found: list[int] = []
        with live.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    found += choice.get("token_ids") or []
                if found and kills:
                    os.kill(live.find("gaudiserve: engine"), signal.SIGKILL)
                    kills = False
        return found

    expected = tokens(kills=False)

    assert len(expected) == 350
    # On a busy machine the answer may be complete before its engine is killed.
    for _ in range(ATTEMPTS):
        assert tokens(kills=True) == expected
        if "resumes 1 request" in live.text():
            break
    assert "resumes 1 request" in live.text()


def shared_folder(pid: int) -> Path:
    """The daemon's folder in shared memory; the daemon holds the folder's lock."""
    opened = (Path(os.readlink(path)) for path in Path(f"/proc/{pid}/fd").iterdir())
    (lock,) = (descriptor for descriptor in opened if descriptor.match("/dev/shm/gaudiserve-*/*"))
    return lock.parent


def files_in(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.name[0] != "."]


@pytest.mark.slow
def test_a_large_image_is_sent_in_shared_memory_that_is_freed(
    tmp_path: Path,
) -> None:
    folder = make_tiny_vision("qwen2_vl", tmp_path / "qwen2_vl", max_position_embeddings=4096)
    image = picture(1400, 1400)
    flags = ("--dtype=float32", "--max-model-len=4096", "--served-model-name=tiny")
    large = ("--mm-processor-kwargs", '{"max_pixels": 4000000}')
    body = {"messages": [turn(image, "and?")], "temperature": 0, "max_tokens": 4}
    with running(str(folder), tmp_path / "log", *flags, *large) as server:
        ours = shared_folder(server.pid)
        first = server.ask("/v1/chat/completions", body).json()
        assert first["usage"]["prompt_tokens"] > 2400
        assert files_in(ours) == []
        again = {**body, "messages": [turn(picture(1400, 1400, seed=2), "and?")]}
        with ThreadPoolExecutor(1) as thread:
            answering = thread.submit(server.http.post, "/v1/chat/completions", json=again)
            deadline_s = time.monotonic() + WAIT_S
            while not files_in(ours) and time.monotonic() < deadline_s:
                time.sleep(0.0005)
            assert files_in(ours), "no file was ever seen"
            os.kill(server.find("gaudiserve: engine"), signal.SIGKILL)
            assert answering.result().status_code == 200
        assert files_in(ours) == []

    assert not ours.exists()


def test_offline_tokens_equal_transformers(folder: str) -> None:
    # With seed 0, Phi-4 generates an image token, after which transformers cannot continue.
    image = picture(70, 50, seed=1)
    tokens, _ = expected(folder, (image, QUESTION))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with LLM(folder, dtype="float32", max_model_len=512) as llm:
        content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTION}]
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)

    assert list(output.outputs[0].token_ids) == tokens


PAGE = (Path(__file__).parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
MARK = TINY["qwen2_vl"].mark
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_documented_examples_run(
    live: LiveServer, folder: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family != "qwen2_vl":
        pytest.skip("one family is enough")
    monkeypatch.chdir(tmp_path)
    picture(64, 48).save("cat.png")
    replaced = {"http://localhost:8000": live.url, "/models/vision": folder}
    outputs: list[str] = []
    small = partial(LLM, dtype="float32", max_model_len=512)
    # The blocks of the page continue each other.
    names: dict[str, Any] = {"small": small, "print": outputs.append}
    for block in BLOCKS:
        for name, value in replaced.items():
            block = block.replace(name, value)
        exec(
            compile(
                block.replace("LLM(model=", "small(model=").replace("<image>", MARK),
                "images.md",
                "exec",
            ),
            names,
        )

    assert len(BLOCKS) == 2 and len(outputs) == 1 and all(outputs)
