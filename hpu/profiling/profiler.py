"""Profiler: writes Chrome traces (for Perfetto) of steps, and of the operations of launches outside
of steps. Traces of steps read device times only after a step is done: only their start waits for
the device."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from config.errors import ConfigError, RequestFailed, UserError
from config.execution import ExecutionConfig
from config.loading.env import cache_home
from config.whole_files import write_whole
from hpu.backends.base import Backend, Event
from hpu.protocol import PREFILL, START_PROFILE, STOP_PROFILE
from hpu.runner.async_output import AsyncLaunchOutput, AsyncStepOutput
from hpu.runner.counters import phase_name

logger = logging.getLogger(__name__)

MAX_EVENTS = 200_000
"""Number of events at which a trace ends, about 60 MB: four per step, two per launch, two for
deferred sampling."""

OPERATION_RUNS = 3
"""Runs of the traced function; only the last run is traced, as in the vendor's plug-in."""

STEPS, DEVICE, HOST = 1, 2, 3
TRACKS = {STEPS: "steps", DEVICE: "device", HOST: "host"}
"""Thread names in the trace. The spans of STEPS and DEVICE have device times."""

_encode = msgspec.json.Encoder().encode


class Moment(NamedTuple):
    """An event of the device's queue and its host time (perf_counter) in seconds."""

    event: Event
    seconds: float


class NoTrace:
    """A trace that records nothing."""

    is_over = True

    def submitted(self, output: AsyncStepOutput, begun_s: float) -> None:
        """Record a step that was launched from `begun_s` (perf_counter) until now."""

    def sampled_deferred(self, output: AsyncStepOutput, begun_s: float) -> None:
        """Record deferred sampling that was launched from `begun_s` until now."""

    def collected(self, output: AsyncStepOutput, seconds: list[float], begun_s: float) -> None:
        """Record a finished step: device `seconds` per launch, and `begun_s`, when reading of its
        results began. Steps launched before the trace began are left out."""


NO_TRACE = NoTrace()


