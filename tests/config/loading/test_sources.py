"""config/loading/sources.py: sources, their order, and errors that name the nearest right word."""

import dataclasses
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.loading.flags import FLAGS, PARTS
from config.loading.sources import Loaded, from_keywords, load


def given(*argv: str, **environ: str) -> Loaded:
    return load(argv, environ=environ, default_model="demo")


def test_every_field_of_every_part_has_exactly_one_flag() -> None:
    expected = sorted(
        (part, field.name)
        for part, (owner, _) in PARTS.items()
        for field in dataclasses.fields(owner)
        if field.name not in PARTS
    )

    found = sorted({(flag.part, flag.field.partition(".")[0]) for flag in FLAGS})

    assert found == expected
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))


def test_without_any_source_every_value_is_the_default() -> None:
    loaded = given()

    assert loaded.engine.model == "demo"
    assert loaded.engine.scheduler.max_num_seqs == 32
    assert {source for _, source in loaded.sources.values()} == {"default"}


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 3\nport: 3\nseed: 3\n")

    loaded = given(
        "--config",
        str(file),
        "--max-num-seqs=1",
        GAUDISERVE_MAX_NUM_SEQS="2",
        GAUDISERVE_PORT="2",
    )

    assert loaded.sources["max-num-seqs"] == (1, "flag --max-num-seqs")
    assert loaded.sources["port"] == (2, "variable GAUDISERVE_PORT")
    assert loaded.sources["seed"] == (3, f"file {file}")
    assert loaded.engine.scheduler.max_num_seqs == 1
    assert loaded.server.port == 2
    assert loaded.engine.seed == 3


@pytest.mark.parametrize(
    ("words", "asked", "count", "is_lowered"),
    [
        (["--max-num-seqs=4096", "--max-num-batched-tokens=2048"], 4096, 2048, True),
        (["--max-num-batched-tokens=8"], 32, 8, True),
        (["--max-num-seqs=16", "--max-num-batched-tokens=16"], 16, 16, False),
        (["--max-num-seqs=4096"], 4096, 4096, False),
    ],
)
def test_no_more_sequences_run_than_a_step_has_tokens(
    words: list[str], asked: int, count: int, is_lowered: bool
) -> None:
    loaded = given(*words)

    assert loaded.engine.scheduler.max_num_seqs == count
    assert loaded.engine.scheduler.token_budget() >= count
    notes = [note for note in loaded.notes if "run at once and others wait" in note]
    assert len(notes) == is_lowered
    assert not notes or f"not the {asked} of --max-num-seqs" in notes[0]


