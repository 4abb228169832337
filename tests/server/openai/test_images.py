"""Images in requests of all chat APIs, up to the message to the engine."""

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_rig import Rig, TalkingClient, in_memory, on_port
from image_server import HOST, endless, fetcher, ok, serving, to
from tiny_vision import image_bytes, make_tiny_vision, picture
from waits import WAIT_S

from config.errors import ConfigError
from config.model.multimodal.vision import VisionFacts
from config.model.read_config import read_model_config
from config.server import ServerConfig
from server.multimodal.inputs import ImageLoader, make_image_inputs
from server.multimodal.messages import IMAGE
from server.text.tokenizer import Tokenizer

LIMIT = 4
PAD, START, END = 320, 322, 323
"""<|image_pad|>, <|vision_start|>, <|vision_end|>"""
VISION = VisionFacts("Qwen2VLForConditionalGeneration", PAD, 321, uses_mrope=True)


def data_url(width: int = 56, height: int = 56, seed: int = 0) -> str:
    data = base64.b64encode(image_bytes(picture(width, height, seed))).decode()
    return f"data:image/png;base64,{data}"


def part(url: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url() if url is None else url}, **more}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tokenizer, ImageLoader]]:
    folder = make_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("model"), weights=False)
    config = ServerConfig(limit_mm_per_prompt=f'{{"image": {LIMIT}}}')
    tokenizer = Tokenizer.load(str(folder), 2, Path(folder))
    images = make_image_inputs(str(folder), VISION, config, tokenizer)
    yield tokenizer, images
    images.close()


@pytest.fixture
async def rig(model: tuple[Tokenizer, ImageLoader]) -> AsyncIterator[Rig]:
    tokenizer, images = model
    template = tokenizer.chat_template
    client = TalkingClient(vocab_size=328, max_model_len=512)
    client.reply_ids = [40, 41]
    async with in_memory(
        client, tokenizer=tokenizer, images=images, chat_template=template
    ) as made:
        yield made


async def chat(rig: Rig, *content: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(content)}]
    return await rig.post("/v1/chat/completions", {"messages": messages, **fields})


async def test_an_image_replaces_its_placeholder_in_the_prompt(rig: Rig) -> None:
    answer = await chat(rig, text("a"), part(data_url(84, 56)), text("b"))

    (queue,) = rig.client.queues
    first = queue.prompt.index(START)
    assert queue.prompt[first : first + 8] == [START, *[PAD] * 6, END]
    assert queue.prompt.count(PAD) == 6
    assert answer.json()["usage"]["prompt_tokens"] == len(queue.prompt)
    (placed,) = queue.images
    assert (placed.offset, placed.length, placed.grid) == (first + 1, 6, (1, 2, 3))
    (encoded,) = queue.encoded_images
    assert (encoded.content, encoded.num_embeddings) == (placed.content, 6)
    assert {t.name: t.shape for t in encoded.tensors} == {
        "pixel_values": (24, 3 * 2 * 14 * 14),
        "image_grid_thw": (1, 3),
    }
    assert np.frombuffer(encoded.tensors[1].data, "<i8").tolist() == [1, 4, 6]


async def test_an_image_url_without_a_type_is_an_image(rig: Rig) -> None:
    untyped = {"image_url": {"url": data_url()}}
    await chat(rig, "a", part(), text("b"))
    answer = await chat(rig, text("a"), untyped, "b")

    assert answer.status_code == 200, answer.text
    first, second = rig.client.queues
    assert (second.prompt, second.images) == (first.prompt, first.images)


async def test_several_images_keep_their_order_and_equal_images_are_sent_once(rig: Rig) -> None:
    sizes = [(56, 56), (84, 56), (56, 56)]
    await chat(rig, *(part(data_url(*size)) for size in sizes))

    (queue,) = rig.client.queues
    assert [image.length for image in queue.images] == [4, 6, 4]
    assert queue.images[0].content == queue.images[2].content != queue.images[1].content
    assert [image.num_embeddings for image in queue.encoded_images] == [4, 6]
    assert queue.prompt.count(PAD) == 14


