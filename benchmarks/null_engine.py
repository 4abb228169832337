"""An engine process without a model: the real engine with a simulated device that repeats one
sentence. Also starts the server with it, to measure the API server alone.

    python benchmarks/null_engine.py --step-ms 5 -- --port 8000 --max-num-seqs 256
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizers import Tokenizer

from benchmarks.null_device import NullDevice, empty_ready
from config.engine import EngineConfig
from config.model.read_config import read_model_config
from engine.client.launcher import EngineProcesses
from engine.core.engine_process import run
from engine.executors.base import Executor
from engine.process.child_process import read_orders
from engine.process.engine_orders import EngineOrders
from hpu.protocol import SINGLE_RANK, BucketLimits, Ranks
from server.cli import main as cli
from server.process import supervisor

BLOCK_SIZE = 128
MAX_MODEL_LEN = 131_072
SENTENCE = (
    " The miller's youngest daughter, who had never seen the sea, walked for three days along the"
    " river and asked everyone she met how much further it could possibly be to the harbour."
)


def make_null_executor(
    step_s: float,
    config: EngineConfig,
    directory: str,
    on_death: Callable[[str], None],
    ranks: Ranks = SINGLE_RANK,
) -> Executor:
    """Executor factory, as in engine.executors.select: a NullDevice with the model's vocabulary and
    blocks for 256 requests of 512 tokens plus one full context."""
    model_config = read_model_config(config.model)
    num_blocks = (256 * 512 + MAX_MODEL_LEN) // BLOCK_SIZE
    longest, schedule = config.max_model_len or MAX_MODEL_LEN, config.scheduler
    limits = BucketLimits(
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.token_budget(),
        max_prefill_batch=schedule.prefill_batch(),
        num_blocks=num_blocks,
        prefix_caching=config.cache.enable_prefix_caching,
    )
    ready = empty_ready(limits, model_config.vocab_size, model_config.eos_token_ids, [])
    tokenizer = Tokenizer.from_file(str(Path(config.model, "tokenizer.json")))
    tokens = tokenizer.encode(SENTENCE, add_special_tokens=False).ids
    return NullDevice(config, step_s, tokens=tokens, ready=ready)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--engine", action="store_true", help="run as the engine process")
    parser.add_argument("flags", nargs="*", help="flags of `gaudiserve serve`, after --")
    arguments = parser.parse_args()
    if arguments.engine:
        return run(read_orders(EngineOrders), partial(make_null_executor, arguments.step_ms / 1e3))
    # Start the server, unchanged except for the command that starts its engine.
    command = [sys.executable, __file__, "--engine", f"--step-ms={arguments.step_ms}"]
    started = partial(EngineProcesses, command=command)
    supervisor.EngineProcesses = started  # type: ignore[attr-defined,assignment] # replaced
    return cli.main(["serve", *arguments.flags])


if __name__ == "__main__":
    sys.exit(main())
