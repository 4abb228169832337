"""The compiled kernels of the CPU, where they can be compiled."""

from collections.abc import Iterator

import pytest

from hpu.native.library import Library, open_library


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = open_library(tmp_path_factory.mktemp("kernels"), 2)
    if library is None:
        pytest.skip("no compiler, or a CPU without AVX512-BF16")
    return library


@pytest.fixture(params=["tiles", "dots"])
def library(built: Library, request: pytest.FixtureRequest) -> Iterator[Library]:
    if request.param == "tiles" and not built.has_tiles:
        pytest.skip("this CPU has no AMX")
    built.use_tiles(request.param == "tiles")
    yield built
    built.use_tiles(True)
