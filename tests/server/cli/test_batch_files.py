"""server/cli/batch_files.py: which lines are requests, and which requests of a batch remain."""

import json
import os
from pathlib import Path

import pytest

from config.errors import ConfigError
from server.cli import batch_files
from server.cli.batch_files import BatchLine, BatchOutput, InvalidLine, open_input, read_lines
from server.cli.http_client import HttpResponse

OK = HttpResponse(200, {"x-request-id": "abc"}, b'{"choices": []}')


def request(custom_id: str = "a", **changes: object) -> str:
    line = {
        **{"custom_id": custom_id, "method": "POST", "url": "/v1/completions"},
        **{"body": {"prompt": "hi"}, **changes},
    }
    return json.dumps(line)


def lines_of(path: Path, *lines: str) -> list[BatchLine | InvalidLine]:
    path.write_text("\n".join(lines) + "\n")
    with open_input(path) as file:
        return list(read_lines(file))


def test_a_request_has_the_number_of_its_line(tmp_path: Path) -> None:
    first, second = lines_of(tmp_path / "in", request("a"), "", request("b"))

    assert first == BatchLine(1, "a", "/v1/completions", {"prompt": "hi"}, len(request("a")) + 1)
    assert (second.number, second.custom_id) == (3, "b")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON: a name in double quotes is missing, at column 2"),
        ("Hello", "it is not JSON: a value is missing, or is not written as JSON"),
        ('{"custom_id": "a"', "JSON: a comma or a closing bracket is missing, at column 18"),
        ("[1]", "it is a list, it must be an object"),
        (request().replace('"hi"', "NaN"), "it is not JSON: NaN is not a finite number"),
        ("3", "it is 3, it must be an object"),
        (request(custom_id=""), "custom_id is '', it must be a string"),
        (request(method="GET"), "method is 'GET', it must be POST"),
        (request(url="https://x/v1/chat"), "url is 'https://x/v1/chat', it must be a path"),
        (request(url="/v1/x HTTP/1.1"), "it must have no whitespace"),
        (request(url="/v1/x\r\nHost: y"), "it must be a path"),
        (request(body="hi"), "body is 'hi', it must be an object"),
        (request(body={"stream": True}), "stream is true"),
        ('{"method": "POST"}', "custom_id is missing, it must be a string"),
        ('{"custom_id": "a"}', "url is missing, it must be a path"),
        ('{"custom_id": "a", "url": null}', "url is null, it must be a path"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body is missing, it must be an object"),
    ],
)
def test_an_invalid_line_has_a_reason(line: str, message: str, tmp_path: Path) -> None:
    (found,) = lines_of(tmp_path / "in", line)

    assert isinstance(found, InvalidLine)
    assert message in found.error


@pytest.mark.parametrize(
    "url",
    [
        *("/v1/embeddings", "/v1/score", "/v1/rerank"),
        *("/score", "/rerank", "/v2/rerank", "/v2/embed", "/classify", "/pooling"),
    ],
)
def test_the_pooling_paths_are_accepted(url: str, tmp_path: Path) -> None:
    (found,) = lines_of(tmp_path / "in", request(url=url))

    assert isinstance(found, BatchLine) and found.url == url


@pytest.mark.parametrize("url", ["/metrics", "/sleep", "/score/x", "/v2/x", "/tokenize"])
def test_other_paths_outside_of_v1_are_refused(url: str, tmp_path: Path) -> None:
    (found,) = lines_of(tmp_path / "in", request(url=url))

    assert isinstance(found, InvalidLine)
    assert found.error.endswith("or /score, /rerank, /v2/rerank, /v2/embed, /classify, /pooling")


def test_duplicate_custom_ids_are_refused(tmp_path: Path) -> None:
    first, second = lines_of(tmp_path / "in", request("a"), request("a"))

    assert isinstance(first, BatchLine)
    assert isinstance(second, InvalidLine) and "was used before" in second.error


def test_a_restart_skips_answered_requests_and_removes_a_partial_line(
    tmp_path: Path,
) -> None:
    first, second, third = lines_of(tmp_path / "in", request("a"), "{", request("c"))
    assert isinstance(first, BatchLine) and isinstance(second, InvalidLine)
    with BatchOutput(tmp_path / "out") as output:
        output.write(first, OK)
        output.write_error(second)
    complete = (tmp_path / "out").read_text()
    with (tmp_path / "out").open("a") as file:
        file.write('{"id":"batch_req_3","custom')

    with BatchOutput(tmp_path / "out") as output:
        assert (tmp_path / "out").read_text() == complete
        assert [output.has(line) for line in (first, second, third)] == [True, True, False]
        assert (output.num_answered, output.num_errors) == (2, 1)

    answer = json.loads(complete.splitlines()[0])
    assert answer == {
        **{"id": "batch_req_1", "custom_id": "a", "error": None},
        "response": {"status_code": 200, "request_id": "abc", "body": {"choices": []}},
    }


