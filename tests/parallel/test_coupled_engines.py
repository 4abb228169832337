"""Expert-parallel engines (dp with --enable-expert-parallel): the tokens of a single process under
unequal load, no work when idle, and a common end."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_rig import request_of
from live import LiveServer, alive, children_of, workers_of
from parity import SHORT_OF_BLOCKS
from ports import free_port
from tiny_models import make_tiny

from config.errors import ConfigError, EngineDied
from gaudiserve import LLM, SamplingParams

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]

COUPLED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=120)
PROMPTS = [[7 * i % 290 + 8 for i in range(length)] for length in (60, 3, 1, 33, 9, 50, 2)]
BODY: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True}
END_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(make_tiny("mixtral", folder, seed=3, max_position_embeddings=2000))


def raw(prompt: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in prompt)


async def read(queue: Any) -> list[int]:
    tokens: list[int] = []
    while True:
        update = await queue.get()
        tokens += update.tokens
        if update.finish is not None:
            return tokens


async def uneven(llm: LLM) -> list[list[int]]:
    """Tokens of five requests to engine 0 and none to engine 1, then of later requests to engine 1,
    with an abort."""
    first, second = llm._client.engines
    early = [first.add(request_of(raw(prompt), GREEDY)) for prompt in PROMPTS[:5]]
    aborted = first.add(request_of(raw(PROMPTS[0]), LONG))
    await early[1].get()
    late = [second.add(request_of(raw(prompt), GREEDY)) for prompt in PROMPTS[5:]]
    first.abort([aborted.key])
    return [
        *(await asyncio.gather(*map(read, early[:1] + early[2:]))),
        *(await asyncio.gather(*map(read, late))),
    ]


def cpu_s(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def test_unequal_load_gives_the_tokens_of_a_single_process_and_a_killed_engine_stops_all(
    folder: str,
) -> None:
    with LLM(folder, **SHORT_OF_BLOCKS) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False
        )
        expected = [list(output.outputs[0].token_ids) for output in outputs]

    with LLM(folder, **SHORT_OF_BLOCKS, **COUPLED) as llm:
        processes = llm._client._processes.processes  # type: ignore[attr-defined]
        pids = [process.pid for process in processes.values()]

        found = llm._background.run(uneven(llm))
        time.sleep(0.5)
        before = cpu_s(pids)
        time.sleep(1.0)
        idle_s = cpu_s(pids) - before

        assert found == [expected[0], *expected[2:]]
        assert idle_s < 0.1

        ends, seconds = llm._background.run(kill(llm, pids[1]))

        assert seconds < END_S
        assert all(isinstance(end, EngineDied) for end in ends), ends
        assert {str(end) for end in ends} == {
            "engine 1 has ended, and all engines with it, since they share experts: engine 1 "
            f"(process {pids[1]}) was killed by SIGKILL"
        }
        end_s = time.monotonic() + END_S
        while any(map(alive, pids)):
            assert time.monotonic() < end_s
            time.sleep(0.02)


async def kill(llm: LLM, victim: int) -> tuple[list[Any], float]:
    """The end of requests on both engines when `victim` is killed, and the seconds until then."""
    queues = [engine.add(request_of(raw(PROMPTS[1]), LONG)) for engine in llm._client.engines]
    for queue in queues:
        await queue.get()
    os.kill(victim, 9)
    start = time.monotonic()
    ends = await asyncio.gather(*map(read, queues), return_exceptions=True)
    return ends, time.monotonic() - start


def test_a_killed_worker_of_one_engine_ends_all_engines(folder: str) -> None:
    with LLM(folder, **SHORT_OF_BLOCKS, **COUPLED, tensor_parallel_size=2) as llm:
        processes = llm._client._processes.processes  # type: ignore[attr-defined]
        pids = [process.pid for process in processes.values()]
        workers = [sorted(workers_of(pid)) for pid in pids]
        assert [len(worker) for worker in workers] == [2, 2]

        ends, seconds = llm._background.run(kill(llm, workers[1][1]))

        assert seconds < END_S
        assert {str(end) for end in ends} == {
            "engine 1 has ended, and all engines with it, since they share experts: worker 1 "
            f"(process {workers[1][1]}) was killed by SIGKILL"
        }
        end_s = time.monotonic() + END_S
        while any(map(alive, [*pids, *workers[0], *workers[1]])):
            assert time.monotonic() < end_s
            time.sleep(0.02)


class Stream(threading.Thread):
    """A long completion, with its events."""

    def __init__(self, url: str, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._prompt = prompt
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        body = {**BODY, "prompt": self._prompt, "max_tokens": 1900, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as response:
            self.events += (line for line in response.iter_lines() if line)


def listening(ports: range) -> set[tuple[str, int]]:
    """(address, port) of the sockets that listen on `ports`."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, port = local.split(":")
        if state == "0A" and int(port, 16) in ports:
            octets = bytes.fromhex(address)[::-1]
            found.add((".".join(map(str, octets)), int(port, 16)))
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A" and int(local.split(":")[1], 16) in ports:
            found.add(("IPv6", int(local.split(":")[1], 16)))
    return found


