"""Facts about the Gaudi generations and releases of their software."""

import re
from typing import NamedTuple

from config.errors import ConfigError

GIB = 1024**3
USABLE_FRACTION = 94.62 / 96
"""Fraction of a card's memory that the runtime reports on Gaudi 2. Assumed for Gaudi 3."""

Release = tuple[int, ...]


class CardGeneration(NamedTuple):
    """A generation of the card."""

    name: str
    """Name of the card in the driver's library."""
    title: str
    memory_bytes: int
    fp8_max: float
    """Largest e4m3 value on the device."""
    pci_ids: tuple[int, ...]
    """PCI device ids of vendor Habana, from the driver."""

    @property
    def usable_bytes(self) -> int:
        """Memory limit that the runtime reports."""
        return int(self.memory_bytes * USABLE_FRACTION)


VENDOR_PACKAGE = "habana_frameworks.torch"
"""Python package of the vendor's PyTorch bridge."""

GENERATIONS = {
    "gaudi2": CardGeneration("GAUDI2", "Gaudi 2", 96 * GIB, 240.0, (0x1020, 0x1021)),
    "gaudi3": CardGeneration("GAUDI3", "Gaudi 3", 128 * GIB, 448.0, (0x1060, 0x1063)),
}

NO_FLOAT32_PRODUCTS = {"gaudi2": (2, 3, 4)}
"""PCI revisions of a generation that multiply no float32 matrices: Gaudi 2B, 2C and 2D
(HabanaAI/Intel_Gaudi3_Software, release 1.18: osal_linux.cpp, mme_node.cpp)."""

TORCH_OF_RELEASE: dict[Release, tuple[int, int]] = {
    (1, 24, 1): (2, 11),
    (1, 24, 0): (2, 10),
    (1, 23): (2, 9),
    (1, 22): (2, 7),
    (1, 21): (2, 6),
    (1, 20): (2, 6),
}
"""torch version of a release, as observed; unlisted releases are not checked."""

MAX_EXPERTS: dict[Release, int] = {(1, 20): 64}
"""Maximum experts per mixture_of_experts call, for the releases with a limit (a comment in
vllm_gaudi/extension/ops.py of vllm-project/vllm-gaudi)."""

OUT_OF_MEMORY = (
    "workspace allocation of size",
    "out of memory",
    "allocation failed for size",
)
"""Parts of the runtime's error texts for full card memory, in lower case. The runtime has no error
type for it."""

PYTHONS = ((3, 10), (3, 11), (3, 12))
"""Python versions of the vendor's images."""

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))
"""Groups of modules on an 8-card machine that the vendor lists for two and four cards."""

NUM_MODULES = 8


class Kernel(NamedTuple):
    """Availability of an op of the vendor's library, or of one of its arguments."""

    generations: tuple[str, ...]
    since: Release | None
    """First release with the op; (): all releases. None: old releases lack the op, and its first
    release is not documented."""
    undocumented: tuple[str, ...] = ()
    """Further generations with the op, whose first release is not documented."""


BOTH = ("gaudi2", "gaudi3")
PACKED_EXPERTS = "mixture_of_experts.bias_mxfp4_fused_weights"
KERNELS = {
    "FusedSDPA": Kernel(BOTH, ()),
    "FusedSDPA.window_size": Kernel(BOTH, None),
    "FusedSDPA.sinks": Kernel(BOTH, None),
    "FusedRMSNorm": Kernel(BOTH, ()),
    "rotary_pos_embedding": Kernel(BOTH, ()),
    "block_softmax": Kernel(BOTH, ()),
    # The bridge's tests skipped Gaudi 2 at first; the tests of 2026 do not. vllm-gaudi still
    # calls it on Gaudi 3 only.
    "block_softmax_adjustment": Kernel(("gaudi3",), (1, 22, 0, 494), ("gaudi2",)),
    "softmax_fa2": Kernel(BOTH, None),
    # A bfloat16 matmul with a float32 result: vllm-gaudi gave no result tensor to older releases
    # (its commit a8211ff1).
    "matmul.float32_out": Kernel(BOTH, (1, 24, 0, 171)),
    "fp8_gemm_v2": Kernel(BOTH, ()),
    "convert_from_uint4": Kernel(BOTH, ()),
    # The argument g_idx: the bridge of 1.19 lacks it; vllm-gaudi has passed it since 1.22.
    "convert_from_uint4.g_idx": Kernel(BOTH, (1, 22)),
    # Intel Neural Compressor has called it since 3.5, for 1.22; the bridge of 1.19 lacks it.
    "calculate_scale_for_cast": Kernel(BOTH, (1, 22)),
    "mixture_of_experts": Kernel(BOTH, ()),
    # vllm-gaudi has called it since its first release, for 1.22; the bridge of 1.19 lacks it.
    "mixture_of_experts.fp8_fused_weights": Kernel(BOTH, (1, 22)),
    # vllm-gaudi has called it since 0.16, for 1.23; the bridge of 1.19 lacks it.
    "mixture_of_experts.bias_fused_weights": Kernel(BOTH, (1, 23)),
    # The first release is not documented: the bridge's sources of 2026 have both.
    "mixture_of_experts.mxfp4_fused_weights": Kernel(BOTH, None),
    PACKED_EXPERTS: Kernel(BOTH, None),
}


def generation(name: str) -> CardGeneration:
    """The generation `name` (gaudi2, gaudi3). Raises ConfigError for an unknown name."""
    if name not in GENERATIONS:
        raise ConfigError(f"device {name!r} is not one of {', '.join(GENERATIONS)}")
    return GENERATIONS[name]


def release_of(text: str) -> Release | None:
    """Parse the leading numbers of a version: 1.22.1-6f0bb5a -> (1, 22, 1). None if there are fewer
    than two numbers."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def torch_of_release(release: Release) -> tuple[int, int] | None:
    """torch version (major, minor) of `release`; None if unknown."""
    return next(
        (torch for known, torch in TORCH_OF_RELEASE.items() if release[: len(known)] == known), None
    )


def max_experts(release: Release | None) -> int | None:
    """Largest number of experts in a call of mixture_of_experts; None: no known limit."""
    return MAX_EXPERTS.get((release or ())[:2])


def has_kernel(kernel: str, generation: str, release: Release | None) -> bool | None:
    """Whether `kernel` (a key of KERNELS) exists on `generation` in `release`; None if unknown."""
    known = KERNELS[kernel]
    if generation in known.undocumented:
        return None
    if generation not in known.generations:
        return False
    if known.since == ():
        return True
    if known.since is None or release is None:
        return None
    # A release with fewer numbers than `since` may be older or newer than `since`.
    if len(release) < len(known.since) and known.since[: len(release)] == release:
        return None
    return release >= known.since
