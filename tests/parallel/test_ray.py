"""A real Ray cluster of two nodes on this machine: the ranks of a model run on both nodes; the loss
of a node ends the engine at once with an error and leaves no process."""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from live import ROOT
from tiny_models import make_tiny
from waits import WAIT_S

from gaudiserve import LLM, SamplingParams

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

MARK = "GAUDI_TEST_CLUSTER"
PROMPT = {"prompt_token_ids": list(range(10, 31))}
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 8192, "block_size": 16}

SCRIPT = """
import faulthandler; faulthandler.dump_traceback_later(90, exit=True)
import json, os, sys, threading, time
from ray.cluster_utils import Cluster
import ray
from gaudiserve import LLM, SamplingParams

folder, settings, prompt, greedy = json.loads(sys.argv[1])
size = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
cluster.add_node(**size)
cluster.wait_for_nodes()
os.environ["RAY_ADDRESS"] = cluster.address
found = {}
try:
    llm = LLM(folder, **settings, tensor_parallel_size=4, distributed_executor_backend="ray")
except Exception as error:
    found["too_many"] = str(error)
settings = {**settings, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
with LLM(folder, **settings) as llm:
    (output,) = llm.generate([prompt], SamplingParams(**greedy), use_tqdm=False)
    found["tokens"] = list(output.outputs[0].token_ids)
    own = ray.get_runtime_context().get_node_id()
    killed = []

    def kill():
        (victim,) = [node for node in cluster.list_all_nodes() if node.node_id != own]
        killed.append(time.time())
        cluster.remove_node(victim, allow_graceful=False)

    threading.Timer(1, kill).start()
    try:
        llm.generate([prompt], SamplingParams(**{**greedy, "max_tokens": 8000}), use_tqdm=False)
    except Exception as error:
        found["error"] = str(error)
        found["seconds"] = time.time() - killed[0]
cluster.shutdown()
print(json.dumps(found), flush=True)
"""

ENDS = """
import faulthandler; faulthandler.dump_traceback_later(90, exit=True)
import queue, time
import ray
from engine.executors.ray import ActorLocation, RayWorker

ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)

@ray.remote(num_cpus=0, max_concurrency=2)
class Actor:
    def __init__(self, seconds):
        self.seconds = seconds
    def start(self, name, orders, card):
        return 17
    def wait(self):
        time.sleep(self.seconds)
        return -9
    def stop(self):
        pass

ends = queue.Queue()
for seconds in (0, 60):
    actor = Actor.remote(seconds)
    worker = RayWorker("worker 1", actor, ActorLocation("n", "host", None), None, ends.put)
    if seconds:
        ray.kill(actor)
    print(ends.get(timeout=60).description, flush=True)
"""


def marked(mark: str) -> list[str]:
    """The command of each process whose environment has `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
    return found


def test_two_nodes_give_the_tokens_of_a_single_process_and_a_lost_node_ends_the_engine(
    tmp_path: Path,
) -> None:
    folder = str(make_tiny("llama", tmp_path, num_hidden_layers=2, max_position_embeddings=8192))
    with LLM(folder, **CPU) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(**GREEDY), use_tqdm=False)
    mark = uuid.uuid4().hex
    paths = [str(ROOT), *(path for path in [os.environ.get("PYTHONPATH", "")] if path)]

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([folder, CPU, PROMPT, GREEDY])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), MARK: mark},
        capture_output=True,
        text=True,
        timeout=140,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["too_many"] == "4 workers need 4 CPU, the Ray cluster has 2"
    assert found["tokens"] == list(output.outputs[0].token_ids)
    assert found["error"].startswith("worker 1 (process ") and " is lost: " in found["error"]
    assert found["seconds"] < 5
    deadline = time.monotonic() + WAIT_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(mark) == []


def test_a_killed_worker_is_not_reported_as_lost() -> None:
    paths = [str(ROOT), *(path for path in [os.environ.get("PYTHONPATH", "")] if path)]

    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    killed, lost = done.stdout.splitlines()
    assert killed == "worker 1 (process 17 on host) was killed by SIGKILL"
    assert lost.startswith("worker 1 (process 17 on host) is lost: its Ray node or the actor that ")
    assert "has ended (The actor died" in lost
