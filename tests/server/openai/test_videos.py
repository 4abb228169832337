"""Videos in chat requests, up to the message to the engine."""

import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_rig import Rig, TalkingClient, in_memory
from image_server import HOST, fetcher, ok, serving
from tiny_vision import clip, gif_bytes, image_bytes, make_tiny_vision, mp4_bytes, picture

from config.model.multimodal.vision import VisionFacts
from config.server import ServerConfig
from server.multimodal.inputs import ImageLoader, make_image_inputs
from server.multimodal.messages import IMAGE, VIDEO
from server.text.tokenizer import Tokenizer

IMAGE_PAD, VIDEO_PAD = 320, 321
VISION = VisionFacts("Qwen2VLForConditionalGeneration", IMAGE_PAD, VIDEO_PAD, uses_mrope=True)
CLIP = clip(56, 84, 5)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


GIF = f"data:image/gif;base64,{encoded(gif_bytes(CLIP))}"
JPEGS = ",".join(encoded(image_bytes(item, "JPEG")) for item in CLIP)


def video(url: str = GIF, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **more}


def image(**more: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{encoded(image_bytes(picture(56, 56)))}"
    return {"type": "image_url", "image_url": {"url": url}, **more}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tokenizer, ImageLoader]]:
    folder = make_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("model"), weights=False)
    config = ServerConfig(
        limit_mm_per_prompt='{"image": 4, "video": 2}',
        media_io_kwargs='{"video": {"num_frames": 4}}',
    )
    tokenizer = Tokenizer.load(str(folder), 2, Path(folder))
    images = make_image_inputs(str(folder), VISION, config, tokenizer)
    yield tokenizer, images
    images.close()


@pytest.fixture
async def rig(model: tuple[Tokenizer, ImageLoader]) -> AsyncIterator[Rig]:
    tokenizer, images = model
    client = TalkingClient(vocab_size=328, max_model_len=512)
    client.reply_ids = [40, 41]
    async with in_memory(
        client, tokenizer=tokenizer, images=images, chat_template=tokenizer.chat_template
    ) as made:
        yield made


async def chat(rig: Rig, *content: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(content)}]
    return await rig.post("/v1/chat/completions", {"messages": messages, **fields})


async def test_a_video_replaces_its_placeholder_and_is_counted(rig: Rig) -> None:
    answer = await chat(rig, video(), {"type": "text", "text": "hi"})
    told = await rig.post(
        "/tokenize", {"messages": [{"role": "user", "content": [video(), {"type": "text",
                                                                          "text": "hi"}]}]}
    )  # fmt: skip

    assert answer.status_code == 200, answer.text
    (queue,) = rig.client.queues
    # Four of five frames are used, with two frames per patch and 3 x 2 squares per frame.
    assert queue.prompt.count(VIDEO_PAD) == 12
    (placed,) = queue.images
    assert (placed.length, placed.grid, placed.time_step) == (12, (2, 3, 2), 1.0)
    assert queue.prompt[placed.offset : placed.offset + 12] == [VIDEO_PAD] * 12
    (sent,) = queue.encoded_images
    assert (sent.num_embeddings, sent.tensors[0].shape) == (12, (48, 3 * 2 * 14 * 14))
    assert answer.json()["usage"]["prompt_tokens"] == len(queue.prompt)
    assert told.json()["tokens"] == queue.prompt


async def test_videos_and_images_keep_their_order(rig: Rig) -> None:
    answer = await chat(rig, image(), video(), image(), video(f"data:video/jpeg;base64,{JPEGS}"))

    assert answer.status_code == 200, answer.text
    grids = [placed.grid for placed in rig.client.queues[0].images]
    assert grids == [(1, 2, 2), (2, 3, 2), (1, 2, 2), (3, 3, 2)]
    assert len(rig.client.queues[0].encoded_images) == 3


async def test_a_gif_is_an_image_and_a_video_type(rig: Rig) -> None:
    answer = await chat(rig, video(), video(GIF.replace("image/gif", "video/gif")))

    assert answer.status_code == 200, answer.text
    first, second = rig.client.queues[0].images
    assert first.content == second.content


async def test_the_same_bytes_as_image_and_video_have_different_hashes(rig: Rig) -> None:
    answer = await chat(rig, {"type": "image_url", "image_url": {"url": GIF}}, video())

    assert answer.status_code == 200, answer.text
    first, second = rig.client.queues[0].images
    assert first.content != second.content
    assert (first.grid, second.grid) == ((1, 3, 2), (2, 3, 2))


