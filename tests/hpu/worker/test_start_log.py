"""The lines of a start on an emulated card, against the forms in the documents of vLLM's Gaudi
fork, whose users read the log with scripts."""

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
"""The lines in their order in a start. The documents write `B` in place of `bytes`."""


def start_log(
    folder: Path, buckets: BucketConfig, caplog: pytest.LogCaptureFixture, **limits: Any
) -> list[logging.LogRecord]:
    """Records of a start on an emulated card."""
    caplog.set_level("INFO")
    given = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, **limits}
    length, block_size = given.pop("max_model_len"), given.pop("block_size", 16)
    config = EngineConfig(
        str(folder),
        device="hpu-emulator",
        dtype="float32",
        max_model_len=length,
        num_threads=1,
        cache=CacheConfig(block_size=block_size, num_blocks=128, enable_prefix_caching=False),
        scheduler=SchedulerConfig(**given),
        buckets=buckets,
        execution=ExecutionConfig(mode="hpu-graphs"),
        emulator=EmulatorSettings(is_strict=True, memory_bytes=1 << 30),
        warmup=WarmupConfig(graph_memory_fraction=0.4),
    )
    worker = Worker(config)
    worker.start(lambda progress: None)
    worker.close()
    return caplog.records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def test_a_start_has_the_lines_of_the_documents_in_their_order(
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


def test_on_a_cpu_the_lines_name_the_memory_of_the_host(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with working(folder, device="cpu"):
        pass
    form = rf"Pre-loading model weights on cpu took {SIZE} of host memory {USED}, in [\d.]+ s"
    assert any(re.fullmatch(form, line) for line in caplog.messages)
    assert not any("HPU" in line or "device memory" in line for line in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "first", "prompts", "decodes"),
    [
        # The example of the README of release 1.22.
        (
            "exponential",
            r"Prompt bucket config \(min, step, max_warmup, limit\) bs:\[1, 1, 4, 3\], "
            r"seq:\[128, 128, 4096, 13\]",
            (36, 49),
            (42, 43),
        ),
    ],
)
def test_the_examples_of_the_documents_have_their_buckets(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    strategy: str,
    first: str,
    prompts: tuple[int, int],
    decodes: tuple[int, int],
) -> None:
    records = start_log(
        folder,
        BucketConfig(strategy=strategy),
        caplog,
        block_size=128,
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        max_prefill_batch=4,
    )

    lines = [record.getMessage() for record in records]
    assert any(re.match(first, line) for line in lines)
    counts = [int(line.split()[1]) for line in lines if line.startswith("Generated")]
    assert prompts[0] <= counts[0] <= prompts[1] and decodes[0] <= counts[1] <= decodes[1]
    warmed = [line for line in lines if line.startswith("[Warmup][Graph/")]
    assert len(warmed) == sum(counts)
