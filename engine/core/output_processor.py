"""OutputProcessor: turns step results into tokens, finished requests and front-end messages."""

from bisect import bisect_right
from itertools import accumulate, repeat

import msgspec

from config.params.token_ids import num_ids
from engine.kv_cache.manager import KVCacheManager
from engine.request import FINISHED, Request
from engine.scheduling.grammar_matching import GrammarMatching
from engine.scheduling.scheduler import SchedulerOutput
from engine.transport.messages import FRONT_END_SHIFT, EngineStats, Finish, StepOutput
from hpu.protocol import Logprobs, StepResult


class OutputProcessor:
    """Appends sampled tokens to requests, and collects the messages to front ends."""

    def __init__(self, kv: KVCacheManager, matching: GrammarMatching) -> None:
        self._kv = kv
        self._matching = matching
        self._step = -1
        self._messages: dict[int, StepOutput] = {}
        self._guided: list[Request] = []
        """Requests of the step whose new tokens have to be matched with a grammar."""
        self.num_step_tokens = 0
        """Tokens of the latest step as vLLM counts them: generated tokens plus the computed tokens
        of each prompt that the step completed."""

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def start(self, request: Request, num_cached: int, now: float) -> None:
        """Report a request's first scheduling, with `num_cached` tokens from the prefix cache."""
        request.started_at = now
        message = self._message(request.front_end)
        message.started.append(request.key)
        message.started_cached.append(num_cached)

    def reject(
        self, key: int, error: str, param: str | None = None, *, is_retryable: bool = False
    ) -> None:
        """Send the Finish of a request that was not accepted."""
        finish = Finish(key, "error", error=error, param=param, is_retryable=is_retryable)
        self._message(key >> FRONT_END_SHIFT).finished.append(finish)

    def finish(
        self, request: Request, reason: str, now: float, *, stop_token: int | None = None
    ) -> None:
        """Send the Finish of a request that stopped or reached its length limit. It is the last
        message about the request."""
        self._send_finish(request, Finish(request.key, reason, stop_token=stop_token), now)

    def fail(
        self,
        request: Request,
        error: str | None,
        now: float,
        *,
        param: str | None = None,
        is_retryable: bool = False,
        is_timeout: bool = False,
    ) -> None:
        """Send the Finish of a request that failed. It is the last message about the request."""
        finish = Finish(
            request.key,
            "error",
            error=error,
            param=param,
            is_retryable=is_retryable,
            is_timeout=is_timeout,
        )
        self._send_finish(request, finish, now)

    def _send_finish(self, request: Request, finish: Finish, now: float) -> None:
        started = request.started_at if request.started_at >= 0 else now
        first = request.first_token_at if request.first_token_at >= 0 else now
        finish.queue_s = started - request.arrived_at
        finish.prefill_s = first - started
        finish.decode_s = now - first
        finish.num_preemptions = request.num_preemptions
        self._message(request.front_end).finished.append(finish)

    def process(self, output: SchedulerOutput, result: StepResult, now: float) -> list[Request]:
        """Process the result of a plan. Returns the requests that it finished; their Finish is
        queued. `GrammarMatching.take_behind` then returns the requests with unmatched tokens.

        Drops tokens of requests that have already finished: their last step was planned before
        their end was known.
        """
        assert result.step == output.step, f"result {result.step} for plan {output.step}"
        self._step = result.step
        self.num_step_tokens = -self._num_unsent_tokens()
        finished = self._finished_by(output, result, now)
        if self._guided:
            finished += self._match(now)
        self.num_step_tokens += self._num_unsent_tokens()
        return finished

    def _num_unsent_tokens(self) -> int:
        return sum(len(message.tokens) for message in self._messages.values())

    def _finished_by(
        self, output: SchedulerOutput, result: StepResult, now: float
    ) -> list[Request]:
        if output.plan is not None and output.plan.texts:
            return self._process_vectors(output, result, now)
        decodes = output.decodes
        sampling = [chunk.request for chunk in output.prefills if chunk.samples]
        num_requests = len(decodes) + len(sampling)
        num_results = len(result.token_counts) or len(result.tokens)
        assert num_results == num_requests, f"{num_results} results for {num_requests} requests"
        if result.logprobs:
            self._send_logprobs([*decodes, *sampling], result)
        if result.prompt_logprobs:
            self._send_prompt_logprobs(output, result.prompt_logprobs)
        if output.prefills:
            self._finish_chunks(output, now)
        for index, drafts in result.drafts:
            request = decodes[index] if index < len(decodes) else sampling[index - len(decodes)]
            request.drafts = drafts
        if result.token_counts:
            # For a decode with drafts, the scheduler counted only one computed token.
            has_drafts = not output.decode_counts
            return self._append_several([*decodes, *sampling], result, now, has_drafts=has_drafts)
        finished = self._append_tokens(decodes, result.tokens[: len(decodes)], now)
        if sampling:
            finished += self._append_tokens(sampling, result.tokens[len(decodes) :], now)
        return finished

    def _process_vectors(
        self, output: SchedulerOutput, result: StepResult, now: float
    ) -> list[Request]:
        """Finish the pooling requests of a step; a pooling request takes a single step."""
        finished = []
        for chunk, (num_rows, data) in zip(output.prefills, result.vectors, strict=True):
            request = chunk.request
            if request.state == FINISHED:
                continue
            self._complete_prompt(request, now)
            finished.append(request)
            if num_rows < 0:
                self.fail(request, "the model's output vectors were NaN or infinite", now)
                continue
            message = self._message(request.front_end)
            message.vectors.append((request.key, num_rows, data))
            self.finish(request, "stop", now)
        return finished

    def _finish_chunks(self, output: SchedulerOutput, now: float) -> None:
        """Count the tokens of prefill chunks as collected. The blocks of a sampling chunk are
        cached later, with its token: non-finite logits make the computed KV unusable."""
        for request, num_tokens, _, samples in output.prefills:
            request.num_cached_tokens += num_tokens
            if samples:
                if request.first_token_at < 0:
                    self._complete_prompt(request, now)
            elif request.state != FINISHED:
                self._kv.cache_blocks(request, request.num_cached_tokens)

    def _complete_prompt(self, request: Request, now: float) -> None:
        request.first_token_at = now
        self.num_step_tokens += max(request.num_prompt_tokens - request.num_prefix_tokens, 0)

    def _append_tokens(
        self, requests: list[Request], tokens: list[int], now: float
    ) -> list[Request]:
        """Append one token to each request. Hot path: in a step with one token per request, no
        other loop visits every token."""
        finished = []
        front_end = -1
        for request, token in zip(requests, tokens, strict=True):
            if request.state == FINISHED:
                continue
            if token < 0:
                self._fail_without_token(request, now)
                finished.append(request)
                continue
            num_tokens = request.num_tokens
            if num_tokens >= request.next_cache_at:
                self._kv.cache_blocks(request, num_tokens)
            if num_tokens >= request.max_num_tokens:  # only prompt log-probabilities were requested
                self.finish(request, "length", now)
                finished.append(request)
                continue
            if request.front_end != front_end:
                front_end = request.front_end
                message = self._message(front_end)
                add_key, add_token = message.keys.append, message.tokens.append
            add_key(request.key)
            add_token(token)
            request.output_token_ids.append(token)
            request.num_tokens = num_tokens + 1
            if token in request.end_ids and num_tokens >= request.min_num_tokens:
                stop_token = token if token in request.stop_ids else None
                self.finish(request, "stop", now, stop_token=stop_token)
                finished.append(request)
            elif num_tokens + 1 >= request.max_num_tokens:
                self.finish(request, "length", now)
                finished.append(request)
            elif request.guide is not None:
                self._guided.append(request)
        return finished

    def _match(self, now: float) -> list[Request]:
        """Match the new tokens of the step's requests with their grammars. Returns the requests
        whose grammar failed."""
        guided, self._guided = self._guided, []
        failed = self._matching.match(guided)
        for request, error in failed:
            self.fail(request, error, now, param="structured_outputs")
        return [request for request, _ in failed]

    def _append_several(
        self, requests: list[Request], result: StepResult, now: float, *, has_drafts: bool
    ) -> list[Request]:
        """Append `result.token_counts[i]` tokens to request i; tokens after its end are dropped.
        `has_drafts`: also count the accepted drafts as computed tokens."""
        finished = []
        start = 0
        for request, count in zip(requests, result.token_counts, strict=True):
            tokens, start = result.tokens[start : start + count], start + count
            if request.state == FINISHED:
                continue
            if has_drafts:
                request.num_computed_tokens += count - 1
            if _continues(request, tokens):
                # Hot path: most requests of a step accept all their tokens and continue.
                num_tokens = request.num_tokens = request.num_tokens + count
                request.output_token_ids.extend(tokens)
                if num_tokens > request.next_cache_at:
                    self._kv.cache_blocks(request, num_tokens - 1)
                self._add_tokens(request, tokens)
                if request.sampling.masked:
                    self._guided.append(request)
                continue
            accepted = tokens[: _num_accepted(request, tokens)]
            request.output_token_ids.extend(accepted)
            request.num_tokens += len(accepted)
            # The KV of the last token is not written yet.
            self._kv.cache_blocks(request, max(request.num_tokens - 1, request.num_prompt_tokens))
            self._add_tokens(request, accepted)
            if self._finish_at_end(request, accepted, now):
                finished.append(request)
            elif len(accepted) < count:
                if error := request.match_output():
                    self.fail(request, error, now, param="structured_outputs")
                else:
                    self._fail_without_token(request, now)
                finished.append(request)
            elif request.guide is not None:
                self._guided.append(request)
        return finished

    def _finish_at_end(self, request: Request, accepted: list[int], now: float) -> bool:
        """Finish the request if its last new token ends it. Returns whether it finished."""
        last = accepted[-1] if accepted else -1
        if last in request.end_ids and request.num_tokens > request.min_num_tokens:
            stop_token = last if last in request.stop_ids else None
            self.finish(request, "stop", now, stop_token=stop_token)
            return True
        if request.num_tokens >= request.max_num_tokens:
            self.finish(request, "length", now)
            return True
        return False

    def _add_tokens(self, request: Request, tokens: list[int]) -> None:
        if tokens:
            message = self._message(request.front_end)
            if len(message.counts) < len(message.keys):
                _pad_counts(message)
            message.keys.append(request.key)
            message.counts.append(len(tokens))
            message.tokens.extend(tokens)

    def _fail_without_token(self, request: Request, now: float) -> None:
        """Fail a request that could not sample a token: all tokens were banned, or its logits were
        not finite."""
        position = request.num_output_tokens + 1
        if request.has_no_allowed_token:
            num_allowed = num_ids(request.sampling.allowed_token_ids or ())
            error = (
                f"allowed_token_ids has {num_allowed} tokens, and bad_words or min_tokens exclude "
                f"all of them at output token {position}"
            )
            self.fail(request, error, now, param="allowed_token_ids")
            return
        # The request's KV may contain NaN: exclude it from the prefix cache.
        self._kv.evict(request)
        error = f"the logits of output token {position} were NaN or infinite"
        self.fail(request, error, now)

    def _send_logprobs(self, requests: list[Request], result: StepResult) -> None:
        """Send the log-probabilities of accepted tokens. Call before the tokens are appended."""
        counts = result.token_counts or repeat(1, len(requests))
        starts = list(accumulate(counts, initial=0))
        for index, logprobs in result.logprobs:
            i = bisect_right(starts, index) - 1
            request, tokens = requests[i], result.tokens[starts[i] : starts[i + 1]]
            is_accepted = index - starts[i] < _num_accepted(request, tokens)
            if is_accepted and request.state != FINISHED:
                self._message(request.front_end).logprobs.append((request.key, logprobs))

    def _send_prompt_logprobs(
        self, output: SchedulerOutput, columns: list[tuple[int, Logprobs]]
    ) -> None:
        """Send log-probabilities of prompt positions. Each position is sent once, even if it is
        recomputed after a preemption."""
        by_index = {chunk.request.req_index: chunk.request for chunk in output.prefills}
        for req_index, logprobs in columns:
            request = by_index[req_index]
            first = request.num_cached_tokens
            num_sent = max(request.num_prompt_logprobs - first, 0)
            count = len(memoryview(logprobs.ranks).cast("B")) // 4
            if request.state == FINISHED or count <= num_sent:
                continue
            request.num_prompt_logprobs = first + count
            unsent = _without_first(logprobs, num_sent) if num_sent else logprobs
            self._message(request.front_end).prompt_logprobs.append((request.key, unsent))

    def _message(self, front_end: int) -> StepOutput:
        message = self._messages.get(front_end)
        if message is None:
            message = self._messages[front_end] = StepOutput(self._step)
        return message

    def retract(self, request: Request) -> None:
        """Remove the queued start report of an aborted request."""
        message = self._messages.get(request.front_end)
        if message is not None and request.key in message.started:
            index = message.started.index(request.key)
            del message.started[index], message.started_cached[index]

    def discard(self, front_end: int) -> None:
        """Remove the queued message to a front end."""
        self._messages.pop(front_end, None)

    def take_messages(
        self, stats: EngineStats, front_ends: list[int]
    ) -> list[tuple[int, StepOutput]]:
        """One message with `stats` for each front end. The caller owns the messages."""
        messages, self._messages = self._messages, {}
        for front_end in front_ends:
            if front_end not in messages:
                messages[front_end] = StepOutput(self._step)
        for message in messages.values():
            message.step = self._step
            if message.counts:
                _pad_counts(message)
            message.stats = stats
        return list(messages.items())


