"""Log lines of a start on an emulated card, compared with the forms in the documents of vLLM's
Gaudi fork, whose users parse the log with scripts."""

import ast
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny
from two_prompts import TABLE, working

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig
from config.log import JsonFormatter
from hpu.worker.worker import Worker

VECTORS = Path(__file__).parents[2] / "vectors" / "buckets.json"
SIZE = r"-?[\d.]+ (bytes|KiB|MiB|GiB)"
USED = rf"\({SIZE}/{SIZE} used\)"
TOOK = rf"took {SIZE} of device memory {USED} and {SIZE} of host memory {USED}"
FORMS = [
    rf"Pre-loading model weights on hpu:0 {TOOK}",
    rf"Model profiling run {TOOK}",
    rf"Free device memory: {SIZE}, {SIZE} usable \(gpu_memory_utilization=0\.9\), {SIZE} reserved "
    rf"for HPUGraphs \(VLLM_GRAPH_RESERVED_MEM=0\.4\), {SIZE} reserved for KV cache",
    r"# HPU blocks: \d+, # CPU blocks: 0",
    rf"Initializing cache engine {TOOK}",
    r"Prompt bucket config \(min, step, max_warmup\) bs:\[1, 2, 1\], seq:\[16, 16, 32\], ctx:.*",
    r"Generated (\d+) prompt buckets \[bs, query, num_blocks\]: \[\(1, 16, 0\), .*\]",
    r"Decode bucket config \(min, step, max_warmup\) bs:\[1, 2, 2\], block:\[16, 16, 16\]",
    r"Generated (\d+) decode buckets \[bs, query, num_blocks\]: \[\(1, 1, .*\]",
    rf"\[Warmup\]\[Prompt\]\[1/\d+\] batch_size:1 query_len:32 num_blocks:\d+ free_mem:{SIZE}",
    rf"\[Warmup\]\[Decode\]\[\d+/\d+\] batch_size:\d query_len:1 num_blocks:\d+ free_mem:{SIZE}",
    rf"Using {SIZE}/{SIZE} of free device memory for HPUGraphs, {SIZE} for prompt and {SIZE} for "
    r"decode \(VLLM_GRAPH_PROMPT_RATIO=0\.3\)",
    rf"\[Warmup\]\[Graph/prompt\]\[1/\d+\] batch_size:1 query_len:\d+ num_blocks:\d+ "
    rf"free_mem:{SIZE}",
    rf"Graph/Prompt captured:\d+ \(100\.0%\) used_mem:{SIZE} buckets:\[\(1, .*\]",
    rf"\[Warmup\]\[Graph/decode\]\[\d+/\d+\] batch_size:\d query_len:1 num_blocks:\d+ "
    rf"free_mem:{SIZE}",
    rf"Graph/Decode captured:\d+ \(100\.0%\) used_mem:{SIZE} buckets:\[\(1, 1, .*\]",
    rf"Warmup finished in \d+ secs, allocated {SIZE} of device memory",
    rf"init_cache_engine {TOOK}",
]
"""Log lines in the order of a start. The documents write `B` instead of `bytes`."""


