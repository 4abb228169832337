"""hpu/profiling/profiler.py: traces of real steps on a CPU, and of simulated device times."""

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny
from worker_rig import WorkerRig

from config.errors import ConfigError, RequestFailed, UserError
from config.execution import ExecutionConfig
from hpu.backends.cpu import CpuBackend
from hpu.profiling.profiler import DEVICE, HOST, NO_TRACE, STEPS, Moment, Profiler, Trace
from hpu.protocol import DECODE, PREFILL, START_PROFILE, STOP_PROFILE, Launch
from hpu.runner.async_output import AsyncLaunchOutput, AsyncStepOutput


class PlannedEvent:
    """A device's event at a known time, on the device's own clock."""

    def __init__(self, moment_s: float) -> None:
        self.moment_s = moment_s

    def wait(self) -> None:
        raise AssertionError("a trace must not wait")

    def done(self) -> bool:
        return True

    def seconds_since(self, earlier: "PlannedEvent") -> float:
        return self.moment_s - earlier.moment_s


def events_of(path: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return found


def spans(events: list[dict[str, Any]], track: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == track]


def step_at(number: int, begin_s: float, *launches: Launch) -> tuple[AsyncStepOutput, list[float]]:
    """A step whose launches take 2 ms each, 1 ms apart, starting at `begin_s` on the device's
    clock."""
    pending = AsyncStepOutput(number, host_s=0.0005)
    for index, launch in enumerate(launches):
        start_s = begin_s + 0.003 * index
        pending.launches.append(
            AsyncLaunchOutput(
                launch.req_indices,
                [],
                PlannedEvent(start_s),
                PlannedEvent(start_s + 0.002),
                launch=launch,
            )
        )
    pending.end = PlannedEvent(begin_s + 0.003 * len(launches) - 0.001)
    return pending, [0.002] * len(launches)


def note(trace: Trace, pending: AsyncStepOutput, seconds: list[float]) -> None:
    trace.submitted(pending, 100.0)
    trace.collected(pending, seconds, 100.0)


DECODES = Launch(DECODE, (8, 1, 64), [0, 1, 2, 3, 4, 5])
PROMPTS = Launch(PREFILL, (2, 128, 0), [6, 7], [100, 20], [True, True])


def test_launches_have_their_device_times_and_padding(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "t.json"), "card", Moment(PlannedEvent(7.0), 100.0))

    note(trace, *step_at(4, 7.010, PROMPTS, DECODES))
    note(trace, *step_at(5, 7.020, DECODES))

    events = events_of(trace.end())
    prompts, decodes, last = spans(events, DEVICE)
    assert (prompts["name"], prompts["ts"], prompts["dur"]) == (
        "prefill (2, 128, 0)",
        pytest.approx(10_000),
        pytest.approx(2000),
    )
    assert prompts["args"] == {
        "step": 4,
        "rows": 2,
        "bucket": [2, 128, 0],
        "tokens": 120,
        "padding": 136,
        "host_ms": 0.0,
        "device_ms": 2.0,
    }
    assert (decodes["args"]["tokens"], decodes["args"]["padding"]) == (6, 2)
    assert [item["ts"] for item in (decodes, last)] == [
        pytest.approx(13_000),
        pytest.approx(20_000),
    ]
    first, second = spans(events, STEPS)
    assert (first["name"], first["ts"], first["dur"]) == (
        "step 4",
        pytest.approx(10_000),
        pytest.approx(5000),
    )
    assert first["args"]["padding"] == 138 and second["args"]["launches"] == 1


def test_a_launch_that_waited_for_masks_has_a_gap_within_its_step(
    tmp_path: Path,
) -> None:
    trace = Trace(str(tmp_path / "t.json"), "card", Moment(PlannedEvent(7.0), 100.0))
    pending, seconds = step_at(4, 7.010, DECODES, PROMPTS)
    late = pending.launches[0]
    late.start, late.forward_end = PlannedEvent(7.016), PlannedEvent(7.017)
    late.sampling_start, late.end = PlannedEvent(7.020), PlannedEvent(7.021)
    pending.end = late.end

    trace.submitted(pending, 100.0)
    trace.sampled_deferred(pending, 100.0)
    trace.collected(pending, seconds, 100.0)

    events = events_of(trace.end())
    assert [e["name"] for e in spans(events, HOST) if "fill" not in e["name"]] == [
        "submit",
        "mask",
        "collect",
    ]
    forward, sampling, prompts = ((e["name"], e["ts"], e["dur"]) for e in spans(events, DEVICE))
    assert forward == ("decode (8, 1, 64)", pytest.approx(16_000), pytest.approx(1000))
    assert sampling == ("sample decode (8, 1, 64)", pytest.approx(20_000), pytest.approx(1000))
    assert prompts[1:] == (pytest.approx(13_000), pytest.approx(2000))
    (step,) = spans(events, STEPS)
    assert (step["ts"], step["dur"]) == (pytest.approx(13_000), pytest.approx(8000))


