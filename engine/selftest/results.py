"""Result of a self-test, and its file next to the recipe cache.

A stored result is used only with the card, driver, release and gaudiserve version that it was
recorded with.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from config.cache_folder import read_cached, write_cached
from hpu.selftest.base import FAILS, HANGS, HOLDS, UNKNOWN, Check, Fallback

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_BYTES = 1 << 20
"""Larger files are not read: this module does not write them."""


class Identity(msgspec.Struct, frozen=True):
    """Card and software for which a result is valid."""

    card: str
    driver: str
    release: str
    version: str
    """Version of gaudiserve."""

    def __str__(self) -> str:
        driver, release = self.driver or "unknown", self.release or "unknown"
        return f"{self.card}, driver {driver}, release {release}, gaudiserve {self.version}"


class FallbackSetting(msgspec.Struct, frozen=True):
    """Values of a setting that avoid a failed check, best first."""

    setting: str
    values: tuple[str, ...]


def is_variable(setting: str) -> bool:
    """Whether a setting is an environment variable of the runtime rather than a flag."""
    return setting.isupper()


class CheckResult(msgspec.Struct, frozen=True):
    """Outcome of a check."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    fallbacks: tuple[FallbackSetting, ...] = ()
    """Settings that avoid the failure; empty for other outcomes."""
    left_allocations: int = 0
    """Allocations of device memory that the check left in use."""

    @property
    def is_wrong(self) -> bool:
        return self.status in (FAILS, HANGS)


class SelfTest(msgspec.Struct, frozen=True):
    """Result of a self-test, as stored in its file."""

    identity: Identity
    is_quick: bool
    results: tuple[CheckResult, ...]
    format: int = FORMAT

    def count(self, status: str) -> int:
        return sum(result.status == status for result in self.results)

    @property
    def status(self) -> int:
        """Exit status: 2 if no check could run, 1 if a check fails or hangs, otherwise 0."""
        if self.count(UNKNOWN) == len(self.results):
            return 2
        return int(any(result.is_wrong for result in self.results))

    @property
    def summary(self) -> str:
        """Counts by status, such as `12 hold, 1 fails (fused-sdpa), 2 unknown`."""
        words = [f"{self.count(HOLDS)} hold"]
        for status in (FAILS, HANGS):
            names = [result.name for result in self.results if result.status == status]
            if names:
                verb = status if len(names) == 1 else status.removesuffix("s")
                words.append(f"{len(names)} {verb} ({', '.join(names)})")
        return ", ".join([*words, f"{self.count(UNKNOWN)} unknown"])


def result_of(check: Check, status: str, detail: str, seconds: float = 0.0) -> CheckResult:
    """Result of `check`, with the check's fallbacks if it fails or hangs."""
    is_wrong = status in (FAILS, HANGS)
    fallbacks = (
        tuple(FallbackSetting(*fallback) for fallback in check.fallbacks) if is_wrong else ()
    )
    return CheckResult(check.name, status, detail, round(seconds, 3), fallbacks)


def write(path: Path, found: SelfTest) -> None:
    """Store a result by atomically replacing the file. A failed write is logged."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=1)
    try:
        write_cached(path, text)
    except OSError as error:
        logger.warning("The result of the self-test is not stored: %s", error)


def read(path: Path, identity: Identity, checks: Mapping[str, Check]) -> Sequence[SelfTest]:
    """The stored result; empty if there is no usable file. Logs why a file is ignored, and each
    unknown check and fallback, which are dropped."""
    try:
        found = msgspec.json.decode(read_cached(path, MAX_BYTES), type=SelfTest)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("The self-test %s is ignored: %s", path, error)
        return ()
    if found.format != FORMAT:
        logger.warning(
            "The self-test %s is ignored: its format is %d, not %d", path, found.format, FORMAT
        )
        return ()
    if found.identity != identity:
        logger.warning(
            "The self-test %s is ignored: it was measured on %s, this server is %s",
            path,
            found.identity,
            identity,
        )
        return ()
    results = tuple(
        _checked(result, checks[result.name], path)
        for result in found.results
        if _is_known(result, checks, path)
    )
    return (msgspec.structs.replace(found, results=results),)


def _is_known(result: CheckResult, checks: Mapping[str, Check], path: Path) -> bool:
    if result.name not in checks:
        logger.warning("The self-test %s: the check %s is unknown and ignored", path, result.name)
    return result.name in checks


def _checked(result: CheckResult, check: Check, path: Path) -> CheckResult:
    """`result` without fallbacks that its check does not define, and without any fallback if it is
    not wrong."""
    kept = []
    for fallback in result.fallbacks:
        if Fallback(fallback.setting, fallback.values) in check.fallbacks and result.is_wrong:
            kept.append(fallback)
        else:
            logger.warning(
                "The self-test %s: the fallback %s of %s is unknown and ignored",
                path,
                fallback.setting,
                result.name,
            )
    return msgspec.structs.replace(result, fallbacks=tuple(kept))
