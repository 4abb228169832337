"""The engine loop with a null device that times the engine from a result to the next plan."""

import gc
import resource
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.null_device import NullDevice
from config.buckets import BucketConfig
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.core.loop import EngineLoop, make_table
from engine.kv_cache.prefix_hashes import block_hashes
from engine.transport.messages import AddRequest, FromEngine, StepOutput
from hpu.protocol import FromWorker, StepPlan, StepResult

BUDGET = 8192
"""Token budget of a step, as on a card."""
PREFILL_STEPS = 64
"""Prefill steps of a long context; its token budget is raised so that this number suffices."""
WAITING_TOKENS = 64
WARM_STEPS = 32

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromWorker).decode


class Measured(Exception):
    """Raised to end the loop after enough steps."""


@dataclass
class Times:
    """Seconds of each measured step, from the arrival of a result until the next plan is encoded:
    wall time, and CPU time of the engine's thread."""

    wall: MutableSequence[float] = field(default_factory=lambda: array("d"))
    cpu: MutableSequence[float] = field(default_factory=lambda: array("d"))


class Watched(NullDevice):
    """A device that finishes only when it has its next plan. Every plan is encoded and every result
    decoded, as between processes.

    Measures `num_steps` steps for which `counts` returns true, after `WARM_STEPS` such steps.
    """

    def __init__(
        self, config: EngineConfig, num_steps: int, counts: Callable[[StepPlan], bool]
    ) -> None:
        super().__init__(config)
        self.times = Times()
        self._left = num_steps
        self._warm_left = WARM_STEPS
        self._counts = counts
        self._since: tuple[float, float] | None = None

    def submit(self, plan: StepPlan) -> None:
        encode(plan)
        if self._counts(plan):
            self._take_time()
        super().submit(plan)

    def _take_time(self) -> None:
        if self._warm_left:
            self._warm_left -= 1
        elif self._since is not None:
            self.times.wall.append(time.perf_counter() - self._since[0])
            self.times.cpu.append(time.thread_time() - self._since[1])
            self._left -= 1
            if not self._left:
                raise Measured

    def has_result(self) -> bool:
        return False

    def collect(self) -> StepResult:
        frame = encode(super().collect())
        self._since = (time.perf_counter(), time.thread_time())
        result = _decode(frame)
        assert isinstance(result, StepResult)
        return result


