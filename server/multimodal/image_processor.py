"""Decodes images and videos, and preprocesses them with the checkpoint's image processor, of
transformers or a port of it. Import this module only in the isolated process, because it imports
transformers."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import Fields
from engine.transport.messages import InputTensor
from server.multimodal.decode import decode
from server.multimodal.families.base import ProcessorFiles, PromptForm
from server.multimodal.families.lfm2_vl import Lfm2VlImageProcessor
from server.multimodal.families.registry import prompt_form
from server.multimodal.file_checks import BadImage
from server.multimodal.llama4_images import Llama4ImageProcessor
from server.multimodal.messages import IMAGE, Answer, ImageFacts, Setup, Video
from server.multimodal.own_processor import OwnProcessor
from server.multimodal.phi4_images import Phi4ImageProcessor
from server.multimodal.processor_fields import check_fields, processor_fields
from server.multimodal.video import Frames, read_frames

INPUTS = (
    *("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask"),
    *(
        "spatial_shapes",
        "aspect_ratio_ids",
        "aspect_ratio_mask",
        "image_pixel_values",
        "image_attention_mask",
    ),
)
"""Processor outputs that vision towers of listed models use. All other outputs serve only the
prompt text."""
M3_SIZE = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451584}
"""Pixel limits for images of MiniMax-M3, unless its files set others. The published files have a
list as `size`, which has no effect."""


def minimax_m3_processor(fields: Json) -> Qwen2VLImageProcessorPil:
    """Qwen2-VL's image processor, which is equivalent to MiniMax-M3's. Raises ConfigError for
    invalid pixel limits."""
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    own = {name: fields[name] for name in names if fields.get(name)}
    given = fields.get("size")
    size = {**M3_SIZE, **given} if isinstance(given, dict) else dict(M3_SIZE)
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        size[edge] = fields.get(name) or size[edge]
        if type(size[edge]) is not int or size[edge] < 1:
            raise ConfigError(
                f"{name} or size.{edge} of the image processor is {size[edge]!r}, it must be a "
                "positive integer"
            )
    return Qwen2VLImageProcessorPil(size=size, **own)


OWN_PROCESSORS: Mapping[str, Callable[[dict[str, Any]], Callable[..., Any]]] = {
    **dict.fromkeys(("lfm2_vl", "lfm2-vl"), Lfm2VlImageProcessor),
    "llama4": Llama4ImageProcessor,
    "minimax_m3_vl": minimax_m3_processor,
    "phi4_multimodal": Phi4ImageProcessor,
}
"""model_type -> image processor, for models whose transformers class needs torchvision."""
_SHOWN = 200
MAX_RATIO = 200
"""Maximum aspect ratio of an image: some processors scale the shorter side to a fixed length, which
would enlarge a long strip a thousandfold."""
WARM_UP_PIXELS = 224
"""Height and width of the image that is processed during start-up."""


class ImageProcessor:
    """Preprocesses images and videos with a checkpoint's image processor and PromptForm."""

    def __init__(self, setup: Setup) -> None:
        """Raises ConfigError."""
        folder = self._folder = Path(setup.folder)
        self._sampling = setup.num_frames, setup.fps
        files = ProcessorFiles.read(folder, setup.image_token, setup.video_token)
        check_fields(processor_fields({**files.processor, **setup.options}))
        check_fields(Fields(files.video_processor, Path("video_preprocessor_config.json")))
        self._size = video_size(files, setup.options)
        form = None if setup.is_unlisted else prompt_form(files)
        self._processor: Callable[..., Any] = _image_processor(folder, files, setup.options)
        # For an unlisted model, any numeric output may be an argument of its vision tower.
        self._inputs: Sequence[str] = INPUTS if form is not None else ()
        if form is None:
            form = self._processor = OwnProcessor(setup.folder, files, self._processor)
        self._form: PromptForm = form
        self._options = {
            name: setup.options.get(name, value) for name, value in self._form.options.items()
        }

    def call(self, data: bytes) -> bytes:
        """Handle a call: returns an encoded Answer for an image or a video, and encoded ImageFacts
        for empty `data`."""
        if not data:
            form = self._form.video
            facts = ImageFacts(self._form.mark, "" if form is None else form.mark)
            return msgspec.msgpack.encode(facts)
        kind, content = data[:1], memoryview(data)[1:]
        try:
            if kind == IMAGE:
                answer = self.process(decode(bytes(content)))
            else:
                video = msgspec.msgpack.decode(content, type=Video)
                answer = self.process_video(read_frames(video, *self._sampling))
        except BadImage as error:
            answer = Answer(error=str(error))
        return msgspec.msgpack.encode(answer)

    def warm_up(self) -> None:
        """Process an image, so that its modules are imported before this process is forked. Raises
        ConfigError if the processor rejects it or returns NaN or infinite values, because of
        invalid fields that `check_fields` does not check."""
        file = io.BytesIO()
        Image.new("RGB", (WARM_UP_PIXELS, WARM_UP_PIXELS)).save(file, "PNG")
        answer = msgspec.msgpack.decode(self.call(IMAGE + file.getvalue()), type=Answer)
        problem = answer.error
        for tensor in answer.tensors:
            is_float = tensor.dtype == "float32"
            if is_float and not np.isfinite(np.frombuffer(tensor.data, np.float32)).all():
                problem = f"{tensor.name} of an image has numbers that are not finite"
        if problem:
            raise ConfigError(
                f"the image processor of {self._folder} cannot be used, its fields are wrong: "
                f"{problem}"
            )

    def process(self, image: Image.Image) -> Answer:
        """Preprocess an RGB image. Raises BadImage if the processor rejects the image."""
        _check_ratio(image)
        try:
            arrays = self._processor(images=[image], return_tensors="np", **self._options)
            text, grid = self._form.text(arrays), self._form.grid(arrays)
            num_rows = self._form.num_rows(arrays)
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            reason = str(error)[:_SHOWN] or type(error).__name__
            raise BadImage(
                f"the model does not accept an image of {image.width} x {image.height} pixels: "
                f"{reason}"
            ) from None
        names = self._inputs or [
            name for name, array in arrays.items() if not isinstance(array, str)
        ]
        tensors = [_tensor(name, arrays[name]) for name in names if name in arrays]
        return Answer(size=image.size, text=text, grid=grid, tensors=tensors, num_rows=num_rows)

    def process_video(self, video: Frames) -> Answer:
        """Preprocess the frames of a video. Raises BadImage."""
        form = self._form.video
        if form is None:
            raise BadImage("the model does not accept videos")
        options = {**self._options, **self._size}
        frames = video.images
        _check_ratio(frames[0])
        try:
            first = frames[0]
            size = self._size.get("size", {})
            fitted = form.frame_size(len(frames), first.height, first.width, size)
            if fitted is not None:
                height, width = fitted
                frames = [
                    frame.resize((width, height), Image.Resampling.BICUBIC) for frame in frames
                ]
                options["do_resize"] = False
            arrays = self._processor(images=frames, return_tensors="np", **options)
            arrays = form.joined(arrays)
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            reason = str(error)[:_SHOWN] or type(error).__name__
            width, height = video.images[0].size
            raise BadImage(
                f"the model does not accept a video of {width} x {height} pixels: {reason}"
            ) from None
        tensors = [_tensor(name, arrays[name]) for name in INPUTS if name in arrays]
        text, grid = form.text(arrays, video.times), self._form.grid(arrays)
        return Answer("", video.images[0].size, text, grid, tensors, form.time_step(video.fps))


