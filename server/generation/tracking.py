"""A request in the engine while it is served: counted, watched, and always ended. Knows no
bodies."""

import time

from config.errors import Overloaded
from config.params.sampling import SamplingParams
from server.generation.outputs import Delta, Growing
from server.http.access_log import Record
from server.metrics.registry import Metrics


class Serving:
    """Counts a generation into the metrics and the request's record as its deltas pass by.

    `end` is safe at any moment and twice: what has not finished by then was aborted.
    """

    def __init__(
        self,
        generation: Growing,
        params: SamplingParams | None,
        num_sequences: int,
        record: Record,
        metrics: Metrics,
    ) -> None:
        """`params` is None for a request that samples nothing."""
        self.generation = generation
        self._params = params
        self._num_sequences = self._num_open = num_sequences
        self._record = record
        self._metrics = metrics
        self._cut: str | None = None
        self._ended = False
        self._failed = False
        self._num_counted = 0
        self._num_by_choice: dict[int, int] = {}
        self._last_s: dict[int, float] = {}
        self._first_s: float | None = None
        self._reasons: dict[str, None] = {}

    def __aiter__(self) -> "Serving":
        return self

    async def __anext__(self) -> list[Delta]:
        """What the generation gives. Raises what it raises, and Overloaded after a `cut`."""
        try:
            deltas = await self.generation.__anext__()
        except StopAsyncIteration:
            if self._cut is not None:
                raise Overloaded(self._cut, retry_after_s=None, type="server_error") from None
            raise
        except Exception:
            self._failed = True
            raise
        self._observe(deltas)
        return deltas

    def cut(self, why: str) -> None:
        """End it from outside; its reader is told why."""
        if not self._ended and self._num_open:
            self._cut = why
            self.generation.abort()

    def end(self) -> None:
        """Abort what is open, and write the books."""
        if self._ended:
            return
        self._ended = True
        self.generation.abort()
        if self._num_open:
            reason = "error" if self._failed else "abort"
            self._metrics.sequence_ended(reason, self._num_open)
            self._reasons[reason] = None
        self._write_record()
        if self._num_by_choice or self._num_open < self._num_sequences:
            self._observe_request()

    def _observe(self, deltas: list[Delta]) -> None:
        now_s = time.perf_counter()
        metrics = self._metrics
        for delta in deltas:
            index, count = delta.index, len(delta.token_ids)
            if count:
                if self._first_s is None:
                    self._first_s = now_s
                    self._record.ttft_s = now_s - self._record.started_s
                    metrics.time_to_first_token.observe(self._record.ttft_s)
                if (last_s := self._last_s.get(index)) is not None:
                    metrics.inter_token_latency.observe(now_s - last_s)
                self._last_s[index] = now_s
                self._num_by_choice[index] = self._num_by_choice.get(index, 0) + count
            if delta.finish_reason is not None:
                self._num_open -= 1
                self._reasons[delta.finish_reason] = None
                metrics.sequence_ended(delta.finish_reason)
        output = self.generation.num_output_tokens
        if output > self._num_counted:
            metrics.generation_tokens.inc(output - self._num_counted)
            self._num_counted = output

    def _write_record(self) -> None:
        record = self._record
        record.num_prompt_tokens = self.generation.num_prompt_tokens
        record.num_output_tokens = self.generation.num_output_tokens
        record.ending = ",".join(self._reasons)

    def _observe_request(self) -> None:
        """Once for a request that the engine has worked on."""
        metrics, generation = self._metrics, self.generation
        metrics.prompt_read(generation.num_prompt_tokens, generation.num_cached_tokens)
        metrics.e2e_latency.observe(self._record.seconds)
        metrics.queue_time.observe(generation.queue_s)
        metrics.prefill_time.observe(generation.prefill_s)
        metrics.decode_time.observe(generation.decode_s)
        metrics.inference_time.observe(generation.prefill_s + generation.decode_s)
        metrics.observe_size("request_prompt_tokens", generation.num_prompt_tokens)
        if self._params is None:
            return
        longest = max(self._num_by_choice.values(), default=0)
        metrics.observe_size("request_max_num_generation_tokens", longest)
        metrics.observe_size("request_params_n", self._params.n)
        if self._params.max_tokens is not None:
            metrics.observe_size("request_params_max_tokens", self._params.max_tokens)
        for count in self._num_by_choice.values():
            metrics.observe_size("request_generation_tokens", count)
        if longest > 1 and self._first_s is not None:
            seconds = max(self._last_s.values()) - self._first_s
            # Tokens that came all at once (beams, a step that was read late) say nothing of pace.
            if seconds:
                metrics.time_per_output_token.observe(seconds / (longest - 1))
