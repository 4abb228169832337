"""Videos are read frame by frame within limits, and become patches in the layout of
transformers."""

import sys
from pathlib import Path
from types import SimpleNamespace

import hostile_images as hostile
import msgspec
import numpy as np
import pytest
from PIL import Image
from tiny_vision import clip, gif_bytes, image_bytes, make_tiny_vision, mp4_bytes, picture
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from server.multimodal import video as module
from server.multimodal.families.base import ProcessorFiles
from server.multimodal.file_checks import BadImage
from server.multimodal.image_processor import ImageProcessor, video_size
from server.multimodal.messages import VIDEO, Answer, ImageFacts, Setup, Video
from server.multimodal.video import Frames, container, read_frames, sampled

SETUP = ("<|image_pad|>", {}, "<|video_pad|>")
FRAMES = clip(56, 84, 6)


def shown(images: list[Image.Image], fps: float) -> Frames:
    return Frames(images, fps, [index / fps for index in range(len(images))])


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = make_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("model"), weights=False)
    return ImageProcessor(Setup(str(folder), *SETUP))


def distance(first: Image.Image, other: Image.Image) -> float:
    return float(np.abs(np.asarray(first, float) - np.asarray(other, float)).mean())


@pytest.mark.parametrize(
    ("total", "seconds", "most", "fps", "expected"),
    [
        (10, 5.0, 32, -1, list(range(10))),
        (10, 5.0, 4, -1, [0, 3, 6, 9]),
        (100, 10.0, 32, 0.5, [0, 24, 49, 74, 99]),
        (100, 0.1, 32, 0.5, [0]),
        (1, 1.0, 32, -1, [0]),
    ],
)
def test_frames_are_chosen_evenly(
    total: int, seconds: float, most: int, fps: float, expected: list[int]
) -> None:
    assert sampled(total, seconds, most, fps) == expected


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_frames_and_their_rate(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = image_bytes(
        FRAMES[0], kind, save_all=True, append_images=FRAMES[1:], duration=250, **options
    )

    frames, fps, times = read_frames(Video(data), 32, -1)
    few, few_fps, few_times = read_frames(Video(data), 2, -1)

    assert len(frames) == 6 and fps == pytest.approx(4.0)
    assert times == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1.25])
    assert few_times == pytest.approx([0, 1.25])
    most = 0 if kind != "GIF" else 20
    assert all(distance(*pair) <= most for pair in zip(frames, FRAMES, strict=True))
    assert few_fps == pytest.approx(4 / 3)
    assert [distance(*pair) <= most for pair in zip(few, FRAMES[::5], strict=True)] == [True] * 2


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_container_gives_its_frames_and_their_rate(kind: str) -> None:
    shades = [Image.new("RGB", (64, 48), (30 * i, 10 * i, 200 - 20 * i)) for i in range(8)]
    data = mp4_bytes(shades, 10, kind)

    frames, fps, times = read_frames(Video(data), 4, -1)

    assert fps == pytest.approx(5.0, rel=0.1)
    assert times == pytest.approx([0, 0.2, 0.4, 0.7], rel=0.1)
    assert [distance(*pair) < 6 for pair in zip(frames, (shades[i] for i in (0, 2, 4, 7)),
                                                strict=True)] == [True] * 4  # fmt: skip


def test_a_rotated_video_is_decoded_upright() -> None:
    pytest.importorskip("av")
    halves = Image.new("RGB", (64, 32), (200, 0, 0))
    halves.paste((0, 0, 200), (32, 0, 64, 32))
    data = bytearray(mp4_bytes([halves] * 2))
    # Matrix of the track header: a clockwise quarter turn, as phones write it.
    at = data.index(b"tkhd") + 4 + 40
    data[at : at + 36] = np.array([0, 1, 0, -1, 0, 0, 0, 0, 0], ">i4").tobytes()
    for index, value in ((1, 65536), (3, -65536), (8, 2**30)):
        data[at + 4 * index : at + 4 * index + 4] = value.to_bytes(4, "big", signed=True)

    frames = read_frames(Video(bytes(data)), 32, -1).images

    assert frames[0].size == (32, 64)
    # The left side of the video appears at the top of the frames.
    assert frames[0].getpixel((16, 8))[0] > 150  # type: ignore[index]
    assert frames[0].getpixel((16, 56))[2] > 150  # type: ignore[index]


def test_frames_given_as_a_list_are_all_used() -> None:
    given = [image_bytes(frame) for frame in [*FRAMES, picture(20, 20)]]

    frames, fps, times = read_frames(Video(frames=given), 2, -1)
    told = read_frames(Video(frames=given, fps=5.0), 2, -1).fps

    assert (len(frames), fps, told) == (7, 2.0, 5.0)
    assert times == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert {frame.size for frame in frames} == {(56, 84)}
    assert distance(frames[3], FRAMES[3]) == 0


