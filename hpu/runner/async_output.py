"""Results of a step, while the device computes them and copies them to the host."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu.backends.base import Event
from hpu.launch_inputs import Tokens
from hpu.protocol import Launch, Logprobs, StepResult
from hpu.runner.input_buffers import LaunchInputs
from hpu.runner.sampler_graphs import SamplerGraph
from hpu.sampling.draft_rows import NO_TOKEN
from hpu.sampling.logprobs import TopLogprobs, unpack


@dataclass(frozen=True, slots=True)
class AsyncPromptLogprobs:
    """Prompt log-probabilities of a request's chunk: either `slices` of (number of real positions,
    tensors), or `rows` of the launch's packed result."""

    req_index: int
    k: int
    slices: list[tuple[int, TopLogprobs]] = field(default_factory=list)
    rows: slice | None = None

    def to_message(self, packed: TopLogprobs | None) -> Logprobs:
        """Convert to a protocol message. `packed`: the launch's unpacked result, which is required
        if `rows` is set."""
        if self.rows is not None:
            assert packed is not None, "rows of a packed result"
            return _logprobs(packed, self.rows.start, self.rows.stop, self.k)
        parts = [_logprobs(top, 0, count, self.k) for count, top in self.slices]
        return Logprobs(
            k=parts[0].k,
            ids=memoryview(b"".join(part.ids for part in parts)),
            values=memoryview(b"".join(part.values for part in parts)),
            ranks=memoryview(b"".join(part.ranks for part in parts)),
        )


