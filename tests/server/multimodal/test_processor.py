"""Images are preprocessed as in transformers, in processes without torch, and each image once."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hostile_images import GREY, black_png
from live import children_of
from PIL import Image
from tiny_vision import FAMILIES, UNLISTED, image_bytes, make_tiny_vision, picture
from transformers import AutoImageProcessor, AutoProcessor
from waits import WAIT_S, until

from config.errors import ConfigError, Overloaded, UserError
from engine.process.isolation import CallBroken, ForkServer, Limits
from server.multimodal.file_checks import BadImage
from server.multimodal.image_processor import MAX_RATIO, ImageProcessor
from server.multimodal.messages import IMAGE, Answer, Setup
from server.multimodal.processor import (
    MAX_PENDING,
    MAX_RUNNING_PER_CLIENT,
    ImagePreprocessor,
    ProcessedImage,
    image_processes,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"), weights=False)


@pytest.fixture(scope="module")
def processes(folder: Path) -> Iterator[ForkServer]:
    """Image processes that the tests of this file share, because they take seconds to start."""
    processes = image_processes(str(folder), "<|image_pad|>")
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def shared(processes: ForkServer) -> Iterator[ImagePreprocessor]:
    processor = ImagePreprocessor(processes, "<|image_pad|>")
    processor.open()
    yield processor
    processor.close()


def processed(folder: Path, image: Image.Image, token: str, **options: int) -> Answer:
    """The image, processed in this process instead of an image process."""
    return ImageProcessor(Setup(str(folder), token, options)).process(image)


def arrays_of(image: ProcessedImage | Answer) -> dict[str, np.ndarray]:
    kinds = {"float32": "<f4", "int64": "<i8", "bool": "?"}
    return {
        t.name: np.frombuffer(t.data, dtype=kinds[t.dtype]).reshape(t.shape) for t in image.tensors
    }


OTHERS = [f for f in FAMILIES if f not in ("qwen2_vl", "phi4_multimodal", "minimax_m3_vl")]
"""Families without qwen2_vl, which `test_images_of_any_size_have_the_grid_of_transformers`
compares, and without phi4_multimodal and minimax_m3_vl, whose image processors in transformers need
torchvision."""


@pytest.mark.parametrize("family", OTHERS)
def test_tensors_equal_transformers(family: str, tmp_path: Path) -> None:
    made = make_tiny_vision(family, tmp_path, weights=False)
    image = picture(70, 50)

    found = processed(made, image, FAMILIES[family].tokens[0])

    processor = AutoImageProcessor.from_pretrained(made, backend="pil")
    expected = processor(images=[image], return_tensors="np")
    assert np.array_equal(arrays_of(found)["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("family", OTHERS)
def test_texts_equal_transformers(family: str, tmp_path: Path) -> None:
    if family.startswith("qwen3"):
        pytest.importorskip("torchvision", reason="the processor of its videos needs it")
    made = make_tiny_vision(family, tmp_path, weights=False)
    image = picture(70, 50)
    token, mark = FAMILIES[family].tokens[0], FAMILIES[family].mark

    found = processed(made, image, token)

    processor = AutoProcessor.from_pretrained(made, backend="pil")
    # The processor of Llama 3.2 Vision adds this BOS token, which the template adds here.
    text = f"{processor.tokenizer.bos_token if family == 'mllama' else ''}a{mark}b"
    expected = processor(text=[text], images=[image])["input_ids"][0]
    ours = processor.tokenizer(text.replace(mark, found.text))["input_ids"]
    assert ours == list(expected)
    assert ours.count(processor.tokenizer.convert_tokens_to_ids(token)) == found.text.count(token)


@pytest.mark.parametrize("family", ["llava", "mllama", "aya_vision"])
def test_an_image_with_an_extreme_aspect_ratio_is_refused_before_it_is_scaled(
    family: str, tmp_path: Path
) -> None:
    made = make_tiny_vision(family, tmp_path, weights=False)
    processor = ImageProcessor(Setup(str(made), FAMILIES[family].tokens[0], {}))

    answer = processor.call(IMAGE + black_png(60_000, 10, GREY))

    assert msgspec.msgpack.decode(answer, type=Answer).error == (
        "the model does not accept an image of 60000 x 10 pixels: the ratio of its sides is "
        "6000, it must be at most 200"
    )
    with pytest.raises(BadImage, match="it must be at most 200"):
        processor.process(Image.new("RGB", (1, MAX_RATIO + 1)))


@pytest.mark.parametrize("size", [(56, 56), (200, 30), (33, 150)])
async def test_images_of_any_size_have_the_grid_of_transformers(
    size: tuple[int, int], shared: ImagePreprocessor, folder: Path
) -> None:
    image = picture(*size)

    found = await shared.process(image_bytes(image), "x")

    expected = AutoImageProcessor.from_pretrained(folder, backend="pil")(
        images=[image], return_tensors="np"
    )
    arrays = arrays_of(found)
    assert np.array_equal(arrays["pixel_values"], expected["pixel_values"])
    assert np.array_equal(arrays["image_grid_thw"], expected["image_grid_thw"])
    time, height, width = expected["image_grid_thw"][0]
    assert found.grid == (time, height // 2, width // 2)
    assert found.num_embeddings == time * height * width // 4
    assert found.text == "<|image_pad|>" * found.num_embeddings


async def test_equal_images_are_processed_once(
    shared: ImagePreprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = image_bytes(picture(60, 60, seed=5))
    lookups: list[bool] = []
    times: list[float] = []

    monkeypatch.setattr(shared, "on_lookup", lookups.append)
    monkeypatch.setattr(shared, "on_processed", times.append)

    first, second = await asyncio.gather(shared.process(data, "x"), shared.process(data, "y"))
    third = await shared.process(data, "z")

    assert first is second
    assert third is first
    assert lookups == [False, True, True]
    assert len(times) == 1


async def test_the_cache_keeps_the_latest_images_up_to_its_size(processes: ForkServer) -> None:
    images = [image_bytes(picture(56, 56, seed=seed)) for seed in range(3)]
    num_bytes = 16 * 3 * 2 * 14 * 14 * 4 + 24
    processor = ImagePreprocessor(processes, "<|image_pad|>", cache_bytes=2 * num_bytes)

    found = [await processor.process(data, "x") for data in images]

    assert [image.num_bytes for image in found] == [num_bytes] * 3
    assert [processor.cached(image.digest) is image for image in found] == [False, True, True]


async def test_an_image_name_is_visible_only_to_its_sender(shared: ImagePreprocessor) -> None:
    found = await shared.process(image_bytes(picture(60, 60)), "x")

    shared.remember("one", "cat", found.digest)

    assert shared.named("one", "cat") is found
    assert shared.named("two", "cat") is None
    assert shared.named("one", "dog") is None


async def test_a_bad_image_fails_only_its_request(shared: ImagePreprocessor) -> None:
    good = image_bytes(picture(80, 40, seed=8))

    results = await asyncio.gather(
        shared.process(b"no image", "messages[3].content[0]"),
        shared.process(image_bytes(picture(2, 900)), "messages[0].content[1]"),
        shared.process(good, "x"),
        return_exceptions=True,
    )

    assert isinstance(results[0], UserError)
    assert results[0].message == (
        "messages[3].content[0]: the image must be one of PNG, JPEG, WEBP, GIF, BMP"
    )
    assert isinstance(results[1], UserError)
    assert "does not accept an image of 2 x 900 pixels" in results[1].message
    assert isinstance(results[2], ProcessedImage)


@pytest.mark.slow
async def test_an_image_that_takes_too_much_memory_fails_its_request(folder: Path) -> None:
    limits = Limits(cpu_s=20, wall_s=20, memory_bytes=2**25, stack_bytes=2**23)
    few = image_processes(str(folder), "<|image_pad|>", limits=limits)
    processor = ImagePreprocessor(few, "<|image_pad|>")
    try:
        with pytest.raises(UserError, match="it took more than 32 MiB"):
            await processor.process(image_bytes(picture(3000, 3000)), "x")
        assert (await processor.process(image_bytes(picture(40, 40)), "x")).num_embeddings
    finally:
        processor.close()


@pytest.mark.slow
def test_a_checkpoint_without_a_processor_is_reported_at_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    processor = ImagePreprocessor(image_processes(str(tmp_path), "<image>"), "<image>")
    try:
        with pytest.raises(ConfigError, match="model type 'unknown', images are supported for"):
            processor.open()
    finally:
        processor.close()


def test_a_checkpoint_without_a_processor_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')

    with pytest.raises(ConfigError, match="model type 'unknown', images are supported for"):
        ImageProcessor(Setup(str(tmp_path), "<image>", {}))


def unknown(name: str, folder: Path) -> Setup:
    """The set-up of a model whose images are supported only by transformers."""
    make_tiny_vision(name, folder, weights=False)
    token = UNLISTED[name].tokens[0]
    return Setup(str(folder), token, {}, is_unlisted=True)


def test_the_processor_of_transformers_writes_the_prompt_of_an_unlisted_model(
    tmp_path: Path,
) -> None:
    processor = ImageProcessor(unknown("lighton_ocr", tmp_path))

    answer = processor.process(picture(90, 200))

    # 112 x 56 pixels in patches of 14; each embedding covers 2 x 2 patches.
    assert answer.text == "<|image_pad|>" * 8
    assert [(tensor.name, tensor.shape) for tensor in answer.tensors] == [
        ("pixel_values", (1, 3, 112, 56)),
        ("image_sizes", (1, 2)),
    ]


def test_tensors_that_the_server_does_not_read_are_also_sent(tmp_path: Path) -> None:
    processor = ImageProcessor(unknown("llava_onevision", tmp_path))

    answer = processor.process(picture(56, 56))

    assert {tensor.name for tensor in answer.tensors} > {"pixel_values", "image_sizes"}
    assert set(answer.text.replace(">", "> ").split()) == {"<image>"}


def test_a_processor_without_defined_image_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not define the tokens that replace an image"):
        ImageProcessor(unknown("idefics2", tmp_path))


def test_a_processor_missing_in_transformers_is_reported(tmp_path: Path) -> None:
    setup = unknown("lighton_ocr", tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "NobodysProcessor"}')

    with pytest.raises(ConfigError, match=r"'NobodysProcessor' .* does not have this processor"):
        ImageProcessor(setup)


def test_processor_arguments_of_the_operator_are_applied(folder: Path) -> None:
    def count(**options: int) -> int:
        answer = processed(folder, picture(280, 280), "<|image_pad|>", **options)
        return answer.text.count("<|image_pad|>")

    assert count() == 64
    assert count(max_pixels=28 * 28 * 16) == 16


def test_the_server_and_its_image_process_import_no_torch(folder: Path) -> None:
    script = (
        "import sys, msgspec\n"
        "import server.multimodal.processor, server.multimodal.parts, server.multimodal.fetch\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "from server.multimodal.isolated import prepare\n"
        "from server.multimodal.messages import Setup\n"
        f"setup = Setup({str(folder)!r}, '<|image_pad|>', {{}})\n"
        "call = prepare(msgspec.msgpack.encode(setup))\n"
        f"assert b'error' not in call({IMAGE + image_bytes(picture(40, 40))!r})[:9]\n"
        "assert sys.modules['torch'] is None\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


COSTLY = Limits(cpu_s=60.0, wall_s=60.0, memory_bytes=2**30, stack_bytes=2**23)


class Payloads(ForkServer):
    """Makes isolated_calls sleep for images that request it."""

    def call(self, payload: bytes, *arguments: Any) -> bytearray:
        name, _, rest = payload[1:].partition(b" ")
        if name == b"sleep":
            return super().call(b"sleep", *arguments)
        answer = msgspec.msgpack.encode(Answer(text=rest.decode()))
        return super().call(b"echo " + answer, *arguments)


@pytest.fixture
def sleeping() -> Iterator[tuple[ImagePreprocessor, Callable[[], int]]]:
    processes = Payloads("tests.support.isolated_calls", b"", COSTLY)
    processes.call(b" ")
    processor = ImagePreprocessor(processes, "x")

    def num_calls() -> int:
        assert processes.pid is not None
        return len(children_of(processes.pid))

    yield processor, num_calls
    processor.close()


async def test_images_of_a_client_leave_slots_to_other_clients(
    sleeping: tuple[ImagePreprocessor, Callable[[], int]],
) -> None:
    processor, num_calls = sleeping
    flood = [
        asyncio.ensure_future(processor.process(b"sleep %d" % n, "x", client="flood"))
        for n in range(50)
    ]
    await until(lambda: num_calls() == MAX_RUNNING_PER_CLIENT)

    found = await asyncio.wait_for(processor.process(b"echo a", "x", client="other"), WAIT_S)

    assert found.text == "a"
    assert num_calls() <= MAX_RUNNING_PER_CLIENT + 1
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await until(lambda: num_calls() == 0)


async def test_an_abandoned_image_is_dropped_and_its_process_killed(
    sleeping: tuple[ImagePreprocessor, Callable[[], int]],
) -> None:
    processor, num_calls = sleeping
    first, second = (asyncio.ensure_future(processor.process(b"sleep", "x")) for _ in range(2))
    waiting = [
        asyncio.ensure_future(processor.process(b"sleep %d" % n, "x"))
        for n in range(MAX_RUNNING_PER_CLIENT + 3)
    ]
    await until(lambda: num_calls() == MAX_RUNNING_PER_CLIENT)

    first.cancel()
    await asyncio.sleep(0.2)
    with_a_caller = num_calls()
    for task in (second, *waiting):
        task.cancel()
    await asyncio.gather(first, second, *waiting, return_exceptions=True)
    await until(lambda: num_calls() == 0)

    assert with_a_caller == MAX_RUNNING_PER_CLIENT
    assert (await processor.process(b"echo b", "x")).text == "b"
    assert processor._jobs == {}


async def test_too_many_images_of_a_client_are_refused_and_another_client_is_served(
    sleeping: tuple[ImagePreprocessor, Callable[[], int]],
) -> None:
    processor, _ = sleeping
    flood = [
        asyncio.ensure_future(processor.process(b"sleep %d" % n, "x", client="flood"))
        for n in range(MAX_PENDING + MAX_RUNNING_PER_CLIENT)
    ]
    await asyncio.sleep(0.05)

    with pytest.raises(Overloaded, match="256 images of this client wait and 1 would be added"):
        await processor.process(b"sleep more", "x", client="flood")
    found = await asyncio.wait_for(processor.process(b"echo c", "x", client="other"), WAIT_S)

    assert found.text == "c"
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_an_unexpected_failure_of_a_processor_rejects_its_request(
    shared: ImagePreprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytearray:
        raise CallBroken("KeyError: 'pixel_values'")

    monkeypatch.setattr(shared, "_processes", SimpleNamespace(call=fail))

    with pytest.raises(UserError, match=r"messages\.0: the image cannot be processed: KeyError"):
        await shared.process(b"no cached image", "messages.0")