def test_a_container_without_its_library_is_refused_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)

    with pytest.raises(BadImage, match=r"pip install '\.\[video\]'` in the clone"):
        read_frames(Video(b"\0\0\0\x18ftypmp42" + bytes(100)), 32, -1)
    assert len(read_frames(Video(gif_bytes(FRAMES)), 32, -1).images) == 6


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "the video must be one of MP4, WebM"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "the video must be one of MP4, WebM"),
        (b"", "the video must be one of MP4, WebM"),
        (b"\0\0\0\x18ftypmp42" + bytes(1000), "the video cannot be decoded"),
        (b"\x1aE\xdf\xa3" + bytes(1000), "the video cannot be decoded"),
        (b"RIFF\0\0\0\0AVI " + bytes(1000), "the video cannot be decoded"),
        (gif_bytes(FRAMES)[:900], "the video"),
    ],
)
def test_data_other_than_a_video_is_refused(data: bytes, why: str) -> None:
    pytest.importorskip("av")
    with pytest.raises(BadImage, match=why):
        read_frames(Video(data), 32, -1)


def test_ffmpeg_gets_an_explicit_format() -> None:
    assert container(mp4_bytes(FRAMES)) == "mp4"
    assert container(mp4_bytes(FRAMES, kind="webm")) == "matroska"
    assert container(gif_bytes(FRAMES)) is None


def test_limits_are_reported_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FRAMES", 5)
    with pytest.raises(BadImage, match="the video has 6 frames, at most 5 are allowed"):
        read_frames(Video(frames=[image_bytes(frame) for frame in FRAMES]), 32, -1)
    assert len(read_frames(Video(gif_bytes(FRAMES)), -1, -1).images) == 5
    monkeypatch.setattr(module, "MAX_VIDEO_PIXELS", 20_000)
    with pytest.raises(BadImage, match="5 frames of 56 x 84 have 23520 pixels, at most 20000"):
        read_frames(Video(gif_bytes(FRAMES)), 5, -1)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_video_patches_have_the_layout_of_transformers(
    count: int, processor: ImageProcessor
) -> None:
    """The video class needs torchvision; the layout is that of Qwen2VLVideoProcessor.patchify,
    which repeats the last frame up to the temporal patch size."""
    found = processor.process_video(shown(FRAMES[:count], 2.0))

    frames = [*FRAMES[:count], *[FRAMES[count - 1]] * (count % 2)]
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    deviation = np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = (np.stack([np.asarray(frame) for frame in frames]) / 255 - mean) / deviation
    times, height, width = len(frames) // 2, 6, 4
    layout = pixels.transpose(0, 3, 1, 2).reshape(
        times, 2, 3, height // 2, 2, 14, width // 2, 2, 14
    )
    expected = layout.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * height * width, -1)
    tensors = {tensor.name: tensor for tensor in found.tensors}
    values = np.frombuffer(tensors["pixel_values"].data, "<f4").reshape(expected.shape)
    assert np.allclose(values, expected, atol=1e-5)
    grid = np.frombuffer(tensors["image_grid_thw"].data, "<i8").tolist()
    assert grid == [times, height, width] and found.grid == (times, 3, 2)
    assert found.text == "<|video_pad|>" * (times * 6)
    assert found.time_step == 1.0