def test_engines_on_two_hosts_share_experts_over_one_address_and_end_together(
    folder: str, tmp_path: Path
) -> None:
    with LLM(folder, device="cpu", dtype="float32", max_model_len=2000) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False
        )
        expected = [output.outputs[0].text for output in outputs]
    address, port = "127.0.0.2", free_port()
    flags = (
        *("--served-model-name=tiny", "--device=cpu", "--dtype=float32", "--num-threads=1"),
        *("--max-model-len=2000", "--max-num-batched-tokens=64", "--max-num-seqs=8"),
        *("-dp", "2", "-dpl", "1", "-dpa", address, "--data-parallel-rpc-port", str(port)),
        "--enable-expert-parallel",
    )
    env = {"GAUDISERVE_DATA_PARALLEL_TOKEN": "0123456789abcdef", "GLOO_SOCKET_IFNAME": "lo"}
    folders = [tmp_path / name for name in ("first", "second")]
    for path in folders:
        path.mkdir()
    with contextlib.ExitStack() as stack:

        def started(log: Path, *more: str) -> LiveServer:
            made = LiveServer(folder, log, *flags, *more, env=env)
            return stack.enter_context(contextlib.closing(made))

        first = started(folders[0] / "log")
        hub = address, port + 3
        end_s = time.monotonic() + 60
        while hub not in listening(range(port, port + 4)):
            assert time.monotonic() < end_s and first.process.poll() is None, first.text()
            time.sleep(0.05)
        # A peer without the token must not replace the engine that has the token.
        foreign = stack.enter_context(socket.create_connection(hub))
        foreign.sendall(b"\xff" * 64)
        second = started(folders[1] / "log", "--data-parallel-start-rank=1")
        first.wait_ready()

        # Ports of an API server, of the ranks' rendezvous, and of the hub.
        assert listening(range(port, port + 4)) == {(address, port + path) for path in (1, 2, 3)}
        body = {**BODY, "prompt": PROMPTS, "max_tokens": 20}
        found = first.ask("/v1/completions", body).json()["choices"]
        assert [choice["text"] for choice in found] == expected
        assert first.ask("/ready").json()["engines"] == "2 of 2"

        family = [*children_of(first.pid), *children_of(second.pid)]
        streams = [Stream(first.url, prompt) for prompt in PROMPTS[:4]]
        while not all(stream.events for stream in streams):
            time.sleep(0.01)
        start = time.monotonic()
        os.kill(second.find("gaudiserve: engine"), signal.SIGKILL)
        for stream in streams:
            stream.join(END_S)

        assert time.monotonic() - start < END_S
        assert all(
            "engine 1 has ended, and all engines with it" in stream.events[-2] for stream in streams
        ), [stream.events[-2:] for stream in streams]
        assert (first.wait_exit(), second.wait_exit()) == (1, 1)
        assert "was killed by SIGKILL" in second.text()
        end_s = time.monotonic() + END_S
        while any(map(alive, family)):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        assert first.leftovers() == second.leftovers() == []


def test_models_without_experts_and_numbers_that_do_not_divide_are_refused(
    folder: str, tmp_path: Path
) -> None:
    dense = str(make_tiny("llama", tmp_path / "llama"))

    with pytest.raises(ConfigError, match="has no experts to distribute over ranks"):
        LLM(dense, **SHORT_OF_BLOCKS, **COUPLED)
    with pytest.raises(ConfigError, match=r"has 4 experts, and 3 \(--data-parallel-size 3 x"):
        LLM(folder, **SHORT_OF_BLOCKS, **{**COUPLED, "data_parallel_size": 3})