def start_log(
    folder: Path, buckets: BucketConfig, caplog: pytest.LogCaptureFixture, **limits: Any
) -> list[logging.LogRecord]:
    """Log records of a start on an emulated card, with settings of the scheduler, or of the model,
    the cache, the card and the warm-up."""
    caplog.set_level("INFO")
    given = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, **limits}
    length, block_size = given.pop("max_model_len"), given.pop("block_size", 16)
    num_blocks, warmup = given.pop("num_blocks", 128), given.pop("warmup", "full")
    memory_bytes = given.pop("memory_bytes", 1 << 30)
    config = EngineConfig(
        str(folder),
        device="hpu-emulator",
        dtype="float32",
        max_model_len=length,
        num_threads=1,
        cache=CacheConfig(
            block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=False
        ),
        scheduler=SchedulerConfig(**given),
        buckets=buckets,
        execution=ExecutionConfig(mode="hpu-graphs"),
        emulator=EmulatorSettings(is_strict=True, memory_bytes=memory_bytes),
        warmup=WarmupConfig(warmup, graph_memory_fraction=0.4),
    )
    worker = Worker(config)
    worker.start(lambda progress: None)
    worker.close()
    return caplog.records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def test_a_start_logs_the_documented_lines_in_order(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buckets = BucketConfig(strategy="linear", decode_blocks=Range(max=16))

    records = start_log(folder, buckets, caplog)

    lines = [record.getMessage() for record in records]
    at = 0
    for form in FORMS:
        found = [place for place in range(at, len(lines)) if re.match(form, lines[place])]
        assert found, f"no line {form} after line {at} of:\n" + "\n".join(lines)
        at = found[0]


def test_the_json_log_has_the_numbers_of_the_lines_as_fields(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = start_log(folder, TABLE, caplog, max_num_batched_tokens=128)

    formatter = JsonFormatter("worker", 0)
    logged = [json.loads(formatter.format(record)) for record in records]
    by_start = {entry["message"].split(" ")[0]: entry for entry in logged}
    assert by_start["#"]["num_blocks"] > 0
    assert by_start["Free"]["kv_bytes"] + by_start["Free"]["graph_bytes"] > 0
    assert by_start["Pre-loading"]["device_bytes"] > 0
    assert by_start["Warmup"]["num_buckets"] == sum(
        entry["num_buckets"] for entry in logged if entry["message"].startswith("Generated")
    )


def test_on_a_cpu_the_start_log_names_the_memory_of_the_host(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with working(folder, device="cpu"):
        pass
    form = rf"Pre-loading model weights on cpu took {SIZE} of host memory {USED}, in [\d.]+ s"
    assert any(re.fullmatch(form, line) for line in caplog.messages)
    assert not any("HPU" in line or "device memory" in line for line in caplog.messages)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_documented_example_logs_the_documented_buckets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The example in the fork's README of release 1.22: a context of 4096 tokens and 5746 blocks.
    The model is narrow, because buckets do not depend on its width."""
    narrow: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 8)
    heads: dict[str, Any] = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
    folder = make_tiny(
        "llama", tmp_path, max_position_embeddings=4096, num_hidden_layers=1, **narrow, **heads
    )
    vectors = json.loads(VECTORS.read_text())["vectors"]
    lists = {vector["name"]: vector["expected"] for vector in vectors}

    records = start_log(
        folder,
        BucketConfig(strategy="exponential"),
        caplog,
        warmup="compile",
        # The graphs of all buckets fit.
        memory_bytes=8 << 30,
        num_blocks=5746,
        block_size=128,
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        max_prefill_batch=4,
    )

    lines = [record.getMessage() for record in records]
    bounds = "Prompt bucket config (min, step, max_warmup, limit) bs:[1, 1, 4, 3], "
    assert any(line.startswith(bounds + "seq:[128, 128, 4096, 13]") for line in lines)
    bounds = "Decode bucket config (min, step, max_warmup, limit) bs:[1, 1, 4, 3], "
    assert bounds + "block:[128, 128, 5746, 14]" in lines
    form = r"Generated (\d+) (prompt|decode) buckets \[bs, query, num_blocks\]: (.*)"
    prompts, decodes = (found for line in lines if (found := re.fullmatch(form, line)))
    # The documents do not list the 13 prompt buckets with context, which later chunks of a prompt
    # need.
    assert [prompts[1], prompts[2]] == ["49", "prompt"]
    expected = {tuple(bucket) for bucket in lists["36 prompt buckets, no prefix caching"]}
    without_context = {bucket for bucket in ast.literal_eval(prompts[3]) if not bucket[2]}
    assert without_context == expected and len(expected) == 36
    assert [decodes[1], decodes[2]] == ["42", "decode"]
    listed = [tuple(bucket) for bucket in lists["42 decode buckets, contiguous PA"]]
    assert ast.literal_eval(decodes[3]) == sorted(listed)
    warmed = [line for line in lines if line.startswith("[Warmup][Graph/")]
    assert len(warmed) == 49 + 42
