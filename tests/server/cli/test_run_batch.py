"""The wait before a batch request is retried, the number of lines in flight, and what
the command prints."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from config.errors import ConfigError
from server.cli import run_batch
from server.cli.batch_files import BatchLine, BatchOutput, open_input, read_lines
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


@pytest.fixture
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No log handler, which would outlive the test."""
    monkeypatch.setattr("config.log.setup", lambda *arguments, **options: None)


@pytest.mark.usefixtures("unlogged")
def test_a_missing_input_creates_no_output(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--input-file .*nofile cannot be read: No such file"):
        run_batch.main(["-i", str(tmp_path / "nofile"), "-o", str(tmp_path / "out")])

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("count", "answered", "printed"),
    [
        (1, "1 line of {} is already answered\n", "1 line answered, 0 of them with an error\n"),
        (2, "2 lines of {} are already answered\n", "2 lines answered, 0 of them with an error\n"),
    ],
)
@pytest.mark.usefixtures("unlogged")
def test_the_number_of_answered_lines_is_printed(
    count: int,
    answered: str,
    printed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/x", "body": {}}
        for number in range(count)
    ]
    given, out = tmp_path / "in", tmp_path / "out"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with BatchOutput(out) as output, open_input(given) as file:
        for line in read_lines(file):
            assert isinstance(line, BatchLine)
            output.write(line, HttpResponse(200, {}, b"{}"))

    assert run_batch.main(["-i", str(given), "-o", str(out)]) == 0

    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr) == (printed, answered.format(out))
