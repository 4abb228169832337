"""The wait before a batch request is retried, and the number of lines in flight."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from server.cli import run_batch
from server.cli.batch_files import BatchLine, BatchOutput
from server.cli.http_client import HttpClient, HttpResponse
from server.cli.run_batch import MAX_RETRY_S, MIN_RETRY_S, RETRY_S, retry_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0", MIN_RETRY_S),
        ("", RETRY_S),
        ("²", RETRY_S),
        ("٣", RETRY_S),
        ("-1", RETRY_S),
        ("Wed, 21 Oct 2026 07:28:00 GMT", RETRY_S),
        ("9" * 400, MAX_RETRY_S),
    ],
)
def test_retry_after_must_be_a_number_and_the_wait_is_limited(header: str, seconds: float) -> None:
    assert retry_s(header) == seconds


class SlowClient:
    """Answers each request after a delay, and counts the waiting requests."""

    def __init__(self) -> None:
        self.num_open = self.most_open = 0

    async def ask(self, method: str, path: str, body: Mapping[str, Any]) -> HttpResponse:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0.01)
        self.num_open -= 1
        return HttpResponse(200, {}, b"{}")


@pytest.mark.parametrize(("num_bytes", "most"), [(10, 8), (100, 2)])
async def test_the_number_of_long_lines_in_flight_is_limited(
    num_bytes: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_batch, "MAX_SENT_BYTES", 100)
    client = SlowClient()
    lines = (BatchLine(number, str(number), "/v1/x", {}, num_bytes) for number in range(1, 21))

    with BatchOutput(tmp_path / "out") as output:
        await run_batch._answer_all(cast(HttpClient, client), lines, output, 8)

        assert output.num_answered == 20
    assert client.most_open == most