@dataclass(slots=True)
class AsyncVectors:
    """Pooling results of a launch on the host: `pooled` (B, width), `per_token` (B, Q, hidden)
    float32."""

    pooled: Tensor | None = None
    per_token: Tensor | None = None
    requested: list[tuple[int, int]] = field(default_factory=list)
    """For each text: number of per-token vectors (0: one pooled vector), and number of dimensions
    of each vector (0: all)."""

    def to_messages(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (number of vectors, bytes) for each text; (-1, empty) if a value is not finite. See
        StepResult.vectors."""
        for row, (count, dimensions) in enumerate(self.requested):
            vectors = self.per_token if count else self.pooled
            assert vectors is not None
            part = vectors[row, :count] if count else vectors[row : row + 1]
            part = part[:, : dimensions or part.shape[1]]
            if bool(part.isfinite().all()):
                yield len(part), _bytes(part, "<f4")
            else:
                yield -1, memoryview(b"")


@dataclass(slots=True)
class AsyncLaunchOutput:
    """Results of a launch; `tokens` is (at least len(req_indices),) on the host.

    A device with its own memory copies the sampled tokens and log-probabilities to the host as one
    tensor: either `tokens`, or `packed`, whose first rows belong to the sampling requests. With
    device speculation, the tokens are in `accepted`, and `packed` has the log-probabilities.
    """

    req_indices: list[int]
    num_logprobs: list[int]
    """RequestSampling.num_logprobs of each sampling request; of each token if the host verified
    drafts."""
    start: Event
    end: Event | None = None
    tokens: Tensor | None = None
    logprobs: TopLogprobs | None = None
    packed: Tensor | None = None
    """Output of `pack` on the host."""
    all_tokens: Tensor | None = None
    """(ranks, at least len(req_indices)) on the host: each request's last token as sampled by every
    tensor-parallel rank, if the ranks are compared. (ranks, requests, width) if `accepted` is
    set."""
    prompt_logprobs: list[AsyncPromptLogprobs] = field(default_factory=list)
    vectors: AsyncVectors | None = None
    launch: Launch | None = None
    """Launch of the plan; None in a warm-up."""
    token_counts: list[int] = field(default_factory=list)
    """Tokens per request of a decode that verified drafts; empty for other launches, which sample
    one token per request."""
    next_drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Drafts for the next decode: (index into `req_indices`, tokens). See StepResult.drafts."""
    accepted: Tensor | None = None
    """(at least len(req_indices), 1 + width) on the host, with device speculation: number of
    verified drafts, then accepted tokens, padded with NO_TOKEN. Read in `to_result`."""
    num_next_drafts: int = 0
    """Number of additional columns of `accepted`: drafts for the next decode, padded with
    NO_TOKEN."""
    drafting_next: list[int] = field(default_factory=list)
    """Indices into `req_indices` of the requests whose next drafts are read from these columns."""
    draft_counts: list[int] = field(default_factory=list)
    """Verified drafts per request, from the first column of `accepted`."""
    slot_generations: list[int] = field(default_factory=list)
    """Generation counter of each sampling request's slot at the start of the launch, with device
    speculation."""
    fill_span_s: tuple[float, float] = (0.0, 0.0)
    """Start and end of filling the inputs on the host (perf_counter)."""
    pinned: tuple[Tensor, ...] = ()
    """Host tensors of uploads, kept alive until the launch is done."""
    forward_end: Event | None = None
    """End of the forward pass on the device, if only sampling was deferred."""
    sampling_start: Event | None = None
    """Start of the deferred sampling."""

    def device_spans(self) -> list[tuple[Event, Event]]:
        """(start, end) events of the launch on the device: two spans if only sampling was deferred,
        none before `end` is set."""
        if self.end is None:
            return []
        if self.forward_end is None or self.sampling_start is None:
            return [(self.start, self.end)]
        return [(self.start, self.forward_end), (self.sampling_start, self.end)]


class PromptTargets(NamedTuple):
    """Prompt positions of a request in a launch that need log-probabilities."""

    first: int
    """Index of the request's first token in the flattened (B * Q) tokens."""
    req_index: int
    k: int
    """Number of most likely tokens returned per position."""
    tokens: Tokens
    """(n,) prompt token that follows each of the request's first n positions in this launch."""


class Drafts(NamedTuple):
    """Requests of a decode and their drafts. A request has one row for its last token and one row
    per draft."""

    req_indices: list[int]
    tokens: list[list[int]]
    """Drafts of each request."""

    @property
    def counts(self) -> list[int]:
        """Number of rows of each request."""
        return [1 + len(tokens) for tokens in self.tokens]

    def rows(self, last_tokens: list[int]) -> npt.NDArray[np.int64]:
        """(rows,) input tokens: the last token of each request, followed by its drafts."""
        rows: list[int] = []
        for last, tokens in zip(last_tokens, self.tokens, strict=True):
            rows.append(last)
            rows.extend(tokens)
        return np.array(rows, np.int64)


@dataclass(slots=True)
class ForwardOutput:
    """Output of a launch's forward pass, and the inputs of its sampling."""

    inputs: LaunchInputs
    hidden: Tensor
    """(B * Q, hidden); (B, Q, hidden) for `sampler_graph`, and on a pipeline stage before the last.
    May be overwritten by the next launch."""
    argmax: Tensor | None
    """(B,) greedy tokens (fewer without padding), if all requests are greedy and the model has
    computed them."""
    logits: Tensor | None
    """(B, V), or (S, V) in a merged prefill (fewer rows without padding; more rows with drafts).
    None if no request samples on this stage, or if `argmax` or `sampler_graph` is set."""
    sampler_graph: SamplerGraph | None
    launch: AsyncLaunchOutput
    drafts: Drafts | None = None
    """Drafts verified by a decode, with speculation on the host."""
    prompt_targets: list[PromptTargets] = field(default_factory=list)


@dataclass(slots=True)
class AsyncStepOutput:
    """Results of all launches of a plan. Tensors may be read once `deferred` is empty and `end` is
    done."""

    step: int
    host_s: float
    decode_steps: int = 1
    """See StepPlan.decode_steps."""
    launches: list[AsyncLaunchOutput] = field(default_factory=list)
    """Launches in the plan's order."""
    deferred: list[tuple[int, Launch]] = field(default_factory=list)
    """(index in the plan, launch) of launches that sample once their bitmasks arrive."""
    deferred_forward: ForwardOutput | None = None
    """Output of the forward pass of the first deferred launch."""
    end: Event | None = None
    pinned: list[Tensor] = field(default_factory=list)
    """Host tensors of uploads, kept alive until the step is done."""

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        if self.end is not None:
            self.end.wait()

    def is_done(self) -> bool:
        """Whether no launch is deferred and `wait` would return immediately."""
        return not self.deferred and (self.end is None or self.end.done())

    def to_result(self) -> StepResult:
        """Build the result of a finished step from its launches."""
        result = StepResult(step=self.step, tokens=[])
        counts: list[int] = []
        has_counts = False
        for launch in self.launches:
            first, first_request = len(result.tokens), len(counts)
            tokens, logprobs = launch.tokens, launch.logprobs
            if launch.packed is not None:
                tokens, logprobs = unpack(launch.packed)
            num_tokens = len(launch.req_indices)
            if launch.accepted is not None:
                rows = launch.accepted[:num_tokens].tolist()
                end = launch.accepted.shape[1] - launch.num_next_drafts
                several = [_tokens_of(row[1:end]) for row in rows]
                next_drafts = [(i, _tokens_of(rows[i][end:])) for i in launch.drafting_next]
                launch.next_drafts = [(i, tokens) for i, tokens in next_drafts if tokens]
                launch.draft_counts = [row[0] for row in rows]
                launch.token_counts = [len(output) for output in several]
                tokens = torch.tensor([token for output in several for token in output])
            result.drafts.extend((first_request + i, drafts) for i, drafts in launch.next_drafts)
            if launch.token_counts:
                has_counts = has_counts or max(launch.token_counts) > 1
                num_tokens = sum(launch.token_counts)
                counts.extend(launch.token_counts)
            else:
                counts.extend([1] * num_tokens)
            if tokens is not None:
                result.tokens.extend(tokens[:num_tokens].tolist())
            if logprobs is not None:
                positions: Sequence[int] = range(num_tokens)
                widths = launch.num_logprobs
                if launch.accepted is not None:
                    # Row j * B + i holds token j of request i.
                    batch, counts_here = len(launch.accepted), launch.token_counts
                    positions = [j * batch + i for i, n in enumerate(counts_here) for j in range(n)]
                    widths = np.repeat(widths, counts_here).tolist()
                result.logprobs.extend(
                    (first + i, _logprobs(logprobs, row, row + 1, k))
                    for i, (row, k) in enumerate(zip(positions, widths, strict=False))
                    if k >= 0
                )
            result.prompt_logprobs.extend(
                (p.req_index, p.to_message(logprobs)) for p in launch.prompt_logprobs
            )
            if launch.vectors is not None:
                result.vectors.extend(launch.vectors.to_messages())
            parts = launch.device_spans()
            if parts:
                result.seconds.append(sum(end.seconds_since(begin) for begin, end in parts))
        if has_counts:
            result.token_counts = counts
        if self.decode_steps > 1:
            self._join_rounds(result)
        return result

    @property
    def req_indices(self) -> list[int]:
        """Sampling requests, in the order of StepResult.token_counts."""
        indices = [index for launch in self.launches for index in launch.req_indices]
        return list(dict.fromkeys(indices)) if self.decode_steps > 1 else indices

    def _join_rounds(self, result: StepResult) -> None:
        """Group the tokens by request; before, they are in launch order."""
        places: dict[int, list[int]] = {}
        indices = itertools.chain.from_iterable(launch.req_indices for launch in self.launches)
        for place, req_index in enumerate(indices):
            places.setdefault(req_index, []).append(place)
        order = list(itertools.chain.from_iterable(places.values()))
        result.tokens = [result.tokens[place] for place in order]
        result.token_counts = [len(several) for several in places.values()]
        if result.logprobs:
            by_place = dict(result.logprobs)
            result.logprobs = [
                (index, by_place[place]) for index, place in enumerate(order) if place in by_place
            ]


def _tokens_of(row: list[int]) -> list[int]:
    return [token for token in row if token != NO_TOKEN]


def _logprobs(top: TopLogprobs, start: int, end: int, k: int) -> Logprobs:
    k = min(k, top.k)
    return Logprobs(
        k=k,
        ids=_bytes(top.ids[start:end, : k + 1], "<i4"),
        values=_bytes(top.values[start:end, : k + 1], "<f4"),
        ranks=_bytes(top.ranks[start:end], "<i4"),
    )


def _bytes(tensor: Tensor, dtype: str) -> memoryview:
    array = np.ascontiguousarray(tensor.numpy(), dtype=np.dtype(dtype))
    return memoryview(array.tobytes())