def test_qwen2_5_vl_time_steps_are_seconds_times_tokens_per_second(tmp_path: Path) -> None:
    folder = make_tiny_vision("qwen2_vl", tmp_path, weights=False)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    config["model_type"] = "qwen2_5_vl"
    config["vision_config"]["tokens_per_second"] = 2
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    processor = ImageProcessor(Setup(str(folder), *SETUP))

    steps = [processor.process_video(shown(FRAMES, fps)).time_step for fps in (2.0, 8.0, 0.3)]

    assert steps == pytest.approx([2.0, 0.5, 40 / 3])


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, (64, 64)), (2, (300, 90)), (4, (64, 500)), (5, (10, 40)), (7, (333, 217))],
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe"])
def test_qwen3_prompts_have_timestamps_and_all_frames_share_the_pixel_limits(
    family: str, count: int, size: tuple[int, int], tmp_path: Path
) -> None:
    folder = make_tiny_vision(family, tmp_path, weights=False)
    bounds = {"shortest_edge": 28 * 28 * 16, "longest_edge": 28 * 28 * 60}
    own = msgspec.json.encode({"size": bounds})
    (folder / "video_preprocessor_config.json").write_bytes(own)
    processor = ImageProcessor(Setup(str(folder), *SETUP))
    facts = msgspec.msgpack.decode(processor.call(b""), type=ImageFacts)
    width, height = size

    found = processor.process_video(shown(clip(width, height, count), 3.0))

    assert facts.video_mark == "<|vision_start|><|video_pad|><|vision_end|>"
    rows, columns = smart_resize(
        *(max(count, 2), height, width),
        factor=28,
        min_pixels=bounds["shortest_edge"],
        max_pixels=bounds["longest_edge"],
    )
    times = -(-count // 2)
    assert found.grid == (times, rows // 28, columns // 28)
    metadata = SimpleNamespace(fps=3.0, frames_indices=list(range(count)))
    theirs = SimpleNamespace(
        **{"video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>"},
        vision_end_token="<|vision_end|>",
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
    )
    kind = Qwen3VLProcessor
    theirs._calculate_timestamps = kind._calculate_timestamps.__get__(theirs)
    grid = np.array([[times, rows // 14, columns // 14]])
    arrays = {"video_grid_thw": grid, "video_metadata": [metadata]}
    assert found.text == kind.replace_video_token(theirs, arrays, 0)


def test_the_image_process_accepts_a_video(processor: ImageProcessor) -> None:
    facts = msgspec.msgpack.decode(processor.call(b""), type=ImageFacts)
    good = processor.call(VIDEO + msgspec.msgpack.encode(Video(gif_bytes(FRAMES))))
    bad = processor.call(VIDEO + msgspec.msgpack.encode(Video(b"x")))

    assert facts.video_mark == "<|video_pad|>"
    assert msgspec.msgpack.decode(good, type=Answer).grid == (3, 3, 2)
    assert "must be one of MP4" in msgspec.msgpack.decode(bad, type=Answer).error


def test_frames_have_the_sizes_of_the_video_processor(tmp_path: Path) -> None:
    folder = make_tiny_vision("qwen2_vl", tmp_path, weights=False)
    own = {"size": {"shortest_edge": 784, "longest_edge": 28 * 28 * 4}}
    (folder / "video_preprocessor_config.json").write_bytes(msgspec.json.encode(own))

    found = ImageProcessor(Setup(str(folder), *SETUP)).process_video(shown(clip(280, 280, 2), 2.0))
    files = ProcessorFiles.read(folder, "")

    assert found.grid == (1, 2, 2)
    assert video_size(files, {"max_pixels": 1568}) == {
        "size": {"shortest_edge": 784, "longest_edge": 1568}
    }
    assert video_size(ProcessorFiles({}, {}, {}, ""), {}) == {}


def test_a_model_without_videos_has_no_video_token_and_refuses_videos(tmp_path: Path) -> None:
    folder = make_tiny_vision("llava", tmp_path, weights=False)
    processor = ImageProcessor(Setup(str(folder), "<image>", {}, ""))

    facts = msgspec.msgpack.decode(processor.call(b""), type=ImageFacts)

    assert facts.video_mark == ""
    with pytest.raises(BadImage, match="does not accept videos"):
        processor.process_video(shown(FRAMES, 2.0))


def test_broken_frames_are_reported() -> None:
    with pytest.raises(BadImage, match="the image must be one of PNG"):
        read_frames(Video(frames=[image_bytes(FRAMES[0]), b"x"]), 32, -1)


def test_skipped_frames_are_counted_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_ANIMATION_PIXELS", 16 * 2**20)
    with pytest.raises(BadImage, match=r"at least 17 frames of 1024 x 1024 pixels, at most 16 of"):
        read_frames(Video(hostile.small_frames(1024, 100)), 2, -1)
    with pytest.raises(BadImage, match=r"at least 16385 frames of 8 x 8 pixels, at most 16384"):
        read_frames(Video(hostile.small_frames(8, 20_000)), 2, -1)


def test_frames_given_as_a_list_are_counted_before_decoding() -> None:
    small, large = image_bytes(picture(8, 8)), hostile.black_png(8192, 8192, hostile.GREY, 1)

    with pytest.raises(BadImage, match=r"at least 335544320 pixels, at most 268435456 are allowed"):
        read_frames(Video(frames=[large] * 700), 32, -1)
    with pytest.raises(BadImage, match=r"at least 268435520 pixels, at most 268435456 are allowed"):
        read_frames(Video(frames=[small, *[large] * 4]), 32, -1)
    # Each frame is resized to the first.
    with pytest.raises(BadImage, match=r"9 frames of 8192 x 8192 have 603979776 pixels"):
        read_frames(Video(frames=[large, *[small] * 8]), 32, -1)
    with pytest.raises(BadImage, match="the image must be one of"):
        read_frames(Video(frames=[small, b"x"]), 32, -1)


def test_only_selected_frames_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Image.Image] = []
    real = module.to_rgb

    def record(frame: Image.Image) -> Image.Image:
        converted.append(frame)
        return real(frame)

    monkeypatch.setattr(module, "to_rgb", record)
    read_frames(Video(gif_bytes(FRAMES)), 2, -1)

    assert len(converted) == 2
