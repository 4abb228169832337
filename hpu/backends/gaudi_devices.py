"""What differs between the generations of Gaudi, and between releases of its software. Facts only:
knows no tensors and touches no device."""

import re
from typing import NamedTuple

from config.errors import ConfigError

GIB = 1024**3
USABLE_SHARE = 94.62 / 96
"""Of a card's memory, as the runtime reports it on Gaudi 2. Taken over for Gaudi 3: unconfirmed."""

Release = tuple[int, ...]


class Generation(NamedTuple):
    """What differs between the generations of the card."""

    name: str
    """As the driver's library spells it."""
    title: str
    memory_bytes: int
    fp8_max: float
    """Largest value of e4m3 on the device."""
    aligned_scales: tuple[float, ...] | None
    """FP8 scales that cost nothing; None: any power of two."""
    pci_ids: tuple[int, ...]
    """Device ids behind the vendor's PCI_VENDOR, as the driver lists them."""

    @property
    def usable_bytes(self) -> int:
        """What the runtime reports as the card's limit."""
        return int(self.memory_bytes * USABLE_SHARE)


GENERATIONS = {
    "gaudi2": Generation(
        "GAUDI2", "Gaudi 2", 96 * GIB, 240.0, (16.0, 1.0, 1 / 16, 1 / 256), (0x1020, 0x1021)
    ),
    "gaudi3": Generation("GAUDI3", "Gaudi 3", 128 * GIB, 448.0, None, (0x1060, 0x1063)),
}

PCI_VENDOR = 0x1DA3

FP8_RESCALE = 240 / 448
"""A checkpoint made for the range of Gaudi 3 is too wide for Gaudi 2 by this factor."""

TORCH_OF_RELEASE: dict[Release, tuple[int, int]] = {
    (1, 24, 1): (2, 11),
    (1, 24, 0): (2, 10),
    (1, 22): (2, 7),
}
"""Version of torch that a release was seen with; a release not listed is not judged."""

PYTHONS = ((3, 10), (3, 11), (3, 12))
"""That the vendor's images ship."""

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))
"""Modules of an 8-card box that may work together in a smaller group."""

NUM_MODULES = 8


class Kernel(NamedTuple):
    """Where an op of the vendor's library exists."""

    generations: tuple[str, ...]
    since: Release | None
    """Least release; None: newer than some, but nobody wrote down since when."""


BOTH = ("gaudi2", "gaudi3")
KERNELS = {
    "FusedSDPA": Kernel(BOTH, ()),
    "FusedSDPA.window_size": Kernel(BOTH, None),
    "FusedSDPA.sinks": Kernel(BOTH, None),
    "FusedRMSNorm": Kernel(BOTH, ()),
    "rotary_pos_embedding": Kernel(BOTH, ()),
    "block_softmax": Kernel(BOTH, ()),
    "block_softmax_adjustment": Kernel(("gaudi3",), (1, 22, 0, 494)),
    "softmax_fa2": Kernel(BOTH, None),
    "fp8_gemm_v2": Kernel(BOTH, ()),
    "convert_from_uint4": Kernel(BOTH, ()),
    "mixture_of_experts": Kernel(BOTH, ()),
    "mixture_of_experts.bias_fused_weights": Kernel(BOTH, None),
    "mixture_of_experts.mxfp4_fused_weights": Kernel(BOTH, None),
}


def generation(name: str) -> Generation:
    """The generation called `name` (gaudi2, gaudi3). Raises ConfigError for another word."""
    if name not in GENERATIONS:
        raise ConfigError(f"device {name!r} is not one of {', '.join(GENERATIONS)}")
    return GENERATIONS[name]


def release_of(text: str) -> Release | None:
    """The numbers that a version begins with: 1.22.1-6f0bb5a is (1, 22, 1); None without two."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def torch_of_release(release: Release) -> tuple[int, int] | None:
    """(major, minor) of the torch that `release` comes with, if it is known."""
    return next(
        (torch for own, torch in TORCH_OF_RELEASE.items() if release[: len(own)] == own), None
    )


def has_kernel(kernel: str, generation: str, release: Release | None) -> bool | None:
    """Whether `kernel` (a key of KERNELS) exists there; None: only the library itself can tell."""
    known = KERNELS[kernel]
    if generation not in known.generations:
        return False
    if known.since == ():
        return True
    if known.since is None or release is None:
        return None
    # A release told by fewer numbers than the gate has may lie on either side of it.
    if len(release) < len(known.since) and known.since[: len(release)] == release:
        return None
    return release >= known.since
