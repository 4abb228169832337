"""LaunchResults: transfer of a launch's sampled tokens and log-probabilities to the host.

A device that shares the host's memory needs no transfer (SharedResults). On other devices every
copy has a fixed cost, so LaunchResults starts a single copy for each launch: of its sampled rows
(CopiedResults), or of a table that also has the rows of its prompt log-probabilities
(TableResults).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config.params.sampling import MAX_LOGPROBS
from hpu.backends.base import Backend
from hpu.launch_inputs import Integers, Tokens
from hpu.runner.async_output import (
    AsyncLaunchOutput,
    AsyncPromptLogprobs,
    AsyncStepOutput,
    ForwardOutput,
    PromptTargets,
)
from hpu.sampling.logprobs import TopLogprobs, pack, top_logprobs
from hpu.sampling.ops import SamplerOutput

PROMPT_LOGITS = 1 << 24
"""Maximum number of logits in memory for prompt log-probabilities: 64 MiB in float32."""


class PromptSlice(NamedTuple):
    """Prompt positions of a request whose logits are computed together. The last position is
    repeated where other shapes would have to be compiled."""

    positions: Integers
    """Indices into the flattened (B * Q) tokens of the launch."""
    targets: Tokens
    """The token after each position."""
    num_real: int
    """Number of positions without the repetitions."""


class PromptLogits:
    """Logits of prompt positions, in slices that limit their memory."""

    def __init__(
        self, backend: Backend, logits: Callable[[Tensor], Tensor], vocab_size: int, *, pads: bool
    ) -> None:
        """`logits`: maps (M, hidden) hidden states to (M, V) logits. `pads`: see RunnerParts."""
        self._backend = backend
        self._logits = logits
        self._vocab_size = vocab_size
        self._pads = pads

    def slices(self, forward: ForwardOutput, requested: PromptTargets) -> Iterator[PromptSlice]:
        """Slices of a request's positions."""
        targets = requested.tokens
        most = max(1, min(forward.inputs.tokens.shape[1], PROMPT_LOGITS // self._vocab_size))
        for start in range(0, len(targets), most):
            part = targets[start : start + most]
            width = most if self._pads else len(part)
            columns = np.minimum(np.arange(width), len(part) - 1)
            yield PromptSlice(requested.first + start + columns, part[columns], len(part))

    def at(self, forward: ForwardOutput, positions: Tensor) -> Tensor:
        """(M, V) logits at the (M,) `positions` of a launch."""
        return self._logits(forward.hidden.index_select(0, positions))

    def upload(self, numbers: list[np.ndarray], output: AsyncStepOutput) -> tuple[Tensor, ...]:
        """Upload arrays of equal length in one copy; returns the device tensors."""
        width = len(numbers[0])
        host = self._backend.host_tensor(len(numbers) * width, self._backend.index_dtype)
        np.stack(numbers, out=host.numpy().reshape(len(numbers), width), casting="unsafe")
        output.pinned.append(host)
        (device,) = self._backend.device_copies(host)
        return torch.split(device, width)


class LaunchResults(ABC):
    """Transfer of the results of a launch."""

    @abstractmethod
    def add_sampled(self, sampled: SamplerOutput, done: AsyncLaunchOutput) -> None:
        """Add the sampled tokens and their log-probabilities."""

    @abstractmethod
    def add_prompt(
        self, forward: ForwardOutput, requested: PromptTargets, output: AsyncStepOutput
    ) -> AsyncPromptLogprobs:
        """Compute and add prompt log-probabilities of a request."""

    def finish(self, done: AsyncLaunchOutput) -> None:
        """Start the copies of results that the other methods have not started."""
        return


class SharedResults(LaunchResults):
    """Results on a device that shares the host's memory."""

    def __init__(self, backend: Backend, prompts: PromptLogits) -> None:
        self._backend = backend
        self._prompts = prompts

    def add_sampled(self, sampled: SamplerOutput, done: AsyncLaunchOutput) -> None:
        done.tokens = self._backend.to_host(sampled.tokens)
        if sampled.logprobs is not None:
            done.logprobs = TopLogprobs(*map(self._backend.to_host, sampled.logprobs))

    def add_prompt(
        self, forward: ForwardOutput, requested: PromptTargets, output: AsyncStepOutput
    ) -> AsyncPromptLogprobs:
        found = AsyncPromptLogprobs(requested.req_index, requested.k)
        for part in self._prompts.slices(forward, requested):
            at, targets = self._prompts.upload([part.positions, part.targets], output)
            logits = self._prompts.at(forward, at)
            found.slices.append((part.num_real, top_logprobs(logits, targets, requested.k)))
        return found


class ResultRows:
    """Tokens and log-probabilities packed into rows of float32, see `pack`."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        num_logprobs = min(MAX_LOGPROBS, vocab_size)
        self.width = 2 * num_logprobs + 4

        def prompt(logits: Tensor, targets: Tensor) -> Tensor:
            return pack(targets, top_logprobs(logits, targets, num_logprobs), num_logprobs)

        def sampled(tokens: Tensor, logprobs: TopLogprobs) -> Tensor:
            return pack(tokens, logprobs, num_logprobs)

        def sampled_tokens(tokens: Tensor) -> Tensor:
            return pack(tokens, None, num_logprobs)

        self.of_prompt = backend.compiled(prompt)
        """Maps (M, V) logits and (M,) target tokens to (M, width) rows."""
        self._of_logprobs = backend.compiled(sampled)
        self._of_tokens = backend.compiled(sampled_tokens)

    def of_sampled(self, sampled: SamplerOutput) -> Tensor:
        """(B, width) rows of the sampled tokens."""
        if sampled.logprobs is None:
            return self._of_tokens(sampled.tokens)
        return self._of_logprobs(sampled.tokens, sampled.logprobs)


class CopiedResults(LaunchResults):
    """Results of a launch without prompt log-probabilities, on a device with its own memory."""

    def __init__(self, backend: Backend, rows: ResultRows) -> None:
        self._backend = backend
        self._rows = rows

    def add_sampled(self, sampled: SamplerOutput, done: AsyncLaunchOutput) -> None:
        if sampled.logprobs is None:
            done.tokens = self._backend.to_host(sampled.tokens)
        else:
            done.packed = self._backend.to_host(self._rows.of_sampled(sampled))

    def add_prompt(
        self, forward: ForwardOutput, requested: PromptTargets, output: AsyncStepOutput
    ) -> AsyncPromptLogprobs:
        raise RuntimeError("prompt log-probabilities require TableResults")


class TableResults(LaunchResults):
    """Results of a prefill with prompt log-probabilities, on a device with its own memory: a table
    of (S + B * Q + 1, width) float32 with rows of the sampling requests, rows of all positions, and
    a row for padding. S: see PrefillArrays."""

    def __init__(
        self, backend: Backend, rows: ResultRows, prompts: PromptLogits, forward: ForwardOutput
    ) -> None:
        self._backend = backend
        self._rows = rows
        self._prompts = prompts
        _, batch, query, _ = forward.inputs.bucket
        self._first = len(forward.inputs.req_indices)
        """Index of the row of the launch's first position."""
        num_rows = self._first + batch * query + 1
        with backend.recipe:
            self._table = backend.zeros((num_rows, rows.width), torch.float32)

    def add_sampled(self, sampled: SamplerOutput, done: AsyncLaunchOutput) -> None:
        rows = self._rows.of_sampled(sampled)
        with self._backend.recipe:
            at = torch.arange(len(rows), dtype=self._backend.index_dtype, device=rows.device)
            self._table.index_copy_(0, at, rows)

    def add_prompt(
        self, forward: ForwardOutput, requested: PromptTargets, output: AsyncStepOutput
    ) -> AsyncPromptLogprobs:
        for part in self._prompts.slices(forward, requested):
            is_real = np.arange(len(part.positions)) < part.num_real
            to = np.where(is_real, self._first + part.positions, len(self._table) - 1)
            at, targets, to_at = self._prompts.upload([part.positions, part.targets, to], output)
            with self._backend.recipe:
                logits = self._prompts.at(forward, at)
                self._table.index_copy_(0, to_at, self._rows.of_prompt(logits, targets))
        first = self._first + requested.first
        rows = slice(first, first + len(requested.tokens))
        return AsyncPromptLogprobs(requested.req_index, requested.k, rows=rows)

    def finish(self, done: AsyncLaunchOutput) -> None:
        done.packed = self._backend.to_host(self._table)


ResultsOf = Callable[[ForwardOutput], LaunchResults]
"""Maps a launch before its sampling to the transfer of its results."""


def shared_results(backend: Backend, prompts: PromptLogits, vocab_size: int) -> ResultsOf:
    """Results on a device that shares the host's memory."""
    shared = SharedResults(backend, prompts)
    return lambda forward: shared


def copied_results(backend: Backend, prompts: PromptLogits, vocab_size: int) -> ResultsOf:
    """Results on a device with its own memory."""
    rows = ResultRows(backend, vocab_size)
    copied = CopiedResults(backend, rows)

    def of(forward: ForwardOutput) -> LaunchResults:
        if forward.prompt_targets:
            return TableResults(backend, rows, prompts, forward)
        return copied

    return of
