"""Prompts with images for a worker driven by hand-made plans."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tiny_vision_models import Picture
from torch import Tensor
from worker_rig import WorkerRig

from config.parallel import ParallelConfig
from hpu.distributed.process_groups import ProcessGroup
from hpu.protocol import EncoderInput, ImagePlacement, InputTensor, Ranks


@dataclass
class Prompt:
    """Tokens, and the placements of images in them."""

    tokens: list[int]
    placements: tuple[ImagePlacement, ...]
    pictures: list[Picture]


def write(*parts: list[int] | tuple[bytes, Picture]) -> Prompt:
    """A prompt of texts and images in this order; images are given with their content hashes."""
    tokens: list[int] = []
    placements, pictures = [], []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        content, picture = part
        length = len(picture.tokens)
        placements.append(ImagePlacement(content, len(tokens), length, picture.grid))
        pictures.append(picture)
        tokens += picture.tokens
    return Prompt(tokens, tuple(placements), pictures)


def text(seed: int, length: int) -> list[int]:
    """Random text tokens without image tokens."""
    return np.random.default_rng(seed).integers(4, 300, length).tolist()  # type: ignore[no-any-return]


def encoded(content: bytes, picture: Picture) -> EncoderInput:
    """The image in the form of a plan."""
    tensors = [_tensor(name, tensor) for name, tensor in picture.tensors.items()]
    return EncoderInput(content, picture.num_embeddings, tensors)


def _tensor(name: str, tensor: Tensor) -> InputTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = memoryview(tensor.contiguous().numpy().tobytes())
    return InputTensor(name, dtype, tuple(tensor.shape), data)


@dataclass
class ImageRig:
    """Encodes each image once, before the first request that contains it."""

    rig: WorkerRig
    encoded: set[bytes] = field(default_factory=set)

    def admit(self, req_index: int, prompt: Prompt, **options: Any) -> None:
        """Admit a request with `prompt`, and with `sampled` tokens after it."""
        sampled = options.pop("sampled", [])
        for placement, picture in zip(prompt.placements, prompt.pictures, strict=True):
            if placement.content not in self.encoded:
                self.encoded.add(placement.content)
                self.rig.encode(encoded(placement.content, picture))
        options.setdefault("num_prompt", len(prompt.tokens))
        tokens = [*prompt.tokens, *sampled]
        self.rig.admit(req_index, tokens, images=prompt.placements, **options)

    def free_all(self) -> None:
        """Make the next plan drop all images."""
        self.rig.free_images(*self.encoded)
        self.encoded.clear()


def random_images(
    rig: WorkerRig, pictures: list[Picture], *, max_chunk: int, rounds: int = 5
) -> list[list[int]]:
    """Tokens of two requests at a time, with or without images: prefills in chunks, then
    decodes."""
    luck = random.Random(3)
    images = ImageRig(rig)
    found = []
    for number in range(rounds):
        for req_index in range(2):
            parts: list[Any] = [text(luck.randrange(99), luck.randint(1, 9))]
            if req_index == 0 or number % 2:
                index = luck.randrange(len(pictures))
                parts += [(b"picture %d" % index, pictures[index]), text(1, luck.randint(1, 9))]
            images.admit(req_index, write(*parts))
        while any(
            request.computed < request.known - len(request.sampled)
            for request in rig.requests.values()
        ):
            left = {
                index: request.known - request.computed
                for index, request in rig.requests.items()
                if not request.sampled and request.computed < request.known
            }
            rig.prefill({index: min(count, max_chunk) for index, count in left.items()})
            rig.step()
        rig.run([0, 1], luck.randint(1, 4))
        found += [rig.free(0), rig.free(1)]
        if number % 2:
            images.free_all()
    return found


def run_rank(group: ProcessGroup, folder: str, store: str, prompt: Prompt, count: int) -> list[int]:
    """Tokens that a tensor-parallel rank samples for the prompt."""
    rig = WorkerRig(
        Path(folder),
        ranks=Ranks(group.size, group.rank, store, timeout_s=60),
        parallel=ParallelConfig(tensor_parallel_size=group.size),
    )
    try:
        ImageRig(rig).admit(0, prompt)
        rig.prefill({0: None})
        rig.step()
        rig.run([0], count - 1)
        return rig.free(0)
    finally:
        rig.worker.close()
