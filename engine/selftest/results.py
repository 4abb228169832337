"""Result of a self-test, and the file that keeps it beside the recipe cache.

A file is used for the card, driver, release and version of gaudiserve that it was made with.
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
"""A larger file was not written by this module."""


class Identity(msgspec.Struct, frozen=True):
    """What a result is valid for."""

    card: str
    driver: str
    release: str
    version: str
    """Version of gaudiserve."""

    def __str__(self) -> str:
        driver, release = self.driver or "unknown", self.release or "unknown"
        return f"{self.card}, driver {driver}, release {release}, gaudiserve {self.version}"


class Setting(msgspec.Struct, frozen=True):
    """Values of a setting that avoid a failed check, best first."""

    setting: str
    values: tuple[str, ...]


def is_variable(setting: str) -> bool:
    """Whether a setting is a variable of the runtime, and no flag."""
    return setting.isupper()


class CheckResult(msgspec.Struct, frozen=True):
    """Outcome of a check."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    fallbacks: tuple[Setting, ...] = ()
    """Settings that avoid the assumption of a check that fails or hangs."""
    left_allocations: int = 0
    """Allocations of the card's memory that the check left in use."""

    @property
    def is_wrong(self) -> bool:
        return self.status in (FAILS, HANGS)


class SelfTest(msgspec.Struct, frozen=True):
    """A stored result."""

    identity: Identity
    is_quick: bool
    results: tuple[CheckResult, ...]
    format: int = FORMAT

    def count(self, status: str) -> int:
        return sum(result.status == status for result in self.results)

    @property
    def summary(self) -> str:
        """`12 hold, 1 fails (fused-sdpa), 2 unknown`."""
        words = [f"{self.count(HOLDS)} hold"]
        for status in (FAILS, HANGS):
            names = [result.name for result in self.results if result.status == status]
            if names:
                verb = status if len(names) == 1 else status.removesuffix("s")
                words.append(f"{len(names)} {verb} ({', '.join(names)})")
        return ", ".join([*words, f"{self.count(UNKNOWN)} unknown"])


def result_of(check: Check, status: str, detail: str, seconds: float = 0.0) -> CheckResult:
    """The result of `check`, with its fallbacks if it is wrong."""
    is_wrong = status in (FAILS, HANGS)
    fallbacks = tuple(Setting(*fallback) for fallback in check.fallbacks) if is_wrong else ()
    return CheckResult(check.name, status, detail, round(seconds, 3), fallbacks)


def write(path: Path, found: SelfTest) -> None:
    """Store a result by replacing the whole file. Failure to write is logged."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=1)
    try:
        write_cached(path, text)
    except OSError as error:
        logger.warning("The result of the self-test is not stored: %s", error)


def read(path: Path, identity: Identity, checks: Mapping[str, Check]) -> Sequence[SelfTest]:
    """The stored result; empty if there is no usable file. Logs a line about a file that is not
    used, and a line about each fallback that no check has."""
    try:
        found = msgspec.json.decode(read_cached(path, MAX_BYTES), type=SelfTest)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("The self-test %s is ignored: %s", path, error)
        return ()
    if found.format != FORMAT:
        logger.warning(
            "The self-test %s is ignored: its format is %d, not %d", path, found.format, FORMAT
        )
        return ()
    if found.identity != identity:
        logger.warning(
            "The self-test %s is ignored: it is of %s, and here is %s",
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
        logger.warning("The self-test %s: the check %s is unknown, and refused", path, result.name)
    return result.name in checks


def _checked(result: CheckResult, check: Check, path: Path) -> CheckResult:
    """`result` with the fallbacks that its check has."""
    kept = []
    for fallback in result.fallbacks:
        if Fallback(fallback.setting, fallback.values) in check.fallbacks and result.is_wrong:
            kept.append(fallback)
        else:
            logger.warning(
                "The self-test %s: the fallback %s of %s is unknown, and refused",
                path,
                fallback.setting,
                result.name,
            )
    return msgspec.structs.replace(result, fallbacks=tuple(kept))
