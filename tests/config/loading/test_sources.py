"""config/loading/sources.py: sources, their order, and errors that suggest the nearest valid
name."""

import dataclasses
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.loading.flags import FLAGS, PARTS
from config.loading.sources import Loaded, from_keywords, load


def given(*argv: str, **environ: str) -> Loaded:
    return load(argv, environ=environ, default_model="demo")


def test_every_field_of_every_part_has_a_flag_and_flag_names_are_unique() -> None:
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


def test_flags_take_precedence_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
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


def test_a_note_names_a_variable_that_a_flag_overrides_with_another_value() -> None:
    flags = ("--port=1", "--max-num-seqs=8", "--api-key=secret")

    loaded = given(
        *flags,
        GAUDISERVE_PORT="2",
        GAUDISERVE_MAX_NUM_SEQS="8",
        GAUDISERVE_API_KEY="other",
        GAUDISERVE_SEED="3",
    )

    assert loaded.notes == (
        "flag --port takes precedence over variable GAUDISERVE_PORT, which has another value",
        "flag --api-key takes precedence over variable GAUDISERVE_API_KEY, which has another value",
    )


@pytest.mark.parametrize(
    ("words", "asked", "count", "is_lowered"),
    [
        (["--max-num-seqs=4096", "--max-num-batched-tokens=2048"], 4096, 2048, True),
        (["--max-num-batched-tokens=8"], 32, 8, True),
        (["--max-num-seqs=16", "--max-num-batched-tokens=16"], 16, 16, False),
        (["--max-num-seqs=4096"], 4096, 4096, False),
    ],
)
def test_max_num_seqs_is_lowered_to_the_tokens_of_a_step(
    words: list[str], asked: int, count: int, is_lowered: bool
) -> None:
    loaded = given(*words)

    assert loaded.engine.scheduler.max_num_seqs == count
    assert loaded.engine.scheduler.token_budget() >= count
    notes = [note for note in loaded.notes if "sequences run at once; raise" in note]
    assert len(notes) == is_lowered
    assert not notes or f"--max-num-seqs is {asked}" in notes[0]


@pytest.mark.parametrize(
    ("word", "value"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2M", 2**21), ("4GiB", 2**32)],
)
def test_sizes_are_parsed_as_in_vllm(word: str, value: int) -> None:
    loaded = given("--kv-cache-memory-bytes", word)

    assert loaded.engine.cache.kv_cache_memory_bytes == value


def test_flags_accept_underscores_and_alternative_names() -> None:
    loaded = given("--max_model_len=64", "--memory-utilization", "0.5", "--num-blocks", "7")

    assert loaded.engine.max_model_len == 64
    assert loaded.engine.cache.gpu_memory_utilization == 0.5
    assert loaded.engine.cache.num_blocks == 7


def test_boolean_flags_can_be_enabled_and_disabled() -> None:
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


def test_the_flag_value_auto_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max_model_len: 64\n")

    loaded = given("--config", str(file), "--max-model-len", "auto")

    assert loaded.engine.max_model_len is None


def test_list_flags_accept_repetition_json_and_yaml(tmp_path: Path) -> None:
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


def test_api_keys_are_masked_in_the_printed_config() -> None:
    loaded = given("--api-key", "first", "--api-key", "second")

    assert loaded.server.api_keys == ("first", "second")
    assert loaded.shown()["api-key"][0] == ("***", "***")


def test_a_bucket_limit_sets_its_field_of_the_range() -> None:
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
def test_vllms_bucket_variables_are_read(word: str, dimension: str, end: str) -> None:
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
        # The older variable takes precedence in vLLM.
        ({"VLLM_EXPONENTIAL_BUCKETING": "0", "VLLM_BUCKETING_STRATEGY": "pad"}, "linear"),
        (
            {"VLLM_EXPONENTIAL_BUCKETING": "0", "GAUDISERVE_BUCKETING_STRATEGY": "pad"},
            "padding-aware",
        ),
        ({"VLLM_BUCKETING_FROM_FILE": "shapes.txt"}, "file"),
        ({"GAUDISERVE_BUCKETING_TRAFFIC": "traffic.jsonl"}, "fitted"),
    ],
)
def test_vllms_variables_select_the_bucketing_strategy(
    variables: dict[str, str], strategy: str
) -> None:
    loaded = given(**variables)

    assert loaded.engine.buckets.strategy == strategy


def test_a_traffic_file_needs_a_strategy_that_reads_it() -> None:
    message = "--bucketing-strategy is 'linear' and --bucketing-traffic is 'x.jsonl'"
    with pytest.raises(ConfigError, match=message):
        given("--bucketing-strategy", "linear", "--bucketing-traffic", "x.jsonl")

    assert given("--bucketing-strategy", "fitted").engine.buckets.traffic is None


