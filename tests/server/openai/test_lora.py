"""Adapters over HTTP: names, loading and unloading, with a real engine in this process."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import write_adapter
from live import LiveServer, running
from tiny_models import make_tiny

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    base = make_tiny("llama", root / "base")
    write_adapter(root / "allowed" / "two", base, seed=2)
    write_adapter(root / "allowed" / "wide", base, rank=32)
    write_adapter(root / "elsewhere", base, seed=3)
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
    base, one = await complete(client, "base"), await complete(client, "one")
    listed = (await client.get("/v1/models")).json()["data"]
    chat = await client.post(
        "/v1/chat/completions",
        json={"model": "one", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    )

    assert base.json()["choices"][0]["text"] != one.json()["choices"][0]["text"]
    assert one.json()["model"] == chat.json()["model"] == "one"
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
    assert listed["parent"] == "base"
    assert found.status_code == beams.status_code == 200, found.text + beams.text
    assert twice.status_code == 400
    assert "served already" in twice.json()["error"]["message"]
    assert unloaded.status_code == 200
    assert 'vllm:lora_requests_info{engine="0",max_lora="2"' in metrics.replace(
        'model_name="base",', ""
    )
    assert "gaudiserve:lora_loads_total" in metrics


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("three", "nowhere"),
        ("three", "../elsewhere"),
        ("three", "link"),
        ("three", "/etc"),
        ("three", "two\0"),
    ],
)
async def test_a_folder_that_is_missing_or_elsewhere_is_not_found(
    name: str, path: str, client: httpx.AsyncClient
) -> None:
    answer = await load(client, name, path)

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["param"] == "lora_path" and "names no folder below" in error["message"]


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("three", ".", "has no adapter_config.json"),
        ("wide", "wide", "has rank 32, --max-lora-rank is 16"),
        ("base", "two", "is served already"),
        ("one", "two", "is served already"),
        ("", "two", "has 0 characters"),
    ],
)
async def test_a_wrong_adapter_is_refused(
    name: str, path: str, message: str, client: httpx.AsyncClient
) -> None:
    answer = await load(client, name, path)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert (await complete(client, "one")).status_code == 200


async def test_a_key_is_needed(client: httpx.AsyncClient) -> None:
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
