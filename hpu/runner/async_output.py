"""AsyncStepOutput: what a step left on its way to the host, and how it becomes a StepResult; and
what
waits in it for masks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hpu.backends.base import Event
from hpu.protocol import Launch, Logprobs, StepResult
from hpu.runner.batch_state import Tokens
from hpu.runner.input_buffers import InputBuffers


@dataclass(slots=True)
class AsyncLogprobs:
    """Host tensors of some positions: ids and values (positions, k + 1), ranks (positions,)."""

    k: int
    ids: Tensor
    values: Tensor
    ranks: Tensor

    def part(self, start: int, end: int, k: int) -> Logprobs:
        """Positions start .. end - 1 with their `k` most likely tokens, at most our own k."""
        k = min(k, self.k)
        return Logprobs(
            k=k,
            ids=_bytes(self.ids[start:end, : k + 1], "<i4"),
            values=_bytes(self.values[start:end, : k + 1], "<f4"),
            ranks=_bytes(self.ranks[start:end], "<i4"),
        )


@dataclass(frozen=True, slots=True)
class AsyncPromptLogprobs:
    """Prompt log-probabilities of one row's chunk, in slices of (real positions, tensors)."""

    row: int
    k: int
    slices: list[tuple[int, AsyncLogprobs]]

    def message(self) -> Logprobs:
        parts = [logprobs.part(0, count, self.k) for count, logprobs in self.slices]
        return Logprobs(
            k=parts[0].k,
            ids=memoryview(b"".join(part.ids for part in parts)),
            values=memoryview(b"".join(part.values for part in parts)),
            ranks=memoryview(b"".join(part.ranks for part in parts)),
        )


@dataclass(slots=True)
class AsyncVectors:
    """A launch of texts: `whole` (B, width) and `by_token` (B, Q, hidden), float32 on the host."""

    whole: Tensor | None = None
    by_token: Tensor | None = None
    wanted: list[tuple[int, int]] = field(default_factory=list)
    """Of each text: tokens whose own vectors are wanted, 0 for the one of all; and how many
    numbers of a vector, 0 for all."""

    def messages(self) -> Iterator[tuple[int, memoryview]]:
        """As in StepResult.vectors."""
        for row, (count, dimensions) in enumerate(self.wanted):
            found = self.by_token if count else self.whole
            assert found is not None
            part = found[row, :count] if count else found[row : row + 1]
            part = part[:, : dimensions or part.shape[1]]
            if bool(part.isfinite().all()):
                yield len(part), _bytes(part, "<f4")
            else:
                yield -1, memoryview(b"")


@dataclass(slots=True)
class AsyncLaunchOutput:
    """One launch: its sampling rows, and their tokens (at least len(rows),) on the host."""

    rows: list[int]
    num_logprobs: list[int]
    start: Event
    end: Event | None = None
    tokens: Tensor | None = None
    logprobs: AsyncLogprobs | None = None
    prompts: list[AsyncPromptLogprobs] = field(default_factory=list)
    vectors: AsyncVectors | None = None
    launch: Launch | None = None
    """What was asked; None in a warm-up."""
    filled: tuple[float, float] = (0.0, 0.0)
    """When the host began and ended to fill its inputs."""
    kept: tuple[Tensor, ...] = ()
    """Host tensors of sampling that uploads still read."""
    paused: Event | None = None
    """Where the device had run it forward, if its sampling had to wait for masks."""
    resumed: Event | None = None
    """Where the device was given the sampling then."""

    def parts(self) -> list[tuple[Event, Event]]:
        """Beginning and end of what the device did for a launch that is done: apart where sampling
        had to wait. Nothing in a warm-up."""
        if self.end is None:
            return []
        if self.paused is None or self.resumed is None:
            return [(self.start, self.end)]
        return [(self.start, self.paused), (self.resumed, self.end)]


@dataclass(slots=True)
class Forward:
    """A launch that was run forward, and what it takes to sample it."""

    inputs: InputBuffers
    hidden: Tensor
    """(B * Q, hidden); the next launch may overwrite it."""
    best: Tensor | None
    """(B,) tokens of the largest logits, or less where nothing is padded, if these are all that
    the sampling rows take."""
    logits: Tensor | None
    """(B, V), or less; None where nobody samples, or there is `best`."""
    launch: AsyncLaunchOutput
    targets: list[tuple[int, Tokens]] = field(default_factory=list)
    """(place in the launch, following prompt tokens) of rows that asked for their prompt's
    log-probabilities."""


@dataclass(slots=True)
class AsyncStepOutput:
    """All launches of one plan. Its tensors may be read once it lacks nothing and `end` is done."""

    step: int
    host_s: float
    launches: list[AsyncLaunchOutput] = field(default_factory=list)
    """In the plan's order."""
    late: list[tuple[int, Launch]] = field(default_factory=list)
    """Launches that sample when their masks come, with their places in the plan."""
    held: Forward | None = None
    """The first of those: run forward."""
    end: Event | None = None
    kept: list[Tensor] = field(default_factory=list)
    """Host tensors that uploads still read."""

    def wait(self) -> None:
        """Block until the device is done with the step."""
        if self.end is not None:
            self.end.wait()

    def is_done(self) -> bool:
        """Whether it is."""
        return not self.late and (self.end is None or self.end.done())

    def result(self) -> StepResult:
        """Gather the columns of a step that is done."""
        result = StepResult(step=self.step, tokens=[])
        for launch in self.launches:
            first = len(result.tokens)
            if launch.tokens is not None:
                result.tokens.extend(launch.tokens[: len(launch.rows)].tolist())
            if launch.logprobs is not None:
                result.logprobs.extend(
                    (first + i, launch.logprobs.part(i, i + 1, k))
                    for i, k in enumerate(launch.num_logprobs)
                    if k >= 0
                )
            result.prompt_logprobs.extend((p.row, p.message()) for p in launch.prompts)
            if launch.vectors is not None:
                result.vectors.extend(launch.vectors.messages())
            parts = launch.parts()
            if parts:
                result.seconds.append(sum(end.seconds_since(begin) for begin, end in parts))
        return result


def _bytes(tensor: Tensor, dtype: str) -> memoryview:
    array = np.ascontiguousarray(tensor.numpy(), dtype=np.dtype(dtype))
    return memoryview(array.tobytes())