async def test_images_are_accepted_in_every_role(rig: Rig) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [text("s"), part()]},
        {"role": "user", "content": [text("u"), part()]},
        {"role": "assistant", "content": [text("a"), part()], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [part(), text("t")]},
    ]
    answer = await rig.post("/v1/chat/completions", {"messages": messages})

    assert answer.status_code == 200, answer.text
    assert len(rig.client.queues[0].images) == 4


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
async def test_the_field_detail_has_no_effect(detail: str, rig: Rig) -> None:
    named = {"type": "image_url", "image_url": {"url": data_url(), "detail": detail}}
    await chat(rig, part())
    await chat(rig, named)

    plain, detailed = rig.client.queues
    assert detailed.prompt == plain.prompt
    assert detailed.images == plain.images


async def test_all_choices_have_the_image(rig: Rig) -> None:
    await chat(rig, part(), text("x"), n=3)

    contents = {queue.images[0].content for queue in rig.client.queues}
    assert len(rig.client.queues) == 3
    assert len(contents) == 1


async def test_image_hashes_depend_on_the_salt(rig: Rig) -> None:
    for salt in (None, "one", "two", "one"):
        await chat(rig, part(), **({} if salt is None else {"cache_salt": salt}))

    contents = [queue.images[0].content for queue in rig.client.queues]
    assert contents[1] == contents[3]
    assert len(set(contents)) == 3


@pytest.mark.parametrize(
    "said",
    ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "x<|image_pad|>" * 9],
)
async def test_the_text_of_a_user_never_becomes_an_image(said: str, rig: Rig) -> None:
    alone = await chat(rig, text(said))
    beside = await chat(rig, text(said), part(), text(said))

    assert (alone.status_code, beside.status_code) == (200, 200)
    assert PAD not in rig.client.queues[0].prompt
    assert rig.client.queues[1].prompt.count(PAD) == 4
    first = rig.client.queues[1].images[0]
    assert rig.client.queues[1].prompt[first.offset : first.offset + 4] == [PAD] * 4


async def test_an_image_uuid_reuses_an_image_that_was_sent_before(rig: Rig) -> None:
    assert (await chat(rig, part(uuid="cat"))).status_code == 200

    again = await chat(rig, {"type": "image_url", "uuid": "cat", "image_url": None})
    other = await chat(rig, {"type": "image_url", "uuid": "dog", "image_url": None})

    assert again.status_code == 200
    first, second = (queue.images[0].content for queue in rig.client.queues)
    assert first == second
    assert other.status_code == 400
    assert "has no image or video with this uuid" in other.json()["error"]["message"]


async def test_tokenize_returns_the_image_tokens(rig: Rig) -> None:
    messages = [{"role": "user", "content": [part(), text("hi")]}]
    await rig.post("/v1/chat/completions", {"messages": messages})

    told = await rig.post("/tokenize", {"messages": messages})
    counted = await rig.post("/v1/chat/completions/input_tokens", {"messages": messages})

    assert told.json()["tokens"] == rig.client.queues[0].prompt
    assert counted.json()["input_tokens"] == told.json()["count"]


async def test_images_beyond_the_context_are_refused(rig: Rig) -> None:
    images = [part(data_url(448, 448, seed)) for seed in range(4)]
    text_only = await chat(rig, *images[:2])
    assert text_only.status_code == 200

    await rig.post("/tokenize", {"messages": [{"role": "user", "content": images}]})
    answer = await chat(rig, *images, *images[:0], text("x" * 300))

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "512 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (part("data:image/png;base64,AAAA"), "the image must be one of PNG, JPEG, WEBP, GIF, BMP"),
        (part("data:text/plain;base64,AAAA"), "has type 'text/plain'"),
        (part("data:image/png;base64,###"), "is not valid base64"),
        (part("http://example.com/a.png"), "it must be a data: or https: URL"),
        (part("https://example.com/a.png"), "--allowed-media-domains"),
        (part("file:///etc/passwd"), "reads no files"),
        (part(""), "it must have image_url with a url, or a uuid"),
        ({"type": "image_url"}, "it must have image_url with a url, or a uuid"),
        ({"type": "image_url", "image_url": 5}, "it must have image_url with a url, or a uuid"),
        (part(detail="x"), "detail 'x', it must be one of auto, low, high"),
        (part(uuid=5), "an invalid uuid, it must be a string"),
        (
            {"type": "file", "file": {"file_id": "f"}},
            "it must be text, image_url or vi",
        ),
    ],
)
async def test_an_invalid_image_is_refused_with_the_reason(
    bad: dict[str, Any], why: str, rig: Rig
) -> None:
    answer = await chat(rig, text("a"), bad)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert why in error["message"]
    assert error["message"].startswith("messages[0].content[1]")
    assert error["param"] == "messages[0].content[1]"
    assert not rig.client.queues


