"""Adapters over HTTP: names, loading and unloading, with a real server in its own process."""

import asyncio
import json
import math
import shutil
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import write_adapter
from gguf_adapters import METADATA, as_gguf, write_pairs
from http_rig import in_memory
from live import LiveServer, running
from tiny_models import make_tiny

from config.loading.sources import load as load_config
from engine.core.adapter_reader import MAX_PENDING

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    base = make_tiny("llama", root / "base")
    write_adapter(root / "allowed" / "two", base, seed=2)
    write_adapter(root / "allowed" / "wide", base, rank=32)
    write_adapter(root / "elsewhere", base, seed=3)
    as_gguf(root / "allowed" / "two.gguf", root / "allowed" / "two", base)
    write_pairs(root / "allowed" / "short.gguf", "llama", {}, metadata=METADATA)
    return {"base": base, "one": write_adapter(root / "one", base, seed=1), "root": root}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[LiveServer]:
    (folders["root"] / "log").mkdir()
    (folders["root"] / "allowed" / "link").symlink_to(folders["root"] / "elsewhere")
    flags = (
        *("--dtype=float32", "--max-model-len=128", "--num-gpu-blocks-override=64"),
        *("--served-model-name=base", "--api-key=secret", "--enable-lora", "--max-loras=2"),
        *("--max-cpu-loras=2", "--allow-runtime-lora-updating"),
        f"--lora-dir={folders['root'] / 'allowed'}",
        "--lora-modules",
        f'{{"name": "one", "path": "{folders["one"]}", "base_model_name": "parent"}}',
    )
    with running(str(folders["base"]), folders["root"] / "log" / "server.txt", *flags) as live:
        yield live


@pytest.fixture
async def client(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, headers=KEY, timeout=60) as made:
        yield made


async def complete(client: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "Hello", "max_tokens": 6, "temperature": 0, **fields}
    return await client.post("/v1/completions", json=body)


async def load(client: httpx.AsyncClient, name: str, path: str) -> httpx.Response:
    return await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


async def unload(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def test_the_model_field_chooses_the_adapter(client: httpx.AsyncClient) -> None:
    base, adapted = await complete(client, "base"), await complete(client, "one")
    listed = (await client.get("/v1/models")).json()["data"]
    chat = await client.post(
        "/v1/chat/completions",
        json={"model": "one", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    )

    assert base.json()["choices"][0]["text"] != adapted.json()["choices"][0]["text"]
    assert adapted.json()["model"] == chat.json()["model"] == "one"
    assert [(entry["id"], entry["parent"]) for entry in listed] == [
        ("base", None),
        ("one", "parent"),
    ]


async def test_adapters_are_loaded_and_unloaded(client: httpx.AsyncClient) -> None:
    unknown = await complete(client, "two")
    loaded = await load(client, "two", "two")
    listed = (await client.get("/v1/models/two")).json()
    found = await complete(client, "two", n=2, best_of=2, temperature=1, seed=1)
    beams = await complete(client, "two", n=2, use_beam_search=True)
    twice = await load(client, "two", "two")
    unloaded = await unload(client, "two")
    gone = await complete(client, "two")
    again = await unload(client, "two")
    metrics = (await client.get("/metrics")).text

    assert unknown.status_code == gone.status_code == again.status_code == 404
    assert loaded.status_code == 200, loaded.text
    # Clients of vLLM look for this message.
    assert loaded.json()["message"] == "Success: LoRA adapter 'two' added successfully."
    assert listed["parent"] == "base"
    assert found.status_code == beams.status_code == 200, found.text + beams.text
    assert again.json()["error"]["message"].endswith(
        "this server has one (GET /v1/models lists them). POST /v1/load_lora_adapter adds one."
    )
    assert twice.status_code == 400
    assert "already loaded" in twice.json()["error"]["message"]
    assert unloaded.status_code == 200
    assert unloaded.json()["message"] == "Success: LoRA adapter 'two' removed successfully."
    assert 'vllm:lora_requests_info{engine="0",max_lora="2"' in metrics.replace(
        'model_name="base",', ""
    )
    assert "gaudiserve:lora_loads_total" in metrics


async def test_a_long_path_is_refused_before_it_is_resolved(client: httpx.AsyncClient) -> None:
    answer = await load(client, "three", "a/../" * 2_000)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(
        "lora_path has 10000 characters, at most 4096 are allowed"
    )


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("three", "nowhere"),
        ("three", "../elsewhere"),
        ("three", "link"),
        ("three", "/etc"),
        ("three", "two\0"),
        ("three", ""),
    ],
)
async def test_an_adapter_folder_that_is_missing_or_not_allowed_is_not_found(
    name: str, path: str, client: httpx.AsyncClient
) -> None:
    answer = await load(client, name, path)

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (
        error["param"] == "lora_path"
        and "must name a folder or a GGUF file below" in error["message"]
    )


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("three", ".", "has no adapter_config.json"),
        ("three", "two/adapter_config.json", "adapter_config.json cannot be read as a GGUF file"),
        ("three", "short.gguf", "short.gguf has 0 low-rank matrices"),
        ("wide", "wide", "has rank 32, --max-lora-rank is 16"),
        ("base", "two", "is already loaded"),
        ("one", "two", "is already loaded"),
        ("", "two", "has 0 characters"),
    ],
)
async def test_an_invalid_adapter_is_refused(
    name: str, path: str, message: str, client: httpx.AsyncClient
) -> None:
    answer = await load(client, name, path)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    is_name = message in ("is already loaded", "has 0 characters")
    assert error["param"] == ("lora_name" if is_name else "lora_path")
    assert (await complete(client, "one")).status_code == 200