def _continues(request: Request, tokens: list[int]) -> bool:
    """Whether a request accepts all of a step's tokens and certainly continues after them."""
    if request.num_tokens + len(tokens) >= request.max_num_tokens:
        return False
    end_ids = request.end_ids
    may_end = False
    for token in tokens:  # Faster than all() with a generator.
        may_end |= token < 0 or token in end_ids
    return not may_end


def _num_accepted(request: Request, tokens: list[int]) -> int:
    """How many of a step's tokens a request accepts: up to its end token, its length limit or a
    negative token."""
    count = 0
    room = request.max_num_tokens - request.num_tokens
    min_count = request.min_num_tokens - request.num_tokens
    for token in tokens:
        if token < 0 or count >= room:
            break
        count += 1
        if token in request.end_ids and count > min_count:
            break
    return count


def _pad_counts(message: StepOutput) -> None:
    """Append the implicit counts of 1 of keys that received a single token."""
    message.counts.extend([1] * (len(message.keys) - len(message.counts)))


def _without_first(logprobs: Logprobs, count: int) -> Logprobs:
    width = 4 * (logprobs.k + 1)
    return msgspec.structs.replace(
        logprobs,
        ids=memoryview(logprobs.ids).cast("B")[count * width :],
        values=memoryview(logprobs.values).cast("B")[count * width :],
        ranks=memoryview(logprobs.ranks).cast("B")[count * 4 :],
    )