AUDIO = base64.b64encode(b"RIFF").decode()


@pytest.mark.parametrize(
    "other",
    [
        {"type": "input_audio", "input_audio": {"data": AUDIO, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{AUDIO}"}},
        {"type": "audio", "audio": AUDIO},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "document", "source": {"type": "text", "data": "x"}},
        {"type": "hologram"},
    ],
)
async def test_other_parts_are_refused_with_the_types_that_the_model_takes(
    other: dict[str, Any], rig: Rig
) -> None:
    content = [{"type": "text", "text": "what is it?"}, other]
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": content}]
    chatted = await rig.post("/v1/chat/completions", {"messages": messages})
    answered = await rig.post("/v1/responses", {"input": messages})
    messaged = await rig.post("/v1/messages", {"messages": messages, "max_tokens": 8})

    sent = f"[1].content[1] has type '{other['type']}', it must be"
    expected = [
        f"messages{sent} text, image_url or video_url",
        f"input{sent} input_text or input_image",
        f"messages{sent} text, image or tool_result",
    ]
    if "audio" in other["type"]:
        sent = (
            sent.partition(", ")[0]
            + ", and this server does not accept audio; send its words as text"
        )
        expected = [f"{name}{sent}" for name in ("messages", "input", "messages")]
    answers = (chatted, answered, messaged)
    assert [answer.status_code for answer in answers] == [400] * 3
    assert [answer.json()["error"]["message"] for answer in answers] == expected
    assert chatted.json()["error"] == {
        "message": expected[0],
        "type": "invalid_request_error",
        "param": "messages[1].content[1]",
        "code": None,
    }
    assert not rig.client.queues


async def test_assistant_images_are_refused_if_only_text_is_supported(rig: Rig) -> None:
    image = {"type": "input_image", "image_url": data_url()}
    answered = await rig.post(
        "/v1/responses", {"input": [{"role": "assistant", "content": [image]}]}
    )
    block = {"type": "image", "source": {}}
    said = [{"role": "assistant", "content": [block]}]
    messaged = await rig.post("/v1/messages", {"messages": said, "max_tokens": 8})

    takes = "it must be"
    assert (answered.status_code, messaged.status_code) == (400, 400)
    assert answered.json()["error"]["message"] == (
        f"input[0].content[0] has type 'input_image', {takes} output_text"
    )
    assert messaged.json()["error"]["message"] == (
        f"messages[0].content[0] has type 'image', {takes} text, thinking or tool_use"
    )


async def test_too_many_images_are_refused_with_both_numbers(rig: Rig) -> None:
    answer = await chat(rig, *[part()] * (LIMIT + 1))

    assert answer.status_code == 400
    assert "the prompt has 5 images, at most 4 are allowed" in answer.json()["error"]["message"]


async def test_truncation_of_a_prompt_with_images_is_refused(rig: Rig) -> None:
    answer = await chat(rig, part(), truncate_prompt_tokens=5)

    assert answer.status_code == 400
    assert "truncate_prompt_tokens is 5" in answer.json()["error"]["message"]


async def test_images_that_a_template_does_not_show_are_refused(rig: Rig) -> None:
    rig.state.template = type(rig.state.chat_template())(
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}"
        "{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
        {},
    )
    answer = await chat(rig, text("a"), part())

    assert answer.status_code == 400
    assert (
        "the chat template renders 0 placeholders for 1 image, it must"
        in answer.json()["error"]["message"]
    )