async def test_a_gguf_file_is_loaded(client: httpx.AsyncClient) -> None:
    await load(client, "two", "two")
    expected = (await complete(client, "two")).json()["choices"][0]["text"]
    loaded = await load(client, "file", "two.gguf")
    found = await complete(client, "file")
    unloaded = [await unload(client, name) for name in ("two", "file")]

    assert loaded.status_code == 200, loaded.text
    assert found.json()["choices"][0]["text"] == expected
    assert [answer.status_code for answer in unloaded] == [200, 200]


async def test_loading_an_adapter_requires_the_key(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": "x", "lora_path": "two"},
        headers={"Authorization": "Bearer wrong"},
    )

    assert answer.status_code == 401


async def test_requests_of_an_unloaded_adapter_end_as_usual(client: httpx.AsyncClient) -> None:
    await load(client, "two", "two")
    expected = (await complete(client, "two", max_tokens=60, ignore_eos=True)).json()
    body = {"model": "two", "prompt": "Hello", "max_tokens": 60, "temperature": 0}
    text = ""
    async with client.stream(
        "POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True}
    ) as stream:
        first = True
        async for line in stream.aiter_lines():
            if first:
                first = False
                assert (await unload(client, "two")).status_code == 200
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]

    assert text == expected["choices"][0]["text"]


def write_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


async def slowest(client: httpx.AsyncClient, done: asyncio.Event) -> float:
    """Longest time in seconds of a short request; requests are sent in sequence until `done`."""
    longest = 0.0
    while not done.is_set():
        begin = time.perf_counter()
        answer = await asyncio.wait_for(complete(client, "base", max_tokens=2), 60)
        assert answer.status_code == 200, answer.text
        longest = max(longest, time.perf_counter() - begin)
    return longest


EXPRESSION = "(([a-z0-9_.]+)+)+!"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": EXPRESSION}, "which target_modules of"),
        ({"rank_pattern": {EXPRESSION: 4}}, ""),
        ({"alpha_pattern": {EXPRESSION: 4}}, ""),
        ({"target_modules": ["q_proj"] * 200_000}, "values, at most 200000 are allowed"),
        ({"target_modules": ["q_proj"] * 100_000}, "100000 target_modules, at most 65536"),
        ({"lora_alpha": 1e30}, "lora_B.weight, which lora_alpha and the rank multiply by 2.5e+29"),
        ({"lora_alpha": 10**400}, "it must be a finite number"),
    ],
)
async def test_a_hostile_adapter_delays_no_other_request(
    fields: dict[str, Any], message: str, client: httpx.AsyncClient, folders: dict[str, Path]
) -> None:
    name = f"hostile-{len(json.dumps(fields))}"
    write_adapter(folders["root"] / "allowed" / name, folders["base"])
    write_config(folders["root"] / "allowed" / name, **fields)
    done = asyncio.Event()
    other = asyncio.create_task(slowest(client, done))

    answer = await asyncio.wait_for(load(client, name, name), 60)
    done.set()
    longest = await asyncio.wait_for(other, 60)

    assert answer.status_code == (400 if message else 200), answer.text
    assert message in answer.text
    assert str(folders["root"]) not in answer.text
    # On an idle machine, the longest request takes a tenth of a second more than without the load.
    assert longest < 30


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
async def test_errors_show_the_path_that_was_sent(
    file: str, client: httpx.AsyncClient, folders: dict[str, Path]
) -> None:
    folder = write_adapter(folders["root"] / "allowed" / f"linked-{file}", folders["base"])
    (folder / file).unlink()
    missing = await load(client, "three", folder.name)
    (folder / file).symlink_to(folders["root"] / "elsewhere" / file)
    linked = await load(client, "three", folder.name)
    absolute = await load(client, "three", str(folder))

    assert missing.status_code == linked.status_code == absolute.status_code == 400
    assert f"{folder.name} has no {file}" in missing.json()["error"]["message"]
    assert f"{folder.name}/{file} is outside --lora-dir" in linked.json()["error"]["message"]
    assert str(folders["root"]) not in missing.text + linked.text
    # The client sent the absolute path, so the message may contain it.
    assert f"{folder}/{file} is outside --lora-dir" in absolute.json()["error"]["message"]


