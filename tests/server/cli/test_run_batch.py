"""The wait before a request of a batch is sent again."""

import pytest

from server.cli.run_batch import MAX_RETRY_S, RETRY_S, retry_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("", RETRY_S),
        ("²", RETRY_S),
        ("٣", RETRY_S),
        ("-1", RETRY_S),
        ("Wed, 21 Oct 2026 07:28:00 GMT", RETRY_S),
        ("9" * 400, MAX_RETRY_S),
    ],
)
def test_only_a_number_of_seconds_is_waited_for_and_never_long(header: str, seconds: float) -> None:
    assert retry_s(header) == seconds