@pytest.mark.parametrize(
    ("word", "value"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2M", 2**21), ("4GiB", 2**32)],
)
def test_sizes_are_read_as_vllm_reads_them(word: str, value: int) -> None:
    loaded = given("--kv-cache-memory-bytes", word)

    assert loaded.engine.cache.kv_cache_memory_bytes == value


def test_underscores_and_other_names_are_the_same_flag() -> None:
    loaded = given("--max_model_len=64", "--memory-utilization", "0.5", "--num-blocks", "7")

    assert loaded.engine.max_model_len == 64
    assert loaded.engine.cache.gpu_memory_utilization == 0.5
    assert loaded.engine.cache.num_blocks == 7


def test_switches_go_both_ways() -> None:
    loaded = given(
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--no-async-scheduling",
        "--disable-fastapi-docs",
        "--disable-log-requests",
    )

    assert not loaded.engine.cache.enable_prefix_caching
    assert loaded.engine.enforce_eager
    assert loaded.engine.scheduler.max_inflight_steps == 1
    assert not loaded.server.enable_docs
    assert not loaded.server.enable_log_requests


def test_a_word_for_open_takes_back_what_a_file_gave(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max_model_len: 64\n")

    loaded = given("--config", str(file), "--max-model-len", "auto")

    assert loaded.engine.max_model_len is None


def test_lists_grow_on_the_command_line_and_come_as_json_or_yaml(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("served-model-name: [a, b]\n")

    loaded = given(
        "--config",
        str(file),
        "--api-key=one",
        "--api-key=t,wo",
        '--allowed-origins=["http://x", "http://y"]',
    )

    assert loaded.server.served_model_names == ("a", "b")
    assert loaded.server.api_keys == ("one", "t,wo")
    assert loaded.server.allowed_origins == ("http://x", "http://y")


def test_keys_are_never_shown() -> None:
    loaded = given("--api-key", "first", "--api-key", "second")

    assert loaded.server.api_keys == ("first", "second")
    assert loaded.shown()["api-key"][0] == ("***", "***")


def test_one_bucket_limit_lands_in_its_range() -> None:
    loaded = given("--prompt-seq-bucket-max", "64", VLLM_DECODE_BS_BUCKET_STEP="4")

    assert loaded.engine.buckets.prompt_query.max == 64
    assert loaded.engine.buckets.decode_batch.step == 4


@pytest.mark.parametrize("end", ["MIN", "STEP", "MAX", "PAD_MAX", "PAD_PERCENT"])
@pytest.mark.parametrize(
    ("word", "dimension"),
    [
        ("PROMPT_BS", "prompt_batch"),
        ("PROMPT_QUERY", "prompt_query"),
        ("PROMPT_SEQ", "prompt_query"),
        ("PROMPT_CTX", "prompt_context"),
        ("DECODE_BS", "decode_batch"),
        ("DECODE_BLOCK", "decode_blocks"),
    ],
)
def test_vllms_bucket_variables_are_understood(word: str, dimension: str, end: str) -> None:
    loaded = given(**{f"VLLM_{word}_BUCKET_{end}": "7"})

    assert getattr(getattr(loaded.engine.buckets, dimension), end.lower()) == 7


@pytest.mark.parametrize(
    ("variables", "strategy"),
    [
        ({"VLLM_BUCKETING_STRATEGY": "exp"}, "exponential"),
        ({"VLLM_BUCKETING_STRATEGY": "lin"}, "linear"),
        ({"VLLM_BUCKETING_STRATEGY": "pad"}, "padding-aware"),
        ({"VLLM_EXPONENTIAL_BUCKETING": "true"}, "exponential"),
        ({"VLLM_EXPONENTIAL_BUCKETING": "False"}, "linear"),
        # The older variable still wins there.
        ({"VLLM_EXPONENTIAL_BUCKETING": "0", "VLLM_BUCKETING_STRATEGY": "pad"}, "linear"),
        (
            {"VLLM_EXPONENTIAL_BUCKETING": "0", "GAUDISERVE_BUCKETING_STRATEGY": "pad"},
            "padding-aware",
        ),
        ({"VLLM_BUCKETING_FROM_FILE": "shapes.txt"}, "file"),
        ({"GAUDISERVE_BUCKETING_TRAFFIC": "traffic.jsonl"}, "fitted"),
    ],
)
def test_vllms_words_choose_the_strategy(variables: dict[str, str], strategy: str) -> None:
    loaded = given(**variables)

    assert loaded.engine.buckets.strategy == strategy


def test_a_traffic_without_the_strategy_that_reads_it_is_refused() -> None:
    message = "--bucketing-strategy is 'linear' and --bucketing-traffic is 'x.jsonl'"
    with pytest.raises(ConfigError, match=message):
        given("--bucketing-strategy", "linear", "--bucketing-traffic", "x.jsonl")

    assert given("--bucketing-strategy", "fitted").engine.buckets.traffic is None


def test_a_bucket_file_asks_for_its_strategy() -> None:
    loaded = given("--bucketing-file", "shapes.txt")

    assert loaded.engine.buckets.strategy == "file"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-modellen", "3"], "--max-modellen is no flag.*did you mean --max-model-len"),
        (["--dtype", "bf16"], r"dtype is 'bf16'.*did you mean bfloat16\?$"),
        (["--port", "99999"], r"port is 99999.* 0 and 65535$"),
        (["-tp", "0"], "^--tensor-parallel-size is 0, it must be at least 1$"),
        (["--max-num-seqs", "0"], "^--max-num-seqs is 0, it must be at least 1$"),
        (["--port", "x"], "port is 'x', it must be a whole number"),
        (["--port", "1.5"], "port is '1.5', it must be a whole number"),
        (["--port", "auto"], "port is 'auto', it must be a value"),
        (
            ["--gpu-memory-utilization", "1.5"],
            "gpu-memory-utilization is 1.5.*at most 1$",
        ),
        (
            ["--prompt-bs-bucket-min=4", "--prompt-bs-bucket-max=2"],
            "prompt_batch.*from 4 down to 2",
        ),
        (["--nnodes", "2"], "must be 1: --tensor-parallel-size"),
        (["a", "--model", "b"], "two models are named, 'a' and 'b'"),
        (["a", "b"], "takes no argument 'b'"),
        (["--port"], "--port: expected one argument"),
        (
            ["--enable-prefix-caching=false"],
            "takes no value, .*=false gives one; --no-enable-prefix-caching turns it off",
        ),
        (
            ["--quantization", "hqq"],
            "is .hqq., it must be one of auto-round, awq, .* int4, gguf",
        ),
        (
            ["--bucketing-strategy=file"],
            "is 'file' and --bucketing-file is 'none'.*need each other",
        ),
        (["--api-key", ""], "api-key is empty"),
        (["--allowed-origins", "[1"], "must be a JSON list"),
        (["--config", "/does/not/exist"], "/does/not/exist cannot be read"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modellen: 3", "max-modellen is no setting; did you mean max-model-len.*serve.yaml"),
        ("max-model-len: 3\nmax_model_len: 4", "gives max-model-len twice"),
        ("num-blocks: 3\nnum-gpu-blocks-override: 4", "gives num-gpu-blocks-override twice"),
        ("port: yes", "port is True, it must be a whole number"),
        ("api-key: 123", r"api-key is \*\*\*, it must be text"),
        ("enforce-eager: perhaps", "enforce-eager is 'perhaps', it must be true or false"),
        ("port:", "port is None, it must be a value"),
        ("config: other.yaml", "names another file"),
        ("- port", "must hold `key: value` lines"),
        ("port: [", "cannot be read: it is not YAML at line 1, column 8: expected"),
        ("nnodes: 4", "must be 1"),
        ("enable_lora_bias: true", "enable_lora_bias is not in this version: .*serve.yaml"),
        ("port: x\nseed: y", r"2 settings cannot be used:\n  --port is 'x'.*\n  --seed is 'y'"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=message):
        given("--config", str(file))


def test_what_is_true_anyway_is_accepted_from_other_servers_scripts() -> None:
    loaded = given("m", "--tensor-parallel-size=1", "--enable-chunked-prefill", "--dtype=half")

    assert loaded.engine.dtype == "float16"


def test_keywords_are_flags_with_underscores() -> None:
    loaded = from_keywords(
        model=Path("folder"), max_model_len=64, gpu_memory_utilization=0.5, tensor_parallel_size=1
    )

    assert loaded.engine.model == "folder"
    assert loaded.engine.max_model_len == 64
    assert loaded.engine.cache.gpu_memory_utilization == 0.5


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_modellen is no setting; did you mean max-model-len"):
        from_keywords(model="m", max_modellen=64)


def test_keywords_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAUDISERVE_SEED", "1")
    monkeypatch.setenv("GAUDISERVE_MAX_MODEL_LEN", "2")

    loaded = from_keywords(model="m", seed=3)

    assert (loaded.engine.seed, loaded.engine.max_model_len) == (3, 2)


def test_no_model_is_an_error_where_there_is_no_default() -> None:
    with pytest.raises(ConfigError, match="no model is given"):
        load([], environ={})


HUGE = "9" * 6000
LAUGHS = "a: &a [lol, lol]\n" + "".join(
    f"{item}: &{item} [*{before}, *{before}]\n"
    for before, item in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\nport: {<<: [*a, *a]}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LAUGHS + "port: *i\n", r"line 2 has the alias \*a, write the value itself"),
        (MERGES, r"line 2 has the alias \*a"),
        ("port: " + "[" * 20_000, "line 1 is nested more than 16 deep"),
        ("port: " + "{a: " * 20_000, "line 1 is nested more than 16 deep"),
        (f"port: {HUGE}\n", "cannot be read: Exceeds the limit"),
        (f"port: 0x{HUGE}\n", "cannot be read: Exceeds the limit"),
        (f"nnodes: [0x{HUGE}]\n", "cannot be read: Exceeds the limit"),
        ("port: 2001-99-99\n", "cannot be read: month must be in 1..12"),
        ("speculative-config: {2001-01-01: 1}\n", "must be a mapping of texts to values"),
        (f"port: {'x' * 200_000}\n", r"it has 200007 bytes, at most 131072 are read"),
        ("".join(f"key{item}: 1\n" for item in range(1001)), "holds 1001 keys, at most 1000"),
        ("? " + "x" * 10_000 + "\n: 1\n", "is no setting"),
    ],
)
def test_a_hostile_file_is_refused_in_one_short_sentence(
    content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)

    with pytest.raises(ConfigError, match=message) as error:
        given("--config", str(file))

    assert len(str(error.value)) < 3000


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it has more, at most 131072"):
        given("--config", "/dev/zero")


@pytest.mark.parametrize(
    "name",
    (
        *("port", "max-model-len", "gpu-memory-utilization", "dtype", "api-key", "lora-modules"),
        *("lora-extra-targets", "default-mm-loras", "speculative-config", "profiler-steps"),
        *("override-generation-config", "limit-mm-per-prompt", "media-io-kwargs"),
        *("multimodal-buckets", "profile-prompt", "nnodes"),
    ),
)
@pytest.mark.parametrize(
    "word",
    (HUGE, "9" * 400, "1__0", "[" * 20_000, '{"a":' * 20_000, "x" * 100_000),
    ids=lambda word: word[:4],
)
def test_a_hostile_variable_is_taken_or_refused_in_a_short_message(name: str, word: str) -> None:
    try:
        given(**{f"GAUDISERVE_{name.upper().replace('-', '_')}": word})
    except ConfigError as error:
        assert len(str(error)) < 5000
