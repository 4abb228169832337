"""Beam search over an engine: every step asks it what may follow each beam. Knows no HTTP.

A beam's next step is a request of its own for one token, which finds all but the last block of the
beam in the prefix cache; it goes to the head of the line, since its search was let in before.
"""

import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from config.errors import UserError
from config.params.beam_search import check_length_penalty
from config.params.sampling import MAX_LOGPROBS, SamplingParams
from engine.client.zmq import Update
from engine.transport.messages import Finish
from server.generation.beams import Beam, BeamSearch
from server.generation.outputs import Delta, PositionLogprobs, Prompt
from server.generation.pipeline import Generation, Pipeline
from server.generation.sequence import Sequence
from server.generation.validation import check_comparable


class Search:
    """The best `params.n` ways to go on from each prompt, best first. As `Generation`, but the
    deltas come all at once, when the last search is over."""

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        length_penalty: float = 1.0,
        priority: int = 0,
        cache_salt: str = "",
        param: str = "messages",
        name: str = "",
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Check, then send the first step. The arguments are those of `Pipeline.start`, and so is
        what it raises; `params.n` is the width, and of the rest of `params` only what says where a
        beam ends and what is reported counts."""
        ready = pipeline.ready
        ends = frozenset() if params.ignore_eos else frozenset(ready.eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids) - ends
        check_length_penalty(length_penalty)
        check_comparable(ready.logprobs_mode, "use_beam_search")
        _check(params, len(ends | self._stop_ids), ready.vocab_size)
        self._params, limits = pipeline.checked(prompts, params, param)
        self._searches = [
            BeamSearch(params.n, limit, ends | self._stop_ids, length_penalty) for limit in limits
        ]
        self._pipeline = pipeline
        self._prompts = prompts
        self._shown = shown
        self._heads = [np.asarray(one.token_ids, dtype="<u4").tobytes() for one in prompts]
        self._add = partial(
            pipeline.client.add, priority=priority, cache_salt=cache_salt, name=name
        )
        self._step_params = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=max(self._searches[0].num_candidates, params.logprobs or 0),
            detokenize=False,
        )
        self._first_s: float | None = None
        """When the first step was there."""
        self._is_over = False
        self.num_output_tokens = 0
        self.decode_s = 0.0
        self._first = self._step = self._send(params.prompt_logprobs)

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counted once."""
        return self._first.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first step found in the prefix cache."""
        return self._first.num_cached_tokens

    @property
    def prompt_logprobs(self) -> list[list[PositionLogprobs | None] | None]:
        """One entry a prompt, None when not asked for."""
        return self._first.prompt_logprobs

    @property
    def queue_s(self) -> float:
        """Seconds until the first step left the waiting line."""
        return self._first.queue_s

    @property
    def prefill_s(self) -> float:
        """Seconds that the first step computed."""
        return self._first.prefill_s

    def __aiter__(self) -> "Search":
        return self

    async def __anext__(self) -> list[Delta]:
        if self._is_over:
            raise StopAsyncIteration
        while True:
            outputs = await self._step.collect()
            if self._is_over:
                # Aborted meanwhile: what came is not whole.
                raise StopAsyncIteration
            now_s = time.monotonic()
            self._first_s = self._first_s or now_s
            self.decode_s = now_s - self._first_s
            nexts = iter([output.logprobs[0] for output in outputs if output.logprobs])
            for search in self._searches:
                if search.running:
                    search.grow([next(nexts) for _ in search.running])
            if not any(search.running for search in self._searches):
                break
            self._step = self._send(None)
        self._is_over = True
        return list(self._found())

    @property
    def best(self) -> list[list[Beam]]:
        """The beams that have ended, best first, of each prompt."""
        return [search.ended for search in self._searches]

    def abort(self) -> None:
        """Forget it all, now. Iteration ends; safe at any moment, and twice."""
        self._is_over = True
        self._step.abort()

    def _send(self, prompt_logprobs: int | None) -> Generation:
        """Ask what may follow each running beam of each search."""
        params = self._step_params.replace(prompt_logprobs=prompt_logprobs)
        running = [
            (prompt, head, beam)
            for prompt, head, search in zip(self._prompts, self._heads, self._searches, strict=True)
            for beam in search.running
        ]
        tokenizer = self._pipeline.tokenizer
        step = Generation(self._pipeline.client, [prompt for prompt, _, _ in running], 1)
        try:
            for place, (prompt, head, beam) in enumerate(running):
                tokens = head + np.asarray(beam.tokens, dtype="<u4").tobytes()
                box = self._add(tokens, params, goes_on=bool(beam.tokens))
                step.open(Sequence(place, prompt, params, tokenizer), box)
        except BaseException:
            step.abort()
            raise
        return step

    def _found(self) -> Iterator[Delta]:
        width = self._params.n
        for place, (prompt, search) in enumerate(zip(self._prompts, self._searches, strict=True)):
            for rank, beam in enumerate(search.ended):
                yield self._told(place * width + rank, prompt, beam)

    def _told(self, index: int, prompt: Prompt, beam: Beam) -> Delta:
        """A beam in the form of a choice that came in one piece."""
        params = self._params.replace(logprobs=None, prompt_logprobs=None)
        sequence = Sequence(index, prompt, params, self._pipeline.tokenizer, self._shown)
        last = beam.tokens[-1]
        finish = Finish(0, "length")
        if beam.ends:
            finish = Finish(0, "stop", stop_token=last if last in self._stop_ids else None)
        delta = sequence.take(Update(tokens=beam.tokens, finish=finish), 0.0)
        assert delta is not None
        self.num_output_tokens += sequence.num_output_tokens
        shown = self._params.logprobs
        if shown is not None:
            delta.logprobs = [
                PositionLogprobs(position.chosen, position.top[:shown])
                for position in beam.positions
            ]
        return delta


def _check(params: SamplingParams, num_ends: int, vocab_size: int) -> None:
    most = min(MAX_LOGPROBS, vocab_size) - num_ends
    if params.n > most:
        raise UserError(
            f"the beam width n is {params.n}, with {num_ends} end tokens it may be {most} at most",
            param="n",
        )
    if params.max_tokens == 0:
        raise UserError("max_tokens is 0, a beam search needs at least 1", param="max_tokens")
