"""`gaudiserve bench serve` against an event server with known times and counts."""

import asyncio
import itertools
import json
import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import pytest
from delays import least_awaited
from event_server import NO_MODEL, EventServer
from waits import WAIT_S

from config.errors import CommandFailed, ConfigError
from server.cli.bench.command import main
from server.cli.bench.openai import OpenAIServer, Outcome
from server.cli.bench.report import as_text, distribution, summarise
from server.cli.bench.workload import (
    MAX_TRIES,
    WORDS,
    BenchRequest,
    Shape,
    arrival_gaps,
    lengths,
    text_requests,
    token_requests,
)
from server.cli.http_client import HttpClient, HttpFailure


def run(url: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run the command in its own thread (it owns an event loop); returns its status and JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        status = main(["--base-url", url, "--quiet", "--json", str(file), *flags])
        return status, json.loads(file.read_text())


async def bench(server: EventServer, *flags: str) -> tuple[int, dict[str, Any]]:
    return await asyncio.get_running_loop().run_in_executor(None, run, server.url, *flags)


async def test_a_closed_loop_keeps_its_concurrency_and_counts_every_token() -> None:
    async with EventServer(first_s=0.01, gap_s=0.002).listening() as server:
        status, found = await bench(
            server,
            "--num-prompts=12",
            "--max-concurrency=4",
            "--random-input-len=10",
            "--random-output-len=5",
            "--num-warmups=3",
        )

    assert status == 0
    assert server.most_running == 4
    assert len(server.bodies) == 15
    assert found["completed"] == 12
    assert (found["prompt_tokens"], found["output_tokens"]) == (120, 60)
    assert all(len(body["prompt"]) == 10 for body in server.bodies)
    assert all(body["ignore_eos"] and body["model"] == "double" for body in server.bodies)


async def test_measured_times_are_within_a_factor_of_10_of_the_servers_times() -> None:
    assert await least_awaited(excess_of_measured_times, 10) < 10


async def excess_of_measured_times() -> float:
    """The largest ratio of a measured time to the server's."""
    async with EventServer(first_s=0.05, gap_s=0.01).listening() as server:
        _, found = await bench(
            server, "--num-prompts=4", "--max-concurrency=1", "--random-output-len=6"
        )

    # Sleeps are never shorter than requested; a busy machine may make them much longer.
    ttft_ms, itl_ms, tpot_ms = (found[name]["p50"] for name in ("ttft_ms", "itl_ms", "tpot_ms"))
    assert ttft_ms >= 50 and itl_ms >= 9 and tpot_ms >= 9
    assert found["e2e_ms"]["p50"] >= ttft_ms + 5 * 9
    return max(ttft_ms / 50, itl_ms / 10, tpot_ms / 10)


async def test_connections_are_reused() -> None:
    async with EventServer().listening() as server:
        await bench(server, "--num-prompts=20", "--max-concurrency=2", "--random-output-len=2")

    assert server.num_connections <= 3


async def test_an_open_loop_sends_without_waiting_for_answers() -> None:
    async with EventServer(first_s=0.2).listening() as server:
        _, found = await bench(
            server,
            "--num-prompts=10",
            "--request-rate=200",
            "--random-output-len=1",
            "--num-warmups=0",
        )

    assert server.most_running > 5
    assert found["duration_s"] < 10 * 0.2


async def test_chat_texts_have_the_requested_length_including_the_template() -> None:
    async with EventServer(tokens_a_word=2).listening() as server:
        await bench(
            server,
            "--endpoint=chat",
            "--num-prompts=3",
            "--random-input-len=41",
            "--random-output-len=2",
        )

    words = [len(body["messages"][0]["content"].split()) for body in server.bodies]
    assert words == [(41 - 5) // 2] * 5


async def test_a_server_without_tokenize_gets_plain_words() -> None:
    async with EventServer(has_tokenize=False).listening() as server:
        _, found = await bench(
            server, "--num-prompts=2", "--random-input-len=9", "--random-output-len=2"
        )

    assert found["settings"]["prompt_kind"] == "words"
    assert all(len(body["prompt"].split()) == 9 for body in server.bodies)


async def test_failures_are_counted_by_kind_and_set_the_exit_status() -> None:
    async with EventServer(fail_every=3).listening() as server:
        status, found = await bench(
            server, "--num-prompts=6", "--num-warmups=0", "--random-output-len=2"
        )

    assert status == 1
    assert found["completed"] == 4
    ((reason, count),) = found["failures"].items()
    assert (count, "503" in reason, "line is full" in reason) == (2, True, True)


@pytest.mark.parametrize("has_tokenize", [True, False])
async def test_a_model_that_the_server_lacks_ends_the_run_with_the_whole_error(
    has_tokenize: bool,
) -> None:
    async with EventServer(has_tokenize=has_tokenize, has_model=False).listening() as server:
        with pytest.raises(CommandFailed) as failed:
            await bench(server, "--model=nope", "--num-warmups=0", "--num-prompts=3")

    assert str(failed.value).endswith(f"with 404: {NO_MODEL}")
    assert "and no other" in NO_MODEL and len(NO_MODEL) > 120


async def test_a_stream_that_breaks_is_a_failure() -> None:
    async with EventServer(break_after=2).listening() as server:
        client = HttpClient(server.url)

        outcome = await OpenAIServer(client, "completions", "m").send(
            BenchRequest([1], 5), timeout_s=WAIT_S
        )

        await client.close()
    assert outcome.failure is not None
    assert "middle of an answer" in outcome.failure
    assert len(outcome.arrivals) == 2


async def test_a_request_that_hangs_fails_at_its_timeout() -> None:
    async with EventServer(first_s=30).listening() as server:
        client = HttpClient(server.url)

        outcome = await OpenAIServer(client, "chat", "m").send(BenchRequest("a", 1), timeout_s=0.1)

        await client.close()
    assert outcome.failure == "the response did not end within 0.1 s"


async def test_the_key_is_sent_as_a_bearer_token() -> None:
    async with EventServer().listening() as server:
        client = HttpClient(f"{server.url}/v1", api_key="secret")

        await client.call("GET", "/v1/models")
        with pytest.raises(HttpFailure, match=r"with 404: no such route"):
            await client.call("GET", "/v1/nothing")

        await client.close()
    assert server.authorizations[0] == "Bearer secret"


def test_lengths_are_in_range_and_reproducible_by_seed() -> None:
    shape = Shape(200, 100, 10, range_ratio=0.5, seed=1)

    found = list(lengths(shape))

    assert found == list(lengths(shape))
    assert all(50 <= first <= 150 and 5 <= other <= 15 for first, other in found)
    assert len({entry for entry, _ in found}) > 20


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    requests = token_requests(Shape(5, 20, 1, shared_prefix_len=30), list(range(1000)))

    prompts = [request.prompt for request in requests]

    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 5
    assert {len(prompt) for prompt in prompts} == {50}


async def test_text_of_uneven_words_is_off_by_at_most_a_token_and_keeps_its_prefix() -> None:
    async def count(text: str) -> int:
        return sum(1 + len(word) // 5 for word in text.split())

    requests = await text_requests(Shape(10, 40, 1, shared_prefix_len=10), count)

    counts = [await count(str(request.prompt)) for request in requests]
    assert all(abs(found - 50) <= 1 for found in counts)
    assert len({" ".join(str(request.prompt).split()[:6]) for request in requests}) == 1


async def test_the_text_nearest_to_the_requested_length_is_kept() -> None:
    # The first count is of all words; the first text differs by 1 token, later texts by 20.
    counts = iter([len(WORDS), 39, *[60] * (MAX_TRIES - 1)])

    async def count(text: str) -> int:
        return next(counts)

    (request,) = await text_requests(Shape(1, 40, 1), count)

    assert len(str(request.prompt).split()) == 40


def test_arrivals_have_the_requested_rate() -> None:
    waits = list(arrival_gaps(50.0, 4000, seed=3))

    assert statistics.mean(waits) == pytest.approx(1 / 50, rel=0.1)
    assert set(itertools.islice(arrival_gaps(float("inf"), 5, 0), 5)) == {0.0}


def test_percentiles_are_interpolated_between_the_two_nearest_values() -> None:
    found = distribution([0.004, 0.001, 0.003, 0.002])

    assert found == pytest.approx({"mean": 2.5, "p50": 2.5, "p90": 3.7, "p99": 3.97})


def test_a_report_has_means_rates_and_failures() -> None:
    outcomes = [
        Outcome(0.0, 2.0, [1.0, 1.5, 2.0], prompt_tokens=10, output_tokens=3),
        Outcome(0.0, 4.0, [2.0, 3.0, 4.0], prompt_tokens=10, output_tokens=3),
        Outcome(1.0, 4.0, failure="503"),
    ]

    report = summarise(outcomes)

    assert report.output_tokens_per_s == pytest.approx(6 / 4)
    assert report.ttft_ms is not None
    assert report.ttft_ms["mean"] == pytest.approx(1500)
    assert report.tpot_ms is not None
    assert report.tpot_ms["mean"] == pytest.approx(750)
    assert report.failures == {"503": 1}
    assert "failed 1 x 503" in as_text(report)


def test_a_run_without_answers_has_a_report() -> None:
    report = summarise([Outcome(0.0, 1.0, failure="gone")])

    assert report.ttft_ms is None
    assert report.output_tokens_per_s == 0


async def test_flags_of_vllm_bench_serve_are_accepted() -> None:
    async with EventServer().listening() as server:
        host, port = server.url.removeprefix("http://").split(":")
        line = (
            f"--backend vllm --host {host} --port {port} --model double --tokenizer some/model "
            "--endpoint /v1/completions --dataset-name random --random-input-len 12 "
            "--random-output-len 3 --random-prefix-len 4 --num-prompts 4 --request-rate inf "
            "--max-concurrency 2 --burstiness 1.0 --num-warmups 0 --seed 1 --ignore-eos "
            "--trust-remote-code --top-p 0.9 --top-k 5 --percentile-metrics ttft,tpot,itl,e2el "
            "--metric-percentiles 50,99.9 --disable-tqdm --header x-tenant=a"
        )
        _, found = await bench(server, *line.split())

    assert server.most_running <= 2
    assert len(server.bodies) == 4
    assert all(len(body["prompt"]) == 16 for body in server.bodies)
    assert all((body["top_p"], body["top_k"]) == (0.9, 5) for body in server.bodies)
    assert list(found["ttft_ms"]) == ["mean", "p50", "p99.9"]
    assert "header" not in found["settings"]


async def test_the_address_is_built_from_host_and_port() -> None:
    async with EventServer().listening() as server:
        port = server.url.rpartition(":")[2]
        argv = ["--host", "127.0.0.1", "--port", port, "--num-prompts=1", "--quiet"]

        status = await asyncio.get_running_loop().run_in_executor(None, main, argv)

    assert status == 0
    assert len(server.bodies) == 3


async def test_the_back_end_openai_chat_sends_messages() -> None:
    async with EventServer().listening() as server:
        await bench(
            server, "--backend=openai-chat", "--num-prompts=2", "--output-len=2", "--logprobs=3"
        )

    assert all("messages" in body and body["max_tokens"] == 2 for body in server.bodies)
    assert all((body["logprobs"], body["top_logprobs"]) == (True, 3) for body in server.bodies)


def conversation(*turns: str) -> dict[str, Any]:
    speakers = itertools.cycle(("human", "gpt"))
    return {
        "id": "x",
        "conversations": [
            {"from": who, "value": t} for who, t in zip(speakers, turns, strict=False)
        ],
    }


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    """Two usable conversations, and three unusable: too short, too long, and with a single turn."""
    file = tmp_path / "sharegpt.json"
    usable = [conversation("a " * 9, "b " * 6), conversation("c " * 20, "d " * 11, "e")]
    others = [conversation("a b", "c"), conversation("a " * 2000, "b " * 9), conversation("a " * 9)]
    file.write_text(json.dumps([*others, *usable]))
    return file


async def test_sharegpt_sends_first_turns_with_the_lengths_of_the_answers(sharegpt: Path) -> None:
    async with EventServer().listening() as server:
        _, found = await bench(
            server,
            *("--dataset-name", "sharegpt", "--dataset-path", str(sharegpt)),
            *("--num-prompts", "3", "--num-warmups", "0"),
        )

    sent = sorted((len(body["prompt"].split()), body["max_tokens"]) for body in server.bodies)
    assert set(sent) == {(9, 6), (20, 11)}
    assert len(sent) == 3
    assert all("ignore_eos" not in body for body in server.bodies)
    assert found["settings"]["prompt_kind"] == "text"


async def test_sharegpt_supports_an_output_length_and_servers_without_tokenize(
    sharegpt: Path,
) -> None:
    async with EventServer(has_tokenize=False).listening() as server:
        _, found = await bench(
            server,
            *("--dataset-name", "sharegpt", "--dataset-path", str(sharegpt), "--ignore-eos"),
            *("--num-prompts", "2", "--num-warmups", "0", "--sharegpt-output-len", "4"),
        )

    assert [body["max_tokens"] for body in server.bodies] == [4, 4]
    assert all(body["ignore_eos"] for body in server.bodies)
    assert found["settings"]["prompt_kind"] == "words"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "cannot be read"),
        ('[{"x":' + "[" * 100_000, "cannot be read"),
        ('[{"conversations": [{"value": "a"}]}]', "has 0 conversations of two turns"),
        ('[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "0 of 1 conversations have"),
    ],
)
async def test_a_sharegpt_file_without_prompts_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(content)

    async with EventServer().listening() as server:
        with pytest.raises(ConfigError, match=message):
            await bench(server, "--dataset-name=sharegpt", f"--dataset-path={file}")


def test_bursty_arrivals_have_the_same_rate_and_a_larger_spread() -> None:
    bursty = list(arrival_gaps(50.0, 4000, seed=3, burstiness=0.25))
    even = list(arrival_gaps(50.0, 4000, seed=3, burstiness=16.0))

    assert statistics.mean(bursty) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.mean(even) == pytest.approx(1 / 50, rel=0.1)
    # The standard deviation of a gamma distribution is its mean divided by the square root of its
    # shape.
    assert statistics.stdev(bursty) == pytest.approx(2 / 50, rel=0.15)
    assert statistics.stdev(even) == pytest.approx(0.25 / 50, rel=0.15)


def test_the_table_has_the_requested_rows_and_columns() -> None:
    outcomes = [Outcome(0.0, 2.0, [1.0, 1.5, 2.0], prompt_tokens=10, output_tokens=3)]

    text = as_text(summarise(outcomes, [25, 75]), ["ttft", "e2el"])

    assert "mean       p25       p75" in text
    assert "Time to first token" in text and "End to end" in text
    assert "Inter-token latency" not in text and "Time per output token" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-url", "ftp://x"], "^--base-url is 'ftp://x', it must look like http://host:port"),
        (["--request-rate", "0"], "request-rate is 0, it must be above 0"),
        (["--random-range-ratio", "2"], "between 0 and 1"),
        (["--num-prompts", "many"], "^--num-prompts is many, it must be at least 1$"),
        (["--input-len", "0"], "^--random-input-len is 0, it must be at least 1$"),
        (["--timeout", "inf"], "timeout is inf, it must be above 0"),
        (["--seed", "1.5"], "seed is 1.5, it must be a whole number"),
        (
            ["--endpoint", "chat", "--prompt-kind", "tokens"],
            "^--prompt-kind is tokens.*accepts text only",
        ),
        (["--num-prompt", "3"], "did you mean --num-prompts"),
        (["--extra-body", "[]"], "^--extra-body is .* must be a JSON object"),
        (["--extra-body", '{"top_p": NaN}'], "not JSON: NaN is not a finite number"),
        (["--extra-body", "{x"], "not JSON: a name in double quotes is missing, at column 2"),
        (["--json", "/no/such/folder/x.json"], "^--json is .*whose folder does not exist"),
        (["--base-url", "http://localhost:port"], "must look like http://host:port"),
        (["--temperature", "-1"], "must be at least 0"),
        (["--backend", "tgi"], "^--backend is 'tgi', it must be one of "),
        (
            ["--backend", "openai-chat", "--endpoint", "/v1/completions"],
            "^--backend is .*contradict each other",
        ),
        (["--dataset-name", "sharegpt"], "^--dataset-name sharegpt needs --dataset-path FILE"),
        (["--dataset-path", "x.json"], "x.json', which needs --dataset-name sharegpt"),
        (
            ["--dataset-name", "sharegpt", "--dataset-path", "/no/x"],
            "^--dataset-path is '/no/x'.*cannot be read",
        ),
        (
            ["--percentile-metrics", "ttft,foo"],
            "^--percentile-metrics is .* some of ttft,itl,tpot,e2el",
        ),
        (
            ["--metric-percentiles", "101"],
            "^--metric-percentiles is .*must be numbers from 0 to 100",
        ),
        (["--header", "x"], "^--header is 'x', it must be KEY=VALUE"),
        (["--burstiness", "0"], "burstiness is 0, it must be above 0"),
        (
            ["--save-result", "--goodput", "ttft:100", "--no-oversample", "--frob"],
            r"4 settings are invalid:\n"
            r"  --save-result is not supported: --json FILE writes.*\n"
            r"  --goodput is not supported: .*\n"
            r"  --no-oversample is not supported: the data sets are random and sharegpt\n"
            r"  --frob is not a flag of gaudiserve bench serve$",
        ),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(flags)


def test_the_error_names_a_port_without_a_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        with pytest.raises(CommandFailed, match=f"^no server answers at {url}: start the server"):
            main(["--base-url", url])


async def test_a_stream_without_done_is_counted_if_it_has_a_finish_reason() -> None:
    async with EventServer(says_done=False).listening() as server:
        status, found = await bench(
            server, "--num-prompts=2", "--random-output-len=3", "--no-stream-usage"
        )

    assert (status, found["completed"], found["failures"]) == (0, 2, {})
    assert "stream_options" not in server.bodies[0]
