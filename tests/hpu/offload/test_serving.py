"""A real engine and worker with a small cache: offloaded blocks are loaded back unchanged, on the
CPU and on a strict emulated card."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_rig import (
    BLOCK_SIZE,
    IN_MEMORY,
    LENGTH,
    TALKS,
    ask,
    converse,
    engine,
    tokens_of,
)
from safetensors.torch import load_file, save_file
from slow_model import Ledger, raw
from tiny_models import VOCAB_SIZE, make_tiny
from watched_executor import WATCHED

from config.buckets import BucketConfig, Range
from config.errors import ConfigError
from config.execution import EmulatorSettings
from config.params.offload import OffloadConfig
from config.params.sampling import SamplingParams
from config.params.speculation import SpeculationConfig
from engine.core.engine_core import EngineCore
from engine.executors.inproc import InprocExecutor
from engine.kv_cache.prefix_hashes import block_hashes
from engine.transport.messages import AddRequest
from hpu.offload.block_copies import StagedCopies
from hpu.offload.host_blocks import Row
from hpu.worker.block_offload import BlockOffload

NGRAM = SpeculationConfig(speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
ALONE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(64, 64, 64),
    prompt_context=Range(0, 16, 16),
    decode_batch=Range(3, 3, 3),
    decode_blocks=Range(48, 48, 48),
)
"""Few buckets, for requests in sequence."""
MAX_STEPS = 2000


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"kv_cache_dtype": "int8"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"kv_cache_dtype": "bfloat16"}),
        ("llama", {"speculation": NGRAM}),
        ("deepseek_v3", {}),
        ("gemma2", {}),
    ],
)
def test_blocks_are_loaded_in_the_format_of_the_cache(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    with engine(folder, OffloadConfig(), **settings) as core:
        expected = converse(core)
        assert core.stats().kv_offload == {}

    with engine(folder, IN_MEMORY, **settings) as core:
        found = converse(core)
        counts = core.stats().kv_offload

    assert tokens_of(found) == tokens_of(expected)
    assert [cached for _, cached in expected] == [0] * len(expected)
    assert all(cached >= 6 * BLOCK_SIZE for _, cached in found[len(TALKS) :])
    assert counts["stored"] >= 20 and counts["loaded"] >= 50


def mixed(core: EngineCore, count: int) -> dict[int, list[int]]:
    """Tokens by key of random concurrent requests with shared prefixes."""
    rng, ledger = random.Random(6), Ledger()
    waiting = list(range(count))
    for _ in range(MAX_STEPS):
        if waiting and rng.random() < 0.4:
            key = waiting.pop()
            tokens = [*rng.choice(TALKS)[: rng.randint(1, 130)], rng.randrange(3, VOCAB_SIZE)]
            prompt, salt = raw(tokens), rng.choice(["", "", "salt"])
            sampling = SamplingParams(
                temperature=0.0, max_tokens=rng.choice([1, 6, 60]), ignore_eos=True
            )
            ledger.open(key)
            core.add_request(
                AddRequest(key, prompt, sampling, cache_salt=salt),
                block_hashes(prompt, BLOCK_SIZE, salt),
            )
        ledger.take(core.step())
        core.check()
        if not waiting and not core.has_work:
            return {key: request.tokens for key, request in ledger.requests.items()}
    raise AssertionError(f"{MAX_STEPS} steps were not enough")


@pytest.mark.parametrize("place", ["memory", "files"])
def test_random_requests_get_the_same_tokens_with_offload(place: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    # Host memory holds few blocks, so nearly all blocks go to files.
    few = {"kv_offloading_size": 0.0004, "kv_offloading_dir": str(tmp_path / "kv")}
    offload = IN_MEMORY if place == "memory" else OffloadConfig(**few)  # type: ignore[arg-type]
    with engine(folder, OffloadConfig()) as core:
        expected = mixed(core, 50)
        assert core.stats().preemptions > 0

    with engine(folder, offload) as core:
        found = mixed(core, 50)
        counts = core.stats().kv_offload

    assert found == expected
    assert counts["loaded"] > 20 and (place == "memory" or counts["fetched"] > 0)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_inc"])
def test_copies_on_a_warm_card_compile_nothing(kv_cache_dtype: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    card_settings: dict[str, Any] = {
        "device": "hpu-emulator",
        "kv_cache_dtype": kv_cache_dtype,
        "buckets": ALONE,
        "emulator": EmulatorSettings(is_strict=True, memory_bytes=4 << 30),
    }
    with engine(folder, OffloadConfig(), **card_settings) as core:
        expected = converse(core)

    with engine(folder, IN_MEMORY, **card_settings) as core:
        card = torch.hpu.emulated  # type: ignore[attr-defined]  # the emulator's
        before = {name: card.counters.counts[name] for name in WATCHED}
        found = converse(core)
        after = {name: card.counters.counts[name] for name in WATCHED}
        counts = core.stats().kv_offload

    assert tokens_of(found) == tokens_of(expected)
    assert after == before
    assert counts["stored"] >= 20 and counts["loaded"] >= 50
    assert all(cached >= 6 * BLOCK_SIZE for _, cached in found[len(TALKS) :])


@pytest.mark.parametrize("device", ["cpu", "hpu-emulator"])
def test_host_memory_is_zeroed_when_it_is_freed(device: str, tmp_path: Path) -> None:
    card: dict[str, Any] = {
        "device": device,
        "buckets": ALONE,
        "emulator": EmulatorSettings(is_strict=True, memory_bytes=4 << 30),
    }
    with engine(
        make_tiny("llama", tmp_path), IN_MEMORY, **(card if device != "cpu" else {})
    ) as core:
        converse(core, rounds=2)
        offload = offload_of(core)
        memory = [offload._memory.rows, *staged(offload)]
        held = [bool(part.any()) for part in memory]
        num_filled = offload._num_filled

    assert all(held) and 20 <= num_filled <= len(memory[0])
    assert (len(memory) > 1) == (device != "cpu")
    assert not any(part.any() for part in memory)


def test_a_sleep_zeroes_host_memory(tmp_path: Path) -> None:
    with engine(make_tiny("llama", tmp_path), IN_MEMORY) as core:
        converse(core, rounds=1)
        memory = offload_of(core)._memory.rows
        assert memory.any()

        core.control("sleep", {})

        assert not memory.any()


def offload_of(core: EngineCore) -> BlockOffload:
    executor = core._executor
    assert isinstance(executor, InprocExecutor)
    return executor._worker.serving.components.offload


def staged(offload: BlockOffload) -> list[Row]:
    """Staging buffers of copies to a device, up to the size that was used."""
    copies = offload._copies
    if not isinstance(copies, StagedCopies):
        return []
    hosts = [
        host for staging in copies._staging.values() for _, hosts, _ in staging for host in hosts
    ]
    used = [host.view(torch.uint8).numpy() for host in hosts]
    return [tensor for tensor in used if tensor.any()]


def files(parent: Path) -> list[Path]:
    return sorted(parent.glob("kv-*/*/*/*.kv"))


def in_files(parent: Path, **settings: Any) -> OffloadConfig:
    return OffloadConfig(kv_offloading_size=0.01, kv_offloading_dir=str(parent), **settings)


def test_a_restart_finds_the_blocks_in_files(tmp_path: Path) -> None:
    folder, parent = make_tiny("llama", tmp_path / "model"), tmp_path / "kv"
    with engine(folder, in_files(parent)) as core:
        first = converse(core, rounds=1)
    assert files(parent) and not list(parent.rglob("*.tmp"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(parent))

    with engine(folder, in_files(parent)) as core:
        again = converse(core, rounds=1)
        counts = core.stats().kv_offload
        other_salt = ask(core, 99, TALKS[0][:LENGTH], salt="other")

    assert tokens_of(again) == tokens_of(first)
    assert again[0][1] >= 6 * BLOCK_SIZE and other_salt[1] == 0
    assert counts["fetched"] >= 6 and counts["corrupt"] == counts["missing"] == 0


def test_a_flipped_byte_in_a_file_is_detected_and_the_block_recomputed(tmp_path: Path) -> None:
    folder, parent = make_tiny("llama", tmp_path / "model"), tmp_path / "kv"
    with engine(folder, in_files(parent)) as core:
        first = converse(core, rounds=2)
    chain = block_hashes(raw(TALKS[0][:LENGTH]), BLOCK_SIZE)
    by_name = {path.stem: path for path in files(parent)}
    other = block_hashes(raw(TALKS[1][:LENGTH]), BLOCK_SIZE)
    flipped, cut = by_name[chain[3].hex()], by_name[other[2].hex()]
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-1])

    with engine(folder, in_files(parent)) as core:
        again = converse(core, rounds=1)
        counts = core.stats().kv_offload

    assert tokens_of(again) == tokens_of(first[: len(TALKS)])
    assert [cached for _, cached in again[:2]] == [3 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert counts["corrupt"] == 2
    # The block was evicted again, and its file rewritten.
    assert flipped.read_bytes() != bytes(content)


@pytest.mark.parametrize("device", ["cpu", "hpu-emulator"])
def test_a_flipped_byte_in_host_memory_is_detected_and_the_block_recomputed(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card: dict[str, Any] = {
        "device": device,
        "buckets": ALONE,
        "emulator": EmulatorSettings(is_strict=True, memory_bytes=4 << 30),
    }
    with engine(
        make_tiny("llama", tmp_path), IN_MEMORY, **(card if device != "cpu" else {})
    ) as core:
        first = converse(core, rounds=1)
        assert core._offload is not None
        slot = core._offload._index.slot(block_hashes(raw(TALKS[0][:LENGTH]), BLOCK_SIZE)[3])
        assert slot is not None
        row = offload_of(core)._memory.rows[slot]
        row[len(row) // 2] ^= 1

        again = converse(core, rounds=1)
        counts = core.stats().kv_offload
        third = converse(core, rounds=1)

    assert tokens_of(again) == tokens_of(third) == tokens_of(first)
    assert counts["corrupt"] == core.stats().kv_offload["corrupt"] == 1
    assert "1 KV blocks in host memory have a wrong checksum" in caplog.text


def test_another_model_in_the_same_folder_finds_no_blocks(tmp_path: Path) -> None:
    parent = tmp_path / "kv"
    with engine(make_tiny("llama", tmp_path / "a"), in_files(parent)) as core:
        converse(core, rounds=1)
    old = {path.parents[2].name for path in files(parent)}

    with engine(make_tiny("llama", tmp_path / "b", seed=1), in_files(parent)) as core:
        answers = converse(core, rounds=1)
        assert core.stats().kv_offload["fetched"] == 0

    assert [cached for _, cached in answers] == [0] * len(TALKS)
    new = {path.parents[2].name for path in files(parent)}
    assert len(old) == len(new) == 1 and old != new


def test_discarded_files_are_deleted_when_the_engine_stops_or_sleeps(tmp_path: Path) -> None:
    folder, parent = make_tiny("llama", tmp_path / "model"), tmp_path / "kv"
    offload = in_files(parent, kv_offloading_delete_files=True)
    with engine(folder, offload) as core:
        expected = converse(core, rounds=1)
        held = len(files(parent))
        core.control("sleep", {})
        asleep = len(files(parent))
        core.control("wake_up", {})
        found = converse(core, rounds=2)
        again = len(files(parent))

    assert held > 0 and again > 0 and asleep == 0
    assert tokens_of(found[: len(TALKS)]) == tokens_of(expected)
    assert all(cached >= 6 * BLOCK_SIZE for _, cached in found[len(TALKS) :])
    assert files(parent) == []


def test_files_stay_within_their_size(tmp_path: Path) -> None:
    folder, parent = make_tiny("llama", tmp_path / "model"), tmp_path / "kv"
    with engine(folder, in_files(parent, kv_offloading_dir_size=0.001)) as core:
        converse(core)
        limit = core.stats().kv_offload["max_file_blocks"]
        size = max(path.stat().st_size for path in files(parent))
    with engine(folder, in_files(parent, kv_offloading_dir_size=5 * size / 2**30)) as core:
        converse(core)

    assert limit > 20
    assert 0 < len(files(parent)) <= 5


def test_a_folder_is_used_by_one_server_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpu.offload.block_files.LOCK_TIMEOUT_S", 0.1)
    folder = make_tiny("llama", tmp_path / "model")
    with (
        engine(folder, in_files(tmp_path / "kv")),
        pytest.raises(ConfigError, match="is used by another server of this model"),
        engine(folder, in_files(tmp_path / "kv")),
    ):
        raise AssertionError("two servers have the same files")


@pytest.mark.parametrize(
    ("family", "offload", "match"),
    [
        ("granitemoehybrid", IN_MEMORY, "has recurrent layers"),
        ("llama", OffloadConfig(swap_space=1e-6), "enough for 0 KV blocks of"),
        ("llama", OffloadConfig(swap_space=1e6), "GiB of host memory for each device"),
    ],
)
def test_unsupported_offloading_is_refused_at_start(
    family: str, offload: OffloadConfig, match: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    with pytest.raises(ConfigError, match=match), engine(folder, offload):
        raise AssertionError("it has started")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "hpu-emulator"])
def test_a_nan_prompt_fails_after_its_blocks_are_loaded(device: str, tmp_path: Path) -> None:
    poison = TALKS[0][2]
    file = make_tiny("llama", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    card: dict[str, Any] = {
        "device": device,
        "buckets": BucketConfig(strategy="exact"),
        "enforce_eager": True,
    }
    healthy = [[token for token in talk if token != poison][:LENGTH] for talk in TALKS[1:]]
    with engine(tmp_path, IN_MEMORY, **(card if device != "cpu" else {})) as core:
        # Abort between two chunks: the blocks of the first chunk stay cached, since no
        # token was sampled after the poison token.
        prompt = raw(TALKS[0][:230])
        request = AddRequest(0, prompt, SamplingParams(max_tokens=1))
        core.add_request(request, block_hashes(prompt, BLOCK_SIZE))
        for _ in range(3):
            core.step()
        core.abort([0])
        # These requests fill the cache, so that only host memory has the blocks.
        expected = [ask(core, 1 + key, talk, max_tokens=1)[0] for key, talk in enumerate(healthy)]
        before = core.stats().kv_offload["loaded"]
        again, _ = ask(core, 8, TALKS[0][: LENGTH + 9])
        num_loaded = core.stats().kv_offload["loaded"] - before
        found = [ask(core, 9 + key, talk, max_tokens=1)[0] for key, talk in enumerate(healthy)]

    assert again == []
    assert num_loaded >= 3
    assert found == expected and all(len(tokens) == 1 for tokens in found)
