"""Traffic files: three formats, and the error of a wrong line."""

from pathlib import Path

import pytest

from config.errors import ConfigError
from config.traffic import Lengths, parse_traffic, read_traffic

PAGE = """\
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",le="10.0",model_name="m"} 2.0
vllm:request_prompt_tokens_bucket{engine="0",le="20.0",model_name="m"} 2.0
vllm:request_prompt_tokens_bucket{engine="0",le="50.0",model_name="m"} 8.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="m"} 8.0
vllm:request_generation_tokens_bucket{engine="0",le="100.0",model_name="m"} 4.0
vllm:request_generation_tokens_bucket{engine="0",le="+Inf",model_name="m"} 8.0
"""


def test_json_lines_are_read_as_one_request_per_line(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text(
        '{"prompt_tokens": 5, "output_tokens": 7}\n\n'
        '{"prompt_tokens": 9, "output_tokens": 0, "cached_tokens": 8, "id": "x"}\n'
    )

    found = read_traffic(str(file))

    assert found == [Lengths(5, 7), Lengths(9, 0, 8)]


def test_request_log_lines_are_found_among_other_lines() -> None:
    log = (
        "INFO 10:00 server: Ready\n"
        "INFO 10:01 server: POST /v1/completions id=a model=m status=200 prompt_tokens=12 "
        "output_tokens=3 ttft_ms=1.0 ms=9.0 end=stop client=c\n"
        "INFO 10:02 server: POST /v1/completions id=b model=m status=400 prompt_tokens=0 "
        "output_tokens=0 ttft_ms=- ms=1.0 end=- client=c\n"
    )

    found = parse_traffic(log)

    assert found == [Lengths(12, 3)]


def test_a_metrics_page_gives_all_pairs_of_prompt_and_output_lengths() -> None:
    found = parse_traffic(PAGE)

    assert [(entry.prompt_tokens, entry.output_tokens, entry.weight) for entry in found] == [
        (5, 50, 1.0),
        (5, 100, 1.0),
        (35, 50, 3.0),
        (35, 100, 3.0),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 requests"),
        (
            '{"prompt_tokens": 5, "output_tokens": 7}\n{"prompt_tokens": 5}',
            'line 2: .*it has no output_tokens; a line is {"prompt',
        ),
        ('{"prompt_tokens": 0, "output_tokens": 7}', "line 1.*prompt_tokens is 0"),
        ('{"prompt_tokens": 4, "output_tokens": 7, "cached_tokens": 4}', "below.* which is 4"),
        ('{"prompt_tokens": true, "output_tokens": 7}', "true, it must be a whole number"),
        ("[1, 2]", "not a JSON object"),
        ("nonsense", "line 1"),
        (f"prompt_tokens={'9' * 4301} output_tokens=1", "line 1: .*has a number of 4301 digits"),
        (f"\nprompt_tokens=1 output_tokens={'9' * 4301}", "line 2: .*has a number of 4301 digits"),
        (PAGE.replace("50.0", "fifty"), "le is 'fifty'.*must be a number"),
        (PAGE.replace(" 8.0", " eight"), "value is 'eight'.*must be a number"),
        (PAGE.replace(" 8.0", " NaN"), "value is 'NaN'.*must be a number"),
        (PAGE.replace(" 8.0", " 0.0").replace(" 4.0", " 0.0"), "counts 0 requests in .*generation"),
    ],
)
def test_an_unusable_traffic_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse_traffic(text)

    assert len(str(error.value)) < 600


def test_the_error_names_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"/no/such.*cannot be read"):
        read_traffic("/no/such")
