"""BucketConfig: which padded shapes a server prepares. Facts: hpu/buckets.py makes the lists."""

from dataclasses import dataclass, field

from config.errors import ConfigError

STRATEGIES = ("exact", "exponential", "linear", "file")


@dataclass(frozen=True, slots=True)
class Range:
    """One dimension of a bucket table, from `min` by `step` to `max`; None: the strategy's own."""

    min: int | None = None
    step: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"a bucket range goes from {self.min} down to {self.max}")
        if self.step is not None and self.step < 1:
            raise ConfigError(f"a bucket step of {self.step} must be at least 1")


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """How the bucket table is made.

    `exact` pads nothing (for devices that do not compile), the others pad to prepared shapes.
    """

    strategy: str = "auto"
    file: str | None = None
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