def test_a_variable_with_two_swapped_letters_names_the_similar_variable() -> None:
    with pytest.raises(
        ConfigError, match=r"GAUDISERVE_PROT is .*; did you mean GAUDISERVE_PORT\?$"
    ):
        given(GAUDISERVE_PROT="8001")


def test_a_bucket_file_selects_the_file_strategy() -> None:
    loaded = given("--bucketing-file", "shapes.txt")

    assert loaded.engine.buckets.strategy == "file"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seqs=1000000000"], "--max-num-seqs is 1000000000, it must be between 1 and "),
        (["--max-modellen", "3"], "--max-modellen is not a flag.*did you mean --max-model-len"),
        (["--dtype", "bf16"], r"dtype is 'bf16'.*did you mean bfloat16\?$"),
        (["--port", "99999"], r"port is 99999.* 0 and 65535$"),
        (["-tp", "0"], "^--tensor-parallel-size is 0, it must be at least 1$"),
        (["--max-num-seqs", "0"], "^--max-num-seqs is 0, it must be between 1 and 65536$"),
        (["--decode-bs-bucket-step", "0"], "^--decode-bs-bucket-step is 0, it must be at least 1$"),
        (["--prompt-ctx-bucket-min=-1"], "^--prompt-ctx-bucket-min is -1, it must be at least 0$"),
        (
            ["--bucketing-strategy=padding-aware", "--decode-block-bucket-pad-percent=90"],
            "^--decode-block-bucket-pad-percent is 90, it must be 0 to 50$",
        ),
        (["--port", "x"], "port is 'x', it must be a whole number"),
        (["--port", "1.5"], "port is '1.5', it must be a whole number"),
        (["--port", "auto"], "port is 'auto', it must be a value"),
        (
            ["--gpu-memory-utilization", "1.5"],
            "gpu-memory-utilization is 1.5.*at most 1$",
        ),
        (
            ["--prompt-bs-bucket-min=4", "--prompt-bs-bucket-max=2"],
            "^--prompt-bs-bucket-min is 4 and --prompt-bs-bucket-max is 2,",
        ),
        (["--nnodes", "2"], "must be 1: --distributed-executor-backend ray"),
        (["a", "--model", "b"], "two different models are set, 'a' and 'b'"),
        (["a", "b"], "takes no argument 'b'"),
        (["--port"], "^--port needs a value, such as --port 8000$"),
        (["--dtype", "--port", "1"], "^--dtype needs a value, such as --dtype auto$"),
        (["--config"], "^--config needs a value: --config FILE$"),
        (
            ["--speculative-config", "[1]"],
            '^--speculative-config is .*, such as .*"method": "ngram", "num_speculative_tokens": 4',
        ),
        (
            ["--enable-prefix-caching=maybe"],
            "takes no value, .*=maybe sets a value; --no-enable-prefix-caching turns it off",
        ),
        (
            ["--quantization", "hqq"],
            "is .hqq., it must be one of auto-round, awq, .* int4, gguf",
        ),
        (
            ["--bucketing-strategy=file"],
            "is 'file' and --bucketing-file is 'none'.*requires a file",
        ),
        (["--api-key", ""], "api-key is empty"),
        (["--allowed-origins", "[1"], "must be a JSON list"),
        (["--config", "/does/not/exist"], "/does/not/exist cannot be read"),
    ],
)
def test_an_invalid_command_line_is_refused_with_the_reason(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max-modellen: 3",
            "max-modellen is not a setting; did you mean max-model-len.*serve.yaml",
        ),
        ("prot: 3", "prot is not a setting; did you mean port.*serve.yaml"),
        ("max-model-len: 3\nmax_model_len: 4", "sets max-model-len twice"),
        ("num-blocks: 3\nnum-gpu-blocks-override: 4", "sets num-gpu-blocks-override twice"),
        ("port: yes", "port is True, it must be a whole number"),
        ("api-key: 123", r"api-key is \*\*\*, it must be a string"),
        ("enforce-eager: perhaps", "enforce-eager is 'perhaps', it must be true or false"),
        ("port:", "port is None, it must be a value"),
        ("config: other.yaml", "names another file"),
        ("- port", "must consist of `key: value` lines"),
        ("port: [", "cannot be read: it is not YAML at line 1, column 8: expected"),
        ("nnodes: 4", "must be 1"),
        ("enable_lora_bias: true", "enable_lora_bias is not supported: .*serve.yaml"),
        ("port: x\nseed: y", r"2 settings are invalid:\n  --port is 'x'.*\n  --seed is 'y'"),
    ],
)
def test_an_invalid_config_file_is_refused_with_the_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=message):
        given("--config", str(file))


