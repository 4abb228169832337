"""Fixtures of all tests: one compute thread, no network, repeatable examples, a free port."""

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from ports import free_port

from config.loading.env import cache_home, openmp_environment

# Before torch is imported anywhere: tests run side by side with servers on few cores, and a second
# thread changes the order of float additions.
os.environ["OMP_NUM_THREADS"] = "1"
# Some tests run the compiled kernels with two threads; as in a server, these sleep soon.
os.environ.update(openmp_environment())
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Remove the operator's own settings: they must not change a test, nor reach the servers that it
# starts.
for name in [name for name in os.environ if name.startswith(("GAUDISERVE_", "VLLM_"))]:
    del os.environ[name]

SHARED_CACHES = ("demo", "kernels", "test-models")


def use_own_cache() -> None:
    """Set a cache folder for this run: files that a user's server left in its cache (the report of
    a self-test, recipes, converted models) must not change a result. The run shares the user's
    downloads and its compiled kernels, whose names contain a hash of their source."""
    user_cache = Path(cache_home())
    folder = tempfile.mkdtemp(prefix="gaudiserve-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = folder
    own_cache = Path(cache_home())
    own_cache.mkdir()
    for name in SHARED_CACHES:
        (user_cache / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        (own_cache / name).symlink_to(user_cache / name)


# The processes of pytest-xdist share the folder of the first process.
if "PYTEST_XDIST_WORKER" not in os.environ:
    use_own_cache()

# Servers that tests start would otherwise compile the project's modules each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).parent
FIRST = ("hpu", "e2e")
REPEATED_CASES = frozenset((TESTS / "repeated_cases.txt").read_text().splitlines())

settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=600.0, help="how long tests/fuzz takes")
    parser.addoption("--fuzz-seed", type=int, default=1, help="the first seed of tests/fuzz")
    parser.addoption("--crd-schemas", help="folder of schemas of custom resources for tests/deploy")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the folders with the longest files first, so that the test processes end at about the
    same time."""

    def place(item: pytest.Item) -> int:
        parts = item.path.relative_to(TESTS).parts
        return FIRST.index(parts[0]) if parts[0] in FIRST else len(FIRST)

    items.sort(key=place)
    missing = {line for line in REPEATED_CASES if not line.startswith("#")}
    for item in items:
        case = item.nodeid.removeprefix("tests/")
        if case in missing:
            missing.remove(case)
            item.add_marker(pytest.mark.slow)
    if missing and config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        raise pytest.UsageError(f"tests/repeated_cases.txt has cases that do not exist: {missing}")


@pytest.fixture(scope="module", autouse=True)
def imported_objects_frozen() -> None:
    """Freeze the imported objects: every capture on the emulated card collects garbage, and
    scanning all imported objects takes longer than the capture."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_level_restored() -> Iterator[None]:
    """Restore the log level: a test that sets up the log must not change which lines later tests
    capture."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Fail a test that leaves torch with more threads: they would spin in each operator of all
    later tests, which takes up to 40 times the CPU time, and float sums would change."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and (count := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        pytest.fail(f"the test leaves torch {count} threads: give the back end num_threads=1")


@pytest.fixture(name="free_port")
def any_free_port() -> int:
    """A TCP port on the loopback address that nothing listens on."""
    return free_port()
