"""Beam search on top of an engine, with the semantics of transformers' `generate(num_beams=...)`.

Each step sends a request for a single token for each running beam. From the second step on, the
engine normally starts these requests before new requests of the same priority.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from config.errors import UserError
from config.fair_threads import current_client
from config.params.beam_search import check_length_penalty
from config.params.sampling import MAX_LOGPROBS, SamplingParams
from config.params.token_ids import token_array
from engine.client.output_queue import Update
from engine.client.request_limits import DEFAULT_TERMS, RequestTerms
from engine.transport.messages import UNSENT, AddRequest, Finish
from server.generation.logprobs import PositionLogprobs, PromptLogprobs, TokenLogprob
from server.generation.outputs import Delta, Prompt, Timing
from server.generation.pipeline import (
    TOKENS_PER_SEQUENCE,
    Generation,
    Pauses,
    Pipeline,
)
from server.generation.sequence import Sequence
from server.generation.validation import check_comparable

TOKEN_TYPE = np.dtype("<u4")
"""Type of token ids in AddRequest.prompt."""
KeptLogprobs = tuple[PositionLogprobs, "KeptLogprobs"] | tuple[()]
"""Log-probabilities of the last token, then of the tokens before; empty before the first token."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A candidate continuation of the prompt. Beams share the log-probabilities of their common
    tokens, so that a step takes little longer for long beams."""

    token_bytes: bytes = b""
    """Token ids, as in AddRequest.prompt."""
    kept: KeptLogprobs = ()
    """One entry per token with that token as the chosen token; empty if no log-probabilities are
    kept."""
    logprob: float = 0.0
    """Sum of the log-probabilities of all tokens."""
    is_finished: bool = False
    """Whether the last token is an end token."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_bytes) // TOKEN_TYPE.itemsize

    @property
    def tokens(self) -> list[int]:
        """Token ids."""
        ids: list[int] = np.frombuffer(self.token_bytes, TOKEN_TYPE).tolist()
        return ids

    @property
    def positions(self) -> list[PositionLogprobs]:
        """One entry per token; empty if no log-probabilities are kept."""
        found, kept = [], self.kept
        while kept:
            position, kept = kept
            found.append(position)
        return found[::-1]

    def score(self, length_penalty: float) -> float:
        """Score of the beam: logprob / length ** length_penalty. The length includes the end
        token."""
        return float(self.logprob / self.num_tokens**length_penalty)