class Trace(NoTrace):
    """Trace of a range of steps. Events are kept encoded in memory until `end` writes the file.

    The constructor writes an empty trace, so the file is always valid JSON. The trace ends by
    itself when it has at least `max_events` events after a step, or after step `last`. Steps are
    counted from 0 within the trace; steps before `first` are skipped.
    """

    def __init__(
        self,
        path: str,
        device: str,
        begin: Moment,
        *,
        first: int = 0,
        last: int | None = None,
        max_events: int = MAX_EVENTS,
    ) -> None:
        """Raises OSError when the file cannot be written."""
        self.path = path
        self.is_over = False
        self._device = device
        self._begin_s = begin.seconds
        self._anchor = begin
        self._first = first
        self._last = last
        self._max_events = max_events
        self._events: list[bytes] = []
        self._num_steps = 0
        self._submitted: dict[int, tuple[int, float, float]] = {}
        """(number in this trace, start and end of submission in seconds) of each step in flight."""
        self._deferred: dict[int, tuple[float, float]] = {}
        """(start, end) of launching the deferred sampling in seconds, for each step in flight."""
        self._failure: OSError | None = None
        """Why the trace is over and its file has no events."""
        self._write()

    def submitted(self, output: AsyncStepOutput, begun_s: float) -> None:
        if not self.is_over:
            times = (self._num_steps, begun_s, time.perf_counter())
            self._submitted[output.step] = times
            self._num_steps += 1

    def sampled_deferred(self, output: AsyncStepOutput, begun_s: float) -> None:
        if output.step in self._submitted:
            self._deferred[output.step] = begun_s, time.perf_counter()

    def collected(self, output: AsyncStepOutput, seconds: list[float], begun_s: float) -> None:
        submitted = self._submitted.pop(output.step, None)
        deferred = self._deferred.pop(output.step, None)
        if submitted is None or self.is_over:
            return
        number, submit_s, submitted_s = submitted
        if number >= self._first:
            step = {"step": output.step}
            self._span(HOST, "submit", submit_s, submitted_s - submit_s, step)
            if deferred is not None:
                self._span(HOST, "mask", deferred[0], _length(deferred), step)
            self._launches(output, seconds)
            self._span(HOST, "collect", begun_s, time.perf_counter() - begun_s, step)
        if self._last is not None and number >= self._last:
            self.end_quietly(f"step {self._last} was its last")
        elif len(self._events) >= self._max_events:
            self.end_quietly(
                f"it has {len(self._events)} events, at most {self._max_events} are allowed"
            )

    def end(self) -> str:
        """Write the file and stop recording, unless the trace is over; returns the path. Raises
        OSError if the file cannot be written, also if an earlier call could not write it."""
        if not self.is_over:
            self.is_over = True
            try:
                self._write()
            except OSError as error:
                self._failure = error
            self._events.clear()
            self._submitted.clear()
            self._deferred.clear()
        if self._failure:
            raise self._failure
        return self.path

    def end_quietly(self, reason: str) -> None:
        """Call `end`; log an OSError instead of raising it."""
        try:
            logger.info("Wrote the trace %s: %s", self.end(), reason)
        except OSError as error:
            logger.error("The trace %s cannot be written: %s", self.path, error)

    def _launches(self, output: AsyncStepOutput, seconds: list[float]) -> None:
        spans: list[tuple[float, float]] = []
        real = padding = 0
        for launch, device_s in zip(output.launches, seconds, strict=True):
            name, arguments = _described(launch)
            arguments |= {"step": output.step, "device_ms": _milli(device_s)}
            self._span(
                HOST, f"fill {name}", launch.fill_span_s[0], _length(launch.fill_span_s), arguments
            )
            for begin, end in launch.device_spans():
                start_s = self._anchor.seconds + begin.seconds_since(self._anchor.event)
                spans.append((start_s, start_s + end.seconds_since(begin)))
                self._span(DEVICE, name, start_s, end.seconds_since(begin), arguments)
                name = f"sample {name}"
            real += arguments["tokens"]
            padding += arguments["padding"]
        if not spans or output.end is None:
            return
        # Deferred launches ran last, regardless of their index in the plan.
        begin_s, stop_s = min(spans)[0], max(stop for _, stop in spans)
        # Move the anchor to the end of this step: long time differences lose precision.
        elapsed_s = output.end.seconds_since(self._anchor.event)
        self._anchor = Moment(output.end, self._anchor.seconds + elapsed_s)
        arguments = {
            "step": output.step,
            "launches": len(output.launches),
            "tokens": real,
            "padding": padding,
            "host_ms": _milli(output.host_s),
            "device_ms": _milli(sum(seconds)),
        }
        self._span(STEPS, f"step {output.step}", begin_s, stop_s - begin_s, arguments)
        self._add(
            name="tokens",
            ph="C",
            ts=self._micro(begin_s),
            args={"real": real, "padding": padding},
        )

    def _span(self, track: int, name: str, start_s: float, length_s: float, args: Any) -> None:
        micro = round(max(0.0, length_s) * 1e6, 3)
        self._add(name=name, ph="X", ts=self._micro(start_s), dur=micro, tid=track, args=args)

    def _micro(self, moment_s: float) -> float:
        return round((moment_s - self._begin_s) * 1e6, 3)

    def _add(self, **event: Any) -> None:
        self._events.append(_encode({"pid": 0, **event}))

    def _write(self) -> None:
        """Replace the file atomically."""
        head = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": self._device}}]
        for track, name in TRACKS.items():
            head.append(
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
            )
        events = b",\n".join([*map(_encode, head), *self._events])
        content = b'{"displayTimeUnit":"ms","traceEvents":[\n' + events + b"\n]}\n"
        write_whole(self.path, content)


