"""Four ranks, started once for all tests of this folder."""

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="package")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