def test_a_restated_default_an_ignored_flag_and_half_are_accepted() -> None:
    loaded = given("m", "--tensor-parallel-size=1", "--enable-reasoning", "--dtype=half")

    assert loaded.engine.dtype == "float16"


@pytest.mark.parametrize(
    ("flags", "is_on"),
    [
        ("", True),
        ("--enable-chunked-prefill", True),
        ("--enable-chunked-prefill=true", True),
        ("--no-enable-chunked-prefill", False),
        ("--enable-chunked-prefill=False", False),
    ],
)
def test_chunked_prefill_can_be_enabled_and_disabled(flags: str, is_on: bool) -> None:
    assert given("m", *flags.split()).engine.scheduler.enable_chunked_prefill == is_on


@pytest.mark.parametrize(
    ("flags", "is_eager"),
    [
        ("-O0", True),
        ("-O 0", True),
        ("-O.level=0", True),
        ("-O.mode NONE", True),
        ('--compilation-config {"level":0}', True),
        ("--optimization-level 0", True),
        ("-O3 -O0", True),
        ("-O0 -O3", False),
        ("-O1", False),
        ("-O2", False),
        ("--compilation-config 3", False),
        ("-O.use_inductor=false", False),
        ("-O0 --no-enforce-eager", False),
        ("-O0 --execution-mode torch-compile", False),
        ("", False),
    ],
)
def test_optimization_level_0_selects_eager_mode(flags: str, is_eager: bool) -> None:
    loaded = given("m", *flags.split())

    assert loaded.engine.enforce_eager == is_eager
    assert any("treated as --enforce-eager" in note for note in loaded.notes) == is_eager


@pytest.mark.parametrize("flags", ["-O4", "--optimization-level -1", "-O.level=7"])
def test_an_unknown_optimization_level_is_refused(flags: str) -> None:
    with pytest.raises(ConfigError, match="it must be a level from 0 to 3"):
        given("m", *flags.split())


def test_keywords_are_flags_with_underscores() -> None:
    loaded = from_keywords(
        model=Path("folder"), max_model_len=64, gpu_memory_utilization=0.5, tensor_parallel_size=1
    )

    assert loaded.engine.model == "folder"
    assert loaded.engine.max_model_len == 64
    assert loaded.engine.cache.gpu_memory_utilization == 0.5


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="max_modellen is not a setting; did you mean max_model_len"
    ):
        from_keywords(model="m", max_modellen=64)


def test_a_device_unlike_all_devices_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"^--device is 'gpu', it must be one of [\w, -]+$"):
        given("m", "--device=gpu")


def test_keyword_arguments_take_precedence_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAUDISERVE_SEED", "1")
    monkeypatch.setenv("GAUDISERVE_MAX_MODEL_LEN", "2")

    loaded = from_keywords(model="m", seed=3)

    assert (loaded.engine.seed, loaded.engine.max_model_len) == (3, 2)


def test_a_missing_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no model is set"):
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
        ("port: " + "[" * 20_000, "line 1 is nested more than 16 levels deep"),
        ("port: " + "{a: " * 20_000, "line 1 is nested more than 16 levels deep"),
        (f"port: {HUGE}\n", "cannot be read: Exceeds the limit"),
        (f"port: 0x{HUGE}\n", "cannot be read: Exceeds the limit"),
        (f"nnodes: [0x{HUGE}]\n", "cannot be read: Exceeds the limit"),
        ("port: 2001-99-99\n", "cannot be read: month must be in 1..12"),
        ("speculative-config: {2001-01-01: 1}\n", "must be a mapping of strings to values"),
        (f"port: {'x' * 200_000}\n", r"it has 200007 bytes, at most 131072 are allowed"),
        ("".join(f"key{item}: 1\n" for item in range(1001)), "has 1001 keys, at most 1000"),
        ("? " + "x" * 10_000 + "\n: 1\n", "is not a setting"),
    ],
)
def test_a_hostile_file_is_refused_in_a_short_message(
    content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)

    with pytest.raises(ConfigError, match=message) as error:
        given("--config", str(file))

    assert len(str(error.value)) < 3000


def test_an_endless_device_as_config_file_is_refused() -> None:
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
def test_a_hostile_variable_is_accepted_or_refused_in_a_short_message(name: str, word: str) -> None:
    try:
        given(**{f"GAUDISERVE_{name.upper().replace('-', '_')}": word})
    except ConfigError as error:
        assert len(str(error)) < 5000
