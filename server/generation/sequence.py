"""Output of a choice: converts token updates to final text, up to the stop string."""

from config.params.sampling import SamplingParams
from engine.client.output_queue import Update
from engine.transport.messages import Finish
from server.generation.logprobs import PromptLogprobs, read_logprobs
from server.generation.outputs import Delta, Prompt, Timing
from server.text.detokenizer import Detokenizer, make_detokenizer
from server.text.stop_strings import StopMatcher, Stopped
from server.text.tokenizer import Tokenizer


class NoText:
    """Reader of tokens whose text is not requested."""

    def read(self, tokens: list[int], num_before: int) -> tuple[str, int, str | None]:
        """Returns (final text, number of tokens up to the stop string, matched stop string).
        `num_before`: number of earlier output tokens."""
        return "", len(tokens), None

    def flush(self) -> tuple[str, str | None]:
        """Returns (buffered text at the end of the output, stop string in this text or None)."""
        return "", None


class PlainText(NoText):
    """Reader of text without stop strings."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def read(self, tokens: list[int], num_before: int) -> tuple[str, int, str | None]:
        return self._detokenizer.push(tokens), len(tokens), None

    def flush(self) -> tuple[str, str | None]:
        return self._detokenizer.flush(), None


class StoppedText(NoText):
    """Reader of text that ends at a stop string."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens

    def read(self, tokens: list[int], num_before: int) -> tuple[str, int, str | None]:
        text = ""
        for num_read, token in enumerate(tokens, start=1):
            armed = num_before + num_read >= self._min_tokens
            result = self._matcher.push(self._detokenizer.push([token]), armed=armed)
            if isinstance(result, Stopped):
                return text + result.text, num_read, result.stop
            text += result
        return text, len(tokens), None

    def flush(self) -> tuple[str, str | None]:
        result = self._matcher.push(self._detokenizer.flush())
        if isinstance(result, Stopped):
            return result.text, result.stop
        return result + self._matcher.flush(), None


class Sequence:
    """Converts the updates of a choice to deltas. The delta with a finish reason is the last
    delta."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        visible_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`visible_special_ids`: special tokens that always appear in the text."""
        self.index = index
        self.num_prompt_tokens = len(prompt.token_ids)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.is_finished = False
        self.timing = Timing()
        wants_prompt_logprobs = params.prompt_logprobs is not None and index % params.n == 0
        self.prompt_logprobs = PromptLogprobs(tokenizer) if wants_prompt_logprobs else None
        self.is_instant = params.max_tokens == 0 and not wants_prompt_logprobs
        """Whether the choice needs no engine, because neither output tokens nor prompt
        log-probabilities are requested."""
        self._params = params
        self._tokenizer = tokenizer
        self._text = NoText()
        if tokenizer is not None and params.detokenize:
            detokenizer = make_detokenizer(
                tokenizer,
                prompt.token_ids,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
                visible_special_ids,
            )
            self._text = StoppedText(detokenizer, params) if params.stop else PlainText(detokenizer)

    def take(self, update: Update, elapsed_s: float) -> Delta | None:
        """Convert an update to a delta; None without Finish if the update has no tokens, or if
        max_tokens is 0. `elapsed_s`: time since the start of the request."""
        if update.num_cached_tokens is not None:
            self.num_cached_tokens = update.num_cached_tokens
            self.timing.queue_s = elapsed_s
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.add(update.prompt_logprobs)
        finish = update.finish
        if finish is not None:
            self.is_finished = True
        if update.tokens and self._params.max_tokens != 0:
            self._measure(elapsed_s)
        if finish and (finish.queue_s or finish.prefill_s or finish.decode_s):
            self.timing = Timing(finish.queue_s, finish.prefill_s, finish.decode_s)
        if self._params.max_tokens == 0:
            return Delta(self.index, finish_reason="length") if finish else None
        return self._delta(update, finish) if update.tokens or finish else None

    def finish_without_output(self) -> Delta:
        """Finish a choice with max_tokens 0. Returns its only delta."""
        self.is_finished = True
        return Delta(self.index, finish_reason="length")

    def _measure(self, elapsed_s: float) -> None:
        timing = self.timing
        if not self.num_output_tokens:
            timing.prefill_s = elapsed_s - timing.queue_s
        timing.decode_s = elapsed_s - timing.queue_s - timing.prefill_s

    def _delta(self, update: Update, finish: Finish | None) -> Delta:
        tokens = update.tokens
        is_stopped = finish is not None and finish.reason == "stop"
        # The end token counts and is in token_ids, but is not part of the text.
        hides_last = is_stopped and not self._params.include_stop_str_in_output
        shown = tokens[:-1] if hides_last else tokens
        text, num_used, stop = self._text.read(shown, self.num_output_tokens)
        if stop is None:
            num_used = len(tokens)
            if finish is not None:
                tail, stop = self._text.flush()
                text += tail
        delta = Delta(self.index, text, tokens[:num_used], num_merged=update.num_merged)
        self.num_output_tokens += num_used
        if self._params.logprobs is not None:
            entries = [e for part in update.logprobs for e in read_logprobs(part, self._tokenizer)]
            delta.logprobs = entries[:num_used]
        if stop is not None:
            self.is_finished = True
            delta.finish_reason, delta.stop_reason = "stop", stop
        elif finish is not None:
            delta.finish_reason, delta.stop_reason = finish.reason, finish.stop_token
        return delta
