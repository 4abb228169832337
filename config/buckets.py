"""BucketConfig: which padded shapes a server prepares. Facts: hpu/bucketing/bucket_table.py makes
the lists."""

from dataclasses import dataclass, field

from config.errors import ConfigError

STRATEGIES = (
    "exact",
    "exponential",
    "exponential-v3",
    "linear",
    "padding-aware",
    "file",
    "fitted",
)


@dataclass(frozen=True, slots=True)
class Range:
    """One dimension of a bucket table, from `min` by `step` to `max`; None: the strategy's own.

    `pad_max` and `pad_percent` bound the padding of the strategy padding-aware, in the dimension's
    unit and in percent of the padded size.
    """

    min: int | None = None
    step: int | None = None
    max: int | None = None
    pad_max: int | None = None
    pad_percent: int | None = None

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"a bucket range goes from {self.min} down to {self.max}")
        if self.step is not None and self.step < 1:
            raise ConfigError(f"a bucket step of {self.step} must be at least 1")
        if self.pad_max is not None and self.pad_max < 1:
            raise ConfigError(f"a bucket pad_max of {self.pad_max} must be at least 1")
        if self.pad_percent is not None and not 0 <= self.pad_percent <= 50:
            raise ConfigError(f"a bucket pad_percent of {self.pad_percent} must be 0 to 50")


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """How the bucket table is made.

    `exact` pads nothing (for devices that do not compile), the others pad to prepared shapes.
    """

    strategy: str = "auto"
    file: str | None = None
    traffic: str | None = None
    """Lengths of real requests, that `fitted` chooses boundaries for."""
    num_graphs: int = 100
    """Buckets that `fitted` makes at most, prompts and decodes together."""
    prompt_batch: Range = field(default_factory=Range)
    prompt_query: Range = field(default_factory=Range)
    prompt_context: Range = field(default_factory=Range)
    decode_batch: Range = field(default_factory=Range)
    decode_blocks: Range = field(default_factory=Range)

    def __post_init__(self) -> None:
        if self.strategy not in ("auto", *STRATEGIES):
            raise ConfigError(
                f"bucketing strategy {self.strategy!r} is not one of auto, {', '.join(STRATEGIES)}"
            )
        if (self.strategy == "file") != (self.file is not None):
            raise ConfigError(
                f"bucketing-strategy is {self.strategy!r} and bucketing-file is "
                f"{self.file or 'none'!r}: the strategy 'file' and a file need each other"
            )
        if (self.strategy == "fitted") != (self.traffic is not None):
            raise ConfigError("bucketing strategy 'fitted' and a traffic file need each other")
        if self.num_graphs < 2:
            raise ConfigError(f"num_graphs is {self.num_graphs}, it must be at least 2")