async def test_a_bad_image_affects_no_other_client(rig: Rig) -> None:
    answers = await asyncio.gather(
        *(chat(rig, text("x"), part(data_url(60 + i, 60))) for i in range(4)),
        *(chat(rig, part("data:image/png;base64,AAAA")) for _ in range(4)),
        rig.chat("text only"),
    )

    assert [answer.status_code for answer in answers] == [200] * 4 + [400] * 4 + [200]


async def test_models_without_vision_refuse_all_but_text() -> None:
    image = {"type": "input_image", "image_url": data_url()}
    response = {"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [image]}]}
    async with in_memory() as rig:
        answers = [
            await chat(rig, part()),
            await chat(rig, {"type": "image"}),
            await chat(rig, {"type": "file", "file": {"file_id": "file-1"}}),
            await chat(rig, {"type": "txt", "text": "x"}),
            await chat(rig, {"type": "input_audio", "input_audio": {"data": AUDIO}}),
            await rig.post("/v1/responses", response),
        ]

    assert [answer.status_code for answer in answers] == [400] * 6
    images = (
        "and this server does not accept images: its model reads none, or "
        "--limit-mm-per-prompt allows 0 (docs/images.md)"
    )
    text_only = "it must be text"
    assert [answer.json()["error"]["message"] for answer in answers] == [
        f"messages[0].content[0] has type 'image_url', {images}",
        f"messages[0].content[0] has type 'image', {images}",
        f"messages[0].content[0] has type 'file', {text_only}",
        f"messages[0].content[0] has type 'txt', {text_only}; did you mean text?",
        "messages[0].content[0] has type 'input_audio', and this server does not accept audio; "
        "send its words as text",
        f"input[1].content[0] has type 'input_image', {images}",
    ]


async def test_responses_take_input_image(rig: Rig) -> None:
    content = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": data_url(), "detail": "low"},
    ]
    answer = await rig.post("/v1/responses", {"input": [{"role": "user", "content": content}]})
    assert answer.status_code == 200, answer.text
    two = await rig.post(
        "/v1/responses", {"input": "and?", "previous_response_id": answer.json()["id"]}
    )

    assert two.status_code == 200, two.text
    assert [len(queue.images) for queue in rig.client.queues] == [1, 1]
    assert answer.json()["usage"]["input_tokens"] == len(rig.client.queues[0].prompt)


async def test_responses_accept_images_in_function_outputs(rig: Rig) -> None:
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": data_url()}],
        },
    ]
    answer = await rig.post("/v1/responses", {"input": items})

    assert answer.status_code == 200, answer.text
    assert len(rig.client.queues[0].images) == 1


async def test_a_response_counts_an_image_and_refuses_one_that_was_uploaded(rig: Rig) -> None:
    content: list[dict[str, Any]] = [{"type": "input_image", "image_url": data_url()}]
    body = {"input": [{"role": "user", "content": content}]}
    answer = await rig.post("/v1/responses", body)
    counted = await rig.post("/v1/responses/input_tokens", body)
    content[0] = {"type": "input_image", "file_id": "file-1"}
    uploaded = await rig.post("/v1/responses", body)

    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    assert len(rig.client.queues) == 1
    assert uploaded.status_code == 400
    assert "file_id" in uploaded.json()["error"]["message"]


async def test_messages_accept_images_in_tool_results(rig: Rig) -> None:
    data = base64.b64encode(image_bytes(picture(84, 56))).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    result: dict[str, Any] = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [text("seen:"), {"type": "image", "source": source}],
    }
    body: dict[str, Any] = {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
            },
            {"role": "user", "content": [result]},
        ],
    }
    answer = await rig.post("/v1/messages", body)
    counted = await rig.post("/v1/messages/count_tokens", body)

    assert answer.status_code == 200, answer.text
    (queue,) = rig.client.queues
    assert [image.length for image in queue.images] == [6]
    assert answer.json()["usage"]["input_tokens"] == len(queue.prompt)
    assert counted.json()["input_tokens"] == len(queue.prompt)