def _check_ratio(image: Image.Image) -> None:
    if max(image.size) > MAX_RATIO * min(image.size):
        raise BadImage(
            f"the model does not accept an image of {image.width} x {image.height} pixels: the "
            f"ratio of its sides is {max(image.size) / min(image.size):g}, it must be at most "
            f"{MAX_RATIO}"
        )


def _image_processor(
    folder: Path, files: ProcessorFiles, options: dict[str, Any]
) -> Callable[..., Any]:
    try:
        own = OWN_PROCESSORS.get(str(files.config.get("model_type")))
        if own is not None:
            return own({**files.processor, **options})
        make: Any = AutoImageProcessor.from_pretrained
        made: Callable[..., Any] = make(folder, backend="pil", local_files_only=True, **options)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises arbitrary exceptions for invalid files
        raise ConfigError(
            f"the image processor of {folder} cannot be created: {str(error)[:_SHOWN]}"
        ) from error
    return made


def video_size(files: ProcessorFiles, options: Mapping[str, Any]) -> dict[str, Any]:
    """Argument `size` of the image processor for video frames; empty: not set."""
    given = {**files.video_processor, **options}
    size = dict(given.get("size") or {})
    for name, other in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if isinstance(given.get(name), int):
            size[other] = given[name]
    return {"size": size} if size else {}


def _tensor(name: str, values: Any) -> InputTensor:
    array = np.asarray(values)
    if array.dtype == np.bool_:
        dtype = "bool"
    elif name == "pixel_attention_mask" or array.dtype.kind in "iu":
        array, dtype = array.astype("<i8", copy=False), "int64"
    else:
        array, dtype = array.astype("<f4", copy=False), "float32"
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return InputTensor(name, dtype, array.shape, raw.data)