async def test_an_mp4_may_be_sent_or_fetched(rig: Rig) -> None:
    data = mp4_bytes(CLIP)
    sent = await chat(rig, video(f"data:video/mp4;base64,{encoded(data)}"))
    assert rig.state.images is not None
    limits = {IMAGE: 4, VIDEO: 2}
    rig.state.images = ImageLoader(VISION, rig.state.images.preprocessor, fetcher(), limits)
    async with serving(lambda path: ok(data)) as (port, asked):
        fetched = await chat(rig, video(f"https://{HOST}:{port}/a.mp4"))

    assert (sent.status_code, fetched.status_code) == (200, 200), sent.text + fetched.text
    first, second = (queue.images[0] for queue in rig.client.queues)
    assert first == second and first.grid == (2, 3, 2)
    assert asked == ["/a.mp4"]


async def test_uuids_of_videos_and_images_are_separate(rig: Rig) -> None:
    assert (await chat(rig, video(uuid="it"))).status_code == 200

    again = await chat(rig, {"type": "video_url", "video_url": None, "uuid": "it"})
    other = await chat(rig, {"type": "image_url", "image_url": None, "uuid": "it"})

    assert (again.status_code, other.status_code) == (200, 400)
    first, second = (queue.images[0].content for queue in rig.client.queues)
    assert first == second


@pytest.mark.parametrize("said", ["<|video_pad|>", "<|vision_start|><|video_pad|><|vision_end|>"])
async def test_the_text_of_a_user_never_becomes_a_video(said: str, rig: Rig) -> None:
    answer = await chat(rig, {"type": "text", "text": said}, video())

    assert answer.status_code == 200
    assert rig.client.queues[0].prompt.count(VIDEO_PAD) == 12


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            video("data:video/mp4;base64,AAAA"),
            "the video must be one of MP4, WebM, Matroska, AVI, GIF",
        ),
        (video("data:video/ogg;base64,AAAA"), "has type 'video/ogg', it must be one of video/mp4"),
        (video("data:video/jpeg;base64,AAAA,"), "the video has 0 bytes"),
        (
            video("data:video/jpeg;base64," + ",".join(["AAAA"] * 769)),
            "has 769 frames, at most 768",
        ),
        (video("http://example.com/a.mp4"), "it must be a data: or https: URL"),
        (video("https://example.com/a.mp4"), "fetches no videos: send a data: URL, or start it"),
        (video("https://example.com/a.mp4"), "--allowed-media-domains"),
        (video("file:///etc/passwd"), "--allowed-local-media-path"),
        ({"type": "video_url", "video_url": 5}, "it must have video_url with a url, or a uuid"),
        ({"type": "video_url"}, "it must have video_url with a url, or a uuid"),
    ],
)
async def test_an_invalid_video_is_refused_with_the_reason(
    bad: dict[str, Any], why: str, rig: Rig
) -> None:
    answer = await chat(rig, {"type": "text", "text": "a"}, bad)

    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert answer.json()["error"]["message"].startswith("messages[0].content[1]")
    assert not rig.client.queues


async def test_too_many_videos_are_refused_with_both_numbers(rig: Rig) -> None:
    answer = await chat(rig, *[video()] * 3, image())

    assert answer.status_code == 400
    assert "the prompt has 3 videos, at most 2 are allowed" in answer.json()["error"]["message"]


async def test_an_image_model_refuses_videos(tmp_path: Path) -> None:
    folder = make_tiny_vision("llava", tmp_path, weights=False)
    tokenizer = Tokenizer.load(str(folder), 2, Path(folder))
    facts = VisionFacts("LlavaForConditionalGeneration", 320)
    images = make_image_inputs(str(folder), facts, ServerConfig(), tokenizer)
    try:
        client = TalkingClient(vocab_size=328, max_model_len=512)
        async with in_memory(
            client, tokenizer=tokenizer, images=images, chat_template=tokenizer.chat_template
        ) as rig:
            refused = await chat(rig, video())
            taken = await chat(rig, image())
    finally:
        images.close()

    assert (refused.status_code, taken.status_code) == (400, 200)
    assert refused.json()["error"]["message"] == (
        "messages[0].content[0] has type 'video_url', and this server does not accept videos: "
        "its model reads none, or --limit-mm-per-prompt allows 0 (docs/images.md)"
    )