async def test_messages_accept_image_blocks(rig: Rig) -> None:
    data = base64.b64encode(image_bytes(picture(56, 56))).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    block = {"type": "image", "source": source}
    body: dict[str, Any] = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [block, text("what?")]}],
    }
    answer = await rig.post("/v1/messages", body)
    counted = await rig.post("/v1/messages/count_tokens", body)
    block["source"] = {"type": "url", "url": "https://example.com/a.png"}
    fetched = await rig.post("/v1/messages", body)
    block["source"] = {"type": "file"}
    unknown = await rig.post("/v1/messages", body)

    assert answer.status_code == 200, answer.text
    assert len(rig.client.queues[0].images) == 1
    assert answer.json()["usage"]["input_tokens"] == counted.json()["input_tokens"]
    assert "--allowed-media-domains" in fetched.json()["error"]["message"]
    assert "type 'base64' or 'url'" in unknown.json()["error"]["message"]


async def test_beams_keep_the_image(rig: Rig) -> None:
    await chat(rig, part(), use_beam_search=True, n=2, max_tokens=2)

    assert len(rig.client.queues) > 1
    assert all(len(queue.images) == 1 for queue in rig.client.queues)


async def test_a_name_of_an_image_belongs_to_its_api_key(
    model: tuple[Tokenizer, ImageLoader],
) -> None:
    tokenizer, images = model
    named = {"type": "image_url", "uuid": "mine", "image_url": None}
    async with in_memory(
        TalkingClient(vocab_size=328, max_model_len=512),
        tokenizer=tokenizer,
        images=images,
        chat_template=tokenizer.chat_template,
        api_keys=["one", "two"],
    ) as rig:

        async def ask(key: str, content: Any) -> httpx.Response:
            return await rig.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": [content]}]},
                headers={"Authorization": f"Bearer {key}"},
            )

        answers = [
            await ask("one", part(uuid="mine")),
            await ask("one", named),
            await ask("two", named),
        ]

    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert "has no image or video with this uuid" in answers[2].json()["error"]["message"]


def with_fetcher(rig: Rig, timeout_s: float = WAIT_S) -> None:
    assert rig.state.images is not None
    images = fetcher(timeout_s=timeout_s, max_bytes=10**6)
    rig.state.images = ImageLoader(VISION, rig.state.images.preprocessor, images, {IMAGE: LIMIT})


async def test_a_fetched_image_equals_a_sent_image(rig: Rig) -> None:
    with_fetcher(rig)
    data = image_bytes(picture(56, 56))
    async with serving(lambda path: ok(data)) as (port, asked):
        answer = await chat(rig, part(f"https://{HOST}:{port}/a.png"))
    await chat(rig, part(data_url(56, 56)))

    assert answer.status_code == 200, answer.text
    assert asked == ["/a.png"]
    first, second = (queue.images[0].content for queue in rig.client.queues)
    assert first == second


async def test_a_url_that_a_request_has_several_times_is_fetched_once(rig: Rig) -> None:
    with_fetcher(rig)
    data = image_bytes(picture(56, 56))
    async with serving(lambda path: ok(data)) as (port, asked):
        first, second = (part(f"https://{HOST}:{port}/{name}.png") for name in "ab")
        answer = await chat(rig, first, second, first, first)

    assert answer.status_code == 200, answer.text
    assert sorted(asked) == ["/a.png", "/b.png"]
    assert len(rig.client.queues[0].images) == 4


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens"])
async def test_a_fetch_ends_when_its_client_disconnects(
    path: str, model: tuple[Tokenizer, ImageLoader]
) -> None:
    tokenizer, images = model
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def drip(path: str) -> AsyncIterator[bytes]:
        has_begun.set()
        try:
            async for piece in endless(b"HTTP/1.1 200 OK\r\n\r\n", b"a", 0.01):
                yield piece
        finally:
            has_ended.set()

    client = TalkingClient(vocab_size=328, max_model_len=512)
    template = tokenizer.chat_template
    async with (
        serving(drip) as (port, _),
        on_port(client, tokenizer=tokenizer, images=images, chat_template=template) as rig,
    ):
        with_fetcher(rig, timeout_s=60.0)
        url = f"https://{HOST}:{port}/a"
        source = {"type": "image", "source": {"type": "url", "url": url}}
        content = source if "messages" in path else part(url)
        body = {"messages": [{"role": "user", "content": [content]}]}
        asking = asyncio.ensure_future(rig.post(path, body, timeout=30))
        await asyncio.wait_for(has_begun.wait(), WAIT_S)
        asking.cancel()
        await asyncio.wait_for(has_ended.wait(), WAIT_S)

    assert not rig.client.queues


