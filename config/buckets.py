"""Settings of the bucket table."""

import math
from dataclasses import asdict, dataclass, field, fields, replace

from config.errors import ConfigError
from config.setting import check_settings, is_count, metadata, setting

MAX_TILES = 2**20
"""Maximum launch size in `images`, in tiles or patches."""
AUTOMATIC = ("auto", "none")
"""Values of `images` that select the model's default launch sizes."""


_LIMITS = {
    **{"min": (0, math.inf), "max": (0, math.inf)},
    **{"step": (1, math.inf), "pad_max": (1, math.inf), "pad_percent": (0, 50)},
}
"""Lowest and highest value of each limit of a range."""


@dataclass(frozen=True, slots=True)
class Range:
    """Limits of one dimension of a bucket table; None: the strategy's default. `pad_max` (absolute)
    and `pad_percent` (percent of the padded size) limit the padding of the padding-aware
    strategy."""

    min: int | None = None
    step: int | None = None
    max: int | None = None
    pad_max: int | None = None
    pad_percent: int | None = None

    def check(self, dimension: str) -> None:
        """Raise ConfigError for a limit out of range, or a minimum above the maximum. `dimension`:
        the field's name, for errors."""
        for limit, value in asdict(self).items():
            lowest, highest = _LIMITS[limit]
            if value is not None and not lowest <= value <= highest:
                allowed = f"at least {lowest}" if highest == math.inf else f"{lowest} to {highest}"
                raise ConfigError(f"{dimension}.{limit} is {value}, it must be {allowed}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(
                f"{dimension}.min is {self.min} and {dimension}.max is {self.max}, the minimum "
                "must be at most the maximum"
            )


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """Settings of the bucket table. The strategy `exact` does not pad."""

    strategy: str = setting(
        "auto",
        "How padded shapes are chosen",
        name="bucketing-strategy",
        variables=("VLLM_BUCKETING_STRATEGY",),
        choices=(
            *("auto", "exact", "exponential", "exponential-v3"),
            *("linear", "padding-aware", "file", "fitted"),
        ),
        spellings={
            "exp": "exponential",
            "exponential_v3": "exponential-v3",
            "lin": "linear",
            "pad": "padding-aware",
            "padding_aware": "padding-aware",
        },
        switches={"exponential-bucketing": ("exponential", "linear")},
        switch_variables={"VLLM_EXPONENTIAL_BUCKETING": "exponential-bucketing"},
    )
    file: str | None = setting(
        None,
        "File with the shapes; selects strategy 'file'",
        metavar="FILE",
        name="bucketing-file",
        aliases=("bucketing-from-file",),
        variables=("VLLM_BUCKETING_FROM_FILE",),
    )
    traffic: str | None = setting(
        None,
        "Lengths of real requests (JSONL, a /metrics page or a request log); selects "
        "strategy 'fitted'; none: a mix of chats, code and summaries",
        metavar="FILE",
        name="bucketing-traffic",
    )
    num_graphs: int | None = setting(
        None,
        "Maximum buckets of strategy 'fitted'; auto: 13 for each doubling of a full "
        "context's blocks, not above exponential-v3",
        name="bucketing-graphs",
        minimum=2,
    )
    images: str = setting(
        "auto",
        "Buckets of the vision tower: tiles or patches per launch, with commas",
        name="multimodal-buckets",
        variables=("VLLM_MULTIMODAL_BUCKETS",),
    )
    # A Range becomes five flags; their help starts with the limit: "Smallest number of ...".
    prompt_batch: Range = field(
        default_factory=Range, metadata=metadata("prompts in a prefill", name="prompt-bs")
    )
    prompt_query: Range = field(
        default_factory=Range,
        metadata=metadata("new tokens of a prompt", name="prompt-query", aliases=("prompt-seq",)),
    )
    prompt_context: Range = field(
        default_factory=Range, metadata=metadata("cached blocks of a prompt", name="prompt-ctx")
    )
    decode_batch: Range = field(
        default_factory=Range, metadata=metadata("sequences in a decode", name="decode-bs")
    )
    decode_blocks: Range = field(
        default_factory=Range, metadata=metadata("blocks in a decode", name="decode-block")
    )

    @property
    def ranges(self) -> dict[str, Range]:
        """Flag name -> range of each dimension."""
        return {
            "prompt-bs": self.prompt_batch,
            "prompt-query": self.prompt_query,
            "prompt-ctx": self.prompt_context,
            "decode-bs": self.decode_batch,
            "decode-block": self.decode_blocks,
        }

    def resolved(self, default: str) -> "BucketConfig":
        """These settings with `auto` replaced by the strategy `default`, or by a strategy that
        reads the configured ranges if `default` does not read them. If `exact` replaces `auto`,
        only `images` is kept."""
        if self.strategy != "auto":
            return self
        if default == "exact":
            return BucketConfig(strategy=default, images=self.images)
        ignored = self.ignored_ranges(default)
        return replace(self, strategy=_reader(ignored) if ignored else default)

    def ignored_ranges(self, strategy: str) -> list[str]:
        """Flags of configured ranges that `strategy` does not read."""
        unset = asdict(Range())
        return [
            f"--{name}-bucket-{part.replace('_', '-')}"
            for name, given in self.ranges.items()
            for part, value in asdict(given).items()
            if value != unset[part] and not _is_read(strategy, name, part, given)
        ]

    @property
    def image_sizes(self) -> tuple[int, ...]:
        """Launch sizes given in `images`; empty: the model's defaults."""
        if self.images.lower() in AUTOMATIC:
            return ()
        return tuple(int(size) for size in self.images.split(","))

    def __post_init__(self) -> None:
        check_settings(self)
        for dimension in fields(self):
            if isinstance(given := getattr(self, dimension.name), Range):
                given.check(dimension.name)
        sizes = [] if self.images.lower() in AUTOMATIC else self.images.split(",")
        if not all(is_count(size) and 1 <= int(size) <= MAX_TILES for size in sizes):
            raise ConfigError(
                f"--multimodal-buckets is {self.images!r}, it must be comma-separated numbers "
                f"from 1 to {MAX_TILES}"
            )
        if (self.strategy == "file") != (self.file is not None):
            raise ConfigError(
                f"--bucketing-strategy is {self.strategy!r} and --bucketing-file is "
                f"{self.file or 'none'!r}: the strategy 'file' requires a file, and a file "
                "requires this strategy"
            )
        if self.traffic and self.strategy != "fitted":
            raise ConfigError(
                f"--bucketing-strategy is {self.strategy!r} and --bucketing-traffic is "
                f"{self.traffic!r}: only the strategy 'fitted' reads the traffic"
            )
        ignored = [] if self.strategy == "auto" else self.ignored_ranges(self.strategy)
        if ignored:
            raise ConfigError(
                f"--bucketing-strategy is {self.strategy!r}, which does not read "
                f"{' and '.join(ignored)}: leave out the ranges, or use the strategy "
                f"{_reader(ignored)!r}"
            )


def _reader(ignored: list[str]) -> str:
    """A strategy that reads the flags `ignored`."""
    return "padding-aware" if any("-pad-" in flag for flag in ignored) else "linear"


def _is_read(strategy: str, name: str, part: str, given: Range) -> bool:
    if strategy == "padding-aware":
        return True
    if part in ("pad_max", "pad_percent"):
        return False
    if strategy == "exponential-v3" and (name, part) in (
        ("prompt-query", "min"),
        ("prompt-ctx", "max"),
    ):
        # exponential-v3 always starts queries at 1 token, and reads the maximum context.
        return name == "prompt-ctx" or given.min == 1
    # The maximum also limits the prompts of a launch (config/loading/sources.py).
    return strategy == "linear" or (name, part) == ("prompt-bs", "max")
