"""Parameters of pooling requests."""

import pytest

from config.errors import UserError
from config.params.pooling import PoolingParams


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"task": "rank"}, "task", "'rank'"),
        (
            {"task": "embed", "dimensions": 0},
            "dimensions",
            "0, it must be an integer of at least 1",
        ),
        ({"task": "embed", "dimensions": True}, "dimensions", "true"),
        ({"task": "classify", "dimensions": 4}, "dimensions", "classify returns no vector"),
        (
            {"task": "score", "num_first": -1},
            "num_first",
            "-1, it must be an integer of at least 0",
        ),
    ],
)
def test_unsupported_pooling_parameters_are_refused_by_name(asked, param, words):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=words) as refusal:
        PoolingParams(**asked)

    assert refusal.value.param == param