async def test_attacks_by_url_are_refused_and_other_clients_are_served(rig: Rig) -> None:
    with_fetcher(rig)
    png = image_bytes(picture(200, 200))
    header = b"IHDR" + 2 * (70_000).to_bytes(4, "big") + png[24:29]
    bomb = png[:12] + header + zlib.crc32(header).to_bytes(4, "big") + png[33:]
    answers = {
        "/bomb": ok(bomb),
        "/cut": ok(png[: len(png) // 2]),
        "/page": ok(b"<html>secret</html>"),
        "/large": ok(bytes(10**6 + 1)),
        "/inside": to("https://169.254.169.254/latest/meta-data"),
        "/plain": to("http://169.254.169.254/"),
        "/loop": to("/loop"),
        "/missing": b"HTTP/1.1 404 secret\r\nContent-Length: 6\r\n\r\nsecret",
    }
    why = {
        "/bomb": "the image has 70000 x 70000 = 4900000000 pixels, at most 67108864",
        "/cut": "the image cannot be decoded",
        "/page": "the image must be one of",
        "/large": "bytes, at most 1000000 are allowed",
        "/inside": "is not one of the --allowed-media-domains",
        "/plain": "not https:",
        "/loop": "redirects more than 3 times",
        "/missing": "the image could not be fetched",
    }
    async with serving(lambda path: answers[path]) as (port, _):
        urls = [f"https://{HOST}:{port}{path}" for path in answers]
        refused, good = await asyncio.gather(
            asyncio.gather(*(chat(rig, part(url)) for url in urls)),
            asyncio.gather(*(rig.chat(f"text {i}") for i in range(8))),
        )

    for path, item in zip(answers, refused, strict=True):
        assert item.status_code == 400, path
        message = item.json()["error"]["message"]
        assert why[path] in message, (path, message)
        assert "secret" not in message
    assert [name.status_code for name in good] == [200] * 8
    assert len(rig.client.queues) == 8


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of 4 x 4 pixels with additional chunks after its header."""
    data = image_bytes(picture(4, 4))
    more = b"".join(
        len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
        for kind, body in chunks
    )
    return data[:33] + more + data[33:]


def bomb(kind: str) -> bytes:
    """A file of a few bytes whose header claims billions of pixels."""
    data = bytearray(image_bytes(picture(8, 8), kind))
    side = 60_000
    if kind == "GIF":
        data[6:10] = 2 * side.to_bytes(2, "little")
    elif kind == "BMP":
        data[18:26] = 2 * side.to_bytes(4, "little")
    else:
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = 2 * side.to_bytes(2, "big")
    return bytes(data)


ZEROS = zlib.compress(bytes(80 * 2**20), 9)
TOO_MANY_PIXELS = "the image has 60000 x 60000 = 3600000000 pixels, at most 67108864 are allowed"
BROKEN = "the image cannot be decoded"
UNKNOWN = "the image must be one of PNG, JPEG, WEBP, GIF, BMP"
ATTACKS = {
    "gif bomb": (bomb("GIF"), TOO_MANY_PIXELS),
    "bmp bomb": (bomb("BMP"), TOO_MANY_PIXELS),
    "jpeg bomb": (bomb("JPEG"), TOO_MANY_PIXELS),
    "text of 80 MiB": (png_of((b"zTXt", b"a\0\0" + ZEROS)), BROKEN),
    "profile of 80 MiB": (png_of((b"iCCP", b"a\0\0" + ZEROS)), "image"),
    "pixels that end": (image_bytes(picture(64, 64))[:900], BROKEN),
    "jpeg that ends": (image_bytes(picture(64, 64), "JPEG")[:700], BROKEN),
    "webp that ends": (image_bytes(picture(64, 64), "WEBP")[:300], "image"),
    "wrong checksum": (png_of()[:40] + b"\xff" + png_of()[41:], "image"),
    "frames of nothing": (image_bytes(picture(8, 8), "GIF")[:40], "image"),
    "tiff": (image_bytes(picture(8, 8), "TIFF"), UNKNOWN),
    "ico": (image_bytes(picture(16, 16), "ICO"), UNKNOWN),
    "pdf": (image_bytes(picture(8, 8), "PDF"), UNKNOWN),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", UNKNOWN),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', UNKNOWN),
    "page": (b"<html>", UNKNOWN),
    "too narrow": (image_bytes(picture(2, 900)), "does not accept an image of 2 x 900 pixels"),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_by_content_is_a_400_with_the_reason(name: str, rig: Rig) -> None:
    data, why = ATTACKS[name]
    # The media type in the URL is ignored.
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"

    answer = await chat(rig, text("a"), part(url))
    good = await chat(rig, part())

    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith("messages[0].content[1]: ")
    assert why in message
    assert good.status_code == 200
    assert len(rig.client.queues) == 1


async def test_an_image_of_too_many_bytes_is_refused_with_both_numbers(rig: Rig) -> None:
    url = "data:image/png;base64," + "A" * (28 * 2**20)
    answer = await chat(rig, part(url))

    assert answer.status_code == 400
    assert "has 22020096 bytes, at most 20971520 are allowed" in answer.json()["error"]["message"]


async def test_a_rendered_chat_has_the_positions_of_its_images(rig: Rig) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [text("a"), part(data_url(84, 56)), part(), text("b")]}
        ]
    }
    rendered = (await rig.post("/v1/chat/completions/render", body)).json()
    assert not rig.client.queues

    await rig.post("/v1/chat/completions", body)
    (queue,) = rig.client.queues
    assert rendered["token_ids"] == queue.prompt
    features = rendered["features"]
    assert features["mm_placeholders"] == {
        "image": [{"offset": placed.offset, "length": placed.length} for placed in queue.images]
    }
    first, second = features["mm_hashes"]["image"]
    assert first != second
    again = (await rig.post("/v1/chat/completions/render", body)).json()
    assert again["features"] == features
    refused = await rig.post("/inference/v1/generate", rendered)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "features"


def vision_without_processor(family: str, folder: Path) -> str:
    made = make_tiny_vision(family, folder, weights=False)
    for file in folder.glob("*processor*"):
        file.unlink()
    return str(made)


@pytest.mark.parametrize(
    ("family", "limits"),
    [
        ("llava", "image=0"),
        ("gemma3", '{"image": 0}'),
        ("qwen2_vl", '{"image": 0, "video": 0}'),
    ],
)
async def test_a_checkpoint_needs_no_processor_if_images_are_disabled(
    family: str, limits: str, tmp_path: Path
) -> None:
    folder = vision_without_processor(family, tmp_path)
    tokenizer = Tokenizer.load(folder, 2, tmp_path)
    vision = read_model_config(folder).vision
    assert vision is not None
    config = ServerConfig(limit_mm_per_prompt=limits)

    images = make_image_inputs(folder, vision, config, tokenizer)

    assert images is None
    assert tokenizer.controls is not None
    client = TalkingClient(vocab_size=328, max_model_len=512)
    template = tokenizer.chat_template
    async with in_memory(client, tokenizer=tokenizer, chat_template=template) as rig:
        refused = await chat(rig, part())
        taken = await chat(rig, text(str(tokenizer.token(vision.image_token_id))))
    assert (refused.status_code, taken.status_code) == (400, 200)
    assert "--limit-mm-per-prompt allows 0" in refused.json()["error"]["message"]
    (queue,) = client.queues
    assert vision.image_token_id not in queue.prompt


def test_a_video_model_needs_its_processor_even_if_images_are_disabled(
    tmp_path: Path,
) -> None:
    folder = vision_without_processor("qwen2_vl", tmp_path)
    tokenizer = Tokenizer.load(folder, 2, tmp_path)
    config = ServerConfig(limit_mm_per_prompt="image=0")

    with pytest.raises(ConfigError, match="image processor"):
        make_image_inputs(folder, VISION, config, tokenizer)