@pytest.mark.parametrize("change", ["deleted", "changed", "linked"])
async def test_an_adapter_changed_after_its_load_fails_without_showing_its_folder(
    change: str, client: httpx.AsyncClient, folders: dict[str, Path]
) -> None:
    folder = write_adapter(folders["root"] / "allowed" / change, folders["base"], seed=9)
    loaded = await load(client, f"was-{change}", change)
    if change == "deleted":
        shutil.rmtree(folder)
    elif change == "changed":
        write_adapter(folder, folders["base"], seed=10)
    else:
        (folder / "adapter_model.safetensors").unlink()
        (folder / "adapter_model.safetensors").symlink_to(
            folders["root"] / "elsewhere" / "adapter_model.safetensors"
        )
    listed = (await client.get(f"/v1/models/was-{change}")).json()
    answer = await complete(client, f"was-{change}")
    await unload(client, f"was-{change}")

    assert loaded.status_code == 200, loaded.text
    assert listed["root"] == change
    assert answer.status_code == 500
    assert f"was-{change}" in answer.json()["error"]["message"]
    assert str(folders["root"]) not in answer.text


@pytest.mark.parametrize(
    ("config", "missing", "flags"),
    [
        ({}, "--lora-dir and no --api-key", "--lora-dir FOLDER --api-key KEY"),
        ({"api_keys": ("secret",)}, "--lora-dir", "--lora-dir FOLDER"),
        ({"lora_dir": "/"}, "--api-key", "--api-key KEY"),
    ],
)
async def test_a_server_without_an_adapter_folder_or_a_key_names_the_flag(
    config: Any, missing: str, flags: str
) -> None:
    async with in_memory(allow_runtime_lora_updating=True, **config) as rig:
        rig.http.headers.update(KEY)
        loaded = await rig.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/x"})
        unloaded = await rig.post("/v1/unload_lora_adapter", {"lora_name": "a"})

        for answer in (loaded, unloaded):
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert message.startswith(f"the server has no {missing}, so its adapters cannot be")
            assert f"start it with --enable-lora {flags}, and load adapters from" in message


def test_the_variable_of_vllm_is_accepted_without_a_folder() -> None:
    loaded = load_config(["m"], environ={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})

    assert loaded.server.allow_runtime_lora_updating
    assert loaded.server.lora_dir is None


async def test_nan_adapter_weights_are_refused(
    client: httpx.AsyncClient, folders: dict[str, Path]
) -> None:
    folder = write_adapter(folders["root"] / "allowed" / "spoiled", folders["base"])
    file = folder / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4:] = struct.pack("<f", math.nan)
    file.write_bytes(data)

    answer = await load(client, "spoiled", "spoiled")

    assert answer.status_code == 400
    assert "lora_" in answer.text and "NaN" in answer.text


async def test_concurrent_adapter_loads_succeed_or_are_a_503(
    client: httpx.AsyncClient, folders: dict[str, Path]
) -> None:
    answers = await asyncio.gather(*(load(client, f"many{i}", "two") for i in range(90)))
    names = [f"many{i}" for i, answer in enumerate(answers) if answer.status_code == 200]
    unloaded = [await unload(client, name) for name in names]

    assert {answer.status_code for answer in answers} <= {200, 503}
    assert len(names) > MAX_PENDING // 2
    assert {answer.status_code for answer in unloaded} == {200}
