"""`gaudiserve bench throughput` and `bench latency`: printed and written results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny

from server.cli.main import main

SMALL = ["--max-model-len=128", "--max-num-seqs=4", "--num-threads=1", "--dtype=float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny")))


def test_throughput_counts_the_tokens_of_all_requests(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    flags = ["--num-prompts=6", "--input-len=9", "--output-len=5", "--n=2"]

    status = main(["bench", "throughput", folder, *flags, *SMALL, f"--output-json={file}"])

    lines = capsys.readouterr().out.splitlines()
    result: dict[str, Any] = json.loads(file.read_text())
    assert status == 0
    assert set(result) == {
        *("elapsed_time", "num_requests", "total_num_tokens"),
        *("requests_per_second", "tokens_per_second"),
    }
    assert (result["num_requests"], result["total_num_tokens"]) == (6, 6 * 9 + 6 * 2 * 5)
    assert result["tokens_per_second"] == pytest.approx(114 / result["elapsed_time"])
    assert lines[0].startswith(f"Throughput: {result['requests_per_second']:.2f} requests/s, ")
    assert lines[1:] == ["Total num prompt tokens:  54", "Total num output tokens:  60"]


def test_throughput_accepts_conversations(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "conversations.json"
    turns = [{"value": "tell me of the sea and the sky"}, {"value": "both are wide and blue, yes"}]
    file.write_text(json.dumps([{"conversations": turns}] * 2))
    flags = ["--dataset-name=sharegpt", f"--dataset-path={file}", "--num-prompts=3"]

    status = main(["bench", "throughput", folder, *flags, "--output-len=4", *SMALL])

    assert status == 0
    assert "Total num output tokens:  12" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["input", "output"])
def test_latency_suggests_its_own_name_for_a_flag_of_the_other_commands(
    end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", f"--random-{end}-len=8"]) == 2

    assert capsys.readouterr().err.endswith(f"; did you mean --{end}-len?\n")


def test_latency_measures_batches(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    flags = ["--batch-size=2", "--input-len=7", "--output-len=3", "--num-iters-warmup=1"]

    status = main(
        ["bench", "latency", folder, *flags, "--num-iters=4", *SMALL, f"--output-json={file}"]
    )

    lines = capsys.readouterr().out.splitlines()
    result: dict[str, Any] = json.loads(file.read_text())
    assert status == 0
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert lines[0] == f"Avg latency: {result['avg_latency']:.4f} seconds"
    assert lines[-1] == f"99% percentile latency: {result['percentiles']['99']:.4f} seconds"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["latency", "--input-len=100", "--output-len=29"], "are 129 tokens .* is 128"),
        (["throughput", "--dataset-name=sharegpt"], "sharegpt needs --dataset-path FILE"),
        (["throughput", "--dataset-path=x"], "which needs --dataset-name sharegpt"),
        (
            ["throughput", "--output-json=/no/such/file", "--input-len=9", "--output-len=9"],
            "whose folder does not exist",
        ),
        (["latency", "--batch-size=0"], "batch-size is 0, it must be at least 1"),
    ],
)
def test_wrong_flags_are_refused_before_the_model_is_loaded(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["bench", *argv, "/no/such/model", *SMALL])

    assert status == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["throughput", "--n=200"], "n is 200, it must be between 1 and 128"),
        (["latency", "--n=200", "--num-iters=1"], "n is 200, it must be between 1 and 128"),
    ],
)
def test_a_request_that_the_model_refuses_ends_the_command_with_its_reason(
    flags: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *more = [*flags, "--input-len=8", "--output-len=8"]

    status = main(["bench", command, folder, *more, *SMALL])

    assert status == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"gaudiserve: {message}"
