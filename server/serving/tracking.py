"""Tracking of a running request: metrics, access-log record, and end."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic

from config.errors import DeadlineExceeded, Overloaded
from config.params.sampling import SamplingParams
from server.generation.outputs import Delta, StreamT
from server.http.access_log import RequestRecord
from server.http.errors import Fault
from server.metrics.requests import RequestMetrics
from server.serving.timeouts import RequestTimeout

GRACE_S = 0.5
"""Extra time for the engine to end a request after its timeout."""


class RequestTracker(Generic[StreamT]):
    """Wrapper of a stream that counts its deltas for metrics.

    `close` may be called at any time and more than once; it aborts unfinished sequences.
    """

    def __init__(
        self,
        stream: StreamT,
        params: SamplingParams | None,
        record: RequestRecord,
        metrics: RequestMetrics,
        trace: "Callable[[RequestTracker[StreamT]], None] | None" = None,
        timeout: RequestTimeout | None = None,
        priority: int = 0,
    ) -> None:
        """`params`: None for a pooling request; `trace`: called when the request has ended."""
        self.stream = stream
        self._params = params
        self.sent_s = time.perf_counter()
        """Time when the request was sent to the engine, in time.perf_counter() seconds."""
        self._trace = trace
        self._num_open = stream.num_sequences
        """Sequences that have not finished."""
        self._record = record
        self._metrics = metrics
        self._cancel_reason: str | None = None
        self._priority = priority
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            # Normally the engine ends the request. This timer is for an engine that is restarting
            # or busy with a long step.
            left_s = timeout.deadline_s - time.perf_counter()
            self._timer = asyncio.get_running_loop().call_later(left_s + GRACE_S, self._expire)
        self._is_expired = False
        self._is_closed = False
        self._has_failed = False
        self._num_counted_tokens = 0
        self._num_tokens: dict[int, int] = {}
        """Choice index -> number of output tokens."""
        self._last_token_s: dict[int, float] = {}
        """Choice index -> time of the latest token."""
        self._first_token_s: float | None = None
        self._finish_reasons: dict[str, None] = {}
        """Finish reasons, as an ordered set."""

    def __aiter__(self) -> "RequestTracker[StreamT]":
        return self

    async def __anext__(self) -> list[Delta]:
        """The next deltas of the stream. Raises the errors of the stream, Overloaded after
        `cancel`, and DeadlineExceeded after the timeout."""
        try:
            deltas = await self.stream.__anext__()
        except StopAsyncIteration:
            if self._is_expired:
                raise self._overdue("the engine had not finished it") from None
            if self._cancel_reason is not None:
                raise Overloaded(
                    self._cancel_reason, retry_after_s=None, type="server_error"
                ) from None
            raise
        except DeadlineExceeded as error:
            raise self._overdue(str(error), has_started=error.has_started) from None
        except Exception:
            self._has_failed = True
            raise
        self._count_deltas(deltas)
        return deltas

    def _expire(self) -> None:
        if not self._is_closed and self._num_open:
            self._is_expired = True
            self.stream.abort()

    def _overdue(self, reached: str, *, has_started: bool | None = None) -> DeadlineExceeded:
        """Count the timeout; returns the error for the client."""
        assert self._timeout is not None, "only a request with a timeout has a deadline"
        self._has_failed = True
        if has_started is None:
            has_started = self._first_token_s is not None
        self._metrics.timed_out(has_started=has_started)
        return self._timeout.error(reached, self._record.seconds)

    def cancel(self, reason: str) -> None:
        """Abort the request; its reader gets Overloaded with `reason`."""
        if not self._is_closed and self._num_open:
            self._cancel_reason = reason
            self.stream.abort()

    def set_error(self, fault: Fault) -> None:
        """Store the error of a stream for its log line."""
        self._record.set_error(fault.status, fault.message, fault.param)

    def close(self) -> None:
        """Abort unfinished sequences, and complete the request's record and metrics."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.stream.abort()
        if self._num_open:
            reason = "error" if self._has_failed else "abort"
            self._metrics.sequence_ended(reason, self._num_open)
            self._finish_reasons[reason] = None
        self._write_record()
        if self._num_tokens or self._num_open < self.stream.num_sequences:
            self._observe_request()
        if self._trace is not None:
            self._trace(self)

    def _count_deltas(self, deltas: list[Delta]) -> None:
        now_s = time.perf_counter()
        metrics = self._metrics
        for delta in deltas:
            index, num_tokens = delta.index, len(delta.token_ids)
            if num_tokens:
                if self._first_token_s is None:
                    self._first_token_s = now_s
                    self._record.ttft_s = now_s - self._record.started_s
                    metrics.time_to_first_token.observe(self._record.ttft_s)
                # Steps that were read together share the time since the last read equally.
                if count := delta.num_merged + (index in self._last_token_s):
                    elapsed_s = now_s - self._last_token_s.get(index, now_s)
                    metrics.inter_token_latency.observe(elapsed_s / count, count)
                self._last_token_s[index] = now_s
                self._num_tokens[index] = self._num_tokens.get(index, 0) + num_tokens
            if delta.finish_reason is not None:
                self._num_open -= 1
                self._finish_reasons[delta.finish_reason] = None
                metrics.sequence_ended(delta.finish_reason)
        num_output_tokens = self.stream.num_output_tokens
        if num_output_tokens > self._num_counted_tokens:
            metrics.generation_tokens.inc(num_output_tokens - self._num_counted_tokens)
            self._num_counted_tokens = num_output_tokens

    def _write_record(self) -> None:
        record = self._record
        record.num_prompt_tokens = self.stream.num_prompt_tokens
        record.num_output_tokens = self.stream.num_output_tokens
        record.finish_reasons = ",".join(self._finish_reasons)

    def _observe_request(self) -> None:
        metrics, stream = self._metrics, self.stream
        metrics.prompt_processed(stream.num_prompt_tokens, stream.num_cached_tokens)
        metrics.e2e_latency.observe(self._record.seconds)
        timing = stream.timing
        metrics.waited(timing.queue_s, self._priority)
        metrics.prefill_time.observe(timing.prefill_s)
        metrics.decode_time.observe(timing.decode_s)
        metrics.inference_time.observe(timing.prefill_s + timing.decode_s)
        metrics.observe_size("request_prompt_tokens", stream.num_prompt_tokens)
        if self._params is None:
            return
        longest = max(self._num_tokens.values(), default=0)
        metrics.observe_size("request_max_num_generation_tokens", longest)
        metrics.observe_size("request_params_n", self._params.n)
        if self._params.max_tokens is not None:
            metrics.observe_size("request_params_max_tokens", self._params.max_tokens)
        for num_tokens in self._num_tokens.values():
            metrics.observe_size("request_generation_tokens", num_tokens)
        if longest > 1 and self._first_token_s is not None:
            seconds = max(self._last_token_s.values()) - self._first_token_s
            # 0 if all tokens arrived together (beam search, or a step that was read late).
            if seconds:
                metrics.time_per_output_token.observe(seconds / (longest - 1))