def test_the_output_of_another_batch_and_other_files_are_refused(tmp_path: Path) -> None:
    (first,) = lines_of(tmp_path / "in", request("a"))
    assert isinstance(first, BatchLine)
    with BatchOutput(tmp_path / "out") as output:
        output.write(first, OK)
        with pytest.raises(ConfigError, match="another batch is writing to this file"):
            BatchOutput(tmp_path / "out")

    with BatchOutput(tmp_path / "out") as output:
        (other,) = lines_of(tmp_path / "in", request("b"))
        with pytest.raises(ConfigError, match="has the answer to 'a' for line 1, which is 'b'"):
            output.has(other)
    (tmp_path / "text").write_text("a letter\n")
    with pytest.raises(
        ConfigError, match="has a line that is not an answer of a batch: b'a letter"
    ):
        BatchOutput(tmp_path / "text")
    assert (tmp_path / "text").read_text() == "a letter\n"
    with pytest.raises(ConfigError, match=r"--input-file .*in0 cannot be read: No such file"):
        open_input(tmp_path / "in0")


@pytest.mark.parametrize(
    "answer_id", ["7", "", "batch_req_", "batch_req_+7", "batch_req_07", "batch_req_7 ", "req_7"]
)
def test_an_answer_without_the_whole_id_of_a_line_is_refused(
    tmp_path: Path, answer_id: str
) -> None:
    record = {"id": answer_id, "custom_id": "a", "response": {"status_code": 200}, "error": None}
    text = json.dumps(record) + "\n"
    (tmp_path / "out").write_text(text)

    with pytest.raises(ConfigError, match="has a line that is not an answer of a batch"):
        BatchOutput(tmp_path / "out")
    assert (tmp_path / "out").read_text() == text


def test_a_full_disk_stops_the_batch_and_the_next_start_continues(tmp_path: Path) -> None:
    (line,) = lines_of(tmp_path / "in", request())
    assert isinstance(line, BatchLine)

    with (
        pytest.raises(ConfigError, match="No space left on device; run the same command"),
        BatchOutput(tmp_path / "out") as output,
    ):
        full = open("/dev/full", "wb")  # noqa: SIM115  # closed by the output
        output._file.close()
        output._file = full
        output.write(line, OK)

    with BatchOutput(tmp_path / "out") as output:
        assert output.num_answered == 0


def test_an_output_other_than_a_regular_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path}: it must be a regular file"):
            BatchOutput(path)


@pytest.mark.parametrize("content", [b'{"precious": 1}', b"notes", b'{"id":"other'])
def test_a_file_of_the_user_without_a_trailing_line_break_is_not_truncated(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="not an answer of a batch"):
        BatchOutput(path)

    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        '{"custom_id": "\\ud800", "url": "/v1/completions", "body": {}}',
        '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "\\ud800"}}',
        '{"custom_id": "a", "url": "\\ud800", "body": {}}',
    ],
)
def test_a_line_with_a_lone_surrogate_is_invalid(line: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line + "\n")

    with open_input(tmp_path / "in") as file:
        (read,) = read_lines(file)

    assert isinstance(read, InvalidLine)
    with BatchOutput(tmp_path / "out") as output:
        output.write_error(read)
    assert "a lone surrogate" in (tmp_path / "out").read_text()


def test_a_line_that_is_too_long_does_not_end_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 200)

    long, good = lines_of(tmp_path / "in", request("a", x="y" * 1000), request("b"))

    assert long == InvalidLine(1, None, "it is longer than 200 bytes")
    assert (good.number, good.custom_id) == (2, "b")


def test_a_last_line_of_the_maximum_length_is_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", len(request("a")))
    (tmp_path / "in").write_text(request("a"))

    with open_input(tmp_path / "in") as file:
        (line,) = read_lines(file)

    assert isinstance(line, BatchLine)


def test_a_long_line_that_starts_with_blanks_counts_as_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 200)

    long, good = lines_of(tmp_path / "in", " " * 500 + request("a"), request("b"))

    assert long == InvalidLine(1, None, "it is longer than 200 bytes")
    assert (good.number, good.custom_id) == (2, "b")


def test_a_line_without_an_end_ends_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(batch_files, "MAX_SKIPPED_BYTES", 1_000)

    with (
        open_input(Path("/dev/zero")) as file,
        pytest.raises(ConfigError, match=r"line 1 of --input-file /dev/zero has at least 1001"),
    ):
        list(read_lines(file))


@pytest.mark.parametrize("depth", [900, 1_000, 100_000])
def test_a_deep_answer_is_written(depth: int, tmp_path: Path) -> None:
    (line,) = lines_of(tmp_path / "in", request("a"))
    assert isinstance(line, BatchLine)

    with BatchOutput(tmp_path / "out") as output:
        output.write(line, HttpResponse(200, {}, b"[" * depth + b"]" * depth))

    with BatchOutput(tmp_path / "out") as output:
        assert output.num_answered == 1