def test_a_trace_stops_when_it_is_full_and_its_file_is_complete(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "t.json"), "card", Moment(PlannedEvent(0.0), 100.0), max_events=12)
    empty = events_of(trace.path)

    for number in range(10):
        note(trace, *step_at(number, 0.01 * number, DECODES))

    assert trace.is_over
    assert [event["ph"] for event in empty] == ["M"] * 4
    assert len(spans(events_of(trace.path), STEPS)) == 2


def test_only_the_requested_steps_are_kept(tmp_path: Path) -> None:
    asked = ExecutionConfig(profiler_steps="1,2").profiled_steps
    trace = Trace(
        str(tmp_path / "t.json"),
        "card",
        Moment(PlannedEvent(0.0), 100.0),
        first=asked[0],
        last=asked[1],
    )

    for number in range(10, 15):
        note(trace, *step_at(number, 0.01 * number, DECODES))

    assert [span["name"] for span in spans(events_of(trace.path), STEPS)] == ["step 11", "step 12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def traced(folder: Path, tmp_path: Path) -> Iterator[WorkerRig]:
    file = str(tmp_path / "new" / "start.json")
    made = WorkerRig(folder, steps=(4, 16, 8), execution=ExecutionConfig(profiler=file))
    yield made
    made.worker.close()


def test_a_stopped_profile_has_every_step_with_a_plan_in_flight(
    traced: WorkerRig, tmp_path: Path
) -> None:
    traced.admit(0, list(range(20, 30)))
    traced.prefill({0: None})
    traced.submit()
    for _ in range(3):
        traced.decode([0])
        traced.submit()
        traced.collect()
    traced.collect()

    traced.worker.close()

    events = events_of(tmp_path / "new" / "start.json")
    assert [span["args"]["step"] for span in spans(events, STEPS)] == [0, 1, 2, 3]
    assert [span["name"] for span in spans(events, DEVICE)][:2] == [
        "prefill (4, 16, 0)",
        "decode (4, 1, 8)",
    ]
    for track in (STEPS, DEVICE):
        times = [(span["ts"], span["ts"] + span["dur"]) for span in spans(events, track)]
        # Times are written with a resolution of a thousandth of a microsecond.
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in pairwise(times))
    assert {span["name"] for span in spans(events, HOST)} >= {"submit", "collect"}


def test_profiles_begin_and_end_on_demand_one_at_a_time(tmp_path: Path) -> None:
    profiler = Profiler(CpuBackend(1), ExecutionConfig(), str(tmp_path))

    with pytest.raises(UserError, match="no profile is running"):
        profiler.call(STOP_PROFILE)
    path = profiler.call(START_PROFILE)
    with pytest.raises(UserError, match="already running"):
        profiler.call(START_PROFILE)
    written = profiler.call(STOP_PROFILE)
    again = profiler.call(START_PROFILE)
    profiler.close()

    assert path == written and Path(path).parent == tmp_path / "traces"
    assert again != path and spans(events_of(again), STEPS) == []
    assert profiler.trace is NO_TRACE


def test_an_unwritable_trace_file_is_reported_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ExecutionConfig(profiler=str(tmp_path / "file" / "trace.json"))

    with pytest.raises(ConfigError, match="cannot be written"):
        Profiler(CpuBackend(1), config, None).begin_with_server()


def test_a_stop_reports_a_trace_that_could_not_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    profiler = Profiler(CpuBackend(1), ExecutionConfig(), str(tmp_path))
    begin = Moment(PlannedEvent(0.0), 0.0)
    profiler.trace = Trace(str(folder / "trace.json"), "cpu", begin, max_events=1)
    # The folder is gone when the trace is full.
    shutil.rmtree(folder)
    folder.write_text("")
    note(profiler.trace, *step_at(0, 10.0, DECODES))

    assert profiler.trace.is_over and "cannot be written" in caplog.text
    with pytest.raises(RequestFailed, match="the trace cannot be written"):
        profiler.call(STOP_PROFILE)
    with pytest.raises(UserError, match="no profile is running"):
        profiler.call(STOP_PROFILE)


def test_operations_are_not_traced_into_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    profiler = Profiler(CpuBackend(1), ExecutionConfig(profiler=str(tmp_path)), None)
    runs: list[int] = []

    with pytest.raises(ConfigError, match="cannot be written"):
        profiler.trace_operations(lambda: runs.append(1))
    assert not runs


def test_operations_without_a_written_trace_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    # The file of an earlier trace must not count as written.
    path.write_text("{}")
    profiler = Profiler(CpuBackend(1), ExecutionConfig(profiler=str(path)), None)
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: None)

    with pytest.raises(ConfigError, match="torch has written no events"):
        profiler.trace_operations(lambda: None)
