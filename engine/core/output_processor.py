"""OutputProcessor: results to tokens, ends, and one message a front-end. Knows no queue and no
executor."""

import msgspec

from engine.core.request import ENDED, Request
from engine.kv_cache.manager import KVCacheManager
from engine.scheduling.scheduler import SchedulerOutput
from engine.transport.messages import FRONT_END_SHIFT, EngineStats, Finish, StepOutput
from hpu.protocol import Logprobs, StepResult


class OutputProcessor:
    """Extends requests by what a step sampled, and collects what each front-end must hear."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._step = -1
        self._messages: dict[int, StepOutput] = {}

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def start(self, request: Request, num_cached: int, now: float) -> None:
        """It left the waiting line, with so many prompt tokens found in the cache."""
        request.started_at = now
        message = self._message(request.front_end)
        message.started.append(request.key)
        message.started_cached.append(num_cached)

    def refuse(
        self, key: int, error: str, param: str | None = None, *, is_late: bool = False
    ) -> None:
        """The last word on a request that never got in line."""
        finish = Finish(key, "error", error=error, param=param, is_late=is_late)
        self._message(key >> FRONT_END_SHIFT).finished.append(finish)

    def finish(
        self,
        request: Request,
        reason: str,
        now: float,
        *,
        stop_token: int | None = None,
        error: str | None = None,
        param: str | None = None,
        is_late: bool = False,
    ) -> None:
        """The last word on a request."""
        started = request.started_at if request.started_at >= 0 else now
        first = request.first_token_at if request.first_token_at >= 0 else now
        self._message(request.front_end).finished.append(
            Finish(
                request.key,
                reason,
                stop_token=stop_token,
                error=error,
                queue_s=started - request.arrived_at,
                prefill_s=first - started,
                decode_s=now - first,
                num_preemptions=request.num_preemptions,
                param=param,
                is_late=is_late,
            )
        )

    def apply(self, decision: SchedulerOutput, result: StepResult, now: float) -> list[Request]:
        """Take in what a plan produced; returns who ended by it, each finished already.

        Tokens of requests that ended before are dropped: those were planned once too often.
        """
        assert result.step == decision.step, f"result {result.step} for plan {decision.step}"
        self._step = result.step
        if decision.plan is not None and decision.plan.texts:
            return self._accept_vectors(decision, result, now)
        tokens = result.tokens
        decodes = decision.decodes
        sampling = [chunk.request for chunk in decision.prefills if chunk.samples]
        expected = len(decodes) + len(sampling)
        assert len(tokens) == expected, f"{len(tokens)} tokens for {expected} sampling rows"
        if result.logprobs:
            self._send_logprobs([*decodes, *sampling], result)
        if result.prompt_logprobs:
            self._send_prompt_logprobs(decision, result.prompt_logprobs)
        for request, count, _, _ in decision.prefills:
            request.written += count
        ended = self._accept(decodes, tokens[: len(decodes)], now)
        if decision.prefills:
            ended += self._accept_prefills(decision, tokens[len(decodes) :], now)
        return ended

    def _accept_vectors(
        self, decision: SchedulerOutput, result: StepResult, now: float
    ) -> list[Request]:
        """A pooling model's requests end with their first step."""
        ended = []
        for chunk, (num_rows, data) in zip(decision.prefills, result.vectors, strict=True):
            request = chunk.request
            if request.state == ENDED:
                continue
            request.first_token_at = now
            ended.append(request)
            if num_rows < 0:
                self.finish(request, "error", now, error="the model's vectors were not numbers")
                continue
            message = self._message(request.front_end)
            message.vectors.append((request.key, num_rows, data))
            self.finish(request, "stop", now)
        return ended

    def _accept_prefills(
        self, decision: SchedulerOutput, tokens: list[int], now: float
    ) -> list[Request]:
        sampling = []
        for request, _, _, samples in decision.prefills:
            if samples:
                sampling.append(request)
                if request.first_token_at < 0:
                    request.first_token_at = now
            elif request.state != ENDED:
                self._kv.file(request, request.written)
        return self._accept(sampling, tokens, now)

    def _accept(self, requests: list[Request], tokens: list[int], now: float) -> list[Request]:
        """Every row's token goes through here, so this loop is kept short."""
        ended = []
        front_end = -1
        for request, token in zip(requests, tokens, strict=True):
            if request.state == ENDED:
                continue
            if token < 0:
                self._fail(request, now)
                ended.append(request)
                continue
            known = request.known
            if known >= request.file_at:
                self._kv.file(request, known)
            if known >= request.max_known:  # asked for no token, only for its prompt's scores
                self.finish(request, "length", now)
                ended.append(request)
                continue
            if request.front_end != front_end:
                front_end = request.front_end
                message = self._message(front_end)
                to_keys, to_tokens = message.keys.append, message.tokens.append
            to_keys(request.key)
            to_tokens(token)
            request.outputs.append(token)
            request.known = known + 1
            if token in request.end_ids and known >= request.min_known:
                stop_token = token if token in request.stop_ids else None
                self.finish(request, "stop", now, stop_token=stop_token)
                ended.append(request)
            elif known + 1 >= request.max_known:
                self.finish(request, "length", now)
                ended.append(request)
            elif request.guide is not None and (error := request.follow(token)):
                self.finish(request, "error", now, error=error, param="structured_outputs")
                ended.append(request)
        return ended

    def _fail(self, request: Request, now: float) -> None:
        place = request.num_outputs + 1
        if request.is_cornered:
            allowed = len(request.sampling.allowed_token_ids or ())
            why = (
                f"allowed_token_ids has {allowed} tokens, and bad_words or min_tokens bar every "
                f"one of them as output token {place}"
            )
            self.finish(request, "error", now, error=why, param="allowed_token_ids")
            return
        # Its cache may be poisoned too, so nobody may find it.
        self._kv.distrust(request)
        self.finish(
            request, "error", now, error=f"the logits of output token {place} were not numbers"
        )

    def _send_logprobs(self, requests: list[Request], result: StepResult) -> None:
        for index, logprobs in result.logprobs:
            request = requests[index]
            wanted = request.state != ENDED and request.known < request.max_known
            if wanted and result.tokens[index] >= 0:
                self._message(request.front_end).logprobs.append((request.key, logprobs))

    def _send_prompt_logprobs(
        self, decision: SchedulerOutput, columns: list[tuple[int, Logprobs]]
    ) -> None:
        """Each prompt position once, though a preemption has them computed again."""
        by_row = {chunk.request.row: chunk.request for chunk in decision.prefills}
        for row, logprobs in columns:
            request = by_row[row]
            first = request.written
            done = max(request.num_scored - first, 0)
            count = len(memoryview(logprobs.ranks).cast("B")) // 4
            if request.state == ENDED or count <= done:
                continue
            request.num_scored = first + count
            rest = _without_first(logprobs, done) if done else logprobs
            self._message(request.front_end).prompt_logprobs.append((request.key, rest))

    def _message(self, front_end: int) -> StepOutput:
        message = self._messages.get(front_end)
        if message is None:
            message = self._messages[front_end] = StepOutput(self._step)
        return message

    def retract(self, request: Request) -> None:
        """Leave out what has not been sent of a request that was aborted."""
        message = self._messages.get(request.front_end)
        if message is not None and request.key in message.started:
            index = message.started.index(request.key)
            del message.started[index], message.started_cached[index]

    def take(self, stats: EngineStats, front_ends: list[int]) -> list[tuple[int, StepOutput]]:
        """One message for each front-end, with `stats`; they are the receiver's from now on."""
        messages, self._messages = self._messages, {}
        for front_end in front_ends:
            if front_end not in messages:
                messages[front_end] = StepOutput(self._step)
        for message in messages.values():
            message.step = self._step
            message.counts = [1] * len(message.keys)
            message.stats = stats
        return list(messages.items())

    def forget(self, front_end: int) -> None:
        """Drop what a front-end that is gone would have heard."""
        self._messages.pop(front_end, None)


def _without_first(logprobs: Logprobs, count: int) -> Logprobs:
    width = 4 * (logprobs.k + 1)
    return msgspec.structs.replace(
        logprobs,
        ids=memoryview(logprobs.ids).cast("B")[count * width :],
        values=memoryview(logprobs.values).cast("B")[count * width :],
        ranks=memoryview(logprobs.ranks).cast("B")[count * 4 :],
    )