class Profiler:
    """Starts and stops the traces of a worker's steps, at most one at a time, and traces the
    operations of launches outside of steps."""

    def __init__(
        self,
        backend: Backend,
        config: ExecutionConfig,
        cache_dir: str | None,
        *,
        rank: int = 0,
        max_events: int = MAX_EVENTS,
    ) -> None:
        """`rank`: rank of this worker; each rank of several writes a trace file of its own."""
        self.trace: NoTrace = NO_TRACE
        """The trace that records steps."""
        self._backend = backend
        self._config = config
        self._folder = Path(cache_dir or cache_home()) / "traces"
        self._rank = rank
        self._max_events = max_events
        self._num_traces = 0

    def begin_with_server(self) -> None:
        """Begin the configured trace. Raises ConfigError when its file cannot be written."""
        if self._config.profiler is None:
            return
        path = self._path()
        try:
            self._begin(path)
        except OSError as error:
            raise ConfigError(f"the trace cannot be written to {path}: {error}") from None

    def trace_operations(self, run: Callable[[], None]) -> str:
        """Trace the operations of `run` on host and device with torch's profiler; returns the path
        of the file. `run` is called OPERATION_RUNS times and must wait for the device; only the
        last run is traced, the others warm up the profiler. Raises ConfigError if the file cannot
        be written."""
        path = self._path()
        kinds = torch.profiler.ProfilerActivity
        device = getattr(kinds, self._backend.device.type.upper())
        supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch's own
        profiler = torch.profiler.profile(
            activities={kinds.CPU, device} & supported,
            schedule=torch.profiler.schedule(wait=0, warmup=OPERATION_RUNS - 1, active=1, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(path),
        )
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            # Torch does not raise an error for a file that it cannot write.
            Path(path).write_bytes(b"")
            with profiler:
                for _ in range(OPERATION_RUNS):
                    run()
                    profiler.step()
            if Path(path).is_file() and not os.path.getsize(path):
                raise OSError("torch has written no events")
        except OSError as error:
            raise ConfigError(f"the trace cannot be written to {path}: {error}") from None
        return path

    def call(self, name: str) -> str:
        """Handle START_PROFILE or STOP_PROFILE; returns the path of the trace file. Raises
        UserError if a trace is already running (start), no trace has begun since the last stop
        (stop) or `name` is unknown, and RequestFailed if the file cannot be written."""
        try:
            if name == START_PROFILE:
                return self._start()
            if name == STOP_PROFILE:
                return self._stop()
        except OSError as error:
            raise RequestFailed(f"the trace cannot be written: {error.strerror}") from None
        raise UserError(f"a worker's call is {START_PROFILE} or {STOP_PROFILE}, not {name!r}")

    def close(self) -> None:
        """Write the running trace, if any."""
        trace, self.trace = self.trace, NO_TRACE
        if isinstance(trace, Trace) and not trace.is_over:
            trace.end_quietly("the worker stops")

    def _start(self) -> str:
        if not self.trace.is_over:
            raise UserError("a profile is already running", code="profile_running")
        return self._begin(self._default_path())

    def _stop(self) -> str:
        trace, self.trace = self.trace, NO_TRACE
        if not isinstance(trace, Trace):
            raise UserError("no profile is running", code="profile_not_running")
        return trace.end()

    def _begin(self, path: str) -> str:
        now = self._backend.event()
        now.wait()
        moment = Moment(now, time.perf_counter())
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        first, last = self._config.profiled_steps
        self.trace = Trace(
            path, self._backend.name, moment, first=first, last=last, max_events=self._max_events
        )
        self._num_traces += 1
        logger.info("Profiling into %s", path)
        return path

    def _path(self) -> str:
        """Path of the configured trace; ranks above 0 insert `.rankN` before the suffix of a
        configured file."""
        configured = self._config.profiler or "auto"
        if configured == "auto":
            return self._default_path()
        if self._rank == 0:
            return configured
        path = Path(configured)
        return str(path.with_suffix(f".rank{self._rank}{path.suffix}"))

    def _default_path(self) -> str:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return str(self._folder / f"trace-{stamp}-{os.getpid()}-{self._num_traces}.json")


def _described(launch: AsyncLaunchOutput) -> tuple[str, dict[str, Any]]:
    """Name of a launch, such as "decode (8, 1, 64)", and its trace arguments."""
    plan = launch.launch
    assert plan is not None, "a warm-up has no trace"
    batch, query, _ = plan.bucket
    tokens = sum(plan.query_lens) if plan.phase == PREFILL else len(plan.req_indices)
    return f"{phase_name(plan.phase)} {plan.bucket}", {
        "rows": len(plan.req_indices),
        "bucket": plan.bucket,
        "tokens": tokens,
        "padding": batch * query - tokens,
        "host_ms": _milli(_length(launch.fill_span_s)),
    }


def _length(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def _milli(seconds: float) -> float:
    return round(seconds * 1e3, 6)
