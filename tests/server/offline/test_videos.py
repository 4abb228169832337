"""Videos in Python: the forms that LLM accepts; arrays and lists of frames give the same tokens."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tiny_vision import clip, make_tiny_vision, picture

from config.errors import UserError
from gaudiserve import LLM, SamplingParams
from server.multimodal.messages import VIDEO, Video
from server.offline.prompts import parse_prompt
from server.offline.videos import given_video, is_video

FRAMES = clip(56, 84, 4)
ARRAY = np.stack([np.asarray(frame) for frame in FRAMES])
MARK = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("model"))
    with LLM(str(folder), dtype="float32", max_model_len=512) as made:
        yield made


def test_arrays_and_lists_of_frames_give_the_same_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    forms = [ARRAY, FRAMES, [ARRAY], list(ARRAY), (ARRAY, {"fps": 2.0, "duration": 2.0})]
    prompts: list[Any] = [
        {"prompt": f"a {MARK} b", "multi_modal_data": {"video": form}} for form in forms
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    content = [{"type": "video", "video": FRAMES}, {"type": "text", "text": "b"}]
    (chat,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)

    tokens = [output.outputs[0].token_ids for output in outputs]
    assert all(token == tokens[0] for token in tokens)
    # 3 x 2 squares, with two frames per patch.
    assert [list(output.prompt_token_ids or []).count(321) for output in [*outputs, chat]] == (
        [12] * 6
    )


def test_images_and_videos_replace_their_placeholders(llm: LLM) -> None:
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    data = {"video": FRAMES, "image": picture(56, 56)}
    params = SamplingParams(temperature=0, max_tokens=2)

    for prompt in (f"{MARK}{image}", f"{image}{MARK}"):
        (output,) = llm.generate(
            {"prompt": prompt, "multi_modal_data": data}, params, use_tqdm=False
        )
        ids = list(output.prompt_token_ids or [])
        assert (ids.count(320), ids.count(321)) == (4, 12)
        assert (ids.index(320) < ids.index(321)) == prompt.startswith(image)
    with pytest.raises(UserError, match="0 times, and the request has 1 videos"):
        llm.generate({"prompt": image, "multi_modal_data": data}, params, use_tqdm=False)


def test_every_form_of_a_video_is_accepted() -> None:
    frames = msgspec.msgpack.decode(given_video(ARRAY, "x").data or b"", type=Video)
    timed = given_video((ARRAY, {"fps": 30.0, "total_num_frames": 60}), "x").data or b""

    assert len(frames.frames) == 4 and frames.fps == 0
    assert msgspec.msgpack.decode(timed, type=Video).fps == 2.0
    assert msgspec.msgpack.decode(given_video(b"file", "x").data or b"", type=Video).data == b"file"
    assert given_video("https://x/a.mp4", "x").url == "https://x/a.mp4"
    assert [is_video(item) for item in (ARRAY, FRAMES, [ARRAY], "url", ["url"])] == [
        *(True, True, False),
        *(True, False),
    ]
    _, _, _, sources = parse_prompt(
        {"prompt": "x", "multi_modal_data": {"video": [b"one", b"two"], "image": b"three"}}
    )
    assert [source.kind == VIDEO for source in sources] == [False, True, True]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (5, "is a int, it must be an array of frames"),
        ([], "is a list"),
        (ARRAY[0], "is a ndarray"),
        (ARRAY.astype(float), "frame 0 has shape .* and type float64"),
        (ARRAY[..., :1], r"has shape \(84, 56, 1\)"),
        ((ARRAY, {"fps": "x"}), "has fps 'x' and total_num_frames 4: .* at least 0 and "),
        ((ARRAY, {"total_num_frames": -1}), "an integer of at least 1"),
    ],
)
def test_data_other_than_a_video_is_refused(given: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        given_video(given, "video 0")