def make_config(
    num_rows: int,
    longest: int,
    *,
    block_size: int = 128,
    strategy: str = "exponential",
    num_scheduler_steps: int = 1,
) -> EngineConfig:
    """Engine config for `num_rows` requests of `longest` tokens, with 2 % spare KV cache."""
    num_blocks = int(1.02 * num_rows * -(-longest // block_size)) + 2
    return EngineConfig(
        model="none",
        max_model_len=longest,
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(BUDGET, num_rows * longest // PREFILL_STEPS),
            max_queue_len=1_000_000,
            num_scheduler_steps=num_scheduler_steps,
        ),
        buckets=BucketConfig(strategy=strategy),
    )


def prompts(lengths: Iterable[int], *, max_tokens: int, first_key: int = 0) -> Iterator[AddRequest]:
    """Requests without shared prefixes or end tokens; their prompts share memory."""
    lengths = list(lengths)
    whole = memoryview(bytes(4 * max(lengths, default=0)))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for key, length in enumerate(lengths, first_key):
        yield AddRequest(key, whole[: 4 * length], params, cache_salt=str(key))


def spread(count: int, length: int, block_size: int) -> list[int]:
    """`count` lengths from `length` on, so that requests fill their blocks at different steps."""
    return [length + 37 * i % block_size for i in range(count)]


def run(
    config: EngineConfig,
    device: NullDevice,
    requests: Iterable[AddRequest],
    on_tokens: Callable[[EngineLoop, StepOutput], None] = lambda loop, tokens: None,
) -> None:
    """Serve `requests` with the loop of an engine process until the device has measured enough.

    Messages to the API server are encoded on the measured thread, as in that process.
    """

    def emit(front_end: int | None, message: FromEngine) -> None:
        encode(message)
        if isinstance(message, StepOutput):
            on_tokens(loop, message)

    loop = EngineLoop(config, emit, num_front_ends=1)
    loop._block_size = config.cache.block_size
    for request in requests:
        loop.receive(0, request)
    try:
        loop.run(device, freeze_garbage=True)
    except Measured:
        pass
    finally:
        gc.unfreeze()


def watch_decodes(
    num_rows: int, num_waiting: int, context: int, num_steps: int, *, decodes: int = 1
) -> Times:
    """Times of steps in which all requests decode, `decodes` times each, with at least `context`
    tokens."""
    num_tokens = num_steps * decodes
    config = make_config(num_rows, context + num_tokens + 1024, num_scheduler_steps=decodes)
    block_size = config.cache.block_size or 0
    device = Watched(config, num_steps, lambda plan: len(plan.launches[0].req_indices) == num_rows)
    lengths = spread(num_rows, context, block_size) + [WAITING_TOKENS] * num_waiting
    run(config, device, prompts(lengths, max_tokens=num_tokens + 512))
    return device.times


@dataclass
class Admission:
    """CPU seconds of the engine's thread to queue all requests (from the first frame on) and to
    abort all of them."""

    queue_s: float
    abort_s: float


def watch_admission(num_requests: int, num_tokens: int) -> Admission:
    """Decode, hash and queue `num_requests` requests, then abort all of them, running and
    waiting."""
    config = make_config(256, num_tokens + 512)
    device = NullDevice(config)
    ready = device.start(lambda progress: None)
    core = build_core(config, device, ready, make_table(config, ready), time.monotonic)
    frames = [encode(prompt) for prompt in prompts([num_tokens] * num_requests, max_tokens=500)]
    take = msgspec.msgpack.Decoder(AddRequest).decode
    start = time.thread_time()
    for frame in frames:
        request = take(frame)
        core.add_request(
            request, block_hashes(request.prompt, ready.block_size, request.cache_salt)
        )
    queue_s = time.thread_time() - start
    while core.stats().running < config.scheduler.max_num_seqs:
        core.step()
    assert core.num_requests == num_requests, f"{core.num_requests} of {num_requests} are in line"
    start = time.thread_time()
    core.abort(range(num_requests))
    abort_s = time.thread_time() - start
    assert core.num_requests == 0, f"{core.num_requests} are left"
    return Admission(queue_s, abort_s)


@dataclass
class Growth:
    """CPU time of a step early and late in a long run, and memory growth in bytes."""

    early_s: float
    late_s: float
    resident: int


def watch_growth(num_steps: int, num_rows: int = 8) -> Growth:
    """A run of `num_steps` steps in which requests arrive and finish: medians of the first and last
    tenth, and the growth of resident memory since the end of the first tenth."""
    config = make_config(num_rows, 256, block_size=16)
    tenth = num_steps // 10
    device = Watched(config, num_steps, lambda plan: True)
    lengths = [32 + 11 * index % 61 for index in range(97)]
    resident: list[int] = []
    made = num_rows

    def refill(loop: EngineLoop, tokens: StepOutput) -> None:
        nonlocal made
        if not resident and len(device.times.cpu) >= tenth:
            resident.append(_resident())
        for _ in tokens.finished:
            for request in prompts([lengths[made % 97]], max_tokens=made % 59 + 5, first_key=made):
                loop.receive(0, request)
            made += 1

    run(config, device, prompts(lengths[:num_rows], max_tokens=40), refill)
    cpu = device.times.cpu
    held = 2 * 8 * (num_steps - tenth)
    return Growth(median(cpu[:tenth]), median(cpu[-tenth:]), _resident() - resident[0] - held)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
