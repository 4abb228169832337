"""Memory, threads and files stay flat while a thousand adapters are loaded, used and unloaded over
HTTP."""

import shutil
from itertools import chain, count
from pathlib import Path

import httpx
import psutil
import pytest
from adapters import write_adapter
from hostile_adapters import hostile_adapters, write_files
from live import LiveServer, running
from tiny_models import make_tiny
from watch import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS, WARM_UP = 1400, 400
KEY = {"Authorization": "Bearer secret"}


def num_threads(server: LiveServer) -> int:
    root = psutil.Process(server.pid)
    return sum(item.num_threads() for item in (root, *root.children(recursive=True)))


def test_a_thousand_adapters_leak_no_memory_thread_or_file(tmp_path: Path) -> None:
    lora_dir = tmp_path / "lora-dir"
    (tmp_path / "log").mkdir()
    base = make_tiny("llama", tmp_path / "base")
    valid = write_adapter(tmp_path / "valid", base)
    flags = (
        *("--dtype=float32", "--max-model-len=128", "--num-gpu-blocks-override=64"),
        *("--served-model-name=base", "--api-key=secret", "--enable-lora"),
        *("--allow-runtime-lora-updating", f"--lora-dir={lora_dir}"),
    )
    lora_dir.mkdir()
    with (
        running(str(base), tmp_path / "log" / "server.txt", *flags) as server,
        httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client,
    ):
        family = Family(server.pid)
        # Each hostile adapter comes several times: large files enlarge the heap the first time.
        hostile = chain.from_iterable(hostile_adapters(valid) for _ in count())
        before = (0, 0, 0)
        for number in range(ROUNDS):
            name = f"adapter-{number}"
            folder = lora_dir / name
            kind, files = next(hostile) if number % 2 else ("", {})
            if kind:
                write_files(folder, files)
            else:
                write_adapter(folder, base, seed=number, targets=["q_proj"])
            body = {"lora_name": name, "lora_path": name}
            loaded = client.post("/v1/load_lora_adapter", json=body)
            assert loaded.status_code in ((200, 400) if kind else (200,)), (kind, loaded.text)
            assert str(tmp_path) not in loaded.text
            if loaded.status_code == 200:
                prompt = {"model": name, "prompt": "Hello", "max_tokens": 1}
                assert client.post("/v1/completions", json=prompt).status_code == 200, kind
                unloaded = client.post("/v1/unload_lora_adapter", json={"lora_name": name})
                assert unloaded.status_code == 200
            shutil.rmtree(folder)
            if number == WARM_UP:
                before = family.resident_bytes(), family.num_descriptors(), num_threads(server)
        after = family.resident_bytes(), family.num_descriptors(), num_threads(server)
        listed = client.get("/v1/models").json()["data"]
        metrics = client.get("/metrics").text

    assert [name["id"] for name in listed] == ["base"]
    assert "gaudiserve:lora_bytes" in metrics
    assert "adapter-" not in metrics
    assert after[0] - before[0] < 60 * 2**20, f"{(after[0] - before[0]) >> 20} MiB more"
    assert after[1] <= before[1] + 5
    assert after[2] <= before[2] + 5