class BeamSearch:
    """Beam search for a single prompt, without an engine: at most `width` running beams.

    In each step, continuations among the `width` best that end with an end token become finished
    beams, and the `width` best continuations without an end token keep running. The search ends
    after `max_tokens` tokens, where the `width` best continuations all become finished beams, or
    when `width` beams are finished and the best running beam, scored at its current length, is not
    better than the worst finished beam.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        end_ids: frozenset[int],
        length_penalty: float,
        num_kept: int | None = None,
    ) -> None:
        """`num_kept`: number of most likely tokens to keep for each token; None: keep no
        log-probabilities."""
        self.running = [Beam()]
        self.finished: list[Beam] = []
        """The best finished beams so far, best first; `width` beams at the end of the search."""
        self._width = width
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._length_penalty = length_penalty
        self._num_kept = num_kept

    @property
    def num_candidates(self) -> int:
        """Number of candidates needed for each running beam: all end tokens may be among them, and
        `width` other tokens must remain."""
        return self._width + len(self._end_ids)

    def step(self, next_tokens: list[PositionLogprobs]) -> None:
        """Extend the beams by a token. `next_tokens`: candidates of each running beam, most likely
        first."""
        candidates = [
            (beam.logprob + token.logprob, beam, token, position.top)
            for beam, position in zip(self.running, next_tokens, strict=True)
            for token in position.top[: self.num_candidates]
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        is_last_step = self.running[0].num_tokens + 1 == self._max_tokens
        finished: list[Beam] = []
        running: list[Beam] = []
        for index, (logprob, beam, token, top) in enumerate(candidates):
            is_end = token.token_id in self._end_ids
            is_best = index < self._width
            if not is_best and len(running) == self._width:
                break
            if not is_best and is_end:
                continue
            extended = Beam(
                beam.token_bytes + token.token_id.to_bytes(TOKEN_TYPE.itemsize, "little"),
                self._kept(beam, token, top),
                logprob,
                is_end,
            )
            if is_best and (is_last_step or is_end):
                finished.append(extended)
            if not is_end:
                running.append(extended)
        self._finish(finished)
        self.running = running
        if is_last_step or self._cannot_improve():
            self.running = []

    def _kept(self, beam: Beam, token: TokenLogprob, top: tuple[TokenLogprob, ...]) -> KeptLogprobs:
        if self._num_kept is None:
            return ()
        return PositionLogprobs(token, top[: self._num_kept]), beam.kept

    def _finish(self, beams: list[Beam]) -> None:
        best_first = sorted(
            [*self.finished, *beams], key=lambda beam: -beam.score(self._length_penalty)
        )
        self.finished = best_first[: self._width]

    def _cannot_improve(self) -> bool:
        if len(self.finished) < self._width:
            return False
        best_score = self.running[0].score(self._length_penalty)
        return best_score <= self.finished[-1].score(self._length_penalty)


class BeamSearchGeneration:
    """GenerationStream with the best `params.n` continuations of each prompt, best first. The
    deltas, one for each choice, arrive when the searches of all prompts have ended."""

    keeps_candidates = False
    """Whether `beams` have the log-probabilities of all candidates of each token, and not only the
    requested log-probabilities."""

    @classmethod
    async def start(
        cls,
        pipeline: Pipeline,
        prompts: list[Prompt],
        params: SamplingParams,
        terms: RequestTerms = DEFAULT_TERMS,
        *,
        length_penalty: float = 1.0,
        param: str = "messages",
        visible_special_ids: frozenset[int] = frozenset(),
        admit: Callable[[], None] = lambda: None,
    ) -> "BeamSearchGeneration":
        """Check the request, call `admit` and send the first step. Raises the exceptions of
        `Pipeline.start` and `admit`, and UserError for parameters that beam search does not
        support. The sampling parameters in `params`, such as temperature, have no effect."""
        check_length_penalty(length_penalty)
        check_comparable(pipeline.ready.logprobs_mode, "use_beam_search")
        params, output_limits = await pipeline.check_request(prompts, params, param)
        admit()
        return cls(
            pipeline,
            prompts,
            params,
            terms,
            output_limits,
            length_penalty,
            visible_special_ids,
        )

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: list[Prompt],
        params: SamplingParams,
        terms: RequestTerms,
        output_limits: list[int],
        length_penalty: float,
        visible_special_ids: frozenset[int],
    ) -> None:
        """`params` and `output_limits`: results of `Pipeline.check_request`."""
        ready = pipeline.ready
        eos_ids = frozenset() if params.ignore_eos else frozenset(ready.eos_token_ids)
        self._stop_ids = frozenset(token_array(params.stop_token_ids).tolist()) - eos_ids
        end_ids = eos_ids | self._stop_ids
        _check_params(params, len(end_ids), ready.vocab_size)
        self._params = params
        num_kept = params.n + len(end_ids) if self.keeps_candidates else params.logprobs
        self._searches = [
            BeamSearch(params.n, limit, end_ids, length_penalty, num_kept)
            for limit in output_limits
        ]
        self._pipeline = pipeline
        self._prompts = prompts
        self._visible_special_ids = visible_special_ids
        self._images = [pipeline.image_fields(prompt, terms) for prompt in prompts]
        self._prompt_bytes = [np.asarray(p.token_ids, dtype=TOKEN_TYPE).tobytes() for p in prompts]
        self._make_request = partial(
            AddRequest,
            UNSENT,
            priority=terms.priority,
            cache_salt=terms.cache_salt,
            name=terms.name,
        )
        self._limits = terms.limits
        self._step_params = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=max(self._searches[0].num_candidates, params.logprobs or 0),
            detokenize=False,
        )
        self._first_step_ended_s: float | None = None
        self._is_over = False
        """Whether the search has ended or was aborted."""
        self._ended: Iterator[Delta] = iter(())
        """The deltas that have not been returned yet, once the search has ended."""
        self.num_output_tokens = 0
        self._decode_s = 0.0
        for _ in self._send_step(params.prompt_logprobs):
            pass
        self._first_step = self._step

    @property
    def engine(self) -> int:
        """Engine that ran the first step of the first prompt."""
        return self._first_step.engine

    @property
    def num_sequences(self) -> int:
        """Number of beams that are returned, over all prompts."""
        return len(self._prompts) * self._params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens; each prompt is counted once."""
        return self._first_step.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first step found in the prefix cache."""
        return self._first_step.num_cached_tokens

    @property
    def prompt_logprobs(self) -> list[PromptLogprobs | None]:
        """One entry per prompt; None unless requested."""
        return self._first_step.prompt_logprobs

    @property
    def num_unread_bytes(self) -> int:
        """Estimated memory of the current step's output that has not been read yet."""
        return self._step.num_unread_bytes

    @property
    def timing(self) -> Timing:
        """Timing of the search: queue and prefill time of the first step; all later steps count as
        decode time."""
        return replace(self._first_step.timing, decode_s=self._decode_s)

    def __aiter__(self) -> "BeamSearchGeneration":
        return self

    async def __anext__(self) -> list[Delta]:
        if not self._is_over:
            await self._search()
        # One delta at a time: converting the tokens of all beams may take seconds.
        delta = next(self._ended, None)
        if delta is None:
            raise StopAsyncIteration
        client = current_client.get() or ""
        await self._pipeline.output_pacer.wait(client, max(1, len(delta.token_ids)))
        return [delta]

    async def _search(self) -> None:
        while True:
            outputs = await self._step.collect()
            if self._is_over:
                # Aborted during this step: the outputs are incomplete.
                return
            now_s = time.monotonic()
            self._first_step_ended_s = self._first_step_ended_s or now_s
            self._decode_s = now_s - self._first_step_ended_s
            next_tokens = iter([output.logprobs[0] for output in outputs if output.logprobs])
            pauses = Pauses(self._pipeline.pacer)
            for search in self._searches:
                if search.running:
                    search.step([next(next_tokens) for _ in search.running])
                    await pauses.after(len(search.running) * TOKENS_PER_SEQUENCE)
            if self._is_over:
                return
            if not any(search.running for search in self._searches):
                break
            for num_tokens in self._send_step(None):
                await pauses.after(num_tokens + TOKENS_PER_SEQUENCE)
                if self._is_over:
                    return
        self._is_over = True
        self._ended = self._deltas()

    @property
    def beams(self) -> list[list[Beam]]:
        """The finished beams of each prompt, best first."""
        return [search.finished for search in self._searches]

    def abort(self) -> None:
        """Abort the search and end the iteration. May be called at any time and more than once."""
        self._is_over, self._ended = True, iter(())
        self._step.abort()

    def _send_step(self, prompt_logprobs: int | None) -> Iterator[int]:
        """Request the next token of each running beam of each search; stores the requests in
        `_step`. Yields the number of tokens of each sent request."""
        params = self._step_params.replace(prompt_logprobs=prompt_logprobs)
        running = [
            (prompt, prompt_bytes, images, beam)
            for prompt, prompt_bytes, images, search in zip(
                self._prompts, self._prompt_bytes, self._images, self._searches, strict=True
            )
            for beam in search.running
        ]
        tokenizer = self._pipeline.tokenizer
        prompts = [prompt for prompt, _, _, _ in running]
        step = self._step = Generation(
            self._pipeline.client, prompts, 1, self._pipeline.output_pacer
        )
        try:
            for index, (prompt, prompt_bytes, images, beam) in enumerate(running):
                request = self._make_request(
                    memoryview(prompt_bytes + beam.token_bytes),
                    params,
                    is_continuation=bool(beam.token_bytes),
                    **images,
                )
                queue = self._pipeline.client.add(request, self._limits)
                step.open(Sequence(index, prompt, params, tokenizer), queue)
                yield len(prompt.token_ids) + beam.num_tokens
        except BaseException:
            step.abort()
            raise

    def _deltas(self) -> Iterator[Delta]:
        width = self._params.n
        for prompt_index, (prompt, search) in enumerate(
            zip(self._prompts, self._searches, strict=True)
        ):
            for rank, beam in enumerate(search.finished):
                yield self._delta(prompt_index * width + rank, prompt, beam)

    def _delta(self, index: int, prompt: Prompt, beam: Beam) -> Delta:
        params = self._params.replace_unchecked(logprobs=None, prompt_logprobs=None)
        sequence = Sequence(
            index, prompt, params, self._pipeline.tokenizer, self._visible_special_ids
        )
        tokens = beam.tokens
        last = tokens[-1]
        finish = Finish(0, "length")
        if beam.is_finished:
            finish = Finish(0, "stop", stop_token=last if last in self._stop_ids else None)
        delta = sequence.take(Update(tokens=tokens, finish=finish), 0.0)
        assert delta is not None
        self.num_output_tokens += sequence.num_output_tokens
        delta.logprobs = beam.positions or None
        return delta


class CandidateBeamSearch(BeamSearchGeneration):
    """Beam search whose `beams` have the log-probabilities of all candidates."""

    keeps_candidates = True


def _check_params(params: SamplingParams, num_end_ids: int, vocab_size: int) -> None:
    max_width = min(MAX_LOGPROBS, vocab_size) - num_end_ids
    if params.n > max_width:
        raise UserError(
            f"the beam width n is {params.n}, it must be at most {max_width} with {num_end_ids} "
            "end tokens",
            param="n",
        )
    if params.max_tokens == 0:
        raise UserError(
            "max_tokens is 0, it must be at least 1 with use_beam_search", param="max_tokens"
        )
