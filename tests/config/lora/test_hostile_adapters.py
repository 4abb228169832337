"""Each hostile adapter is refused in one short sentence, in little time, or is harmless."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import write_adapter
from delays import machine_s
from hostile_adapters import hostile_adapters, write_files
from tiny_models import make_tiny

from config.errors import ConfigError
from config.lora.adapter import load_adapter
from config.lora.adapter_folder import AdapterFolder
from config.lora.base_modules import BaseModules
from config.model.read_config import read_model_config

HARMLESS = re.compile(
    # Patterns that match no module, or are cheap to match.
    r"(exponential|a slow) expression in (rank|alpha)_pattern|4000 keys in .*"
    # Fields about the training.
    r"|.* in (exclude_modules|layers_pattern)|metadata .*|random bytes in the header|large weights"
)
"""Names of hostile adapters that may be accepted."""
MAX_CPU_S = 6.0
"""CPU seconds for an adapter. Expressions are stopped after 1 s; the rest is for slow, shared test
machines."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile").resolve()


@pytest.fixture(scope="module")
def base(root: Path) -> BaseModules:
    return BaseModules(read_model_config(str(make_tiny("llama", root / "base"))))


@pytest.fixture(scope="module")
def valid(root: Path, base: BaseModules) -> Path:
    return write_adapter(root / "valid", root / "base")


def refusals(root: Path, valid: Path, base: BaseModules, seed: int) -> Iterator[tuple[str, str]]:
    """Yields the name of each hostile adapter and its error message (empty if it is accepted)."""
    # Links to the valid adapter lead out of this folder.
    lora_dir = root / f"lora-dir-{seed}"
    for number, (name, files) in enumerate(hostile_adapters(valid, seed)):
        folder = write_files(lora_dir / str(number), files)
        begin = time.thread_time()
        try:
            load_adapter(AdapterFolder(str(folder), str(lora_dir), "theirs"), base, 16, ())
        except ConfigError as error:
            yield name, str(error)
        else:
            yield name, ""
        taken_s = time.thread_time() - begin
        assert taken_s < MAX_CPU_S or taken_s < machine_s(MAX_CPU_S), f"{name}: {taken_s:.1f} s"


def test_a_hostile_adapter_is_refused_in_a_sentence(
    root: Path, valid: Path, base: BaseModules
) -> None:
    errors = dict(refusals(root, valid, base, seed=0))

    assert len(errors) > 150
    assert [
        name for name, error in errors.items() if not error and not HARMLESS.fullmatch(name)
    ] == []
    for name, error in errors.items():
        if error:
            assert len(error) < 1000, name
            assert "theirs" in error, (name, error)
            assert str(root) not in error, (name, error)
            assert "/etc" not in error, (name, error)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_only_harmless_adapters_are_accepted_with_any_seed(
    seed: int, root: Path, valid: Path, base: BaseModules
) -> None:
    accepted = [name for name, error in refusals(root, valid, base, seed) if not error]

    assert [name for name in accepted if not HARMLESS.fullmatch(name)] == []


def test_the_valid_adapter_is_accepted(valid: Path, base: BaseModules) -> None:
    assert load_adapter(AdapterFolder(str(valid), str(valid.parent)), base, 16, ()).content
